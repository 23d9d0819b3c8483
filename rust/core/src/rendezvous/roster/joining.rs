//! One rank on its way into the group: it introduces itself; rank 0 collects the entries and publishes the verdict, for
//! which the others wait.
//!
//! A rank that finds itself in conflict (its number is taken, its settings are not rank 0's) says so under `trouble`,
//! which rank 0 looks at while it waits; so all ranks hear of it within about a second instead of at the timeout.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::failures::{
    claimed_twice, compare_settings, incomplete, left_over, list, refusal, wrong_world,
};
use super::{Price, Roster, entry_key, members};
use crate::error::{Code, Error, Result};
use crate::plan::cost::Rounded;
use crate::rendezvous::file_store::creator::is_running;
use crate::rendezvous::introduction::Introduction;
use crate::rendezvous::left_key;
use crate::rendezvous::records::{Entry, Refused, Row, Seal, Table, Verdict};
use crate::rendezvous::store::{MAX_VALUE, Store};
use crate::types::Rank;

/// How long rank 0 waits for entries between two looks at `trouble`.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How often a waiting rank tells what it waits for.
const REPORT: Duration = Duration::from_secs(5);
/// How much later than its own timeout a rank still takes the verdict of a rank 0 that has come: its reasons are
/// better than what the rank can find out by itself.
pub(super) const GRACE: Duration = Duration::from_millis(300);
/// How long rank 0 waits for the others to read the verdict: of those that came all wait for it, and look for it several
/// times a second. A failure has taken its time already.
const SEES_OFF: Duration = Duration::from_secs(10);
const SEES_OFF_A_FAILURE: Duration = Duration::from_secs(3);

pub(super) const VERDICT: &str = "verdict";
pub(super) const TROUBLE: &str = "trouble";

/// About how many bytes a page has: half of what a store's value may have.
const PAGE: usize = MAX_VALUE / 2;

pub(super) fn page_key(number: usize) -> String {
    format!("page/{number}")
}

pub(super) fn join_round(
    store: &dyn Store,
    me: &Introduction,
    timeout: Duration,
    price: Price<'_>,
) -> Result<Roster> {
    let joining = Joining {
        store,
        me,
        entry: me.entry(),
        seal: me.seal(),
        begun: Instant::now(),
        timeout,
    };
    let joined = joining.introduce().and_then(|()| {
        if me.rank == 0 {
            let joined = joining.lead(price);
            joining.see_off(joined.as_ref().err());
            joined
        } else {
            let joined = joining.follow();
            let failure = joined.as_ref().err();
            if let Some(error) = failure.filter(|_| !me.is_new) {
                // The group that takes others in comes again, to another meeting.
                let what = format!("rank {} has given up: {}", me.rank, error.message);
                joining.in_trouble(Error::new(Code::Aborted, what));
            }
            joining.leave(failure);
            joined
        }
    });
    // A store that no longer answers is waited for until then.
    let is_late = |error: &Error| error.code == Code::System && joining.left().is_zero();
    joined.map_err(|error| match is_late(&error) {
        true => Error {
            code: Code::Timeout,
            ..error
        },
        false => error,
    })
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
            match self.read(self.me.rank, &taken) {
                // Its process has ended while it joined, and this one was started in its place.
                Ok(other) if self.is_vacant(&other.row)? => {}
                Ok(other) => return Err(self.in_trouble(self.claimed_twice(&other.row))),
                Err(refused) => return Err(self.in_trouble(refused)),
            }
        }
        self.store.set(&key, &self.seal.write_entry(&self.entry))?;
        if self.me.rank == 0 {
            return Ok(());
        }
        if let Some(first) = self.store.get(&entry_key(0))? {
            let checked = self.read(0, &first).and_then(|first| self.compare(&first));
            checked.map_err(|error| {
                let error = self.in_trouble(error);
                self.leave(Some(&error));
                error
            })?;
        }
        Ok(())
    }

    /// Rank 0: collects all entries and publishes the verdict.
    fn lead(&self, price: Price<'_>) -> Result<Roster> {
        let table = self.collect().and_then(|rows| {
            let costs = price(&members(rows.clone()));
            self.publish_table(&rows, costs)?;
            Ok((rows, costs))
        });
        match table {
            Ok((rows, costs)) => Ok(Roster::new(rows, costs, self.me)),
            Err(error) => {
                self.publish(VERDICT, &error);
                Err(self.as_seen_here(error))
            }
        }
    }

    /// Rank 0: publishes the table of these members. It comes last: a rank that reads it finds every page.
    fn publish_table(&self, rows: &[Row], costs: Rounded) -> Result<()> {
        let pages = self.seal.write_pages(rows, PAGE);
        for (number, (_, page)) in pages.iter().enumerate() {
            self.store.set(&page_key(number), page)?;
        }
        let table = Table {
            costs,
            world: rows.len() as u32,
            pages: pages.into_iter().map(|(digest, _)| digest).collect(),
        };
        let verdict = self.seal.write_verdict(&Verdict::Table(table));
        self.store.set(VERDICT, &verdict)
    }

    /// Waits for the entries of all ranks and checks them. Returns the rows of the table.
    fn collect(&self) -> Result<Vec<Row>> {
        let mut rows = BTreeMap::from([(0, self.entry.row.clone())]);
        let mut report = self.begun + REPORT;
        while rows.len() < self.me.world {
            let glance = Instant::now() + LOOK_INTERVAL.min(self.left());
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
                        return Err(incomplete(self.me, self.timeout, &missing));
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
        for (rank, row) in &mut rows {
            if !self.may_run(row)
                && let Some(bytes) = self.store.get(&entry_key(*rank))?
            {
                // Another process may have been started in its place.
                *row = self.accept(*rank, &bytes)?;
            }
        }
        Ok(rows.into_values().collect())
    }

    /// Another rank than 0: says that it needs the store no longer.
    fn leave(&self, failure: Option<&Error>) {
        // A store that has failed would be asked in vain.
        if failure.is_none_or(|error| error.code != Code::System) {
            let world = self.me.world.to_string();
            // If it fails now, no rank waits.
            let _ = self.store.set(&left_key(self.me.rank), world.as_bytes());
        }
    }

    /// Rank 0: waits until the ranks that came have read the verdict, since the end of this process may be the end of the
    /// store. One that dies meanwhile is waited for no longer than its host tells, or for so long in vain.
    fn see_off(&self, failure: Option<&Error>) {
        let patience = match failure {
            None => SEES_OFF,
            Some(error) if error.code == Code::System => return,
            Some(_) => SEES_OFF_A_FAILURE,
        };
        if !self.store.ends_with_rank_0() {
            return;
        }
        let until = Instant::now() + patience;
        for rank in 1..self.me.world {
            if self.see_off_one(rank, until).is_err() {
                // No rank can read from it any more.
                return;
            }
        }
    }

    fn see_off_one(&self, rank: Rank, until: Instant) -> Result<()> {
        let mut pause = Duration::from_millis(50);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.store.wait(&left_key(rank), pause.min(left)) {
                Ok(_) => return Ok(()),
                Err(error) if error.code == Code::Timeout => {}
                Err(error) => return Err(error),
            }
            pause = (pause * 2).min(LOOK_INTERVAL);
            let entry = self.store.get(&entry_key(rank))?;
            let entry = entry.and_then(|bytes| self.seal.read_entry(&bytes).ok());
            let may_come = entry.is_some_and(|entry| self.may_run(&entry.row));
            if !may_come || Instant::now() >= until {
                return Ok(());
            }
        }
    }

    /// Whether another process may take the place of the one of this row, which has ended before the group formed. A store
    /// that outlives its job keeps what its processes have left.
    fn is_vacant(&self, row: &Row) -> Result<bool> {
        let has_ended = !self.may_run(row) && self.store.relic().is_none();
        Ok(has_ended && self.store.get(VERDICT)?.is_none())
    }

    /// Whether the process of this row runs, as far as can be told: on this host, if its number is one of a process here.
    fn may_run(&self, row: &Row) -> bool {
        row.host != self.entry.row.host || is_running(row.pid)
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
        if entry.row.attempt != self.entry.row.attempt {
            return Err(self.claimed_twice(&entry.row));
        }
        Ok(())
    }

    /// Another rank than 0: waits for the verdict.
    fn follow(&self) -> Result<Roster> {
        let mut pause = LOOK_INTERVAL;
        loop {
            match self.store.wait(VERDICT, self.left().min(pause)) {
                Ok(verdict) => return self.conclude(&verdict),
                Err(error) if error.code == Code::Timeout => pause = REPORT,
                // It leaves for a reason of its own, and rank 0 has its entry already.
                Err(error) if error.code == Code::Aborted => return Err(self.in_trouble(error)),
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
        let table = match verdict.map_err(|why| self.refusal(0, why))? {
            Verdict::Table(table) => table,
            // It has come: the verdict is of another meeting.
            Verdict::Failure(error)
                if error.code == Code::Timeout && error.peer == Some(self.me.rank) =>
            {
                return Err(self.may_be_left_over(self.as_seen_here(error)));
            }
            Verdict::Failure(error) => return Err(self.as_seen_here(error)),
        };
        if table.world as usize != self.me.world {
            return Err(self.wrong_world(0, table.world as usize));
        }
        let rows = self.read_pages(&table)?;
        let mine = &rows[self.me.rank];
        if mine.attempt != self.entry.row.attempt {
            return Err(self.claimed_twice(mine));
        }
        Ok(Roster::new(rows, table.costs, self.me))
    }

    /// The members of `table`, as many as this rank expects.
    fn read_pages(&self, table: &Table) -> Result<Vec<Row>> {
        let refused = |why| self.refusal(0, why);
        let mut rows = Vec::new();
        for (number, named) in table.pages.iter().enumerate() {
            // Each of them brings members, so what is read has a bound.
            let left = self.me.world - rows.len();
            let page = self.store.get(&page_key(number))?;
            let page = page.ok_or_else(|| refused(Refused::Malformed))?;
            let members = self.seal.read_page(&page, named).map_err(refused)?;
            if !(1..=left).contains(&members.len()) {
                return Err(refused(Refused::Malformed));
            }
            rows.extend(members);
        }
        match rows.len() == self.me.world {
            true => Ok(rows),
            false => Err(refused(Refused::Malformed)),
        }
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
        Ok(incomplete(self.me, self.timeout, &missing))
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

    fn refusal(&self, rank: Rank, why: Refused) -> Error {
        self.may_be_left_over(refusal(self.me, rank, why))
    }

    fn wrong_world(&self, rank: Rank, world: usize) -> Error {
        self.may_be_left_over(wrong_world(self.me, rank, world))
    }

    fn claimed_twice(&self, other: &Row) -> Error {
        self.may_be_left_over(claimed_twice(self.me, other))
    }

    /// A failure that the store itself may have caused, by the entries of an earlier job.
    fn may_be_left_over(&self, error: Error) -> Error {
        match self.store.relic() {
            Some(relic) => left_over(error, &relic),
            None => error,
        }
    }

    /// Checks that `other` and this rank want the same group.
    fn compare(&self, other: &Entry) -> Result<()> {
        let rank = other.rank as Rank;
        if other.world != self.entry.world {
            return Err(self.wrong_world(rank, other.world as usize));
        }
        compare_settings(self.me, &self.entry, other).map_err(|error| self.may_be_left_over(error))
    }

    /// Tells rank 0 of `error`, which concerns this rank, and returns it.
    fn in_trouble(&self, error: Error) -> Error {
        // The reports of others must name this rank, not the one that it found itself in conflict with.
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
            Ok(Verdict::Table(_)) | Err(Refused::Malformed) => Error::new(
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
}
