//! Messages that become part of a graph: they go through [lanes](crate::transport::cuda::lane), in which streams meet without
//! the host.
//!
//! A graph does the same each time, so nothing can look for the message that a receive waits for: between two ranks the
//! captured messages meet in the order in which they were captured. Their tags do not choose, but must agree: the ranks compare
//! them, and the lengths, by notes that the host carries, once for each message that is captured.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::buffer::Memory;
use crate::engine::{Group, NOTE, PointToPoint, WorkState};
use crate::error::{Code, Error, Result};
use crate::locks::Mutex;
use crate::transport::cuda::driver::{Device, MemoryOperation, Stream};
use crate::transport::cuda::kernels::Guard;
use crate::transport::cuda::lane::LaneWords;
use crate::types::{Collective, DataType, Rank};

use super::copies::{Copies, Origin};
use super::depots::{Depots, LanePlace};
use super::message::Wanted;
use super::note::FIRST_INTERNAL_TAG;
use super::pause::pause;
use super::words::{MOST_RANKS, Word, Words};

/// The tags of notes about captured messages begin here.
const CAPTURED: u64 = FIRST_INTERNAL_TAG | 1 << 60;

/// The lanes of a group.
#[derive(Default)]
pub(super) struct Lanes {
    state: Mutex<State>,
    /// Held by a thread that opens one, or numbers a message. The attendant does not take it.
    opening: Mutex<()>,
}

#[derive(Default)]
struct State {
    ends: Vec<End>,
    checks: Vec<Check>,
    /// Since when streams have waited at these pieces.
    waits: Option<(Vec<Piece>, Instant)>,
}

/// A piece, as a stream notes it, of a message to or from a rank.
type Piece = (Rank, u32);

/// One end of a lane.
struct End {
    peer: Rank,
    receives: bool,
    way: Arc<OpenLane>,
    /// Pieces and messages that were captured so far.
    pieces: usize,
    messages: u64,
}

/// A lane and its memory, which enqueued commands use. While they are enqueued, no lock is held that the attendant takes: the
/// driver may have a call wait.
struct OpenLane {
    lane: LaneWords,
    place: LanePlace,
}

/// The properties of a captured message that the ranks compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CapturedPrint {
    tag: u64,
    bytes: u64,
    dtype: u8,
}

/// A note on its way.
struct Check {
    name: String,
    peer: Rank,
    print: CapturedPrint,
    receives: bool,
    note: Box<[u8; NOTE]>,
    posted: Arc<WorkState>,
}

impl CapturedPrint {
    fn encode(self) -> [u8; NOTE] {
        let mut out = [0; NOTE];
        out[..8].copy_from_slice(&self.tag.to_le_bytes());
        out[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        out[16] = self.dtype;
        out
    }

    fn decode(bytes: &[u8; NOTE]) -> Self {
        let part =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Self {
            tag: part(0),
            bytes: part(8),
            dtype: bytes[16],
        }
    }

    fn in_words(self) -> String {
        let dtype = DataType::from_number(self.dtype).map_or("an unknown type", DataType::name);
        format!("{} bytes of {dtype} with tag {}", self.bytes, self.tag)
    }
}

impl Lanes {
    /// Captures a message to or from `peer`. Blocks until the peer is ready for captured messages, the first time, for which it
    /// must capture one itself. Returns how it went once a part of it may be in the graph.
    ///
    /// # Errors
    /// `Unsupported` where the ranks share no memory of the device; `Timeout` when the peer does not come.
    pub(super) fn capture(
        &self,
        wanted: &Wanted,
        (peer, receives): (Rank, bool),
        (stream, words): (&Stream, &Words),
        (cpu, depots): (&Group, &Depots),
    ) -> Result<Result<()>> {
        let one = self.opening.lock();
        let device = stream.device();
        let at = self.open((peer, receives), wanted.timeout, device, (cpu, depots))?;
        self.compare(wanted, at, cpu)?;
        let bytes = wanted.memory.len();
        let (way, first) = {
            let mut state = self.state.lock();
            let end = &mut state.ends[at];
            let first = end.pieces;
            end.pieces += bytes.div_ceil(end.way.place.piece);
            end.messages += 1;
            (Arc::clone(&end.way), first)
        };
        drop(one);
        let guard = Guard::new(words.address(Word::Dead), depots.seen(), wanted.dtype);
        let word = words.lane_address(peer, receives);
        Ok(way.enqueue((wanted.memory, first), (receives, word), guard, stream))
    }

    /// The end of a lane.
    fn open(
        &self,
        (peer, receives): (Rank, bool),
        timeout: Duration,
        device: &'static Device,
        (cpu, depots): (&Group, &Depots),
    ) -> Result<usize> {
        let is_it = |end: &End| end.peer == peer && end.receives == receives;
        let found = self.state.lock().ends.iter().position(is_it);
        if let Some(at) = found {
            return Ok(at);
        }
        let place = await_place((peer, receives), timeout, (cpu, depots))?;
        let lower_sends = (cpu.rank() < peer) != receives;
        let lane = LaneWords::open(device, place.pair.page(), lower_sends, receives)?;
        let mut state = self.state.lock();
        state.ends.push(End {
            peer,
            receives,
            way: Arc::new(OpenLane { lane, place }),
            pieces: 0,
            messages: 0,
        });
        Ok(state.ends.len() - 1)
    }

    /// Has the other rank know of a captured message, or hears of it.
    fn compare(&self, wanted: &Wanted, at: usize, cpu: &Group) -> Result<()> {
        let (peer, receives, number) = {
            let end = &self.state.lock().ends[at];
            (end.peer, end.receives, end.messages)
        };
        let options = PointToPoint {
            timeout: Some(wanted.timeout),
            ..PointToPoint::default()
        };
        let print = CapturedPrint {
            tag: wanted.tag,
            bytes: wanted.memory.len() as u64,
            dtype: wanted.dtype as u8,
        };
        let mut note = Box::new(print.encode());
        // SAFETY: the note stays where it is, and is not looked at, until the operation has ended (see `advance`).
        let memory = unsafe { Memory::of_mut(note.as_mut_slice()) };
        let (dtype, tag) = (DataType::UInt8, CAPTURED | number);
        let posted = match receives {
            true => {
                let what = (Collective::Recv, dtype, NOTE);
                cpu.receive_note(what, memory, (Some(peer), tag), options)?
            }
            false => cpu.send_note((dtype, NOTE), memory, (peer, tag), options)?,
        };
        self.state.lock().checks.push(Check {
            name: wanted.work.name(),
            peer,
            print,
            receives,
            note,
            posted,
        });
        Ok(())
    }

    /// Compares what peers have captured.
    ///
    /// # Errors
    /// `Mismatch`; what ended a note.
    pub(super) fn advance(&self, rank: Rank) -> Result<bool> {
        let mut state = self.state.lock();
        let before = state.checks.len();
        let mut at = 0;
        while at < state.checks.len() {
            let Some(result) = state.checks[at].posted.result() else {
                at += 1;
                continue;
            };
            result.clone()?;
            let check = state.checks.swap_remove(at);
            check.compare(rank)?;
        }
        Ok(state.checks.len() < before)
    }

    /// The ranks that streams wait for now, and since when they have been seen to.
    pub(super) fn waits(&self, words: &Words, now: Instant) -> Option<(Vec<Rank>, Duration)> {
        let mut state = self.state.lock();
        let pieces = state.ends.iter().map(|end| {
            let piece = words.lane(end.peer, end.receives);
            (end.peer, piece)
        });
        let pieces: Vec<Piece> = pieces.filter(|(_, piece)| *piece != 0).collect();
        if pieces.is_empty() {
            state.waits = None;
            return None;
        }
        let peers = pieces.iter().map(|(peer, _)| *peer).collect();
        match &state.waits {
            Some((before, since)) if *before == pieces => {
                Some((peers, now.saturating_duration_since(*since)))
            }
            _ => {
                state.waits = Some((pieces, now));
                Some((peers, Duration::ZERO))
            }
        }
    }

    /// Lets streams pass, after a failure.
    pub(super) fn release(&self) {
        let state = self.state.lock();
        state.ends.iter().for_each(|end| end.way.lane.release());
    }

    /// Takes all lanes out, to be given back once no stream uses them.
    pub(super) fn take(&self) -> impl Send + 'static {
        std::mem::take(&mut *self.state.lock())
    }
}

impl OpenLane {
    /// A message whose first piece is number `number` of the lane's. The stream notes in `word` that it waits.
    fn enqueue(
        &self,
        (memory, number): (&Memory, usize),
        (receives, word): (bool, u64),
        guard: Guard,
        stream: &Stream,
    ) -> Result<()> {
        let waiting = |value| MemoryOperation::Write {
            address: word,
            value,
        };
        let mut told = None;
        let mut copies = Copies::new(guard);
        let bytes = memory.len();
        for (first, number) in (0..bytes).step_by(self.place.piece).zip(number..) {
            let half = number % 2;
            let [wait, clear] = self.lane.wait(half);
            let piece = (number as u32).wrapping_add(1).max(1);
            let operations = [waiting(piece), wait, clear, waiting(0)];
            let operations: Vec<_> = told.into_iter().chain(operations).collect();
            stream.operate(&operations)?;
            let length = self.place.piece.min(bytes - first);
            let place = self.place.address + (half * self.place.piece) as u64;
            // The data that a failed rank puts there, or finds there, is no message.
            match receives {
                true => copies
                    .guarded()
                    .scatter(Origin::at(place), memory, first, length),
                false => copies.guarded().gather(memory, first, length, place),
            }
            copies.flush(stream)?;
            told = Some(self.lane.tell(half));
        }
        match told {
            Some(told) => stream.operate(&[told]),
            None => Ok(()),
        }
    }
}

impl Check {
    fn compare(&self, rank: Rank) -> Result<()> {
        let theirs = CapturedPrint::decode(&self.note);
        if theirs == self.print {
            return Ok(());
        }
        debug_assert!(self.receives, "what is sent does not change");
        Err(Error::new(
            Code::Mismatch,
            format!(
                "rank {rank} captured a receive of {} from rank {}, which captured a send of {} in its place: in graphs messages \
                 between two ranks meet in the order in which they are captured, and must have the same tag, type and length",
                self.print.in_words(),
                self.peer,
                theirs.in_words()
            ),
        )
        .with_peer(self.peer)
        .with_operation(self.name.clone()))
    }
}

/// Where a lane's halves are, once both ranks can reach them. Each rank serves the others meanwhile, so that it does not matter
/// which messages each of them captures first.
fn await_place(
    (peer, receives): (Rank, bool),
    timeout: Duration,
    (cpu, depots): (&Group, &Depots),
) -> Result<LanePlace> {
    let since = Instant::now();
    let mut looks = 0;
    loop {
        cpu.open_message_link(peer)?;
        depots.offer_lanes(cpu);
        let found = depots.lane(peer, receives);
        if let Ok(Some(place)) = found {
            return Ok(place);
        }
        // A peer that is gone may have refused before.
        if let Some(error) = cpu.lost(|gone| gone == peer) {
            return Err(error);
        }
        found?;
        if cpu.has_message_link(peer) && cpu.message_page(peer).is_none() {
            return Err(Error::unsupported(format!(
                "messages with rank {peer} cannot be captured in a graph: the two share no memory of the host"
            )));
        }
        if since.elapsed() > timeout {
            let what = if receives { "send to" } else { "receive from" };
            return Err(Error::new(
                Code::Timeout,
                format!(
                    "{} has not captured a {what} rank {} within {:.3} s; before its first captured message each of two ranks \
                     waits for the other's",
                    cpu.name_of(peer),
                    cpu.rank(),
                    timeout.as_secs_f64()
                ),
            )
            .with_peer(peer));
        }
        pause(&mut looks);
    }
}

/// Refuses what no graph can do.
///
/// # Errors
/// `Unsupported`, with the reason.
pub(super) fn check_capture(
    cpu: &Group,
    collective: Collective,
    peer: Option<Rank>,
) -> Result<Rank> {
    let refused = |reason: &str| {
        Err(Error::unsupported(format!(
            "{collective} cannot be captured in a graph: {reason}"
        )))
    };
    let Some(peer) = peer else {
        return refused("a graph does the same each time, so a captured receive names its rank");
    };
    if peer == cpu.rank() {
        return refused("a rank meets itself by the host");
    }
    if !cpu.is_on_one_host() {
        return refused("the ranks are on several hosts, and messages go through the host");
    }
    if cpu.config().window_bytes.is_some_and(|bytes| bytes.0 == 0) {
        return refused("window_bytes is 0, and messages go through the host");
    }
    if cpu.world() > MOST_RANKS {
        return refused("too many ranks share the host");
    }
    Ok(peer)
}

#[cfg(test)]
mod tests {
    use super::CapturedPrint;

    #[test]
    fn a_print_travels() {
        let print = CapturedPrint {
            tag: 5,
            bytes: u64::MAX,
            dtype: 3,
        };
        assert_eq!(CapturedPrint::decode(&print.encode()), print);
    }
}
