//! An all_reduce of float32 that sends 8 bits of each number between hosts, and a scale for every 128: for links that are
//! slow beside the memory.
//!
//! 1. Inside a host, in full precision and through shared memory, every rank sums a shard of the host's contributions.
//! 2. Ranks of the same place on their hosts share the shard out among them. Each codes the parts of the others, sends them,
//!    and adds what it receives for its own part to its own contribution, in full precision.
//! 3. It codes its part of the sum and gives it to the others; all of them, and it, take what is coded for the result.
//! 4. Inside a host the shards are gathered.
//!
//! Long calls do so piece after piece, with the network busy while ranks of a host exchange other pieces.
//!
//! So all ranks have the same bits, since all decode the same bytes, and each number is rounded once for every other host
//! and once as a sum. Where hosts have different numbers of ranks the parts inside a host are left out: then all ranks do what
//! is between hosts, and each number is rounded once for every other rank. Ranks that are all on one host exchange float32.
//!
//! The exchanges have groups of their own, so that calls of a thread apart do not get between those of others in the
//! communicator's group. A failure in one of these groups ends all of them on this rank, and so on the ranks that share one
//! with it, until all ranks have heard; and it ends the communicator's.

mod exchange;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::OnceLock;

use self::exchange::{Contribution, Spare, Sums, run};
use super::Communicator;
use crate::buffer::Memory;
use crate::engine::{Request, Sizes};
use crate::error::{Error, Result};
use crate::locks::Mutex;
use crate::reduce::int8::BLOCK;
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
    /// The ranks of this host, where all hosts have as many and more than one, and there are several.
    inside: Option<Part>,
    /// The ranks of the same place on every host, or all.
    between: Part,
    is_one_host: bool,
}

/// A group of some ranks of the communicator.
#[derive(Debug)]
struct Part {
    comm: Communicator,
    /// Its ranks as the communicator's group numbers them.
    ranks: Vec<Rank>,
    /// The same as the communicator does.
    numbers: Vec<Rank>,
}

/// The arguments of a call that must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Call {
    count: usize,
    average: bool,
}

impl Communicator {
    /// `values` becomes the sum of all ranks' values, or their average. Between hosts they travel in 8 bits each, with a
    /// scale for every 128: where that is a slow link it takes a third or a quarter of the time.
    ///
    /// With `h` hosts a result is off by at most `1/254` of the largest magnitude among its 128 neighbours, in each of
    /// `h - 1` hosts' sums and in the result; where hosts have different numbers of ranks, in the contributions of all ranks
    /// but one. Where one of 128 neighbours is not finite, all are NaN; where all are below `2^-121`, they are zero. All
    /// ranks get the same bits. Ranks that are all on one host exchange float32.
    ///
    /// Blocks. The ranks call it in the same order with respect to each other, with as many values.
    ///
    /// # Errors
    /// As a collective.
    pub fn all_reduce_int8(&self, values: &mut [f32], average: bool) -> Result<()> {
        self.check_process()?;
        let _call = self.levels.calls.lock();
        self.group.check_alive()?;
        let level = match self.levels.level.get() {
            Some(level) => level,
            None => {
                let made = Box::new(Level::of(self)?);
                self.levels.level.get_or_init(|| made)
            }
        };
        // It may have been aborted or closed while they were made.
        self.group.check_alive()?;
        level
            .parts()
            .for_each(|part| part.comm.set_timeout(self.timeout()));
        let call = Call {
            count: values.len(),
            average,
        };
        let summed = level.all_reduce(self, values, call).map_err(|error| {
            let error = error.with_operation("all_reduce_int8");
            if error.code.is_fatal() {
                level.fail(&error);
                self.group.fail_of(error.clone());
            }
            error
        });
        self.here(summed)
    }
}

impl Levels {
    /// The communicators of the groups, if there are any.
    pub(super) fn each(&self) -> impl Iterator<Item = &Communicator> {
        let level = self.level.get().into_iter();
        level.flat_map(|level| level.parts()).map(|part| &part.comm)
    }
}

impl Level {
    fn of(comm: &Communicator) -> Result<Self> {
        let host_of = comm.group.host_of();
        let on = |host: usize| -> Vec<Rank> {
            let ranks = 0..host_of.len();
            ranks.filter(|rank| host_of[*rank] == host).collect()
        };
        let own = comm.group.rank();
        let here = on(host_of[own]);
        let hosts = 1 + host_of.iter().copied().max().unwrap_or(0);
        let is_even = here.len() > 1 && (0..hosts).all(|host| on(host).len() == here.len());
        if hosts == 1 || !is_even {
            return Ok(Self {
                inside: None,
                between: Part::of(comm, (0..host_of.len()).collect(), b"int8, all")?,
                is_one_host: hosts == 1,
            });
        }
        let place = here.iter().position(|rank| *rank == own);
        let place = place.ok_or_else(|| Error::internal("a rank that is on no host"))?;
        let across = (0..hosts).map(|host| on(host)[place]).collect();
        Ok(Self {
            inside: Some(Part::of(comm, here, b"int8, inside")?),
            between: Part::of(comm, across, b"int8, between")?,
            is_one_host: false,
        })
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.inside.iter().chain([&self.between])
    }

    /// Ends all groups, here and by and by on every rank.
    fn fail(&self, error: &Error) {
        self.parts().for_each(|part| part.fail(error));
    }

    /// Why a call cannot go on, although the group that it waits in may not have heard yet.
    fn error(&self, comm: &Communicator) -> Option<Error> {
        let own = comm.group.error();
        own.or_else(|| self.parts().find_map(|part| part.comm.error()))
    }

    /// Piece after piece, so that what is between hosts goes on while ranks of a host exchange the pieces before and after.
    fn all_reduce(&self, comm: &Communicator, values: &mut [f32], call: Call) -> Result<()> {
        let place: Place<'_> = (self, comm);
        if self.is_one_host {
            return self.in_full(place, values, call);
        }
        let mut pieces: Vec<&mut [f32]> = match values.is_empty() {
            // The ranks meet all the same.
            true => vec![&mut []],
            false => values.chunks_mut(PIECE).collect(),
        };
        let mut under_way = UnderWay::default();
        let result = self.piece_by_piece(place, &mut pieces, call, &mut under_way);
        if let Err(error) = &result
            && error.code.is_fatal()
        {
            // Before what is under way is dropped, so that all ranks hear of this cause.
            self.fail(error);
        }
        result
    }

    fn piece_by_piece<'a>(
        &'a self,
        place: Place<'a>,
        pieces: &mut [&mut [f32]],
        call: Call,
        under_way: &mut UnderWay<'a>,
    ) -> Result<()> {
        let UnderWay {
            contributed,
            summed,
        } = under_way;
        let mut spare = Spare::new(pieces.len());
        for at in 0..pieces.len() + 2 {
            if at >= 2 {
                let (first, sums) = summed.pop_front().expect("two turns ago");
                let shard = sums.finish(&mut spare)?;
                self.gather_inside(place, &shard, pieces[first])?;
                spare.keep(shard);
            }
            if at < pieces.len() {
                let mut shard = spare.shard();
                self.scatter_inside(place, pieces[at], &mut shard)?;
                let contribution = Contribution::send(place, shard, call, &mut spare)?;
                contributed.push_back((at, contribution));
            }
            if at >= 1 && at <= pieces.len() {
                let (first, contribution) = contributed.pop_front().expect("the turn before");
                summed.push_back((first, contribution.add(&mut spare)?));
            }
        }
        Ok(())
    }

    fn in_full(&self, place: Place<'_>, values: &mut [f32], call: Call) -> Result<()> {
        let op = match call.average {
            true => ReduceOp::Avg,
            false => ReduceOp::Sum,
        };
        let request = Request::all_reduce(DataType::Float32, op, None, Memory::empty());
        let sizes = Sizes::Even(values.len());
        run(
            place,
            &self.between,
            Request { sizes, ..request },
            None,
            values,
        )
    }

    /// `shard` becomes this rank's shard of the sum over its host.
    fn scatter_inside(&self, place: Place<'_>, values: &[f32], shard: &mut Vec<f32>) -> Result<()> {
        let Some(inside) = &self.inside else {
            shard.clear();
            shard.extend_from_slice(values);
            return Ok(());
        };
        let counts = shares(values.len(), inside.comm.world_size());
        shard.resize(counts[inside.comm.rank()], 0.0);
        let nothing = Memory::empty;
        let (dtype, sizes) = (DataType::Float32, Sizes::PerRank(counts));
        let request = Request::reduce_scatter(dtype, ReduceOp::Sum, nothing(), nothing(), sizes);
        run(place, inside, request, Some(values), shard)
    }

    fn gather_inside(&self, place: Place<'_>, shard: &[f32], values: &mut [f32]) -> Result<()> {
        let Some(inside) = &self.inside else {
            values.copy_from_slice(shard);
            return Ok(());
        };
        let sizes = Sizes::PerRank(shares(values.len(), inside.comm.world_size()));
        let request = Request::all_gather(DataType::Float32, None, Memory::empty(), sizes);
        run(place, inside, request, Some(shard), values)
    }
}

/// Pieces that are on their way between hosts, by their numbers.
#[derive(Default)]
struct UnderWay<'a> {
    contributed: VecDeque<(usize, Contribution<'a>)>,
    summed: VecDeque<(usize, Sums<'a>)>,
}

/// Where a call takes place: the groups, and the communicator that they are of.
type Place<'a> = (&'a Level, &'a Communicator);

impl Part {
    fn of(comm: &Communicator, ranks: Vec<Rank>, label: &[u8]) -> Result<Self> {
        let made = comm.part(&ranks, label)?;
        Ok(Self {
            comm: made.ok_or_else(|| Error::internal("a rank that is not in its own group"))?,
            numbers: ranks.iter().map(|place| comm.number(*place)).collect(),
            ranks,
        })
    }

    /// An error of this group, with the number that its peer has in the communicator's.
    fn renumber(&self, mut error: Error) -> Error {
        let Some(peer) = error.peer else {
            return error;
        };
        error.peer = self.ranks.get(peer).copied();
        let known = self.numbers.get(peer).filter(|known| **known != peer);
        if let Some(known) = known {
            error.message.push_str(&format!(
                "; rank {peer} of the ranks {:?}, which exchange this, is rank {known}",
                self.numbers
            ));
        }
        error
    }

    /// Ends the group because of an error of another one, which numbers its ranks differently.
    fn fail(&self, error: &Error) {
        self.comm.group.fail_of(Error {
            peer: None,
            ..error.clone()
        });
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
