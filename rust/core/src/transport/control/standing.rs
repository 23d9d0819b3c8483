//! The frames that hold until they are said otherwise. When another socket takes the place of a broken one, nothing is known of
//! the fate of the last frames, so these are said again; to hear one twice changes nothing.

use super::Frame;
use crate::transport::{Notice, Position};

/// The words of this side that still hold.
#[derive(Debug, Default)]
pub(super) struct Standing {
    framing: Option<u64>,
    framing_heard: bool,
    position: Option<Position>,
    abort: Option<Notice>,
    farewell: bool,
}

impl Standing {
    pub(super) fn note(&mut self, frame: &Frame) {
        match frame {
            Frame::Framing(from) => self.framing = Some(*from),
            Frame::FramingHeard => self.framing_heard = true,
            Frame::Position(position) => self.position = Some(*position),
            Frame::Abort(notice) => self.abort = Some(notice.clone()),
            Frame::Farewell => self.farewell = true,
            _ => {}
        }
    }

    /// The frames, in the order in which they are to be said.
    pub(super) fn frames(&self) -> impl Iterator<Item = Frame> {
        let bare = |said: bool, frame| said.then_some(frame);
        [
            self.framing.map(Frame::Framing),
            bare(self.framing_heard, Frame::FramingHeard),
            self.position.map(Frame::Position),
            self.abort.clone().map(Frame::Abort),
            bare(self.farewell, Frame::Farewell),
        ]
        .into_iter()
        .flatten()
    }
}
