//! The command of a rank: the program as it was typed, or Python with a script or a module.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::options::Options;
use crate::role::Door;
use crate::starter::status;

/// The command of every rank.
///
/// # Errors
/// What is wrong with it, and the status to exit with: it is better said once than by every rank.
pub(crate) fn command(options: &Options, door: &Door) -> Result<Vec<OsString>, (String, u8)> {
    let program = &options.program;
    let mut command = Vec::with_capacity(program.len() + 2);
    if options.module {
        command.extend([door.interpreter.clone(), "-m".into()]);
    } else if is_script(options) {
        let script = Path::new(&program[0]);
        match fs::metadata(script) {
            Ok(found) if found.is_file() => {}
            Ok(_) => return Err(wrong(script, "it is no file", ErrorKind::PermissionDenied)),
            Err(error) => return Err(wrong(script, &error.to_string(), error.kind())),
        }
        command.push(door.interpreter.clone());
    }
    command.extend(program.iter().cloned());
    check(Path::new(&command[0]))?;
    Ok(command)
}

/// Whether Python runs it, and so the interpreter of the [`Door`].
pub(crate) fn is_for_python(options: &Options) -> bool {
    options.module || is_script(options)
}

fn is_script(options: &Options) -> bool {
    Path::new(&options.program[0]).extension() == Some(OsStr::new("py"))
}

/// Whether `program` can be found and started, as far as one can see without starting it.
fn check(program: &Path) -> Result<(), (String, u8)> {
    let candidates: Vec<PathBuf> = if program.as_os_str().as_encoded_bytes().contains(&b'/') {
        vec![program.to_owned()]
    } else {
        let path = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
        env::split_paths(&path)
            .map(|folder| folder.join(program))
            .collect()
    };
    let found: Vec<Metadata> = candidates
        .iter()
        .filter_map(|path| fs::metadata(path).ok())
        .collect();
    if found.iter().any(is_executable) {
        return Ok(());
    }
    if found.iter().any(Metadata::is_file) {
        return Err(wrong(
            program,
            "it is not executable (chmod +x)",
            ErrorKind::PermissionDenied,
        ));
    }
    if !found.is_empty() {
        return Err(wrong(program, "it is no file", ErrorKind::PermissionDenied));
    }
    let here = Path::new(".").join(program);
    let why = if fs::metadata(&here).is_ok_and(|found| is_executable(&found)) {
        format!(
            "it is not in PATH; write {} for the one in this folder",
            here.display()
        )
    } else {
        "no such file".to_owned()
    };
    Err(wrong(program, &why, ErrorKind::NotFound))
}

fn is_executable(found: &Metadata) -> bool {
    found.is_file() && found.permissions().mode() & 0o111 != 0
}

fn wrong(program: &Path, why: &str, kind: ErrorKind) -> (String, u8) {
    (
        format!("cannot start {}: {why}", program.display()),
        status(kind),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command_of(arguments: &[&str]) -> Result<Vec<OsString>, (String, u8)> {
        let door = Door {
            again: Vec::new(),
            interpreter: "sh".into(),
            note: None,
        };
        let arguments: Vec<OsString> = ["-n2"]
            .iter()
            .chain(arguments)
            .map(OsString::from)
            .collect();
        command(&Options::read(&arguments).expect("valid"), &door)
    }

    #[test]
    fn programs_scripts_and_modules() {
        assert_eq!(
            command_of(&["sh", "-c", "true"]).expect("found"),
            ["sh", "-c", "true"]
        );
        assert_eq!(
            command_of(&["-m", "a.b", "x"]).expect("found"),
            ["sh", "-m", "a.b", "x"]
        );
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/support/ranks.py");
        assert_eq!(
            command_of(&[script, "-x"]).expect("found"),
            ["sh", script, "-x"]
        );
    }

    #[test]
    fn what_cannot_be_started_is_said_at_once() {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        for (program, says, status) in [
            ("./no-such-program", "no such file", 127),
            ("no-such-program", "no such file", 127),
            ("no-such-script.py", "No such file", 127),
            (manifest, "not executable", 126),
            ("/", "it is no file", 126),
        ] {
            let (why, code) = command_of(&[program]).expect_err(program);
            assert!(why.contains(says) && why.contains(program), "{why}");
            assert_eq!(code, status, "{program}");
        }
    }
}
