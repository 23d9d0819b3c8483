//! What the user started, where the ranks are on several hosts: one `ssh` for each, which runs the launcher of that host
//! (`part.rs`), and what follows when one of them ends.
//!
//! The hosts are to a job what the ranks are to a keeper: when the ranks of one have failed, those of the others are
//! ended. They are ended by closing the standard input of their launchers, and so is the job if this process is killed.
//!
//! Hosts may be slow, silent or gone, so this process waits for nothing but events: what hosts print is read by the
//! output's thread, which also sees that a launcher has its order, and what they are told is written by a thread for each.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGKILL, SIGPIPE, SIGTSTP};

use crate::environment::new_secret;
use crate::front;
use crate::options::{Host, Options, Output};
use crate::output::Outputs;
use crate::part::{Order, Part, signal_line, split};
use crate::rank::status_of_signal;
use crate::report::{say, seconds};
use crate::signals::{self, Caught, Event, is_ending, name};
use crate::{Door, PART, THIS};

/// What ssh exits with when it failed itself.
const SSH_FAILED: u8 = 255;
/// No questions, which several hosts would ask at once; and a host that went dark is noticed. ssh takes the first value of
/// an option, so the user's own count.
const SSH_OPTIONS: [&str; 9] = [
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=15",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
];
/// How much longer than its ranks the launcher of a host may take to end.
const SLACK: Duration = Duration::from_secs(10);
/// So many requests end all hosts, and one more waits for none of them.
const PATIENCE: u32 = 3;
/// What the ranks get of the variables here, by name and by the beginning of it.
const PASSED_ON: [&str; 3] = ["PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"];
const PASSED_ON_BY_PREFIX: [&str; 6] = ["UNISONO_", "PYTHON", "OMP_", "TORCH", "NCCL_", "GLOO_"];
/// Of those, what speaks of another job: this one may have been started inside it.
const OF_ANOTHER_JOB: [&str; 2] = ["UNISONO_LAUNCH_SECRET", "TORCHELASTIC_"];

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
        order: order(options)?,
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
        .and_then(|()| outputs.start(job.caught.sender()))
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
    /// What it is told. Its ranks end when this is dropped.
    lifeline: Option<Sender<Vec<u8>>>,
    has_order: bool,
    /// Whether it has said that it has its order.
    is_ready: bool,
    /// Whether it can say so no more.
    is_mute: bool,
    ended: Option<(u8, Duration)>,
    is_given_up: bool,
}

impl<'a> Job<'a> {
    fn start(&mut self, door: &Door, outputs: &mut Outputs) -> io::Result<()> {
        let command = remote_command(door)?;
        let ssh = ssh(&self.options.ssh)?;
        let mut first = 0;
        for (host, number) in self.options.hosts.iter().zip(0..) {
            let ranks = self.options.ranks_of(host);
            let mut reach = Command::new(&ssh[0]);
            reach.args(&ssh[1..]).arg(&host.name).arg(&command);
            reach
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let mut child = front::spawn(&mut reach)
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
                // What waits for a reader here keeps the launcher of its host waiting too.
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
            if self.asked_times > PATIENCE {
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
            if launcher.has_failed() && self.first.is_none() && !self.is_ending {
                self.first = Some(number);
            }
        }
        if self.first.is_some() {
            self.end();
        }
    }

    fn pass_on(&mut self, signal: i32) {
        match signal {
            // The hosts go on, until their output waits for a reader.
            SIGTSTP => return signals::stop_self(),
            SIGCONT => return,
            _ => {}
        }
        for launcher in &mut self.launchers {
            launcher.pass_on(signal);
        }
        if is_ending(signal) {
            self.asked_by = Some(signal);
            self.asked_times += 1;
            if self.asked_times >= PATIENCE {
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
            .find(|&status| is_crash(status));
        let first = self.first.map(|first| &self.launchers[first]);
        let ended = first.and_then(|first| first.ended);
        let status = match (first.zip(ended), self.asked_by) {
            (Some((_, (status, _))), Some(signal)) if status == status_of_signal(signal) => {
                say(&format!("ended by {}", name(signal)));
                status
            }
            (Some((first, (status, after))), _) => {
                say(&first.failure(status, after));
                crash.unwrap_or(status.max(1))
            }
            (None, Some(signal)) if self.launchers.iter().any(Launcher::has_failed) => {
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
            // Who does not read has ended, or is about to.
            let write = |bytes: Vec<u8>| to.write_all(&bytes).and_then(|()| to.flush());
            let _ = receiver.iter().try_for_each(write);
        })?;
    Ok(sender)
}

/// Whether a launcher with this status had a rank that died of itself.
fn is_crash(status: u8) -> bool {
    let signal = i32::from(status) - 128;
    (1..SSH_FAILED - 128).contains(&(status.saturating_sub(128)))
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

    fn pass_on(&mut self, signal: i32) {
        if self.has_order {
            self.tell(signal_line(signal).into_bytes());
        } else if is_ending(signal) {
            // It has nothing to end yet, and is not to begin.
            self.lifeline = None;
        }
    }

    fn tell(&mut self, bytes: Vec<u8>) {
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
        // What had something to start and did not say so ran no launcher.
        self.ended
            .is_some_and(|(status, _)| status > 0 || self.is_mute && self.lifeline.is_some())
    }

    fn failure(&self, status: u8, after: Duration) -> String {
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
        format!(
            "{host} ({ranks}) failed first, after {}: {how}",
            seconds(after)
        )
    }
}

/// The words of the command that reaches a host, which come before its name.
fn ssh(command: &str) -> io::Result<Vec<String>> {
    let mut words = shlex::split(command).unwrap_or_default();
    let Some(program) = words.first() else {
        let why = format!("--ssh {command:?} is no command");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    };
    if Path::new(program).file_name() == Some(OsStr::new("ssh")) {
        words.extend(SSH_OPTIONS.map(str::to_owned));
    }
    Ok(words)
}

/// What all parts of the job are told, before it is known which part it is.
fn order(options: &Options) -> io::Result<Order> {
    let master = options.master_addr.as_deref();
    let mut arguments: Vec<OsString> = vec!["--output".into()];
    arguments.push(match &options.output {
        Output::Prefix => "prefix".into(),
        Output::Plain => "plain".into(),
        Output::Folder(folder) => folder.into(),
    });
    let grace = options.grace.as_secs_f64().to_string();
    arguments.extend(["--grace".into(), grace.into()]);
    arguments.extend(options.module.then(|| "--module".into()));
    arguments.extend(options.as_gloo.then(|| "--as-gloo".into()));
    arguments.push("--".into());
    arguments.extend(options.program.iter().cloned());
    let hosts = options.hosts.iter();
    Ok(Order {
        part: Part {
            world: hosts.map(|host| options.ranks_of(host)).sum(),
            first: 0,
            ranks: 0,
            host: String::new(),
            master: master.unwrap_or(options.hosts[0].address()).to_owned(),
            port: options.port.map_or(0, Into::into),
            secret: new_secret()?,
        },
        folder: env::current_dir()?.into(),
        variables: variables(&options.variables),
        arguments,
        grace: options.grace,
    })
}

/// What runs the launcher of a host, as a shell there is to read it.
fn remote_command(door: &Door) -> io::Result<OsString> {
    let mut words = vec![OsString::from("exec")];
    // The launcher may need it to start; what the ranks get comes with the order.
    if let Some(path) = env::var_os("LD_LIBRARY_PATH") {
        let mut assignment = OsString::from("LD_LIBRARY_PATH=");
        assignment.push(path);
        words.extend(["env".into(), assignment]);
    }
    for word in &door.again {
        words.push(match word == THIS {
            true => env::current_exe()?.into(),
            false => word.clone(),
        });
    }
    words.push(PART.into());
    let words = words.iter().map(|word| word.as_bytes());
    let command = shlex::bytes::try_join(words).map_err(io::Error::other)?;
    Ok(OsString::from_vec(command))
}

/// The variables for the ranks: those that are passed on anyway, and `asked` for.
fn variables(asked: &[OsString]) -> Vec<OsString> {
    let assignment = |name: &OsStr, value: &OsStr| {
        let mut assignment = name.to_owned();
        assignment.push("=");
        assignment.push(value);
        assignment
    };
    let mut all: Vec<OsString> = env::vars_os()
        .filter(|(name, _)| is_passed_on(name))
        .map(|(name, value)| assignment(&name, &value))
        .collect();
    all.extend(asked.iter().filter_map(|asked| match split(asked) {
        Some(_) => Some(asked.clone()),
        None => env::var_os(asked).map(|value| assignment(asked, &value)),
    }));
    all
}

fn is_passed_on(name: &OsStr) -> bool {
    let begins = |prefix: &&str| name.as_bytes().starts_with(prefix.as_bytes());
    let is_wanted =
        PASSED_ON.iter().any(|wanted| name == *wanted) || PASSED_ON_BY_PREFIX.iter().any(&begins);
    is_wanted && !OF_ANOTHER_JOB.iter().any(begins)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_of_ssh_is_read_as_by_a_shell() {
        let words = ssh("/usr/bin/ssh -p 22 -o \"ProxyCommand=ssh -W %h:%p jump\"").expect("valid");
        assert_eq!(words[..4], ["/usr/bin/ssh", "-p", "22", "-o"]);
        assert_eq!(words[4], "ProxyCommand=ssh -W %h:%p jump");
        assert_eq!(words[5..], SSH_OPTIONS);
        assert_eq!(ssh("./rsh -x").expect("valid"), ["./rsh", "-x"]);
        ssh("").expect_err("nothing");
        ssh("ssh 'x").expect_err("half a word");
    }

    #[test]
    fn the_launcher_of_a_host_is_called_through_a_shell() {
        let again = ["printf", "%s|", "a b", "it's", "$(x)"].map(OsString::from);
        let door = Door {
            again: again.into(),
            interpreter: "python3".into(),
        };
        let command = remote_command(&door).expect("no zero byte");
        let done = Command::new("sh").arg("-c").arg(command).output();
        let text = format!("a b|it's|$(x)|{PART}|");
        assert_eq!(done.expect("a shell").stdout, text.as_bytes());
    }

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
    fn variables_of_another_job_and_secrets_stay_here() {
        for (name, expected) in [
            ("PATH", true),
            ("UNISONO_TIMEOUT", true),
            ("PYTHONPATH", true),
            ("NCCL_SOCKET_IFNAME", true),
            ("UNISONO_LAUNCH_SECRET", false),
            ("TORCHELASTIC_RUN_ID", false),
            ("HOME", false),
            ("AWS_SECRET_ACCESS_KEY", false),
        ] {
            assert_eq!(is_passed_on(OsStr::new(name)), expected, "{name}");
        }
        let asked = variables(&["A=1".into(), "UNISONO_NOT_SET_ANYWHERE".into()]);
        assert!(asked.contains(&"A=1".into()));
        assert!(
            !asked
                .iter()
                .any(|one| one.as_bytes().starts_with(b"UNISONO_NOT_SET"))
        );
    }

    #[test]
    fn loopback_is_no_address_for_others() {
        for address in ["localhost", "127.0.0.1", "127.1.2.3", "::1"] {
            assert!(is_loopback(address), "{address}");
        }
        assert!(!is_loopback("node1") && !is_loopback("10.0.0.1"));
    }
}
