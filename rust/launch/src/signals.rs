//! Signals as events: which are passed on, to which processes, and what they are called.

use std::borrow::Cow;
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Instant;

use rustix::process::{Pid, Signal, getpid, kill_process};
use signal_hook::consts::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2,
    SIGWINCH,
};
use signal_hook::iterator::{Handle, Signals};

/// The signals that the launcher passes on to the ranks.
const PASSED_ON: [i32; 9] = [
    SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGTSTP, SIGCONT,
];

/// The events that the launcher waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Signal(i32),
    /// All that the ranks printed has been written.
    Printed,
    /// The launcher of the host with this number has its order; the ranks meet at this port of the first.
    Ready {
        host: u16,
        port: u16,
    },
    /// The command that reached that host has closed its output and was no launcher, or one that failed to start.
    Mute {
        host: u16,
    },
}

/// The signals that come to this process, one after the other, and the end of the output. Until it is dropped, signals
/// do nothing else to the process.
pub(crate) struct Caught {
    events: Receiver<Event>,
    sender: Sender<Event>,
    handle: Handle,
}

impl Caught {
    /// Catches what is to be passed on, and the end of children. Signals that this process ignored from its start
    /// (`nohup`, a job in the background of a script) stay ignored, here and in the ranks.
    pub(crate) fn new() -> io::Result<Self> {
        let ignored = ignored();
        let wanted = PASSED_ON
            .iter()
            .filter(|&&signal| ignored & (1 << (signal - 1)) == 0);
        let mut signals = Signals::new(wanted.chain(&[SIGCHLD]))?;
        let handle = signals.handle();
        let (sender, events) = mpsc::channel();
        let to_us = sender.clone();
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                for signal in signals.forever() {
                    if to_us.send(Event::Signal(signal)).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self {
            events,
            sender,
            handle,
        })
    }

    /// Where other events come from.
    pub(crate) fn sender(&self) -> Sender<Event> {
        self.sender.clone()
    }

    /// The next event, or None at `deadline`.
    pub(crate) fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        let Some(deadline) = deadline else {
            return self.events.recv().ok();
        };
        let left = deadline.saturating_duration_since(Instant::now());
        self.events.recv_timeout(left).ok()
    }
}

impl Drop for Caught {
    fn drop(&mut self) {
        self.handle.close();
    }
}

/// From now on a write to a pipe without a reader fails with an error and does not end this process, even if the process
/// inherited the default action of SIGPIPE.
pub(crate) fn survive_closed_pipes() -> io::Result<()> {
    // Not ignored, which its children would inherit.
    signal_hook::flag::register(SIGPIPE, Arc::default()).map(drop)
}

/// The signals that this process ignores: bit n - 1 for signal n.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// Whether `signal` asks a program to end.
pub(crate) const fn is_ending(signal: i32) -> bool {
    matches!(signal, SIGHUP | SIGINT | SIGQUIT | SIGTERM)
}

/// Whether `signal` is for all processes of a rank, as it would be from a terminal: SIGUSR1 would end helper processes
/// that do not expect it.
pub(crate) const fn is_for_group(signal: i32) -> bool {
    !matches!(signal, SIGUSR1 | SIGUSR2)
}

/// `SIGTERM` for 15.
pub(crate) fn name(signal: i32) -> Cow<'static, str> {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => name.into(),
        None => format!("signal {signal}").into(),
    }
}

/// Sends `signal` to `process`, if it is there still.
pub(crate) fn send(process: Pid, signal: i32) {
    if let Some(signal) = Signal::from_named_raw(signal) {
        let _ = kill_process(process, signal);
    }
}

/// Stops this process, as Ctrl-Z at the terminal stops a program, until SIGCONT.
pub(crate) fn stop_self() {
    let _ = kill_process(getpid(), Signal::STOP);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(name(15), "SIGTERM");
        assert_eq!(name(11), "SIGSEGV");
        assert_eq!(name(50), "signal 50");
    }

    #[test]
    fn signals_arrive_in_order() {
        let caught = Caught::new().expect("handlers");
        for signal in [SIGUSR1, SIGUSR2, SIGWINCH] {
            send(getpid(), signal);
            loop {
                // Other tests have children.
                match caught.next(None) {
                    Some(Event::Signal(SIGCHLD)) => {}
                    other => break assert_eq!(other, Some(Event::Signal(signal))),
                }
            }
        }
    }
}
