//! The checker must be able to say no: right plans, made wrong in one place each.

use super::verify;
use crate::types::Collective;
use crate::{Algorithm, Buffer, Counts, MIN_WINDOW, Plan, Shape, Span, Step, Wire, build_chunked};

fn shapes(collective: Collective, world: usize, count: usize) -> Vec<Shape<'static>> {
    (0..world)
        .map(|rank| Shape {
            collective,
            rank,
            world,
            counts: Counts::Even(count),
            root: 0,
            in_place: false,
            widen: false,
        })
        .collect()
}

fn plans(algorithm: Algorithm, shapes: &[Shape]) -> Vec<Plan> {
    shapes
        .iter()
        .map(|shape| build_chunked(algorithm, shape, 2).expect("the algorithm applies"))
        .collect()
}

/// Asserts that the plans are refused in words that contain `reason`.
fn refused(plans: &[Plan], shapes: &[Shape], reason: &str) {
    match verify(plans, shapes, MIN_WINDOW) {
        Ok(_) => panic!("accepted, though {reason}"),
        Err(problem) => assert!(
            problem.contains(reason),
            "{problem:?} does not say {reason:?}"
        ),
    }
}

#[test]
fn steps_onto_themselves_are_refused() {
    let shapes = shapes(Collective::AllReduce, 2, 10);
    let span = Span::new(Buffer::Output, 0, 10);
    for step in [
        Step::Copy {
            src: span,
            dst: span,
        },
        Step::Reduce {
            src: span,
            dst: span,
        },
    ] {
        let mut plans = plans(Algorithm::Direct, &shapes);
        plans[1].steps.push(step);
        refused(&plans, &shapes, "between overlapping spans");
    }
}

#[test]
fn dropping_any_step_is_refused() {
    for (collective, algorithm) in [
        (Collective::AllReduce, Algorithm::Direct),
        (Collective::AllReduce, Algorithm::TwoShot),
        (Collective::AllReduce, Algorithm::Ring),
        (Collective::AllReduce, Algorithm::Tree),
        (Collective::AllReduce, Algorithm::RecursiveDoubling),
        (Collective::AllReduce, Algorithm::Halving),
        (Collective::AllGather, Algorithm::Bruck),
        (Collective::AllToAll, Algorithm::Bruck),
        (Collective::Gather, Algorithm::Tree),
        (Collective::Barrier, Algorithm::Bruck),
        (Collective::Barrier, Algorithm::Direct),
    ] {
        let shapes = shapes(collective, 5, 10);
        let right = plans(algorithm, &shapes);
        assert!(verify(&right, &shapes, MIN_WINDOW).is_ok());
        for rank in 0..right.len() {
            for step in 0..right[rank].steps.len() {
                let mut wrong = right.clone();
                let dropped = wrong[rank].steps.remove(step);
                let verdict = verify(&wrong, &shapes, MIN_WINDOW);
                assert!(
                    verdict.is_err(),
                    "{collective} by {algorithm} passes without step {step} of rank {rank}, {dropped:?}"
                );
            }
        }
    }
}

/// `step` with its span at the receiving or local side moved by one element.
fn shifted(step: Step) -> Option<Step> {
    let shift = |span: Span| Span {
        offset: span.offset + 1,
        ..span
    };
    match step {
        Step::Send { to, src } => Some(Step::Send {
            to,
            src: shift(src),
        }),
        Step::Recv { from, dst, wire } => Some(Step::Recv {
            from,
            dst: shift(dst),
            wire,
        }),
        Step::Fold { from, dst, wire } => Some(Step::Fold {
            from,
            dst: shift(dst),
            wire,
        }),
        Step::Copy { src, dst } => Some(Step::Copy {
            src: shift(src),
            dst,
        }),
        Step::Reduce { src, dst } => Some(Step::Reduce {
            src: shift(src),
            dst,
        }),
        _ => None,
    }
}

#[test]
fn shifting_any_span_is_refused() {
    for algorithm in [
        Algorithm::Direct,
        Algorithm::Ring,
        Algorithm::Halving,
        Algorithm::Tree,
    ] {
        let shapes = shapes(Collective::AllReduce, 4, 12);
        let right = plans(algorithm, &shapes);
        for rank in 0..right.len() {
            for step in 0..right[rank].steps.len() {
                let Some(changed) = shifted(right[rank].steps[step]) else {
                    continue;
                };
                let mut wrong = right.clone();
                wrong[rank].steps[step] = changed;
                let verdict = verify(&wrong, &shapes, MIN_WINDOW);
                assert!(
                    verdict.is_err(),
                    "{algorithm} passes with {changed:?} in rank {rank}"
                );
            }
        }
    }
}

#[test]
fn another_wire_type_is_refused() {
    let shapes = shapes(Collective::AllReduce, 2, 4);
    let mut wrong = plans(Algorithm::Ring, &shapes);
    for step in &mut wrong[1].steps {
        if let Step::Fold { wire, .. } = step {
            *wire = Wire::Partial;
        }
    }
    refused(&wrong, &shapes, "expects Partial where Element is sent");
}

#[test]
fn another_order_of_operands_is_refused() {
    // Both ranks fold what arrives into their own: 0 op 1 here, 1 op 0 there.
    let whole = Span::new(Buffer::Output, 0, 3);
    let input = Span::new(Buffer::Input, 0, 3);
    let plan = |peer| Plan {
        steps: vec![
            Step::Copy {
                src: input,
                dst: whole,
            },
            Step::Send {
                to: peer,
                src: input,
            },
            Step::Fold {
                from: peer,
                dst: whole,
                wire: Wire::Element,
            },
            Step::Finish {
                src: whole,
                dst: whole,
            },
        ],
        ..Plan::default()
    };
    let shapes = shapes(Collective::AllReduce, 2, 3);
    refused(
        &[plan(1), plan(0)],
        &shapes,
        "in another order than on another rank",
    );
}

#[test]
fn adding_twice_or_finishing_twice_is_refused() {
    let shapes = shapes(Collective::AllReduce, 3, 2);
    let right = plans(Algorithm::Direct, &shapes);
    let finish = right[0].steps.len() - 1;
    let Step::Finish { src: sum, .. } = right[0].steps[finish] else {
        panic!("the last step finishes");
    };
    let src = Span::new(Buffer::Input, 0, 2);

    let mut wrong = right.clone();
    wrong[0]
        .steps
        .insert(finish, Step::Reduce { src, dst: sum });
    refused(&wrong, &shapes, "contributions of ranks [0] twice");

    let mut wrong = right.clone();
    wrong[0].steps.push(Step::Finish { src: sum, dst: sum });
    refused(&wrong, &shapes, "finishes element 0 twice");

    let mut wrong = right;
    wrong[0].steps.swap(finish, finish - 1);
    refused(&wrong, &shapes, "without the contributions of ranks [2]");
}

#[test]
fn writing_where_one_must_not_is_refused() {
    let shapes = shapes(Collective::Reduce, 2, 3);
    let right = plans(Algorithm::Direct, &shapes);
    let input = Span::new(Buffer::Input, 0, 3);
    let output = Span::new(Buffer::Output, 0, 3);
    let scratch = Span::new(Buffer::Scratch, 0, 3);

    let mut wrong = right.clone();
    wrong[0].steps.push(Step::Copy {
        src: output,
        dst: input,
    });
    refused(&wrong, &shapes, "writes the input");

    let mut wrong = right.clone();
    wrong[1].steps.push(Step::Copy {
        src: input,
        dst: output,
    });
    refused(
        &wrong,
        &shapes,
        "needs 3 elements from 0 of the 0 in Output",
    );

    let mut wrong = right.clone();
    wrong[1].steps.push(Step::Copy {
        src: input,
        dst: scratch,
    });
    refused(
        &wrong,
        &shapes,
        "needs 3 elements from 0 of the 0 in Scratch",
    );

    let mut wrong = right;
    wrong[1].scratch = 3;
    wrong[1].steps.insert(
        0,
        Step::Reduce {
            src: input,
            dst: scratch,
        },
    );
    refused(&wrong, &shapes, "which nothing was written to");
}

#[test]
fn rounding_a_partial_sum_is_refused() {
    let narrow = shapes(Collective::AllReduce, 2, 3);
    let wide: Vec<Shape> = narrow
        .iter()
        .map(|&shape| Shape {
            widen: true,
            ..shape
        })
        .collect();
    refused(
        &plans(Algorithm::Ring, &narrow),
        &wide,
        "rounds a partial sum",
    );
}

#[test]
fn waiting_in_a_circle_is_refused() {
    let block = |rank| Span::new(Buffer::Output, rank * 2, 2);
    let input = Span::new(Buffer::Input, 0, 2);
    let shapes = shapes(Collective::AllGather, 3, 2);
    let plan = |rank: usize| {
        let (right, left) = ((rank + 1) % 3, (rank + 2) % 3);
        Plan {
            // Two sends before the first receive: more than two steps can hold.
            steps: vec![
                Step::Copy {
                    src: input,
                    dst: block(rank),
                },
                Step::Send {
                    to: right,
                    src: input,
                },
                Step::Send {
                    to: left,
                    src: input,
                },
                Step::Recv {
                    from: left,
                    dst: block(left),
                    wire: Wire::Element,
                },
                Step::Recv {
                    from: right,
                    dst: block(right),
                    wire: Wire::Element,
                },
            ],
            ..Plan::default()
        }
    };
    let plans = [plan(0), plan(1), plan(2)];
    refused(&plans, &shapes, "never ends; rank 0 in step 1");
    assert!(verify(&plans, &shapes, 3).is_ok(), "three steps are enough");
}

#[test]
fn a_barrier_that_forgets_what_it_heard_is_refused() {
    let shapes = shapes(Collective::Barrier, 4, 0);
    let mut wrong = plans(Algorithm::Bruck, &shapes);
    for plan in &mut wrong {
        // Send both signals before hearing the first.
        plan.steps.swap(1, 2);
    }
    let verdict = verify(&wrong, &shapes, 8);
    assert!(verdict.is_err_and(|problem| problem.contains("without having heard from")));
}

/// Prefixes that are of other ranks, or not in their order.
#[test]
fn another_prefix_is_refused() {
    let scan = shapes(Collective::Scan, 3, 2);
    let right = plans(Algorithm::Direct, &scan);
    assert!(verify(&right, &scan, MIN_WINDOW).is_ok());

    let mut swapped = right.clone();
    let [first, second] = [0, 1].map(|step| match swapped[2].steps[step] {
        Step::Recv { from, .. } | Step::Fold { from, .. } => from,
        other => panic!("{other:?} is no receive"),
    });
    assert_eq!((first, second), (0, 1));
    for step in &mut swapped[2].steps[..2] {
        if let Step::Recv { from, .. } | Step::Fold { from, .. } = step {
            *from = 1 - *from;
        }
    }
    refused(&swapped, &scan, "not reduced in the order of the ranks");

    let mut without_own = right;
    let is_own = |step: &Step| matches!(step, Step::Reduce { .. });
    without_own[1].steps.retain(|step| !is_own(step));
    refused(
        &without_own,
        &scan,
        "without the contributions of ranks [1]",
    );

    let exscan = shapes(Collective::Exscan, 3, 2);
    let mut written = plans(Algorithm::Direct, &exscan);
    written[0].steps.push(Step::Copy {
        src: Span::new(Buffer::Input, 0, 2),
        dst: Span::new(Buffer::Output, 0, 2),
    });
    refused(&written, &exscan, "is not the element that belongs there");
}
