//! The control channel of a link: what two sides tell each other about themselves, beside the stream and never behind it.

use std::os::fd::BorrowedFd;

use super::MESSAGE_HEADER;
use crate::error::Code;

/// The state of the peer, as the control channel last showed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Nothing: the peer is there.
    Present,
    /// It closed its communicator in good order. Bytes that it sent before can still be received.
    Left,
    /// It aborted its group and says why.
    Aborted(Notice),
    /// Its end of the control channel closed without a farewell: the process ended, or the host is gone. Bytes that it sent
    /// before can still be received. The string says what was seen (`connection reset`).
    Lost(String),
    /// It sent what no member sends, on the control channel, and is not listened to any more. The string says what.
    Broken(String),
}

/// Why a group was aborted, as it travels from rank to rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The kind of the first failure.
    pub code: Code,
    /// The rank that noticed it first.
    pub origin: u32,
    /// The rank that caused it, if one did.
    pub culprit: Option<u32>,
    /// In words.
    pub message: String,
}

/// The place of a rank in its operation, told to a peer that it waits for; the link does not interpret it.
pub type Position = [u8; POSITION_BYTES];

/// Bytes of a [`Position`]: a message's header and two lengths.
pub const POSITION_BYTES: usize = MESSAGE_HEADER + 16;

/// The exchange of a link beside its stream: positions, questions, an abort, the farewell, and notice of the end of the peer's
/// process. Every method returns at once.
pub trait ControlChannel {
    /// The peer is lost when its host has not answered for this many seconds; where the peer is on another host. A peer that is
    /// only slow, or stopped, is not lost.
    fn lose_silent_host_after(&mut self, _seconds: Option<u32>) {}

    /// Reads the control channel and says how the peer is. Cheap enough to call on every pass of a wait loop
    /// that found nothing else to do; not on the hot path.
    fn peer_state(&mut self) -> PeerState;

    /// Sends an abort notice on the control channel, as far as that goes without blocking. The stream is dead
    /// afterwards.
    fn send_abort(&mut self, notice: &Notice);

    /// Says farewell on the control channel: this side will send no more, and bytes sent before stay readable
    /// for the peer. Called once, before the link is dropped in good order.
    fn send_farewell(&mut self);

    /// Whether the peer has said farewell: it reads nothing more. Looks at the control channel, so it is not for the hot path.
    fn has_left(&mut self) -> bool {
        false
    }

    /// After [`ControlChannel::send_farewell`]: whether the peer, or its system, has all that was sent. Bytes that still come
    /// are discarded. Where a link is dropped before, and more bytes come, sent bytes that have not arrived may be lost.
    fn is_delivered(&mut self) -> bool {
        true
    }

    /// Tells the peer this side's position on the control channel.
    fn send_position(&mut self, position: &Position);

    /// The last position that the peer sent, once; [`ControlChannel::peer_state`] reads it in.
    fn take_position(&mut self) -> Option<Position>;

    /// Asks the peer's process for a sign of life, unless it owes one. [`ControlChannel::peer_state`] reads the answer in.
    fn ask(&mut self) {}

    /// The descriptor on which the peer's questions come, where a thread must call [`ControlChannel::peer_state`] to answer
    /// them also while this side does nothing with the link.
    fn questions(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Why a peer that is [`PeerState::Present`] does not seem to run, in words that follow its name, if it does not.
    fn stall(&self) -> Option<String> {
        None
    }
}
