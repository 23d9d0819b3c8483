//! What the user started, where the ranks are on several hosts: one `ssh` for each, which runs the launcher of that host
//! (`part.rs`), and what follows when one of them ends.
//!
//! The hosts are to a job what the ranks are to a keeper: when the ranks of one have failed, those of the others are
//! ended. They are ended by closing the standard input of their launchers, and so is the job if this process is killed.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGCHLD, SIGCONT, SIGTSTP};

use crate::environment::new_secret;
use crate::front;
use crate::options::{Host, Options, Output};
use crate::output::Outputs;
use crate::part::{Order, PORT, Part, signal_line, split};
use crate::rank::status_of_signal;
use crate::report::{say, seconds};
use crate::signals::{self, Caught, Event, is_ending};
use crate::{Door, PART, THIS};

/// What ssh exits with when it failed itself.
const SSH_FAILED: u8 = 255;
/// How much longer than its ranks the launcher of a host may take to end.
const SLACK: Duration = Duration::from_secs(10);
/// What a login may print before the launcher begins.
const LONGEST_GREETING: usize = 1 << 16;
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
    let mut job = Job {
        options,
        caught: Caught::new()?,
        launchers: Vec::new(),
        start: Instant::now(),
        first: None,
        asked_by: None,
        deadline: None,
        gave_up_on: Vec::new(),
    };
    let outputs = job.start(door);
    let outputs = outputs.inspect_err(|_| job.kill())?;
    outputs.start(job.caught.sender())?;
    job.wait();
    Ok(job.report())
}

fn is_loopback(address: &str) -> bool {
    let parsed = address.parse::<std::net::IpAddr>();
    address == "localhost" || parsed.is_ok_and(|address| address.is_loopback())
}

struct Job<'a> {
    options: &'a Options,
    caught: Caught,
    launchers: Vec<Launcher<'a>>,
    start: Instant,
    /// The launcher whose failure was seen first.
    first: Option<usize>,
    asked_by: Option<i32>,
    /// When the hosts that were to end are given up.
    deadline: Option<Instant>,
    gave_up_on: Vec<String>,
}

/// The launcher of one host, behind the command that reaches it.
struct Launcher<'a> {
    host: &'a Host,
    first: u16,
    ranks: u16,
    child: Child,
    /// Its ranks end when it is dropped.
    lifeline: Option<ChildStdin>,
    ended: Option<(u8, Duration)>,
    /// Whether it was to end.
    is_asked: bool,
}

impl<'a> Job<'a> {
    fn start(&mut self, door: &Door) -> io::Result<Outputs> {
        let Options { hosts, output, .. } = self.options;
        let world = hosts.iter().map(|host| self.options.ranks_of(host)).sum();
        // What they print is printed as it comes, in whole lines where the ranks' lines are told apart.
        let mut outputs = match output {
            Output::Plain => Outputs::new(Output::Plain, world),
            Output::Prefix | Output::Folder(_) => Outputs::without_prefix(),
        }?;
        let command = remote_command(door)?;
        let mut order = self.order(world)?;
        let mut first = 0;
        for host in hosts {
            let ranks = self.options.ranks_of(host);
            let mut words = self.options.ssh.split_whitespace();
            let mut ssh = Command::new(words.next().unwrap_or_default());
            ssh.args(words)
                .arg(&host.name)
                .arg(&command)
                .stdin(Stdio::piped());
            outputs.prepare(0, &mut ssh)?;
            if first == 0 {
                ssh.stdout(Stdio::piped());
            }
            let mut child = front::spawn(&mut ssh).map_err(|error| {
                let what = format!("cannot start `{}`: {error}", self.options.ssh);
                io::Error::new(error.kind(), what)
            })?;
            self.launchers.push(Launcher {
                host,
                first,
                ranks,
                lifeline: child.stdin.take(),
                child,
                ended: None,
                is_asked: false,
            });
            first += ranks;
        }
        for number in 0..self.launchers.len() {
            self.launchers[number].give(&mut order);
            if number == 0 {
                // None where it failed to start: that is seen later, as the end of any host.
                order.part.port = self.launchers[0].read_port()?.unwrap_or(1);
            }
            outputs.adopt(0, &mut self.launchers[number].child);
        }
        Ok(outputs)
    }

    fn order(&self, world: u16) -> io::Result<Order> {
        let options = self.options;
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
        Ok(Order {
            part: Part {
                world,
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

    /// Returns when all hosts have ended, and all that they printed has been written.
    fn wait(&mut self) {
        let mut has_printed = false;
        while !has_printed || self.launchers.iter().any(|host| host.ended.is_none()) {
            match self.caught.next(self.deadline) {
                None => {
                    self.kill();
                    return;
                }
                Some(Event::Printed) => has_printed = true,
                Some(Event::Signal(SIGCHLD)) => self.look(),
                Some(Event::Signal(signal)) => self.pass_on(signal),
            }
        }
    }

    fn look(&mut self) {
        let after = self.start.elapsed();
        for (number, launcher) in self.launchers.iter_mut().enumerate() {
            if launcher.look(after) && self.first.is_none() && !launcher.is_asked {
                self.first = Some(number);
            }
        }
        if self.first.is_some() && self.deadline.is_none() {
            self.end();
        }
    }

    fn pass_on(&mut self, signal: i32) {
        if is_ending(signal) {
            self.asked_by = Some(signal);
        }
        match signal {
            // The hosts go on, until nobody reads what they print.
            SIGTSTP => return signals::stop_self(),
            SIGCONT => return,
            _ => {}
        }
        for launcher in &mut self.launchers {
            launcher.is_asked |= is_ending(signal);
            launcher.tell(&signal_line(signal));
        }
    }

    /// Ends all ranks.
    fn end(&mut self) {
        for launcher in &mut self.launchers {
            launcher.is_asked = true;
            launcher.lifeline = None;
        }
        self.deadline = Some(Instant::now() + self.options.grace + SLACK);
    }

    /// Waits for the hosts no longer.
    fn kill(&mut self) {
        for launcher in &mut self.launchers {
            if launcher.ended.is_none() {
                let _ = launcher.child.kill();
                let _ = launcher.child.wait();
                self.gave_up_on.push(launcher.host.to_string());
            }
        }
    }

    fn report(&self) -> u8 {
        let status = match self.first.map(|first| &self.launchers[first]) {
            Some(first) => {
                let (status, after) = first.ended.unwrap_or_default();
                say(&first.failure(status, after));
                status
            }
            None => {
                let failed = self.launchers.iter().filter_map(|host| host.ended);
                let failed = failed.map(|(status, _)| status).find(|&status| status > 0);
                match (failed, self.asked_by) {
                    (Some(_), Some(signal)) => status_of_signal(signal),
                    (status, _) => status.unwrap_or(0),
                }
            }
        };
        for host in &self.gave_up_on {
            say(&format!("{host} did not answer: its ranks may run on"));
        }
        match (status, self.gave_up_on.is_empty()) {
            (0, false) => 1,
            (status, _) => status,
        }
    }
}

impl Launcher<'_> {
    /// Tells it what to start.
    fn give(&mut self, order: &mut Order) {
        order.part.first = self.first;
        order.part.ranks = self.ranks;
        order.part.host = self.host.to_string();
        // It is gone when that fails, which is seen by its end.
        if let Some(to) = &mut self.lifeline {
            let _ = order.write(to);
        }
    }

    fn tell(&mut self, line: &str) {
        if let Some(to) = &mut self.lifeline {
            let _ = to.write_all(line.as_bytes());
        }
    }

    /// The port that it chose, and prints first. What its host's login prints before goes to standard error.
    #[expect(
        clippy::unbuffered_bytes,
        reason = "what follows the line is for another reader"
    )]
    fn read_port(&mut self) -> io::Result<Option<u16>> {
        let Some(from) = &mut self.child.stdout else {
            return Ok(None);
        };
        let mut line = Vec::new();
        for byte in from.by_ref().bytes().take(LONGEST_GREETING) {
            let byte = byte?;
            line.push(byte);
            if byte != b'\n' {
                continue;
            }
            let text = String::from_utf8_lossy(&line);
            if let Some(port) = text.trim_end().strip_prefix(PORT) {
                return Ok(port.parse().ok());
            }
            let _ = io::stderr().write_all(&line);
            line.clear();
        }
        let _ = io::stderr().write_all(&line);
        Ok(None)
    }

    /// Whether it has just ended, and not well.
    fn look(&mut self, after: Duration) -> bool {
        if self.ended.is_some() {
            return false;
        }
        let Ok(Some(status)) = self.child.try_wait() else {
            return false;
        };
        let by_signal = || status_of_signal(status.signal().unwrap_or(0));
        let code = status.code().map(|code| u8::try_from(code).unwrap_or(1));
        let code = code.unwrap_or_else(by_signal);
        self.ended = Some((code, after));
        self.lifeline = None;
        code != 0
    }

    fn failure(&self, status: u8, after: Duration) -> String {
        let ranks = match self.ranks {
            1 => format!("rank {}", self.first),
            ranks => format!("ranks {}-{}", self.first, self.first + ranks - 1),
        };
        let hint = match status {
            SSH_FAILED => format!(
                ": it was not reached, or the connection was lost (does `ssh {} true` work without a password?)",
                self.host
            ),
            status => format!(": exit code {status}"),
        };
        format!(
            "{} ({ranks}) failed first, after {}{hint}",
            self.host,
            seconds(after)
        )
    }
}

/// What runs the launcher of a host, as a shell there is to read it.
fn remote_command(door: &Door) -> io::Result<OsString> {
    let mut words = vec![OsString::from("exec")];
    // Python may need it to find unisono at all.
    if let Some(path) = env::var_os("PYTHONPATH") {
        let mut assignment = OsString::from("PYTHONPATH=");
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
    let quoted: Vec<Vec<u8>> = words.iter().map(|word| quoted(word.as_bytes())).collect();
    Ok(OsString::from_vec(quoted.join(&b' ')))
}

/// As one word for any shell.
fn quoted(word: &[u8]) -> Vec<u8> {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_./=:,+".contains(byte);
    if !word.is_empty() && word.iter().all(is_plain) {
        return word.to_owned();
    }
    let mut quoted = vec![b'\''];
    for &byte in word {
        match byte {
            b'\'' => quoted.extend_from_slice(br"'\''"),
            byte => quoted.push(byte),
        }
    }
    quoted.push(b'\'');
    quoted
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
    fn words_are_quoted_for_a_shell() {
        let words: [&[u8]; 5] = [b"plain-1.0/x", b"a b", b"it's", b"", b"$(x);\n"];
        let text = words.map(quoted).join(&b' ');
        let script = [b"printf '%s|' ".as_slice(), &text].concat();
        let done = Command::new("sh")
            .arg("-c")
            .arg(OsString::from_vec(script))
            .output()
            .expect("a shell");
        assert_eq!(done.stdout, b"plain-1.0/x|a b|it's||$(x);\n|");
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
