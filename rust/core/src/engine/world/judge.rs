//! The oracles of a world: everything that must hold when all is quiet.

use std::time::{Duration, Instant};

use super::player::{Player, Running, Stage, What};
use super::program::{Call, Step};
use super::random::Random;
use super::scenario::{Fault, TIMEOUT};
use super::{Found, World};
use crate::error::{Code, Error};
use crate::plan::Algorithm;
use crate::types::Rank;

/// How soon every operation has ended after the last call was made, where the fault can be seen.
const SOON: Duration = Duration::from_secs(4);

impl World {
    /// Compares what has come of it with what must.
    pub(super) fn judge(mut self) -> Found {
        let mut found = Found {
            faults: std::mem::take(&mut self.faults),
            reached: std::mem::take(&mut self.reached),
            ..Found::default()
        };
        for scenario in &self.teams {
            found.reached.insert(scenario.fault.name().to_owned());
            if scenario.numbers.is_some() {
                found.reached.insert("ranks that are gone".into());
            }
        }
        if self.teams.len() > 1 {
            found.reached.insert("a group beside another".into());
        }
        for player in &self.players {
            self.judge_rank(player, &mut found);
        }
        for team in 0..self.teams.len() {
            if self.missed_a_mistake(team) {
                found.faults.push("no rank found the mistake".to_owned());
            }
        }
        // Ends what is still under way, while its memory is there.
        for player in &self.players {
            player.group.abort("over");
        }
        found.story = self.story.take().unwrap_or_default();
        found
    }

    fn judge_rank(&self, player: &Player, found: &mut Found) {
        let fault = self.teams[player.team].fault;
        let is_dead = matches!(player.stage, Stage::Gone)
            && matches!(fault, Fault::Death { rank, .. } if rank == player.rank);
        for running in &player.running {
            let name = format!("{}: {}", player.name(), running.work.name());
            if running.work.result().is_none() && !is_dead {
                found.faults.push(format!("{name} has not ended"));
            }
            let faults = self.judge_operation(player, running, found);
            let faults = faults.into_iter().map(|what| format!("{name} {what}"));
            found.faults.extend(faults);
        }
        let core = player.group.core.lock();
        let fingerprints = core.recorder.fingerprints();
        for fingerprint in fingerprints {
            let algorithm = Algorithm::ALL.get(usize::from(fingerprint.algorithm));
            found.reached.extend(algorithm.map(ToString::to_string));
        }
        drop(core);
        // Links that were asked for may be slow.
        if is_dead || self.is_asked() {
            return;
        }
        let limit = self.limit(player.team);
        let ends = player.running.iter().filter_map(|it| it.end.as_ref());
        let last = ends.map(|(at, _)| *at).max();
        if let Some(late) = last.filter(|at| *at > limit) {
            let by = late.saturating_duration_since(limit);
            let what = format!("{} waited {by:?} too long", player.name());
            found.faults.push(what);
        }
    }

    /// Whether a rank has made another call than the others, all have gone on, and none has failed. A rank that only sends may
    /// leave after its last call, without elements none need send anything, and counts may be those of other ranks alone.
    fn missed_a_mistake(&self, team: usize) -> bool {
        let scenario = &self.teams[team];
        let Fault::Mistake { rank, step, how } = scenario.fault else {
            return false;
        };
        let Step::Collective(call) = &scenario.steps[step] else {
            return false;
        };
        let made = call.mistaken(rank, scenario.world, &mut Random::new(how));
        let is_full = |call: &Call| call.counts.iter().flatten().all(|count| *count > 0);
        let tells = |made: &Call| {
            let is_other = made.collective != call.collective || made.counts == call.counts;
            is_other && is_full(call) && is_full(made)
        };
        let mut players = self.players.iter().filter(|player| player.team == team);
        made.as_ref().is_some_and(tells)
            && players.all(|player| player.next > step + 1 && player.group.error().is_none())
    }

    /// Everything that is wrong with an operation.
    fn judge_operation(
        &self,
        player: &Player,
        running: &Running,
        found: &mut Found,
    ) -> Vec<String> {
        let team = &self.teams[player.team];
        let fault = team.fault;
        let mut faults = Vec::new();
        let stores = running.what.stores();
        if stores.iter().any(|store| !store.is_guarded()) {
            faults.push("wrote behind a buffer".to_owned());
        }
        if let Some((_, at_end)) = &running.end {
            let now = stores.iter().map(|store| store.content());
            if !now.eq(at_end.iter().map(|bytes| &bytes[..])) {
                faults.push("wrote after its end".to_owned());
            }
        }
        match running.work.result() {
            None => {}
            Some(Ok(())) => {
                found.reached.insert("success".into());
                // A message with a wrong tag is another message, and a rank with other counts gives other data.
                let may_differ = match fault {
                    Fault::Lie { .. } => matches!(running.what, What::Receive(..)),
                    Fault::Mistake { step, .. } => running.step == step,
                    // The next call is taken for the one that was left out, as long as they are alike.
                    Fault::Skip { step, .. } => {
                        let mut alike = step..running.step.max(step + 1);
                        running.step >= step && alike.all(|it| team.is_repeated(it))
                    }
                    _ => false,
                };
                if !running.what.is_right() && !may_differ {
                    faults.push("has a wrong result".to_owned());
                }
            }
            Some(Err(error)) => {
                found.reached.insert(format!("{:?}", error.code));
                // In a world that is asked for the timeout may be too short.
                if !self.is_asked()
                    && let Err(what) = judge_error(fault, player.rank, error)
                {
                    faults.push(format!("{what}: {error}"));
                }
            }
        }
        faults
    }

    /// When every operation must have ended, at the latest.
    fn limit(&self, team: usize) -> Instant {
        let fault = self.teams[team].fault;
        let players = self.players.iter().filter(|player| player.team == team);
        let active = players.map(|player| player.active);
        let last = active.max().unwrap_or(self.start);
        let seen = match fault.time() {
            Some((_, at)) => last.max(self.start + at),
            None => last,
        };
        let timeout = Duration::from_secs(TIMEOUT);
        match fault {
            Fault::Dark { .. } | Fault::Lie { .. } | Fault::Skip { .. } => seen + timeout + SOON,
            Fault::Pause { lasts, .. } => seen + timeout + SOON + lasts,
            Fault::Outage { lasts, .. } => seen + SOON + lasts,
            _ => seen + SOON,
        }
    }
}

/// Whether an error is one that the fault of the team explains.
fn judge_error(fault: Fault, rank: Rank, error: &Error) -> Result<(), &'static str> {
    let allowed: &[Code] = match fault {
        Fault::None | Fault::Nonsense { .. } => return Err("nothing went wrong"),
        Fault::Outage { .. } => return Err("all connections were mended"),
        Fault::Death { .. } => &[Code::PeerLost],
        Fault::Dark { .. } | Fault::Pause { .. } => &[Code::Timeout],
        Fault::Abort { .. } => &[Code::Aborted],
        // Those that need nothing of it may have left before they hear of it.
        Fault::Mistake { .. } => &[Code::Mismatch, Code::PeerLost],
        Fault::Skip { .. } => &[Code::Mismatch, Code::PeerLost, Code::Aborted, Code::Timeout],
        Fault::Leave { .. } => &[Code::PeerLost, Code::Aborted],
        // It may lie about a tag that no rank waits for, and leave.
        Fault::Lie { .. } => &[
            Code::Untrusted,
            Code::Mismatch,
            Code::Timeout,
            Code::PeerLost,
        ],
    };
    if !allowed.contains(&error.code) {
        return Err("fails in another way than it should");
    }
    let culprit = fault.rank().unwrap_or(rank);
    let names = error.peer == Some(culprit)
        || rank == culprit
        || error.message.contains(&format!("rank {culprit}"))
        || error.message.contains("every other rank");
    // A rank that times out knows whom it waits for, and not whom that one waits for. A liar gets answers to its lies, and
    // blames those who answer.
    let may_blame_others = error.code == Code::Timeout || matches!(fault, Fault::Lie { .. });
    match names || may_blame_others {
        true => Ok(()),
        false => Err("does not name the rank at fault"),
    }
}
