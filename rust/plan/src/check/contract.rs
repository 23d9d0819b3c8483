//! The contract of the collectives: the buffers before the first step, and after the last.

use super::super::{Counts, Shape};
use super::expression::{Expressions, Id, UNINITIALISED};
use crate::types::{Collective, Rank};

/// The count of `rank`, as `shape` knows it.
fn count_of(shape: &Shape, rank: Rank) -> usize {
    match shape.counts {
        Counts::Even(count) => count,
        Counts::PerRank(counts) => counts[rank],
        Counts::PerPair { .. } => unreachable!("only all_to_all has counts per pair"),
    }
}

fn total(shape: &Shape) -> usize {
    (0..shape.world).map(|rank| count_of(shape, rank)).sum()
}

fn before(shape: &Shape, rank: Rank) -> usize {
    (0..rank).map(|rank| count_of(shape, rank)).sum()
}

/// To each rank, and from each rank.
fn pair_counts(shape: &Shape) -> (Vec<usize>, Vec<usize>) {
    match shape.counts {
        Counts::PerPair { send, recv } => (send.to_vec(), recv.to_vec()),
        _ => {
            let counts: Vec<usize> = (0..shape.world).map(|rank| count_of(shape, rank)).collect();
            (counts.clone(), counts)
        }
    }
}

/// The input and output of a rank before the first step.
pub(crate) fn initial<const WORDS: usize>(
    shape: &Shape,
    expressions: &mut Expressions<WORDS>,
) -> (Vec<Id>, Vec<Id>) {
    let rank = shape.rank;
    let is_root = rank == shape.root;
    let (input, output) = match shape.collective {
        Collective::AllReduce | Collective::Scan | Collective::Exscan => {
            (count_of(shape, rank), count_of(shape, rank))
        }
        Collective::Reduce => {
            let count = count_of(shape, rank);
            let has_output = is_root || shape.in_place;
            (count, if has_output { count } else { 0 })
        }
        Collective::Broadcast => (0, count_of(shape, rank)),
        Collective::AllGather => (count_of(shape, rank), total(shape)),
        Collective::ReduceScatter => (total(shape), count_of(shape, rank)),
        Collective::Gather => (
            count_of(shape, rank),
            if is_root { total(shape) } else { 0 },
        ),
        Collective::Scatter => (
            if is_root { total(shape) } else { 0 },
            count_of(shape, rank),
        ),
        Collective::AllToAll => {
            let (sent, received) = pair_counts(shape);
            (sent.iter().sum(), received.iter().sum())
        }
        Collective::Barrier | Collective::Send | Collective::Recv => (0, 0),
    };
    let own: Vec<Id> = (0..input)
        .map(|element| expressions.contribution(rank, element))
        .collect();
    let mut outputs = vec![UNINITIALISED; output];
    match shape.collective {
        Collective::Broadcast if is_root => {
            for (element, id) in outputs.iter_mut().enumerate() {
                *id = expressions.contribution(rank, element);
            }
            (own, outputs)
        }
        Collective::AllGather if shape.in_place => {
            let first = before(shape, rank);
            outputs[first..first + own.len()].copy_from_slice(&own);
            (Vec::new(), outputs)
        }
        _ if shape.in_place => (Vec::new(), own),
        _ => (own, outputs),
    }
}

/// The value that an output element must have at the end.
#[derive(Clone, Copy)]
pub(crate) enum Want {
    Exactly(Id),
    SumOf(usize),
}

/// The values that the output of a rank must have at the end.
pub(crate) fn expected<const WORDS: usize>(
    shapes: &[Shape],
    rank: Rank,
    expressions: &mut Expressions<WORDS>,
) -> Vec<Want> {
    let shape = &shapes[rank];
    let mut block = |of: Rank, first: usize, len: usize| -> Vec<Want> {
        (first..first + len)
            .map(|element| Want::Exactly(expressions.contribution(of, element)))
            .collect()
    };
    let blocks_of_all = |block: &mut dyn FnMut(Rank, usize, usize) -> Vec<Want>| {
        (0..shape.world)
            .flat_map(|of| block(of, 0, count_of(shape, of)))
            .collect()
    };
    match shape.collective {
        // Rank 0 keeps what it has.
        Collective::Exscan if rank == 0 => match shape.in_place {
            true => block(rank, 0, count_of(shape, rank)),
            false => vec![Want::Exactly(UNINITIALISED); count_of(shape, rank)],
        },
        Collective::AllReduce | Collective::Scan | Collective::Exscan => {
            (0..count_of(shape, rank)).map(Want::SumOf).collect()
        }
        Collective::Reduce if rank == shape.root => {
            (0..count_of(shape, rank)).map(Want::SumOf).collect()
        }
        // The ranks other than the root keep what they have.
        Collective::Reduce if shape.in_place => block(rank, 0, count_of(shape, rank)),
        Collective::Reduce => Vec::new(),
        Collective::Broadcast => block(shape.root, 0, count_of(shape, rank)),
        Collective::AllGather => blocks_of_all(&mut block),
        Collective::Gather if rank == shape.root => blocks_of_all(&mut block),
        Collective::Gather => Vec::new(),
        Collective::ReduceScatter => {
            let first = before(shape, rank);
            (first..first + count_of(shape, rank))
                .map(Want::SumOf)
                .collect()
        }
        Collective::Scatter => {
            let first = before(&shapes[shape.root], rank);
            block(shape.root, first, count_of(shape, rank))
        }
        Collective::AllToAll => (0..shape.world)
            .flat_map(|of| match shapes[of].counts {
                Counts::PerPair { send, .. } => block(of, send[..rank].iter().sum(), send[rank]),
                _ => {
                    let count = count_of(&shapes[of], rank);
                    block(of, rank * count, count)
                }
            })
            .collect(),
        Collective::Barrier | Collective::Send | Collective::Recv => Vec::new(),
    }
}
