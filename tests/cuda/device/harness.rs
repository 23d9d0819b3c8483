//! Tests in processes of their own, which find the emulated driver where they look for the real one.
//!
//! The driver's library is looked for once in a process, by the loader's path, and the emulator takes what it is to do from
//! the environment. So a test starts this same binary again, one process or one per rank, for itself alone; that runs the
//! body, and leaves a report of what the emulated driver still held at the end.

use std::any::type_name;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use unisono::Communicator;
use unisono::config::Config;
use unisono::rendezvous::file_store::FileStore;
use unisono::rendezvous::memory::MemoryStore;

/// The role of a process: absent in the one that cargo starts.
const ROLE: &str = "UNISONO_TEST_CUDA_ROLE";
const STORE: &str = "UNISONO_TEST_CUDA_STORE";

/// A process that takes longer is stuck.
const LIMIT: Duration = Duration::from_secs(150);

/// Where the ranks of a test are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ranks {
    /// Threads of one process, without any transport.
    Local,
    /// Threads of one process, which meet through a store.
    Threads,
    /// Processes.
    Processes,
}

/// A test: how it is run.
pub(crate) struct Test<'a> {
    pub(crate) ranks: Ranks,
    pub(crate) world: usize,
    /// Settings of unisono.
    pub(crate) config: &'a [(&'a str, &'a str)],
    /// Settings of the emulator, without their prefix.
    pub(crate) driver: &'a [(&'a str, &'a str)],
    /// A rank that is expected to end its process itself.
    pub(crate) dies: Option<usize>,
    /// Whether a group that failed may leave something in the driver.
    pub(crate) may_leak: bool,
    /// A part of the warning that every process logs: once, and as the only warning of the log.
    pub(crate) warns: Option<&'a str>,
}

impl<'a> Test<'a> {
    pub(crate) fn new(ranks: Ranks, world: usize) -> Self {
        Self {
            ranks,
            world,
            config: &[],
            driver: &[],
            dies: None,
            may_leak: false,
            warns: None,
        }
    }

    /// Runs `body`, a closure in the function of the test, as every rank, in processes that have the emulator.
    pub(crate) fn run<F: Fn(Communicator) + Send + Sync>(&self, body: F) {
        let name = name_of::<F>();
        let (config, driver) = (self.config, self.driver);
        let label = format!(
            "{name}:{:?}:{}:{config:?}:{driver:?}",
            self.ranks, self.world
        );
        match std::env::var(ROLE) {
            Err(_) => self.start(name, &label),
            Ok(role) => {
                let (wanted, rank) = role.rsplit_once('/').expect("a role");
                // One function may hold several tests; this process is of one of them.
                if wanted == label {
                    self.play(rank.parse().expect("a rank"), body);
                    // The rest of the function is for others.
                    std::process::exit(0);
                }
            }
        }
    }

    fn config(&self) -> Config {
        let mut config = Config::default();
        for (name, value) in [("timeout", "60"), ("join_timeout", "60")] {
            config.set(name, value).expect("a setting");
        }
        for (name, value) in self.config {
            config.set(name, value).expect("a setting");
        }
        config
    }

    fn play(&self, rank: usize, body: impl Fn(Communicator) + Send + Sync) {
        tracing_subscriber::fmt()
            .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .init();
        let config = self.config();
        let body = &body;
        match self.ranks {
            Ranks::Processes => {
                let store = FileStore::open(std::env::var(STORE).expect("a store"));
                let store = store.expect("a store");
                body(Communicator::join(&store, rank, self.world, config).expect("a group"));
            }
            Ranks::Local => {
                let comms = Communicator::local(self.world, &config).expect("a group");
                thread::scope(|scope| {
                    for comm in comms {
                        scope.spawn(move || body(comm));
                    }
                });
            }
            Ranks::Threads => {
                let store = MemoryStore::default();
                thread::scope(|scope| {
                    for rank in 0..self.world {
                        let (store, mut config) = (&store, config.clone());
                        if config.host.as_deref() == Some("two") {
                            let host = ["left", "right"][rank % 2];
                            config.set("host", host).expect("a setting");
                        }
                        scope.spawn(move || {
                            body(
                                Communicator::join(store, rank, self.world, config)
                                    .expect("a group"),
                            );
                        });
                    }
                });
            }
        }
        crate::gpu::free_memory();
        // The group between a port and its guest ends when their threads find that it is over.
        let until = Instant::now() + Duration::from_secs(20);
        while !unisono::wait_for_threads(Duration::from_secs(20)) {
            let names = threads();
            assert!(
                Instant::now() < until,
                "the library's threads have not ended: {names:?}"
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn start(&self, name: &str, label: &str) {
        let place = Place::new();
        let processes = match self.ranks {
            Ranks::Processes => self.world,
            Ranks::Local | Ranks::Threads => 1,
        };
        let children: Vec<Child> = (0..processes)
            .map(|rank| self.child(name, label, rank, &place.0))
            .collect();
        let mut failed = Vec::new();
        let deadline = Instant::now() + LIMIT;
        for (rank, mut child) in children.into_iter().enumerate() {
            let status = loop {
                match child.try_wait().expect("a child") {
                    Some(status) => break Some(status),
                    None if Instant::now() > deadline => {
                        child.kill().expect("a child to end");
                        child.wait().expect("its end");
                        break None;
                    }
                    None => thread::sleep(Duration::from_millis(10)),
                }
            };
            if self.dies == Some(rank) {
                continue;
            }
            let said = fs::read_to_string(place.0.join(format!("output-{rank}")));
            let said = said.unwrap_or_default();
            match status {
                // A process that was asked for a test of a name that is none runs none, and succeeds.
                Some(status) if status.success() && !said.contains("running 0 tests") => {
                    failed.extend(self.left(rank, child.id(), &place.0));
                    failed.extend(self.logged(rank, &said));
                }
                Some(status) => failed.push(format!("rank {rank}: {status}\n{said}")),
                None => failed.push(format!("rank {rank}: killed after {LIMIT:?}\n{said}")),
            }
        }
        assert!(failed.is_empty(), "{label}\n{}", failed.join("\n"));
    }

    fn child(&self, name: &str, label: &str, rank: usize, place: &Path) -> Child {
        let output = fs::File::create(place.join(format!("output-{rank}"))).expect("a file");
        let errors = output.try_clone().expect("a file");
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env("LD_LIBRARY_PATH", driver())
            .env(ROLE, format!("{label}/{rank}"))
            .env(STORE, place.join("store"))
            .env("CUDA_EMULATOR_REPORT", place.join("report-%p"))
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors);
        for (name, value) in self.driver {
            command.env(format!("CUDA_EMULATOR_{name}"), value);
        }
        command.spawn().expect("a process")
    }

    /// The error in the log of a process, if a test says how the log should be.
    fn logged(&self, rank: usize, output: &str) -> Option<String> {
        let wanted = self.warns?;
        let lines: Vec<&str> = output
            .lines()
            .filter(|line| line.contains(" WARN "))
            .collect();
        let is_right = matches!(lines[..], [line] if line.contains(wanted));
        (!is_right).then(|| {
            format!("rank {rank}: not one warning of {wanted:?}, but {lines:#?}\n{output}")
        })
    }

    /// The error for what a rank left in the emulated driver, beyond what lives as long as the process.
    fn left(&self, rank: usize, process: u32, place: &Path) -> Option<String> {
        // A driver that could not be initialised has nothing to report.
        let report = fs::read_to_string(place.join(format!("report-{process}"))).ok()?;
        let number = |name: &str| -> u64 {
            let at = report.find(&format!("\"{name}\": ")).unwrap_or_else(|| {
                panic!("the emulator does not report {name}: {report}");
            });
            let rest = &report[at + name.len() + 4..];
            let end = rest.find([',', '}']).expect("an end");
            rest[..end].trim().parse().expect("a number")
        };
        let mut left = Vec::new();
        for name in [
            "allocations",
            "pinned",
            "registrations",
            "imports",
            "freed_while_imported",
            "streams",
            "unfinished_operations",
            "events",
            "error",
        ] {
            // A rank that died has unmapped nothing.
            let is_owed = name == "freed_while_imported" && self.dies.is_some();
            if number(name) != 0 && !is_owed {
                left.push(name);
            }
        }
        (!self.may_leak && !left.is_empty())
            .then(|| format!("rank {rank}: left {left:?} in the driver: {report}"))
    }
}

/// The name of the test, as cargo knows it, in whose function a closure is.
fn name_of<F>() -> &'static str {
    let (_, path) = type_name::<F>().split_once("::").expect("a crate");
    let (name, _) = path.split_once("::{{closure}}").expect("a closure");
    name
}

/// The threads of this process, by their names.
fn threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").expect("the list of threads");
    tasks
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect()
}

/// A folder for one test, removed afterwards.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("unisono-cuda-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A folder in which the loader finds the emulator as `libcuda.so.1`, made once per run.
fn driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let binary = std::env::current_exe().expect("this binary");
        // Cargo puts what a test depends on beside it.
        let beside = binary.parent().expect("a folder");
        let library = [beside, beside.parent().expect("a folder")]
            .iter()
            .map(|folder| folder.join("libunisono_cuda_emulator.so"))
            .find(|path| path.exists())
            .expect("the emulated driver beside the test: cargo build -p unisono-cuda-emulator");
        let folder = beside.join(format!("cuda-emulator-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        for name in ["libcuda.so", "libcuda.so.1"] {
            symlink(&library, folder.join(name)).expect("a link");
        }
        folder
    })
}
