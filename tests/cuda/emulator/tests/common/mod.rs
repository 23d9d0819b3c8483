//! Tests against the emulated driver, in processes of their own: the settings are a process's, and so is the loader path
//! by which the driver is found, as the library finds it.
#![expect(dead_code, reason = "each test file uses some of it")]

pub(crate) mod gpu;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::time::{Duration, Instant};

/// How a process says that it ran the test: one that was given a wrong name runs none and exits with 0.
const DONE: i32 = 77;

const LIMIT: Duration = Duration::from_secs(60);

/// This process among those of a test.
pub(crate) struct Rank {
    pub(crate) number: usize,
    folder: PathBuf,
}

impl Rank {
    /// Leaves something for the other processes.
    pub(crate) fn publish(&self, name: &str, bytes: &[u8]) {
        let path = self.folder.join(name);
        let unfinished = self.folder.join(format!("{name}.{}", self.number));
        fs::write(&unfinished, bytes).unwrap();
        fs::rename(unfinished, path).unwrap();
    }

    /// Waits for what another process leaves.
    pub(crate) fn expect(&self, name: &str) -> Vec<u8> {
        let start = Instant::now();
        loop {
            match fs::read(self.folder.join(name)) {
                Ok(bytes) => return bytes,
                Err(_) => assert!(
                    start.elapsed() < LIMIT,
                    "rank {} waits for {name}",
                    self.number
                ),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Runs `body` in a process of its own under these settings (`"DEVICES"`: the variable without its prefix).
pub(crate) fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    together(test, 1, settings, |_| body());
}

/// Runs `body` in several processes at once; all must succeed within a minute. Only the parent returns.
///
/// # Returns
/// Each process's report.
pub(crate) fn together(
    test: &str,
    count: usize,
    settings: &[(&str, &str)],
    body: impl FnOnce(Rank),
) -> Vec<String> {
    if let Ok(number) = std::env::var("EMULATED_RANK") {
        let folder = std::env::var_os("EMULATED_FOLDER").unwrap().into();
        let number = number.parse().unwrap();
        body(Rank { number, folder });
        std::process::exit(DONE);
    }
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut children: Vec<Child> = (0..count)
        .map(|number| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command
                .args(["--exact", test, "--nocapture", "--test-threads", "1"])
                .env("LD_LIBRARY_PATH", driver_folder())
                .env("EMULATED_RANK", number.to_string())
                .env("EMULATED_FOLDER", &folder)
                .env(
                    "CUDA_EMULATOR_REPORT",
                    folder.join(format!("report-{number}")),
                )
                .env_remove("CUDA_VISIBLE_DEVICES")
                .stdin(Stdio::null());
            for (name, value) in settings {
                command.env(format!("CUDA_EMULATOR_{name}"), value);
            }
            command.spawn().unwrap()
        })
        .collect();
    let failures = wait_for(&mut children);
    let reports = (0..count)
        .map(|number| {
            fs::read_to_string(folder.join(format!("report-{number}"))).unwrap_or_default()
        })
        .collect();
    fs::remove_dir_all(&folder).unwrap();
    assert!(failures.is_empty(), "{test}: {failures:?}");
    reports
}

/// The message of a test that has to fail. The processes it starts run it as it is.
pub(crate) fn failure_of(test: impl FnOnce() + std::panic::UnwindSafe) -> String {
    let failure = std::panic::catch_unwind(test).expect_err("it did not fail");
    *failure.downcast::<String>().expect("a message")
}

fn wait_for(children: &mut [Child]) -> Vec<String> {
    let start = Instant::now();
    let mut failures = Vec::new();
    for (rank, child) in children.iter_mut().enumerate() {
        loop {
            match child.try_wait().unwrap() {
                Some(status) if status.code() == Some(DONE) => break,
                Some(status) => {
                    failures.push(format!("rank {rank}: {status}"));
                    break;
                }
                None if start.elapsed() > LIMIT => {
                    child.kill().unwrap();
                    child.wait().unwrap();
                    failures.push(format!(
                        "rank {rank}: still running after {LIMIT:?}, killed"
                    ));
                    break;
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }
    failures
}

/// A folder in which the emulator has the driver's name.
fn driver_folder() -> PathBuf {
    static LINKED: Once = Once::new();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("driver");
    LINKED.call_once(|| {
        let here = std::env::current_exe().unwrap();
        let library = here.with_file_name("libunisono_cuda_emulator.so");
        assert!(library.exists(), "{} was not built", library.display());
        fs::create_dir_all(&folder).unwrap();
        let link = folder.join("libcuda.so");
        // Another test program may be making the same link.
        if fs::read_link(&link).ok().as_deref() != Some(&library) {
            let _ = fs::remove_file(&link);
            let _ = symlink(&library, &link);
        }
    });
    folder
}

/// A number of a report.
pub(crate) fn number(report: &str, name: &str) -> u64 {
    let key = format!("\"{name}\": ");
    let rest = report.split(&key).nth(1);
    let rest = rest.unwrap_or_else(|| panic!("no {name} in {report:?}"));
    let end = rest.find([',', '}']).unwrap();
    rest[..end].parse().unwrap()
}
