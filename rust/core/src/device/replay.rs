//! The host's knowledge of collectives that are part of graphs.
//!
//! A graph does the same each time, so streams can only write constants: which of the captured collectives they are in
//! ([`Word::Replayed`]), and at which of its steps they wait. That is enough to see that a stream waits, and for which
//! ranks. It is not enough to tell two replays apart, so they have no deadline.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::error::{Code, Error, Result};
use crate::types::Rank;

use super::state::{DeviceGroup, GRACE, Place, Way};
use super::words::{PASSED, Word, replayed};

/// The wait of a replay.
struct Wait {
    name: String,
    missing: Vec<Rank>,
    what: &'static str,
}

impl DeviceGroup {
    /// Whether there are graphs that may be replayed at any time.
    pub(super) fn is_captured(&self) -> bool {
        self.captured.load(Ordering::Relaxed)
    }

    /// Whether a stream is in an operation of this group as part of a graph.
    pub(super) fn is_replaying(&self) -> bool {
        let lanes = &self.messages.lanes;
        self.words.load(Word::Replayed) != 0 || lanes.waits(&self.words, Instant::now()).is_some()
    }

    /// Looks whether a replay waits for a rank that is gone. While no replay is under way nothing waits, and ranks that
    /// have died or left do not matter here.
    pub(super) fn look_at_replay(&self, now: Instant) -> Result<()> {
        let place = (self.words.load(Word::Replayed), self.words.load(Word::Step));
        if place.0 == 0 {
            self.board.lock().replays.waits = None;
            return self.look_at_lanes(now);
        }
        self.check_peers()?;
        if let Some(error) = self.parent.error() {
            return Err(error);
        }
        let waited = self.board.lock().replays.waited(place, now);
        let wait = self.wait_at(place);
        // A rank that has left in good order may have done its part, or be about to: its streams have not left with it.
        let is_stuck = waited >= GRACE;
        if let Some(error) = self
            .cpu
            .lost(|peer| is_stuck && wait.missing.contains(&peer))
        {
            return Err(error);
        }
        if is_stuck && !wait.missing.is_empty() && self.closed.get().is_some() {
            return Err(Error::new(
                Code::Aborted,
                format!(
                    "{} closed its communicator while a graph was being replayed: {}",
                    self.parent.own_number(),
                    self.in_words(&wait)
                ),
            ));
        }
        self.look_at_context(now, now.checked_sub(waited))
    }

    /// The same, of the messages in graphs.
    fn look_at_lanes(&self, now: Instant) -> Result<()> {
        let Some((missing, waited)) = self.messages.lanes.waits(&self.words, now) else {
            return Ok(());
        };
        self.check_peers()?;
        if let Some(error) = self.parent.error() {
            return Err(error);
        }
        let is_stuck = waited >= GRACE;
        if let Some(error) = self.cpu.lost(|peer| is_stuck && missing.contains(&peer)) {
            return Err(error);
        }
        if is_stuck && self.closed.get().is_some() {
            return Err(Error::new(
                Code::Aborted,
                format!(
                    "{} closed its communicator while a graph was being replayed: {}",
                    self.parent.own_number(),
                    self.lanes_in_words(&missing)
                ),
            ));
        }
        self.look_at_context(now, now.checked_sub(waited))
    }

    fn lanes_in_words(&self, missing: &[Rank]) -> String {
        let missing: Vec<String> = missing.iter().map(|peer| self.cpu.name_of(*peer)).collect();
        format!(
            "a message waits, as part of a graph, for {}",
            missing.join(", ")
        )
    }

    /// The wait of a replay, in words, and the first rank that it waits for.
    pub(super) fn replay_waits(&self) -> Option<(String, Option<Rank>)> {
        let place = (self.words.load(Word::Replayed), self.words.load(Word::Step));
        if place.0 == 0 {
            let (missing, _) = self.messages.lanes.waits(&self.words, Instant::now())?;
            return Some((self.lanes_in_words(&missing), missing.first().copied()));
        }
        let wait = self.wait_at(place);
        Some((self.in_words(&wait), wait.missing.first().copied()))
    }

    fn wait_at(&self, (number, step): Place) -> Wait {
        let board = self.board.lock();
        let mut captured = board.replays.captured.iter();
        let Some(found) = captured.find(|one| replayed(one.number) == number) else {
            return Wait {
                name: "a collective".to_owned(),
                missing: Vec::new(),
                what: "",
            };
        };
        let (name, plan) = (found.work.name(), Arc::clone(&found.plan));
        let number = found.number;
        drop(board);
        let (missing, what) = match self.way.read().as_deref() {
            Some(Way::Direct(direct)) => self.missing_at(direct, &plan, (step as usize, number)),
            _ => (Vec::new(), ""),
        };
        // It may have gone on meanwhile.
        let is_there = step != PASSED && self.words.load(Word::Step) == step;
        Wait {
            name,
            missing: if is_there { missing } else { Vec::new() },
            what,
        }
    }

    fn in_words(&self, wait: &Wait) -> String {
        if wait.missing.is_empty() {
            return format!("a graph is being replayed, and has come to {}", wait.name);
        }
        let missing: Vec<String> = wait
            .missing
            .iter()
            .map(|peer| self.cpu.name_of(*peer))
            .collect();
        format!(
            "{} waits, as part of a graph, for {} {}",
            wait.name,
            missing.join(", "),
            wait.what
        )
    }
}
