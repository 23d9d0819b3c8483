//! Jobs that are simulated: given are the ranks, hosts, links, calls and a fault; the result is when each call ends on each
//! rank, and with which error.
//!
//! All that unisono does is real: the choice of an algorithm, its plan, messages, deaths and the news of them. Simulated are
//! the links between hosts, which have a latency and a rate (one way out for each host, shared by its ranks), and the time: a
//! turn of a rank, in which it moves all that can be moved, takes half a microsecond, bytes inside a host none. So times are
//! those of the wire. Elements really move, through the memory of this process.

use std::time::{Duration, Instant};

use super::program::{Call, Step};
use super::random::Random;
use super::scenario::{Asked, Fault, Scenario};
use super::{Found, World};
use crate::error::{Code, Error, Result};
use crate::plan::Algorithm;
use crate::types::{Collective, DataType, Rank, ReduceOp};

/// The most ranks of a job.
pub const MOST_RANKS: usize = 64;

/// The most bytes of the longer buffers of all calls and ranks together. The process needs some times as many.
pub const MOST_BYTES: usize = 256 << 20;

/// The longest time of a job, and of anything in it.
pub const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Turns from one look whether it goes on to the next.
const LOOK: usize = 4096;

/// A job to simulate.
#[derive(Clone, Debug)]
pub struct Job {
    /// The host of each rank, numbered from 0 on without gaps.
    pub hosts: Vec<usize>,
    /// From host to host.
    pub latency: Duration,
    /// Bytes a second that leave a host.
    pub rate: f64,
    /// Each is begun when the one before has ended.
    pub calls: Vec<Asks>,
    /// Something that goes wrong.
    pub event: Option<Event>,
    /// Names and values of settings, as [`crate::config`] has them.
    pub settings: Vec<(String, String)>,
    /// Decides which rank moves first where several can.
    pub seed: u64,
    /// Whether its events are told.
    pub story: bool,
}

/// A call of all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Asks {
    /// All but messages.
    pub collective: Collective,
    /// Of the longer buffer of a rank, rounded down to whole elements of four bytes for each rank.
    pub bytes: usize,
    /// The root, where there is one.
    pub root: Rank,
}

/// Something that goes wrong with a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Its process ends, at this time after the start.
    Dies(Rank, Duration),
    /// Its host is cut off without a sign.
    GoesDark(Rank, Duration),
    /// Its connections to other hosts break, and can be made again after a while.
    LosesConnections(Rank, Duration, Duration),
    /// It does not run for a while.
    Stops(Rank, Duration, Duration),
    /// It leaves out the call of this number, from 0 on.
    Skips(Rank, usize),
}

/// How a job went.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// For each rank the calls that it began, in their order.
    pub ranks: Vec<Vec<Ended>>,
    /// All events with their times, a line each, if they were asked for.
    pub story: String,
}

/// A call of one rank. Times count from the start of the job.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Ended {
    /// The number of the call.
    pub call: usize,
    /// When it began.
    pub begun: Duration,
    /// When it ended; `None` for a rank that died in it.
    pub ended: Option<Duration>,
    /// The algorithm that was chosen; `None` for a call that never got so far.
    pub algorithm: Option<&'static str>,
    /// The error that it ended with.
    pub error: Option<Error>,
}

/// Lets a job run until all is quiet, as long as `goes_on` says so, which is asked now and then.
///
/// # Errors
/// `InvalidArgument` for a job that cannot be: fewer than two ranks or more than [`MOST_RANKS`], buffers of more than
/// [`MOST_BYTES`] or of less than an element for each rank, a rank or a call that there is not, a link without a rate, a time
/// of more than a day, a setting that there is not. `System` where the process may not open as many files as the links of
/// ranks on one host need. `Timeout` if the job has not ended after a day of its time, `Aborted` if it does not go on.
/// `Internal` if a result is wrong, which is a fault of unisono.
pub fn simulate(job: &Job, mut goes_on: impl FnMut() -> bool) -> Result<Report> {
    let scenario = job.scenario()?;
    let world = World::of(vec![scenario], Random::new(job.seed), job.story);
    let mut world = world.map_err(with_advice)?;
    let mut ended = Ok(());
    for turn in 0_usize.. {
        if !world.advance() {
            break;
        }
        if world.clock.since(world.start) > LONGEST {
            let what = "the simulated job has not ended after a day of its time";
            ended = Err(Error::new(Code::Timeout, what.to_owned()));
        } else if turn % LOOK == 0 && !goes_on() {
            ended = Err(Error::new(
                Code::Aborted,
                "the simulation was ended".to_owned(),
            ));
        }
        if ended.is_err() {
            break;
        }
    }
    let report = world.report();
    // It ends what is under way, too.
    let found = world.judge();
    ended?;
    match found.faults.first() {
        None => Ok(report),
        Some(fault) => Err(Error::internal(format!("the simulated job: {fault}"))),
    }
}

/// The links are what the system may refuse.
fn with_advice(error: Error) -> Error {
    match error.code {
        Code::System => Error::new(
            Code::System,
            format!(
                "{error}; each pair of ranks on one host takes four descriptors here: raise the limit (ulimit -n), or ask \
                 for fewer ranks"
            ),
        ),
        _ => error,
    }
}

/// The world of a seed, as the tests of unisono have it: its ranks and hosts, calls, links and what goes wrong, all decided by
/// the number. Returns its events, a line each.
///
/// # Errors
/// `Internal` if something does not hold that must, such as an operation that never ends.
pub fn world_of(seed: u64) -> Result<String> {
    let Found { faults, story, .. } = super::run(seed, true);
    match faults.first() {
        None => Ok(story),
        Some(fault) => Err(Error::internal(format!(
            "{story}the world of seed {seed}: {fault}"
        ))),
    }
}

impl Job {
    fn scenario(&self) -> Result<Scenario> {
        let world = self.hosts.len();
        self.check(world)?;
        let step = |asks: &Asks| {
            let each = asks.bytes / 4 / world;
            let rows = match asks.collective {
                Collective::AllToAll => world,
                _ => 1,
            };
            Step::Collective(Call {
                collective: asks.collective,
                dtype: DataType::Float32,
                // Values of bytes have no sum over many ranks; the operator decides nothing.
                op: ReduceOp::Max,
                root: asks.root,
                in_place: true,
                in_heap: false,
                counts: vec![vec![each; world]; rows],
                is_even: true,
                data: self.seed,
            })
        };
        Ok(Scenario {
            world,
            processes: (0..world).collect(),
            hosts: self.hosts.clone(),
            settings: self.settings.clone(),
            steps: self.calls.iter().map(step).collect(),
            waits: vec![true; self.calls.len()],
            fault: self.event.map_or(Fault::None, Event::fault),
            numbers: None,
            asked: Some(Asked {
                latency: self.latency,
                byte: 1.0 / self.rate,
            }),
        })
    }

    fn check(&self, world: usize) -> Result<()> {
        let refuse = |why: String| Err(Error::invalid(why));
        if !(2..=MOST_RANKS).contains(&world) {
            return refuse(format!(
                "a job of {world} ranks: 2 to {MOST_RANKS} can be simulated"
            ));
        }
        if !(self.rate.is_finite() && self.rate >= 1.0) {
            return refuse(format!("a link of {} bytes a second", self.rate));
        }
        let is_message = |it: &Asks| matches!(it.collective, Collective::Send | Collective::Recv);
        if let Some(call) = self.calls.iter().find(|call| is_message(call)) {
            return refuse(format!(
                "{} is a message, and no call of all ranks",
                call.collective
            ));
        }
        let is_barrier = |call: &&Asks| call.collective == Collective::Barrier;
        if let Some(call) = self
            .calls
            .iter()
            .find(|it| !is_barrier(it) && it.bytes < 4 * world)
        {
            return refuse(format!(
                "{} of {} bytes: {world} ranks have an element of 4 bytes each at least",
                call.collective, call.bytes
            ));
        }
        let bytes = self.calls.iter().filter(|it| !is_barrier(it));
        let bytes = bytes.fold(0_usize, |sum, call| sum.saturating_add(call.bytes));
        if bytes.saturating_mul(world) > MOST_BYTES {
            return refuse(format!(
                "{bytes} bytes of calls on each of {world} ranks are more than {MOST_BYTES} bytes in all: ask for fewer"
            ));
        }
        let times = self.event.map_or([Duration::ZERO; 2], Event::times);
        if let Some(long) = [self.latency]
            .iter()
            .chain(&times)
            .find(|it| **it > LONGEST)
        {
            return refuse(format!("{long:?} is more than a day"));
        }
        let roots = self.calls.iter().map(|call| call.root);
        let named = self.event.map(Event::rank).into_iter().chain(roots);
        if let Some(rank) = named.into_iter().find(|rank| *rank >= world) {
            return refuse(format!("there is no rank {rank} among {world}"));
        }
        match self.event {
            Some(Event::Skips(_, call)) if call >= self.calls.len() => refuse(format!(
                "there is no call {call} among {}",
                self.calls.len()
            )),
            _ => Ok(()),
        }
    }
}

impl Event {
    fn rank(self) -> Rank {
        let (Self::Dies(rank, _)
        | Self::GoesDark(rank, _)
        | Self::LosesConnections(rank, ..)
        | Self::Stops(rank, ..)
        | Self::Skips(rank, _)) = self;
        rank
    }

    /// When it happens, and for how long.
    fn times(self) -> [Duration; 2] {
        match self {
            Self::Dies(_, at) | Self::GoesDark(_, at) => [at, Duration::ZERO],
            Self::LosesConnections(_, at, lasts) | Self::Stops(_, at, lasts) => [at, lasts],
            Self::Skips(..) => [Duration::ZERO; 2],
        }
    }

    fn fault(self) -> Fault {
        match self {
            Self::Dies(rank, at) => Fault::Death {
                rank,
                at,
                loses: false,
            },
            Self::GoesDark(rank, at) => Fault::Dark { rank, at },
            Self::LosesConnections(rank, at, lasts) => Fault::Outage { rank, at, lasts },
            Self::Stops(rank, at, lasts) => Fault::Pause { rank, at, lasts },
            Self::Skips(rank, step) => Fault::Skip { rank, step },
        }
    }
}

impl World {
    fn report(&self) -> Report {
        let since = |moment: Instant| moment.saturating_duration_since(self.start);
        let ranks = self.players.iter().map(|player| {
            let core = player.group.core.lock();
            let prints: Vec<_> = core.recorder.fingerprints().collect();
            let chosen = |number: usize| {
                let print = prints.get(number)?;
                let algorithm = Algorithm::ALL.get(usize::from(print.algorithm))?;
                Some(algorithm.name())
            };
            let calls = player.running.iter().enumerate();
            let calls = calls.map(|(number, running)| Ended {
                algorithm: chosen(number),
                call: running.step,
                begun: since(running.begun),
                ended: running.end.as_ref().map(|(at, _)| since(*at)),
                error: running
                    .work
                    .result()
                    .and_then(|result| result.clone().err()),
            });
            calls.collect::<Vec<_>>()
        });
        Report {
            ranks: ranks.collect(),
            story: self.story.clone().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(ranks: usize, event: Option<Event>) -> Job {
        let call = Asks {
            collective: Collective::AllReduce,
            bytes: 1 << 20,
            root: 0,
        };
        Job {
            hosts: (0..ranks).collect(),
            latency: Duration::from_micros(20),
            rate: 1e9,
            calls: vec![call; 2],
            event,
            settings: vec![("algorithm".to_owned(), "ring".to_owned())],
            seed: 0,
            story: false,
        }
    }

    #[test]
    fn a_ring_takes_the_time_of_the_wire() {
        let report = simulate(&job(4, None), || true).expect("a report");
        for calls in &report.ranks {
            assert_eq!(calls.len(), 2);
            assert_eq!(calls[0].algorithm, Some("ring"));
            assert!(calls.iter().all(|call| call.error.is_none()));
            // Six steps of a quarter, at 1 GB/s.
            let micros = calls[0].ended.expect("its end").as_micros();
            assert!((1573..1900).contains(&micros), "{micros} us");
        }
    }

    #[test]
    fn a_death_between_two_steps_of_a_ring_reaches_all() {
        let at = Duration::from_micros(500);
        let report = simulate(&job(8, Some(Event::Dies(3, at))), || true).expect("a report");
        for (rank, calls) in report.ranks.iter().enumerate() {
            assert_eq!(calls.len(), 1);
            if rank == 3 {
                assert_eq!(calls[0].ended, None);
                continue;
            }
            let error = calls[0].error.as_ref().expect("an error");
            assert_eq!((error.code, error.peer), (Code::PeerLost, Some(3)));
            assert!(calls[0].ended.is_some_and(|end| end > at && end < 3 * at));
        }
    }

    #[test]
    fn a_job_that_cannot_be_is_refused() {
        let refused = |job: &Job| simulate(job, || true).expect_err("it cannot be").message;
        assert!(refused(&job(1, None)).contains("2 to 64"));
        assert!(refused(&job(2, Some(Event::Skips(0, 2)))).contains("no call 2"));
        let without_rate = Job {
            rate: 0.0,
            ..job(2, None)
        };
        assert!(refused(&without_rate).contains("0 bytes a second"));
        let ends_at_once = simulate(&job(2, None), || false).expect_err("it ends");
        assert_eq!(ends_at_once.code, Code::Aborted);
    }
}
