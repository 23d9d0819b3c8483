//! Which algorithm serves which request.
//!
//! All ranks must choose alike, so the choice depends only on what is equal on all of them: the collective,
//! the world, where the ranks are, what things cost there, and sizes, where every rank knows them all. (In
//! gather, scatter and all_to_all with a count per rank or pair, a rank may know only its own; there the
//! algorithm is fixed.)
//!
//! It is the one that [`predict`](super::cost::predict) finds cheapest at the group's [`Costs`], which are measured on
//! rank 0 and the same everywhere. Of algorithms that are equally good the first in [`Algorithm::ALL`] is taken.

use super::cost::{Costs, least};
use super::topology::Topology;
use super::{Algorithm, Counts, Shape, is_well_formed, serves};
use crate::types::Collective;

/// The algorithm for `shape`, whose elements are `element_size` bytes long. Always applicable, and equal on
/// all ranks.
pub fn select(shape: &Shape, element_size: usize, topology: &Topology, costs: &Costs) -> Algorithm {
    match (shape.collective, shape.counts) {
        (_, Counts::Even(_))
        | (Collective::AllGather | Collective::ReduceScatter, Counts::PerRank(_)) => {}
        // Each rank knows its own counts only.
        _ => return Algorithm::Direct,
    }
    if shape.collective == Collective::Barrier {
        // Through a root, the other way, ranks would wait for the root while it waits for who is missing, and name it.
        return Algorithm::Bruck;
    }
    if !is_well_formed(shape) {
        return Algorithm::Direct;
    }
    let candidates = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| serves(*algorithm, shape));
    least(candidates, shape, element_size, topology, costs).unwrap_or(Algorithm::Direct)
}
