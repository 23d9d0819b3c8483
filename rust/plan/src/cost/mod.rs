//! How long an algorithm should take, in closed form: what [`super::select`] compares.
//!
//! [`predict`] adds up, for one call:
//!
//! - the dependent rounds, each at the latency of the slowest link it uses. Where ranks share cores, a round takes
//!   until the core has gone around all of them ([`Costs::turn`]);
//! - the work of the cores: messages, bytes moved and bytes reduced. It takes as long as the busiest rank needs, and
//!   no less than a host's cores need for all of its ranks;
//! - the bytes through the busiest network interface of a host, and those that leave the busiest memory node of one.
//!
//! Bytes inside a host cost what the links make of them: a short message is as cheap as an empty one, a longer one is copied
//! into a slot or a ring and out of it, a long one is read by its receiver out of the sender's memory.
//!
//! All ranks must come to the same numbers. So nothing here depends on what only one rank knows (its rank, its counts,
//! whether it works in place), the costs are rank 0's on all ranks, and the arithmetic is addition, multiplication and
//! division of doubles in one fixed order, which every machine rounds alike; powers and logarithms are of integers.

mod bill;
mod costs;
#[cfg(test)]
mod tests;
mod work;

pub(crate) use self::bill::{Bill, Taken};
use self::bill::{Layout, Private};
pub use self::costs::{Costs, Rounded};
pub(crate) use self::work::Work;
use super::family;
use super::topology::Topology;
use super::{Algorithm, Counts, Shape, piece_length};
use crate::types::Collective;

/// Seconds that `shape` should take by `algorithm`, which applies to it, from the first rank's start to the last one's
/// end. Elements are `element_size` bytes long. The same on all ranks, except where they know different counts: there
/// it is infinite for all algorithms but `Direct`.
pub fn predict(
    algorithm: Algorithm,
    shape: &Shape,
    element_size: usize,
    topology: &Topology,
    costs: &Costs,
) -> f64 {
    let place = Placed::of(topology, shape.world);
    predict_where(algorithm, shape, element_size, place, costs)
}

/// [`predict`] where no peer reaches the caller's buffers: what is read out of them goes through the kernel.
pub fn predict_private(
    algorithm: Algorithm,
    shape: &Shape,
    element_size: usize,
    topology: &Topology,
    costs: &Costs,
) -> f64 {
    let place = Placed {
        is_private: true,
        ..Placed::of(topology, shape.world)
    };
    predict_where(algorithm, shape, element_size, place, costs)
}

/// The algorithm of `candidates` that takes least, the first of equals.
pub(super) fn least(
    candidates: impl Iterator<Item = Algorithm>,
    shape: &Shape,
    element_size: usize,
    topology: &Topology,
    costs: &Costs,
) -> Option<Algorithm> {
    let place = Placed::of(topology, shape.world);
    let mut best: Option<(f64, Algorithm)> = None;
    for algorithm in candidates {
        let seconds = predict_where(algorithm, shape, element_size, place, costs);
        if best.is_none_or(|(least, _)| seconds < least) {
            best = Some((seconds, algorithm));
        }
    }
    best.map(|(_, algorithm)| algorithm)
}

/// Where the ranks are, and that in numbers, and whether the callers' buffers are in memory that no peer reaches.
#[derive(Clone, Copy)]
struct Placed<'a> {
    topology: &'a Topology,
    layout: Layout<'a>,
    is_private: bool,
}

impl<'a> Placed<'a> {
    fn of(topology: &'a Topology, world: usize) -> Self {
        let layout = Layout::of(topology, world);
        Self {
            topology,
            layout,
            is_private: false,
        }
    }
}

/// Whether `collective` has a ring or a hierarchy, in which each host sends to one other at a time, and this is none of them.
const fn makes_streams_compete(algorithm: Algorithm, collective: Collective) -> bool {
    // Whatever goes to all hosts from each goes to them at once.
    let has_other = !matches!(
        collective,
        Collective::AllToAll | Collective::Gather | Collective::Scatter
    );
    has_other && !matches!(algorithm, Algorithm::Ring | Algorithm::Hierarchical)
}

/// As [`predict`], at this place.
fn predict_where(
    algorithm: Algorithm,
    shape: &Shape,
    element_size: usize,
    place: Placed<'_>,
    costs: &Costs,
) -> f64 {
    let bill = bill(algorithm, shape, element_size, place, costs);
    bill.map_or(f64::INFINITY, |bill| bill.seconds())
}

/// All that is done; `None` where ranks know different counts.
fn bill<'a>(
    algorithm: Algorithm,
    shape: &Shape,
    element_size: usize,
    Placed {
        topology,
        layout,
        is_private,
    }: Placed<'a>,
    costs: &'a Costs,
) -> Option<Bill<'a>> {
    let elements = match shape.counts {
        Counts::Even(count) => count,
        // All ranks know all of these.
        Counts::PerRank(counts)
            if matches!(
                shape.collective,
                Collective::AllGather | Collective::ReduceScatter
            ) =>
        {
            counts
                .iter()
                .fold(0_usize, |sum, count| sum.saturating_add(*count))
                .div_ceil(shape.world.max(1))
        }
        _ if algorithm == Algorithm::Direct => 0,
        _ => return None,
    };
    if shape.world < 2 {
        return Some(Bill::new(costs, layout));
    }
    let work = Work {
        world: shape.world,
        elements,
        bytes: elements as f64 * element_size as f64,
        widening: if shape.widen {
            // Halves and bytes are summed up in 4 bytes; averages of integers, in 16, are rare.
            4.0 / element_size.clamp(1, 4) as f64
        } else {
            1.0
        },
        piece: piece_length(algorithm, shape, element_size, topology, costs),
    };
    let mut bill = Bill::new(costs, layout.rooted_at(shape.root));
    bill.private = is_private.then(|| Private {
        is_cold: work.longer_buffer(shape.collective) * shape.world as f64 >= costs.cache,
    });
    (family(algorithm).price)(shape.collective, &work, &mut bill);
    bill.streams_compete = layout.hosts > 2 && makes_streams_compete(algorithm, shape.collective);
    Some(bill)
}
