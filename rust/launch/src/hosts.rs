//! The process that the user started, where the ranks are on several hosts: it runs one `ssh` for each, which runs the
//! launcher of that host (`part.rs`), and acts when one of them ends.
//!
//! The hosts are to a job what the ranks are to a keeper: when the ranks of one have failed, those of the others are
//! ended. They are ended by closing the standard input of their launchers, and so is the job if this process is killed.
//!
//! Hosts may be slow, silent or gone, so this process waits for nothing but events: what hosts print is read by the
//! output's thread, which also sees that a launcher has its order, and what they are told is written by a thread for each.

use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGKILL, SIGPIPE, SIGTSTP};

use crate::front;
use crate::options::{Host, Options};
use crate::order::{Order, signal_line};
use crate::output::Outputs;
use crate::rank::status_of_signal;
use crate::reach;
use crate::report::{say, seconds};
use crate::role::Door;
use crate::signals::{self, Caught, Event, is_ending, name};

/// The exit status of ssh when it failed itself.
const SSH_FAILED: u8 = 255;
/// The signals of Linux are 1 to 64.
const LAST_SIGNAL: i32 = 64;
/// How much longer than its ranks the launcher of a host may take to end.
const SLACK: Duration = Duration::from_secs(10);
/// This number of requests ends all hosts; with one more, none of them is waited for.
const MOST_REQUESTS: u32 = 3;
/// Runs the job on `options.hosts`, and returns the status to exit with.
pub(crate) fn run(options: &Options, door: &Door) -> io::Result<u8> {
    let first = &options.hosts[0];
    let elsewhere = options
        .hosts
        .iter()
        .find(|host| !is_loopback(host.address()));
    if let (None, Some(other)) = (&options.master_addr, elsewhere)
        && is_loopback(first.address())
    {
        say(&format!(
            "{other} does not reach {first} by that name: name it otherwise, or say where it is by --master-addr"
        ));
        return Ok(2);
    }
    signals::survive_closed_pipes()?;
    let mut outputs = Outputs::of_hosts(&options.output);
    let mut job = Job {
        order: reach::order(options)?,
        options,
        caught: Caught::new()?,
        launchers: Vec::new(),
        start: Instant::now(),
        first: None,
        asked_by: None,
        asked_times: 0,
        is_ending: false,
        deadline: None,
        has_printed: false,
        is_writing: outputs.is_writing(),
    };
    let started = job.start(door, &mut outputs);
    started
        .and_then(|()| outputs.start(job.caught.sender()).map(drop))
        .inspect_err(|_| job.kill())?;
    job.wait();
    Ok(job.report())
}

fn is_loopback(address: &str) -> bool {
    let parsed = address.parse::<std::net::IpAddr>();
    address == "localhost" || parsed.is_ok_and(|address| address.is_loopback())
}

struct Job<'a> {
    options: &'a Options,
    /// For the next host, and with the port once that is known.
    order: Order,
    caught: Caught,
    launchers: Vec<Launcher<'a>>,
    start: Instant,
    /// The launcher whose failure was seen first.
    first: Option<usize>,
    asked_by: Option<i32>,
    asked_times: u32,
    /// Whether all ranks were to end.
    is_ending: bool,
    /// When the hosts that were to end are given up.
    deadline: Option<Instant>,
    has_printed: bool,
    is_writing: Arc<AtomicBool>,
}

/// The launcher of one host, behind the command that reaches it.
struct Launcher<'a> {
    host: &'a Host,
    first: u16,
    ranks: u16,
    child: Child,
    /// Carries orders and signals to it. Its ranks end when this is dropped.
    lifeline: Option<Sender<Vec<u8>>>,
    has_order: bool,
    /// Whether it has said that it has its order.
    is_ready: bool,
    /// Whether it can say so no more.
    is_mute: bool,
    ended: Option<(u8, Duration)>,
    /// It has failed, and the others go on.
    is_let_go: bool,
    is_given_up: bool,
}

impl<'a> Job<'a> {
    fn start(&mut self, door: &Door, outputs: &mut Outputs) -> io::Result<()> {
        let command = reach::command(door)?;
        let ssh = reach::ssh(&self.options.ssh)?;
        let mut first = 0;
        for (host, number) in self.options.hosts.iter().zip(0..) {
            let ranks = self.options.ranks_of(host);
            let mut program = Command::new(&ssh[0]);
            program.args(&ssh[1..]).arg(&host.name).arg(&command);
            program
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let mut child = front::spawn(&mut program)
                .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", ssh[0])))?;
            outputs.adopt_host(number, &mut child);
            let lifeline = child.stdin.take().map(write_from_a_thread).transpose()?;
            self.launchers.push(Launcher {
                host,
                first,
                ranks,
                child,
                lifeline,
                has_order: false,
                is_ready: false,
                is_mute: false,
                ended: None,
                is_let_go: false,
                is_given_up: false,
            });
            first += ranks;
        }
        // The others get theirs when the port is known.
        self.launchers[0].give(&mut self.order);
        Ok(())
    }

    /// Returns when all hosts have ended, and all that they printed has been written.
    fn wait(&mut self) {
        while !self.has_printed || self.launchers.iter().any(|host| host.ended.is_none()) {
            match self.caught.next(self.deadline) {
                // Output that waits for a reader here keeps the launcher of its host waiting too.
                None if self.is_writing.load(Ordering::Relaxed) => self.give_time(),
                None => self.kill(),
                Some(Event::Printed) => self.has_printed = true,
                Some(Event::Ready { host, port }) => self.go_on(host, port),
                Some(Event::Mute { host }) => {
                    self.launchers[usize::from(host)].is_mute = true;
                    self.look();
                }
                Some(Event::Signal(SIGCHLD)) => self.look(),
                Some(Event::Signal(signal)) => self.pass_on(signal),
            }
            if self.asked_times > MOST_REQUESTS {
                self.kill();
                return;
            }
        }
    }

    /// The launcher of `host` has its order.
    fn go_on(&mut self, host: u16, port: u16) {
        self.launchers[usize::from(host)].is_ready = true;
        if host == 0 && !self.is_ending {
            self.order.part.port = port;
            for launcher in &mut self.launchers[1..] {
                launcher.give(&mut self.order);
            }
        }
    }

    fn look(&mut self) {
        let after = self.start.elapsed();
        for number in 0..self.launchers.len() {
            let launcher = &mut self.launchers[number];
            launcher.look(after);
            if !launcher.has_failed() || launcher.is_let_go {
                continue;
            }
            if self.first.is_none() && !self.is_ending && !self.goes_on_without(number) {
                self.first = Some(number);
            }
        }
        if self.first.is_some() {
            self.end();
        }
    }

    /// Whether the job goes on though the ranks of this host have failed or are out of reach.
    fn goes_on_without(&mut self, number: usize) -> bool {
        let Some(min) = self.options.min else {
            return false;
        };
        // Before that the others do not know where to meet.
        let has_begun = self.launchers.iter().all(|host| host.has_order);
        let others = self
            .launchers
            .iter()
            .filter(|host| !host.has_failed() && !host.is_let_go);
        let left: u16 = others.map(|host| host.ranks).sum();
        if self.asked_by.is_some() || !has_begun || left < min {
            return false;
        }
        let launcher = &mut self.launchers[number];
        launcher.is_let_go = true;
        launcher.lifeline = None;
        if let Some((status, after)) = launcher.ended {
            say(&format!(
                "{}; the others go on",
                launcher.failure("failed", status, after)
            ));
        }
        true
    }

    fn pass_on(&mut self, signal: i32) {
        match signal {
            // The hosts go on, until their output waits for a reader.
            SIGTSTP => return signals::stop_self(),
            SIGCONT => return,
            _ => {}
        }
        for launcher in self.launchers.iter().filter(|host| host.has_order) {
            launcher.tell(signal_line(signal).into_bytes());
        }
        if is_ending(signal) {
            self.asked_by = Some(signal);
            self.asked_times += 1;
            // A job that has begun only in part can do nothing with a signal but end.
            let has_begun = self.launchers.iter().all(|host| host.has_order);
            if self.asked_times >= MOST_REQUESTS || !has_begun {
                self.end();
            }
        }
    }

    /// Ends all ranks.
    fn end(&mut self) {
        if !self.is_ending {
            self.is_ending = true;
            for launcher in &mut self.launchers {
                launcher.lifeline = None;
            }
            self.give_time();
        }
    }

    fn give_time(&mut self) {
        self.deadline = Some(Instant::now() + self.options.grace + SLACK);
    }

    /// Waits for the hosts no longer.
    fn kill(&mut self) {
        self.deadline = None;
        let after = self.start.elapsed();
        for launcher in &mut self.launchers {
            // It leads a group, in which what it needs to reach the host may be.
            let _ = kill_process_group(Pid::from_child(&launcher.child), Signal::KILL);
            if launcher.ended.is_none() {
                let _ = launcher.child.wait();
                launcher.ended = Some((status_of_signal(SIGKILL), after));
                launcher.is_given_up = true;
            }
        }
    }

    fn report(&self) -> u8 {
        let statuses = self.launchers.iter().filter_map(|host| host.ended);
        // A host whose ranks died of themselves may have waited longer for the rest of them than others for their peers.
        let crash = statuses
            .map(|(status, _)| status)
            .find(|&status| is_crash(status) && self.first.is_some());
        let first = self.first.map(|first| &self.launchers[first]);
        let ended = first.and_then(|first| first.ended);
        let status = match (first.zip(ended), self.asked_by) {
            (Some((_, (status, _))), Some(signal)) if status == status_of_signal(signal) => {
                say(&format!("ended by {}", name(signal)));
                status
            }
            (Some((first, (status, after))), _) => {
                say(&first.failure("failed first", status, after));
                crash.unwrap_or(status.max(1))
            }
            (None, Some(signal)) if self.launchers.iter().any(Launcher::is_missed) => {
                status_of_signal(signal)
            }
            (None, _) => 0,
        };
        for launcher in self
            .launchers
            .iter()
            .filter(|launcher| launcher.is_given_up)
        {
            say(&format!(
                "{} did not answer: its ranks may run on",
                launcher.host
            ));
        }
        status
    }
}

/// A thread that writes what it is sent, as long as anything may be sent: `to` may take nothing for a long time.
fn write_from_a_thread(mut to: impl Write + Send + 'static) -> io::Result<Sender<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel::<Vec<u8>>();
    thread::Builder::new()
        .name("lifeline".to_owned())
        .spawn(move || {
            // A process that does not read has ended, or is about to.
            let write = |bytes: Vec<u8>| to.write_all(&bytes).and_then(|()| to.flush());
            let _ = receiver.iter().try_for_each(write);
        })?;
    Ok(sender)
}

/// Whether a launcher with this status had a rank that died of itself.
fn is_crash(status: u8) -> bool {
    let signal = i32::from(status) - 128;
    (1..=LAST_SIGNAL).contains(&signal)
        && !is_ending(signal)
        && ![SIGKILL, SIGPIPE].contains(&signal)
}

impl Launcher<'_> {
    /// Tells it what to start.
    fn give(&mut self, order: &mut Order) {
        order.part.first = self.first;
        order.part.ranks = self.ranks;
        order.part.host = self.host.to_string();
        self.has_order = true;
        self.tell(order.to_bytes());
    }

    fn tell(&self, bytes: Vec<u8>) {
        if let Some(lifeline) = &self.lifeline {
            let _ = lifeline.send(bytes);
        }
    }

    /// Finds out whether it has ended.
    fn look(&mut self, after: Duration) {
        if self.ended.is_some() {
            return;
        }
        let Ok(Some(status)) = self.child.try_wait() else {
            return;
        };
        let by_signal = || status_of_signal(status.signal().unwrap_or(0));
        let code = status.code().map(|code| u8::try_from(code).unwrap_or(1));
        let code = code.unwrap_or_else(by_signal);
        self.ended = Some((code, after));
    }

    fn has_failed(&self) -> bool {
        // A command that was to start ranks and did not confirm its order ran no launcher.
        self.ended
            .is_some_and(|(status, _)| status > 0 || self.is_mute && self.lifeline.is_some())
    }

    /// Whether it has failed, and was not let go.
    fn is_missed(&self) -> bool {
        self.has_failed() && !self.is_let_go
    }

    fn failure(&self, what: &str, status: u8, after: Duration) -> String {
        let Self { host, first, .. } = self;
        let ranks = match self.ranks {
            1 => format!("rank {first}"),
            ranks => format!("ranks {first}-{}", first + ranks - 1),
        };
        let how = match (self.is_ready, status) {
            (false, SSH_FAILED) => {
                format!("it was not reached (does `ssh {host} true` work without a question?)")
            }
            (false, status) => format!("exit code {status}, before it said that it starts them"),
            (true, SSH_FAILED) => "exit code 255: of a rank, or the connection was lost".to_owned(),
            (true, status) => format!("exit code {status}"),
        };
        format!("{host} ({ranks}) {what}, after {}: {how}", seconds(after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_is_told_from_other_ends() {
        for (status, expected) in [
            (128 + 11, true),
            (128 + 6, true),
            (128 + 15, false),
            (128 + 2, false),
            (128 + 9, false),
            (128 + 13, false),
            (0, false),
            (3, false),
            (128, false),
            (255, false),
        ] {
            assert_eq!(is_crash(status), expected, "{status}");
        }
    }

    #[test]
    fn loopback_is_no_address_for_others() {
        for address in ["localhost", "127.0.0.1", "127.1.2.3", "::1"] {
            assert!(is_loopback(address), "{address}");
        }
        assert!(!is_loopback("node1") && !is_loopback("10.0.0.1"));
    }
}
