//! An all_reduce of float32 that sends 8 bits of each number between hosts, and a scale for every 128: for links that are slow
//! beside the memory.
//!
//! 1. Inside a host, in full precision and through shared memory, every rank sums a shard of the host's contributions.
//! 2. Ranks of the same place on their hosts share the shard out among them. Each codes the parts of the others, sends them, and adds
//!    what it receives for its own part to its own contribution, in full precision.
//! 3. It codes its part of the sum and gives it to the others; all of them, and it, take what is coded for the result.
//! 4. Inside a host the shards are gathered.
//!
//! Long calls do so piece after piece, with the network busy while ranks of a host exchange other pieces.
//!
//! So all ranks have the same bits, since all decode the same bytes, and each number is rounded once for every other host and
//! once as a sum. Hosts with different numbers of ranks leave out the parts inside a host: then all ranks do what is between hosts.

use std::collections::VecDeque;
use std::sync::OnceLock;

use parking_lot::Mutex;

use super::{Communicator, Work};
use crate::buffer::Memory;
use crate::engine::{Request, Sizes};
use crate::error::Result;
use crate::reduce::int8::{BLOCK, add_decoded, coded_bytes, decode, encode};
use crate::types::{DataType, Rank, ReduceOp};

/// Numbers that are on their way together.
const PIECE: usize = 1 << 20;

/// The groups of a communicator that take part, made when they are first needed.
#[derive(Debug, Default)]
pub(super) struct Levels {
    level: OnceLock<Box<Level>>,
    /// Held by a call: those of several threads come one after the other.
    calls: Mutex<()>,
}

#[derive(Debug)]
struct Level {
    /// The ranks of this host, where all hosts have as many and more than one.
    inside: Option<Communicator>,
    /// The ranks of the same place on every host, or all.
    between: Communicator,
}

impl Communicator {
    /// `values` becomes the sum of all ranks' values, or their average. Between hosts they travel in 8 bits each, with a scale for
    /// every 128: where that is a slow link it takes a third or a quarter of the time. With `h` hosts a result is off by
    /// at most `1/254` of the largest magnitude among its 128 neighbours, in each of `h - 1` contributions and in the sum. Where one
    /// of them is not finite, all are NaN. All ranks get the same bits. Ranks that are all on one host exchange float32.
    ///
    /// Blocks. The ranks call it in the same order, as any other collective, with as many values.
    ///
    /// # Errors
    /// As a collective.
    pub fn all_reduce_int8(&self, values: &mut [f32], average: bool) -> Result<()> {
        let op = match average {
            true => ReduceOp::Avg,
            false => ReduceOp::Sum,
        };
        if self.group.is_on_one_host() {
            let request = Request::all_reduce(DataType::Float32, op, None, Memory::empty());
            let sizes = Sizes::Even(values.len());
            let request = Request { sizes, ..request };
            return self.group.run_on(request, None, Some(values)).map(drop);
        }
        let _call = self.levels.calls.lock();
        let level = match self.levels.level.get() {
            Some(level) => level,
            None => {
                let made = Box::new(Level::of(self)?);
                self.levels.level.get_or_init(|| made)
            }
        };
        level
            .groups()
            .for_each(|group| group.set_timeout(self.timeout()));
        let ranks = average.then_some(self.world_size() as f32);
        level.all_reduce(values, ranks)
    }
}

impl Levels {
    /// The groups have ended with the one that they are of.
    pub(super) fn end(&self, end: impl Fn(&Communicator)) {
        if let Some(level) = self.level.get() {
            level.groups().for_each(end);
        }
    }
}

impl Level {
    fn of(comm: &Communicator) -> Result<Self> {
        let host_of = comm.group.host_of();
        let on = |host: usize| -> Vec<Rank> {
            let ranks = 0..host_of.len();
            ranks.filter(|rank| host_of[*rank] == host).collect()
        };
        let here = on(host_of[comm.rank()]);
        let hosts = 1 + host_of.iter().copied().max().unwrap_or(0);
        let is_even = here.len() > 1 && (0..hosts).all(|host| on(host).len() == here.len());
        let group = |ranks: &[Rank], label: &[u8]| {
            let made = comm.subgroup(ranks, label)?;
            Ok(made.expect("this rank is among them"))
        };
        if !is_even {
            let all: Vec<Rank> = (0..host_of.len()).collect();
            return Ok(Self {
                inside: None,
                between: group(&all, b"int8, all")?,
            });
        }
        let place = here.iter().position(|rank| *rank == comm.rank());
        let place = place.expect("this rank is on its host");
        let across: Vec<Rank> = (0..hosts).map(|host| on(host)[place]).collect();
        Ok(Self {
            inside: Some(group(&here, b"int8, inside")?),
            between: group(&across, b"int8, between")?,
        })
    }

    fn groups(&self) -> impl Iterator<Item = &Communicator> {
        self.inside.iter().chain([&self.between])
    }

    /// Piece after piece, so that what is between hosts goes on while ranks of a host exchange the pieces before and after.
    fn all_reduce(&self, values: &mut [f32], ranks: Option<f32>) -> Result<()> {
        let mut pieces: Vec<&mut [f32]> = values.chunks_mut(PIECE).collect();
        let (mut contributed, mut summed) = (VecDeque::new(), VecDeque::new());
        let mut spare = Spare {
            is_single: pieces.len() == 1,
            ..Spare::default()
        };
        for at in 0..pieces.len() + 2 {
            if at >= 2 {
                let (first, sums): (usize, Sums<'_>) = summed.pop_front().expect("two turns ago");
                let shard = sums.finish(&mut spare)?;
                self.gather_inside(&shard, pieces[first])?;
                spare.floats.push(shard);
            }
            if at < pieces.len() {
                let mut shard = spare.floats.pop().unwrap_or_default();
                self.scatter_inside(pieces[at], &mut shard)?;
                let contribution = Contribution::send(&self.between, shard, &mut spare)?;
                contributed.push_back((at, contribution));
            }
            if at >= 1 && at <= pieces.len() {
                let (first, contribution) = contributed.pop_front().expect("the turn before");
                summed.push_back((first, contribution.add(ranks, &mut spare)?));
            }
        }
        Ok(())
    }

    /// `shard` becomes this rank's shard of the sum over its host.
    fn scatter_inside(&self, values: &[f32], shard: &mut Vec<f32>) -> Result<()> {
        let Some(inside) = &self.inside else {
            shard.clear();
            shard.extend_from_slice(values);
            return Ok(());
        };
        let counts = shares(values.len(), inside.world_size());
        shard.resize(counts[inside.rank()], 0.0);
        let nothing = Memory::empty;
        let (dtype, sizes) = (DataType::Float32, Sizes::PerRank(counts));
        let request = Request {
            input: None,
            ..Request::reduce_scatter(dtype, ReduceOp::Sum, nothing(), nothing(), sizes)
        };
        let ran = inside
            .group
            .run_on(request, Some(values), Some(&mut shard[..]));
        ran.map(drop)
    }

    fn gather_inside(&self, shard: &[f32], values: &mut [f32]) -> Result<()> {
        let Some(inside) = &self.inside else {
            values.copy_from_slice(shard);
            return Ok(());
        };
        let sizes = Sizes::PerRank(shares(values.len(), inside.world_size()));
        let request = Request::all_gather(DataType::Float32, None, Memory::empty(), sizes);
        let ran = inside.group.run_on(request, Some(shard), Some(values));
        ran.map(drop)
    }
}

/// Memory of pieces that have ended, for those to come: what is new costs a fault for every page.
#[derive(Default)]
struct Spare {
    floats: Vec<Vec<f32>>,
    bytes: Vec<Vec<u8>>,
    /// There is one piece: nothing else is done while it is on its way.
    is_single: bool,
}

impl Spare {
    /// So many bytes, with whatever is in them.
    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = self.bytes.pop().unwrap_or_default();
        bytes.resize(count, 0);
        bytes
    }
}

/// A shard whose parts are on their way to the ranks that add them up.
struct Contribution<'a> {
    shard: Vec<f32>,
    counts: Vec<usize>,
    exchange: Flight<'a>,
}

/// A shard whose sums are on their way to all.
struct Sums<'a> {
    shard: Vec<f32>,
    counts: Vec<usize>,
    gathering: Flight<'a>,
}

impl<'a> Contribution<'a> {
    fn send(between: &'a Communicator, shard: Vec<f32>, spare: &mut Spare) -> Result<Self> {
        let (own, world) = (between.rank(), between.world_size());
        let counts = shares(shard.len(), world);
        let bytes = |rank: Rank, peer: Rank| match peer == own {
            true => 0,
            false => coded_bytes(counts[rank]),
        };
        let send: Vec<usize> = (0..world).map(|peer| bytes(peer, peer)).collect();
        let recv: Vec<usize> = (0..world).map(|peer| bytes(own, peer)).collect();
        let mut coded = spare.bytes(send.iter().sum());
        let (mut values, mut rest) = (&shard[..], &mut coded[..]);
        for peer in 0..world {
            let (part, after) = values.split_at(counts[peer]);
            values = after;
            let (place, after) = rest.split_at_mut(send[peer]);
            rest = after;
            if peer != own {
                encode(part, place);
            }
        }
        let received = spare.bytes(recv.iter().sum());
        let nothing = Memory::empty;
        let sizes = Sizes::PerPair { send, recv };
        let request = Request::all_to_all(DataType::UInt8, nothing(), nothing(), sizes);
        Ok(Self {
            shard,
            counts,
            exchange: Flight::start(between, request, (coded, received), spare)?,
        })
    }

    /// Adds what the others have for this rank's part, and sends the sums out.
    fn add(self, ranks: Option<f32>, spare: &mut Spare) -> Result<Sums<'a>> {
        let between = self.exchange.comm;
        let (counts, mut shard) = (self.counts, self.shard);
        let own = between.rank();
        let received = self.exchange.land(spare)?;
        let first: usize = counts[..own].iter().sum();
        let part = &mut shard[first..first + counts[own]];
        let mut coded = spare.bytes(coded_bytes(part.len()));
        for contribution in received.chunks_exact(coded.len().max(1)) {
            add_decoded(contribution, part);
        }
        if let Some(ranks) = ranks {
            part.iter_mut().for_each(|value| *value /= ranks);
        }
        encode(part, &mut coded);
        let bytes: Vec<usize> = counts.iter().map(|count| coded_bytes(*count)).collect();
        let all = spare.bytes(bytes.iter().sum());
        spare.bytes.push(received);
        let sizes = Sizes::PerRank(bytes);
        let request = Request::all_gather(DataType::UInt8, None, Memory::empty(), sizes);
        Ok(Sums {
            shard,
            counts,
            gathering: Flight::start(between, request, (coded, all), spare)?,
        })
    }
}

impl Sums<'_> {
    /// The shard, the same on all ranks that have it.
    fn finish(self, spare: &mut Spare) -> Result<Vec<f32>> {
        let mut shard = self.shard;
        let gathered = self.gathering.land(spare)?;
        let (mut coded, mut values) = (&gathered[..], &mut shard[..]);
        for count in self.counts {
            let (part, after) = values.split_at_mut(count);
            values = after;
            let (codes, after) = coded.split_at(coded_bytes(count));
            coded = after;
            decode(codes, part);
        }
        spare.bytes.push(gathered);
        Ok(shard)
    }
}

/// A collective that is under way, with its memory.
struct Flight<'a> {
    comm: &'a Communicator,
    work: Work,
    input: Vec<u8>,
    output: Vec<u8>,
}

impl<'a> Flight<'a> {
    fn start(
        comm: &'a Communicator,
        mut request: Request,
        (input, mut output): (Vec<u8>, Vec<u8>),
        spare: &Spare,
    ) -> Result<Self> {
        // SAFETY: both vectors go into the result, which is not dropped before the operation has ended; moving them does not
        // move what they hold, and nothing touches that meanwhile.
        let work = unsafe {
            request.input = Some(Memory::of(&input));
            request.output = Some(Memory::of_mut(&mut output));
            match spare.is_single {
                // This thread waits for it, and so drives it.
                true => comm.begin(request)?,
                false => comm.start(request, None)?,
            }
        };
        Ok(Self {
            comm,
            work,
            input,
            output,
        })
    }

    /// What it has made.
    fn land(mut self, spare: &mut Spare) -> Result<Vec<u8>> {
        self.work.wait(None)?;
        spare.bytes.push(std::mem::take(&mut self.input));
        Ok(std::mem::take(&mut self.output))
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        if !self.work.is_done() {
            // Another part of the call has failed, on this rank; the others wait for what does not come.
            self.comm
                .abort("another part of an all_reduce_int8 has failed");
            let _ = self.work.wait(None);
        }
    }
}

/// How `count` numbers are shared out: in whole blocks, but for the last.
fn shares(count: usize, ranks: usize) -> Vec<usize> {
    let blocks = count.div_ceil(BLOCK);
    let before = |rank: usize| (blocks * rank / ranks * BLOCK).min(count);
    (0..ranks)
        .map(|rank| before(rank + 1) - before(rank))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::rendezvous::memory::MemoryStore;

    #[test]
    fn shares_are_whole_blocks_and_all_there_is() {
        for count in [0, 1, BLOCK, 3 * BLOCK + 5, 1000 * BLOCK - 1] {
            for ranks in [1, 2, 3, 7] {
                let shares = shares(count, ranks);
                assert_eq!(shares.iter().sum::<usize>(), count);
                let whole = shares.iter().filter(|share| **share % BLOCK == 0).count();
                assert!(whole >= ranks - 1, "{shares:?}");
            }
        }
    }

    /// Ranks on the hosts that `hosts` names, one for each.
    fn on_hosts(hosts: &[&str], body: impl Fn(&Communicator) + Sync) {
        let store = MemoryStore::default();
        std::thread::scope(|scope| {
            for (rank, host) in hosts.iter().enumerate() {
                let (store, body) = (&store, &body);
                let mut config = Config::default();
                config.set("timeout", "60").unwrap();
                config.set("host", host).unwrap();
                scope.spawn(move || {
                    body(&Communicator::join(store, rank, hosts.len(), config).unwrap());
                });
            }
        });
    }

    fn contribution(rank: usize, count: usize) -> Vec<f32> {
        (0..count)
            .map(|at| ((at * 37 + rank * 101) % 1009) as f32 / 100.0 - 5.0)
            .collect()
    }

    #[test]
    fn sums_between_hosts_are_as_near_as_promised_and_the_same_everywhere() {
        for hosts in [
            &["a", "b"][..],
            &["a", "a", "b", "b"],
            &["a", "b", "c", "a", "b", "c"],
            &["a", "a", "a", "b"],
            &["a", "a"],
        ] {
            let results = Mutex::new(Vec::new());
            on_hosts(hosts, |comm| {
                let counts = [1, 1000, 4 * BLOCK, 0, 3 * PIECE + 77];
                for (at, count) in counts.into_iter().enumerate() {
                    let average = at % 2 == 1;
                    let mut values = contribution(comm.rank(), count);
                    comm.all_reduce_int8(&mut values, average).unwrap();
                    results.lock().push((count, average, values));
                }
            });
            let results = results.into_inner();
            assert_eq!(results.len(), 5 * hosts.len());
            for (count, average, values) in &results {
                let (_, _, first) = results.iter().find(|one| one.0 == *count).unwrap();
                assert!(
                    first
                        .iter()
                        .zip(values)
                        .all(|(a, b)| a.to_bits() == b.to_bits())
                );
                let ranks = hosts.len();
                let all: Vec<_> = (0..ranks).map(|rank| contribution(rank, *count)).collect();
                // No magnitude is above 5.1 for each rank: in the contributions of all hosts but one, and in the sum.
                let bound = 2.0 * ranks as f32 * 5.1 / 254.0 + 1e-4;
                for (at, value) in values.iter().enumerate() {
                    let sum: f32 = all.iter().map(|one| one[at]).sum();
                    let divisor = if *average { ranks as f32 } else { 1.0 };
                    let off = (value * divisor - sum).abs();
                    assert!(off <= bound, "{hosts:?}: {value} is off by {off} at {at}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        on_hosts(&["a", "b"], |comm| {
            let mut values = vec![1.0; 3 * BLOCK];
            if comm.rank() == 1 {
                values[BLOCK] = f32::INFINITY;
            }
            comm.all_reduce_int8(&mut values, false).unwrap();
            assert!(values[..BLOCK].iter().all(|value| *value == 2.0));
            assert!(values[BLOCK..2 * BLOCK].iter().all(|value| value.is_nan()));
            assert!(values[2 * BLOCK..].iter().all(|value| *value == 2.0));
        });
    }
}
