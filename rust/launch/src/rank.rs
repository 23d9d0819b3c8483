//! One rank: its process, and how it ended.

use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};

use crate::signals::{is_for_group, name};

/// A rank that was started. Its process leads a group of its own, and is not reaped as long as the launcher may signal it:
/// until then no other process can get its number or that of its group. The keeper reaps them last.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) number: u16,
    pub(crate) pid: Pid,
    /// When it was started last, since the job was.
    pub(crate) since: Duration,
    /// How often it was started again, since it last ran for long.
    pub(crate) restarts: u16,
    /// When it is to be started again.
    pub(crate) again_at: Option<Instant>,
    pub(crate) ended: Option<Ended>,
}

/// That a rank has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) how: Ending,
    /// Since the job was started.
    pub(crate) after: Duration,
    pub(crate) why: Why,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Code(u8),
    Signal { signal: i32, dumped: bool },
}

/// The cause of a rank's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Why {
    /// It ended by itself.
    Itself,
    /// The launcher had sent SIGTERM.
    Asked,
    /// The launcher had sent SIGKILL.
    Killed,
}

impl Rank {
    /// Whether it has just ended, for which `why` would be the reason.
    pub(crate) fn look(&mut self, start: Instant, why: Why) -> bool {
        if self.ended.is_some() {
            return false;
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let Ok(Some(status)) = waitid(WaitId::Pid(self.pid), options) else {
            return false;
        };
        let how = match (status.exit_status(), status.terminating_signal()) {
            (_, Some(signal)) => Ending::Signal {
                signal,
                dumped: status.dumped(),
            },
            // Exit statuses have eight bits.
            (code, None) => {
                Ending::Code(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
            }
        };
        self.ended = Some(Ended {
            how,
            after: start.elapsed(),
            why,
        });
        true
    }

    /// Passes `signal` on, to all processes of the rank where that is meant.
    pub(crate) fn signal(&self, signal: i32) {
        let Some(named) = Signal::from_named_raw(signal) else {
            return;
        };
        if is_for_group(signal) {
            self.signal_group(named);
        } else if self.ended.is_none() {
            // It may have ended this moment; the number is still its own.
            let _ = kill_process(self.pid, named);
        }
    }

    /// Sends `signal` to all processes of the rank that stayed in its group.
    pub(crate) fn signal_group(&self, signal: Signal) {
        // An error says that all have ended.
        let _ = kill_process_group(self.pid, signal);
    }
}

impl Ending {
    pub(crate) const fn is_failure(self) -> bool {
        !matches!(self, Self::Code(0))
    }

    /// The status by which a shell would tell of it.
    pub(crate) fn status(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal { signal, .. } => status_of_signal(signal),
        }
    }
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal { signal, dumped } => {
                let dumped = if *dumped { ", core dumped" } else { "" };
                write!(f, "killed by {}{dumped}", name(*signal))
            }
        }
    }
}

/// 128 and the signal's number.
pub(crate) fn status_of_signal(signal: i32) -> u8 {
    u8::try_from(signal).unwrap_or(0).saturating_add(128)
}
