//! How a host is reached, and what its launcher is told first.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use crate::options::{Options, Output};
use crate::order::{Order, Part, new_secret, split};
use crate::role::{Door, PART, THIS};

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
/// The variables here that the ranks get, by name and by the beginning of it.
const PASSED_ON: [&str; 3] = ["PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"];
const PASSED_ON_BY_PREFIX: [&str; 6] = ["UNISONO_", "PYTHON", "OMP_", "TORCH", "NCCL_", "GLOO_"];
/// Of those, what speaks of another job: this one may have been started inside it.
const OF_ANOTHER_JOB: [&str; 2] = ["UNISONO_LAUNCH_SECRET", "TORCHELASTIC_"];

/// The words of the command that reaches a host, which come before its name.
pub(crate) fn ssh(command: &str) -> io::Result<Vec<String>> {
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

/// The order to every part of the job, before it is known which part it is.
pub(crate) fn order(options: &Options) -> io::Result<Order> {
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
    if let Some(min) = options.min {
        let restarts = options.restarts.to_string();
        let min = min.to_string();
        arguments.extend([
            "--min".into(),
            min.into(),
            "--restarts".into(),
            restarts.into(),
        ]);
    }
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
        variables: variables(&options.variables)?,
        arguments,
        grace: options.grace,
    })
}

/// The command that runs the launcher of a host, as a shell there is to read it.
pub(crate) fn command(door: &Door) -> io::Result<OsString> {
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
fn variables(asked: &[OsString]) -> io::Result<Vec<OsString>> {
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
    for asked in asked {
        all.push(match (split(asked), env::var_os(asked)) {
            (Some(_), _) => asked.clone(),
            (None, Some(value)) => assignment(asked, &value),
            (None, None) => {
                let why = format!("--env {}: it is not set here", asked.display());
                return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
            }
        });
    }
    Ok(all)
}

fn is_passed_on(name: &OsStr) -> bool {
    let begins = |prefix: &&str| name.as_bytes().starts_with(prefix.as_bytes());
    let is_wanted =
        PASSED_ON.iter().any(|wanted| name == *wanted) || PASSED_ON_BY_PREFIX.iter().any(&begins);
    is_wanted && !OF_ANOTHER_JOB.iter().any(begins)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

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
            note: None,
        };
        let command = command(&door).expect("no zero byte");
        let done = Command::new("sh").arg("-c").arg(command).output();
        let text = format!("a b|it's|$(x)|{PART}|");
        assert_eq!(done.expect("a shell").stdout, text.as_bytes());
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
        let asked = variables(&["A=1".into()]).expect("it has a value");
        assert!(asked.contains(&"A=1".into()));
        let error = variables(&["UNISONO_NOT_SET_ANYWHERE".into()]).expect_err("it has none");
        assert!(error.to_string().contains("not set here"), "{error}");
    }
}
