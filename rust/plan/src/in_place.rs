//! An all_reduce where the buffers lie, in one pass over memory.
//!
//! Where the buffers of all ranks lie in heaps that all of them have mapped, nothing has to be sent: the ranks lend each
//! other their outputs for as long as the plan runs ([`Plan::lends`]). Each rank sums up its slice of all of them and
//! stores the sum to all of them: every line of every buffer is read once and written once, by one rank. No plan of
//! messages comes near that, since there each rank writes its own memory alone, and reads what others have written.
//!
//! ```text
//! buffers of    rank 0   rank 1   rank 2
//! slice 0       a0       b0       c0      rank 0: a0 = b0 = c0 = a0 + b0 + c0
//! slice 1       a1       b1       c1      rank 1: a1 = b1 = c1 = a1 + b1 + c1
//! slice 2       a2       b2       c2      rank 2: ...
//! ```
//!
//! This is what MPI libraries do over XPMEM, with the results stored by the rank that made them.

use super::cost::{Bill, Work};
use super::family::Family;
use super::shared::{LINE, price_of_agreement};
use super::signals::{MOST_RANKS, Peers};
use super::{Buffer, Counts, Order, Plan, Shape, Sources, Span, Step};
use crate::types::{Collective, Rank};

/// Where the buffers lie.
pub(super) const FAMILY: Family = Family::built_elsewhere(price);

/// The slice that `rank` of `world` sums up, of `count` elements of `element_size` bytes: the first element and how
/// many. Slices begin at cache lines, counted from the beginning of the buffer, so that two ranks never write to one
/// line of a buffer that begins with one; the last ones may be shorter or empty.
pub fn slice(rank: Rank, world: usize, count: usize, element_size: usize) -> (usize, usize) {
    let align = (LINE / element_size.max(1)).max(1);
    let step = count.div_ceil(world.max(1)).next_multiple_of(align);
    let start = count.min(step * rank);
    (start, step.min(count - start))
}

/// This rank's plan. `None` for other collectives than an all_reduce whose output holds the input, and for a world of one
/// or of more than [`MOST_RANKS`].
pub fn build(shape: &Shape, element_size: usize) -> Option<Plan> {
    let Counts::Even(count) = shape.counts else {
        return None;
    };
    let fits = shape.collective == Collective::AllReduce
        && shape.in_place
        && (2..=MOST_RANKS).contains(&shape.world);
    if !fits {
        return None;
    }
    let (start, len) = slice(shape.rank, shape.world, count, element_size);
    let sum = Step::ReduceAll {
        srcs: Sources::Outputs,
        dst: Span::new(Buffer::Output, start, len),
        copies: Peers::others(shape.rank, shape.world),
    };
    Some(Plan {
        steps: Vec::from_iter((len > 0).then_some(sum)),
        scratch: 0,
        order: Order::InOrder,
        lends: true,
    })
}

/// Slice by slice: each byte of each buffer is read once and written once.
fn price(_: Collective, work: &Work, bill: &mut Bill) {
    let others = (work.world - 1) as f64;
    price_of_agreement(work, bill);
    // Slices are lent to every peer, and come back.
    bill.each += others * 2.0 * bill.costs.loan;
    bill.rounds(1);
    let moved = others * work.bytes / work.world as f64;
    bill.reaches(2.0 * moved);
    bill.each += moved * (bill.costs.fold * work.widening + bill.costs.copy);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Operation, verify_row};
    use crate::{MIN_WINDOW, windows};

    fn shapes(world: usize, count: usize) -> Vec<Shape<'static>> {
        let shape = |rank| Shape {
            collective: Collective::AllReduce,
            rank,
            world,
            counts: Counts::Even(count),
            root: 0,
            in_place: true,
            widen: true,
        };
        (0..world).map(shape).collect()
    }

    fn plans(shapes: &[Shape], element_size: usize) -> Vec<Plan> {
        let plan = |shape| build(shape, element_size).expect("a plan");
        shapes.iter().map(plan).collect()
    }

    fn verdict(plans: &[Plan], shapes: &[Shape]) -> Result<(), String> {
        let operation = Operation {
            plans,
            shapes,
            first: 0,
            in_place: Peers::none(),
        };
        // Twice, so that the second begins where the first leaves off.
        let report = verify_row(&[operation, operation], MIN_WINDOW, 0)?;
        assert!(report.in_rank_order);
        Ok(())
    }

    #[test]
    fn every_element_is_summed_up_once_and_stored_everywhere() {
        for world in [2, 3, 4, 7, 16, MOST_RANKS] {
            for count in [0, 1, 15, 16, 17, 100, 257] {
                for element_size in [1, 2, 4, 8, 16] {
                    let shapes = shapes(world, count);
                    let plans = plans(&shapes, element_size);
                    if let Err(problem) = verdict(&plans, &shapes) {
                        panic!("world {world}, {count} elements of {element_size}: {problem}");
                    }
                }
            }
        }
    }

    /// An operation in place between two through windows, which another half begins.
    #[test]
    fn operations_of_both_kinds_follow_each_other() {
        let (world, room) = (3, windows::Room { half: 24, align: 4 });
        let shapes = shapes(world, 50);
        let in_place = plans(&shapes, 4);
        let build = |shape| windows::build_in_step(shape, &room).expect("a plan");
        let through: Vec<Plan> = shapes.iter().map(build).collect();
        let row = [(&through, 0), (&in_place, 1), (&through, 1)].map(|(plans, first)| Operation {
            plans,
            shapes: &shapes,
            first,
            in_place: Peers::none(),
        });
        verify_row(&row, MIN_WINDOW, room.half).expect("right plans");
    }

    fn refused(spoil: impl Fn(&mut Vec<Plan>), reason: &str) {
        let shapes = shapes(3, 100);
        let mut plans = plans(&shapes, 4);
        spoil(&mut plans);
        let problem = verdict(&plans, &shapes).expect_err("a broken plan passed");
        assert!(
            problem.contains(reason),
            "{problem:?} does not say {reason:?}"
        );
    }

    #[test]
    fn a_broken_plan_is_refused() {
        refused(|plans| plans[1].steps.clear(), "is not a finished sum");
        refused(
            |plans| plans[1].steps.extend_from_within(..),
            "finished already",
        );
        let not_lent = |plans: &mut Vec<Plan>| plans.iter_mut().for_each(|plan| plan.lends = false);
        refused(not_lent, "none of its kind");
        let elsewhere = |plans: &mut Vec<Plan>| {
            if let Some(Step::ReduceAll { dst, .. }) = plans[1].steps.first_mut() {
                dst.buffer = Buffer::Scratch;
            }
        };
        refused(elsewhere, "none of its kind");
        let message = Step::Send {
            to: 0,
            src: Span::new(Buffer::Output, 0, 1),
        };
        refused(|plans| plans[1].steps.push(message), "none of its kind");
        refused(|plans| plans[2].lends = false, "some ranks lend");
        refused(
            |plans| plans[0].order = Order::Overlapping,
            "none of its kind",
        );
        // Slices that overlap.
        let overlapping = |plans: &mut Vec<Plan>| {
            if let Some(Step::ReduceAll { dst, .. }) = plans[1].steps.first_mut() {
                dst.offset -= 1;
            }
        };
        refused(overlapping, "may still be in use");
        // A rank that stores to one rank less.
        let incomplete = |plans: &mut Vec<Plan>| {
            if let Some(Step::ReduceAll { copies, .. }) = plans[1].steps.first_mut() {
                *copies = copies.without(2);
            }
        };
        refused(incomplete, "is not a finished sum");
    }
}
