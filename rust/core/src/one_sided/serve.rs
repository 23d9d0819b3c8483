//! The target's side: a thread for each initiator carries out what it asks for, one request after the other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::end_beside;
use super::regions::{Regions, Use};
use super::request::{Answer, INITIATOR, Kind, LENGTH, PIECE, REQUESTS, Request};
use crate::buffer::Memory;
use crate::communicator::{Communicator, Work};
use crate::device::still;
use crate::engine::{PointToPoint, Received};
use crate::error::{Code, Error, Result};
use crate::fork::PerProcess;
use crate::locks::Mutex;
use crate::transport::cuda::span::Span;
use crate::transport::ends::End;
use crate::types::DataType;

/// As long as the initiator takes; its end is noticed at any time.
const FOR_EVER: Option<Duration> = Some(Duration::ZERO);

/// How long the data of a write that has been refused may take. Peers whose writes are refused wait for each other.
const REFUSED_PATIENCE: Option<Duration> = Some(Duration::from_secs(30));

/// How long a copy waits for a moment at which no stream of this process waits for a peer: before its first piece, and before
/// each further one, where to give up is to have copied the earlier ones in vain.
const FIRST_PATIENCE: Duration = Duration::from_millis(1);
const PATIENCE: Duration = Duration::from_millis(10);

/// Held while a piece is copied: two copies at a time would each find the other one in the way of [`still`].
static COPYING: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);

/// The target's end of one pair.
pub(super) struct Service {
    comm: Communicator,
    state: Mutex<State>,
    has_asked: AtomicBool,
}

/// How long a peer has asked for nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest {
    pub(super) time: Duration,
    /// It has asked for something before.
    pub(super) has_asked: bool,
}

impl Rest {
    /// A peer that rests keeps its place for so long, where others want it; one that has never asked for anything less.
    const LONG: Duration = Duration::from_secs(60);
    const LONG_AT_FIRST: Duration = Duration::from_secs(10);

    /// Whether it is so long that the peer gives its place away.
    pub(super) fn is_long(&self) -> bool {
        self.time
            >= match self.has_asked {
                true => Self::LONG,
                false => Self::LONG_AT_FIRST,
            }
    }

    pub(super) fn leaves_before(&self, other: &Self) -> bool {
        match self.has_asked == other.has_asked {
            true => self.time > other.time,
            false => other.has_asked,
        }
    }
}

enum State {
    /// It is about to await a request.
    Idle,
    /// This is the receive of the next request, and since when it waits for that.
    Awaiting(Work, Instant),
    /// It carries out a request.
    Busy,
    Ending,
}

impl Service {
    pub(super) fn new(comm: Communicator) -> Self {
        Self {
            comm,
            state: Mutex::new(State::Idle),
            has_asked: AtomicBool::new(false),
        }
    }

    /// How long the peer has asked for nothing; `None` while it is served.
    pub(super) fn rest(&self) -> Option<Rest> {
        match &*self.state.lock() {
            State::Awaiting(_, since) => Some(Rest {
                time: since.elapsed(),
                has_asked: self.has_asked.load(Ordering::Relaxed),
            }),
            State::Idle | State::Busy | State::Ending => None,
        }
    }

    /// Ends the service: in good order between two requests, else what is under way fails on both sides.
    pub(super) fn end(&self) {
        let before = std::mem::replace(&mut *self.state.lock(), State::Ending);
        let is_busy = match before {
            // A request may just have come.
            State::Awaiting(work, _) => !self.comm.cancel_receive(&work),
            State::Busy => true,
            State::Idle | State::Ending => false,
        };
        // Else its thread closes the group, in good order.
        if is_busy {
            let reason = "the target has closed its port amid a transfer";
            self.comm.abort(reason);
            self.comm.close();
        }
    }

    /// Serves until the initiator goes, or [`Service::end`].
    pub(super) fn run(&self, regions: &Regions) {
        let ended = self.comm.guard(|comm| self.serve(comm, regions));
        if let Err(error) = ended {
            match error.code {
                // Memory of a device could not be copied here.
                Code::System => {
                    tracing::warn!(%error, "a peer's transfer has failed");
                    self.comm.abort(&error.message);
                }
                Code::Mismatch => self.comm.abort(&error.message),
                _ => tracing::debug!(%error, "a peer's connection has ended"),
            }
        }
        self.comm.close();
    }

    fn serve(&self, comm: &Communicator, regions: &Regions) -> Result<()> {
        loop {
            let mut bytes = [0; LENGTH];
            self.await_request(&mut bytes)?;
            carry_out(comm, &Request::from_bytes(&bytes)?, regions)?;
        }
    }

    fn await_request(&self, bytes: &mut [u8; LENGTH]) -> Result<()> {
        // This thread waits at once.
        let options = PointToPoint {
            timeout: FOR_EVER,
            blocking: true,
            ..PointToPoint::default()
        };
        let work = {
            let mut state = self.state.lock();
            if matches!(*state, State::Ending) {
                return Err(closed());
            }
            // SAFETY: the bytes are borrowed until the wait below is over, which is when the receive has ended.
            let work = unsafe {
                let (dtype, memory) = (DataType::UInt8, Memory::of_mut(bytes));
                self.comm
                    .receive(dtype, memory, Some(INITIATOR), REQUESTS, options)?
            };
            *state = State::Awaiting(work.clone(), Instant::now());
            work
        };
        work.wait(None)?;
        let mut state = self.state.lock();
        if matches!(*state, State::Ending) {
            return Err(closed());
        }
        *state = State::Busy;
        self.has_asked.store(true, Ordering::Relaxed);
        Ok(())
    }
}

fn closed() -> Error {
    Error::new(Code::Aborted, "the port has been closed")
}

/// Does what the request asks for, and answers.
fn carry_out(comm: &Communicator, request: &Request, regions: &Regions) -> Result<()> {
    let region = regions.begin_use(&request.region, request.offset, request.length);
    let answer = match (request.kind, region) {
        (_, region) if request.is_mapped => {
            let location = Location::receive(comm, request)?;
            match region {
                Ok(region) => copy(comm, request, regions, (&region, &location))?,
                Err(refusal) => refusal,
            }
        }
        (Kind::Write, Ok(region)) => take(comm, request, &region)?,
        (Kind::Write, Err(refusal)) => refuse(comm, request, refusal, regions)?,
        (Kind::Read, Ok(region)) => give(comm, request, &region)?,
        (Kind::Read, Err(refusal)) => refusal,
    };
    let answer = answer.to_bytes();
    let to = (INITIATOR, request.answer_tag());
    // SAFETY: the call returns when the bytes are no longer needed.
    unsafe { comm.send_now(DataType::UInt8, Memory::of(&answer), to, FOR_EVER) }
}

/// Lets a write into the region.
fn take(comm: &Communicator, request: &Request, region: &Use) -> Result<Answer> {
    for (offset, bytes) in request.pieces() {
        let moving = region.moving(request.offset as usize + offset, bytes, false)?;
        let memory = moving.memory(0, bytes);
        let from = (Some(INITIATOR), request.data_tag());
        // SAFETY: `memory` says why; the call returns when the memory is no longer in use.
        let received = unsafe { comm.receive_now(DataType::UInt8, memory, from, FOR_EVER)? };
        check_whole(received, bytes)?;
        region.put_back(&moving)?;
    }
    Ok(Answer::Done)
}

/// Where an initiator's bytes lie on a device.
pub(super) struct Location {
    pub(super) span: Span,
    /// In the span.
    pub(super) offset: u64,
}

impl Location {
    /// More bytes than describe one.
    const MOST: usize = 1024;

    /// As it travels: the offset, and the span.
    pub(super) fn write(span: &Span, offset: usize) -> Vec<u8> {
        [&(offset as u64).to_le_bytes(), &*span.encode()].concat()
    }

    fn receive(comm: &Communicator, request: &Request) -> Result<Self> {
        let mut bytes = [0; Self::MOST];
        let from = (Some(INITIATOR), request.data_tag());
        // SAFETY: the bytes are borrowed until the call returns.
        let received = unsafe {
            let memory = Memory::of_mut(&mut bytes);
            comm.receive_now(DataType::UInt8, memory, from, REFUSED_PATIENCE)?
        };
        Self::read(&bytes[..received.bytes], request.length).ok_or_else(|| {
            let what = "a peer tells of its memory what no peer of this version tells";
            Error::new(Code::Untrusted, what)
        })
    }

    /// Of `length` bytes, as [`write`](Self::write) wrote it; `None` for other bytes.
    pub(super) fn read(bytes: &[u8], length: u64) -> Option<Self> {
        let (offset, span) = bytes.split_first_chunk()?;
        let (offset, span) = (u64::from_le_bytes(*offset), Span::decode(span)?);
        let end = offset.checked_add(length)?;
        (end <= span.bytes()).then_some(Self { span, offset })
    }
}

/// Copies between the region and the initiator's memory, where both lie on devices. A driver may wait for its device when it
/// maps memory, which ends only where no stream of this process waits for a peer: so that is done piece by piece, at times when
/// none does.
fn copy(
    comm: &Communicator,
    request: &Request,
    regions: &Regions,
    (region, location): (&Use, &Location),
) -> Result<Answer> {
    let Some((end, _)) = end_beside(comm, INITIATOR) else {
        return Ok(Answer::NotMapped);
    };
    // A peer in another process may tell memory of this one, which no region of the peer keeps.
    if location.span.is_of_this_process()? {
        return Ok(Answer::NotMapped);
    }
    for piece in request.pieces() {
        if let Some(error) = comm.error() {
            return Err(error);
        }
        let turn = COPYING.lock();
        let copied = copy_piece(&end, request, region, location, piece)?;
        drop(turn);
        match copied {
            Piece::Copied => {}
            Piece::NotNow => return Ok(Answer::NotMappedNow),
            Piece::NotMapped(error) => {
                if let Some(error) = error
                    && let Some(suppressed) = regions.refusals.lock().line()
                {
                    tracing::warn!(
                        %error,
                        suppressed,
                        "a peer's memory of a device is not mapped, and moves through that of the host"
                    );
                }
                return Ok(Answer::NotMapped);
            }
        }
    }
    Ok(Answer::Done)
}

/// A piece of a copy.
enum Piece {
    Copied,
    /// A stream of this process waits for a peer.
    NotNow,
    NotMapped(Option<Error>),
}

/// Maps the initiator's memory for one piece of a copy: an offset, and a length.
fn copy_piece(
    end: &End,
    request: &Request,
    region: &Use,
    location: &Location,
    (offset, length): (usize, usize),
) -> Result<Piece> {
    let patience = match offset {
        0 => FIRST_PATIENCE,
        _ => PATIENCE,
    };
    let Some(_still) = await_stillness(patience) else {
        return Ok(Piece::NotNow);
    };
    let Some(_view) = Mapping::begin(end) else {
        return Err(Error::new(Code::Aborted, "the initiator has given up"));
    };
    let mapped = match region.map(&location.span) {
        Ok(Some(mapped)) => mapped,
        Ok(None) => return Ok(Piece::NotMapped(None)),
        Err(error) => return Ok(Piece::NotMapped(Some(error))),
    };
    let own = (request.offset as usize + offset, length);
    let peer = mapped.address() + location.offset + offset as u64;
    // SAFETY: the bytes lie in the initiator's span (`Location::read`), which it keeps while this has a view of it; it promised
    // that no code touches them while the transfer moves them.
    unsafe { region.copy(own, peer, request.kind == Kind::Write)? };
    Ok(Piece::Copied)
}

/// As [`still`], also where calls of other threads leave no moment at once.
fn await_stillness(patience: Duration) -> Option<impl Drop> {
    let until = Instant::now() + patience;
    loop {
        if let Some(guard) = still() {
            return Some(guard);
        }
        if Instant::now() > until {
            return None;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// A view of the initiator's memory.
struct Mapping<'a>(&'a End);

impl<'a> Mapping<'a> {
    /// None where the initiator has taken its memory back.
    fn begin(end: &'a End) -> Option<Self> {
        end.begin_view().then_some(Self(end))
    }
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        self.0.end_view();
    }
}

/// Takes a refused write off the link and forgets it: its sender cannot take it back. One at a time at a port, so that
/// what is thrown away takes the memory of one piece, however many peers send it.
fn refuse(
    comm: &Communicator,
    request: &Request,
    refusal: Answer,
    regions: &Regions,
) -> Result<Answer> {
    let _turn = regions.refusing.lock();
    let mut scratch = Vec::new();
    for (_, bytes) in request.pieces() {
        scratch.resize(bytes.min(PIECE), 0_u8);
        receive(comm, &mut scratch, request.data_tag())?;
    }
    Ok(refusal)
}

/// Sends what a read asks for.
fn give(comm: &Communicator, request: &Request, region: &Use) -> Result<Answer> {
    for (offset, bytes) in request.pieces() {
        let moving = region.moving(request.offset as usize + offset, bytes, true)?;
        let memory = moving.memory(0, bytes);
        let to = (INITIATOR, request.data_tag());
        // SAFETY: as in `take`.
        unsafe { comm.send_now(DataType::UInt8, memory, to, FOR_EVER)? };
    }
    Ok(Answer::Done)
}

fn receive(comm: &Communicator, bytes: &mut [u8], tag: u64) -> Result<()> {
    let from = (Some(INITIATOR), tag);
    // SAFETY: the bytes are borrowed until the call returns.
    let received = unsafe {
        let memory = Memory::of_mut(bytes);
        comm.receive_now(DataType::UInt8, memory, from, REFUSED_PATIENCE)?
    };
    check_whole(received, bytes.len())
}

/// A piece has the length that its request says.
fn check_whole(received: Received, bytes: usize) -> Result<()> {
    match received.bytes == bytes {
        true => Ok(()),
        false => Err(Error::new(
            Code::Untrusted,
            format!("a peer announced {bytes} bytes and sent {}", received.bytes),
        )),
    }
}
