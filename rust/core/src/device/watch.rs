//! The attendant's work for a group, which a thread that waits for one of its operations also does: ends operations
//! that streams have got past, lets them pass after a failure, finds out about mismatches, deaths and deadlines, and
//! puts waits into words.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::engine::{Driven, Fingerprint, WorkState};
use crate::error::{Code, Error, Result};
use crate::plan::Plan;
use crate::transport::cuda::flags::{Announced, Mark};
use crate::types::Rank;

use super::attendant::{self, Found};
use super::direct::{Direct, Progress};
use super::disposal::dispose;
use super::message::Ended;
use super::staged::Staged;
use super::state::{DeviceGroup, GRACE, HOST_PATIENCE, Pending, Way};
use super::words::Word;

/// How often deadlines and the state of peers are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// How long something is under way before it is asked whether the device still works, and how long until the next time.
const SUSPICIOUS: Duration = Duration::from_secs(1);
impl DeviceGroup {
    /// Ends the operations that the stream has got past.
    pub(crate) fn settle(&self) {
        let mut passed = Vec::new();
        {
            let mut board = self.board.lock();
            while let Some(front) = board.pending.front()
                && self.words.has_passed(Word::Done, front.number)
            {
                passed.extend(board.pending.pop_front());
            }
        }
        for mut pending in passed {
            let verdict = self.compare(&mut pending).and_then(|()| self.check_peers());
            if let Err(error) = &verdict {
                self.fail(error.clone());
            }
            let result = match self.failure.get() {
                Some((error, _)) => Err(Error {
                    operation: None,
                    ..error.clone()
                }),
                None => verdict,
            };
            self.parent.end(&pending.work, result);
        }
    }

    /// Compares what the peers have announced of an operation with this rank's.
    fn compare(&self, pending: &mut Pending) -> Result<()> {
        let way = self.way.read();
        let Some(Way::Direct(direct)) = way.as_deref() else {
            return Ok(());
        };
        for peer in pending.unheard.iter() {
            let announced = direct.flags.announced(peer, pending.number - 1);
            if let Announced::As(bytes) = announced
                && let Some(theirs) = Fingerprint::decode(&bytes)
                && theirs != pending.print
            {
                let error = self.parent.mismatch((&pending.print, &theirs), peer);
                return Err(error.with_operation(pending.work.name()));
            }
            if announced != Announced::NotYet {
                pending.unheard = pending.unheard.without(peer);
            }
        }
        Ok(())
    }

    /// Refuses what peers that have failed may have spoilt.
    pub(super) fn check_peers(&self) -> Result<()> {
        let way = self.way.read();
        let Some(Way::Direct(direct)) = way.as_deref() else {
            return Ok(());
        };
        let Some(peer) = direct.flags.marked(Mark::Failed).next() else {
            return Ok(());
        };
        drop(way);
        // It has told the host's group why, or is about to.
        Err(self.cpu.lost(|_| true).unwrap_or_else(|| {
            Error::new(
                Code::Aborted,
                format!(
                    "{} has failed in an earlier operation",
                    self.cpu.name_of(peer)
                ),
            )
            .with_peer(peer)
        }))
    }

    /// The group is dead of `error`; the first one stays.
    pub(super) fn fail(&self, error: Error) {
        if self.failure.set((error.clone(), Instant::now())).is_err() {
            return;
        }
        self.cpu.fail_of(error.clone());
        self.parent.fail_of(error);
        self.release();
        attendant::wake();
    }

    /// Lets streams pass whatever they wait for.
    pub(super) fn release(&self) {
        // First of all: no kernel of a stream that passes reads what a peer that is gone had mapped, nor makes a result of it.
        self.words.store(Word::Dead, 1);
        let since = self.failure.get().map(|(_, since)| since.elapsed());
        let way = self.way.read();
        if let Some(Way::Direct(direct)) = way.as_deref() {
            // Before anything that streams do when they are let pass.
            direct.flags.mark(Mark::Failed);
            let places = direct.places.as_deref();
            // Later commands of a stream may use the buffers for something else.
            if !places.is_some_and(|places| places.may_be_written(since.unwrap_or(Duration::MAX))) {
                direct.flags.release();
            }
        }
        if let Some(staged) = way.as_deref().and_then(Way::staged) {
            staged.release(&self.words);
        }
        drop(way);
        // Streams go on in order also now, so that the end of the last is the end of all. None waits for one that is torn: a
        // group that has failed takes nothing more.
        self.messages
            .release(since.is_some_and(|since| since > HOST_PATIENCE));
    }

    /// Whether the attendant is needed.
    pub(super) fn is_busy(&self) -> bool {
        !self.board.lock().pending.is_empty()
            || !self.messages.works().is_empty()
            || self.closed.get().is_some()
            || self.is_captured()
    }

    /// The attendant's turn.
    pub(super) fn attend(self: &Arc<Self>) -> Found {
        self.settle();
        let mut ended = Vec::new();
        let found = match self.failure.get() {
            None => self.advance(&mut ended),
            Some((error, since)) => {
                self.release();
                self.abandon(error, self.is_lost() || since.elapsed() > GRACE);
                match self.is_drained() {
                    true => Ok(Found::Nothing),
                    false => Ok(Found::Streams),
                }
            }
        };
        for (work, result) in ended {
            // If another thread has failed the group meanwhile, the stream was let pass.
            let result = match self.failure.get() {
                Some((error, _)) => result.and(Err(Error {
                    operation: None,
                    ..error.clone()
                })),
                None => result,
            };
            self.parent.end(&work, result);
        }
        let found = found.unwrap_or_else(|error| {
            self.fail(error);
            Found::Moved
        });
        let found = match found {
            // Streams that replay graphs still have to be let pass.
            Found::Nothing if self.failure.get().is_some() && self.is_replaying() => Found::Streams,
            Found::Nothing if self.is_captured() => Found::Graphs,
            found => found,
        };
        match self.closed.get() {
            Some(since) => self.take_down(*since, found),
            None => found,
        }
    }

    /// Moves what can be moved, and looks around now and then.
    fn advance(&self, ended: &mut Vec<Ended>) -> Result<Found> {
        let (mut moved, mut duty) = (false, false);
        let way = self.way.read();
        if let Some(staged) = way.as_deref().and_then(Way::staged) {
            (moved, duty) = staged.advance(&self.words)?;
        }
        drop(way);
        let messages = self.messages.advance(&self.cpu, ended)?;
        moved |= messages.0;
        duty |= messages.1;
        // The progress thread would look some tenths of a millisecond later.
        if duty {
            moved |= self.cpu.drive(false).moved;
        }
        self.look_around()?;
        let waits = !self.board.lock().pending.is_empty();
        Ok(match (moved, duty, waits) {
            (true, _, _) => Found::Moved,
            (_, true, _) => Found::Duty,
            (_, _, true) => Found::Streams,
            _ => Found::Nothing,
        })
    }

    /// Ends what failed, where neither the stream nor the host uses its memory any more, or `all` of it.
    fn abandon(&self, error: &Error, all: bool) {
        let mut ended = Vec::new();
        self.messages.abandon(all, &mut ended);
        if all {
            let mut board = self.board.lock();
            ended.extend(board.pending.drain(..).map(|pending| pending.work));
        }
        for work in ended {
            let error = Error {
                operation: None,
                ..error.clone()
            };
            self.parent.end(&work, Err(error));
        }
    }

    /// Whether the device carries out nothing any more.
    pub(super) fn is_lost(&self) -> bool {
        self.health.lost.get().is_some()
    }

    /// Whether no stream is in an operation of this group, as far as it told.
    pub(super) fn is_drained(&self) -> bool {
        let (last, is_torn) = {
            let board = self.board.lock();
            (board.last, board.is_torn)
        };
        let failed = self.failure.get();
        if is_torn && failed.is_some_and(|(_, since)| since.elapsed() < GRACE) {
            return false;
        }
        let way = self.way.read();
        let staged = way.as_deref().and_then(Way::staged);
        let host = staged.is_none_or(Staged::is_quiet);
        let has_passed = self.words.has_passed(Word::Done, last) || self.is_lost();
        host && has_passed && self.messages.works().is_empty()
    }

    /// Looks for mismatches, deaths and deadlines.
    fn look_around(&self) -> Result<()> {
        let now = Instant::now();
        let mut board = self.board.lock();
        let due = board.looked.is_none_or(|last| now >= last + LOOK_INTERVAL);
        if !due || (board.pending.is_empty() && !self.is_captured()) {
            return Ok(());
        }
        board.looked = Some(now);
        if board.pending.is_empty() {
            drop(board);
            return self.look_at_replay(now);
        }
        for pending in board.pending.iter_mut().take(16) {
            self.compare(pending)?;
        }
        // Operations of the host end at the same time, and their errors say more about the ranks that are missing.
        let slack = match self.has_duty() {
            true => Duration::from_secs(1),
            false => Duration::ZERO,
        };
        let is_late = |deadline: Instant| now >= deadline + slack;
        let late = board
            .pending
            .iter()
            .find(|pending| pending.work.deadline.is_some_and(is_late))
            .map(|pending| Arc::clone(&pending.work));
        let front = board.pending.front();
        let first = front.map(|pending| pending.number - 1);
        let since = front.map(|pending| pending.work.started);
        drop(board);
        self.check_peers()?;
        if let Some(error) = self.parent.error() {
            return Err(error);
        }
        if let Some(error) = self.cpu.lost(|peer| self.has_not_called(peer, first)) {
            return Err(error);
        }
        self.look_at_context(now, since)?;
        if self.is_captured() {
            self.look_at_replay(now)?;
        }
        match late {
            Some(work) if work.result().is_none() => Err(self.overdue(&work)),
            _ => Ok(()),
        }
    }

    /// Looks now and then, while something has been under way since `since` for so long that it is suspicious, whether the
    /// device's context is lost: streams then say nothing any more.
    ///
    /// No call of the driver that shows this is sure to return at once: each may wait for a lock, held by a thread that
    /// waits for room in a stream, which waits for the attendant. So a thread of its own makes the call. It is one that
    /// is allowed while graphs are captured.
    pub(super) fn look_at_context(&self, now: Instant, since: Option<Instant>) -> Result<()> {
        if let Some(error) = self.health.lost.get() {
            return Err(error.clone());
        }
        if since.is_none_or(|since| now < since + SUSPICIOUS) {
            return Ok(());
        }
        {
            let mut board = self.board.lock();
            if board.asked.is_some_and(|last| now < last + SUSPICIOUS)
                || self.health.being_asked.swap(true, Ordering::AcqRel)
            {
                return Ok(());
            }
            board.asked = Some(now);
        }
        let (device, health) = (self.device, Arc::clone(&self.health));
        dispose(move || {
            if let Some(error) = device.lost() {
                let _ = health.lost.set(error);
            }
            health.being_asked.store(false, Ordering::Release);
        });
        Ok(())
    }

    /// Whether a peer has not come to operation `number`, counted from 0.
    fn has_not_called(&self, peer: Rank, number: Option<u64>) -> bool {
        // The caller may hold what a thread waits for that has the way for reading, and another wait for writing.
        match (self.way.read_recursive().as_deref(), number) {
            (Some(Way::Direct(direct)), Some(number)) => {
                direct.flags.announced(peer, number) == Announced::NotYet
            }
            _ => false,
        }
    }

    fn overdue(&self, work: &WorkState) -> Error {
        let (words, blamed) = self.waits();
        let mut error = Error::new(
            Code::Timeout,
            format!(
                "timed out after {:.3} s on {}: {words}; is that rank stuck, slow, or in another operation?",
                work.started.elapsed().as_secs_f64(),
                self.parent.own_number(),
            ),
        )
        .with_operation(work.name());
        error.peer = blamed;
        error
    }

    /// A description of the wait, in words.
    pub(crate) fn describe(&self) -> String {
        self.waits().0
    }

    /// In words, and the first rank that is waited for.
    fn waits(&self) -> (String, Option<Rank>) {
        let board = self.board.lock();
        let Some(front) = board.pending.front() else {
            drop(board);
            return match self.replay_waits() {
                Some(waits) => waits,
                None => (self.cpu.waits(), None),
            };
        };
        let name = front.work.name();
        let way = self.way.read();
        let (Some(Way::Direct(direct)), Some(plan)) = (way.as_deref(), &front.plan) else {
            return match self.words.has_passed(Word::Begun, front.number) {
                true => (format!("{name}: {}", self.cpu.waits()), None),
                false => (not_there(&name), None),
            };
        };
        let (missing, what) = match direct.progress(plan, front.number, front.first_wait) {
            Progress::WaitsFor(missing, what) => (missing, what),
            Progress::Works => {
                return (format!("{name} is being carried out on the device"), None);
            }
            Progress::Before => return (not_there(&name), None),
            Progress::Unknown => {
                let text = "it, or work that was enqueued before it, is still under way";
                return (format!("{name} has not ended on the device: {text}"), None);
            }
        };
        let described = missing.iter().map(|&peer| {
            let state = match direct.flags.announced(peer, front.number - 1) {
                Announced::NotYet => "has not called it",
                _ => "has called it, its stream has not come to it",
            };
            format!("{} ({state})", self.cpu.name_of(peer))
        });
        let described: Vec<String> = described.collect();
        let text = format!("{name} waits for {} {what}", described.join(", "));
        (text, missing.first().copied())
    }

    /// The ranks that a stream waits for at a step of operation `number`, and in words for what.
    pub(super) fn missing_at(
        &self,
        direct: &Direct,
        plan: &Plan,
        (step, number): (usize, u64),
    ) -> (Vec<Rank>, &'static str) {
        match plan.steps.get(step) {
            Some(step) => direct.missing(step, number),
            None => (Vec::new(), ""),
        }
    }
}

fn not_there(name: &str) -> String {
    format!(
        "this rank's stream has not come to {name} yet: work that was enqueued before it is still under way"
    )
}
