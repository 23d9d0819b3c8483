//! The early sign of a process's end.
//!
//! When a process is killed, the system closes its descriptors after the last of its threads has given up its memory. Where
//! there is much memory that takes tens of milliseconds, and a pidfd tells no sooner. So one thread of this process has a table
//! of descriptors of its own. The table has nothing but the write end of a pipe; the peers get the read end. When the process
//! is killed, executes another program or exits, this thread ends like all others, and its table with it, while others still
//! hold the memory. Where it is the last to end, all others have let go of the common table before it gives up the memory: then
//! the link's own socket is closed early. So one of the two tells at once.
//!
//! The threads of the process may still be on their last instructions. Whether it writes to memory no more is a question for
//! its pidfd (`process`). So a peer without one, in another PID namespace, is not told by this.
//!
//! All peers have the same pipe. None of them can make it hang up for the others; one that opens it anew to write can hide the
//! end, and then the pidfd tells.
//!
//! `close_range` can give a thread a table of its own from Linux 5.9 on. Where it cannot, the link's socket and the pidfd tell.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};

use rustix::pipe::{PipeFlags, fcntl_getpipe_size, pipe_with};

use crate::fork::{self, Own, PerProcess};
use crate::locks::Mutex;
use crate::threads;

/// Shows peers that this process lives, for as long as it is kept.
pub(in crate::transport) struct Life {
    /// The end for the peers.
    sign: OwnedFd,
    /// The thread ends when this goes.
    _stays: Own<SyncSender<()>>,
}

/// That of this process.
static OWN: PerProcess<Mutex<Weak<Life>>> = PerProcess::new(Mutex::default);

impl Life {
    /// That of this process. `None` where the system gives no thread a table of its own.
    pub(in crate::transport) fn of_this_process() -> Option<Arc<Self>> {
        let mut own = OWN.lock();
        if let Some(life) = own.upgrade() {
            return Some(life);
        }
        let life = Self::begin().inspect_err(|cause| {
            tracing::debug!(%cause, "peers learn the end of this process when its memory has gone");
        });
        let life = Arc::new(life.ok()?);
        *own = Arc::downgrade(&life);
        Some(life)
    }

    fn begin() -> std::io::Result<Self> {
        let mut kept = None;
        let sign = fork::make_private(|| {
            let (sign, other) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
            fork::keep_private(&other);
            kept = Some(other);
            Ok::<_, std::io::Error>(sign)
        })?;
        let kept = kept.ok_or(std::io::ErrorKind::OutOfMemory)?;
        let number = kept.as_raw_fd();
        let (stays, ended) = sync_channel(0);
        let (tell, told) = sync_channel(1);
        threads::spawn("unisono-life", move || hold(number, &tell, &ended))?;
        // It closes copies of all descriptors of this process, which takes long if a slow file system has data to write.
        let held = told.recv();
        // The thread has its own.
        drop(kept);
        held.map_err(std::io::Error::other)??;
        Ok(Self {
            sign,
            _stays: Own::new(stays),
        })
    }

    /// The end for the peers: it hangs up when this process ends.
    pub(in crate::transport) fn sign(&self) -> BorrowedFd<'_> {
        self.sign.as_fd()
    }
}

/// The life of both processes at the ends of a link, as far as they show it.
#[derive(Clone, Default)]
pub(in crate::transport) struct Lives {
    /// The peer counts on it for as long as there is a link.
    _own: Option<Arc<Life>>,
    peer: Option<Arc<OwnedFd>>,
}

impl Lives {
    /// That of this process, and the sign that the peer has sent, unless it is no pipe: another kind of descriptor may have its
    /// watchers wait.
    pub(in crate::transport) fn new(own: Option<Arc<Life>>, peer: Option<OwnedFd>) -> Self {
        let peer = peer.filter(|file| fcntl_getpipe_size(file).is_ok());
        Self {
            _own: own,
            peer: peer.map(Arc::new),
        }
    }

    /// The descriptor that hangs up when the peer's process ends, if it has one.
    pub(super) fn of_the_peer(&self) -> Option<BorrowedFd<'_>> {
        self.peer.as_ref().map(|sign| sign.as_fd())
    }
}

/// The thread: has the descriptor `number` for itself alone, says so, and keeps it until `ended` hangs up.
fn hold(number: i32, tell: &SyncSender<std::io::Result<()>>, ended: &Receiver<()>) {
    let result = unshare_all_but(number as u32);
    let is_held = result.is_ok();
    // SAFETY: the number is open in the table that this thread alone has now, and nothing else owns it there.
    let _own = is_held.then(|| unsafe { OwnedFd::from_raw_fd(number) });
    if tell.send(result).is_ok() && is_held {
        // Nothing is ever sent.
        let _ = ended.recv();
    }
}

/// Gives the calling thread a table of descriptors of its own in which there is `number` alone.
fn unshare_all_but(number: u32) -> std::io::Result<()> {
    let close = |first: u32, last: u32, flags: libc::c_uint| {
        // SAFETY: with the flag it makes a copy of the table for this thread, and closes in that; so it does without in a table
        // that is this thread's own already. Nothing that this thread runs has a descriptor from then on but `number`.
        match unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    close(number + 1, u32::MAX, libc::CLOSE_RANGE_UNSHARE)?;
    match number {
        0 => Ok(()),
        _ => close(0, number - 1, 0),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::skips::skipped;

    /// Whether it hangs up within `patience`.
    fn hangs_up(sign: BorrowedFd<'_>, patience: Duration) -> bool {
        let timeout = Timespec {
            tv_sec: patience.as_secs() as i64,
            tv_nsec: patience.subsec_nanos().into(),
        };
        let mut fds = [PollFd::from_borrowed_fd(sign, PollFlags::IN)];
        poll(&mut fds, Some(&timeout)).unwrap();
        fds[0].revents().contains(PollFlags::HUP)
    }

    #[test]
    fn it_shows_that_the_process_lives_for_as_long_as_it_is_kept() {
        let Some(life) = Life::of_this_process() else {
            return skipped("no thread has a table of descriptors of its own here");
        };
        let sign = life.sign().try_clone_to_owned().unwrap();
        let again = Life::of_this_process().unwrap();
        assert!(Arc::ptr_eq(&life, &again));
        drop(life);
        assert!(!hangs_up(sign.as_fd(), Duration::from_millis(50)));
        drop(again);
        // Another test of this process may keep it.
        let is_kept = OWN.lock().upgrade().is_some();
        assert!(is_kept || hangs_up(sign.as_fd(), Duration::from_secs(10)));
    }

    #[test]
    fn descriptors_of_other_kinds_show_no_life() {
        let (a, _b) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for (file, shows) in [(file.into(), false), (a, true)] {
            let lives = Lives::new(None, Some(file));
            assert_eq!(lives.of_the_peer().is_some(), shows);
        }
    }
}
