//! Links between processes of one host: a ring of shared memory for each direction, and a Unix
//! socket as control channel.
//!
//! While both sides are awake nothing but memory moves: no system call, lock or allocation. A side
//! that sleeps waits on the control socket, where the peer rings a doorbell if it finds the
//! sleeper's flag raised (`ring.rs` says why no wake-up is lost). The kernel closes that socket
//! when the peer's process ends, which wakes the sleeper too.

#[cfg(all(test, loom))]
mod model;
mod ring;
mod segment;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use self::ring::{Consumer, Producer};
pub use self::segment::{MAX_CAPACITY, MIN_CAPACITY};
use self::segment::{RingMemory, Segment};
use super::control::{Control, Frame};
use super::{Interest, Link, Notice, PeerState, Position};
use crate::error::Result;

/// One end of a link through shared memory.
pub struct ShmLink {
    producer: Producer<RingMemory>,
    consumer: Consumer<RingMemory>,
    control: Control,
    name: &'static str,
}

impl ShmLink {
    /// Makes a segment with two rings of `capacity` bytes (a power of two) and this side's end of
    /// the link. The descriptor is for the peer, who gets it by `SCM_RIGHTS` before `control`
    /// carries anything else.
    ///
    /// # Errors
    /// `InvalidArgument` for a capacity outside [`MIN_CAPACITY`]`..=`[`MAX_CAPACITY`]; `System`
    /// when the kernel refuses the memory.
    pub fn create(control: UnixStream, capacity: usize) -> Result<(Self, OwnedFd)> {
        let (segment, file) = Segment::create(capacity)?;
        Ok((Self::new(&segment, Side::Maker, control, NAME), file))
    }

    /// The peer's end of the link that `segment` belongs to. The descriptor may be closed
    /// afterwards.
    ///
    /// # Errors
    /// `Untrusted` when the segment's size, seals or header are not what [`ShmLink::create`] makes;
    /// `System` when the kernel refuses to map it.
    pub fn open(control: UnixStream, segment: OwnedFd) -> Result<Self> {
        let segment = Segment::open(&segment)?;
        Ok(Self::new(&segment, Side::Opener, control, NAME))
    }

    /// Both ends inside this process.
    pub(super) fn pair(capacity: usize, name: &'static str) -> Result<(Self, Self)> {
        let segment = Segment::anonymous(capacity)?;
        let (a, b) = UnixStream::pair()
            .map_err(|cause| crate::error::Error::system("make a socket pair", cause))?;
        Ok((
            Self::new(&segment, Side::Maker, a, name),
            Self::new(&segment, Side::Opener, b, name),
        ))
    }

    fn new(segment: &Arc<Segment>, side: Side, control: UnixStream, name: &'static str) -> Self {
        let (outgoing, incoming) = match side {
            Side::Maker => (0, 1),
            Side::Opener => (1, 0),
        };
        Self {
            producer: Producer::new(segment.ring(outgoing)),
            consumer: Consumer::new(segment.ring(incoming)),
            control: Control::with_segments(control),
            name,
        }
    }
}

const NAME: &str = "shared memory";

/// Who made the segment decides which ring is whose.
enum Side {
    Maker,
    Opener,
}

impl Link for ShmLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize> {
        self.producer.send(bytes, || self.control.ring_doorbell())
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> Result<usize> {
        self.consumer.recv(bytes, || self.control.ring_doorbell())
    }

    fn try_fold(&mut self, max: usize, align: usize, fold: &mut dyn FnMut(&[u8])) -> Result<usize> {
        let control = &mut self.control;
        self.consumer
            .fold(max, align, fold, || control.ring_doorbell())
    }

    fn arm(&mut self, interest: Interest) -> bool {
        let readable = interest.readable && self.consumer.arm();
        let writable = interest.writable && self.producer.arm();
        readable || writable || self.control.has_news()
    }

    fn disarm(&mut self) {
        let consumer_rung = self.consumer.disarm();
        let producer_rung = self.producer.disarm();
        if consumer_rung || producer_rung {
            self.control.drain();
        }
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.control.fd()]
    }

    fn peer_state(&mut self) -> PeerState {
        self.control.peer_state()
    }

    fn send_abort(&mut self, notice: &Notice) {
        self.control.send(&Frame::Abort(notice.clone()));
    }

    fn send_farewell(&mut self) {
        self.control.send(&Frame::Farewell);
    }

    fn send_position(&mut self, position: &Position) {
        self.control.send(&Frame::Position(*position));
    }

    fn take_position(&mut self) -> Option<Position> {
        self.control.take_position()
    }

    fn memory(&self) -> usize {
        2 * self.producer.capacity()
    }

    fn describe(&self) -> String {
        self.name.to_owned()
    }
}

#[cfg(test)]
mod tests;
