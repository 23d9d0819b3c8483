//! The collectives that are served in one shot and in two, and their costs.

use super::{
    all_gather, all_reduce, all_reduce_two_shot, all_to_all, barrier, broadcast,
    broadcast_two_shot, gather, prefix, reduce, reduce_scatter, reduce_two_shot, scatter,
};
use crate::cost::{Bill, Taken, Work};
use crate::family::Family;
use crate::types::Collective;
use crate::{Plan, Shape, ring};

/// In one shot.
pub(crate) const DIRECT: Family = Family {
    serves: |shape| !matches!(shape.collective, Collective::Send | Collective::Recv),
    build: one_shot,
    price: price_of_one_shot,
};

/// In two shots.
pub(crate) const TWO_SHOT: Family = Family {
    serves: |shape| {
        matches!(
            shape.collective,
            Collective::AllReduce | Collective::Reduce | Collective::Broadcast
        )
    },
    build: two_shots,
    price: price_of_two_shots,
};

fn one_shot(shape: &Shape, chunk: usize) -> Option<Plan> {
    Some(match shape.collective {
        Collective::AllReduce => all_reduce(shape, chunk),
        Collective::Reduce => reduce(shape, chunk),
        Collective::Broadcast => broadcast(shape),
        Collective::AllGather => all_gather(shape),
        Collective::ReduceScatter => reduce_scatter(shape, chunk),
        Collective::Gather => gather(shape),
        Collective::Scatter => scatter(shape),
        Collective::AllToAll => all_to_all(shape),
        Collective::Barrier => barrier(shape),
        Collective::Scan | Collective::Exscan => prefix(shape, chunk),
        Collective::Send | Collective::Recv => return None,
    })
}

fn two_shots(shape: &Shape, chunk: usize) -> Option<Plan> {
    Some(match shape.collective {
        // Two numbers have one sum in either order: a ring of two is as direct and keeps no order.
        Collective::AllReduce if shape.world == 2 => ring::all_reduce(shape, chunk),
        Collective::AllReduce => all_reduce_two_shot(shape, chunk),
        Collective::Reduce => reduce_two_shot(shape, chunk),
        Collective::Broadcast => broadcast_two_shot(shape),
        _ => return None,
    })
}

/// `work.bytes` are one block, where the collective deals in blocks.
fn price_of_one_shot(collective: Collective, work: &Work, bill: &mut Bill) {
    let (bytes, widening) = (work.bytes, work.widening);
    let pieces = Work::pieces(work.elements);
    match collective {
        Collective::AllReduce => {
            bill.rounds(1);
            bill.pass(bytes * widening);
            bill.all_pairs(bytes, pieces, Taken::Folded, widening);
        }
        Collective::Reduce => {
            bill.rounds(1);
            bill.root_takes(bytes, pieces, Taken::Folded, widening);
        }
        Collective::Broadcast | Collective::Scatter => {
            bill.rounds(1);
            bill.root_sends(bytes);
        }
        Collective::AllGather | Collective::AllToAll => {
            bill.pass(bytes);
            bill.rounds(1);
            bill.all_pairs(bytes, 1.0, Taken::Copied, 1.0);
        }
        Collective::ReduceScatter => {
            bill.rounds(1);
            bill.pass(bytes * widening);
            bill.all_pairs(bytes, pieces, Taken::Folded, widening);
        }
        Collective::Gather => {
            bill.rounds(1);
            bill.root_takes(bytes, 1.0, Taken::Copied, 1.0);
        }
        Collective::Barrier => {
            bill.rounds(2);
            bill.root_takes(0.0, 1.0, Taken::Copied, 1.0);
            bill.root_sends(0.0);
        }
        Collective::Scan | Collective::Exscan => {
            bill.rounds(1);
            bill.pass(bytes * widening);
            bill.pairs_upwards(bytes, pieces, widening);
        }
        Collective::Send | Collective::Recv => {}
    }
}

fn price_of_two_shots(collective: Collective, work: &Work, bill: &mut Bill) {
    let (slice, widening) = (work.slice(), work.widening);
    let pieces = (work.elements.div_ceil(work.world)).div_ceil(work.piece);
    let pieces = pieces.max(1) as f64;
    bill.rounds(2);
    match collective {
        Collective::AllReduce => {
            if !work.is_summed_in_cache(bill.costs.cache) {
                bill.pass(slice * widening);
            }
            bill.all_pairs(slice, pieces, Taken::Folded, widening);
            bill.all_pairs(slice, pieces, Taken::Copied, 1.0);
            if work.world > 2 {
                let sent = slice / pieces * (work.world - 1) as f64;
                bill.waits_between(pieces, sent * bill.costs.remote_byte);
            }
        }
        Collective::Reduce => {
            bill.all_pairs(slice, pieces, Taken::Folded, widening);
            bill.root_takes(slice * widening, 1.0, Taken::Copied, 1.0);
        }
        _ => {
            bill.root_sends(slice);
            bill.all_pairs(slice, 1.0, Taken::Copied, 1.0);
            // The slices of ranks on other hosts come back, each after it has arrived, which may be late: all slices of the
            // second shot are sent meanwhile.
            let beside = bill.at.beside_root();
            bill.wire += ((work.world - beside) * (beside - 1)) as f64 * slice;
        }
    }
}
