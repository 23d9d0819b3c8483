//! The calls that the ranks of a world make, with their data and the results that they must have.

use super::random::Random;
use crate::buffer::Memory;
use crate::engine::{Request, Sizes};
use crate::heap::Buffer;
use crate::types::{Collective, DataType, Rank, ReduceOp};

/// Elements of the longest buffers.
const LONG: usize = 60_000;

/// Elements of most buffers, at the most.
const USUAL: usize = 300;

/// The lengths and places of the buffers of a world.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    /// One call in this many is long.
    pub(super) long_once_in: usize,
    /// One call in this many has its buffers in the heap that peers may read.
    pub(super) heap_once_in: usize,
}

/// Bytes after a buffer that nothing may write.
const GUARD: usize = 8;
const GUARD_BYTE: u8 = 0xa5;

/// A step of the programs of all ranks.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Collective(Call),
    /// Reductions in place and broadcasts, all on one buffer, one begun after the other.
    Chain(Vec<Call>),
    /// All at once.
    Messages(Vec<Message>),
}

/// A collective, as all ranks call it.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) collective: Collective,
    pub(super) dtype: DataType,
    pub(super) op: ReduceOp,
    pub(super) root: Rank,
    pub(super) in_place: bool,
    pub(super) in_heap: bool,
    /// Elements from each rank to each rank (`all_to_all`), or of each rank in its only row.
    pub(super) counts: Vec<Vec<usize>>,
    /// All of those are equal, and the call says so.
    pub(super) is_even: bool,
    pub(super) data: u64,
}

/// A message between two ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) tag: u64,
    pub(super) bytes: usize,
    /// The receiver takes it from any rank.
    pub(super) from_any: bool,
    pub(super) data: u64,
}

/// All but messages, which have steps of their own.
fn collectives() -> Vec<Collective> {
    let is_message = |it: &Collective| matches!(it, Collective::Send | Collective::Recv);
    let all = Collective::ALL.into_iter();
    all.filter(|it| !is_message(it)).collect()
}

/// Those with a count for each rank.
const OWN_COUNTS: [Collective; 5] = [
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
];

impl Step {
    pub(super) fn random(random: &mut Random, world: usize, style: Style) -> Self {
        match random.below(8) {
            0 | 1 => Self::Messages(messages(random, world, style)),
            2 => Self::Chain(chain(random, world, style)),
            _ => Self::Collective(Call::random(random, world, style)),
        }
    }

    /// Whether ranks cannot tell one from the other: both are the same call, with other data.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let (Self::Collective(a), Self::Collective(b)) = (self, other) else {
            return false;
        };
        let what = |call: &Call| {
            (
                call.collective,
                call.dtype,
                call.op,
                call.root,
                call.is_even,
            )
        };
        what(a) == what(b) && a.counts == b.counts
    }

    /// The same collective with other data.
    pub(super) fn again(&self, random: &mut Random) -> Option<Self> {
        let Self::Collective(call) = self else {
            return None;
        };
        Some(Self::Collective(Call {
            data: random.next(),
            ..call.clone()
        }))
    }
}

fn chain(random: &mut Random, world: usize, style: Style) -> Vec<Call> {
    let first = Call {
        collective: Collective::AllReduce,
        in_place: true,
        is_even: true,
        counts: vec![vec![length(random, style) / world; world]],
        ..Call::random(random, world, style)
    };
    let ops = [
        ReduceOp::Max,
        ReduceOp::Sum,
        premultiplied(first.dtype, 1.0),
    ];
    let mut call = |number| Call {
        collective: random.pick(&[Collective::AllReduce, Collective::Broadcast]),
        // The sum of more sums would be too large for a byte.
        op: random.pick(&ops[..3 - number / 2 * 2]),
        root: random.below(world),
        ..first.clone()
    };
    (0..2 + first.data as usize % 2).map(&mut call).collect()
}

/// A sum of contributions that are multiplied before, where the type has one.
fn premultiplied(dtype: DataType, factor: f64) -> ReduceOp {
    match dtype {
        DataType::Float32 => ReduceOp::PremulSum(factor),
        _ => ReduceOp::Sum,
    }
}

/// The values that all ranks must have after a chain of calls.
fn chained(calls: &[Call], world: usize) -> Vec<u8> {
    let first = &calls[0];
    let mut held: Vec<_> = (0..world)
        .map(|rank| first.contribution_to_all(rank))
        .collect();
    for call in calls {
        let all = match call.collective {
            Collective::Broadcast => held[call.root].clone(),
            _ => call.reduce(&held),
        };
        held.fill(all);
    }
    held.swap_remove(0)
}

/// This rank's part of a chain: one buffer.
pub(super) fn share_of_chain(calls: &[Call], rank: Rank, world: usize) -> Share {
    let first = &calls[0];
    let make = |values: &[u8]| encode(first.dtype, values);
    Share {
        input: None,
        output: Some(Store::new(
            &make(&first.contribution_to_all(rank)),
            first.in_heap,
        )),
        expected: Some(make(&chained(calls, world))),
    }
}

fn messages(random: &mut Random, world: usize, style: Style) -> Vec<Message> {
    let count = 1 + random.below(2 * world);
    let message = |tag| {
        let from = random.below(world);
        Message {
            from,
            to: (from + 1 + random.below(world - 1)) % world,
            // Now and then two have the same: they must arrive in their order.
            tag: tag as u64 / 2,
            bytes: length(random, style),
            // One receive from any rank at a time, so that it is known which message it gets.
            from_any: false,
            data: random.next(),
        }
    };
    let mut messages: Vec<Message> = (0..count).map(message).collect();
    let (first, tag) = (messages[0], count as u64);
    let from_any = Message {
        from_any: true,
        tag,
        ..first
    };
    // Alone, no other message tells that its sender has gone.
    if random.once_in(4) {
        return vec![from_any];
    }
    messages.push(from_any);
    messages
}

fn length(random: &mut Random, style: Style) -> usize {
    match random.once_in(style.long_once_in) {
        true => random.below(LONG),
        false => random.length(USUAL),
    }
}

impl Call {
    fn random(random: &mut Random, world: usize, style: Style) -> Self {
        let collective = random.pick(&collectives());
        let is_even = random.below(3) > 0;
        let dtype = random.pick(&[DataType::Float32, DataType::Int32, DataType::UInt8]);
        let one = length(random, style);
        let has_own_counts = OWN_COUNTS.contains(&collective);
        let rows = match collective {
            Collective::AllToAll => world,
            _ => 1,
        };
        let is_even = is_even || !has_own_counts;
        let mut row = || -> Vec<usize> {
            let count = |_| match is_even {
                true => one / world,
                false => random.below(3) * random.length(one / world),
            };
            (0..world).map(count).collect()
        };
        let counts = (0..rows).map(|_| row()).collect();
        let sum = match collective {
            Collective::Scan | Collective::Exscan => ReduceOp::Sum,
            _ => premultiplied(dtype, 2.0),
        };
        Self {
            collective,
            dtype,
            op: random.pick(&[ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, sum]),
            root: random.below(world),
            in_place: random.once_in(2),
            in_heap: random.once_in(style.heap_once_in),
            counts,
            is_even,
            data: random.next(),
        }
    }

    fn has_own_counts(&self) -> bool {
        OWN_COUNTS.contains(&self.collective)
    }

    fn row(&self, rank: Rank) -> &[usize] {
        &self.counts[rank.min(self.counts.len() - 1)]
    }

    /// The value of element `index` of what `rank` contributes.
    fn value(&self, rank: Rank, index: usize) -> u8 {
        let mixed = self.data ^ (rank as u64 * 0x1_0001 + index as u64).wrapping_mul(0x9e37_79b9);
        (mixed >> 7) as u8 % 8
    }

    fn values(&self, rank: Rank, range: std::ops::Range<usize>) -> Vec<u8> {
        range.map(|index| self.value(rank, index)).collect()
    }

    /// Combines the values of all ranks.
    fn reduce(&self, held: &[Vec<u8>]) -> Vec<u8> {
        let reduce = |index: usize| {
            let values = held.iter().map(|values| values[index]);
            match self.op {
                ReduceOp::Max => values.max(),
                ReduceOp::Min => values.min(),
                ReduceOp::PremulSum(factor) => Some(values.sum::<u8>() * factor as u8),
                _ => Some(values.sum()),
            }
        };
        (0..held[0].len()).filter_map(reduce).collect()
    }

    fn reduced(&self, world: usize, range: std::ops::Range<usize>) -> Vec<u8> {
        let values = |rank| self.values(rank, range.clone());
        self.reduce(&(0..world).map(values).collect::<Vec<_>>())
    }

    /// The values of a rank for a reduction of all.
    fn contribution_to_all(&self, rank: Rank) -> Vec<u8> {
        self.values(rank, 0..self.row(rank).iter().sum())
    }

    /// The values that this rank contributes.
    fn contribution(&self, rank: Rank) -> Vec<u8> {
        let counts = self.row(rank);
        let is_root = rank == self.root;
        let count = match self.collective {
            Collective::Barrier => 0,
            Collective::Scatter | Collective::Broadcast if !is_root => 0,
            Collective::AllGather | Collective::Gather => counts[rank],
            _ => counts.iter().sum(),
        };
        self.values(rank, 0..count)
    }

    /// The values that this rank must have in the end, if it gets any.
    fn result(&self, rank: Rank, world: usize) -> Option<Vec<u8>> {
        let counts = self.row(rank);
        let total = counts.iter().sum();
        let before: usize = counts[..rank].iter().sum();
        let own = before..before + counts[rank];
        let is_root = rank == self.root;
        match self.collective {
            Collective::AllReduce => Some(self.reduced(world, 0..total)),
            Collective::Scan => Some(self.reduced(rank + 1, 0..total)),
            Collective::Exscan if rank > 0 => Some(self.reduced(rank, 0..total)),
            // Rank 0 keeps its output.
            Collective::Exscan => Some(match self.in_place {
                true => self.values(rank, 0..total),
                false => vec![0; total],
            }),
            Collective::Reduce => is_root.then(|| self.reduced(world, 0..total)),
            Collective::Broadcast => Some(self.values(self.root, 0..total)),
            Collective::AllGather => Some(self.gathered(world)),
            Collective::Gather => is_root.then(|| self.gathered(world)),
            Collective::ReduceScatter => Some(self.reduced(world, own)),
            Collective::Scatter => Some(self.values(self.root, own)),
            Collective::AllToAll => {
                let block = |from: Rank| {
                    let start = self.row(from)[..rank].iter().sum();
                    self.values(from, start..start + self.row(from)[rank])
                };
                Some((0..world).flat_map(block).collect())
            }
            _ => None,
        }
    }

    fn gathered(&self, world: usize) -> Vec<u8> {
        let block = |rank: Rank| self.values(rank, 0..self.row(rank)[rank]);
        (0..world).flat_map(block).collect()
    }

    /// Where in its output the values lie that this rank contributes, if they do.
    fn place(&self, rank: Rank) -> Option<usize> {
        let is_root = rank == self.root;
        match self.collective {
            Collective::AllReduce | Collective::Scan | Collective::Exscan => {
                self.in_place.then_some(0)
            }
            Collective::Reduce => (self.in_place && is_root).then_some(0),
            Collective::Broadcast => Some(0),
            Collective::AllGather => self.in_place.then(|| self.row(rank)[..rank].iter().sum()),
            _ => None,
        }
    }

    /// This rank's part: its data, and the result that it must have.
    pub(super) fn share(&self, rank: Rank, world: usize) -> Share {
        let (input, place) = (self.contribution(rank), self.place(rank));
        let result = self.result(rank, world);
        let make = |values: &[u8]| Store::new(&encode(self.dtype, values), self.in_heap);
        let output = result.as_ref().map(|result| {
            let mut values = vec![0; result.len()];
            if let Some(place) = place {
                values[place..place + input.len()].copy_from_slice(&input);
            }
            make(&values)
        });
        let gives = match self.collective {
            Collective::Barrier => false,
            Collective::Scatter => rank == self.root,
            _ => true,
        };
        Share {
            input: (gives && place.is_none()).then(|| make(&input)),
            output,
            expected: result.map(|values| encode(self.dtype, &values)),
        }
    }

    /// The call of a rank on its share, which must live until the operation has ended.
    pub(super) fn request(&self, share: &Share, (root, sizes): (Rank, Sizes)) -> Request {
        let Self { dtype, op, .. } = *self;
        let input = share.input.as_ref().map(Store::memory);
        let output = share.output.as_ref().map(Store::memory);
        let some = |memory: Option<Memory>| memory.unwrap_or_else(Memory::empty);
        match self.collective {
            Collective::AllReduce => Request::all_reduce(dtype, op, input, some(output)),
            Collective::Reduce => Request::reduce(dtype, op, root, input, output),
            Collective::Scan => Request::scan(dtype, op, input, some(output)),
            Collective::Exscan => Request::exscan(dtype, op, input, output),
            Collective::Broadcast => Request::broadcast(dtype, root, some(output)),
            Collective::AllGather => Request::all_gather(dtype, input, some(output), sizes),
            Collective::ReduceScatter => {
                Request::reduce_scatter(dtype, op, some(input), some(output), sizes)
            }
            Collective::Gather => Request::gather(dtype, root, some(input), output, sizes),
            Collective::Scatter => Request::scatter(dtype, root, input, some(output), sizes),
            Collective::AllToAll => Request::all_to_all(dtype, some(input), some(output), sizes),
            _ => Request::barrier(),
        }
    }

    pub(super) fn sizes(&self, rank: Rank) -> Sizes {
        let counts = self.row(rank);
        if self.collective == Collective::AllToAll {
            return Sizes::PerPair {
                send: counts.to_vec(),
                recv: self.counts.iter().map(|row| row[rank]).collect(),
            };
        }
        if self.is_even {
            return Sizes::Even(counts[rank]);
        }
        let is_rooted = matches!(self.collective, Collective::Gather | Collective::Scatter);
        let mut known = counts.to_vec();
        if is_rooted && rank != self.root {
            let own = known[rank];
            known.fill(0);
            known[rank] = own;
        }
        Sizes::PerRank(known)
    }

    /// The same call with one thing wrong, as one of the ranks may make it.
    pub(super) fn mistaken(&self, rank: Rank, world: usize, random: &mut Random) -> Option<Self> {
        let mut other = self.clone();
        match random.below(5) {
            4 => {
                // One count of its own, where two ranks alone know it or all do.
                let row = rank.min(other.counts.len() - 1);
                let count = &mut other.counts[row][random.below(world)];
                *count = if *count == 0 { 3 } else { 0 };
                other.is_even = false;
                self.has_own_counts().then_some(other)
            }
            0 => {
                other.collective = random.pick(&collectives());
                other.counts.truncate(1);
                other.is_even = true;
                let count = self.counts[0][0];
                other.counts = vec![
                    vec![count; world];
                    if other.collective == Collective::AllToAll {
                        world
                    } else {
                        1
                    }
                ];
                other.op = ReduceOp::Sum;
                (other.collective != self.collective).then_some(other)
            }
            1 => {
                other.dtype = match self.dtype {
                    DataType::UInt8 => DataType::Int32,
                    DataType::Int32 => DataType::Float32,
                    _ => DataType::UInt8,
                };
                // Another type may have no such sum.
                let is_possible = !matches!(self.op, ReduceOp::PremulSum(_));
                (self.collective != Collective::Barrier && is_possible).then_some(other)
            }
            2 => {
                other.root = (self.root + 1) % world;
                (self.collective.has_root() && world > 1).then_some(other)
            }
            _ => {
                other.op = match self.op {
                    ReduceOp::Sum => ReduceOp::Max,
                    ReduceOp::Max => ReduceOp::Min,
                    _ => ReduceOp::Sum,
                };
                self.collective.reduces().then_some(other)
            }
        }
    }
}

impl Message {
    /// Its tag: steps do not share tags.
    pub(super) fn tag_in(&self, step: usize) -> u64 {
        1000 * step as u64 + self.tag
    }

    pub(super) fn payload(&self) -> Vec<u8> {
        let mut random = Random::new(self.data);
        (0..self.bytes).map(|_| random.next() as u8).collect()
    }
}

fn encode(dtype: DataType, values: &[u8]) -> Vec<u8> {
    let values = values.iter();
    match dtype {
        DataType::Float32 => values.flat_map(|it| f32::from(*it).to_le_bytes()).collect(),
        DataType::Int32 => values.flat_map(|it| i32::from(*it).to_le_bytes()).collect(),
        _ => values.copied().collect(),
    }
}

/// The memory of one rank's part of a call.
pub(super) struct Share {
    pub(super) input: Option<Store>,
    pub(super) output: Option<Store>,
    /// The right output.
    pub(super) expected: Option<Vec<u8>>,
}

/// A buffer with a guard behind it.
pub(super) struct Store {
    /// Owns what `start` points at.
    _words: Words,
    start: *mut u8,
    bytes: usize,
    whole: usize,
}

enum Words {
    Private { _words: Vec<u64> },
    Heap { _words: Buffer<u64> },
}

impl Store {
    pub(super) fn new(content: &[u8], in_heap: bool) -> Self {
        let count = (content.len() + GUARD).div_ceil(8);
        let (start, words) = match in_heap {
            true => {
                let mut words = Buffer::zeroed(count);
                (words.as_mut_ptr(), Words::Heap { _words: words })
            }
            false => {
                let mut words = vec![0_u64; count];
                (words.as_mut_ptr(), Words::Private { _words: words })
            }
        };
        let store = Self {
            _words: words,
            start: start.cast(),
            bytes: content.len(),
            whole: count * 8,
        };
        // SAFETY: the words are there for as long as the store is, and no other code knows of them yet.
        let all = unsafe { std::slice::from_raw_parts_mut(store.start, store.whole) };
        all.fill(GUARD_BYTE);
        all[..content.len()].copy_from_slice(content);
        store
    }

    fn all(&self) -> &[u8] {
        // SAFETY: the words are there. Operations write to them between two looks and never during one: a world has one thread.
        unsafe { std::slice::from_raw_parts(self.start, self.whole) }
    }

    pub(super) fn content(&self) -> &[u8] {
        &self.all()[..self.bytes]
    }

    pub(super) fn is_guarded(&self) -> bool {
        let guard = &self.all()[self.bytes..];
        guard.iter().all(|byte| *byte == GUARD_BYTE)
    }

    pub(super) fn memory(&self) -> Memory {
        // SAFETY: the world keeps the store until all of its groups are closed.
        unsafe { Memory::from_raw_parts(self.start, self.bytes) }
    }
}
