//! `unisono launch -n 4 ./program`: starts the ranks of a program, on this host or several, and sees them to their end.
//!
//! One command line, two doors: the binary `unisono` (`main.rs`) and `python -m unisono launch`. The promises:
//!
//! - Every rank gets the variables by which `unisono`, torch and others find their peers (`environment.rs`), with a
//!   port that is held free for it.
//! - Lines of output carry the number of their rank and are never torn (`output.rs`).
//! - When a rank fails, the others are ended, and what failed first is said (`report.rs`).
//! - Nothing that a rank started outlives the job or the launcher, unless both of its processes are killed at once.
//! - The resources that the ranks have used, as `time` and `wait4` tell them, are counted for the launcher.
//!
//! For the last two promises three processes stand between the shell and a program, all of this one executable. The
//! **front** (`front.rs`) is what the user started: it passes signals and a terminal's input on. Its child, the
//! **keeper** (`keeper.rs`), is the parent of the ranks, and the reaper of whatever their descendants leave
//! behind. When the front is killed, the kernel tells the keeper, which kills everything below it; when the keeper is
//! killed, the front inherits what was below it and kills that. Whoever is last reaps the ranks (`processes.rs`). Should both
//! be killed at once, each rank dies by the signal that its **starter** (`starter.rs`) asked for before it became the
//! program; what the rank had started is then nobody's, and stays.
//!
//! With `--hosts` the user's process (`hosts.rs`) starts an `ssh` for each host instead (`reach.rs`), which runs a launcher
//! there (`part.rs`) that is the front of that host's ranks.
#![forbid(unsafe_code)]

mod environment;
mod front;
mod hosts;
mod keeper;
mod options;
mod order;
mod output;
mod part;
mod processes;
mod program;
mod rank;
mod reach;
mod report;
mod role;
mod screen;
mod signals;
mod starter;

use std::ffi::OsString;

pub use options::command;
pub use role::Door;
use role::Role;

/// Launches what `arguments` ask for (those after `unisono launch`), and returns the status to exit with: that of the
/// rank that failed first, 128 and the signal's number when a signal ended it, 2 for wrong arguments, 126 or 127 for a
/// program that cannot be started.
///
/// Takes over the handling of signals, and makes this process the reaper of its orphaned descendants. To be called
/// from the main thread of a process that does nothing else.
pub fn launch(arguments: &[OsString], door: &Door) -> u8 {
    match Role::of(arguments) {
        Role::Front => front::run(arguments, door),
        Role::Keeper(front, arguments) => keeper::run(arguments, door, front),
        Role::Starter(keeper, program) => starter::run(program, keeper),
        Role::Part => part::run(door),
    }
}
