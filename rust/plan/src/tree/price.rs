//! The collectives that trees serve, and their costs.

use super::{
    ONE_TREE, all_reduce, broadcast, gather, is_leaf, number_at, parent_of, reduce, scatter,
};
use crate::cost::{Bill, Taken, Work};
use crate::family::Family;
use crate::types::Collective;
use crate::{Counts, Plan, Shape};

/// Trees.
pub(crate) const FAMILY: Family = Family {
    serves: |shape| match shape.collective {
        Collective::AllReduce | Collective::Reduce | Collective::Broadcast => true,
        Collective::Gather | Collective::Scatter => matches!(shape.counts, Counts::Even(_)),
        _ => false,
    },
    build,
    price,
};

fn build(shape: &Shape, chunk: usize) -> Option<Plan> {
    Some(match shape.collective {
        Collective::AllReduce => all_reduce(shape, chunk),
        Collective::Reduce => reduce(shape, chunk),
        Collective::Broadcast => broadcast(shape, chunk),
        Collective::Gather => gather(shape),
        Collective::Scatter => scatter(shape),
        _ => return None,
    })
}

fn price(collective: Collective, work: &Work, bill: &mut Bill) {
    match collective {
        Collective::AllReduce => {
            climb(work, bill);
            descend(work, bill);
            // Results come down behind the contributions that go up, so that both ways of an interface are in use.
            bill.wire += across(work, bill, (1.0, 1.0));
        }
        Collective::Reduce => {
            climb(work, bill);
            bill.wire += across(work, bill, (1.0, 0.0));
        }
        Collective::Broadcast => {
            descend(work, bill);
            bill.wire += across(work, bill, (0.0, 1.0));
        }
        // Down the tree as up.
        _ => collect(work, bill),
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
    (levels, trees, work.pieces_of(elements))
}

/// Bytes one way through the busiest interface, where each edge of one tree would carry `up` times the buffer up and `down`
/// times down.
fn across(work: &Work, bill: &Bill, (up, down): (f64, f64)) -> f64 {
    let (_, trees, _) = trees(work);
    let last = work.world - 1;
    let edges = (0..trees as usize).flat_map(|tree| {
        (1..=last).map(move |position| {
            let parent = match parent_of(position, last) {
                0 => 0,
                parent => number_at(parent, tree, last),
            };
            // A leaf has no sums, but elements.
            let wide = if is_leaf(position) {
                1.0
            } else {
                work.widening
            };
            (number_at(position, tree, last), parent, up * wide, down)
        })
    });
    busiest(bill, edges) * work.bytes / trees
}

/// The most that crosses an interface one way. Edges have the numbers of a child and its parent, and say how much goes up and
/// down; numbers are distances from the root.
fn busiest(bill: &Bill, edges: impl Iterator<Item = (usize, usize, f64, f64)>) -> f64 {
    if !bill.at.across() {
        return 0.0;
    }
    let host = |number: usize| bill.at.places[(bill.at.root + number) % bill.at.world];
    let (mut out, mut into) = (vec![0.0; bill.at.hosts], vec![0.0; bill.at.hosts]);
    for (child, parent, up, down) in edges {
        let (child, parent) = (host(child), host(parent));
        if child != parent {
            out[child] += up;
            into[parent] += up;
            out[parent] += down;
            into[child] += down;
        }
    }
    let all = out.into_iter().chain(into);
    all.fold(
        0.0,
        |most: f64, bytes| if bytes > most { bytes } else { most },
    )
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
        bill.wire += levels as f64 * piece;
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
        bill.wire += levels as f64 * piece;
    }
}

/// Runs of blocks up a binomial tree. `work.bytes` are one block.
fn collect(work: &Work, bill: &mut Bill) {
    let rounds = work.bruck_rounds();
    bill.rounds(rounds);
    for round in 0..rounds {
        let blocks = (1_usize << round).min(work.world - (1 << round));
        let run = work.bytes * blocks as f64;
        let hop = bill.taking(run, Taken::Copied, 1.0) + bill.sending(run);
        bill.root += hop;
        // A rank in 2^(round + 1) sends a run of that length on; it is copied together before.
        bill.each += (hop + work.bytes * bill.costs.copy) / (2 << round) as f64;
        let child = (bill.at.root + (1 << round)) % work.world;
        if bill.at.across() && bill.at.places[child] != bill.at.places[bill.at.root] {
            bill.root += bill.costs.remote_message;
        }
    }
    let blocks = |number: usize| (1_usize << number.trailing_zeros()).min(work.world - number);
    let edges = (1..work.world).map(|number| {
        let parent = number & (number - 1);
        (number, parent, blocks(number) as f64, 0.0)
    });
    bill.wire += busiest(bill, edges) * work.bytes;
}
