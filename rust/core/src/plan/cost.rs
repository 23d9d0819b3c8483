//! How long an algorithm should take, in closed form: what [`super::select`] compares.
//!
//! [`predict`] adds up, for one call:
//!
//! - the dependent rounds, each at the latency of the slowest link it uses. Where ranks share cores, a round takes
//!   until the core has gone around all of them ([`Costs::turn`]);
//! - the work of the cores: messages, bytes moved and bytes reduced. It takes as long as the busiest rank needs, and
//!   no less than a host's cores need for all of its ranks;
//! - the bytes through the busiest network interface of a host.
//!
//! Bytes inside a host cost what the links make of them: a message that fits into a post is as cheap as an empty one, a
//! longer one is copied into a ring and out of it, a long one is read by its receiver out of the sender's memory.
//!
//! All ranks must come to the same numbers. So nothing here depends on what only one rank knows (its rank, its counts,
//! whether it works in place), the costs are rank 0's on all ranks, and the arithmetic is addition, multiplication and
//! division of doubles in one fixed order, which every machine rounds alike; powers and logarithms are of integers.

mod bill;
mod formulas;
mod shared;
#[cfg(test)]
mod tests;

use self::bill::{Bill, Layout, Private};
use self::formulas::{Work, add_up};
use super::topology::Topology;
use super::{Algorithm, Counts, Shape};
use crate::types::Collective;

/// What a machine takes for the things that collectives consist of, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Of each side's time for a message inside a host.
    pub message: f64,
    /// From the end of sending until the other core sees it.
    pub latency: f64,
    /// For a core to go from one of the ranks that share it to the next.
    pub turn: f64,
    /// For a byte that is copied.
    pub copy: f64,
    /// For a byte of the accumulation type that is added to another.
    pub fold: f64,
    /// Of both sides' time for a message that is read out of the sender's memory, beside its bytes.
    pub loan: f64,
    /// Of each side's time for a message between hosts.
    pub remote_message: f64,
    /// From host to host.
    pub remote_latency: f64,
    /// For a byte through a host's network interface.
    pub remote_byte: f64,
    /// Bytes of the last cache of a host: no time, but beyond it memory sets the pace.
    pub cache: f64,
}

/// Steps by which costs are rounded, so that a machine measured twice makes the same choices: 2^(1/4) each.
const STEPS_PER_DOUBLING: u8 = 4;

/// 2^(i/4), as constants because `powf` is not the same everywhere.
const STEPS: [f64; STEPS_PER_DOUBLING as usize] = [
    1.0,
    1.189_207_115_002_721,
    std::f64::consts::SQRT_2,
    1.681_792_830_507_429,
];

/// A cost that is measured: what it is in units of, where it starts, and how many steps it may go.
struct Scale {
    least: f64,
    steps: u8,
}

impl Scale {
    fn value(&self, step: u8) -> f64 {
        let doublings = step / STEPS_PER_DOUBLING;
        let rest = usize::from(step % STEPS_PER_DOUBLING);
        self.least * STEPS[rest] * f64::from(1_u32 << doublings)
    }

    /// The step that is nearest to `value` in ratio; the ends of the scale for what is beyond them, and the lower one
    /// for what is no number.
    fn step(&self, value: f64) -> u8 {
        (0..self.steps)
            .find(|step| value * value < self.value(*step) * self.value(*step + 1))
            .unwrap_or(if value.is_nan() { 0 } else { self.steps })
    }
}

/// From 0.2 to 12.8 us.
const TURN: Scale = Scale {
    least: 0.2e-6,
    steps: 24,
};
/// From 64 GB/s to 0.5 GB/s.
const COPY: Scale = Scale {
    least: 1.0 / 64e9,
    steps: 28,
};
/// From 64 GB/s to 0.5 GB/s.
const FOLD: Scale = COPY;
/// From 1 MiB to 1 GiB.
const CACHE: Scale = Scale {
    least: 1_048_576.0,
    steps: 40,
};

/// Costs as ranks tell them to each other: steps on the scales of what is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounded {
    turn: u8,
    copy: u8,
    fold: u8,
    cache: u8,
    /// Cores of a host, as far as they matter.
    cores: u16,
}

impl Rounded {
    /// The length of [`Self::to_bytes`].
    pub const LENGTH: usize = 6;

    /// The measured parts of `costs` and the cores of a host. What is out of any machine's range is brought into it.
    pub fn new(costs: &Costs, cores: usize) -> Self {
        Self {
            turn: TURN.step(costs.turn),
            copy: COPY.step(costs.copy),
            fold: FOLD.step(costs.fold),
            cache: CACHE.step(costs.cache),
            cores: u16::try_from(cores).unwrap_or(u16::MAX).max(1),
        }
    }

    /// As bytes, for others.
    pub fn to_bytes(self) -> [u8; Self::LENGTH] {
        let [low, high] = self.cores.to_le_bytes();
        [self.turn, self.copy, self.fold, self.cache, low, high]
    }

    /// From another's bytes; `None` when they are none that [`Self::to_bytes`] makes.
    pub fn from_bytes([turn, copy, fold, cache, low, high]: [u8; Self::LENGTH]) -> Option<Self> {
        let cores = u16::from_le_bytes([low, high]);
        let within = turn <= TURN.steps
            && copy <= COPY.steps
            && fold <= FOLD.steps
            && cache <= CACHE.steps
            && cores > 0;
        within.then_some(Self {
            turn,
            copy,
            fold,
            cache,
            cores,
        })
    }

    /// The costs; what is not measured is as on any machine.
    pub fn costs(self) -> Costs {
        Costs {
            turn: TURN.value(self.turn),
            copy: COPY.value(self.copy),
            fold: FOLD.value(self.fold),
            cache: CACHE.value(self.cache),
            ..Costs::TYPICAL
        }
    }

    /// Cores that the ranks of a host share.
    pub fn cores(self) -> usize {
        usize::from(self.cores)
    }
}

impl Costs {
    /// Those of a machine of these days, with 10 Gbit/s between hosts.
    pub const TYPICAL: Self = Self {
        message: 0.12e-6,
        latency: 0.25e-6,
        turn: 1.5e-6,
        copy: 1.0 / 11e9,
        fold: 1.0 / 9e9,
        loan: 1.5e-6,
        remote_message: 3e-6,
        remote_latency: 20e-6,
        remote_byte: 1.0 / 1.2e9,
        cache: 33_554_432.0,
    };

    /// As others get to know them: see [`Rounded`].
    #[must_use]
    pub fn rounded(&self, cores: usize) -> Rounded {
        Rounded::new(self, cores)
    }
}

impl Default for Costs {
    fn default() -> Self {
        Self::TYPICAL
    }
}

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
    let layout = Layout::of(topology, shape.world);
    predict_in(algorithm, shape, element_size, layout, costs)
}

/// [`predict`] where no peer reaches the caller's buffers: what is read out of them goes through the kernel.
pub fn predict_private(
    algorithm: Algorithm,
    shape: &Shape,
    element_size: usize,
    topology: &Topology,
    costs: &Costs,
) -> f64 {
    let layout = Layout::of(topology, shape.world);
    predict_where(algorithm, shape, element_size, layout, (costs, true))
}

/// The algorithm of `candidates` that takes least, the first of equals.
pub(super) fn least(
    candidates: impl Iterator<Item = Algorithm>,
    shape: &Shape,
    element_size: usize,
    topology: &Topology,
    costs: &Costs,
) -> Option<Algorithm> {
    let layout = Layout::of(topology, shape.world);
    let mut best: Option<(f64, Algorithm)> = None;
    for algorithm in candidates {
        let seconds = predict_in(algorithm, shape, element_size, layout, costs);
        if best.is_none_or(|(least, _)| seconds < least) {
            best = Some((seconds, algorithm));
        }
    }
    best.map(|(_, algorithm)| algorithm)
}

fn predict_in(
    algorithm: Algorithm,
    shape: &Shape,
    element_size: usize,
    layout: Layout,
    costs: &Costs,
) -> f64 {
    predict_where(algorithm, shape, element_size, layout, (costs, false))
}

/// The same with the callers' buffers in memory that no peer reaches, if so.
fn predict_where(
    algorithm: Algorithm,
    shape: &Shape,
    element_size: usize,
    layout: Layout,
    (costs, is_private): (&Costs, bool),
) -> f64 {
    let elements = match shape.counts {
        Counts::Even(count) => count,
        // Everybody knows all of these.
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
        _ => return f64::INFINITY,
    };
    if shape.world < 2 {
        return 0.0;
    }
    let work = Work {
        world: shape.world,
        elements,
        bytes: elements as f64 * element_size as f64,
        widening: if shape.widen {
            // Halves and bytes are summed up in 4 bytes.
            4.0 / element_size.clamp(1, 4) as f64
        } else {
            1.0
        },
    };
    let mut bill = Bill::new(costs, layout);
    bill.private = is_private.then(|| Private {
        is_cold: work.longer_buffer(shape.collective) * shape.world as f64 >= costs.cache,
    });
    add_up(algorithm, shape.collective, &work, &mut bill);
    bill.seconds()
}
