//! A collective over *windows*, on one rank, as data.
//!
//! Every rank owns a window, memory of two halves that all ranks can read. A collective is cut into chunks that fit a
//! half; chunks use the halves in turn. For each chunk a rank puts what the others need into its half and publishes it,
//! awaits what the others have published, works on that, and releases their halves. So a plan has two kinds of steps:
//! meetings, which order the ranks, and work on memory, which is done in program order. No thread of the host has to
//! wait: a plan can be put into a stream as it is.
//!
//! # Meetings
//!
//! Per ordered pair (owner of a window, reader) and half there are three binary semaphores:
//!
//! - *empty*, at first set: the reader has no use for what is in the owner's half. An owner waits for those of
//!   all peers, whichever read the half last, and takes those of the chunk's readers. A reader signals it.
//! - *contributions*: the owner's half holds its input. The owner signals it, a reader takes it.
//! - *results*: the owner of this one has left its part of the result there (two-shot), or in the other's half (`all_reduce`);
//!   likewise.
//!
//! A plan leaves them as it found them, once every peer has got through its own. The values set and taken are
//! constants, not counts, so the same steps may be repeated any number of times: in a CUDA graph, say.
//!
//! The front of a chunk (claim, put, publish) comes before the back (await, work, release) of the chunk before it: the
//! other half is free for it, and peers that are late find it done.
//!
//! A rank knows its own counts only in `gather`, `scatter` and `all_to_all` with a count per rank or pair. Ranks then
//! have different numbers of chunks. That is well, since what two ranks do with each other depends on what both know:
//! chunk k of a pair is elements from k times the piece on, and the piece depends on the room and the world alone.
//!
//! [`check`](super::check) runs the plans of all ranks on symbols and proves the result, the order and that no rank reads
//! what another may be writing.

mod in_place;
mod moves;
mod price;
mod reductions;
#[cfg(test)]
pub(crate) mod tests;

pub use self::in_place::{InPlace, Put};
use super::family::Family;
use super::signals::Semaphore;
pub use super::signals::{HALVES, MOST_RANKS, Peers};
use super::{Buffer, Counts, Order, Plan, Shape, Sources, Span, Step};
use crate::types::{Collective, Rank};

/// Copy-in, copy-out.
pub(super) const FAMILY: Family = Family::built_elsewhere(price::price);

/// The room in a window, in elements of the request's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Elements of a half. At least one per rank.
    pub half: usize,
    /// Work is fast from multiples of this number of elements on.
    pub align: usize,
}

impl Room {
    /// A share of the half for each of `parts`, from multiples of the alignment on where there is room for that.
    fn share(&self, parts: usize) -> usize {
        let share = self.half / parts.max(1);
        match share / self.align * self.align {
            0 => share,
            aligned => aligned,
        }
    }

    /// The longest chunk.
    fn chunk(&self) -> usize {
        self.share(1)
    }
}

/// How many times the data crosses the windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shots {
    /// Every rank reads all of it from every rank: one meeting.
    One,
    /// Every rank makes a part of the result and gets the other parts, or is given them in `all_reduce`: two meetings, less to
    /// read. For `all_reduce`, `reduce` and `broadcast`; others do the same in either case.
    Two,
    /// The first rank makes the whole result and gives it to the others: two meetings, the least to read in all, all of it by
    /// one rank. For `all_reduce`; others do as in one shot.
    ByFirst,
}

/// This rank's plan. `premultiplied`: what is put is multiplied on the way, so that a rank's own contribution is what
/// lies in its window, not its input.
///
/// Room, shots and `premultiplied` must be the same on all ranks. `None` for a shape that is malformed, a world of more
/// than [`MOST_RANKS`], and a half with less than one element per rank.
pub fn build(shape: &Shape, room: &Room, shots: Shots, premultiplied: bool) -> Option<Plan> {
    let fits = shape.world <= MOST_RANKS && room.half >= shape.world && room.align > 0;
    if !fits || !super::applicable(super::Algorithm::Direct, shape) {
        return None;
    }
    let task = Task {
        shape,
        room,
        others: Peers::others(shape.rank, shape.world),
        premultiplied,
    };
    if shape.world == 1 {
        return Some(in_order(task.alone()));
    }
    let two = shots == Shots::Two && shape.world > 2;
    let chunks = match shape.collective {
        Collective::AllReduce if shots == Shots::Two => task.all_reduce_two_shot(),
        Collective::AllReduce if shots == Shots::ByFirst => task.all_reduce_by_first(),
        Collective::AllReduce => task.all_reduce(),
        Collective::Reduce if two => task.reduce_two_shot(),
        Collective::Reduce => task.reduce(),
        Collective::Broadcast if two => task.broadcast_two_shot(),
        Collective::Broadcast => task.broadcast(),
        Collective::AllGather => task.all_gather(),
        Collective::ReduceScatter => task.reduce_scatter(),
        Collective::Gather => task.gather(),
        Collective::Scatter => task.scatter(),
        Collective::AllToAll => task.all_to_all(),
        Collective::Barrier => task.barrier(),
        Collective::Scan | Collective::Exscan => task.prefix(),
        Collective::Send | Collective::Recv => return None,
    };
    let mut steps: Vec<Step> = task.keep().into_iter().collect();
    steps.extend(chunks.weave());
    steps.retain(|step| !is_idle(step));
    Some(in_order(steps))
}

/// This rank's plan of an `all_reduce` in which the ranks go in step, as ranks that share a few cores do: no rank puts
/// a chunk before all have reduced the one before it. Then one half is enough, with contributions in its first part and
/// results in the second, and all of it stays in the caches. There is nothing to claim and to release between chunks: a
/// rank that has published its results no longer reads the contributions, and a rank that has published its next
/// contributions has read the results.
///
/// Room must be the same on all ranks. `None` for other collectives, and where [`build`] is.
pub(crate) fn build_in_step(shape: &Shape, room: &Room) -> Option<Plan> {
    let chunk = room.share(2);
    let fits = shape.collective == Collective::AllReduce
        && (2..=MOST_RANKS).contains(&shape.world)
        && room.align > 0
        && chunk >= shape.world
        && super::applicable(super::Algorithm::Direct, shape);
    if !fits {
        return None;
    }
    let task = Task {
        shape,
        room,
        others: Peers::others(shape.rank, shape.world),
        premultiplied: false,
    };
    let mut steps = task.all_reduce_in_step(chunk);
    steps.retain(|step| !is_idle(step));
    Some(in_order(steps))
}

/// A plan of these steps.
fn in_order(steps: Vec<Step>) -> Plan {
    Plan {
        steps,
        scratch: 0,
        order: Order::InOrder,
        lends: false,
    }
}

/// Whether a step does nothing: it signals to no rank, or works on no elements. A wait that takes nothing still waits.
fn is_idle(step: &Step) -> bool {
    match *step {
        Step::Signal { to, .. } => to.is_empty(),
        Step::Wait { from, .. } => from.is_empty(),
        Step::ReduceAll { dst, .. } | Step::Copy { dst, .. } => dst.len == 0,
        _ => false,
    }
}

/// The input from which plans are made.
struct Task<'a> {
    shape: &'a Shape<'a>,
    room: &'a Room,
    others: Peers,
    premultiplied: bool,
}

/// The chunks of an operation on one rank, in order.
#[derive(Default)]
struct Chunks(Vec<Chunk>);

/// One chunk.
#[derive(Default)]
struct Chunk {
    /// Claim, put, publish.
    front: Vec<Step>,
    /// Await, work, release.
    back: Vec<Step>,
}

impl Chunks {
    /// Each front before the back of the chunk before it.
    fn weave(self) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut back = Vec::new();
        for chunk in self.0 {
            steps.extend(chunk.front);
            steps.append(&mut back);
            back = chunk.back;
        }
        steps.append(&mut back);
        steps
    }
}

impl Task<'_> {
    /// The chunks `0..count`, made by `make` from their numbers and halves.
    fn chunks(&self, count: usize, make: impl Fn(usize, usize) -> Chunk) -> Chunks {
        Chunks(
            (0..count)
                .map(|index| make(index, index % HALVES))
                .collect(),
        )
    }

    /// A world of one.
    fn alone(&self) -> Vec<Step> {
        let shape = self.shape;
        let total = match shape.collective {
            Collective::Broadcast | Collective::Barrier | Collective::Exscan => 0,
            Collective::AllGather if shape.in_place => 0,
            _ => self.count(0),
        };
        let dst = Span::new(Buffer::Output, 0, total);
        let src = Span::new(self.source(), 0, total);
        if total == 0 {
            return Vec::new();
        }
        if shape.collective.reduces() && !self.premultiplied {
            // It may be more than a copy: a logical operator makes truth values.
            return vec![self.reduce_window(0, 0, Some(src), dst)];
        }
        vec![Step::Copy { src, dst }]
    }

    /// Where this rank's input lies.
    fn source(&self) -> Buffer {
        match self.shape.in_place || self.shape.collective == Collective::Broadcast {
            true => Buffer::Output,
            false => Buffer::Input,
        }
    }

    /// The count of `rank`, as this rank knows it; to `rank` in `all_to_all`.
    fn count(&self, rank: Rank) -> usize {
        match self.shape.counts {
            Counts::Even(count) => count,
            Counts::PerRank(counts) => counts[rank],
            Counts::PerPair { send, .. } => send[rank],
        }
    }

    /// Elements from `rank` in `all_to_all`; else [`Task::count`].
    fn count_from(&self, rank: Rank) -> usize {
        match self.shape.counts {
            Counts::PerPair { recv, .. } => recv[rank],
            _ => self.count(rank),
        }
    }

    /// Where the block of, or to, `rank` begins.
    fn before(&self, rank: Rank) -> usize {
        (0..rank).map(|rank| self.count(rank)).sum()
    }

    /// Where the block from `rank` begins.
    fn before_from(&self, rank: Rank) -> usize {
        (0..rank).map(|rank| self.count_from(rank)).sum()
    }

    /// The part of the others that `chosen` holds for.
    fn those(&self, chosen: impl Fn(Rank) -> bool) -> Peers {
        self.others.iter().filter(|rank| chosen(*rank)).collect()
    }

    /// Waits until no peer reads the own half, whichever read it last. Then it is written for `readers`.
    fn claim(&self, half: usize, readers: Peers) -> Step {
        Step::Wait {
            half,
            what: Semaphore::Empty,
            from: self.others,
            take: readers,
        }
    }

    /// Tells the owners of windows that this rank has no use for their half any more.
    fn release(&self, half: usize, to: Peers) -> Step {
        let what = Semaphore::Empty;
        Step::Signal { half, what, to }
    }

    /// Tells peers that what this rank contributes is in its half.
    fn publish(&self, half: usize, to: Peers) -> Step {
        let what = Semaphore::Contributions;
        Step::Signal { half, what, to }
    }

    /// Waits for what peers contribute.
    fn await_from(&self, half: usize, from: Peers) -> Step {
        Step::Wait {
            half,
            what: Semaphore::Contributions,
            from,
            take: from,
        }
    }

    /// Tells peers that this rank's part of the result is in its half.
    fn publish_results(&self, half: usize, to: Peers) -> Step {
        let what = Semaphore::Results;
        Step::Signal { half, what, to }
    }

    /// Waits for the peers' parts of the result.
    fn await_results(&self, half: usize, from: Peers) -> Step {
        Step::Wait {
            half,
            what: Semaphore::Results,
            from,
            take: from,
        }
    }

    /// Reduces what lies from `offset` on in the halves of all ranks that contribute; `own` is this rank's contribution if it
    /// is not there.
    fn reduce_window(&self, half: usize, offset: usize, own: Option<Span>, dst: Span) -> Step {
        Step::ReduceAll {
            srcs: Sources::Windows { half, offset, own },
            dst,
            copies: Peers::none(),
        }
    }

    /// Copies `src`, of the caller's memory, into the own half from `at` on.
    fn put(&self, half: usize, src: Span, at: usize) -> Step {
        let dst = self.window(half, at, src.len);
        Step::Copy { src, dst }
    }

    /// Copies what lies from `at` on in the half of `from`, which may be this rank itself.
    fn get(&self, half: usize, (from, at): (Rank, usize), dst: Span) -> Step {
        let src = Span::new(Buffer::window(from, half), at, dst.len);
        Step::Copy { src, dst }
    }

    /// A span of the own half.
    fn window(&self, half: usize, at: usize, len: usize) -> Span {
        Span::new(Buffer::window(self.shape.rank, half), at, len)
    }

    /// A span of the caller's output.
    fn output(&self, at: usize, len: usize) -> Span {
        Span::new(Buffer::Output, at, len)
    }
}

/// How many pieces of `piece` elements `count` elements are.
fn pieces(count: usize, piece: usize) -> usize {
    count.div_ceil(piece)
}

/// The length of piece `index` of `count` elements; 0 past the end.
fn piece_len(count: usize, piece: usize, index: usize) -> usize {
    count.saturating_sub(index * piece).min(piece)
}
