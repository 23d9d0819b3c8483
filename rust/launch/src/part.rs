//! The ranks of one host as a part of a job: which part they are, and the launcher that another one started for them.
//!
//! `hosts.rs` starts `unisono launch --part-of-job` on each host, over ssh, and writes to its standard input
//!
//! 1. an [`Order`]: what to start, and as which part of the job. It holds the job's secret, so it is on no command line.
//! 2. for each signal to pass on, a line `signal 15`.
//!
//! The end of the input is the end of the job, whatever ended it: a rank on another host, the launcher that wrote
//! the order, its host, or the connection. So nothing that was started on a host outlives the job.
//!
//! A part that has its order prints the port at which all ranks meet, after [`PORT`], before anything else. The part with
//! rank 0 chooses that port, unless the order names one.

use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, BufReader, Read as _, Write};
use std::num::NonZeroU16;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::Stdio;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use signal_hook::consts::{SIGTERM, SIGTSTP};

use crate::environment::{Reservation, new_secret};
use crate::front;
use crate::report::{self, say};
use crate::signals::{self, Caught, Event};
use crate::{Door, KEEPER, again, processes};

/// The text before the port in the line that says it.
const PORT: &str = "unisono launch: the ranks meet at port ";
/// The first word of an order, with the version of both launchers.
const VERSION: &str = concat!("unisono launch ", env!("CARGO_PKG_VERSION"));
/// The longest word of an order, and the most words: the kernel takes no longer command lines either.
const LONGEST: u64 = 1 << 21;
/// Between requests to end at once.
const PAUSE: Duration = Duration::from_millis(20);

/// Which part of a job the ranks of a host are, and how all ranks find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// How many ranks the job has.
    pub(crate) world: u16,
    /// The first rank of this host.
    pub(crate) first: u16,
    /// How many ranks this host has.
    pub(crate) ranks: u16,
    /// The user's name for this host; empty where all ranks are on one.
    pub(crate) host: String,
    /// A name or an address of rank 0's host.
    pub(crate) master: String,
    /// The port there; 0 where rank 0's host is to choose it.
    pub(crate) port: u16,
    /// Known to the ranks of this job alone; never shown.
    pub(crate) secret: String,
}

impl Part {
    /// All ranks of a job on this host.
    pub(crate) fn alone(ranks: u16, port: u16) -> io::Result<Self> {
        Ok(Self {
            world: ranks,
            first: 0,
            ranks,
            host: String::new(),
            master: "127.0.0.1".to_owned(),
            port,
            secret: new_secret()?,
        })
    }

    fn words(&self) -> Vec<OsString> {
        let numbers = [self.world, self.first, self.ranks, self.port];
        let mut words: Vec<OsString> = numbers.map(|number| number.to_string().into()).into();
        words.extend([&self.host, &self.master, &self.secret].map(OsString::from));
        words
    }

    fn from_words(words: Vec<OsString>) -> io::Result<Self> {
        let texts: Vec<String> = words
            .into_iter()
            .map(|word| word.into_string().map_err(|_| broken()))
            .collect::<io::Result<_>>()?;
        let [world, first, ranks, port, host, master, secret] =
            <[String; 7]>::try_from(texts).map_err(|_| broken())?;
        let number = |text: String| text.parse::<u16>().map_err(|_| broken());
        Ok(Self {
            world: number(world)?,
            first: number(first)?,
            ranks: number(ranks)?,
            port: number(port)?,
            host,
            master,
            secret,
        })
    }

    /// Tells a keeper which part of the job it keeps.
    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(&words_to_bytes(&self.words()))?;
        to.flush()
    }

    /// As a keeper is told.
    pub(crate) fn read(from: &mut impl BufRead) -> io::Result<Self> {
        read_words(from).and_then(Self::from_words)
    }
}

/// The order to the launcher of one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) part: Part,
    /// Where the ranks run.
    pub(crate) folder: OsString,
    /// Variables that they get besides those of their host, as `NAME=VALUE`.
    pub(crate) variables: Vec<OsString>,
    /// The arguments of a launcher on one host, without the number of ranks.
    pub(crate) arguments: Vec<OsString>,
    /// How long ranks have between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
}

impl Order {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let grace = self.grace.as_millis().to_string();
        [
            words_to_bytes(&[VERSION.into()]),
            words_to_bytes(&self.part.words()),
            words_to_bytes(&[self.folder.clone(), grace.into()]),
            words_to_bytes(&self.variables),
            words_to_bytes(&self.arguments),
        ]
        .concat()
    }

    fn read(from: &mut impl BufRead) -> io::Result<Self> {
        let version = read_words(from)?;
        if version != [OsStr::new(VERSION)] {
            let other = version.first().map_or(OsStr::new("nothing"), |word| word);
            return Err(io::Error::other(format!(
                "the job was started by {}, and this host has {VERSION}: all hosts need the same version",
                other.display()
            )));
        }
        let part = Part::read(from)?;
        let [folder, grace] = <[OsString; 2]>::try_from(read_words(from)?).map_err(|_| broken())?;
        let grace = grace.to_str().and_then(|text| text.parse().ok());
        Ok(Self {
            part,
            folder,
            variables: read_words(from)?,
            arguments: read_words(from)?,
            grace: Duration::from_millis(grace.ok_or_else(broken)?),
        })
    }
}

/// The number of words, and the words. Each ends with a zero byte.
fn words_to_bytes(words: &[OsString]) -> Vec<u8> {
    let mut bytes = format!("{}\0", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(word.as_bytes());
        bytes.push(0);
    }
    bytes
}

fn read_words(from: &mut impl BufRead) -> io::Result<Vec<OsString>> {
    let mut word = || {
        let mut bytes = Vec::new();
        from.take(LONGEST).read_until(0, &mut bytes)?;
        match bytes.pop() {
            Some(0) => Ok(OsString::from_vec(bytes)),
            Some(_) if bytes.len() as u64 + 1 == LONGEST => Err(broken()),
            _ => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        }
    };
    let count = word()?.to_str().and_then(|text| text.parse::<u64>().ok());
    let count = count.filter(|&count| count <= LONGEST);
    (0..count.ok_or_else(broken)?).map(|_| word()).collect()
}

fn broken() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "this is no order of a launcher (`unisono launch --hosts` gives them)",
    )
}

/// Starts what the order at the standard input says, and returns the status to exit with.
pub(crate) fn run(door: &Door) -> u8 {
    start(door).unwrap_or_else(|error| {
        say(&format!("cannot start ranks on this host: {error}"));
        1
    })
}

fn start(door: &Door) -> io::Result<u8> {
    signals::survive_closed_pipes()?;
    let mut input = BufReader::new(io::stdin());
    if input.fill_buf()?.is_empty() {
        // The job ended before it came to this host.
        return Ok(0);
    }
    let mut order = Order::read(&mut input)?;
    report::speak_of(&order.part.host);
    std::env::set_current_dir(&order.folder).map_err(|error| {
        let folder = order.folder.display();
        io::Error::new(error.kind(), format!("no folder {folder}: {error}"))
    })?;
    // Kept from other programs until the job has ended.
    let mut _port = None;
    if order.part.first == 0 {
        let port = Reservation::new(NonZeroU16::new(order.part.port))?;
        order.part.port = port.port;
        _port = Some(port);
    }
    // On a line of its own, whatever the login has printed.
    let mut out = io::stdout();
    write!(out, "\n{PORT}{}\n", order.part.port)?;
    out.flush()?;
    let caught = Caught::new()?;
    // Where that cannot be, the keeper says so.
    let _ = processes::adopt_orphans();
    let mut command = again(door, KEEPER);
    command
        .arg("--part")
        .args(&order.arguments)
        .stdin(Stdio::piped());
    for variable in &order.variables {
        if let Some((name, value)) = split(variable) {
            command.env(name, value);
        }
    }
    let mut keeper = front::spawn(&mut command)?;
    if let Some(mut told) = keeper.stdin.take() {
        // A keeper that has ended says why.
        let _ = order.part.write(&mut told);
    }
    let (events, grace) = (caught.sender(), order.grace);
    thread::Builder::new()
        .name("lifeline".to_owned())
        .spawn(move || obey(input, &events, grace))?;
    front::pass_on_signals(keeper, &caught)
}

/// `NAME=VALUE` as its two sides.
pub(crate) fn split(variable: &OsStr) -> Option<(&OsStr, &OsStr)> {
    let bytes = variable.as_bytes();
    let at = bytes.iter().position(|&byte| byte == b'=')?;
    Some((
        OsStr::from_bytes(&bytes[..at]),
        OsStr::from_bytes(&bytes[at + 1..]),
    ))
}

/// Passes on what the launcher of the job asks for, and ends the ranks when it asks for no more.
fn obey(input: impl BufRead, events: &Sender<Event>, grace: Duration) {
    // The receiver goes when the ranks have ended.
    let pass_on = |signal| events.send(Event::Signal(signal)).is_ok();
    for line in input.lines().map_while(Result::ok) {
        let signal = line
            .strip_prefix("signal ")
            .and_then(|text| text.parse().ok());
        // One that stops would stop this thread too, and with it what continues.
        if let Some(signal) = signal.filter(|&signal| signal != SIGTSTP)
            && !pass_on(signal)
        {
            return;
        }
    }
    if pass_on(SIGTERM) {
        thread::sleep(grace);
        // The third request that is seen kills; of two that come at the same moment the kernel delivers one.
        while pass_on(SIGTERM) {
            thread::sleep(PAUSE);
        }
    }
}

/// The port in `line`, if a part says there that it has its order.
pub(crate) fn port_in(line: &[u8]) -> Option<u16> {
    let line = std::str::from_utf8(line).ok()?;
    line.trim_end().strip_prefix(PORT)?.parse().ok()
}

/// The line that asks for `signal` to be passed on.
pub(crate) fn signal_line(signal: i32) -> String {
    format!("signal {signal}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order() -> Order {
        Order {
            part: Part {
                world: 6,
                first: 4,
                ranks: 2,
                host: "me@node2".to_owned(),
                master: "node1".to_owned(),
                port: 0,
                secret: "s".repeat(64),
            },
            folder: "/a folder\nof two lines".into(),
            variables: vec!["A=b=c".into(), OsString::from_vec(b"X=\xff".into())],
            arguments: vec![
                "-m".into(),
                "--".into(),
                "program".into(),
                String::new().into(),
            ],
            grace: Duration::from_millis(2500),
        }
    }

    #[test]
    fn an_order_arrives_as_it_was_given_and_leaves_what_follows() {
        let mut bytes = order().to_bytes();
        bytes.extend_from_slice(signal_line(15).as_bytes());
        let mut rest = &*bytes;
        assert_eq!(Order::read(&mut rest).expect("an order"), order());
        assert_eq!(rest, b"signal 15\n");
        assert_eq!(
            split(OsStr::new("A=b=c")),
            Some((OsStr::new("A"), OsStr::new("b=c")))
        );
    }

    #[test]
    fn half_an_order_and_none_are_refused() {
        let bytes = order().to_bytes();
        for end in 0..bytes.len() {
            Order::read(&mut &bytes[..end]).expect_err("it is not whole");
        }
        for nonsense in [
            &b"GET / HTTP/1.1\r\n\0"[..],
            b"99999999999\0",
            b"-1\0",
            b"1\0\xff\0",
        ] {
            Order::read(&mut &*nonsense).expect_err("nonsense");
        }
        let text = String::from_utf8_lossy(&bytes).replace(env!("CARGO_PKG_VERSION"), "0.0.9");
        let error = Order::read(&mut text.as_bytes()).expect_err("another version");
        assert!(
            error.to_string().contains("unisono launch 0.0.9"),
            "{error}"
        );
    }

    #[test]
    fn what_ends_the_input_ends_the_ranks() {
        let (events, seen) = std::sync::mpsc::channel();
        let asks = &b"signal 10\nnonsense\nsignal 20\n"[..];
        let obeys = thread::spawn(move || obey(asks, &events, Duration::ZERO));
        let first: Vec<Event> = seen.iter().take(4).collect();
        assert_eq!(first, [10, 15, 15, 15].map(Event::Signal));
        // The ranks have ended.
        drop(seen);
        obeys.join().expect("it ends");
    }
}
