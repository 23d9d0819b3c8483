//! The bytes that a connection has carried, and those that it would have to carry again.
//!
//! A socket that breaks takes with it what it had not delivered. The bytes that the peer's system has acknowledged are not lost:
//! they lie in its receive queue, where the peer can read them after the break. So a side keeps a copy of the bytes that its
//! own system still counts as unacknowledged, and of no others. When another socket takes the place of the broken one, each side
//! says how many bytes it has received in all, and the other goes on from there.

use std::collections::VecDeque;
use std::fmt;

/// Bytes of a copy from which on the system is asked how many of them it still needs.
const ASK: usize = 64 << 10;

/// From this length on the system is asked first: most of a long run of bytes is often delivered when the call returns.
const LONG: usize = 16 << 10;

/// A copy that has grown longer than this gives its memory back when nothing is in it.
const LARGE: usize = 256 << 10;

/// The account of one connection, over all the sockets it has had.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    sent: u64,
    received: u64,
    /// A copy of the last of the sent bytes.
    kept: VecDeque<u8>,
    /// How many of these, the last ones, the present socket has yet to take.
    again: usize,
    /// The number of the caller's next bytes that the peer has already, though they do not count as sent: a former socket had
    /// taken them.
    ahead: usize,
}

/// The peer has received less than what this side can go back to, or more than it has sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Gap {
    pub(super) sent: u64,
    pub(super) kept: usize,
    pub(super) arrived: u64,
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sent,
            kept,
            arrived,
        } = self;
        write!(
            f,
            "{arrived} of {sent} bytes have arrived, and the last {kept} are kept: what lies between acknowledges bytes that it \
             loses, as a proxy does"
        )
    }
}

impl Ledger {
    /// Bytes received in all.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    pub(super) fn note_received(&mut self, bytes: usize) {
        self.received += bytes as u64;
    }

    /// The socket has taken the first `count` bytes of `pieces`. `unacknowledged` asks the system how many bytes, these
    /// included, the peer's system may lack.
    pub(super) fn note_sent(
        &mut self,
        pieces: &[&[u8]],
        count: usize,
        unacknowledged: impl FnOnce() -> usize,
    ) {
        let mut skipped = 0;
        if count >= LONG {
            let lacking = unacknowledged();
            self.trim(lacking.saturating_sub(count));
            skipped = count.saturating_sub(lacking);
        } else if self.kept.len() + count > ASK {
            self.trim(unacknowledged().saturating_sub(count));
        }
        self.sent += count as u64;
        let mut rest = count;
        for piece in pieces {
            let taken = &piece[..piece.len().min(rest)];
            rest -= taken.len();
            let passed = skipped.min(taken.len());
            skipped -= passed;
            self.kept.extend(&taken[passed..]);
        }
    }

    /// The peer's system has all but the last `lacking` of the bytes that this socket has taken.
    pub(super) fn trim(&mut self, lacking: usize) {
        let needed = self.again + lacking;
        self.kept.drain(..self.kept.len().saturating_sub(needed));
        if self.kept.is_empty() && self.kept.capacity() > LARGE {
            self.kept = VecDeque::new();
        }
    }

    /// The socket broke: nothing of it goes again before the peer has said how far it got. Beyond what counts as sent it may have
    /// carried `owed` bytes.
    pub(super) fn stop(&mut self, owed: usize) {
        self.again = 0;
        self.ahead += owed;
    }

    /// Another socket takes over: the peer has `arrived` bytes, and the rest is to go again.
    pub(super) fn go_back(&mut self, arrived: u64) -> Result<(), Gap> {
        if arrived > self.sent && arrived - self.sent <= self.ahead as u64 {
            self.ahead = (arrived - self.sent) as usize;
            self.kept.clear();
            return Ok(());
        }
        self.ahead = 0;
        let missing = self.sent.checked_sub(arrived);
        let missing = missing.and_then(|missing| usize::try_from(missing).ok());
        match missing.filter(|missing| *missing <= self.kept.len()) {
            Some(missing) => {
                self.kept.drain(..self.kept.len() - missing);
                self.again = missing;
                Ok(())
            }
            None => Err(Gap {
                sent: self.sent,
                kept: self.kept.len(),
                arrived,
            }),
        }
    }

    /// How many of the caller's next bytes, which are `count`, the peer has already. They count as sent.
    pub(super) fn skip(&mut self, count: usize) -> usize {
        let skipped = count.min(self.ahead);
        self.ahead -= skipped;
        self.sent += skipped as u64;
        skipped
    }

    /// Whether the peer has bytes that do not count as sent.
    pub(super) fn is_ahead(&self) -> bool {
        self.ahead > 0
    }

    /// The next bytes to go again; none when all have gone.
    pub(super) fn again(&self) -> &[u8] {
        let (first, second) = self.kept.as_slices();
        let begin = self.kept.len() - self.again;
        match begin.checked_sub(first.len()) {
            None => &first[begin..],
            Some(begin) => &second[begin..],
        }
    }

    /// The socket has taken the first `count` of these.
    pub(super) fn went_again(&mut self, count: usize) {
        self.again -= count;
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> usize {
        self.kept.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_kept_of_what_the_peer_may_lack() {
        let mut ledger = Ledger::default();
        ledger.note_sent(&[b"head", b"body"], 6, || panic!("short"));
        assert_eq!(ledger.kept, *b"headbo");
        let long: Vec<u8> = (0..LONG as u32).map(|at| at as u8).collect();
        ledger.note_sent(&[&long], LONG, || 3);
        assert_eq!(ledger.kept, long[LONG - 3..].to_vec());
        ledger.note_sent(&[&long], LONG, || LONG + 2);
        assert_eq!(ledger.kept.len(), LONG + 2);
        ledger.trim(0);
        assert!(ledger.kept.is_empty());
        for _ in 0..200 {
            ledger.note_sent(&[&long[..1000]], 1000, || 1000);
        }
        assert!(ledger.kept.len() <= ASK);
    }

    #[test]
    fn what_did_not_arrive_goes_again() {
        let mut ledger = Ledger::default();
        ledger.note_sent(&[b"0123456789"], 10, || 0);
        assert_eq!(ledger.go_back(4), Ok(()));
        assert_eq!(ledger.again(), b"456789");
        ledger.went_again(2);
        assert_eq!(ledger.again(), b"6789");
        // Nothing has been acknowledged of what has yet to go.
        ledger.trim(0);
        assert_eq!(ledger.again(), b"6789");
        assert_eq!(ledger.go_back(6), Ok(()));
        ledger.went_again(4);
        assert_eq!(ledger.go_back(10), Ok(()));
        assert!(ledger.again().is_empty());
        let gap = |arrived| Gap {
            sent: 10,
            kept: 0,
            arrived,
        };
        assert_eq!(ledger.go_back(9), Err(gap(9)));
        assert_eq!(ledger.go_back(11), Err(gap(11)));
    }

    #[test]
    fn what_arrived_before_it_counted_is_skipped() {
        let mut ledger = Ledger::default();
        ledger.note_sent(&[b"0123456789"], 10, || 0);
        ledger.stop(5);
        assert_eq!(ledger.go_back(13), Ok(()));
        assert_eq!((ledger.skip(2), ledger.is_ahead()), (2, true));
        // It broke again.
        ledger.stop(0);
        assert_eq!(ledger.go_back(13), Ok(()));
        assert_eq!((ledger.skip(9), ledger.skip(9)), (1, 0));
        ledger.note_sent(&[b"345"], 3, || 0);
        ledger.stop(0);
        assert_eq!(ledger.go_back(14), Ok(()));
        assert_eq!(ledger.again(), b"45");
    }
}
