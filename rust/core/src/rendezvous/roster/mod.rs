//! Forming a group: every rank gets the table of all ranks, or learns why there is no group.
//!
//! Each rank publishes one entry (`rank/N`) that describes it. Rank 0 reads them all, checks that they belong together, and
//! publishes one verdict (`verdict`): the table of all members, which are on some pages (`page/N`), or a failure, which every
//! rank then reports. The other ranks wait for the verdict alone, so the store sees O(n) requests, and for large groups one
//! more for each page and rank. A rank that finds itself in conflict (its number is taken, its settings are not rank 0's) says
//! so under `trouble`, which rank 0 looks at while it waits; so all ranks hear of it within about a second instead of at the
//! timeout.
//!
//! **Which process is believed.** An entry has the public key of its rank, and every connection proves that both ends
//! hold the keys of the table ([`crate::transport::handshake`]). So a process that can only read the store gets nowhere.
//! Without a secret of the job, a process that can write to the store can join, or take the place of a rank that has
//! not come yet: then trust rests on access to the store. With a secret, it authenticates every record and is mixed
//! into every handshake, so that a process that can only read and write the store can disturb the job, but not join it.
//!
//! **The end of the store.** Rank 0 may serve the store, and its end is then the end of the store. So a rank that has read
//! the verdict says so under `left/N`, and rank 0 has joined, or has failed to, when all ranks that came have said so: it may
//! end right away, by whatever way, and the others join all the same.
//!
//! **Without a store.** A group may also form of texts that its members exchange by themselves (`handles`).
//!
//! **Again.** A process that has joined in a store may do so again when its group has ended, or beside it: it finds its
//! own entry there, and goes on to the next round, whose keys have a prefix. All its ranks do so equally often.

mod failures;
mod handles;
mod joining;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use self::handles::{handle, of_handles};
use self::joining::join_round;
pub use super::introduction::{Introduction, host_label, hostname};
use super::records::{Row, Seal};
use super::store::{PrefixStore, Store};
use crate::error::{Code, Error, Result};
use crate::plan::cost::Rounded;
use crate::transport::keys::GroupKey;
use crate::types::Rank;

pub(super) fn entry_key(rank: Rank) -> String {
    format!("rank/{rank}")
}

/// A rank of the group, as it introduced itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its rank.
    pub rank: Rank,
    /// The label of its host.
    pub host: String,
    /// The host's name, for messages.
    pub hostname: String,
    /// The process, for messages.
    pub pid: u32,
    /// The memory node of its host that it is bound to, where there are several.
    pub node: Option<u16>,
    /// It was not in the group that takes in others by this one.
    pub is_new: bool,
    /// Where it is reached.
    pub address: Vec<u8>,
}

/// The group: all ranks in order, and how they prove themselves to each other.
#[derive(Clone, Debug)]
pub struct Roster {
    /// The members, by rank.
    pub members: Vec<Member>,
    /// The costs that rank 0 gave: the same on all members.
    pub costs: Rounded,
    /// This rank's.
    pub key: GroupKey,
}

/// Gives the costs among these members. Rank 0 calls it for all, once it knows them.
pub type Price<'a> = &'a dyn Fn(&[Member]) -> Rounded;

/// The members that the rows of a table describe.
fn members(rows: Vec<Row>) -> Vec<Member> {
    let member = |(rank, row): (Rank, Row)| Member {
        rank,
        host: row.host,
        hostname: row.hostname,
        pid: row.pid,
        node: row.node,
        is_new: row.is_new,
        address: row.address,
    };
    rows.into_iter().enumerate().map(member).collect()
}

impl Roster {
    fn new(rows: Vec<Row>, costs: Rounded, me: &Introduction) -> Self {
        let shared = me.secret.as_ref();
        let shared = shared.map_or([0; 32], |secret| secret.derive(b"links"));
        let keys = rows.iter().map(|row| row.key).collect();
        let meeting: Vec<_> = rows.iter().flat_map(|row| row.attempt).collect();
        Self {
            members: members(rows),
            costs,
            key: GroupKey::new(me.key.clone(), (keys, &meeting), shared, me.encrypts),
        }
    }
}

/// Joins the group that forms in `store`. Groups that form at the same time each need a store, or a prefix in one, of
/// their own; a process may join in the same store again and again. Rank 0 calls `price`.
///
/// # Errors
/// `Timeout` naming the ranks that did not come; `Mismatch` when ranks differ in world size, settings, version or
/// secret, naming the difference; `InvalidArgument` when two processes claim one rank, naming both; `Untrusted` when
/// the store holds what no rank would write; `System` when it cannot be reached.
pub fn join(
    store: &dyn Store,
    me: &Introduction,
    timeout: Duration,
    price: Price<'_>,
) -> Result<Roster> {
    me.check()?;
    let seal = me.seal();
    match round(store, me, seal)? {
        0 => join_round(store, me, timeout, price),
        round => {
            let store = PrefixStore::new(format!("again{round}"), store);
            join_round(&store, me, timeout, price)
        }
    }
}

/// How often this process has joined in `store` as this rank before.
fn round(store: &dyn Store, me: &Introduction, seal: Seal<'_>) -> Result<u32> {
    let Some(first) = store.get(&entry_key(me.rank))? else {
        return Ok(0);
    };
    let is_own = seal
        .read_entry(&first)
        .is_ok_and(|entry| entry.process == me.process);
    if !is_own {
        // The check of the first round says what is wrong.
        return Ok(0);
    }
    let count = format!("again/{}", me.rank);
    let before = match store.get(&count)? {
        None => 0,
        Some(bytes) => bytes.try_into().map(u32::from_le_bytes).map_err(|_| {
            let what = format!("the store's key {count} is not what a rank would write");
            Error::new(Code::Untrusted, what)
        })?,
    };
    let round = before.saturating_add(1);
    store.set(&count, &round.to_le_bytes())?;
    Ok(round)
}
