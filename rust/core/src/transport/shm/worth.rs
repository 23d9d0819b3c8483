//! Whether to have private memory read by the peer, or to copy it through the ring.
//!
//! The ring costs two copies, of which each side does one while the other does the other. Reading costs one, but the
//! kernel looks every page up. On most machines that is less than a copy of the page; in some virtual machines and
//! sandboxes it is several times as much. So it is measured, once per process, when it is first of interest: under a
//! millisecond.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::loans::read_process;
use crate::reduce;

/// Reading may take so many times as long as copying in the cache, where both sides of the ring have nothing better to
/// do. Between the two copies that it saves and the one that the peer would have done meanwhile.
pub(super) const WORTH: f64 = 1.5;

/// As many for a long message by itself. Between two ranks of one virtual machine the ring took anything from one to four
/// times its best for 1 MiB, from minute to minute, and reading hardly varied (`collectives --ranks 2 --collectives
/// send_recv --sizes 1M`, under `UNISONO_LEND_BYTES=none` and `64K`); reading was there six to seven copies in the cache.
/// With more ranks than cores the ring also goes from full to empty by way of the scheduler, many times a message.
pub(super) const WORTH_ALONE: f64 = 12.0;

/// Bytes read and copied: enough for the call itself not to matter, few enough for the cache.
const BYTES: usize = 128 << 10;

const ROUNDS: usize = 5;

/// How many times as long as a copy in the cache it takes to read a peer's memory on this machine; infinity where that
/// is not allowed.
pub(super) fn reading_to_copying() -> f64 {
    static ANSWER: OnceLock<f64> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let (source, mut target) = (vec![1_u8; BYTES], vec![2_u8; BYTES]);
        let process = std::process::id().cast_signed();
        let mut copying = Duration::MAX;
        let mut reading = Duration::MAX;
        for _ in 0..ROUNDS {
            let started = Instant::now();
            reduce::copy(&mut target, &source);
            copying = copying.min(started.elapsed());
            let started = Instant::now();
            let address = source.as_ptr().expose_provenance() as u64;
            if read_process(process, address, &mut target).is_err() {
                // What cannot read itself will not be able to read others, and is not to be read itself.
                tracing::info!(
                    "process_vm_readv is not allowed here: large messages go through rings"
                );
                return f64::INFINITY;
            }
            reading = reading.min(started.elapsed());
        }
        let ratio = reading.as_secs_f64() / copying.as_secs_f64().max(1e-9);
        tracing::info!(ratio, "reading memory of another process, to a copy");
        ratio
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_comes_soon_and_stays() {
        let first = reading_to_copying();
        assert!(first > 0.0);
        assert_eq!(first.to_bits(), reading_to_copying().to_bits());
    }
}
