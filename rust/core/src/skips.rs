//! Tests that cannot run here say so where it is seen.

use std::fmt::Display;
use std::io::Write;
use std::thread;

/// Says that the test, or a part of it, does not run on this system, and why. The macros that print are captured by the test
/// harness and shown of failed tests alone; what is written to the stream itself is shown always.
pub(crate) fn skipped(why: impl Display) {
    let thread = thread::current();
    let test = thread.name().unwrap_or("a test");
    // Without standard error it cannot be said.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}
