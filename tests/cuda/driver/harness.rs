//! Runs each test in a process of its own.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// After this a test hangs; it takes less than a second.
const PATIENCE: Duration = Duration::from_secs(120);
const LIBRARY: &str = "libunisono_cuda_emulator.so";

/// A test, and the world it lives in.
pub(crate) struct Test {
    pub(crate) name: &'static str,
    pub(crate) body: fn(),
    /// Settings of the emulator, without their prefix.
    pub(crate) settings: &'static [(&'static str, &'static str)],
    pub(crate) driver: Driver,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Driver {
    Emulated,
    /// Nothing may be left at the end.
    EmulatedAndClean,
    None,
}

/// Lists tests by the driver they need: `name` or `name { SETTING: "value" }`.
macro_rules! tests {
    ($($driver:ident { $($name:ident $({ $($setting:ident: $value:literal),* $(,)? })?)* })*) => {
        pub(crate) fn tests() -> Vec<$crate::harness::Test> {
            vec![$($(
                $crate::harness::Test {
                    name: stringify!($name),
                    body: $name,
                    settings: &[$($((stringify!($setting), $value)),*)?],
                    driver: $crate::harness::Driver::$driver,
                },
            )*)*]
        }
    };
}
pub(crate) use tests;

/// Runs what the command line asks for, and says how it went.
pub(crate) fn run(tests: &[Test]) -> i32 {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--run", name] => {
            let test = tests.iter().find(|test| test.name == name);
            (test.expect("a test of that name").body)();
            return 0;
        }
        ["--role", role, argument] => {
            crate::windows::role(role, argument);
            return 0;
        }
        _ => {}
    }
    if arguments.iter().any(|argument| argument == "--list") {
        for test in tests {
            println!("{}: test", test.name);
        }
        return 0;
    }
    let filters: Vec<&String> = arguments
        .iter()
        .filter(|text| !text.starts_with('-'))
        .collect();
    let emulator = emulator();
    if emulator.is_none() {
        eprintln!(
            "there is no {LIBRARY} beside this program: cargo build -p unisono-cuda-emulator"
        );
    }
    let (mut failed, mut skipped) = (0, 0);
    for test in tests {
        if !filters.is_empty() && !filters.iter().any(|part| test.name.contains(*part)) {
            continue;
        }
        match outcome(test, emulator.as_deref()) {
            Outcome::Passed => println!("test {} ... ok", test.name),
            Outcome::Skipped(why) => {
                skipped += 1;
                println!("test {} ... skipped: {why}", test.name);
            }
            Outcome::Failed(why) => {
                failed += 1;
                println!("test {} ... FAILED: {why}", test.name);
            }
        }
    }
    println!("{failed} failed, {skipped} skipped");
    i32::from(failed > 0)
}

enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

fn outcome(test: &Test, emulator: Option<&Path>) -> Outcome {
    let place =
        std::env::temp_dir().join(format!("unisono-cuda-{}-{}", std::process::id(), test.name));
    fs::create_dir_all(&place).expect("a folder");
    if test.driver != Driver::None {
        let Some(emulator) = emulator else {
            return Outcome::Skipped("no emulated driver".to_owned());
        };
        for name in ["libcuda.so", "libcuda.so.1"] {
            symlink(emulator, place.join(name)).expect("a link");
        }
    }
    let output = place.join("output");
    let report = place.join("report");
    let file = File::create(&output).expect("a file");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--run", test.name])
        .env("LD_LIBRARY_PATH", &place)
        .env("RUST_BACKTRACE", "1")
        .stdin(Stdio::null())
        .stdout(file.try_clone().expect("the file"))
        .stderr(file);
    if test.driver != Driver::None {
        command.env("CUDA_EMULATOR_REPORT", &report);
        for (name, value) in test.settings {
            command.env(format!("CUDA_EMULATOR_{name}"), value);
        }
    }
    let child = command.spawn().expect("a process");
    let ended = wait(child);
    let said = fs::read_to_string(&output).unwrap_or_default();
    let left = fs::read_to_string(&report).unwrap_or_default();
    let _ = fs::remove_dir_all(&place);
    if ended != "exit status: 0" {
        return Outcome::Failed(format!("{ended}\n{said}"));
    }
    if test.driver == Driver::EmulatedAndClean {
        let kinds = [
            "allocations",
            "pinned",
            "registrations",
            "imports",
            "freed_while_imported",
            "streams",
            "events",
        ];
        for kind in kinds {
            if !left.contains(&format!("\"{kind}\": 0,")) {
                return Outcome::Failed(format!("it leaves {kind}: {left}\n{said}"));
            }
        }
        if !said.is_empty() {
            return Outcome::Failed(format!("it is not quiet: {said}"));
        }
    }
    Outcome::Passed
}

/// How a child ended; one that takes too long is killed.
pub(crate) fn wait(mut child: Child) -> String {
    let start = Instant::now();
    loop {
        match child.try_wait().expect("the child") {
            Some(status) => return status.to_string(),
            None if start.elapsed() > PATIENCE => {
                let _ = child.kill();
                let _ = child.wait();
                return format!("it was killed after {PATIENCE:?}");
            }
            None => thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// A process that plays a part in a test of this one, with the same driver.
pub(crate) fn role(role: &str, argument: &str) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--role", role, argument])
        .env_remove("CUDA_EMULATOR_REPORT")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a process")
}

/// The newest emulator beside this program or in the folder above.
fn emulator() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    program
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join(LIBRARY))
        .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
        .max()
        .map(|(_, path)| path)
}

/// Waits until `done`, and fails with `what` when that takes too long.
#[track_caller]
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE / 2, "never: {what}");
        thread::sleep(Duration::from_micros(200));
    }
}
