mod in_place;

use std::sync::Arc;

use super::*;
use crate::check::verify_row;
use crate::{Counts, MIN_WINDOW, check};

const WORLDS: std::ops::RangeInclusive<usize> = 1..=9;

/// The counts of one operation, as every rank knows them.
#[derive(Clone, Debug)]
pub(crate) enum Sizes {
    Even(usize),
    /// By rank; `known` to all, else each knows its own and the root all.
    PerRank {
        counts: Vec<usize>,
        known: bool,
    },
    /// From rank, to rank.
    Pairs(Vec<Vec<usize>>),
}

/// One operation of a test.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) collective: Collective,
    sizes: Sizes,
    root: Rank,
    in_place: bool,
    shots: Shots,
    premultiplied: bool,
}

/// The counts that each rank knows.
pub(crate) fn lists(case: &Case, world: usize) -> Vec<(Vec<usize>, Vec<usize>)> {
    (0..world)
        .map(|rank| match &case.sizes {
            Sizes::Even(_) => (Vec::new(), Vec::new()),
            Sizes::PerRank { counts, known } => {
                let knows = |of: usize| *known || rank == case.root || of == rank;
                let seen = counts.iter().enumerate();
                let seen = seen.map(|(of, count)| if knows(of) { *count } else { 0 });
                (seen.collect(), Vec::new())
            }
            Sizes::Pairs(matrix) => (
                matrix[rank].clone(),
                matrix.iter().map(|row| row[rank]).collect(),
            ),
        })
        .collect()
}

/// The shapes of all ranks.
pub(crate) fn shapes<'a>(case: &Case, lists: &'a [(Vec<usize>, Vec<usize>)]) -> Vec<Shape<'a>> {
    let world = lists.len();
    lists
        .iter()
        .enumerate()
        .map(|(rank, (send, recv))| Shape {
            collective: case.collective,
            rank,
            world,
            counts: match &case.sizes {
                Sizes::Even(count) => Counts::Even(*count),
                Sizes::PerRank { .. } => Counts::PerRank(send),
                Sizes::Pairs(_) => Counts::PerPair { send, recv },
            },
            root: case.root,
            in_place: case.in_place && (case.collective != Collective::Reduce || rank == case.root),
            widen: false,
        })
        .collect()
}

/// One operation: the plans and shapes of all ranks, and the half that it begins with.
#[derive(Clone, Debug)]
struct Operation<'a> {
    plans: Vec<Plan>,
    shapes: Vec<Shape<'a>>,
    first: usize,
    in_place: Peers,
}

impl Operation<'_> {
    /// The same with these ranks' buffers in place.
    fn placed(mut self, in_place: Peers) -> Self {
        for rank in in_place.iter() {
            let plan = std::mem::take(&mut self.plans[rank]);
            let found = InPlace::find(&plan, self.shapes[rank].collective, |put, _| {
                Some((
                    put.src.buffer,
                    put.src.offset.cast_signed() - put.at.cast_signed(),
                ))
            });
            self.plans[rank] = Arc::unwrap_or_clone(found.complete(Arc::new(plan)));
        }
        self.in_place = in_place;
        self
    }

    fn view(&self) -> check::Operation<'_> {
        check::Operation {
            plans: &self.plans,
            shapes: &self.shapes,
            first: self.first,
            in_place: self.in_place,
        }
    }
}

/// Proves operations one after the other in windows of `half` elements per half, with all sums in the order of the ranks.
fn verify(row: &[Operation], half: usize) -> Result<(), String> {
    let views: Vec<check::Operation> = row.iter().map(Operation::view).collect();
    let report = verify_row(&views, MIN_WINDOW, half)?;
    match report.in_rank_order {
        true => Ok(()),
        false => Err("a sum is not in the order of the ranks".into()),
    }
}

fn operation<'a>(
    case: &Case,
    lists: &'a [(Vec<usize>, Vec<usize>)],
    room: &Room,
    first: usize,
) -> Operation<'a> {
    let shapes = shapes(case, lists);
    let plans = shapes
        .iter()
        .map(|shape| build(shape, room, case.shots, case.premultiplied).expect("a plan"))
        .collect();
    Operation {
        plans,
        shapes,
        first,
        in_place: Peers::none(),
    }
}

/// Numbers that differ, some of them zero.
fn scattered(seed: usize, most: usize) -> usize {
    let mixed = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    if mixed.is_multiple_of(5) {
        0
    } else {
        mixed % (most + 1)
    }
}

/// Every collective in every form.
pub(crate) fn cases(world: usize, count: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let uneven: Vec<usize> = (0..world).map(|of| scattered(of + count, count)).collect();
    let matrix = (0..world)
        .map(|from| (0..world).map(move |to| scattered(from * 31 + to * 7 + count, count)));
    let matrix: Vec<Vec<usize>> = matrix.map(Iterator::collect).collect();
    for collective in Collective::ALL {
        if matches!(collective, Collective::Send | Collective::Recv) {
            continue;
        }
        let mut sizes = vec![Sizes::Even(count)];
        match collective {
            Collective::AllGather | Collective::ReduceScatter => sizes.push(Sizes::PerRank {
                counts: uneven.clone(),
                known: true,
            }),
            Collective::Gather | Collective::Scatter => sizes.push(Sizes::PerRank {
                counts: uneven.clone(),
                known: false,
            }),
            Collective::AllToAll => sizes.push(Sizes::Pairs(matrix.clone())),
            _ => {}
        }
        for sizes in sizes {
            for root in if collective.has_root() {
                vec![0, world / 2, world - 1]
            } else {
                vec![0]
            } {
                let forms = |is_either| [false, true].into_iter().take(1 + usize::from(is_either));
                for in_place in forms(collective.may_be_in_place()) {
                    for premultiplied in forms(collective.reduces()) {
                        for shots in [Shots::One, Shots::Two, Shots::ByFirst] {
                            cases.push(Case {
                                collective,
                                sizes: sizes.clone(),
                                root,
                                in_place,
                                shots,
                                premultiplied,
                            });
                        }
                    }
                }
            }
        }
    }
    cases
}

/// Every collective in which a rank gives results to others, after each of them.
#[test]
fn results_are_given_after_those_before_have_been_taken() {
    for world in [2, 3, 4] {
        for count in [6, 20, 30] {
            let room = Room { half: 12, align: 1 };
            let all = cases(world, count);
            let all = all
                .iter()
                .filter(|case| case.shots != Shots::One && !case.in_place && !case.premultiplied);
            let all: Vec<&Case> = all
                .filter(|case| {
                    let collective = case.collective;
                    matches!(
                        collective,
                        Collective::AllReduce | Collective::Reduce | Collective::Broadcast
                    )
                })
                .collect();
            for (before, after) in all
                .iter()
                .flat_map(|one| all.iter().map(move |other| (one, other)))
            {
                let known = [before, after, before].map(|case| (case, lists(case, world)));
                for first in [0, 1] {
                    let row: Vec<Operation> = known
                        .iter()
                        .enumerate()
                        .map(|(index, (case, lists))| {
                            operation(case, lists, &room, (index + first * index) % HALVES)
                        })
                        .collect();
                    if let Err(problem) = verify(&row, room.half) {
                        panic!("world {world}, count {count}, {before:?}, {after:?}: {problem}");
                    }
                }
            }
        }
    }
}

/// Runs every case after every neighbour in the list and after itself, with the halves in turn.
fn check_all(world: usize, count: usize, room: Room) {
    let cases = cases(world, count);
    for pair in cases.windows(2) {
        let row = [&pair[0], &pair[1], &pair[1], &pair[0], &pair[0]];
        let known: Vec<_> = row.iter().map(|case| lists(case, world)).collect();
        let operations: Vec<Operation> = row
            .iter()
            .zip(&known)
            .enumerate()
            // The last one begins with the half of the one before it, as a graph that is replayed does.
            .map(|(index, (case, lists))| operation(case, lists, &room, index.min(3) % HALVES))
            .collect();
        if let Err(problem) = verify(&operations, room.half) {
            panic!("world {world}, count {count}, {room:?}, {pair:?}: {problem}");
        }
    }
}

/// Operations in step after others and after each other, in both halves and twice in the same.
#[test]
fn ranks_in_step_are_right_and_leave_no_trace() {
    for world in WORLDS.filter(|world| *world > 1) {
        for (count, half, align) in [
            (0, 64, 4),
            (1, 64, 4),
            (33, 40, 1),
            (100, 48, 4),
            (64, 20, 3),
        ] {
            let room = Room { half, align };
            let cases = cases(world, count);
            let whole: Vec<_> = cases
                .iter()
                .filter(|case| case.collective == Collective::AllReduce)
                .filter(|case| !case.premultiplied && case.shots == Shots::Two)
                .collect();
            for case in whole {
                let known = lists(case, world);
                let shapes = || shapes(case, &known);
                let in_step = |first| Operation {
                    plans: shapes()
                        .iter()
                        .map(|shape| build_in_step(shape, &room).expect("a plan"))
                        .collect(),
                    shapes: shapes(),
                    first,
                    in_place: Peers::none(),
                };
                let usual = |first| operation(case, &known, &room, first);
                let row = [
                    in_step(0),
                    in_step(1),
                    usual(0),
                    in_step(1),
                    in_step(1),
                    usual(1),
                ];
                if let Err(problem) = verify(&row, half) {
                    panic!("world {world}, count {count}, {room:?}, {case:?}: {problem}");
                }
                let others = cases.iter().filter(|other| {
                    other.collective != Collective::AllReduce && other.shots == Shots::One
                });
                for other in others {
                    let others_known = lists(other, world);
                    let other_one = |first| operation(other, &others_known, &room, first);
                    let row = [
                        in_step(0),
                        other_one(0),
                        in_step(1),
                        other_one(0),
                        in_step(0),
                    ];
                    if let Err(problem) = verify(&row, half) {
                        panic!("world {world}, count {count}, {room:?}, {other:?}: {problem}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_collective_is_right_in_roomy_windows() {
    for world in WORLDS {
        for count in [0, 1, 2, 7, 33] {
            check_all(
                world,
                count,
                Room {
                    half: 512,
                    align: 4,
                },
            );
        }
    }
}

#[test]
fn every_collective_is_right_in_tiny_windows() {
    for world in WORLDS {
        for count in [1, 5, 23] {
            check_all(
                world,
                count,
                Room {
                    half: world,
                    align: 1,
                },
            );
            check_all(
                world,
                count,
                Room {
                    half: world + 3,
                    align: 4,
                },
            );
        }
    }
}

#[test]
fn chunks_of_odd_lengths() {
    for world in [2, 3, 4, 8] {
        check_all(world, 61, Room { half: 24, align: 4 });
    }
}

#[test]
fn many_ranks() {
    check_all(17, 19, Room { half: 40, align: 2 });
    // More than a word has bits.
    let world = 80;
    let case = &cases(world, 2 * world + 2)[0];
    let known = lists(case, world);
    let room = Room {
        half: world,
        align: 1,
    };
    let both = [0, 1].map(|first| operation(case, &known, &room, first));
    assert_eq!(verify(&both, room.half), Ok(()));
}

fn is_wait_for(step: &Step, wanted: Semaphore) -> bool {
    matches!(step, Step::Wait { what, .. } if *what == wanted)
}

fn is_signal_of(step: &Step, wanted: Semaphore) -> bool {
    matches!(step, Step::Signal { what, .. } if *what == wanted)
}

fn is_put(step: &Step) -> bool {
    matches!(step, Step::Copy { src, .. } if src.buffer == Buffer::Input)
}

fn is_get(step: &Step) -> bool {
    matches!(step, Step::Copy { src, .. } if matches!(src.buffer, Buffer::Window { .. }))
}

/// The checker finds what it is there to find.
#[test]
#[expect(clippy::too_many_lines, reason = "one case after the other")]
fn a_broken_plan_is_refused() {
    let room = Room { half: 8, align: 1 };
    let case = |collective, shots| Case {
        collective,
        sizes: Sizes::Even(20),
        root: 0,
        in_place: false,
        shots,
        premultiplied: false,
    };
    let spoil = |case: &Case, spoiler: &dyn Fn(&mut Vec<Step>)| {
        let known = lists(case, 3);
        let mut row = vec![
            operation(case, &known, &room, 0),
            operation(case, &known, &room, 1),
            operation(case, &known, &room, 0),
        ];
        assert_eq!(verify(&row, room.half), Ok(()));
        for operation in &mut row {
            spoiler(&mut operation.plans[1].steps);
        }
        verify(&row, room.half).expect_err("a broken plan passed")
    };
    let without = |wanted: fn(&Step) -> bool| {
        move |steps: &mut Vec<Step>| {
            let at = steps.iter().position(wanted).expect("such a step");
            steps.remove(at);
        }
    };
    for shots in [Shots::One, Shots::Two] {
        let case = case(Collective::AllReduce, shots);
        spoil(&case, &without(|step| is_wait_for(step, Semaphore::Empty)));
        spoil(&case, &without(is_put));
        spoil(
            &case,
            &without(|step| is_signal_of(step, Semaphore::Contributions)),
        );
        spoil(
            &case,
            &without(|step| is_wait_for(step, Semaphore::Contributions)),
        );
        spoil(
            &case,
            &without(|step| matches!(step, Step::ReduceAll { .. })),
        );
        spoil(&case, &without(|step| is_signal_of(step, Semaphore::Empty)));
        // Read after all signals that say it has been.
        let problem = spoil(&case, &|steps| {
            let is_release = |step: &Step| is_signal_of(step, Semaphore::Empty);
            let is_read = |step: &Step| matches!(step, Step::ReduceAll { .. });
            let from = steps.iter().position(is_release).expect("a release");
            let to = steps.iter().position(is_read).expect("a reduction");
            steps[to..=from].rotate_left(1);
        });
        assert!(problem.contains("in use"), "{problem}");
        // Beyond the half.
        let problem = spoil(&case, &|steps| {
            for step in steps {
                if let Step::Copy { dst, .. } = step
                    && matches!(dst.buffer, Buffer::Window { .. })
                {
                    dst.offset += 8;
                }
            }
        });
        assert!(problem.contains("outside"), "{problem}");
    }
    // Awaited after it is read.
    let problem = spoil(&case(Collective::AllToAll, Shots::One), &|steps| {
        let is_await = |step: &Step| is_wait_for(step, Semaphore::Contributions);
        let is_get = |step: &Step| is_get(step);
        let from = steps.iter().position(is_await).expect("an await");
        let to = steps.iter().position(is_get).expect("a get");
        steps.swap(from, to);
    });
    assert!(problem.contains("may not have been written"), "{problem}");
}

/// That a peer has done with an earlier operation says nothing of a barrier.
#[test]
fn a_barrier_that_hears_of_the_past_alone_is_refused() {
    let room = Room { half: 8, align: 1 };
    let all = cases(3, 20);
    let case = |collective| {
        let mut found = all.iter().filter(|case| case.collective == collective);
        found.next().expect("a case")
    };
    let (sum, barrier) = (case(Collective::AllReduce), case(Collective::Barrier));
    let (known_of_sum, known) = (lists(sum, 3), lists(barrier, 3));
    let mut row = vec![
        operation(sum, &known_of_sum, &room, 0),
        operation(barrier, &known, &room, 0),
    ];
    assert_eq!(verify(&row, room.half), Ok(()));
    // It looks at the semaphores that the sum has left, takes none and sets none.
    for plan in &mut row[1].plans {
        plan.steps
            .retain(|step| is_wait_for(step, Semaphore::Empty));
        for step in &mut plan.steps {
            if let Step::Wait { take, .. } = step {
                *take = Peers::none();
            }
        }
    }
    let problem = verify(&row, room.half).expect_err("a broken barrier passed");
    assert!(problem.contains("without having heard from"), "{problem}");
}

#[test]
fn what_has_no_plan_is_refused() {
    let shape = Shape {
        collective: Collective::AllReduce,
        rank: 0,
        world: 3,
        counts: Counts::Even(5),
        root: 0,
        in_place: false,
        widen: false,
    };
    let room = |half| Room { half, align: 1 };
    assert!(build(&shape, &room(3), Shots::One, false).is_some());
    assert!(build(&shape, &room(2), Shots::One, false).is_none());
    let counts = [1, 2];
    let malformed = Shape {
        collective: Collective::AllGather,
        counts: Counts::PerRank(&counts),
        ..shape
    };
    assert!(build(&malformed, &room(8), Shots::One, false).is_none());
    let large = Shape {
        world: MOST_RANKS + 1,
        ..shape
    };
    assert!(build(&large, &room(large.world), Shots::One, false).is_none());
}
