//! What each algorithm does in each collective: the plans, counted instead of made.

use super::bill::{Bill, Taken};
use super::work::Work;
use super::{hierarchical, shared};
use crate::plan::Algorithm;
use crate::types::Collective;

/// Up to this many elements go through one tree, more through two.
const ONE_TREE: usize = 1024;

/// Puts all that `algorithm` does for `collective` on the bill.
pub(super) fn add_up(algorithm: Algorithm, collective: Collective, work: &Work, bill: &mut Bill) {
    match algorithm {
        Algorithm::Windows => return shared::windows(collective, work, bill),
        Algorithm::InPlace => return shared::in_place(work, bill),
        Algorithm::Hierarchical => return hierarchical::add_up(collective, work, bill),
        _ => {}
    }
    match collective {
        Collective::AllReduce => all_reduce(algorithm, work, bill),
        Collective::Reduce => reduce(algorithm, work, bill),
        Collective::Broadcast => broadcast(algorithm, work, bill),
        Collective::AllGather => all_gather(algorithm, work, bill),
        Collective::ReduceScatter => reduce_scatter(algorithm, work, bill),
        Collective::Gather => gather(algorithm, work, bill),
        Collective::Scatter => scatter(algorithm, work, bill),
        Collective::AllToAll => all_to_all(algorithm, work, bill),
        Collective::Barrier => barrier(algorithm, work, bill),
        Collective::Send | Collective::Recv => {}
    }
}

fn all_reduce(algorithm: Algorithm, work: &Work, bill: &mut Bill) {
    let (bytes, widening) = (work.bytes, work.widening);
    match algorithm {
        Algorithm::Direct => {
            bill.rounds(1);
            bill.pass(bytes * widening);
            bill.all_pairs(bytes, Work::pieces(work.elements), Taken::Folded, widening);
        }
        Algorithm::TwoShot => {
            bill.rounds(2);
            if !work.is_summed_in_cache(bill.costs.cache) {
                bill.pass(work.slice() * widening);
            }
            let pieces = work.pieces_of_slice();
            bill.all_pairs(work.slice(), pieces, Taken::Folded, widening);
            bill.all_pairs(work.slice(), pieces, Taken::Copied, 1.0);
        }
        Algorithm::Ring => {
            let pieces = work.pieces_of_slice();
            bill.pass(bytes * widening);
            bill.around(work.slice() * widening, pieces, Taken::Folded, 1.0);
            bill.around(work.slice(), pieces, Taken::Copied, 1.0);
        }
        Algorithm::Tree => {
            climb(work, bill);
            descend(work, bill);
        }
        Algorithm::RecursiveDoubling => {
            let (rounds, has_guests) = work.doublings();
            bill.pass(bytes * widening);
            for round in 0..rounds {
                bill.swap(1 << round, bytes * widening, Taken::Folded, 1.0);
                // Half of the ranks go over their sum once more, to keep the order.
                bill.pass(bytes * widening * 0.5);
            }
            if has_guests {
                bill.swap(1, bytes, Taken::Folded, widening);
                bill.swap(1, bytes, Taken::Copied, 1.0);
            }
        }
        Algorithm::Halving => {
            halve(work, bill, bytes, false);
            let (rounds, has_guests) = work.doublings();
            let mut part = bytes;
            for round in 0..rounds {
                part *= 0.5;
                bill.swap(1 << round, part, Taken::Copied, 1.0);
            }
            if has_guests {
                bill.swap(1, bytes, Taken::Copied, 1.0);
            }
        }
        // None of all_reduce, or priced before.
        Algorithm::Bruck | Algorithm::Hierarchical | Algorithm::Windows | Algorithm::InPlace => {}
    }
}

/// Every member is left with its part of `bytes`; the largest exchanges with the nearest or the `farthest`.
fn halve(work: &Work, bill: &mut Bill, bytes: f64, farthest: bool) {
    let (rounds, has_guests) = work.doublings();
    if has_guests {
        bill.swap(1, bytes, Taken::Folded, work.widening);
    }
    let mut part = bytes * work.widening;
    for round in 0..rounds {
        part *= 0.5;
        let bit = if farthest { rounds - 1 - round } else { round };
        bill.swap(1 << bit, part, Taken::Folded, 1.0);
        bill.pass(part);
    }
}

/// How many levels the two trees have, and how many pieces each of them carries.
fn trees(work: &Work) -> (usize, f64, f64) {
    let levels = (work.world - 1).ilog2() as usize + 1;
    let (trees, elements) = if work.elements <= ONE_TREE {
        (1.0, work.elements)
    } else {
        (2.0, work.elements.div_ceil(2))
    };
    (levels, trees, Work::pieces(elements))
}

/// Bytes of trees that carry `bytes` through one interface: a rank forwards in one tree only, but of a host's ranks
/// there may be one for either tree whose neighbours are elsewhere.
fn through_trees(bytes: f64, bill: &Bill) -> f64 {
    bytes * bill.at.beside.min(2) as f64
}

/// Up the trees: a rank that forwards takes two children's sums.
fn climb(work: &Work, bill: &mut Bill) {
    let (levels, trees, pieces) = trees(work);
    let piece = work.bytes * work.widening / trees / pieces;
    let across = bill.at.across();
    bill.rounds(levels);
    bill.pass(work.bytes * work.widening);
    bill.exchanges(2.0 * pieces, false, piece, Taken::Folded, 1.0);
    // Until the first piece has arrived, only one level at a time can work.
    let hop = bill.sending(piece) + 2.0 * bill.taking(piece, Taken::Folded, 1.0);
    bill.alone += (levels - 1) as f64 * hop;
    if across {
        bill.alone += levels as f64 * (2.0 * bill.costs.remote_message);
        bill.wire += through_trees(work.bytes * work.widening, bill) + levels as f64 * piece;
    }
}

/// Down the trees: a rank that forwards sends to two children.
fn descend(work: &Work, bill: &mut Bill) {
    let (levels, trees, pieces) = trees(work);
    let piece = work.bytes / trees / pieces;
    let across = bill.at.across();
    bill.rounds(levels);
    bill.exchanges(trees * pieces, false, piece, Taken::Copied, 1.0);
    let hop = 2.0 * bill.sending(piece) + bill.taking(piece, Taken::Copied, 1.0);
    bill.alone += (levels - 1) as f64 * hop;
    if across {
        bill.alone += levels as f64 * (2.0 * bill.costs.remote_message);
        bill.wire += through_trees(work.bytes, bill) + levels as f64 * piece;
    }
}

fn reduce(algorithm: Algorithm, work: &Work, bill: &mut Bill) {
    let (bytes, widening) = (work.bytes, work.widening);
    match algorithm {
        Algorithm::TwoShot => {
            bill.rounds(2);
            let pieces = work.pieces_of_slice();
            bill.all_pairs(work.slice(), pieces, Taken::Folded, widening);
            bill.root_takes(work.slice() * widening, 1.0, Taken::Copied, 1.0);
        }
        Algorithm::Ring => {
            bill.pass(bytes * widening);
            let pieces = work.pieces_of_slice();
            bill.around(work.slice() * widening, pieces, Taken::Folded, 1.0);
            bill.rounds(1);
            bill.root_takes(work.slice() * widening, 1.0, Taken::Copied, 1.0);
        }
        Algorithm::Tree => climb(work, bill),
        _ => {
            bill.rounds(1);
            let pieces = Work::pieces(work.elements);
            bill.root_takes(bytes, pieces, Taken::Folded, widening);
        }
    }
}

fn broadcast(algorithm: Algorithm, work: &Work, bill: &mut Bill) {
    match algorithm {
        Algorithm::TwoShot => {
            bill.rounds(2);
            bill.root_sends(work.slice());
            bill.all_pairs(work.slice(), 1.0, Taken::Copied, 1.0);
        }
        Algorithm::Ring => {
            let pieces = Work::pieces(work.elements);
            let piece = work.bytes / pieces;
            bill.hops(work.world - 1);
            bill.send_right(pieces, piece, Taken::Copied, 1.0);
            let hop = bill.sending(piece) + bill.taking(piece, Taken::Copied, 1.0);
            bill.alone += (work.world - 2) as f64 * hop;
            let leaving = bill.at.runs.saturating_sub(1);
            bill.wire += leaving as f64 * piece;
        }
        Algorithm::Tree => descend(work, bill),
        _ => {
            bill.rounds(1);
            bill.root_sends(work.bytes);
        }
    }
}

/// `work.bytes` are one block.
fn all_gather(algorithm: Algorithm, work: &Work, bill: &mut Bill) {
    bill.pass(work.bytes);
    match algorithm {
        Algorithm::Ring => bill.around(work.bytes, Work::pieces(work.elements), Taken::Copied, 1.0),
        Algorithm::RecursiveDoubling | Algorithm::Bruck => {
            for round in 0..work.bruck_rounds() {
                let distance = 1 << round;
                let blocks = distance.min(work.world - distance);
                let run = work.bytes * blocks as f64;
                if algorithm == Algorithm::RecursiveDoubling {
                    bill.swap(distance, run, Taken::Copied, 1.0);
                } else {
                    bill.shift(distance, run, Taken::Copied);
                    // A run that passes the end of the world goes in two messages.
                    bill.each += bill.costs.message;
                }
            }
        }
        _ => {
            bill.rounds(1);
            bill.all_pairs(work.bytes, 1.0, Taken::Copied, 1.0);
        }
    }
}

/// `work.bytes` are one block.
fn reduce_scatter(algorithm: Algorithm, work: &Work, bill: &mut Bill) {
    let pieces = Work::pieces(work.elements);
    let block = work.bytes * work.widening;
    match algorithm {
        Algorithm::Ring => {
            bill.pass(block * work.world as f64);
            bill.around(block, pieces, Taken::Folded, 1.0);
        }
        Algorithm::Halving => {
            halve(work, bill, work.bytes * work.world as f64, true);
            bill.pass(block);
            if work.doublings().1 {
                bill.swap(1, block, Taken::Copied, 1.0);
            }
        }
        _ => {
            bill.rounds(1);
            bill.pass(block);
            bill.all_pairs(work.bytes, pieces, Taken::Folded, work.widening);
        }
    }
}

/// `work.bytes` are one block.
fn gather(algorithm: Algorithm, work: &Work, bill: &mut Bill) {
    if algorithm == Algorithm::Tree {
        let rounds = work.bruck_rounds();
        bill.rounds(rounds);
        for round in 0..rounds {
            let blocks = (1_usize << round).min(work.world - (1 << round));
            let run = work.bytes * blocks as f64;
            let hop = bill.taking(run, Taken::Copied, 1.0) + bill.sending(run);
            bill.root += hop;
            // A rank in 2^(round + 1) sends a run of that length on; it is copied together before.
            bill.each += (hop + work.bytes * bill.costs.copy) / (2 << round) as f64;
            if bill.at.crosses(1 << round) {
                bill.root += bill.costs.remote_message;
                bill.wire += run;
            }
        }
    } else {
        bill.rounds(1);
        bill.root_takes(work.bytes, 1.0, Taken::Copied, 1.0);
    }
}

/// `work.bytes` are one block.
fn scatter(algorithm: Algorithm, work: &Work, bill: &mut Bill) {
    if algorithm == Algorithm::Tree {
        gather(algorithm, work, bill);
    } else {
        bill.rounds(1);
        bill.root_sends(work.bytes);
    }
}

/// `work.bytes` are one block.
fn all_to_all(algorithm: Algorithm, work: &Work, bill: &mut Bill) {
    bill.pass(work.bytes);
    if algorithm == Algorithm::Bruck {
        let half = work.bytes * work.world as f64 * 0.5;
        bill.pass(4.0 * half);
        for round in 0..work.bruck_rounds() {
            bill.shift(1 << round, half, Taken::Copied);
            bill.pass(2.0 * half);
        }
    } else {
        bill.rounds(1);
        bill.all_pairs(work.bytes, 1.0, Taken::Copied, 1.0);
    }
}

fn barrier(algorithm: Algorithm, work: &Work, bill: &mut Bill) {
    if algorithm == Algorithm::Bruck {
        for round in 0..work.bruck_rounds() {
            bill.shift(1 << round, 0.0, Taken::Copied);
        }
    } else {
        bill.rounds(2);
        bill.root_takes(0.0, 1.0, Taken::Copied, 1.0);
        bill.root_sends(0.0);
    }
}
