//! One rank's part in an operation that the ranks of a host may do in the memory they share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::buffer::Memory;
use crate::error::{Code, Error, Result};
use crate::heap::Window;
use crate::plan::in_place;
use crate::plan::links::LENT_IN_PLACE_FROM;
use crate::plan::select::Choice;
use crate::transport::{Loan, Shareable, SharedSpan};
use crate::types::{Algorithm, Collective, Rank};

use super::agreement::{AgreementRound, Free, Proposal};
use super::in_place_run::InPlaceRun;
use super::window_run::WindowRun;
use super::{Decision, Host, SharedMemory, WindowState, Windows, windows};
use crate::engine::collective::operands::Operands;
use crate::engine::collective::plan_key::PlanKey;
use crate::engine::collective::run::Waiting;
use crate::engine::links::{Direction, LinkTable};

/// Where an operation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunState {
    /// It has not begun.
    New,
    /// The ranks open their windows to each other.
    Opening,
    /// Proposals are under way.
    Agreeing,
    /// The decision is known.
    UnderWay,
    /// It is to go by messages, and uses nothing here any more.
    Declined,
    Done,
}

/// One rank's part in such an operation.
#[derive(Debug)]
pub(crate) struct SharedRun {
    pub(crate) key: PlanKey,
    /// The algorithms of shared memory that serve it for less than messages.
    choice: Choice,
    /// The user has asked for one of them: neither back-off nor preference stands against it.
    is_asked_for: bool,
    host: Host,
    round: AgreementRound,
    /// While windows are being opened.
    own_window: Option<Window>,
    decision: Option<Decision>,
    in_place_run: Option<InPlaceRun>,
    window_run: Option<WindowRun>,
    /// Since when all go through windows, and how long this rank has worked there before.
    since: Option<Instant>,
    before: Duration,
    state: RunState,
}

impl SharedRun {
    /// For an operation of the ranks of `host`.
    pub(crate) fn new(key: PlanKey, choice: Choice, is_asked_for: bool, host: Host) -> Self {
        Self {
            key,
            choice,
            is_asked_for,
            host,
            round: AgreementRound::new(host.world),
            own_window: None,
            decision: None,
            in_place_run: None,
            window_run: None,
            since: None,
            before: Duration::ZERO,
            state: RunState::New,
        }
    }

    /// The one that the ranks have agreed on, if it is one of shared memory.
    pub(crate) fn algorithm(&self) -> Option<Algorithm> {
        match self.decision? {
            Decision::InPlace => Some(Algorithm::InPlace),
            Decision::Windows => Some(Algorithm::Windows),
            Decision::Messages => None,
        }
    }

    pub(crate) fn state(&self) -> RunState {
        self.state
    }

    /// Whether it is known how the operation is done.
    pub(crate) fn is_decided(&self) -> bool {
        self.decision.is_some() || self.state == RunState::Declined
    }

    /// Whether it will use links no more.
    pub(crate) fn has_left_links(&self, operands: &Operands) -> bool {
        self.state == RunState::Done
            || (self.decision == Some(Decision::Windows) && self.round.is_settled(operands))
    }

    /// Moves it as far as that goes now. Returns whether anything moved. `is_next`: all operations before it have
    /// been decided.
    pub(crate) fn advance(
        &mut self,
        operands: &mut Operands,
        links: &mut LinkTable,
        free: Free<'_>,
        (memory, is_next): (&mut SharedMemory, bool),
    ) -> Result<bool> {
        if self.state == RunState::New && !is_next {
            return Ok(false);
        }
        let mut moved = false;
        if self.state == RunState::New {
            self.begin(operands, memory);
            moved = true;
        }
        if self.state == RunState::Opening {
            moved |= self.open(operands, links, free, memory)?;
        }
        if self.state == RunState::Agreeing {
            moved |= self.agree(operands, links, free, memory)?;
        }
        if self.state == RunState::UnderWay {
            moved |= match self.decision {
                Some(Decision::InPlace) => self.work_in_place(operands, links, memory)?,
                Some(Decision::Windows) => self.work_in_windows(operands, links, memory)?,
                Some(Decision::Messages) | None => self.retreat(operands, links)?,
            };
        }
        Ok(moved)
    }

    fn begin(&mut self, operands: &Operands, memory: &mut SharedMemory) {
        if self.choice.windows && memory.are_open() && !self.is_asked_for {
            self.choice.windows = memory.speed.attempts();
        }
        // An all_reduce goes through windows if it is not done in place: a round about it is never in vain.
        let is_certain = self.is_asked_for || operands.collective == Collective::AllReduce;
        self.state = match memory.windows {
            WindowState::Unknown if self.choice.windows => RunState::Opening,
            WindowState::Open(_) if self.choice.windows && is_certain => RunState::Agreeing,
            WindowState::Closed if !self.choice.in_place => RunState::Declined,
            _ if !self.choice.needs_agreement() => RunState::Declined,
            _ if self.is_asked_for => RunState::Agreeing,
            _ => {
                let attempts = memory
                    .agreements
                    .attempts(operands.collective, self.key.count);
                match attempts {
                    true => RunState::Agreeing,
                    false => RunState::Declined,
                }
            }
        };
        if self.state == RunState::Opening {
            self.own_window = windows::create(operands.rank, &self.host);
        }
    }

    /// Shows the others this rank's window, and receives theirs.
    fn open(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        free: Free<'_>,
        memory: &mut SharedMemory,
    ) -> Result<bool> {
        let own = self.own_window.as_ref();
        let (round, header) = (&mut self.round, operands.header(0));
        if round.proposal.is_none() {
            round.propose(operands, links, free, Proposal::Offer, |link| match own {
                Some(window) => link.can_share(Shareable::Window(window)),
                None => Some(false),
            });
        }
        let mut moved = false;
        if matches!(memory.windows, WindowState::Unknown) {
            moved |= round.send(
                operands,
                links,
                |_| header,
                |link, _, header| {
                    let window = own.ok_or_else(|| Error::internal("no window to show"))?;
                    link.try_share(header, Shareable::Window(window))
                },
            )?;
            moved |= round.receive(operands, links, free, &header)?;
            if !round.is_complete(operands) {
                return Ok(moved);
            }
            let all = round.all_propose(operands, Proposal::Offer);
            let held = round.keep_offered(links);
            memory.windows = match self.own_window.take().filter(|_| all) {
                Some(own) => Windows::new(operands.rank, own, held, &self.host)
                    .map(|windows| WindowState::Open(Box::new(windows)))
                    .ok_or_else(|| Error::internal("a peer's window has another size"))?,
                None => WindowState::Closed,
            };
            tracing::debug!(
                rank = operands.rank,
                open = all,
                "windows between the ranks of this host"
            );
        }
        if !self.round.is_back(operands, links, Loan::Returned)? {
            return Ok(moved);
        }
        self.round = AgreementRound::new(operands.world);
        self.begin(operands, memory);
        Ok(true)
    }

    /// Exchanges proposals, and decides.
    fn agree(
        &mut self,
        operands: &mut Operands,
        links: &mut LinkTable,
        free: Free<'_>,
        memory: &mut SharedMemory,
    ) -> Result<bool> {
        let mut moved = false;
        if self.round.proposal.is_none() {
            self.propose(operands, links, free, memory);
        }
        let is_private = matches!(
            self.round.proposal,
            Some(Proposal::Private | Proposal::SlowWindows)
        );
        if is_private && self.choice.windows {
            // It goes through the windows if there are any: what others wait for comes first.
            moved |= self.advance_in_windows(operands, links, memory, true)?;
        }
        let expected = operands.header(offered_slice(operands, operands.rank).1);
        moved |= self.round.send(
            operands,
            links,
            |peer| operands.header(offered_slice(operands, peer).1),
            |link, peer, header| {
                let (start, bytes) = offered_slice(operands, peer);
                let place = operands.buffers.output().place(start, bytes);
                link.try_share(header, Shareable::Span(place))
            },
        )?;
        moved |= self.round.receive(operands, links, free, &expected)?;
        self.check_offers(operands)?;
        if self.round.is_complete(operands) {
            self.decide(operands, links, memory);
            moved = true;
        }
        Ok(moved)
    }

    fn propose(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        free: Free<'_>,
        memory: &mut SharedMemory,
    ) {
        let (wish, place) = self.wish(operands);
        self.round.propose(operands, links, free, wish, |link| {
            place.map_or(Some(true), |place| link.can_share(Shareable::Span(place)))
        });
        // Once, so that all peers receive the same.
        let goes = self.choice.windows && memory.are_open();
        if self.round.proposal == Some(Proposal::Private) && goes && memory.speed.report() {
            self.round.proposal = Some(Proposal::SlowWindows);
        }
    }

    /// The proposal of this rank, and the memory that its peers must reach for it; if they do not, it is
    /// [`Proposal::Private`].
    fn wish(&self, operands: &Operands) -> (Proposal, Option<(usize, usize)>) {
        let one_piece = |memory: &Memory| {
            let place = memory.place(0, memory.len());
            (place.1 == memory.len()).then_some(place)
        };
        if operands.collective == Collective::AllReduce {
            let offers = self.choice.in_place && self.key.in_place;
            let whole = one_piece(operands.buffers.output()).filter(|_| offers);
            return (whole.map_or(Proposal::Private, |_| Proposal::Offer), whole);
        }
        if self.is_asked_for {
            return (Proposal::Private, None);
        }
        let is_read = match operands.collective {
            Collective::Broadcast => operands.rank == self.key.root,
            Collective::Reduce => operands.rank != self.key.root,
            _ => true,
        };
        if !is_read {
            return (Proposal::PreferMessages, None);
        }
        // Messages read it where it lies, if it lies in the heap and they are long enough to be lent.
        let is_lent = self.key.count * operands.elements.dtype.size() >= LENT_IN_PLACE_FROM;
        let whole = one_piece(operands.buffers.source()).filter(|_| is_lent);
        let wish = whole.map_or(Proposal::Private, |_| Proposal::PreferMessages);
        (wish, whole)
    }

    /// Refuses an offer that is not a slice of the buffer.
    fn check_offers(&mut self, operands: &Operands) -> Result<()> {
        let (_, own) = offered_slice(operands, operands.rank);
        let unfit =
            |(_, shared): &(Rank, &mut SharedSpan)| shared.bytes() != own || !shared.is_writable();
        let Some((peer, shared)) = self.round.offered().find(unfit) else {
            return Ok(());
        };
        let what = match shared.is_writable() {
            true => format!("{} bytes where this rank's slice has {own}", shared.bytes()),
            false => "memory that cannot be written".to_owned(),
        };
        let error = Error::new(Code::Untrusted, format!("rank {peer} shares {what}"));
        Err(error.with_peer(peer))
    }

    /// All proposals have been sent and received.
    fn decide(&mut self, operands: &Operands, links: &mut LinkTable, memory: &mut SharedMemory) {
        let all_offer = self.round.all_propose(operands, Proposal::Offer);
        if !all_offer {
            self.round.decline(links);
        }
        let through_windows = self.choice.windows
            && memory.are_open()
            && !self.round.all_propose(operands, Proposal::PreferMessages);
        let decision = match (all_offer, through_windows) {
            (true, _) => Decision::InPlace,
            (false, true) => Decision::Windows,
            (false, false) => Decision::Messages,
        };
        let (collective, count) = (operands.collective, self.key.count);
        if decision == Decision::Windows && self.round.any_proposes(operands, Proposal::SlowWindows)
        {
            let skipped = memory.speed.note(true);
            tracing::debug!(
                rank = operands.rank, %collective, count, skipped,
                "a rank found the windows slow: so many operations avoid them"
            );
        } else if decision == Decision::Windows {
            memory.speed.note(false);
        }
        let agreed = decision != Decision::Messages;
        let skipped = memory.agreements.note(collective, count, agreed);
        let times = memory.decided.count(decision);
        if times.is_power_of_two() {
            let own = self.round.proposal;
            tracing::debug!(
                rank = operands.rank, %collective, count, ?decision, ?own, times, skipped,
                "the ranks of this host have agreed on how to do a collective; so many of this size do without a round"
            );
        }
        (self.decision, self.state) = (Some(decision), RunState::UnderWay);
    }

    /// Works in the ranks' own buffers, and waits until everything offered has come back.
    fn work_in_place(
        &mut self,
        operands: &mut Operands,
        links: &mut LinkTable,
        memory: &mut SharedMemory,
    ) -> Result<bool> {
        if self.in_place_run.is_none() {
            let plan = memory.in_place_plan(self.key, (operands.rank, operands.world))?;
            let (slice, _) = offered_slice(operands, operands.rank);
            let run = InPlaceRun::new(plan, slice);
            if run.is_done() {
                // Its slice is empty.
                self.round.give_back(links);
            }
            self.in_place_run = Some(run);
        }
        if let Some(run) = self.in_place_run.as_mut().filter(|run| !run.is_done()) {
            if !run.advance(operands, self.round.offered()) {
                return Ok(false);
            }
            if run.is_done() {
                self.round.give_back(links);
            }
            return Ok(true);
        }
        let is_back = self.round.is_back(operands, links, Loan::Returned)?;
        if is_back {
            self.state = RunState::Done;
        }
        Ok(is_back)
    }

    /// Goes through the windows.
    fn work_in_windows(
        &mut self,
        operands: &mut Operands,
        links: &mut LinkTable,
        memory: &mut SharedMemory,
    ) -> Result<bool> {
        let moved = self.advance_in_windows(operands, links, memory, false)?;
        if self.window_run.is_some() {
            self.since.get_or_insert_with(|| memory.clock.now());
        }
        // The operations after it wait for the links.
        let is_back = self.round.is_settled(operands)
            || self.round.is_back(operands, links, Loan::Declined)?;
        let is_over = self.window_run.as_ref().is_some_and(WindowRun::is_done);
        if is_over && is_back {
            let bytes = operands.buffers.longer();
            let taken = self
                .since
                .map_or(Duration::ZERO, |since| memory.clock.since(since));
            if let (Some(window_run), Some(windows)) = (&self.window_run, memory.windows()) {
                windows.release(window_run.halves());
                windows.note(operands.collective, bytes, taken + self.before);
            }
            let chunks = self.host.chunks(operands.collective, bytes);
            memory.speed.observe(taken / chunks as u32, operands.world);
            self.state = RunState::Done;
            return Ok(true);
        }
        Ok(moved)
    }

    /// As far as that goes, or `alone`: see [`WindowRun::advance`].
    fn advance_in_windows(
        &mut self,
        operands: &mut Operands,
        links: &mut LinkTable,
        memory: &mut SharedMemory,
        alone: bool,
    ) -> Result<bool> {
        let sequence = operands.fingerprint().sequence;
        if !memory
            .windows()
            .is_some_and(|windows| windows.acquire(sequence))
        {
            return Ok(false);
        }
        if self.window_run.is_none() {
            let chunk = self.host.chunk(self.key.collective);
            let plan = memory.window_plan(self.key, (operands.rank, operands.world), chunk)?;
            self.window_run = Some(WindowRun::new(Arc::clone(&plan)));
            if let Some(windows) = memory.windows() {
                let bytes = operands.buffers.longer();
                windows.begin(operands.collective, bytes);
            }
        }
        let clock = memory.clock.clone();
        let (Some(window_run), Some(windows)) = (&mut self.window_run, memory.windows()) else {
            return Ok(false);
        };
        let begun = alone.then(|| clock.now());
        let moved = window_run.advance(operands, windows, links, alone);
        if let Some(begun) = begun.filter(|_| moved) {
            self.before += clock.since(begun);
        }
        Ok(moved)
    }

    /// Waits until everything offered has come back.
    fn retreat(&mut self, operands: &Operands, links: &mut LinkTable) -> Result<bool> {
        let is_back = self.round.is_back(operands, links, Loan::Declined)?;
        if is_back {
            self.state = RunState::Declined;
        }
        Ok(is_back)
    }

    /// Whether it is under way in the windows.
    pub(crate) fn is_crossing(&self) -> bool {
        let is_on = self.window_run.as_ref().is_some_and(|it| !it.is_done());
        is_on && self.state == RunState::UnderWay
    }

    /// Whether it can go on there.
    pub(crate) fn may_cross(&self, memory: &SharedMemory) -> bool {
        match (&memory.windows, &self.window_run) {
            (WindowState::Open(windows), Some(window_run)) => {
                self.is_crossing() && window_run.may_go_on(windows)
            }
            _ => false,
        }
    }

    /// Its waits, for reports and wake-ups.
    pub(crate) fn waiting(
        &self,
        operands: &Operands,
        free: Free<'_>,
        memory: &SharedMemory,
        visit: impl FnMut(Waiting),
    ) {
        match (&memory.windows, &self.window_run, self.state) {
            (WindowState::Open(windows), Some(window_run), RunState::UnderWay)
                if !window_run.is_done() =>
            {
                window_run.waiting(operands, windows, visit);
            }
            _ => {
                let bytes = |rank| offered_slice(operands, rank).1;
                // Before its turn it reads nothing.
                let reads = |peer| self.state != RunState::New && free((peer, Direction::Receive));
                self.round.waiting(operands, bytes, reads, visit);
            }
        }
    }
}

/// The part of its buffer that a rank offers to `rank`: the first byte and the length of `rank`'s slice of an all_reduce. In
/// other collectives it is empty.
fn offered_slice(operands: &Operands, rank: Rank) -> (usize, usize) {
    if operands.collective != Collective::AllReduce {
        return (0, 0);
    }
    let size = operands.elements.dtype.size();
    let count = operands.buffers.output().len() / size;
    let (start, len) = in_place::slice(rank, operands.world, count, size);
    (start * size, len * size)
}
