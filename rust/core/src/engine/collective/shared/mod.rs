//! Ways to carry out a collective in memory that the ranks of one host share, which all of them must take together.
//!
//! - [`one_pass`]: the buffers of all ranks lie in the shared heap, and are worked on where they are.
//! - [`crossing`]: they do not, and go piece by piece through the [`windows`] of the group.
//! - Neither: the operation goes on by its plan, which is made of messages.
//!
//! # The vote
//!
//! Whether a buffer lies in the heap is known to its rank alone, but all must do the same. So every rank begins by
//! telling every other ([`ballot`]): either it shares the peer's slice with it, or it does not want to. It shares with
//! all or with none, so all ranks count the same votes. If all share, each works on its slice and gives back what it
//! got; whoever has got back all it shared has the result. If one does not, everybody declines what it was offered.
//! Other collectives than `all_reduce` go through windows, or by their plan, in which a peer's memory is read where it
//! lies if it lies in the heap: that is better where all that is read lies there, and so a rank whose memory does says
//! that it is reluctant. The vote is also where ranks find that they are not in the same operation.
//!
//! The windows are opened by the first operation that could go through them: a ballot like the vote, before it. Where
//! one rank has none, or one cannot reach another's, there are none for the life of the group. A vote is little, but not
//! nothing, to those who go by their plan after it; so after such votes some operations of that size go without one
//! ([`votes`]).

mod ballot;
mod crossing;
mod one_pass;
mod semaphores;
#[cfg(test)]
mod tests;
mod votes;
mod windows;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::buffer::Memory;
use crate::error::{Code, Error, Result};
use crate::heap::Window;
use crate::plan::topology::Topology;
use crate::plan::windows::Plan;
use crate::plan::{Counts, Shape};
use crate::transport::{Loan, Shared};
use crate::types::{Collective, Rank};

use self::ballot::{Ballot, Free, Voice};
use self::crossing::Crossing;
use self::one_pass::Slice;
use self::votes::{Pace, Votes};
use self::windows::Windows;
use crate::engine::collective::run::Waiting;
use crate::engine::collective::transfer::Operands;
use crate::engine::links::LinkTable;

/// Bytes of each slice from which on it is worth a vote.
const LEAST_SLICE: usize = 16 << 10;

/// The most ranks that do this: what they share is worked on all at once.
const MOST_RANKS: usize = crate::plan::windows::MOST_RANKS;

/// Slices begin at multiples of so many bytes, which are whole elements of any type: two ranks never write to one cache
/// line of a buffer that begins with one. Far less than a slice, so that none is empty.
const LINE: usize = 64;

/// Steps of plans that are kept for operations to come.
const KEPT_STEPS: usize = 1 << 18;

/// What the operations of a group have in common.
#[derive(Debug, Default)]
pub(crate) struct Commons {
    votes: Votes,
    pace: Pace,
    place: Place,
    plans: FxHashMap<PlanKey, Arc<Plan>>,
    kept_steps: usize,
    #[cfg(test)]
    ways: Vec<Way>,
}

/// The windows of a group.
#[derive(Debug, Default)]
enum Place {
    /// No operation has needed them yet.
    #[default]
    Unknown,
    /// There are none.
    Closed,
    Open(Box<Windows>),
}

/// What a plan over windows depends on, besides the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PlanKey {
    collective: Collective,
    count: usize,
    size: usize,
    root: Rank,
    in_place: bool,
}

impl Commons {
    fn windows(&mut self) -> Option<&mut Windows> {
        match &mut self.place {
            Place::Open(windows) => Some(windows),
            Place::Unknown | Place::Closed => None,
        }
    }

    /// Announces that this rank is about to sleep until peers have come further in the windows.
    pub(crate) fn arm(&self) {
        if let Place::Open(windows) = &self.place {
            windows.arm();
        }
    }

    /// Withdraws it.
    pub(crate) fn disarm(&self) {
        if let Place::Open(windows) = &self.place {
            windows.disarm();
        }
    }

    fn plan(&mut self, operands: &Operands, consent: &Consent) -> Result<Arc<Plan>> {
        let size = operands.dtype.size();
        let key = PlanKey {
            collective: operands.collective,
            count: consent.count,
            size,
            root: consent.root,
            in_place: consent.in_place,
        };
        if let Some(plan) = self.plans.get(&key) {
            return Ok(Arc::clone(plan));
        }
        let shape = Shape {
            collective: operands.collective,
            rank: operands.rank,
            world: operands.world,
            root: key.root,
            counts: Counts::Even(key.count),
            in_place: key.in_place,
            widen: false,
        };
        let plan = crossing::plan(&shape, size, consent.chunk)
            .map(Arc::new)
            .ok_or_else(|| Error::internal(format!("no way through windows for {shape:?}")))?;
        if plan.steps.len() > KEPT_STEPS / 4 {
            return Ok(plan);
        }
        if self.kept_steps + plan.steps.len() > KEPT_STEPS {
            self.plans.clear();
            self.kept_steps = 0;
        }
        self.kept_steps += plan.steps.len();
        self.plans.insert(key, Arc::clone(&plan));
        Ok(plan)
    }
}

/// Which way all ranks take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    OnePass,
    Windows,
    Plan,
}

/// Where an operation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It has not begun.
    New,
    /// Windows are out.
    Opening,
    /// Votes are out.
    Voting,
    /// The way is known.
    UnderWay,
    /// It is to go by its plan, and uses nothing here any more.
    Declined,
    Done,
}

/// One rank's part in such an operation.
#[derive(Debug)]
pub(crate) struct Consent {
    /// Elements of a buffer or block.
    count: usize,
    root: Rank,
    in_place: bool,
    /// It is large enough to be worked on where it is, and to go through windows.
    may_share: bool,
    may_cross: bool,
    /// Bytes that go through windows at once.
    chunk: usize,
    ballot: Ballot,
    /// While windows are being opened.
    own_window: Option<Window>,
    way: Option<Way>,
    /// Bytes of the own slice that are done.
    done: usize,
    crossing: Option<Crossing>,
    /// Since when all go through windows.
    since: Option<Instant>,
    state: State,
}

impl Consent {
    /// For an operation that may be done so; the same on all ranks.
    pub(crate) fn new(shape: &Shape, element_size: usize, topology: &Topology) -> Option<Self> {
        let Counts::Even(count) = shape.counts else {
            return None;
        };
        if !(2..=MOST_RANKS).contains(&shape.world) || topology.spans_hosts() {
            return None;
        }
        let slice = count.saturating_mul(element_size) / shape.world;
        let may_share = shape.collective == Collective::AllReduce && slice >= LEAST_SLICE;
        let may_cross = crossing::is_worth(shape, element_size, topology);
        (may_share || may_cross).then(|| Self {
            count,
            root: shape.root,
            in_place: shape.in_place,
            may_share,
            may_cross,
            chunk: crossing::chunk(shape.collective, shape.world, topology),
            ballot: Ballot::new(shape.world),
            own_window: None,
            way: None,
            done: 0,
            crossing: None,
            since: None,
            state: State::New,
        })
    }

    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Whether it is known how the operation is done.
    pub(crate) fn is_decided(&self) -> bool {
        self.way.is_some()
    }

    /// Whether it will use links no more.
    pub(crate) fn has_left_links(&self, operands: &Operands) -> bool {
        self.state == State::Done
            || (self.way == Some(Way::Windows) && self.ballot.is_settled(operands))
    }

    /// Moves it as far as that goes now. Returns whether anything moved. `turn`: how all operations before it are to be
    /// done is decided.
    pub(crate) fn advance(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        free: Free<'_>,
        (commons, turn): (&mut Commons, bool),
    ) -> Result<bool> {
        if self.state == State::New && !turn {
            return Ok(false);
        }
        let mut moved = false;
        if self.state == State::New {
            self.begin(operands, commons);
            moved = true;
        }
        if self.state == State::Opening {
            moved |= self.open(operands, links, free, commons)?;
        }
        if self.state == State::Voting {
            moved |= self.vote(operands, links, free, commons)?;
        }
        if self.state == State::UnderWay {
            moved |= match self.way {
                Some(Way::OnePass) => self.work(operands, links)?,
                Some(Way::Windows) => self.cross(operands, links, commons)?,
                Some(Way::Plan) | None => self.retreat(operands, links)?,
            };
        }
        Ok(moved)
    }

    fn begin(&mut self, operands: &Operands, commons: &mut Commons) {
        let asks = |commons: &mut Commons| match commons.votes.ask(operands.collective, self.count)
        {
            true => State::Voting,
            false => State::Declined,
        };
        if self.may_cross && matches!(commons.place, Place::Open(_)) {
            self.may_cross = commons.pace.ask();
        }
        self.state = match commons.place {
            Place::Unknown if self.may_cross => State::Opening,
            // Whatever the vote, it will not go by its plan.
            Place::Open(_) if self.may_cross && operands.collective == Collective::AllReduce => {
                State::Voting
            }
            Place::Open(_) if self.may_cross => asks(commons),
            _ if self.may_share => asks(commons),
            _ => State::Declined,
        };
        if self.state == State::Opening {
            self.own_window = windows::create(operands.rank, operands.world);
        }
    }

    /// Shows the others this rank's window, and takes in theirs.
    fn open(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        free: Free<'_>,
        commons: &mut Commons,
    ) -> Result<bool> {
        let own = self.own_window.as_ref();
        let (ballot, header) = (&mut self.ballot, operands.header(0));
        if ballot.voice.is_none() {
            ballot.make_up(operands, links, free, Voice::Offer, |link| match own {
                Some(window) => link.can_show(window),
                None => Some(false),
            });
        }
        let mut moved = false;
        if matches!(commons.place, Place::Unknown) {
            moved |= ballot.tell(
                operands,
                links,
                |_| header,
                |link, _, header| {
                    let window = own.ok_or_else(|| Error::internal("a window that is none"))?;
                    link.try_show(header, window)
                },
            )?;
            moved |= ballot.hear(operands, links, free, &header)?;
            if !ballot.is_complete(operands) {
                return Ok(moved);
            }
            let all = ballot.all_say(operands, Voice::Offer);
            let held = ballot.keep_offered(links);
            commons.place = match self.own_window.take().filter(|_| all) {
                Some(own) => Windows::new(operands.rank, own, held)
                    .map(|windows| Place::Open(Box::new(windows)))
                    .ok_or_else(|| Error::internal("a peer's window has another size"))?,
                None => Place::Closed,
            };
            tracing::debug!(
                rank = operands.rank,
                open = all,
                "windows between the ranks of this host"
            );
        }
        if !self.ballot.is_back(operands, links, Loan::Returned)? {
            return Ok(moved);
        }
        self.ballot = Ballot::new(operands.world);
        self.begin(operands, commons);
        Ok(true)
    }

    /// Tells the others whether this rank shares, and hears them.
    fn vote(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        free: Free<'_>,
        commons: &mut Commons,
    ) -> Result<bool> {
        let mut moved = false;
        if self.ballot.voice.is_none() {
            let (voice, place) = self.wish(operands);
            self.ballot.make_up(operands, links, free, voice, |link| {
                place.map_or(Some(true), |place| link.can_share(place))
            });
            // Once, so that all hear the same.
            let goes = self.may_cross && commons.windows().is_some();
            if self.ballot.voice == Some(Voice::Plain) && goes && commons.pace.complain() {
                self.ballot.voice = Some(Voice::Wary);
            }
        }
        let is_private = matches!(self.ballot.voice, Some(Voice::Plain | Voice::Wary));
        if is_private && self.may_cross {
            // It goes through the windows if there are any: what others wait for comes first.
            moved |= self.go_on_crossing(operands, links, commons, true)?;
        }
        let slice = |rank| match operands.collective {
            Collective::AllReduce => slice(operands, rank),
            _ => Slice::default(),
        };
        let expected = operands.header(slice(operands.rank).bytes);
        moved |= self.ballot.tell(
            operands,
            links,
            |peer| operands.header(slice(peer).bytes),
            |link, peer, header| {
                let theirs = slice(peer);
                link.try_share(header, operands.output.place(theirs.start, theirs.bytes))
            },
        )?;
        moved |= self.ballot.hear(operands, links, free, &expected)?;
        let own = slice(operands.rank).bytes;
        let unfit =
            |(_, shared): &(Rank, &mut Shared)| shared.bytes() != own || !shared.is_writable();
        if let Some((peer, shared)) = self.ballot.offered().find(unfit) {
            let what = match shared.is_writable() {
                true => format!("{} bytes where this rank's slice has {own}", shared.bytes()),
                false => "memory that cannot be written".to_owned(),
            };
            let error = Error::new(Code::Untrusted, format!("rank {peer} shares {what}"));
            return Err(error.with_peer(peer));
        }
        if self.ballot.is_complete(operands) {
            self.decide(operands, links, commons);
            moved = true;
        }
        Ok(moved)
    }

    /// What this rank says, if its peers reach the memory; else [`Voice::Plain`].
    fn wish(&self, operands: &Operands) -> (Voice, Option<(usize, usize)>) {
        let one_piece = |memory: &Memory| {
            let place = memory.place(0, memory.len());
            (place.1 == memory.len()).then_some(place)
        };
        if operands.collective == Collective::AllReduce {
            let whole = one_piece(&operands.output).filter(|_| self.may_share && self.in_place);
            return (whole.map_or(Voice::Plain, |_| Voice::Offer), whole);
        }
        let is_read = match operands.collective {
            Collective::Broadcast => operands.rank == self.root,
            Collective::Reduce => operands.rank != self.root,
            _ => true,
        };
        if !is_read {
            return (Voice::Reluctant, None);
        }
        // By its plan it is read where it lies, if it lies in the heap and messages are long enough to be lent.
        let source = match operands.input.is_empty() {
            true => &operands.output,
            false => &operands.input,
        };
        let is_lent = self.count * operands.dtype.size() >= LEAST_SLICE;
        let whole = one_piece(source).filter(|_| is_lent);
        (whole.map_or(Voice::Plain, |_| Voice::Reluctant), whole)
    }

    /// All votes have been cast and heard.
    fn decide(&mut self, operands: &Operands, links: &mut LinkTable, commons: &mut Commons) {
        let all_share = self.ballot.all_say(operands, Voice::Offer);
        if !all_share {
            self.ballot.decline(links);
        }
        let crosses = self.may_cross
            && matches!(commons.place, Place::Open(_))
            && !self.ballot.all_say(operands, Voice::Reluctant);
        let way = match (all_share, crosses) {
            (true, _) => Way::OnePass,
            (false, true) => Way::Windows,
            (false, false) => Way::Plan,
        };
        tracing::debug!(count = self.count, ?way, "voted on {}", operands.collective);
        if way == Way::Windows {
            commons
                .pace
                .note(self.ballot.any_says(operands, Voice::Wary));
        }
        let votes = &mut commons.votes;
        votes.note(operands.collective, self.count, way != Way::Plan);
        #[cfg(test)]
        commons.ways.push(way);
        (self.way, self.state) = (Some(way), State::UnderWay);
    }

    /// Works on the own slice of all buffers.
    fn work(&mut self, operands: &Operands, links: &mut LinkTable) -> Result<bool> {
        let own = slice(operands, operands.rank);
        if self.done < own.bytes {
            let shared = self.ballot.offered();
            if !one_pass::work(operands, own, &mut self.done, shared) {
                return Ok(false);
            }
            if self.done == own.bytes {
                self.ballot.give_back(links);
            }
            return Ok(true);
        }
        let is_back = self.ballot.is_back(operands, links, Loan::Returned)?;
        if is_back {
            self.state = State::Done;
        }
        Ok(is_back)
    }

    /// Goes through the windows.
    fn cross(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        commons: &mut Commons,
    ) -> Result<bool> {
        let moved = self.go_on_crossing(operands, links, commons, false)?;
        if self.crossing.is_some() {
            self.since.get_or_insert_with(Instant::now);
        }
        // What comes after it waits for the links.
        let is_back = self.ballot.is_settled(operands)
            || self.ballot.is_back(operands, links, Loan::Declined)?;
        let is_over = self.crossing.as_ref().is_some_and(Crossing::is_done);
        if is_over && is_back {
            if let (Some(crossing), Some(windows)) = (&self.crossing, commons.windows()) {
                windows.release(crossing.halves());
            }
            let chunks = operands.output.len().max(operands.input.len()) / self.chunk + 1;
            let taken = self.since.map_or(Duration::ZERO, |since| since.elapsed());
            commons.pace.observe(taken / chunks as u32, operands.world);
            self.state = State::Done;
            return Ok(true);
        }
        Ok(moved)
    }

    /// As far as that goes, or `alone`: see [`Crossing::advance`].
    fn go_on_crossing(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        commons: &mut Commons,
        alone: bool,
    ) -> Result<bool> {
        let sequence = operands.fingerprint().sequence;
        if !commons
            .windows()
            .is_some_and(|windows| windows.acquire(sequence))
        {
            return Ok(false);
        }
        if self.crossing.is_none() {
            let plan = commons.plan(operands, self)?;
            self.crossing = Some(Crossing::new(plan));
        }
        let (Some(crossing), Some(windows)) = (&mut self.crossing, commons.windows()) else {
            return Ok(false);
        };
        Ok(crossing.advance(operands, windows, links, alone))
    }

    /// Waits until nothing is with the others any more.
    fn retreat(&mut self, operands: &Operands, links: &mut LinkTable) -> Result<bool> {
        let is_back = self.ballot.is_back(operands, links, Loan::Declined)?;
        if is_back {
            self.state = State::Declined;
        }
        Ok(is_back)
    }

    /// Whether it is under way in the windows.
    pub(crate) fn is_crossing(&self) -> bool {
        let is_on = self.crossing.as_ref().is_some_and(|it| !it.is_done());
        is_on && self.state == State::UnderWay
    }

    /// Whether it can go on there.
    pub(crate) fn may_cross(&self, commons: &Commons) -> bool {
        match (&commons.place, &self.crossing) {
            (Place::Open(windows), Some(crossing)) => {
                self.is_crossing() && crossing.may_go_on(windows)
            }
            _ => false,
        }
    }

    /// What it waits for, in reports and to be woken for.
    pub(crate) fn waiting(
        &self,
        operands: &Operands,
        commons: &Commons,
        visit: impl FnMut(Waiting),
    ) {
        match (&commons.place, &self.crossing, self.state) {
            (Place::Open(windows), Some(crossing), State::UnderWay) if !crossing.is_done() => {
                crossing.waiting(operands, windows, visit);
            }
            _ => {
                // Others than all_reduce say a word only.
                let bytes = |rank| match operands.collective {
                    Collective::AllReduce => slice(operands, rank).bytes,
                    _ => 0,
                };
                self.ballot.waiting(operands, bytes, visit);
            }
        }
    }
}

/// A rank's slice of every buffer.
fn slice(operands: &Operands, rank: Rank) -> Slice {
    let bytes = operands.output.len();
    let step = bytes.div_ceil(operands.world).next_multiple_of(LINE);
    let start = bytes.min(step * rank);
    Slice {
        start,
        bytes: step.min(bytes - start),
    }
}
