//! Orders to the launchers of other hosts: which part of a job the ranks of a host are, and how they are started.
//!
//! An [`Order`] is written to the standard input of `unisono launch --part-of-job`, and after it a line `signal 15` for each
//! signal to pass on. It holds the job's secret, so it is on no command line. The part that has its order answers with
//! [`port_line`].

use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, Read as _, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

/// The text before the port in the line that says it.
const PORT: &str = "unisono launch: the ranks meet at port ";
/// The first word of an order, with the version of both launchers.
const VERSION: &str = concat!("unisono launch ", env!("CARGO_PKG_VERSION"));
/// The longest word of an order, and the most words: the kernel takes no longer command lines either.
const LONGEST: u64 = 1 << 21;
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
    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(&words_to_bytes(&self.words()))?;
        to.flush()
    }

    /// As a keeper is told.
    pub(crate) fn read(from: &mut impl BufRead) -> io::Result<Self> {
        read_words(from).and_then(Self::from_words)
    }
}

/// A secret for the ranks of one job.
pub(crate) fn new_secret() -> io::Result<String> {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).map_err(|cause| io::Error::other(cause.to_string()))?;
    Ok(secret.iter().map(|byte| format!("{byte:02x}")).collect())
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

    pub(crate) fn read(from: &mut impl BufRead) -> io::Result<Self> {
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

/// `NAME=VALUE` as its two sides.
pub(crate) fn split(variable: &OsStr) -> Option<(&OsStr, &OsStr)> {
    let bytes = variable.as_bytes();
    let at = bytes.iter().position(|&byte| byte == b'=')?;
    Some((
        OsStr::from_bytes(&bytes[..at]),
        OsStr::from_bytes(&bytes[at + 1..]),
    ))
}

/// The line that says at which port all ranks meet.
pub(crate) fn port_line(port: u16) -> String {
    format!("{PORT}{port}\n")
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
}
