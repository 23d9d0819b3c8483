//! A rank of a world: its group, how far it has come in its program, and whether it runs or sleeps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::program::{Share, Store};
use crate::engine::drive::progress::Driven;
use crate::engine::group::end::Parting;
use crate::engine::links::LinkTable;
use crate::engine::state::Group;
use crate::engine::work::WorkState;
use crate::transport::endpoint::Lane;
use crate::types::Rank;

/// How often the progress thread attends to a group in which no caller waits.
const ATTENTION: Duration = Duration::from_millis(250);

/// A rank of a team with its program.
pub(super) struct Player {
    /// The number of its team.
    pub(super) team: usize,
    /// Its number in the team's group.
    pub(super) rank: Rank,
    /// The process, by its rank in the group of all.
    pub(super) process: Rank,
    pub(super) group: Arc<Group>,
    /// The step that it begins next.
    pub(super) next: usize,
    pub(super) running: Vec<Running>,
    pub(super) sleep: Sleep,
    /// A caller waits in it, and not the progress thread.
    pub(super) leads: bool,
    /// Between two calls it computes.
    pub(super) computes_until: Option<Instant>,
    pub(super) paused_until: Option<Instant>,
    /// It takes a turn until then.
    pub(super) busy_until: Option<Instant>,
    pub(super) attends_at: Instant,
    /// When it was about to leave first.
    pub(super) parting: Option<Parting>,
    seen: u64,
    pub(super) stage: Stage,
    /// When it last began something.
    pub(super) active: Instant,
    /// Turns in which it neither moved nor slept, one after the other.
    pub(super) idle_turns: usize,
}

/// Whether a rank runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sleep {
    Awake,
    /// Its needs are announced on its links.
    Armed {
        until: Option<Instant>,
    },
    /// It has nothing to do.
    Idle,
}

/// From its beginning to its end.
pub(super) enum Stage {
    Alive,
    /// It has said farewell and keeps its links until what it sent has arrived, or until then.
    Leaving(LinkTable, Instant),
    Gone,
}

/// An operation that a rank has begun.
pub(super) struct Running {
    pub(super) step: usize,
    pub(super) work: Arc<WorkState>,
    pub(super) what: What,
    pub(super) begun: Instant,
    /// Once it has ended: when, and its buffers then.
    pub(super) end: Option<(Instant, Vec<Vec<u8>>)>,
}

/// An operation with its buffers.
pub(super) enum What {
    Collective(Share),
    /// Another operation has its buffers, and the result.
    Part,
    Send(Store),
    Receive(Store, Vec<u8>),
}

impl What {
    pub(super) fn stores(&self) -> Vec<&Store> {
        match self {
            Self::Collective(share) => share.input.iter().chain(&share.output).collect(),
            Self::Part => Vec::new(),
            Self::Send(store) | Self::Receive(store, _) => vec![store],
        }
    }

    /// Whether the result is right.
    pub(super) fn is_right(&self) -> bool {
        match self {
            Self::Collective(Share {
                output, expected, ..
            }) => output.as_ref().map(Store::content) == expected.as_deref(),
            Self::Part | Self::Send(_) => true,
            Self::Receive(store, expected) => store.content() == expected,
        }
    }
}

impl Player {
    pub(super) fn new(
        (team, rank, process): (usize, Rank, Rank),
        group: Arc<Group>,
        leads: bool,
        now: Instant,
    ) -> Self {
        Self {
            team,
            rank,
            process,
            group,
            next: 0,
            running: Vec::new(),
            sleep: Sleep::Awake,
            leads,
            computes_until: None,
            paused_until: None,
            busy_until: None,
            attends_at: now + ATTENTION,
            parting: None,
            seen: 0,
            stage: Stage::Alive,
            active: now,
            idle_turns: 0,
        }
    }

    pub(super) fn name(&self) -> String {
        match self.team {
            0 => format!("rank {}", self.rank),
            _ => format!("rank {} of the part (process {})", self.rank, self.process),
        }
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.running.iter().any(|it| it.work.result().is_none())
    }

    /// Whether it runs now, or has a reason to.
    pub(super) fn can_move(&self, now: Instant) -> bool {
        let is_held = |until: Option<Instant>| until.is_some_and(|until| now < until);
        if matches!(self.stage, Stage::Gone)
            || is_held(self.paused_until)
            || is_held(self.busy_until)
        {
            return false;
        }
        let attends = self.attends_at <= now;
        if matches!(self.stage, Stage::Leaving(..)) {
            return self.sleep == Sleep::Awake || attends;
        }
        match self.sleep {
            Sleep::Awake => true,
            Sleep::Armed { until } => {
                let is_time = until.is_some_and(|until| now >= until);
                // A link inside its host rings where the group sleeps.
                is_time || self.group.parker().is_rung()
            }
            Sleep::Idle => {
                let has_computed = self.computes_until.is_some_and(|until| now >= until);
                attends || has_computed && !self.is_under_way()
            }
        }
    }

    /// When it has a reason to run by itself.
    pub(super) fn next_moment(&self) -> Option<Instant> {
        let is_idle = self.sleep == Sleep::Idle && matches!(self.stage, Stage::Alive);
        let asked = match (self.sleep, &self.stage) {
            (_, Stage::Gone) => return None,
            (Sleep::Armed { until }, _) => until,
            _ => None,
        };
        // A group that sleeps for what it needs is not attended to.
        let attends = (!matches!(self.sleep, Sleep::Armed { .. })).then_some(self.attends_at);
        let again = self.busy_until.filter(|_| self.sleep == Sleep::Awake);
        let own = asked.into_iter().chain(attends).chain(again);
        let next = own.chain(self.computes_until.filter(|_| is_idle)).min()?;
        let held = self.paused_until.into_iter().chain(self.busy_until);
        Some(held.fold(next, Instant::max))
    }

    /// Something has rung, or it is time.
    pub(super) fn wake(&mut self, now: Instant) {
        match (self.sleep, &self.stage) {
            (Sleep::Armed { .. }, Stage::Alive) => self.group.finish_sleep(),
            // The progress thread hears it.
            (Sleep::Idle, Stage::Alive) => self.attends_at = now,
            _ => {}
        }
        self.sleep = Sleep::Awake;
    }

    /// Attends to the group as the progress thread does where no caller waits, if it is time.
    pub(super) fn attend(&mut self, now: Instant) {
        if now < self.attends_at || self.group.core.lock().is_busy() {
            return;
        }
        self.attends_at = now + ATTENTION;
        for peer in 0..self.group.world() {
            for lane in [Lane::Collective, Lane::PointToPoint] {
                self.group.attend(lane, peer);
            }
        }
        let is_ward = {
            let core = self.group.core.lock();
            core.pairs.as_ref().is_some_and(|pairs| pairs.is_ward)
        };
        if is_ward {
            self.group.look_out(&mut self.seen);
        }
    }

    /// Moves its operations as far as they go, and goes to sleep where nothing moves. `looks`: it also looks at deadlines and
    /// peers, as a thread does now and then.
    pub(super) fn drive(&mut self, looks: bool) {
        if self.group.drive(looks).moved {
            self.idle_turns = 0;
            return;
        }
        self.idle_turns += 1;
        // As a leader does before it sleeps.
        if self.leads && self.group.core.lock().matching.release_offers() {
            return;
        }
        let mut until = None;
        if !self.group.core.lock().is_busy() {
            (self.sleep, self.idle_turns) = (Sleep::Idle, 0);
        } else if self.group.prepare_sleep(&mut until) {
            self.group.finish_sleep();
        } else {
            (self.sleep, self.idle_turns) = (Sleep::Armed { until }, 0);
        }
    }
}
