//! The parent of the ranks: starts them, passes signals on, and sees to it that all end when one fails, and with them
//! everything that they started.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitOptions, getppid, kill_process, set_parent_process_death_signal, waitpid,
};
use signal_hook::consts::{SIGCHLD, SIGPIPE, SIGTSTP};

use crate::environment::{Environment, Reservation};
use crate::options::{Options, Output};
use crate::order::Part;
use crate::output::{Outputs, Ways};
use crate::processes::{self, Process};
use crate::program;
use crate::rank::{Ending, Rank, Why};
use crate::report::{self, Job, say};
use crate::role::{Door, STARTER, again};
use crate::signals::{self, Caught, Event, is_ending};

/// The status of a launcher that was not able to launch.
const FAILED: u8 = 1;
/// The pause between two readings of the table of processes, while those that a rank left behind are ending.
const READING_PAUSE: Duration = Duration::from_millis(20);
/// The pause before a rank is started again for the second time; then twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// A rank that has run for so long may be started again as often as at first.
const STEADY_AFTER: Duration = Duration::from_secs(60);
/// This number of requests to end is enough.
const MOST_REQUESTS: u32 = 3;

/// Runs the job that `arguments` ask for, as the child of `front`, and returns the status to exit with.
pub(crate) fn run(arguments: &[OsString], door: &Door, front: Pid) -> u8 {
    let options = match Options::read(arguments) {
        Ok(options) => options,
        Err(status) => return status,
    };
    let started = Keeper::start(&options, door, front);
    match started {
        Ok(mut keeper) => keeper.run(),
        Err((why, status)) => {
            say(&why);
            status
        }
    }
}

struct Keeper<'a> {
    options: &'a Options,
    door: &'a Door,
    /// The command of every rank.
    program: Vec<OsString>,
    /// As long as a rank may be started again.
    ways: Option<Ways>,
    front: Pid,
    caught: Caught,
    ranks: Vec<Rank>,
    start: Instant,
    first: Option<u16>,
    /// The cause of the end of a rank that ends now.
    why: Why,
    killed_because: String,
    /// When ranks that were asked to end are killed.
    deadline: Option<Instant>,
    asked_by: Option<i32>,
    asked_times: u32,
    has_printed: bool,
    part: Part,
    /// Of the port, unless the one who gave the part keeps it.
    _port: Option<Reservation>,
}

impl<'a> Keeper<'a> {
    fn start(options: &'a Options, door: &'a Door, front: Pid) -> Result<Self, (String, u8)> {
        let failed = |what: &str, error: io::Error| (format!("cannot {what}: {error}"), FAILED);
        let (part, port) = find_part(options)?;
        let program = program::command(options, door)?;
        let caught = Caught::new().map_err(|error| failed("catch signals", error))?;
        // By a signal that is caught even if the job ignores those that end it. In this order: the second line notices
        // a front that has ended before the first.
        set_parent_process_death_signal(Some(Signal::CHILD))
            .map_err(|error| failed("ask for a signal at the end of the launcher", error.into()))?;
        if getppid() != Some(front) {
            return Err((
                "the launcher ended before its ranks were started".to_owned(),
                FAILED,
            ));
        }
        if let Err(error) = processes::adopt_orphans() {
            // Sandboxes and emulators may know nothing of it. The ranks themselves are ours all the same.
            say(&format!(
                "this system cannot adopt orphans ({error}): what a rank starts and leaves behind may outlive the job"
            ));
        }
        let outputs = Outputs::new(options.output.clone(), part.world)
            .map_err(|error| failed("make the folder for the output", error))?;
        let mut keeper = Self {
            options,
            door,
            program,
            ways: None,
            front,
            ranks: Vec::new(),
            start: Instant::now(),
            first: None,
            why: Why::Itself,
            killed_because: String::new(),
            deadline: None,
            asked_by: None,
            asked_times: 0,
            has_printed: false,
            caught,
            part,
            _port: port,
        };
        let started = keeper.start_ranks(outputs);
        if let Err(error) = started {
            keeper.end_everything();
            return Err(failed("start the ranks", error));
        }
        Ok(keeper)
    }

    fn start_ranks(&mut self, mut outputs: Outputs) -> io::Result<()> {
        for local in 0..self.part.ranks {
            let number = self.part.first + local;
            let mut command = self.command(local);
            outputs.prepare(number, &mut command)?;
            let pid = Pid::from_child(&command.spawn()?);
            if self.options.min.is_none() {
                outputs.ways.let_go(number);
            }
            self.ranks.push(Rank {
                number,
                pid,
                since: Duration::ZERO,
                restarts: 0,
                again_at: None,
                ended: None,
            });
        }
        self.ways = Some(outputs.start(self.caught.sender())?);
        Ok(())
    }

    /// Starts the program of the rank with this number on this host, but for its output.
    fn command(&self, local: u16) -> Command {
        let mut command = again(self.door, STARTER);
        command.args(&self.program).process_group(0);
        let reads = self.part.first + local == 0 && !self.options.part;
        command.stdin(match reads {
            true => Stdio::inherit(),
            false => Stdio::null(),
        });
        Environment::new(&self.part).set(local, &mut command);
        if self.options.as_gloo {
            command.env("UNISONO_AS_GLOO", "1");
        }
        command
    }

    fn run(&mut self) -> u8 {
        while self.goes_on() {
            let again = self.ranks.iter().filter_map(|rank| rank.again_at).min();
            match self.caught.next(self.deadline.or(again)) {
                None if self.deadline.is_none() => self.start_due(),
                None => self.kill(format!(
                    "not ended {} s after SIGTERM",
                    self.options.grace.as_secs_f64()
                )),
                Some(event) => self.handle(event),
            }
            if self.is_abandoned() {
                return self.end_everything();
            }
        }
        let left_behind = self.sweep();
        self.ways = None;
        while !self.has_printed && self.asked_times < MOST_REQUESTS {
            // The reader of the output may take a long time, but a signal to end must still end the job.
            let deadline = self.asked_by.map(|_| Instant::now() + self.options.grace);
            match self.caught.next(deadline) {
                None => break,
                Some(event) => self.handle(event),
            }
            if self.is_abandoned() {
                return self.end_everything();
            }
        }
        // The ranks too, now that none of them is signalled any more.
        processes::end_all();
        self.report(&left_behind)
    }

    /// Whether a rank runs, or will.
    fn goes_on(&mut self) -> bool {
        // A rank that has ended well meets no other one again.
        if self.is_ending() || self.have_ended_well() > 0 {
            self.ranks.iter_mut().for_each(|rank| rank.again_at = None);
        }
        let mut ranks = self.ranks.iter();
        ranks.any(|rank| rank.ended.is_none() || rank.again_at.is_some())
    }

    fn have_ended_well(&self) -> usize {
        let is_well = |rank: &&Rank| rank.ended.is_some_and(|ended| !ended.how.is_failure());
        self.ranks.iter().filter(is_well).count()
    }

    fn is_ending(&self) -> bool {
        self.why != Why::Itself || self.asked_by.is_some()
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Printed => self.has_printed = true,
            Event::Ready { .. } | Event::Mute { .. } => {}
            Event::Signal(SIGCHLD) => self.look(),
            Event::Signal(signal) => self.pass_on(signal),
        }
    }

    /// Whether the front was killed.
    fn is_abandoned(&self) -> bool {
        getppid() != Some(self.front)
    }

    fn pass_on(&mut self, signal: i32) {
        if is_ending(signal) {
            self.asked_by = Some(signal);
            self.asked_times += 1;
            if self.asked_times >= MOST_REQUESTS {
                return self.kill(format!("asked to end {MOST_REQUESTS} times"));
            }
        }
        for rank in &self.ranks {
            rank.signal(signal);
        }
        if signal == SIGTSTP {
            signals::stop_self();
        }
    }

    /// Finds out which ranks have ended, and what follows from that.
    fn look(&mut self) {
        let (start, why) = (self.start, self.why);
        let ended: Vec<&Rank> = self
            .ranks
            .iter_mut()
            .filter_map(|rank| rank.look(start, why).then_some(&*rank))
            .collect();
        if ended.is_empty() {
            // An orphan of some rank has ended: this reaps it.
            processes::descendants(&self.leaders());
            return;
        }
        let failed = ended
            .iter()
            .filter_map(|rank| Some((rank.number, rank.ended?.how)));
        let failed: Vec<_> = failed.filter(|(_, how)| how.is_failure()).collect();
        let failed = failed
            .into_iter()
            .filter(|(number, how)| !self.goes_on_after(*number, *how));
        // Of those that are seen at once a crash comes first: the others will have noticed that a peer was lost.
        let first = failed.min_by_key(|&(number, how)| (!is_crash(how), number));
        if let (None, Why::Itself, Some((number, _))) = (self.first, self.why, first) {
            self.first = Some(number);
            self.why = Why::Asked;
            self.deadline = Some(Instant::now() + self.options.grace);
            self.signal_ranks(Signal::TERM);
            // A stopped process would not act on it.
            self.signal_ranks(Signal::CONT);
        }
    }

    /// Whether the job goes on though this rank has failed, so `how`. It is started again if that makes sense.
    fn goes_on_after(&mut self, number: u16, how: Ending) -> bool {
        let Some(min) = self.options.min else {
            return false;
        };
        let well = self.have_ended_well();
        let runs = self.ranks.iter().filter(|rank| rank.ended.is_none());
        // Those of other hosts count as running: the launcher that started the job counts hosts.
        let elsewhere = usize::from(self.part.world - self.part.ranks);
        if self.is_ending() || runs.count() + well + elsewhere < usize::from(min) {
            return false;
        }
        let start = self.start;
        let (world, most) = (self.part.world, self.options.restarts);
        let Some(rank) = self.ranks.iter_mut().find(|rank| rank.number == number) else {
            return false;
        };
        let after = rank.ended.map(|ended| ended.after).unwrap_or_default();
        if after.saturating_sub(rank.since) >= STEADY_AFTER {
            rank.restarts = 0;
        }
        let seconds = report::seconds(after);
        let what = format!("rank {number} of {world} failed after {seconds}: {how}");
        if well > 0 || rank.restarts >= most {
            say(&format!("{what}; the others go on"));
            return true;
        }
        let pause = match rank.restarts {
            0 => Duration::ZERO,
            before => FIRST_PAUSE * 2_u32.saturating_pow(u32::from(before) - 1),
        };
        rank.restarts += 1;
        rank.again_at = Some(start + start.elapsed() + pause.min(STEADY_AFTER));
        let count = rank.restarts;
        let when = match pause.as_secs() {
            0 => String::new(),
            seconds => format!(" in {seconds} s"),
        };
        say(&format!("{what}; started again{when} ({count} of {most})"));
        self.start_due();
        true
    }

    /// Starts the ranks again whose time has come.
    fn start_due(&mut self) {
        for local in 0..self.ranks.len() {
            let is_due = |at| at <= Instant::now();
            if !self.ranks[local].again_at.is_some_and(is_due) {
                continue;
            }
            self.ranks[local].again_at = None;
            if let Err(error) = self.start_again(local) {
                let number = self.ranks[local].number;
                say(&format!("rank {number} cannot be started again: {error}"));
            }
        }
    }

    /// Starts a rank again that has ended.
    fn start_again(&mut self, local: usize) -> io::Result<()> {
        let mut command = self.command(local as u16);
        let rank = &mut self.ranks[local];
        if let Some(ways) = &self.ways {
            ways.lead(rank.number, &mut command)?;
        }
        // The rest of its process group has no use any more.
        rank.signal_group(Signal::KILL);
        let _ = waitpid(Some(rank.pid), WaitOptions::NOHANG);
        rank.pid = Pid::from_child(&command.spawn()?);
        rank.since = self.start.elapsed();
        rank.ended = None;
        Ok(())
    }

    fn signal_ranks(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.ended.is_none()) {
            rank.signal_group(signal);
        }
    }

    fn kill(&mut self, why: String) {
        self.deadline = None;
        self.why = Why::Killed;
        self.killed_because = why;
        self.signal_ranks(Signal::KILL);
    }

    fn leaders(&self) -> Vec<Pid> {
        self.ranks.iter().map(|rank| rank.pid).collect()
    }

    /// Ends what the ranks, which have ended, left behind, and returns what that was.
    fn sweep(&mut self) -> Vec<Process> {
        let leaders = self.leaders();
        let mut asked: Vec<Process> = Vec::new();
        let deadline = Instant::now() + self.options.grace;
        loop {
            let left = processes::descendants(&leaders);
            if left.is_empty() {
                return asked;
            }
            let is_late = Instant::now() >= deadline
                || self.asked_times >= MOST_REQUESTS
                || self.is_abandoned();
            for process in left {
                if is_late {
                    self.signal_left_behind(&process, Signal::KILL);
                } else if asked.iter().all(|other| other.pid != process.pid) {
                    self.signal_left_behind(&process, Signal::TERM);
                    asked.push(process);
                }
            }
            if let Some(event) = self.caught.next(Some(Instant::now() + READING_PAUSE)) {
                self.handle(event);
            }
        }
    }

    /// Signals a process that is ours to signal: a child, or by its group one that is still in a rank's.
    fn signal_left_behind(&self, process: &Process, signal: Signal) {
        if processes::is_child(process) {
            let _ = kill_process(process.pid, signal);
        } else if let Some(rank) = self
            .ranks
            .iter()
            .find(|rank| rank.pid.as_raw_pid() == process.group)
        {
            rank.signal_group(signal);
        }
    }

    /// Kills the ranks and everything below them, and returns the status for that.
    fn end_everything(&mut self) -> u8 {
        self.kill("the launcher has ended".to_owned());
        self.asked_times = MOST_REQUESTS;
        while self.ranks.iter().any(|rank| rank.ended.is_none()) {
            self.look();
            self.caught.next(Some(Instant::now() + READING_PAUSE));
        }
        self.sweep();
        processes::end_all();
        FAILED
    }

    fn report(&self, left_behind: &[Process]) -> u8 {
        let folder = match &self.options.output {
            Output::Folder(folder) => Some(folder.as_path()),
            _ => None,
        };
        let job = Job {
            world: self.part.world,
            is_part: self.options.part,
            ranks: &self.ranks,
            first: self.first,
            asked_by: self.asked_by,
            killed_because: &self.killed_because,
            folder,
        };
        for line in job.lines() {
            say(&line);
        }
        // After a failure it is expected that processes had to be ended.
        if self.first.is_none() && self.asked_by.is_none() {
            for process in left_behind {
                say(&format!(
                    "ended {} (pid {}), which a rank left behind",
                    process.name, process.pid
                ));
            }
        }
        match job.status() {
            // The launcher that started the job counts hosts. One on which no rank ended well counts as failed.
            0 if self.options.part && self.have_ended_well() == 0 => self.status_of_the_last(),
            status => status,
        }
    }

    /// The status of the rank that has ended last.
    fn status_of_the_last(&self) -> u8 {
        let ended = self.ranks.iter().filter_map(|rank| rank.ended);
        let last = ended.max_by_key(|ended| ended.after);
        last.map_or(FAILED, |ended| ended.how.status())
    }
}

/// The ranks to keep: those of the whole job at a port that is kept free for them, or the part that the standard input
/// names.
fn find_part(options: &Options) -> Result<(Part, Option<Reservation>), (String, u8)> {
    let failed = |what: &str, error: io::Error| (format!("cannot {what}: {error}"), FAILED);
    if options.part {
        let part = Part::read(&mut io::stdin().lock())
            .map_err(|error| failed("read which ranks to start", error))?;
        report::speak_of(&part.host);
        return Ok((part, None));
    }
    let port = Reservation::new(options.port).map_err(|error| failed("find a free port", error))?;
    let ranks = options.ranks.unwrap_or(1);
    let part = Part::alone(ranks, port.port).map_err(|error| failed("make a secret", error))?;
    Ok((part, Some(port)))
}

/// Whether a rank died of itself, and not because a peer, a reader or a user was gone.
fn is_crash(how: Ending) -> bool {
    matches!(how, Ending::Signal { signal, .. } if signal != SIGPIPE && !is_ending(signal))
}
