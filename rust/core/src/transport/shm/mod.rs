//! Links between processes of one host: a ring of shared memory for each direction, and a Unix
//! socket as control channel.
//!
//! While both sides are awake nothing but memory moves: no system call, lock or allocation. A side that sleeps waits on the
//! control socket, where the peer rings a doorbell if it finds the sleeper's flag raised (`ring.rs` says why no wake-up is
//! lost). The kernel closes that socket when the peer's process ends, which wakes the sleeper too; and should another process
//! have a copy of the socket, there is the peer's pidfd (`process.rs`). Both are late where the process has much memory;
//! `life.rs` tells at once.

mod borrower;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod life;
mod loans;
mod mark;
#[cfg(all(test, loom))]
mod model;
mod moved;
mod neighbour;
mod pace;
mod page;
mod peer;
mod process;
mod ring;
mod segment;
mod shared;
mod slots;

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::borrower::Borrower;
pub(super) use self::life::{Life, Lives};
use self::loans::Lender;
use self::mark::Mark;
use self::moved::Moved;
pub use self::page::Page;
use self::peer::Peer;
use self::process::Process;
pub(crate) use self::process::credentials;
use self::ring::{Consumer, Producer};
use self::segment::{BoardMemory, RingMemory, Segment};
pub use self::segment::{MAX_CAPACITY, MIN_CAPACITY};
pub use self::shared::SharedSpan;
use self::slots::{Poster, Taker};
use super::control::{Control, Frame};
use super::{
    ControlChannel, Interest, Link, MESSAGE_HEADER, Neighbour, Notice, PeerState, Position,
    READ_BY_SEVERAL_FROM,
};
use crate::error::{Code, Error, Result};
use crate::fork::Home;
use crate::reduce::{Workers, copy_hinted};

/// One end of a link through shared memory.
pub struct ShmLink {
    producer: Producer<RingMemory>,
    consumer: Consumer<RingMemory>,
    poster: Poster<BoardMemory>,
    taker: Taker<BoardMemory>,
    lender: Lender<BoardMemory>,
    borrower: Borrower<BoardMemory>,
    /// The resources that attempts since the last sleep lacked.
    lacks: Lacks,
    control: Control,
    page: Page,
    /// The pieces of those loans that contain private memory, each by the number of its loan.
    lent: VecDeque<(u64, (usize, usize))>,
    moved: Option<Moved>,
    /// The memory that is shared with the peer, each piece by the number of its loan.
    shared: Vec<(u64, (usize, usize))>,
    lives: Lives,
    name: &'static str,
    home: Home,
}

/// How long to wait for a peer that is in the middle of writing to shared memory. It takes microseconds unless the
/// peer's process is stopped.
pub(crate) const WRITERS_PATIENCE: Duration = Duration::from_millis(500);

/// The resources that a sender waits for.
#[derive(Clone, Copy, Debug, Default)]
struct Lacks {
    room: bool,
    slot: bool,
    /// A loan, and how the account of loans stood when one was first looked at.
    loan: Option<u64>,
}

impl ShmLink {
    /// Makes a segment with two rings of `capacity` bytes (a power of two) and this side's end of
    /// the link. The descriptor is for the peer, which gets it by `SCM_RIGHTS` before `control`
    /// carries anything else.
    ///
    /// # Errors
    /// `InvalidArgument` for a capacity outside [`MIN_CAPACITY`]`..=`[`MAX_CAPACITY`]; `System`
    /// when the kernel refuses the memory.
    pub fn create(control: UnixStream, capacity: usize) -> Result<(Self, OwnedFd)> {
        let peer = Program::behind(&control);
        Self::create_with(control, peer, capacity)
    }

    /// As [`ShmLink::create`] to `peer`, which the kernel need not know to be behind `control`.
    pub(super) fn create_with(
        control: UnixStream,
        peer: Program,
        capacity: usize,
    ) -> Result<(Self, OwnedFd)> {
        let (segment, file) = Segment::create(capacity)?;
        Ok((
            Self::new(&segment, Side::Maker, (control, peer), NAME),
            file,
        ))
    }

    /// The peer's end of the link that `segment` belongs to. The descriptor may be closed
    /// afterwards.
    ///
    /// # Errors
    /// `Untrusted` when the segment's size, seals or header are not what [`ShmLink::create`] makes;
    /// `System` when the kernel refuses to map it.
    pub fn open(control: UnixStream, segment: OwnedFd) -> Result<Self> {
        let peer = Program::behind(&control);
        Self::open_with(control, peer, segment)
    }

    /// As [`ShmLink::open`], of what `peer` made.
    pub(super) fn open_with(control: UnixStream, peer: Program, segment: OwnedFd) -> Result<Self> {
        let segment = Segment::open(&segment)?;
        Ok(Self::new(&segment, Side::Opener, (control, peer), NAME))
    }

    /// Both ends inside this process.
    pub(super) fn pair(capacity: usize, name: &'static str) -> Result<(Self, Self)> {
        let segment = Segment::anonymous(capacity)?;
        let (a, b) = UnixStream::pair()
            .map_err(|cause| crate::error::Error::system("make a socket pair", cause))?;
        Ok((
            Self::new(&segment, Side::Maker, with_peer(a), name),
            Self::new(&segment, Side::Opener, with_peer(b), name),
        ))
    }

    fn new(
        segment: &Arc<Segment>,
        side: Side,
        (control, peer): (UnixStream, Program),
        name: &'static str,
    ) -> Self {
        let (outgoing, incoming) = match side {
            Side::Maker => (0, 1),
            Side::Opener => (1, 0),
        };
        let Program { process, lives } = peer;
        let peer = process.map(|process| Peer::new(process, segment.board(incoming)));
        let mut lender = Lender::new(segment.board(outgoing));
        match Mark::own() {
            Some(mark) => segment.board(outgoing).tell_mark(mark),
            // No peer would read it.
            None => lender.give_up_private(),
        }
        Self {
            producer: Producer::new(segment.ring(outgoing)),
            consumer: Consumer::new(segment.ring(incoming)),
            poster: Poster::new(segment.board(outgoing)),
            taker: Taker::new(segment.board(incoming)),
            lender,
            borrower: Borrower::new(segment.board(incoming), peer),
            lacks: Lacks::default(),
            control: Control::with_segments(control),
            page: segment.page(),
            lent: VecDeque::new(),
            moved: None,
            shared: Vec::new(),
            lives,
            name,
            home: Home::here(),
        }
    }
}

const NAME: &str = "shared memory";

/// The process at the other end of a link.
#[derive(Clone)]
pub(super) struct Program {
    /// If it can be named here. It is named before it can write a word of the link's memory.
    process: Option<Arc<Process>>,
    lives: Lives,
}

impl Program {
    /// The process that connected or listens at the other end of `socket`.
    pub(super) fn behind(socket: &UnixStream) -> Self {
        Self {
            process: Process::behind(socket),
            lives: Lives::default(),
        }
    }

    /// The process, with what it shows of its life.
    #[must_use]
    pub(super) fn with(self, lives: Lives) -> Self {
        Self { lives, ..self }
    }
}

fn with_peer(control: UnixStream) -> (UnixStream, Program) {
    let peer = Program::behind(&control);
    (control, peer)
}

/// Which side made the segment decides which ring is whose.
enum Side {
    Maker,
    Opener,
}

impl Link for ShmLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize> {
        let started = self.lender.begin_filling(bytes.len());
        let sent = self.producer.send(bytes, || self.control.ring_doorbell())?;
        if let Some(started) = started {
            self.lender.note_filling(sent, started);
        }
        self.lacks.room |= sent == 0;
        Ok(sent)
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> Result<usize> {
        if self.borrower.is_reading() {
            let streaming = self.borrower.streaming();
            return self.read_loan(bytes, &|to, from| copy_hinted(to, from, streaming));
        }
        let started = self.borrower.times(bytes.len()).then(Instant::now);
        let count = self.consumer.recv(bytes, || self.control.ring_doorbell())?;
        if let Some(started) = started {
            self.borrower.note_streamed(bytes.len(), count, started);
        }
        Ok(count)
    }

    fn try_recv_by(&mut self, copy: &dyn Fn(&mut [u8], &[u8]), bytes: &mut [u8]) -> Result<usize> {
        if self.borrower.is_reading() {
            return self.read_loan(bytes, copy);
        }
        let (most, mut done) = (bytes.len(), 0);
        self.try_fold(most, 1, &mut |run| {
            copy(&mut bytes[done..done + run.len()], run);
            done += run.len();
        })
    }

    fn share(&mut self, workers: &Arc<Workers>) {
        self.borrower.share(workers);
        // The peer's are as many.
        self.lender.read_by_several(READ_BY_SEVERAL_FROM);
    }

    fn try_fold(&mut self, max: usize, align: usize, fold: &mut dyn FnMut(&[u8])) -> Result<usize> {
        let control = &mut self.control;
        if self.borrower.is_reading() {
            let (count, back) = self
                .borrower
                .fold(control.peer_heap(), (max, align), fold)?;
            if back.wake {
                control.ring_doorbell();
            }
            return Ok(count);
        }
        let started = self.borrower.times(max).then(Instant::now);
        let count = self
            .consumer
            .fold(max, align, fold, || control.ring_doorbell())?;
        if let Some(started) = started {
            self.borrower.note_streamed(max, count, started);
        }
        Ok(count)
    }

    fn post_limit(&self) -> usize {
        slots::ROOM
    }

    fn try_post(&mut self, header: &[u8; MESSAGE_HEADER], payload: &[u8]) -> Result<bool> {
        let place = (self.producer.published(), false);
        let posted = self.poster.post(place, (header, payload), || {
            self.control.ring_doorbell();
        })?;
        self.lacks.slot |= !posted;
        Ok(posted)
    }

    fn try_stream(&mut self, header: &[u8; MESSAGE_HEADER], payload: &[u8]) -> Result<bool> {
        let started = self.lender.begin_filling(payload.len());
        let wake = || self.control.ring_doorbell();
        let sent = self.producer.send_whole(header, payload, wake)?;
        if let Some(started) = started {
            self.lender
                .note_filling(if sent { payload.len() } else { 0 }, started);
        }
        Ok(sent)
    }

    fn try_take(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let Some(post) = self.taker.peek()? else {
            return Ok(false);
        };
        let consumed = self.consumer.consumed();
        if post.after > consumed && self.consumer.has_up_to(post.after)? {
            return Ok(false);
        }
        if post.after != consumed {
            return Err(slots::misplaced(post.after, consumed));
        }
        if self.borrower.is_reading() {
            return Err(loans::unfinished());
        }
        let control = &mut self.control;
        if !post.lent {
            self.taker.take(post, take, || control.ring_doorbell());
            return Ok(true);
        }
        let mut begun = Ok(());
        let borrower = &mut self.borrower;
        let mut begin = |message: &[u8]| {
            begun = match message.split_first_chunk::<MESSAGE_HEADER>() {
                Some((header, description)) => {
                    take(header);
                    borrower.begin(description)
                }
                None => Err(Error::new(Code::Untrusted, "a loan without a header")),
            };
        };
        self.taker
            .take(post, &mut begin, || control.ring_doorbell());
        begun.map(|()| true)
    }

    fn is_streaming(&mut self) -> Result<bool> {
        if !self.consumer.has_bytes()? {
            return Ok(false);
        }
        // A post that comes before these bytes was published before them.
        let consumed = self.consumer.consumed();
        Ok(self.taker.peek()?.is_none_or(|post| post.after > consumed))
    }

    fn peek(&mut self) -> Result<Option<[u8; MESSAGE_HEADER]>> {
        // The rest of a loan is part of the message before.
        if self.borrower.is_reading() {
            return Ok(None);
        }
        let mut header = None;
        if self.is_streaming()? {
            let mut bytes = [0; MESSAGE_HEADER];
            header = self.consumer.peek(&mut bytes)?.then_some(bytes);
        } else if let Some(post) = self.taker.peek()?
            && post.after == self.consumer.consumed()
        {
            let look = &mut |message: &[u8]| header = message.first_chunk().copied();
            self.taker.look_at(post, look);
        }
        Ok(header)
    }

    fn neighbour(&mut self) -> Option<&mut dyn Neighbour> {
        Some(self)
    }

    fn arm(&mut self, interest: Interest) -> bool {
        let mut ready = false;
        if interest.readable {
            ready |= self.consumer.arm() || self.borrower.is_readable();
            // Corrupt words are reported by the next attempt to take. A message after a loan waits for the end of the loan.
            ready |= !self.borrower.is_reading()
                && self.taker.peek().map_or(true, |post| post.is_some());
        }
        if interest.writable {
            let room = self.producer.arm();
            let lacks = self.lacks;
            ready |= room && (lacks.room || (!lacks.slot && lacks.loan.is_none()));
            ready |= lacks.slot && self.poster.has_room().unwrap_or(true);
            ready |= lacks
                .loan
                .is_some_and(|before| before != self.lender.returned());
        }
        ready || self.control.has_news()
    }

    fn disarm(&mut self) {
        self.lacks = Lacks::default();
        let consumer_rung = self.consumer.disarm();
        let producer_rung = self.producer.disarm();
        if consumer_rung || producer_rung {
            self.control.drain();
        }
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let fds = [Some(self.control.fd()), self.peer_pidfd(), self.peer_sign()];
        fds.into_iter().flatten().collect()
    }

    fn memory(&self) -> usize {
        2 * self.producer.capacity()
    }

    fn describe(&self) -> String {
        self.name.to_owned()
    }
}

impl ControlChannel for ShmLink {
    fn peer_state(&mut self) -> PeerState {
        let peer = self.borrower.peer.as_ref();
        let state = match peer.and_then(|peer| peer.process().pidfd()) {
            Some(pidfd) => {
                let sign = self.lives.of_the_peer();
                self.control.peer_state_beside(pidfd, sign)
            }
            None => self.control.peer_state(),
        };
        match state {
            PeerState::Present if self.borrower.has_ended => PeerState::Lost(
                "its process ended, or executed another program, while its memory was read"
                    .to_owned(),
            ),
            state => state,
        }
    }

    fn stall(&self) -> Option<String> {
        let is_stopped = self.borrower.peer.as_ref()?.process().is_stopped();
        is_stopped.then(|| "its process is stopped, by a signal or a debugger".to_owned())
    }

    fn send_abort(&mut self, notice: &Notice) {
        self.lender.revoke();
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
}

impl ShmLink {
    /// From now on the link watches the peer's life, and the peer may watch that of this process.
    pub(super) fn watch(&mut self, lives: Lives) {
        self.lives = lives;
    }

    /// The pidfd of the peer's process, which becomes readable when that ends, also where other processes keep its sockets
    /// open. `None` where the peer is in this process, or cannot be named here. All links to one process have the same
    /// descriptor, which is closed with the last of them.
    fn peer_pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.borrower.peer.as_ref()?.process().pidfd()
    }

    /// The sign of the peer's life, which hangs up before the pidfd tells.
    fn peer_sign(&self) -> Option<BorrowedFd<'_>> {
        self.peer_pidfd().and(self.lives.of_the_peer())
    }

    /// Takes from the loan being read what `bytes` has room for.
    fn read_loan(&mut self, bytes: &mut [u8], copy: &dyn Fn(&mut [u8], &[u8])) -> Result<usize> {
        let heap = self.control.peer_heap();
        let (count, back) = self.borrower.recv(heap, bytes, copy)?;
        if back.wake {
            self.control.ring_doorbell();
        }
        Ok(count)
    }
}

impl Drop for ShmLink {
    fn drop(&mut self) {
        if !self.home.is_here() {
            // The loans of a forked child's parent stay lent.
            return;
        }
        self.lender.revoke();
        self.await_writer(Instant::now() + WRITERS_PATIENCE);
    }
}

#[cfg(test)]
mod tests;
