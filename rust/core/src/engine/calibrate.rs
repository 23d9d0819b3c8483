//! The costs of this machine, measured once per process when its first group forms.
//!
//! The measurements are few and short, about a millisecond together. The fastest of several tries counts, since a
//! disturbance makes a measurement longer. Where there was time for fewer tries, a typical cost stands. The costs serve to
//! choose between algorithms and nothing else, so [`Rounded`](crate::plan::cost::Rounded) rounds them, and brings costs that
//! no machine has into range.

use std::hint::black_box;
use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::fork::PerProcess;
use crate::plan::cost::Costs;
use crate::reduce::{Kernel, copy, last_level_cache};
use crate::types::{DataType, ReduceOp};

/// No measurement begins later than this after the first one.
const LIMIT: Duration = Duration::from_millis(1);

/// Bytes that are copied and added up: more than the nearest caches hold, like the messages for which this matters.
const BYTES: usize = 1 << 20;

/// Copies and sums at most.
const MOST_TRIES: usize = 4;

/// Copies and sums at least: the first finds neither the caches nor the page tables filled.
const FEWEST_TRIES: usize = 3;

/// Yields at most.
const MOST_YIELDS: usize = 64;

/// A switch to another process that finds nothing to do takes this many times as long as a yield with no other process
/// to run.
const TURN_PER_YIELD: f64 = 3.0;

/// A byte that another core has just written takes this many times as long to read as one in this core's cache.
const FROM_ANOTHER_CORE: f64 = 2.0;

/// The costs on this machine.
pub(crate) fn costs() -> Costs {
    // One thread measures, and others wait for it.
    static COSTS: PerProcess<OnceLock<Costs>> = PerProcess::new(OnceLock::new);
    *COSTS.get_or_init(|| {
        let costs = measure(LIMIT);
        tracing::debug!(?costs, "measured this machine");
        costs
    })
}

/// Measures for about `limit` and takes typical costs for what there is no time for.
fn measure(limit: Duration) -> Costs {
    let mut costs = Costs {
        cache: last_level_cache() as f64,
        ..Costs::TYPICAL
    };
    // Written, so that no page of them is the kernel's page of zeros.
    let source = vec![1_u8; BYTES / 2];
    let mut target = vec![2_u8; BYTES / 2];
    // After the pages are there: the kernel may take as long to provide them as all that follows.
    let begun = Instant::now();
    let in_time = || begun.elapsed() < limit;
    let mut per_byte = |action: &mut dyn FnMut(&mut [u8], &[u8])| {
        fastest(FEWEST_TRIES..=MOST_TRIES, &in_time, || {
            let start = Instant::now();
            action(black_box(&mut target), black_box(&source));
            start.elapsed().as_secs_f64() / source.len() as f64
        })
    };
    if let Ok(kernel) = Kernel::new(ReduceOp::Sum, DataType::Float32)
        && let Some(copied) = per_byte(&mut |target, source| copy(target, source))
        && let Some(folded) = per_byte(&mut |target, source| kernel.fold(target, source))
    {
        // A sum reads and writes what a copy does, and reads more.
        costs.copy = copied.min(folded) * FROM_ANOTHER_CORE;
        costs.fold = folded * FROM_ANOTHER_CORE;
    }
    // Last and one by one: where other processes want the core, a yield takes a time slice of theirs, which says nothing
    // of a switch.
    let per_yield = fastest(1..=MOST_YIELDS, &in_time, || {
        let start = Instant::now();
        std::thread::yield_now();
        start.elapsed().as_secs_f64()
    });
    if let Some(turn) = per_yield.and_then(turn) {
        costs.turn = turn;
    }
    costs
}

/// Seconds that a switch takes where a yield takes `per_yield`; `None` above [`Costs::LONGEST_TURN`].
fn turn(per_yield: f64) -> Option<f64> {
    Some(per_yield * TURN_PER_YIELD).filter(|turn| *turn <= Costs::LONGEST_TURN)
}

/// The shortest of `tries` attempts, none of them begun late; `None` where there was time for too few.
fn fastest(
    tries: RangeInclusive<usize>,
    in_time: &impl Fn() -> bool,
    mut attempt: impl FnMut() -> f64,
) -> Option<f64> {
    let took: Vec<f64> = (0..*tries.end())
        .map_while(|_| in_time().then(&mut attempt))
        .collect();
    let least = took.iter().copied().min_by(f64::total_cmp)?;
    (took.len() >= *tries.start() && least > 0.0).then_some(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_is_a_machine() {
        for limit in [Duration::ZERO, Duration::from_micros(100), LIMIT] {
            let measured = measure(limit);
            for cost in [measured.turn, measured.copy, measured.fold] {
                assert!(cost.is_finite() && cost > 0.0, "{measured:?}");
            }
            if limit.is_zero() {
                let cache = measured.cache;
                assert_eq!(
                    measured,
                    Costs {
                        cache,
                        ..Costs::TYPICAL
                    }
                );
            }
        }
        assert_eq!(costs(), costs(), "measured once");
    }

    /// Where another process holds the core, the only yield that there is time for may take milliseconds.
    #[test]
    fn a_time_slice_is_no_switch() {
        assert_eq!(turn(0.5e-6), Some(1.5e-6));
        assert_eq!(turn(4e-3), None);
    }

    #[test]
    fn no_measurement_begins_late() {
        let asked = std::cell::Cell::new(0);
        let in_time = || {
            asked.set(asked.get() + 1);
            asked.get() <= 2
        };
        let mut tries = [3.0, 2.0, 1.0].into_iter();
        let least = fastest(1..=4, &in_time, || tries.next().expect("no third"));
        assert_eq!(least, Some(2.0));
        assert_eq!(fastest(1..=4, &|| false, || 1.0), None);
    }

    /// The only copy on a busy machine once took nine times its time, and large messages went by the wrong algorithm.
    #[test]
    fn a_few_tries_do_not_count() {
        let left = std::cell::Cell::new(2);
        let in_time = || left.replace(left.get() - 1) > 0;
        assert_eq!(fastest(3..=4, &in_time, || 1.0), None);
        left.set(3);
        assert_eq!(fastest(3..=4, &in_time, || 1.0), Some(1.0));
    }
}
