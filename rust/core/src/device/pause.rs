//! The pause of a thread that looks again and again.

use std::time::Duration;

/// Yields the core, and sleeps for a moment where yields have not helped.
pub(super) fn pause(looks: &mut u32) {
    *looks = looks.saturating_add(1);
    match *looks {
        0..=200 => std::thread::yield_now(),
        201..=400 => std::thread::sleep(Duration::from_micros(20)),
        _ => std::thread::sleep(Duration::from_micros(200)),
    }
}
