//! The bytes that a connection has carried, and those that it would have to carry again.
//!
//! A socket that breaks takes with it what it had not delivered. The bytes that the peer's system has acknowledged are not
//! lost: they lie in its receive queue, where the peer can read them after the break. So a side keeps a copy of the bytes that
//! its own system still counts as unacknowledged, and of no others. Of a payload that the system takes in part no copy is made
//! at all: the bytes that are unacknowledged do not count as sent, so the caller keeps them for the next call. When another
//! socket takes the place of the broken one, each side says how many bytes it has received in all, and the other goes on from
//! there.

use std::collections::VecDeque;
use std::fmt;

/// Bytes of a copy from which on the system is asked how many of them it still needs.
const ASKED_FROM: usize = 64 << 10;

/// From this length on the system is asked first: most of a long run of bytes is often delivered when the call returns.
const ASKED_FIRST_FROM: usize = 16 << 10;

/// A copy that has grown longer than this gives its memory back when nothing is in it.
const MOST_RETAINED: usize = 256 << 10;

/// The account of one connection, over all the sockets it has had.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    sent: u64,
    received: u64,
    /// A copy of the last of the sent bytes.
    kept: VecDeque<u8>,
    /// How many of these, the last ones, the present socket has yet to take.
    again: usize,
    /// The number of the caller's next bytes that a socket has taken, though they do not count as sent.
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

    pub(super) fn set_received(&mut self, bytes: u64) {
        self.received = bytes;
    }

    pub(super) fn note_received(&mut self, bytes: usize) {
        self.received += bytes as u64;
    }

    /// Bytes of the copy.
    pub(super) fn kept(&self) -> usize {
        self.kept.len()
    }

    /// The number of the caller's next bytes that have gone already.
    pub(super) fn ahead(&self) -> usize {
        self.ahead
    }

    /// The caller offers `pieces`. The first [`Ledger::ahead`] bytes of them had gone, and the socket has taken the next
    /// `taken` ones. `unacknowledged` asks the system how many of all bytes the peer's system may lack. Returns how many of the
    /// offered bytes count as sent now.
    pub(super) fn note_sent(
        &mut self,
        pieces: &[&[u8]],
        taken: usize,
        unacknowledged: impl FnOnce() -> usize,
    ) -> usize {
        let offered: usize = pieces.iter().map(|piece| piece.len()).sum();
        let gone = self.ahead + taken;
        let mut skipped = 0;
        let mut counted = offered;
        let is_short = self.ahead == 0 && taken == offered && offered < ASKED_FIRST_FROM;
        if !is_short || self.kept.len() + offered > ASKED_FROM {
            let mut lacking = unacknowledged();
            if gone < offered {
                counted = gone.saturating_sub(lacking);
            }
            self.ahead = gone - counted.min(gone);
            lacking = lacking.saturating_sub(self.ahead);
            self.trim(lacking.saturating_sub(counted));
            skipped = counted.saturating_sub(lacking);
        }
        self.sent += counted as u64;
        let mut rest = counted;
        for piece in pieces {
            let taken = &piece[..piece.len().min(rest)];
            rest -= taken.len();
            let passed = skipped.min(taken.len());
            skipped -= passed;
            self.kept.extend(&taken[passed..]);
        }
        counted
    }

    /// The peer's system has all but the last `lacking` of the bytes that this socket has taken.
    pub(super) fn trim(&mut self, lacking: usize) {
        let needed = self.again.saturating_add(lacking);
        self.kept.drain(..self.kept.len().saturating_sub(needed));
        if self.kept.is_empty() && self.kept.capacity() > MOST_RETAINED {
            self.kept = VecDeque::new();
        }
    }

    /// The socket broke: nothing of it goes again before the peer has said how far it got. Beyond what counts as sent it may
    /// have carried `owed` bytes.
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
        assert_eq!(
            ledger.note_sent(&[b"head", b"body"], 8, || panic!("short")),
            8
        );
        assert_eq!(ledger.kept, *b"headbody");
        let long: Vec<u8> = (0..ASKED_FIRST_FROM as u32).map(|at| at as u8).collect();
        assert_eq!(
            ledger.note_sent(&[&long], ASKED_FIRST_FROM, || 3),
            ASKED_FIRST_FROM
        );
        assert_eq!(ledger.kept, long[ASKED_FIRST_FROM - 3..].to_vec());
        assert_eq!(
            ledger.note_sent(&[&long], ASKED_FIRST_FROM, || ASKED_FIRST_FROM + 2),
            ASKED_FIRST_FROM
        );
        assert_eq!(ledger.kept.len(), ASKED_FIRST_FROM + 2);
        ledger.trim(0);
        assert!(ledger.kept.is_empty());
        for _ in 0..200 {
            ledger.note_sent(&[&long[..1000]], 1000, || 1000);
        }
        assert!(ledger.kept.len() <= ASKED_FROM);
    }

    #[test]
    fn nothing_is_copied_while_the_caller_keeps_it() {
        let bytes: Vec<u8> = (0..100).collect();
        let mut ledger = Ledger::default();
        // 40 have gone, and 10 of these have arrived.
        assert_eq!(ledger.note_sent(&[&bytes], 40, || 30), 10);
        assert_eq!((ledger.ahead(), ledger.kept.len()), (30, 0));
        assert_eq!(ledger.note_sent(&[&bytes[10..]], 0, || 30), 0);
        assert_eq!(ledger.note_sent(&[&bytes[10..]], 20, || 35), 15);
        assert_eq!((ledger.ahead(), ledger.kept.len()), (35, 0));
        // The caller offers less than has gone.
        assert_eq!(ledger.note_sent(&[&bytes[25..30]], 0, || 33), 5);
        assert_eq!(
            (ledger.ahead(), &ledger.kept),
            (30, &VecDeque::from([27, 28, 29]))
        );
        // The rest goes: the last bytes are kept here.
        assert_eq!(ledger.note_sent(&[&bytes[30..]], 40, || 50), 70);
        assert_eq!((ledger.ahead(), ledger.kept.len()), (0, 50));
        assert_eq!(ledger.go_back(98), Ok(()));
        assert_eq!(ledger.again(), &bytes[98..]);
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
    fn what_arrived_before_it_counted_is_not_sent_again() {
        let mut ledger = Ledger::default();
        ledger.note_sent(&[b"0123456789"], 10, || 0);
        ledger.stop(5);
        assert_eq!(ledger.go_back(13), Ok(()));
        assert_eq!(ledger.ahead(), 3);
        assert_eq!(ledger.note_sent(&[b"ab"], 0, || 0), 2);
        // It broke again.
        ledger.stop(0);
        assert_eq!(ledger.go_back(13), Ok(()));
        assert_eq!(ledger.note_sent(&[b"cde"], 2, || 2), 3);
        assert_eq!(ledger.ahead(), 0);
        assert_eq!(ledger.go_back(14), Ok(()));
        assert_eq!(ledger.again(), b"de"[1..].to_vec());
    }
}
