//! The options of the command line.

use std::ffi::OsString;
use std::fmt;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap::error::ErrorKind;
use clap::{Args, Command, FromArgMatches};

/// More ranks than this on one host are a slip of the hand.
const MOST_RANKS: i64 = 4096;
/// More than this no clock can add to now; it is for ever.
const LONGEST_TIME: Duration = Duration::from_secs(1 << 32);

#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// How many ranks, here or on each of --hosts
    #[arg(short = 'n', long = "ranks", alias = "nproc-per-node", value_name = "RANKS",
          required_unless_present_any = ["hosts", "part"],
          value_parser = clap::value_parser!(u16).range(1..=MOST_RANKS))]
    pub(crate) ranks: Option<u16>,

    /// Start ranks on these hosts, over ssh: `a,b` or `a:4,b:2`
    #[arg(long, value_name = "HOSTS", value_delimiter = ',', value_parser = Host::read)]
    pub(crate) hosts: Vec<Host>,

    /// A command like ssh
    #[arg(
        long,
        value_name = "COMMAND",
        default_value = "ssh",
        requires = "hosts"
    )]
    pub(crate) ssh: String,

    /// Where the others reach the first host
    #[arg(long, value_name = "ADDRESS", requires = "hosts")]
    pub(crate) master_addr: Option<String>,

    /// A further variable for the ranks on --hosts
    #[arg(long = "env", value_name = "NAME[=VALUE]", requires = "hosts")]
    pub(crate) variables: Vec<OsString>,

    /// Go on with RANKS, and start lost ones again
    #[arg(long, value_name = "RANKS", value_parser = clap::value_parser!(u16).range(1..=MOST_RANKS))]
    pub(crate) min: Option<u16>,

    /// How often a rank is started again
    #[arg(long, value_name = "TIMES", default_value = "3", requires = "min")]
    pub(crate) restarts: u16,

    /// The ranks are a part of a job; which one, comes by the standard input. For the launcher's own use
    #[arg(long, hide = true, conflicts_with_all = ["ranks", "hosts"])]
    pub(crate) part: bool,

    /// PROGRAM is a module, as in `python -m PROGRAM`
    #[arg(short, long)]
    pub(crate) module: bool,

    /// `prefix` or `plain` output, or a folder for files
    #[arg(short, long, value_name = "WHERE", default_value = "prefix",
          value_parser = OsStringValueParser::new().map(Output::from))]
    pub(crate) output: Output,

    /// From SIGTERM to SIGKILL when a rank fails
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub(crate) grace: Duration,

    /// The port of rank 0, instead of a free one
    #[arg(long, value_name = "PORT")]
    pub(crate) port: Option<NonZeroU16>,

    /// Programs that ask for gloo get unisono
    #[arg(long)]
    pub(crate) as_gloo: bool,

    /// The program and its arguments; a .py file is run by Python
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    pub(crate) program: Vec<OsString>,
}

/// A host of `--hosts`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// As ssh takes it: perhaps with a user, `me@a`.
    pub(crate) name: String,
    /// How many ranks it gets, if not as many as -n says.
    pub(crate) ranks: Option<u16>,
}

impl Host {
    /// `a`, `me@a:4`, `[fe80::1]:4`.
    fn read(text: &str) -> Result<Self, String> {
        let inside = |text: &str| {
            let (user, rest) = text.split_once('[')?;
            let (address, rest) = rest.split_once(']')?;
            Some((format!("{user}{address}"), rest.to_owned()))
        };
        let (name, rest) = match inside(text) {
            Some(split) => split,
            // An address of IPv6 without brackets has more than one colon, and no number of ranks.
            None => match text.split_once(':') {
                Some((name, ranks)) if !ranks.contains(':') => {
                    (name.to_owned(), format!(":{ranks}"))
                }
                _ => (text.to_owned(), String::new()),
            },
        };
        // ssh would take it for an option.
        if name.is_empty() || name.starts_with('-') {
            return Err("no name of a host".to_owned());
        }
        let ranks = match rest.strip_prefix(':') {
            None if rest.is_empty() => None,
            ranks => Some(
                ranks
                    .and_then(|ranks| ranks.parse().ok())
                    .filter(|&ranks| (1..=MOST_RANKS).contains(&i64::from(ranks)))
                    .ok_or_else(|| {
                        format!("after the host comes a number of ranks, 1 to {MOST_RANKS}")
                    })?,
            ),
        };
        Ok(Self { name, ranks })
    }

    /// The name by which other hosts may know it.
    pub(crate) fn address(&self) -> &str {
        self.name
            .rsplit_once('@')
            .map_or(&*self.name, |(_, host)| host)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Where the output of the ranks goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// To the launcher's own, each line after the number of its rank.
    Prefix,
    /// To the launcher's own, untouched.
    Plain,
    /// To two files for each rank in this folder.
    Folder(PathBuf),
}

impl From<OsString> for Output {
    fn from(text: OsString) -> Self {
        match text.to_str() {
            Some("prefix") => Self::Prefix,
            Some("plain") => Self::Plain,
            _ => Self::Folder(text.into()),
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    let time = Duration::try_from_secs_f64(number).map_err(|error| error.to_string())?;
    Ok(time.min(LONGEST_TIME))
}

const MORE: &str = "\
Examples:
  unisono launch -n 4 ./heat --steps 500
  unisono launch -n 2 train.py --epochs 3
  unisono launch -n 2 -m package.train
  unisono launch -n 4 --output logs ./program
  unisono launch -n 4 --min 3 train.py
  unisono launch --hosts node1,node2 -n 4 train.py";

/// The command line of `unisono launch`.
pub fn command() -> Command {
    Options::augment_args(
        Command::new("unisono launch")
            .bin_name("unisono launch")
            .about("Start the ranks of a program on this host, or on several")
            .override_usage(
                "unisono launch [--hosts HOSTS] -n RANKS [OPTIONS] PROGRAM [ARGUMENTS]...",
            )
            .after_help(MORE)
            .term_width(80),
    )
}

impl Options {
    /// Reads `arguments`, those after `launch`. For wrong ones, and when help is asked for, says so and returns the
    /// status to exit with.
    pub(crate) fn read(arguments: &[OsString]) -> Result<Self, u8> {
        let name = OsString::from("unisono launch");
        let arguments = std::iter::once(&name).chain(arguments);
        let read = command()
            .try_get_matches_from(arguments)
            .and_then(|matches| Self::from_arg_matches(&matches));
        let read = read.and_then(Self::checked);
        read.map_err(|error| {
            // A closed standard error leaves nothing to tell it to.
            let _ = error.print();
            u8::try_from(error.exit_code()).unwrap_or(2)
        })
    }

    /// Refuses what only the whole of them shows to be wrong.
    fn checked(self) -> Result<Self, clap::Error> {
        let missing = self
            .hosts
            .iter()
            .find(|host| host.ranks.or(self.ranks).is_none());
        if let Some(host) = missing {
            let why = format!(
                "how many ranks {host} gets is not said: write {host}:2, or -n 2 for all\n"
            );
            return Err(command().error(ErrorKind::MissingRequiredArgument, why));
        }
        let ranks = match self.part {
            true => None,
            false => Some(self.all_ranks()),
        };
        if let (Some(min), Some(ranks)) = (self.min, ranks)
            && u32::from(min) > ranks
        {
            let why = format!("--min {min} is more than the {ranks} ranks of the job\n");
            return Err(command().error(ErrorKind::ValueValidation, why));
        }
        for (number, host) in self.hosts.iter().enumerate() {
            if self.hosts[..number]
                .iter()
                .any(|other| other.name == host.name)
            {
                let why =
                    format!("{host} is there twice: say how many ranks it gets, as in {host}:4\n");
                return Err(command().error(ErrorKind::ArgumentConflict, why));
            }
        }
        let all = self.hosts.iter().map(|host| i64::from(self.ranks_of(host)));
        if all.sum::<i64>() > MOST_RANKS {
            let why = format!("more than {MOST_RANKS} ranks\n");
            return Err(command().error(ErrorKind::ValueValidation, why));
        }
        Ok(self)
    }

    /// How many ranks the job has.
    fn all_ranks(&self) -> u32 {
        let hosts = self.hosts.iter().map(|host| u32::from(self.ranks_of(host)));
        match self.hosts.is_empty() {
            true => self.ranks.unwrap_or(1).into(),
            false => hosts.sum(),
        }
    }

    /// How many ranks `host` gets.
    pub(crate) fn ranks_of(&self, host: &Host) -> u16 {
        host.ranks.or(self.ranks).unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(arguments: &[&str]) -> Result<Options, u8> {
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        Options::read(&arguments)
    }

    #[test]
    fn the_command_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn what_follows_the_program_is_the_programs() {
        let options = read(&[
            "-n",
            "4",
            "./program",
            "-n",
            "2",
            "--output",
            "x",
            "--",
            "-m",
        ])
        .expect("valid");
        assert_eq!(options.ranks, Some(4));
        assert_eq!(options.output, Output::Prefix);
        assert_eq!(
            options.program,
            ["./program", "-n", "2", "--output", "x", "--", "-m"]
        );
        let options = read(&["-n2", "--", "--odd-name"]).expect("valid");
        assert_eq!(options.program, ["--odd-name"]);
    }

    #[test]
    fn output_is_a_word_or_a_folder() {
        for (text, output) in [
            ("prefix", Output::Prefix),
            ("plain", Output::Plain),
            ("./plain", Output::Folder("./plain".into())),
            ("logs", Output::Folder("logs".into())),
        ] {
            let options = read(&["-n1", "--output", text, "program"]).expect("valid");
            assert_eq!(options.output, output);
        }
    }

    #[test]
    fn hosts_have_names_and_perhaps_numbers() {
        let options = read(&["-n2", "--hosts", "a,me@b:4,[::1]:3,fe80::2", "program"]);
        let options = options.expect("valid");
        let hosts = options.hosts.iter();
        let found: Vec<_> = hosts
            .map(|host| (&*host.name, host.address(), options.ranks_of(host)))
            .collect();
        assert_eq!(
            found,
            [
                ("a", "a", 2),
                ("me@b", "b", 4),
                ("::1", "::1", 3),
                ("fe80::2", "fe80::2", 2)
            ]
        );
        read(&["--hosts", "a:1,b:2", "program"]).expect("all numbers are said");
    }

    #[test]
    fn wrong_arguments_are_refused() {
        for arguments in [
            &[][..],
            &["program"],
            &["-n", "0", "program"],
            &["-n", "5000", "program"],
            &["-n", "2"],
            &["-n", "2", "--grace", "-1", "program"],
            &["-n", "2", "--grace", "inf", "program"],
            &["-n", "2", "--port", "0", "program"],
            &["-n", "2", "--nonsense", "program"],
            &["-n", "2", "--min", "0", "program"],
            &["-n", "2", "--min", "3", "program"],
            &["-n", "2", "--restarts", "3", "program"],
            &["--hosts", "a:2,b:2", "--min", "5", "program"],
            &["--hosts", "a", "program"],
            &["--hosts", "a:2,b", "program"],
            &["--hosts", "a:0", "program"],
            &["--hosts", "a:x", "program"],
            &["--hosts", "-oProxyCommand=x:2", "program"],
            &["--hosts", "a:4000,b:4000", "program"],
            &["--hosts", "a:2,b:1,a:2", "program"],
            &["-n", "2", "--ssh", "rsh", "program"],
        ] {
            assert_eq!(read(arguments).expect_err("wrong"), 2, "{arguments:?}");
        }
    }
}
