//! The processes of a launch are one executable, which is called again with another first argument.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::Pid;

/// Where the launcher was called from, which decides how it calls itself and what runs a Python script.
#[derive(Clone, Debug)]
pub struct Door {
    /// The command that calls [`launch`](crate::launch) again, with the arguments that follow it.
    pub again: Vec<OsString>,
    /// The Python that runs scripts and modules.
    pub interpreter: OsString,
    /// The message when it is used, where the user may expect another.
    pub note: Option<String>,
}

impl Door {
    /// Through the binary `unisono`, which this process runs.
    pub fn binary() -> Self {
        Self {
            again: vec![THIS.into(), "launch".into()],
            interpreter: "python3".into(),
            note: None,
        }
    }
}

const NAME: &str = "unisono";
/// This process's executable, even if its file has been replaced.
pub(crate) const THIS: &str = "/proc/self/exe";

/// Which of the processes this is, and what is left of its arguments.
pub(crate) enum Role<'a> {
    Front,
    Keeper(Pid, &'a [OsString]),
    Starter(Pid, &'a [OsString]),
    /// The front of a part of a job, on one of several hosts.
    Part,
}

pub(crate) const KEEPER: &str = "--keeper-of=";
pub(crate) const STARTER: &str = "--starter-of=";
pub(crate) const PART: &str = "--part-of-job";

impl<'a> Role<'a> {
    pub(crate) fn of(arguments: &'a [OsString]) -> Self {
        let Some((first, rest)) = arguments.split_first() else {
            return Self::Front;
        };
        let parent = |flag| {
            let number = first.to_str()?.strip_prefix(flag)?.parse().ok()?;
            Pid::from_raw(number)
        };
        if first == PART && rest.is_empty() {
            return Self::Part;
        }
        match (parent(KEEPER), parent(STARTER)) {
            (Some(front), _) => Self::Keeper(front, rest),
            (_, Some(keeper)) => Self::Starter(keeper, rest),
            _ => Self::Front,
        }
    }
}

/// The command that calls this executable again in the role that `flag` names, as a child of this process.
pub(crate) fn again(door: &Door, flag: &str) -> Command {
    let mut words = door.again.iter();
    let mut command = Command::new(words.next().map_or(OsStr::new(NAME), OsString::as_os_str));
    if door.again.first().is_some_and(|program| program == THIS) {
        // The name that `ps` shows.
        command.arg0(NAME);
    }
    command
        .args(words)
        .arg(format!("{flag}{}", std::process::id()));
    command
}
