//! What the command line says.

use std::ffi::OsString;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap::{Args, Command, FromArgMatches};

/// More ranks than this on one host are a slip of the hand.
const MOST_RANKS: i64 = 4096;
/// More than this no clock can add to now; it is for ever.
const LONGEST: Duration = Duration::from_secs(1 << 32);

#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// How many ranks to start
    #[arg(short = 'n', long = "ranks", alias = "nproc-per-node", value_name = "RANKS",
          value_parser = clap::value_parser!(u16).range(1..=MOST_RANKS))]
    pub(crate) world: u16,

    /// PROGRAM is the name of a Python module, as in `python -m PROGRAM`
    #[arg(short, long)]
    pub(crate) module: bool,

    /// Where the output of the ranks goes: `prefix` puts the rank before every line, `plain` hands it through
    /// as it comes, anything else is a folder that gets rank-0.out, rank-0.err and so on
    #[arg(short, long, value_name = "prefix|plain|DIR", default_value = "prefix",
          value_parser = OsStringValueParser::new().map(Output::from))]
    pub(crate) output: Output,

    /// How long ranks have between SIGTERM and SIGKILL when they are ended because another rank failed
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub(crate) grace: Duration,

    /// The port at which the ranks meet (MASTER_PORT), instead of a free one
    #[arg(long, value_name = "PORT")]
    pub(crate) port: Option<NonZeroU16>,

    /// PyTorch programs that ask for gloo get unisono, see docs/gloo.md (sets UNISONO_AS_GLOO=1)
    #[arg(long)]
    pub(crate) as_gloo: bool,

    /// The program and its arguments; a file that ends in .py is run by Python
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    pub(crate) program: Vec<OsString>,
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
    Ok(time.min(LONGEST))
}

const MORE: &str = "\
Every rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun, and \
UNISONO_LAUNCH_SECRET, a new secret by which the ranks keep other processes out. Where \
they are not set, OMP_NUM_THREADS is its share of this machine's cores, so that ranks do not crowd each other out, and \
PYTHONUNBUFFERED is 1, so that Python's output comes as it is printed.

Rank 0 reads the standard input; the others find it empty. SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are \
passed on to the ranks, and when one of the first four comes a third time everything is killed.

When a rank fails, the others are ended. The exit status is that of the rank that failed first, or 128 and the number \
of the signal that ended it. Whatever the ranks started ends with them.

Examples:
  unisono launch -n 4 ./heat --steps 500
  unisono launch -n 2 train.py --epochs 3
  unisono launch -n 2 -m package.train
  unisono launch -n 4 --output logs ./program";

/// The command line of `unisono launch`.
pub fn command() -> Command {
    Options::augment_args(
        Command::new("unisono launch")
            .bin_name("unisono launch")
            .about("Start the ranks of a program on this host")
            .override_usage("unisono launch -n RANKS [OPTIONS] PROGRAM [ARGUMENTS]...")
            .after_help(MORE),
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
        read.map_err(|error| {
            // A closed standard error leaves nothing to tell it to.
            let _ = error.print();
            u8::try_from(error.exit_code()).unwrap_or(2)
        })
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
        assert_eq!(options.world, 4);
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
        ] {
            assert_eq!(read(arguments).expect_err("wrong"), 2, "{arguments:?}");
        }
    }
}
