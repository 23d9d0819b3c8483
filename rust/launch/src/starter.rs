//! The last step before a rank's program: a process that dies with the keeper, and becomes the program.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::report::say;

/// Becomes `program`, with its arguments. Returns only if it cannot, the status to exit with.
pub(crate) fn run(program: &[OsString], keeper: Pid) -> u8 {
    let Some((name, arguments)) = program.split_first() else {
        return 2;
    };
    // A setuid program is not to be killed by it, and Linux forgets the request; there is nothing else to be done.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    if getppid() != Some(keeper) {
        return 1;
    }
    let error = Command::new(name).args(arguments).exec();
    say(&format!("cannot start {}: {error}", name.display()));
    status(error.kind())
}

/// The status by which shells tell a program that is not there from one that cannot be run.
pub(crate) fn status(error: ErrorKind) -> u8 {
    if error == ErrorKind::NotFound {
        127
    } else {
        126
    }
}
