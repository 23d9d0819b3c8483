//! The transports between two processes, in the order in which they are tried.
//!
//! A rank that opens a link walks through this table ([`connect`](super::connect)): the first transport that leads to the
//! peer carries the link, and one that turns out to be unusable leaves it to the next. The rank at the other end finds the
//! row by the purpose that a connection states in its handshake ([`accept`](super::accept)). Links inside one process
//! (`transport/local.rs`) are made by the group that has both their ends, without any connection.
//!
//! To add a transport, add its file here and its row. Its connections state a [`Purpose`] of their own. Those that come
//! over the Unix socket or over TCP are accepted already; another kind of socket is one more listener in `listen.rs`, and
//! a field of the [`Address`] that a rank publishes.

mod again;
mod shm;
mod stripes;
mod tcp;

pub use self::again::Again;
pub(super) use self::again::open as open_again;
pub(super) use self::stripes::open as open_stripe;
pub(super) use self::tcp::{introduce, open_one};

use super::address::Address;
use super::attempt::{Attempt, Reached, Setback};
use super::visit::{Reason, Stream, Visit};
use crate::config::TransportChoice;
use crate::transport::handshake::Purpose;

/// One transport: how a link over it comes to be.
pub(super) struct Transport {
    /// As in the log and in errors.
    pub(super) name: &'static str,
    /// The setting by which the user demands it alone.
    pub(super) choice: TransportChoice,
    /// Why it cannot lead from the process with the first address to the one with the second. `None`: it may.
    pub(super) hindrance: fn(&Address, &Address) -> Option<String>,
    /// Opens a link to the peer of the attempt.
    pub(super) connect: fn(&Attempt<'_>) -> Result<Reached, Setback>,
    /// The purposes that its connections state.
    pub(super) purposes: &'static [Purpose],
    /// Serves such a connection of a proven member: makes the other end of the link, or says why not.
    pub(super) accept: fn(Visit<'_>, Stream) -> Result<(), Reason>,
}

/// The last row leads everywhere.
pub(super) const TRANSPORTS: &[Transport] = &[
    Transport {
        name: "shared memory",
        choice: TransportChoice::Shm,
        hindrance: |own, target| {
            let shares = own.host().shares_memory_with(target.host());
            (!shares).then(|| format!("this is {own}, not the same host and user"))
        },
        connect: shm::connect,
        purposes: &[Purpose::SharedMemory],
        accept: shm::accept,
    },
    Transport {
        name: "TCP",
        choice: TransportChoice::Tcp,
        hindrance: |_, _| None,
        connect: tcp::connect,
        purposes: &[
            Purpose::TcpData,
            Purpose::TcpControl,
            Purpose::TcpStripe,
            Purpose::TcpAgain,
        ],
        accept: tcp::accept,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_purpose_has_one_row() {
        // A conversation is no link, nor is a question.
        let purposes: Vec<_> = (0..=u8::MAX)
            .filter_map(Purpose::from_number)
            .filter(|purpose| !matches!(purpose, Purpose::Conversation | Purpose::Status))
            .collect();
        assert!(purposes.len() >= TRANSPORTS.len());
        for purpose in purposes {
            let rows = TRANSPORTS
                .iter()
                .filter(|row| row.purposes.contains(&purpose));
            assert_eq!(rows.count(), 1, "{purpose:?}");
        }
    }

    #[test]
    fn each_can_be_demanded_and_the_last_leads_everywhere() {
        for (at, row) in TRANSPORTS.iter().enumerate() {
            assert_ne!(row.choice, TransportChoice::Auto, "{}", row.name);
            let same = |other: &Transport| other.choice == row.choice;
            assert_eq!(TRANSPORTS.iter().position(same), Some(at), "{}", row.name);
        }
        let [near, far] = Address::samples();
        let last = TRANSPORTS.last().expect("a row");
        assert_eq!((last.hindrance)(&near, &far), None);
        let first = (TRANSPORTS[0].hindrance)(&near, &far).expect("another host");
        assert!(first.contains("not the same host and user"), "{first}");
    }
}
