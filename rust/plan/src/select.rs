//! Which algorithm serves which request.
//!
//! All ranks must choose alike, so the choice depends only on what is equal on all of them: the collective,
//! the world, where the ranks are, what things cost there, and sizes, where every rank knows them all. (In
//! gather, scatter and all_to_all with a count per rank or pair, a rank may know only its own; there the
//! algorithm is fixed.)
//!
//! It is the one that [`predict`](super::cost::predict) finds cheapest at the group's [`Costs`], which are measured on
//! rank 0 and the same everywhere. Of algorithms that are equally good the first in [`Algorithm::ALL`] is taken.
//!
//! Algorithms that [need shared memory](Algorithm::needs_shared_memory) run only where all ranks agree that they have
//! it, which no rank knows alone. So a [`Choice`] names those that are cheaper than messages, and what is done with
//! messages where the ranks do not agree.

use super::build::is_well_formed;
use super::cost::{Costs, least, predict, predict_private};
use super::topology::Topology;
use super::{Algorithm, Counts, Shape, applicable_on, shared};
use crate::types::Collective;

/// How much more an all_reduce in windows may cost than by messages where each rank has a core. Prices are those of cores that
/// share a cache. Where they share none, messages take three times as long, and windows, which find out and go round the
/// caches, do not.
const FOR_DISTANT_CORES: f64 = 1.25;

/// The algorithms for one request; the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    /// The cheapest of those that send messages and need nothing else. Always applicable.
    pub messages: Algorithm,
    /// Whether [`Algorithm::InPlace`] serves it for less.
    pub in_place: bool,
    /// Whether [`Algorithm::Windows`] serves it for less.
    pub windows: bool,
}

impl Choice {
    /// Messages, by `algorithm`.
    #[inline]
    pub const fn messages(algorithm: Algorithm) -> Self {
        Self {
            messages: algorithm,
            in_place: false,
            windows: false,
        }
    }

    /// Whether the ranks must agree before it is known what they do.
    #[inline]
    pub const fn needs_agreement(self) -> bool {
        self.in_place || self.windows
    }
}

/// The algorithms for `shape`, whose elements are `element_size` bytes long.
///
/// `wanted` is an algorithm that the user asks for: it is taken, at any price, wherever it serves the request, and
/// where it sends messages nothing is done in shared memory without them.
pub fn choose(
    shape: &Shape,
    element_size: usize,
    topology: &Topology,
    costs: &Costs,
    wanted: Option<Algorithm>,
) -> Choice {
    let messages = select(shape, element_size, topology, costs);
    let can = |algorithm| shared::serves(algorithm, shape, element_size, topology);
    match wanted {
        Some(Algorithm::InPlace) => Choice {
            in_place: can(Algorithm::InPlace),
            ..Choice::messages(messages)
        },
        Some(Algorithm::Windows) => Choice {
            windows: can(Algorithm::Windows),
            ..Choice::messages(messages)
        },
        Some(wanted) if applicable_on(wanted, shape, topology) => Choice::messages(wanted),
        Some(_) => Choice::messages(messages),
        None => {
            let price = |algorithm| predict(algorithm, shape, element_size, topology, costs);
            // Where windows are an alternative, the buffers lie where no peer reaches them.
            let private = || {
                let price = predict_private(messages, shape, element_size, topology, costs);
                let has_a_core = shape.world <= topology.cores_per_host;
                match has_a_core && shape.collective == Collective::AllReduce {
                    true => price * FOR_DISTANT_CORES,
                    false => price,
                }
            };
            Choice {
                messages,
                in_place: can(Algorithm::InPlace) && price(Algorithm::InPlace) < price(messages),
                windows: can(Algorithm::Windows) && price(Algorithm::Windows) < private(),
            }
        }
    }
}

/// `choice` where a reduction is to fold in rank order: by an algorithm of messages that does. In shared memory all do, and all
/// algorithms of prefixes.
pub fn in_rank_order(
    choice: Choice,
    shape: &Shape,
    element_size: usize,
    topology: &Topology,
    costs: &Costs,
) -> Choice {
    if shape.collective.is_prefix() {
        return choice;
    }
    let candidates = [Algorithm::Direct, Algorithm::TwoShot]
        .into_iter()
        .filter(|algorithm| applicable_on(*algorithm, shape, topology));
    let messages = least(candidates, shape, element_size, topology, costs);
    Choice {
        messages: messages.unwrap_or(Algorithm::Direct),
        ..choice
    }
}

/// The algorithm of messages for `shape`, whose elements are `element_size` bytes long. Always applicable, and equal on
/// all ranks.
pub fn select(shape: &Shape, element_size: usize, topology: &Topology, costs: &Costs) -> Algorithm {
    match (shape.collective, shape.counts) {
        (_, Counts::Even(_))
        | (Collective::AllGather | Collective::ReduceScatter, Counts::PerRank(_)) => {}
        // Each rank knows its own counts only.
        _ => return Algorithm::Direct,
    }
    if shape.collective == Collective::Barrier {
        // Through a root, the other way, ranks would wait for the root while it waits for the missing rank, and name it.
        return match applicable_on(Algorithm::Hierarchical, shape, topology) {
            true => Algorithm::Hierarchical,
            false => Algorithm::Bruck,
        };
    }
    if !is_well_formed(shape) {
        return Algorithm::Direct;
    }
    let candidates = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| applicable_on(*algorithm, shape, topology));
    least(candidates, shape, element_size, topology, costs).unwrap_or(Algorithm::Direct)
}

/// The algorithms that serve `shape`, each with the seconds that it should take, the cheapest first: for reports.
pub fn prices(
    shape: &Shape,
    element_size: usize,
    topology: &Topology,
    costs: &Costs,
) -> Vec<(Algorithm, f64)> {
    let can = |algorithm: &Algorithm| {
        applicable_on(*algorithm, shape, topology)
            || shared::serves(*algorithm, shape, element_size, topology)
    };
    let price = |algorithm| {
        let seconds = predict(algorithm, shape, element_size, topology, costs);
        (algorithm, seconds)
    };
    let mut prices: Vec<_> = Algorithm::ALL.into_iter().filter(can).map(price).collect();
    prices.sort_by(|(_, a), (_, b)| a.total_cmp(b));
    prices
}
