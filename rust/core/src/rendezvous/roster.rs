//! Forming a group: every rank gets the table of all ranks, or learns why there is no group.
//!
//! Each rank publishes one entry (`rank/N`) that describes it. Rank 0 reads them all, checks that they belong
//! together, and publishes one verdict (`verdict`): the table of all members, or a failure, which every rank then
//! reports. The other ranks wait for the verdict alone, so the store sees O(n) requests. A rank that finds itself in
//! conflict (its number is taken, its settings are not rank 0's) says so under `trouble`, which rank 0 looks at while
//! it waits; so all ranks hear of it within about a second instead of at the timeout.
//!
//! **Which process is believed.** An entry has the public key of its rank, and every connection proves that both ends
//! hold the keys of the table ([`crate::transport::handshake`]). So a process that can only read the store gets nowhere.
//! Without a secret of the job, a process that can write to the store can join, or take the place of a rank that has
//! not come yet: then trust rests on access to the store. With a secret, it authenticates every record and is mixed
//! into every handshake, so that a process that can only read and write the store can disturb the job, but not join it.
//!
//! **Again.** A process that has joined in a store may do so again when its group has ended, or beside it: it finds its
//! own entry there, and goes on to the next round, whose keys have a prefix. All its ranks do so equally often.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub use super::introduction::{Introduction, host_label, hostname};
use super::records::{Entry, Refused, Row, Seal, Verdict};
use super::store::{MAX_VALUE, PrefixStore, Store};
use crate::error::{Code, Error, Result};
use crate::plan::cost::Rounded;
use crate::transport::keys::GroupKey;
use crate::types::Rank;

/// How long rank 0 waits for entries between two looks at `trouble`.
const GLANCE: Duration = Duration::from_secs(1);
/// How often a waiting rank tells what it waits for.
const REPORT: Duration = Duration::from_secs(5);
/// How much later than its own timeout a rank still takes the verdict of a rank 0 that has come: its reasons are
/// better than what the rank can find out by itself.
const GRACE: Duration = Duration::from_millis(300);

const VERDICT: &str = "verdict";
const TROUBLE: &str = "trouble";

pub(super) fn entry_key(rank: Rank) -> String {
    format!("rank/{rank}")
}

/// A rank of the group, as it introduced itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its rank.
    pub rank: Rank,
    /// What counts as one host.
    pub host: String,
    /// The host's name, for messages.
    pub hostname: String,
    /// The process, for messages.
    pub pid: u32,
    /// Where it is reached.
    pub address: Vec<u8>,
}

/// The group: all ranks in order, and how they prove themselves to each other.
#[derive(Clone, Debug)]
pub struct Roster {
    /// The members, by rank.
    pub members: Vec<Member>,
    /// What things cost, as rank 0 said: the same on all members.
    pub costs: Rounded,
    /// This rank's.
    pub key: GroupKey,
}

impl Roster {
    fn new(rows: Vec<Row>, costs: Rounded, me: &Introduction) -> Self {
        let shared = me.secret.as_ref();
        let shared = shared.map_or([0; 32], |secret| secret.derive(b"links"));
        let keys = rows.iter().map(|row| row.key).collect();
        let members = rows.into_iter().enumerate().map(|(rank, row)| Member {
            rank,
            host: row.host,
            hostname: row.hostname,
            pid: row.pid,
            address: row.address,
        });
        Self {
            members: members.collect(),
            costs,
            key: GroupKey::new(me.key.clone(), keys, shared, me.encrypts),
        }
    }
}

/// Joins the group that forms in `store`. Groups that form at the same time each need a store, or a prefix in one, of
/// their own; a process may join in the same store again and again.
///
/// # Errors
/// `Timeout` naming the ranks that did not come; `Mismatch` when ranks differ in world size, settings, version or
/// secret, naming the difference; `InvalidArgument` when two processes claim one rank, naming both; `Untrusted` when
/// the store holds what no rank would write; `System` when it cannot be reached.
pub fn join(store: &dyn Store, me: &Introduction, timeout: Duration) -> Result<Roster> {
    me.check()?;
    let seal = me.seal();
    match round(store, me, seal)? {
        0 => join_round(store, me, timeout),
        round => join_round(
            &PrefixStore::new(format!("again{round}"), store),
            me,
            timeout,
        ),
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

fn join_round(store: &dyn Store, me: &Introduction, timeout: Duration) -> Result<Roster> {
    let joining = Joining {
        store,
        me,
        entry: me.entry()?,
        seal: me.seal(),
        begun: Instant::now(),
        timeout,
    };
    joining.introduce()?;
    if me.rank == 0 {
        joining.lead()
    } else {
        joining.follow()
    }
}

/// One rank on its way into the group.
struct Joining<'a> {
    store: &'a dyn Store,
    me: &'a Introduction,
    entry: Entry,
    seal: Seal<'a>,
    begun: Instant,
    timeout: Duration,
}

impl Joining<'_> {
    /// Publishes this rank's entry, unless its number is taken or it does not fit to rank 0's.
    fn introduce(&self) -> Result<()> {
        let key = entry_key(self.me.rank);
        if let Some(taken) = self.store.get(&key)? {
            return Err(self.in_trouble(match self.read(self.me.rank, &taken) {
                Ok(other) => self.claimed_twice(&other.row),
                Err(refused) => refused,
            }));
        }
        self.store.set(&key, &self.seal.write_entry(&self.entry))?;
        if self.me.rank == 0 {
            return Ok(());
        }
        if let Some(first) = self.store.get(&entry_key(0))? {
            let checked = self.read(0, &first).and_then(|first| self.compare(&first));
            checked.map_err(|error| self.in_trouble(error))?;
        }
        Ok(())
    }

    /// Rank 0: collects all entries and publishes the verdict.
    fn lead(&self) -> Result<Roster> {
        let verdict = self.collect().and_then(|rows| {
            let costs = self.me.costs;
            let table = Verdict::Table { costs, rows };
            let bytes = self.seal.write_verdict(&table);
            if bytes.len() > MAX_VALUE {
                return Err(Error::unsupported(format!(
                    "the table of {} ranks has {} bytes, more than the {MAX_VALUE} of a store value",
                    self.me.world,
                    bytes.len()
                )));
            }
            self.store.set(VERDICT, &bytes)?;
            Ok(table)
        });
        match verdict {
            Ok(Verdict::Table { costs, rows }) => Ok(Roster::new(rows, costs, self.me)),
            Ok(Verdict::Failure(error)) => Err(error),
            Err(error) => {
                self.publish(VERDICT, &error);
                Err(self.as_seen_here(error))
            }
        }
    }

    /// Waits for the entries of all ranks and checks them. Returns the rows of the table.
    fn collect(&self) -> Result<Vec<Row>> {
        let mut rows = BTreeMap::from([(0, self.entry.row.clone())]);
        let mut report = self.begun + REPORT;
        while rows.len() < self.me.world {
            let glance = Instant::now() + GLANCE.min(self.left());
            self.await_entries(&mut rows, glance)?;
            if let Some(trouble) = self.store.get(TROUBLE)? {
                return Err(self.read_failure(&trouble));
            }
            self.check_own_entry()?;
            let is_over = self.left().is_zero();
            if is_over || Instant::now() >= report {
                self.look_at_all(&mut rows)?;
                report = Instant::now() + REPORT;
                let missing = self.missing(|rank| rows.contains_key(&rank));
                if !missing.is_empty() {
                    if is_over {
                        return Err(self.incomplete(&missing));
                    }
                    tracing::info!(
                        "{} of {} ranks have joined after {:.0} s; missing: {}",
                        rows.len(),
                        self.me.world,
                        self.begun.elapsed().as_secs_f64(),
                        list(&missing)
                    );
                }
            }
        }
        Ok(rows.into_values().collect())
    }

    /// Waits for one missing rank after the other until `end`.
    fn await_entries(&self, rows: &mut BTreeMap<Rank, Row>, end: Instant) -> Result<()> {
        for rank in self.missing(|rank| rows.contains_key(&rank)) {
            let left = end.saturating_duration_since(Instant::now());
            match self.store.wait(&entry_key(rank), left) {
                Ok(bytes) => {
                    rows.insert(rank, self.accept(rank, &bytes)?);
                }
                Err(error) if error.code == Code::Timeout => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Looks whether any missing rank has come in the meantime.
    fn look_at_all(&self, rows: &mut BTreeMap<Rank, Row>) -> Result<()> {
        for rank in self.missing(|rank| rows.contains_key(&rank)) {
            if let Some(bytes) = self.store.get(&entry_key(rank))? {
                rows.insert(rank, self.accept(rank, &bytes)?);
            }
        }
        Ok(())
    }

    fn accept(&self, rank: Rank, bytes: &[u8]) -> Result<Row> {
        let entry = self.read(rank, bytes)?;
        self.compare(&entry)?;
        Ok(entry.row)
    }

    /// Two processes that claim one rank at the same moment both find it free; the store has the entry of the later
    /// one.
    fn check_own_entry(&self) -> Result<()> {
        let Some(bytes) = self.store.get(&entry_key(self.me.rank))? else {
            return Ok(());
        };
        let entry = self.read(self.me.rank, &bytes)?;
        if entry.row.uuid != self.entry.row.uuid {
            return Err(self.claimed_twice(&entry.row));
        }
        Ok(())
    }

    /// Another rank than 0: waits for the verdict.
    fn follow(&self) -> Result<Roster> {
        let mut pause = GLANCE;
        loop {
            match self.store.wait(VERDICT, self.left().min(pause)) {
                Ok(verdict) => return self.conclude(&verdict),
                Err(error) if error.code == Code::Timeout => pause = REPORT,
                Err(error) => return Err(error),
            }
            self.check_own_entry()
                .map_err(|error| self.in_trouble(error))?;
            let has_first = self.store.get(&entry_key(0))?.is_some();
            if !self.left().is_zero() {
                let waited = self.begun.elapsed().as_secs_f64();
                let first = if has_first { "other ranks" } else { "rank 0" };
                tracing::info!(
                    "rank {} has waited {waited:.0} s for {first} to join",
                    self.me.rank
                );
                continue;
            }
            if has_first {
                match self.store.wait(VERDICT, GRACE) {
                    Ok(verdict) => return self.conclude(&verdict),
                    Err(error) if error.code == Code::Timeout => {}
                    Err(error) => return Err(error),
                }
            }
            return Err(self.survey()?);
        }
    }

    /// Takes the verdict, if this rank is part of it.
    fn conclude(&self, verdict: &[u8]) -> Result<Roster> {
        let verdict = self.seal.read_verdict(verdict);
        let (costs, rows) = match verdict.map_err(|why| self.refusal(0, why))? {
            Verdict::Table { costs, rows } => (costs, rows),
            Verdict::Failure(error) => return Err(self.as_seen_here(error)),
        };
        if rows.len() != self.me.world {
            return Err(self.wrong_world(0, rows.len()));
        }
        let mine = &rows[self.me.rank];
        if mine.uuid != self.entry.row.uuid {
            return Err(self.claimed_twice(mine));
        }
        Ok(Roster::new(rows, costs, self.me))
    }

    /// The error of a rank whose time is over without a verdict: it names the ranks that have not come.
    fn survey(&self) -> Result<Error> {
        let mut came = Vec::new();
        for rank in 0..self.me.world {
            came.push(rank == self.me.rank || self.store.get(&entry_key(rank))?.is_some());
        }
        let missing = self.missing(|rank| came[rank]);
        if missing.is_empty() {
            return Ok(Error::new(
                Code::Timeout,
                format!(
                    "all {} ranks came, but rank 0 published no table of them within {} s; see what rank 0 reported",
                    self.me.world,
                    self.timeout.as_secs_f64()
                ),
            )
            .with_peer(0));
        }
        Ok(self.incomplete(&missing))
    }

    fn missing(&self, came: impl Fn(Rank) -> bool) -> Vec<Rank> {
        (0..self.me.world).filter(|&rank| !came(rank)).collect()
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.begun.elapsed())
    }

    /// Reads what the store has as the entry of `rank`.
    fn read(&self, rank: Rank, bytes: &[u8]) -> Result<Entry> {
        match self.seal.read_entry(bytes) {
            Ok(entry) if entry.rank as usize == rank => Ok(entry),
            Ok(_) => Err(self.refusal(rank, Refused::Malformed)),
            Err(why) => Err(self.refusal(rank, why)),
        }
    }

    /// Checks that `other` and this rank want the same group.
    fn compare(&self, other: &Entry) -> Result<()> {
        let rank = other.rank as Rank;
        if other.world != self.entry.world {
            return Err(self.wrong_world(rank, other.world as usize));
        }
        let settings = |entry: &Entry| -> BTreeMap<String, String> {
            entry.settings.iter().cloned().collect()
        };
        let (mine, theirs) = (settings(&self.entry), settings(other));
        for name in mine.keys().chain(theirs.keys()) {
            let (mine, theirs) = (mine.get(name), theirs.get(name));
            if mine != theirs {
                let shown =
                    |value: Option<&String>| value.map_or("unset".to_owned(), String::clone);
                let message = format!(
                    "setting {name} must be the same on all ranks, but is {} on rank {} and {} on rank {rank} ({})",
                    shown(mine),
                    self.me.rank,
                    shown(theirs),
                    other.row.hostname
                );
                let error = Error::new(Code::Mismatch, message).with_field(name.clone());
                return Err(error.with_peer(rank));
            }
        }
        Ok(())
    }

    /// Tells rank 0 of `error`, which concerns this rank, and returns it.
    fn in_trouble(&self, error: Error) -> Error {
        // What others report must name this rank, not the one that it found itself in conflict with.
        self.publish(TROUBLE, &error.clone().with_peer(self.me.rank));
        error
    }

    /// Publishes `error`, as far as the store works: the error is reported here in any case.
    fn publish(&self, key: &str, error: &Error) {
        let bytes = self.seal.write_verdict(&Verdict::Failure(error.clone()));
        if let Err(cause) = self.store.set(key, &bytes) {
            tracing::debug!(%cause, "cannot tell the other ranks why the group does not form");
        }
    }

    fn read_failure(&self, bytes: &[u8]) -> Error {
        match self.seal.read_verdict(bytes) {
            Ok(Verdict::Failure(error)) => error,
            Ok(Verdict::Table { .. }) | Err(Refused::Malformed) => Error::new(
                Code::Untrusted,
                "the store holds a report of trouble that no rank would write",
            ),
            Err(_) => Error::new(
                Code::Mismatch,
                "a rank with another version of unisono or another secret reported that it cannot join",
            ),
        }
    }

    /// A failure that concerns the whole group, as this rank reports it: it is no peer of itself.
    fn as_seen_here(&self, mut error: Error) -> Error {
        error.peer = error.peer.filter(|&peer| peer != self.me.rank);
        error
    }

    fn refusal(&self, rank: Rank, why: Refused) -> Error {
        let me = self.me.rank;
        let (code, message) = match why {
            Refused::Malformed => (
                Code::Untrusted,
                format!("what the store holds for rank {rank} is not what a rank would write"),
            ),
            Refused::Version(version) => (
                Code::Mismatch,
                format!(
                    "rank {rank} runs unisono {version}, but rank {me} runs {}: install the same on all hosts",
                    self.me.version
                ),
            ),
            Refused::SecretUse(theirs) => {
                let (with, without) = if theirs { (rank, me) } else { (me, rank) };
                (
                    Code::Mismatch,
                    format!(
                        "rank {with} has a secret (of its secret_file or its launcher), but rank {without} has none: give all \
                         ranks the same secret_file, or start all of them by one launcher"
                    ),
                )
            }
            Refused::SecretDiffers => (
                Code::Mismatch,
                format!(
                    "the secret of rank {rank} differs from the one of rank {me}: give all ranks the same secret_file, \
                     and start all of them by one launcher"
                ),
            ),
        };
        Error::new(code, message).with_peer(rank)
    }

    fn wrong_world(&self, rank: Rank, world: usize) -> Error {
        let message = format!(
            "rank {rank} was started with world size {world}, but rank {} with {}",
            self.me.rank, self.me.world
        );
        Error::new(Code::Mismatch, message)
            .with_field("world size")
            .with_peer(rank)
    }

    fn claimed_twice(&self, other: &Row) -> Error {
        let Row { pid, hostname, .. } = other;
        let Introduction {
            rank,
            pid: my_pid,
            hostname: my_host,
            ..
        } = self.me;
        Error::invalid(format!(
            "two processes claim rank {rank}: process {my_pid} on {my_host} and process {pid} on {hostname}; \
             give each its own rank, and each job a rendezvous of its own"
        ))
    }

    fn incomplete(&self, missing: &[Rank]) -> Error {
        let world = self.me.world;
        let seconds = self.timeout.as_secs_f64();
        let came: Vec<Rank> = (0..world)
            .filter(|rank| missing.binary_search(rank).is_err())
            .collect();
        let (who, whose) = match missing {
            [0] => (
                format!("rank 0 of {world}, which the others wait for, has not come"),
                "its",
            ),
            [one] => (format!("rank {one} of {world} did not join"), "its"),
            _ => (
                format!("ranks {} of {world} did not join", list(missing)),
                "their",
            ),
        };
        let those = if came.len() == 1 { "rank" } else { "ranks" };
        let (is, process) = if whose == "its" {
            ("is", "process")
        } else {
            ("are", "processes")
        };
        let use_it = if whose == "its" { "does it" } else { "do they" };
        let message = format!(
            "{who} within {seconds} s; {those} {} did; {is} {whose} {process} running, and {use_it} use the same address?",
            list(&came)
        );
        Error::new(Code::Timeout, message)
            .with_missing(missing)
            .with_peer(missing.first().copied().unwrap_or_default())
    }
}

/// Ranks in words: `0, 1, 4-9`; not more than a line of them.
fn list(ranks: &[Rank]) -> String {
    let mut runs: Vec<(Rank, Rank)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let shown = runs
        .iter()
        .take(16)
        .map(|&(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first}-{last}"),
        });
    let mut text = shown.collect::<Vec<_>>().join(", ");
    let more: usize = runs
        .iter()
        .skip(16)
        .map(|(first, last)| last - first + 1)
        .sum();
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

#[cfg(test)]
#[path = "roster_tests.rs"]
mod tests;
