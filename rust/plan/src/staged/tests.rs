use super::*;
use crate::check::contract::{Want, expected, initial};
use crate::check::expression::{Expressions, Id, Kind, UNINITIALISED};
use crate::check::rank_set::RankSet;
use crate::windows::tests::{Case, cases, lists, shapes};

/// Carries out the collective of one chunk on the slots of all ranks.
#[expect(clippy::too_many_lines, reason = "one arm for each collective")]
fn collective(
    slots: &mut [Vec<Id>],
    chunks: &[Chunk],
    shape: &Shape,
    expressions: &mut Expressions<1>,
) {
    let world = slots.len();
    let view = |slots: &[Vec<Id>], rank: usize, place: Option<SlotSpan>| -> Vec<Id> {
        place.map_or_else(Vec::new, |place| {
            slots[rank][place.at..place.at + place.len].to_vec()
        })
    };
    let count = |rank: usize, other: usize| match &chunks[rank].part {
        Part::Even(count) => *count,
        Part::PerRank(counts) => counts[other],
        Part::PerPair { send, .. } => send[other],
    };
    let start = |rank: usize, other: usize| (0..other).map(|to| count(rank, to)).sum::<usize>();
    let before = slots.to_vec();
    let contribution = |rank: usize| match shape.collective {
        Collective::AllGather => {
            let place = chunks[rank].output.expect("an output");
            let at = place.at + start(rank, rank);
            before[rank][at..at + count(rank, rank)].to_vec()
        }
        _ => view(&before, rank, chunks[rank].input.or(chunks[rank].output)),
    };
    let mut sum = |range: std::ops::Range<usize>, contributors: usize| -> Vec<Id> {
        let mut sum = contribution(0)[range.clone()].to_vec();
        for rank in 1..contributors {
            for (left, right) in sum.iter_mut().zip(&contribution(rank)[range.clone()]) {
                *left = expressions.sum(*left, *right).expect("a sum");
            }
        }
        sum.into_iter()
            .map(|id| {
                expressions
                    .finish(id, RankSet::below(contributors))
                    .expect("a sum")
            })
            .collect()
    };
    for rank in 0..world {
        let Some(output) = chunks[rank].output else {
            continue;
        };
        let result = match shape.collective {
            Collective::AllReduce | Collective::Reduce => sum(0..output.len, world),
            Collective::Scan => sum(0..output.len, rank + 1),
            Collective::Exscan => sum(0..output.len, rank),
            Collective::Broadcast => contribution(shape.root),
            Collective::AllGather | Collective::Gather => {
                (0..world).flat_map(contribution).collect()
            }
            Collective::ReduceScatter => {
                let first = start(rank, rank);
                sum(first..first + output.len, world)
            }
            Collective::Scatter => {
                let first = start(shape.root, rank);
                contribution(shape.root)[first..first + output.len].to_vec()
            }
            Collective::AllToAll => (0..world)
                .flat_map(|from| {
                    let first = start(from, rank);
                    contribution(from)[first..first + count(from, rank)].to_vec()
                })
                .collect(),
            _ => Vec::new(),
        };
        assert_eq!(result.len(), output.len, "rank {rank}");
        slots[rank][output.at..output.at + output.len].copy_from_slice(&result);
    }
}

fn check(case: &Case, world: usize, room: usize) {
    let known = lists(case, world);
    let shapes = shapes(case, &known);
    let mut expressions = Expressions::<1>::new();
    let mut memory: Vec<_> = shapes
        .iter()
        .map(|shape| initial(shape, &mut expressions))
        .collect();
    let plans: Vec<Vec<Chunk>> = shapes
        .iter()
        .map(|shape| chunks(shape, room).expect("chunks"))
        .collect();
    let most = plans.iter().map(Vec::len).max().unwrap_or(0);
    for (rank, plan) in plans.iter().enumerate() {
        assert!(plan.len() == most || !is_known(&shapes[rank]));
    }
    for index in 0..most {
        let row: Vec<Chunk> = plans
            .iter()
            .zip(&shapes)
            .map(|(plan, shape)| plan.get(index).cloned().unwrap_or_else(|| nothing(shape)))
            .collect();
        let mut slots = vec![vec![UNINITIALISED; room]; world];
        for (rank, chunk) in row.iter().enumerate() {
            for (span, at) in &chunk.puts {
                let source = match span.buffer {
                    Buffer::Input => &memory[rank].0,
                    _ => &memory[rank].1,
                };
                slots[rank][*at..at + span.len]
                    .copy_from_slice(&source[span.offset..span.offset + span.len]);
            }
        }
        collective(&mut slots, &row, &shapes[0], &mut expressions);
        for (rank, chunk) in row.iter().enumerate() {
            for (at, span) in &chunk.gets {
                assert_eq!(span.buffer, Buffer::Output);
                memory[rank].1[span.offset..span.offset + span.len]
                    .copy_from_slice(&slots[rank][*at..at + span.len]);
            }
        }
    }
    for (rank, (_, output)) in memory.iter().enumerate() {
        let wanted = expected(&shapes, rank, &mut expressions);
        for (element, (want, got)) in wanted.iter().zip(output).enumerate() {
            let right = match want {
                Want::Exactly(id) => id == got,
                Want::SumOf(of) => {
                    let sum = expressions.get(*got);
                    sum.kind == Kind::Finished && sum.element == *of && sum.in_rank_order
                }
            };
            assert!(
                right,
                "{case:?}, world {world}, room {room}: element {element} of rank {rank}"
            );
        }
    }
}

#[test]
fn every_collective_in_slots() {
    for world in 1..=6 {
        for (count, room) in [
            (0, 12),
            (1, 12),
            (7, 2 * world),
            (33, 40),
            (50, 2 * world + 1),
        ] {
            for case in cases(world, count) {
                check(&case, world, room);
            }
        }
    }
}

#[test]
fn a_slot_that_is_too_small_is_refused() {
    for case in cases(3, 5) {
        let known = lists(&case, 3);
        let shape = &shapes(&case, &known)[0];
        assert!(chunks(shape, 6).is_some(), "{case:?}");
        if case.collective == Collective::AllToAll {
            assert!(chunks(shape, 5).is_none());
        }
    }
}
