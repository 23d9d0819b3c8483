//! The program at the other end of a link, as its memory is read: by the number of its process, and never without its mark.

use std::sync::Arc;

use rustix::io::Errno;

use super::mark::{self, Mark};
use super::process::Process;
use super::segment::BoardMemory;
use crate::reduce::Workers;

/// How much of a long piece each thread reads at a time.
const SHARE_BYTES: usize = 256 << 10;

/// The program at the other end of a link, in a process that has a number here.
#[derive(Clone)]
pub(super) struct Peer {
    process: Arc<Process>,
    /// Where it tells its mark, before the first loan.
    board: BoardMemory,
}

/// Why memory was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The program is not there any more: its process has executed another one, or has ended and left its number to another.
    Gone,
    /// The system does not read it.
    OutOfReach(Errno),
}

impl Peer {
    pub(super) fn new(process: Arc<Process>, board: BoardMemory) -> Self {
        Self { process, board }
    }

    pub(super) fn process(&self) -> &Process {
        &self.process
    }

    /// Fills `bytes` from `address` on of its memory.
    pub(super) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < bytes.len() {
            match self.read_some(address + done as u64, &mut bytes[done..])? {
                0 => return Err(Fault::OutOfReach(Errno::FAULT)),
                count => done += count,
            }
        }
        self.process.note_reading();
        Ok(())
    }

    /// As [`Peer::read`], by `workers`: in shares. The mark is looked for with each.
    pub(super) fn read_by(
        &self,
        workers: &Workers,
        address: u64,
        bytes: &mut [u8],
    ) -> Result<(), Fault> {
        let mut outcomes = vec![Ok(()); bytes.len().div_ceil(SHARE_BYTES)];
        let shares = bytes.chunks_mut(SHARE_BYTES).enumerate().zip(&mut outcomes);
        workers.share(shares.collect(), |((at, share), outcome)| {
            *outcome = self.read(address + (at * SHARE_BYTES) as u64, share);
        });
        outcomes.into_iter().collect()
    }

    /// Whether it is not there any more, as far as the system tells.
    pub(super) fn is_gone(&self) -> bool {
        // Where its memory is not read there may be a reason: a filter may end the process that tries.
        let tells = self.process.has_been_read();
        self.process.has_ended() || tells && self.read_some(0, &mut []) == Err(Fault::Gone)
    }

    /// Reads its mark, and from the same memory a part of `bytes`: how many.
    fn read_some(&self, address: u64, bytes: &mut [u8]) -> Result<usize, Fault> {
        let told = self.board.mark();
        if told == Mark::default() {
            return Err(Fault::OutOfReach(Errno::ACCESS));
        }
        let mut found = [0_u8; mark::BYTES];
        let there = |address: u64, length| libc::iovec {
            iov_base: std::ptr::without_provenance_mut(address as usize),
            iov_len: length,
        };
        let remote = [
            there(told.address, found.len()),
            there(address, bytes.len()),
        ];
        let local = [&mut found[..], bytes].map(|part| libc::iovec {
            iov_base: part.as_mut_ptr().cast(),
            iov_len: part.len(),
        });
        let count = loop {
            // SAFETY: the kernel writes to the local vectors alone, which are exclusive slices; the remote ones name memory
            // of the other process, which the kernel checks.
            let count = unsafe {
                let (local, remote) = (local.as_ptr(), remote.as_ptr());
                libc::process_vm_readv(self.process.number(), local, 2, remote, 2, 0)
            };
            if let Ok(count) = usize::try_from(count) {
                break count;
            }
            match Errno::from_io_error(&std::io::Error::last_os_error()) {
                Some(Errno::INTR) => {}
                // Nothing can be read where its mark would be.
                Some(Errno::FAULT) => return Err(Fault::Gone),
                other => return Err(Fault::OutOfReach(other.unwrap_or(Errno::IO))),
            }
        };
        match count.checked_sub(found.len()) {
            Some(count) if mark::words(found) == told.bytes => Ok(count),
            _ => Err(Fault::Gone),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::segment::Segment;
    use super::*;

    #[test]
    fn threads_read_shares_of_a_long_piece() {
        let segment = Segment::anonymous(4096).unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = Peer::new(Process::behind(&socket).unwrap(), segment.board(0));
        segment.board(0).tell_mark(Mark::own().unwrap());
        let workers = Workers::new(3);
        for length in [1, SHARE_BYTES, SHARE_BYTES + 1, 7 * SHARE_BYTES - 5] {
            let lent: Vec<u8> = (0..length).map(|at| (at * 31 % 251) as u8).collect();
            let address = lent.as_ptr().expose_provenance() as u64;
            let mut bytes = vec![0; length];
            peer.read_by(&workers, address, &mut bytes).unwrap();
            assert!(bytes == lent, "{length} bytes");
        }
        let read = |address| peer.read_by(&workers, address, &mut vec![0; 2 * SHARE_BYTES]);
        assert_eq!(read(0), Err(Fault::OutOfReach(Errno::FAULT)));
        let own = Mark::own().unwrap();
        segment.board(0).tell_mark(Mark { address: 0, ..own });
        assert_eq!(read(0), Err(Fault::Gone));
    }

    #[test]
    fn memory_without_the_mark_is_another_programs() {
        let segment = Segment::anonymous(4096).unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = Peer::new(Process::behind(&socket).unwrap(), segment.board(0));
        let payload = [7_u8; 100];
        let address = payload.as_ptr().expose_provenance() as u64;
        let read = |peer: &Peer, address| {
            let mut bytes = [0; 100];
            peer.read(address, &mut bytes).map(|()| bytes)
        };
        assert_eq!(read(&peer, address), Err(Fault::OutOfReach(Errno::ACCESS)));
        assert!(!peer.is_gone());
        let own = Mark::own().unwrap();
        segment.board(0).tell_mark(own);
        assert_eq!(read(&peer, address), Ok(payload));
        assert_eq!(read(&peer, 0), Err(Fault::OutOfReach(Errno::FAULT)));
        assert!(!peer.is_gone());
        for other in [
            Mark {
                bytes: [own.bytes[0], !own.bytes[1]],
                ..own
            },
            Mark { address: 0, ..own },
        ] {
            segment.board(0).tell_mark(other);
            assert_eq!(read(&peer, address), Err(Fault::Gone));
            assert!(peer.is_gone());
        }
    }
}
