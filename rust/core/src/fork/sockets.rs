//! The sockets of this process that a forked child must not have.
//!
//! A socket lives until the last process that has it lets go. A child that is forked from a rank, as a DataLoader's
//! worker is, has copies of all of its sockets, and would keep the rank's links open and its ports taken for as long as
//! the child itself lives: no peer would notice the end of the rank. So every socket is entered here when it is made,
//! and before `fork` returns in the child, something harmless takes the place of each. The numbers stay taken: an object
//! that the child has inherited and drops closes what is there, and never a file that the program has opened under that
//! number since. Nor can anything that the child says or shuts down reach a peer.
//!
//! Nothing is taken out of the list. An entry is a number and the inode of the socket; the kernel gives the same inode
//! to another socket only after billions of them, and an entry whose number means something else by now is passed over.
//!
//! A program that the child executes has none of them in any case (`CLOEXEC`). A child that was made by the bare system
//! call, past the C library, does have copies; of a rank of the same host a pidfd tells the end all the same
//! (`transport::shm::process`).

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FileType, fstat};
use rustix::io::{DupFlags, dup3};

use super::enter;

/// Entries that are allocated together.
const CHUNK: usize = 512;
/// Chunks for the million descriptors that a process can have unless its system is set up otherwise.
const CHUNKS: usize = 2048;

/// The inodes of entered sockets by their numbers, 0 where there is none. A forked child reads them, when any thread of
/// its parent may have been anywhere: so there is no lock.
static ENTERED: [OnceLock<Box<[AtomicU64; CHUNK]>>; CHUNKS] = [const { OnceLock::new() }; CHUNKS];

/// The replacement of a socket in a child: a descriptor that can be closed and nothing else.
static BLANK: OnceLock<OwnedFd> = OnceLock::new();

/// From now on forked children have nothing of this socket.
pub(crate) fn keep_private(socket: impl AsFd) {
    let _inside = enter();
    note(socket.as_fd());
}

/// Makes a socket that forked children never have: no fork comes between `make`, which must not block, and the entry.
pub(crate) fn make_private<S: AsFd, E>(make: impl FnOnce() -> Result<S, E>) -> Result<S, E> {
    let _inside = enter();
    make().inspect(|socket| note(socket.as_fd()))
}

/// Enters a socket. The caller is inside the gate: a child finds neither of the two statics half made.
fn note(socket: BorrowedFd<'_>) {
    if BLANK.get().is_none()
        && let Ok(blank) = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
    {
        let _ = BLANK.set(blank);
    }
    let number = socket.as_raw_fd() as usize;
    if let (Some(chunk), Some(inode)) = (ENTERED.get(number / CHUNK), inode(socket)) {
        let chunk = chunk.get_or_init(|| Box::new([const { AtomicU64::new(0) }; CHUNK]));
        chunk[number % CHUNK].store(inode, Ordering::Release);
    }
}

/// The inode of what `fd` is, if it is a socket or a pipe.
fn inode(fd: BorrowedFd<'_>) -> Option<u64> {
    let stat = fstat(fd).ok()?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    matches!(kind, FileType::Socket | FileType::Fifo).then_some(stat.st_ino)
}

/// In a child, before `fork` returns there: puts something harmless in the place of every socket that was entered.
pub(super) fn replace_all() {
    let Some(blank) = BLANK.get() else { return };
    for (at, chunk) in ENTERED.iter().enumerate() {
        for (number, entry) in chunk
            .get()
            .into_iter()
            .flat_map(|chunk| chunk.iter())
            .enumerate()
        {
            match entry.load(Ordering::Acquire) {
                0 => {}
                inode => blank_out((at * CHUNK + number) as RawFd, inode, blank),
            }
        }
    }
}

/// Puts `blank` in the place of the socket with this number and inode, if it is still there.
fn blank_out(number: RawFd, entered: u64, blank: &OwnedFd) {
    // SAFETY: if the number is open, it is so while this runs, in a process that has no other thread yet. If it is
    // not, the system call says so.
    let there = unsafe { BorrowedFd::borrow_raw(number) };
    if inode(there) == Some(entered) {
        // SAFETY: the owner of the number still owns it; nothing is closed here but the socket that is replaced.
        let mut place = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
        let _ = dup3(blank, &mut place, DupFlags::CLOEXEC);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    /// A forked child, which ends when this is dropped.
    struct Child(libc::pid_t);

    impl Child {
        /// It does what `body` does, which must be a few system calls, and ends with what that returns.
        fn fork(body: impl FnOnce() -> i32) -> Self {
            // SAFETY: the child makes system calls alone. An alarm ends it if this test cannot.
            match unsafe { libc::fork() } {
                0 => {
                    // SAFETY: as above.
                    unsafe { libc::alarm(30) };
                    let status = body();
                    // SAFETY: as above.
                    unsafe { libc::_exit(status) };
                }
                child => Self(child),
            }
        }

        fn wait(self) -> i32 {
            let mut status = 0;
            // SAFETY: the kernel writes one number.
            unsafe { libc::waitpid(self.0, &mut status, 0) };
            std::mem::forget(self);
            status
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: it is this process's child, and has not been waited for.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
        }
    }

    fn live_on() -> i32 {
        // SAFETY: a system call.
        unsafe { libc::pause() }
    }

    #[test]
    fn a_forked_child_does_not_keep_a_connection_open() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        keep_private(&ours);
        let made = make_private(|| ours.try_clone()).unwrap();
        let child = Child::fork(live_on);
        drop((ours, made));
        let patience = Some(Duration::from_secs(10));
        theirs.set_read_timeout(patience).unwrap();
        assert_eq!((&theirs).read(&mut [0]).unwrap(), 0);
        drop(child);
    }

    #[test]
    fn nothing_that_a_child_drops_or_says_reaches_the_peer() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        keep_private(&ours);
        let number = ours.as_raw_fd();
        let child = Child::fork(|| {
            // SAFETY: system calls on a number that this process has.
            unsafe {
                let said = libc::send(number, [1].as_ptr().cast(), 1, libc::MSG_NOSIGNAL);
                let shut = libc::shutdown(number, libc::SHUT_RDWR);
                i32::from(said >= 0 || shut >= 0 || libc::close(number) != 0)
            }
        });
        assert_eq!(child.wait(), 0);
        theirs.set_nonblocking(true).unwrap();
        let error = (&theirs).read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_number_that_means_something_else_by_now_is_left_alone() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        keep_private(&ours);
        // The same number, another file.
        let mut place = OwnedFd::from(ours);
        dup3(
            File::open("/dev/null").unwrap(),
            &mut place,
            DupFlags::CLOEXEC,
        )
        .unwrap();
        let before = fstat(&place).unwrap().st_ino;
        let same = || fstat(&place).is_ok_and(|stat| stat.st_ino == before);
        assert_eq!(Child::fork(|| i32::from(!same())).wait(), 0);
    }
}
