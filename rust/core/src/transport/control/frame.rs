//! The frames of a control channel, and how they are written.

use super::super::tcp::mending::SocketId;
use super::super::{Notice, Position};
use crate::error::{Code, ForeignText};
use crate::heap::Identity;

/// The longest text of a [`Notice`] that travels, in bytes; longer ones are cut between characters.
pub(crate) const MAX_MESSAGE: usize = 4096;

pub(super) const DOORBELL: u8 = 1;
pub(super) const ABORT: u8 = 2;
pub(super) const FAREWELL: u8 = 3;
pub(super) const QUESTION: u8 = 4;
pub(super) const POSITION: u8 = 5;
pub(super) const SEGMENT: u8 = 6;
pub(super) const SEGMENT_ANSWER: u8 = 7;
pub(super) const SEGMENT_GONE: u8 = 8;
pub(super) const ANSWER: u8 = 9;
pub(super) const FRAMING: u8 = 10;
pub(super) const FRAMING_HEARD: u8 = 11;
pub(super) const BROKEN: u8 = 12;

/// Kind and length.
const HEADER: usize = 3;
/// Code, origin, whether there is a culprit, culprit.
const NOTICE_HEADER: usize = 1 + 4 + 1 + 4;
const MAX_PAYLOAD: usize = NOTICE_HEADER + MAX_MESSAGE;

/// One frame of the control channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// Wakes a sleeper; says nothing else.
    Doorbell,
    /// The sender aborted its group.
    Abort(Notice),
    /// The sender closes in good order and will send no more.
    Farewell,
    /// The sender waits for the receiver, and asks whether its process runs.
    Question,
    /// It does: the answer to [`Frame::Question`].
    Answer,
    /// The operation that the sender is in, and in which it waits for the receiver.
    Position(Position),
    /// From this byte on the link's stream from the sender consists of frames.
    Framing(u64),
    /// The answer to [`Frame::Framing`].
    FramingHeard,
    /// A connection that the receiver opens has broken, as the sender sees it.
    Broken(SocketId),
    /// A segment of the sender's heap, for the receiver to map. Its descriptor travels with the first byte.
    Segment(Identity),
    /// Whether the receiver of [`Frame::Segment`] has mapped it.
    SegmentAnswer {
        /// The segment's number.
        segment: u32,
        /// Whether it has.
        mapped: bool,
    },
    /// The sender has given a segment back and will not refer to it again.
    SegmentGone(u32),
}

impl Frame {
    /// Reads the frame at the start of `bytes` and says how long it is; `None` when more bytes are
    /// needed.
    ///
    /// # Errors
    /// A description of the bytes when they are no frame.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let kind = match bytes.first() {
            None => return Ok(None),
            Some(&DOORBELL) => return Ok(Some((Self::Doorbell, 1))),
            Some(&kind @ ABORT..=BROKEN) => kind,
            Some(kind) => return Err(format!("unknown frame kind {kind:#04x}")),
        };
        let &[_, low, high, ref rest @ ..] = bytes else {
            return Ok(None);
        };
        let length = usize::from(u16::from_le_bytes([low, high]));
        let is_bare = matches!(kind, FAREWELL | QUESTION | ANSWER | FRAMING_HEARD);
        if length > MAX_PAYLOAD || (is_bare && length != 0) {
            return Err(format!("frame kind {kind:#04x} of {length} bytes"));
        }
        let Some(payload) = rest.get(..length) else {
            return Ok(None);
        };
        let frame = match kind {
            ABORT => Self::Abort(parse_notice(payload)?),
            FAREWELL => Self::Farewell,
            POSITION => Self::Position(
                payload
                    .try_into()
                    .map_err(|_| format!("position of {length} bytes"))?,
            ),
            SEGMENT | SEGMENT_ANSWER | SEGMENT_GONE => parse_segment(kind, payload)
                .ok_or_else(|| format!("frame kind {kind:#04x} of {length} bytes"))?,
            FRAMING => Self::Framing(
                payload
                    .try_into()
                    .map(u64::from_le_bytes)
                    .map_err(|_| format!("announcement of frames of {length} bytes"))?,
            ),
            FRAMING_HEARD => Self::FramingHeard,
            BROKEN => Self::Broken(
                payload
                    .try_into()
                    .ok()
                    .and_then(SocketId::read)
                    .ok_or_else(|| format!("break of a connection of {length} bytes"))?,
            ),
            QUESTION => Self::Question,
            _ => Self::Answer,
        };
        Ok(Some((frame, HEADER + length)))
    }

    /// Appends the frame's bytes to `out`.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Doorbell => out.push(DOORBELL),
            Self::Farewell => out.extend_from_slice(&[FAREWELL, 0, 0]),
            Self::Question => out.extend_from_slice(&[QUESTION, 0, 0]),
            Self::Answer => out.extend_from_slice(&[ANSWER, 0, 0]),
            Self::FramingHeard => out.extend_from_slice(&[FRAMING_HEARD, 0, 0]),
            Self::Framing(from) => {
                out.extend_from_slice(&[FRAMING, 8, 0]);
                out.extend_from_slice(&from.to_le_bytes());
            }
            Self::Broken(socket) => {
                out.extend_from_slice(&[BROKEN, SocketId::BYTES as u8, 0]);
                out.extend_from_slice(&socket.write());
            }
            Self::Position(position) => {
                out.push(POSITION);
                out.extend_from_slice(&(position.len() as u16).to_le_bytes());
                out.extend_from_slice(position);
            }
            Self::Abort(notice) => {
                let message = truncated(&notice.message).as_bytes();
                let length = (NOTICE_HEADER + message.len()) as u16;
                out.push(ABORT);
                out.extend_from_slice(&length.to_le_bytes());
                out.push(notice.code as u8);
                out.extend_from_slice(&notice.origin.to_le_bytes());
                out.push(u8::from(notice.culprit.is_some()));
                out.extend_from_slice(&notice.culprit.unwrap_or(0).to_le_bytes());
                out.extend_from_slice(message);
            }
            Self::Segment(identity) => {
                out.extend_from_slice(&[SEGMENT, 20, 0]);
                out.extend_from_slice(&identity.segment.to_le_bytes());
                out.extend_from_slice(&identity.bytes.to_le_bytes());
                out.extend_from_slice(&identity.inode.to_le_bytes());
            }
            Self::SegmentAnswer { segment, mapped } => {
                out.extend_from_slice(&[SEGMENT_ANSWER, 5, 0]);
                out.extend_from_slice(&segment.to_le_bytes());
                out.push(u8::from(*mapped));
            }
            Self::SegmentGone(segment) => {
                out.extend_from_slice(&[SEGMENT_GONE, 4, 0]);
                out.extend_from_slice(&segment.to_le_bytes());
            }
        }
    }
}

/// The frame about a segment of this kind; `None` when the payload is not that of one.
fn parse_segment(kind: u8, payload: &[u8]) -> Option<Frame> {
    let (segment, rest) = payload.split_first_chunk()?;
    let segment = u32::from_le_bytes(*segment);
    match (kind, rest) {
        (SEGMENT, _) => {
            let (bytes, rest) = rest.split_first_chunk()?;
            Some(Frame::Segment(Identity {
                segment,
                bytes: u64::from_le_bytes(*bytes),
                inode: u64::from_le_bytes(rest.try_into().ok()?),
            }))
        }
        (SEGMENT_ANSWER, &[mapped @ (0 | 1)]) => Some(Frame::SegmentAnswer {
            segment,
            mapped: mapped == 1,
        }),
        (SEGMENT_GONE, []) => Some(Frame::SegmentGone(segment)),
        _ => None,
    }
}

/// The notice in an abort frame's payload.
fn parse_notice(payload: &[u8]) -> Result<Notice, String> {
    let &[
        code,
        o0,
        o1,
        o2,
        o3,
        named,
        c0,
        c1,
        c2,
        c3,
        ref message @ ..,
    ] = payload
    else {
        return Err(format!("abort notice of {} bytes", payload.len()));
    };
    let Some(code) = Code::from_number(code) else {
        return Err(format!("abort notice with unknown code {code}"));
    };
    let culprit = match named {
        0 => None,
        1 => Some(u32::from_le_bytes([c0, c1, c2, c3])),
        other => return Err(format!("abort notice with culprit flag {other}")),
    };
    let Some(message) = ForeignText::read(message) else {
        return Err("abort notice that is not UTF-8".to_owned());
    };
    Ok(Notice {
        code,
        origin: u32::from_le_bytes([o0, o1, o2, o3]),
        culprit,
        message: message.into(),
    })
}

/// The longest prefix of `message` that may travel.
fn truncated(message: &str) -> &str {
    let mut end = message.len().min(MAX_MESSAGE);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}
