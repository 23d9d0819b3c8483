//! The process at the other end of a link, named so that no other can take its place.
//!
//! The number of a process is given to another when it has ended; a pidfd stands for the one process for ever, and tells its
//! end at once. Neither tells when a process executes another program: see `mark` for what does.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

use crate::fork::PerProcess;
use crate::locks::Mutex;

/// A process that can be named.
#[derive(Debug)]
pub(super) struct Process {
    number: i32,
    /// `None`: this process itself.
    pidfd: Option<OwnedFd>,
    /// Its memory has been read: the system lets this process do that.
    has_been_read: AtomicBool,
}

/// The processes that links lead to: several links to one share a descriptor.
static KNOWN: PerProcess<Mutex<Vec<Weak<Process>>>> = PerProcess::new(Mutex::default);

impl Process {
    /// The process at the other end of `control`. `None` when it has no number here (another PID namespace), when it has
    /// ended already, and where the system opens no pidfds (before Linux 5.3, or refused by a container): its memory is then
    /// not read by number.
    pub(super) fn behind(control: &UnixStream) -> Option<Arc<Self>> {
        let number = peer_number(control)?;
        let mut known = KNOWN.lock();
        known.retain(|process| process.strong_count() > 0);
        let mut all = known.iter().filter_map(Weak::upgrade);
        // One that has ended may have left its number to this one.
        let found = all.find(|process| process.number == number && !process.has_ended());
        if found.is_some() {
            return found;
        }
        let process = Arc::new(Self::open(number)?);
        known.push(Arc::downgrade(&process));
        Some(process)
    }

    fn open(number: i32) -> Option<Self> {
        let pid = Pid::from_raw(number)?;
        let pidfd = match pid == getpid() {
            true => None,
            false => Some(pidfd_open(pid, PidfdFlags::empty()).ok()?),
        };
        Some(Self {
            number,
            pidfd,
            has_been_read: AtomicBool::new(false),
        })
    }

    pub(super) fn note_reading(&self) {
        self.has_been_read.store(true, Ordering::Relaxed);
    }

    /// Whether its memory has been read before.
    pub(super) fn has_been_read(&self) -> bool {
        self.has_been_read.load(Ordering::Relaxed)
    }

    /// Its number, as long as it has not ended.
    pub(super) fn number(&self) -> i32 {
        self.number
    }

    /// Its descriptor, which becomes readable when it ends. `None` for this process itself.
    pub(super) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(AsFd::as_fd)
    }

    /// Whether it has ended: all of its threads, whether or not its parent has asked for its exit code.
    pub(super) fn has_ended(&self) -> bool {
        let Some(pidfd) = &self.pidfd else {
            return false;
        };
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
        // It fails only for want of the kernel's memory, and then the next look tells.
        matches!(poll(&mut fds, Some(&now)), Ok(1..))
    }

    /// Whether a signal or a debugger has stopped it, as far as the system says.
    pub(super) fn is_stopped(&self) -> bool {
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{}/stat", self.number)) else {
            return false;
        };
        // After the name, which may contain anything.
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest);
        self.pidfd.is_some() && state.is_some_and(|state| state.starts_with(['T', 't']))
    }
}

/// The number of the process at the other end of `control`, if it has one here: one in another PID namespace has none.
fn peer_number(control: &UnixStream) -> Option<i32> {
    let number = credentials(control).ok()?.pid;
    (number > 0).then_some(number)
}

/// The credentials of the process at the other end, as of the call of connect or listen.
///
/// # Errors
/// Those of `getsockopt`.
pub(crate) fn credentials(socket: &UnixStream) -> std::io::Result<libc::ucred> {
    // `rustix` has no value for a process without a number.
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to a structure of that size, whose fields are plain numbers.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &mut length,
        )
    };
    match result {
        0 => Ok(peer),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rustix::process::{Signal, kill_process};

    use super::*;

    #[test]
    fn a_process_that_has_ended_is_known_by_its_pidfd_before_it_is_waited_for() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::open(child.id() as i32).unwrap();
        assert!(process.pidfd().is_some() && !process.has_ended());
        drop(child.stdin.take());
        while !process.has_ended() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(process.has_ended());
        // No process has the number, or another one has.
        assert!(Process::open(child.id() as i32).is_none_or(|other| !other.has_ended()));
    }

    #[test]
    fn a_stopped_process_is_known() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::open(child.id() as i32).unwrap();
        let pid = Pid::from_child(&child);
        for (signal, stopped) in [(Signal::STOP, true), (Signal::CONT, false)] {
            kill_process(pid, signal).unwrap();
            while process.is_stopped() != stopped {
                std::thread::yield_now();
            }
            assert!(!process.has_ended());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_stopped());
    }

    #[test]
    fn links_to_one_process_share_its_descriptor() {
        let (a, b) = UnixStream::pair().unwrap();
        let (one, two) = (Process::behind(&a).unwrap(), Process::behind(&b).unwrap());
        assert!(Arc::ptr_eq(&one, &two));
        // This process needs none to know that it lives.
        assert_eq!(one.number(), std::process::id() as i32);
        assert!(one.pidfd().is_none() && !one.has_ended());
    }
}
