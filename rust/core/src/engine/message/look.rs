//! A receive that looks for its message on the link before it is started: for short messages of blocking calls.

use std::sync::Arc;

use super::frame::{Frame, Kind};
use super::matching::{Finished, Matching};
use super::peer::Sink;
use super::receive::take_whole;
use crate::buffer::Memory;
use crate::engine::links::LinkTable;
use crate::engine::work::WorkState;
use crate::error::Result;
use crate::transport::endpoint::Lane;
use crate::types::{DataType, Rank};

/// The message that a receive asks for before it has been started.
pub(crate) struct Wanted<'a> {
    pub(crate) from: Rank,
    pub(crate) tag: u64,
    pub(crate) dtype: DataType,
    pub(crate) memory: &'a mut Memory,
    /// How much of the payload has come, once the message has begun to.
    pub(crate) arrived: Option<usize>,
}

impl Wanted<'_> {
    fn is_met_by(&self, frame: &Frame) -> bool {
        frame.kind == Kind::Eager
            && frame.tag == self.tag
            && frame.dtype == self.dtype as u8
            && !frame.is_note
            && frame.bytes == self.memory.len() as u64
    }
}

/// The result of a look by such a receive.
pub(crate) enum Look {
    Received,
    /// A part of the message.
    Some,
    Nothing,
    /// Something that only a receive that has been started can deal with.
    Otherwise,
}

impl Matching {
    /// Whether a receive from `from` may look for its message on the link: no other receive, and nothing that came
    /// before, could have to do with it.
    pub(crate) fn may_look(&self, from: Rank) -> bool {
        from != self.rank
            && self.posted.is_empty()
            && !self.kept.has_of(from)
            && self.peers[from].sink.is_none()
            && self.peers[from].held.is_none()
    }

    /// Receives a short message if it is the next that came. Anything else that came is taken in.
    pub(crate) fn look(
        &mut self,
        links: &mut LinkTable,
        wanted: &mut Wanted<'_>,
        finished: &mut Finished,
    ) -> Result<Look> {
        let from = wanted.from;
        if wanted.memory.len() > self.eager_bytes {
            // It may be offered, and is declined unless the receive has been started.
            return Ok(Look::Otherwise);
        }
        let Some(open) = links.open(Lane::PointToPoint, from) else {
            return Ok(Look::Otherwise);
        };
        if wanted.arrived.is_none() {
            if let Some(frame) = take_whole(open, from, &mut self.inbox)? {
                if !wanted.is_met_by(&frame) || wanted.memory.len() != self.inbox.len() {
                    self.take_in(from, frame, &mut open.link, finished)?;
                    return Ok(Look::Otherwise);
                }
                wanted.memory.copy_from(0, &self.inbox);
                return self.finish_look(wanted, links, finished);
            }
            if open.header_bytes == 0 && !open.link.is_streaming()? {
                return Ok(Look::Nothing);
            }
            if open.post_limit == 0 {
                // Each look would be a system call.
                return Ok(Look::Otherwise);
            }
            if !open.read_header()? {
                return Ok(Look::Nothing);
            }
            open.header_bytes = 0;
            let frame = Frame::decode(&open.header, from)?;
            if !wanted.is_met_by(&frame) {
                self.accept(from, frame, &mut open.link, finished)?;
                return Ok(Look::Otherwise);
            }
        }
        let (before, length) = (wanted.arrived.unwrap_or(0), wanted.memory.len());
        let mut arrived = before;
        while arrived < length {
            let rest = wanted.memory.write(arrived, length - arrived);
            match open.link.try_recv(rest)? {
                0 => break,
                count => arrived += count,
            }
        }
        wanted.arrived = Some(arrived);
        if arrived == length {
            return self.finish_look(wanted, links, finished);
        }
        Ok(match arrived > before {
            true => Look::Some,
            false => Look::Nothing,
        })
    }

    fn finish_look(
        &mut self,
        wanted: &Wanted<'_>,
        links: &mut LinkTable,
        finished: &mut Finished,
    ) -> Result<Look> {
        let from = wanted.from;
        self.peers[from].give_back(wanted.memory.len());
        if !self.peers[from].outgoing.is_empty() {
            self.advance_outgoing(from, links, finished)?;
        }
        Ok(Look::Received)
    }

    /// Starts the receive of a message whose beginning was found.
    pub(crate) fn receive_rest(&mut self, wanted: Wanted<'_>, work: &Arc<WorkState>) {
        debug_assert!(wanted.arrived.is_some() && self.peers[wanted.from].sink.is_none());
        self.note_deadline(work);
        self.peers[wanted.from].sink = Some(Sink::Receive {
            memory: std::mem::replace(wanted.memory, Memory::empty()),
            dtype: wanted.dtype,
            work: Arc::clone(work),
            done: wanted.arrived.unwrap_or(0),
            eager: true,
        });
    }
}
