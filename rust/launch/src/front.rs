//! The process that the user started: it starts the keeper, and passes signals and a terminal's input on to it.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, WaitId, WaitIdOptions, getpgrp, waitid};
use rustix::termios::tcgetpgrp;
use signal_hook::consts::{SIGCHLD, SIGTSTP};

use crate::options::Options;
use crate::rank::status_of_signal;
use crate::report::say;
use crate::role::{Door, KEEPER, again};
use crate::signals::{self, Caught, Event};
use crate::{hosts, processes, program};

/// How long to wait for input before looking again whether this process is in the foreground.
const LOOK_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};

/// Runs the job that `arguments` ask for, and returns the status to exit with.
pub(crate) fn run(arguments: &[OsString], door: &Door) -> u8 {
    let options = match Options::read(arguments) {
        Ok(options) => options,
        Err(status) => return status,
    };
    if let Some(note) = &door.note
        && program::is_for_python(&options)
    {
        say(note);
    }
    let status = match options.hosts.is_empty() {
        true => keep(arguments, door),
        false => hosts::run(&options, door),
    };
    status.unwrap_or_else(|error| {
        say(&format!("cannot start: {error}"));
        1
    })
}

fn keep(arguments: &[OsString], door: &Door) -> io::Result<u8> {
    let caught = Caught::new()?;
    // Where that cannot be, the keeper says so.
    let _ = processes::adopt_orphans();
    let mut command = again(door, KEEPER);
    command.args(arguments);
    let typed = if io::stdin().is_terminal() {
        let (reader, writer) = io::pipe()?;
        command.stdin(reader);
        Some(writer)
    } else {
        None
    };
    let keeper = spawn(&mut command)?;
    // The command would keep the reading end of the pipe.
    drop(command);
    if let Some(writer) = typed {
        thread::Builder::new()
            .name("input".to_owned())
            .spawn(move || pass_on_input(writer))?;
    }
    pass_on_signals(keeper, &caught)
}

/// Starts `command` out of the terminal's reach: what is typed there is passed on once.
pub(crate) fn spawn(command: &mut Command) -> io::Result<Child> {
    command.process_group(0).spawn()
}

/// Passes what is caught on to the keeper until that ends, and returns the status to exit with.
pub(crate) fn pass_on_signals(mut keeper: Child, caught: &Caught) -> io::Result<u8> {
    let pid = Pid::from_child(&keeper);
    let mut passed_on = Vec::new();
    loop {
        match caught.next(None) {
            Some(Event::Signal(SIGCHLD)) => {
                if let Some(status) = keeper.try_wait()? {
                    return Ok(conclude(status, &passed_on));
                }
            }
            Some(Event::Signal(signal)) => {
                passed_on.push(signal);
                signals::send(pid, signal);
                if signal == SIGTSTP {
                    // Not before the keeper has stopped. Otherwise it could stop after this process has been continued,
                    // and stay stopped.
                    let stopped = WaitIdOptions::STOPPED | WaitIdOptions::EXITED;
                    let _ = waitid(WaitId::Pid(pid), stopped | WaitIdOptions::NOWAIT);
                    signals::stop_self();
                }
            }
            Some(Event::Printed | Event::Ready { .. } | Event::Mute { .. }) | None => {}
        }
    }
}

/// The status to exit with, after that of the keeper.
fn conclude(keeper: ExitStatus, passed_on: &[i32]) -> u8 {
    use std::os::unix::process::ExitStatusExt;

    if let Some(code) = keeper.code() {
        return u8::try_from(code).unwrap_or(1);
    }
    // The processes that it kept are ours now.
    processes::end_all();
    let signal = keeper.signal().unwrap_or(0);
    // Else it was ended before it had begun.
    if !passed_on.contains(&signal) {
        let name = signals::name(signal);
        say(&format!(
            "the process that kept the ranks was killed by {name}, and all ranks with it"
        ));
    }
    status_of_signal(signal)
}

/// Copies what is typed while this process is in the foreground, until the end of the input.
fn pass_on_input(mut to: PipeWriter) {
    let terminal = io::stdin();
    let Ok(own) = terminal.as_fd().try_clone_to_owned() else {
        return;
    };
    let mut from = File::from(own);
    let mut bytes = [0; 4096];
    loop {
        // Reading in the background would stop the job.
        if tcgetpgrp(&from).ok() != Some(getpgrp()) {
            thread::sleep(Duration::from_millis(200));
            continue;
        }
        let mut polled = [PollFd::new(&from, PollFlags::IN)];
        if !matches!(poll(&mut polled, Some(&LOOK_INTERVAL)), Ok(1..)) {
            continue;
        }
        match from.read(&mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(count) if to.write_all(&bytes[..count]).is_err() => return,
            Ok(_) => {}
        }
    }
}
