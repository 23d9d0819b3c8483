//! The threads of a process are there while it has a group, and no longer. Apart from the other tests, whose groups would
//! keep them here.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use unisono::buffer::Memory;
use unisono::config::Config;
use unisono::rendezvous::memory::MemoryStore;
use unisono::types::{DataType, ReduceOp};
use unisono::{Communicator, Completion, Request, Work, wait_for_threads};

/// Held by the test that runs: each counts the threads of the process.
static ALONE: Mutex<()> = Mutex::new(());

/// Longer than any end takes.
const LIMIT: Duration = Duration::from_secs(10);

fn alone() -> MutexGuard<'static, ()> {
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(threads(), Vec::<String>::new(), "of an earlier test");
    guard
}

/// Our threads by name, as the system counts them.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a directory");
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        // One that ends meanwhile has no name.
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    let mut names: Vec<String> = tasks
        .filter_map(name)
        .map(|name| name.trim_end().to_owned())
        .filter(|name| name.starts_with("unisono"))
        .collect();
    names.sort();
    names
}

/// Fails unless every thread has ended. The system lists one for a moment after it has been joined.
fn all_have_ended() {
    assert!(wait_for_threads(LIMIT), "still there: {:?}", threads());
    let until = Instant::now() + LIMIT;
    while !threads().is_empty() && Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(threads(), Vec::<String>::new());
}

/// A signal to the process is for the program's own threads.
#[test]
fn signals_go_to_others() {
    let _alone = alone();
    let comms = join(2, "shm");
    let mut seen = 0;
    for task in std::fs::read_dir("/proc/self/task")
        .expect("a directory")
        .flatten()
    {
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else {
            continue;
        };
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        if !field("Name:").is_some_and(|name| name.trim().starts_with("unisono")) {
            continue;
        }
        let blocked = field("SigBlk:").expect("a mask").trim();
        let blocked = u64::from_str_radix(blocked, 16).expect("a number");
        // SIGINT, SIGTERM and SIGCHLD, but not SIGSEGV.
        for (signal, is_blocked) in [(2, true), (15, true), (17, true), (11, false)] {
            assert_eq!(
                blocked >> (signal - 1) & 1 == 1,
                is_blocked,
                "{signal}: {status}"
            );
        }
        seen += 1;
    }
    assert!(seen > 0, "no thread of the library is there");
    drop(comms);
    all_have_ended();
}

/// Every rank of a world, in this process, over `transport`.
fn join(world: usize, transport: &str) -> Vec<Communicator> {
    let mut config = Config::default();
    config.set("timeout", "20").expect("a setting");
    config.set("transport", transport).expect("a setting");
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        let join = |rank| {
            let (store, config) = (&store, config.clone());
            scope.spawn(move || Communicator::join(store, rank, world, config))
        };
        let joining: Vec<_> = (0..world).map(join).collect();
        let join = |rank: std::thread::ScopedJoinHandle<'_, _>| rank.join().expect("no panic");
        let joined: Result<_, _> = joining.into_iter().map(join).collect();
        joined.expect("communicators")
    })
}

fn local(world: usize) -> Vec<Communicator> {
    Communicator::local(world, &Config::default()).expect("communicators")
}

/// Starts an all_reduce of nothing in particular; its memory is never freed.
fn start(comm: &Communicator, completion: Completion) -> Work {
    let data = Box::leak(Box::new([1.0_f64; 16]));
    // SAFETY: the memory lives for ever, and only this operation has it.
    let work = unsafe {
        let memory = Memory::from_raw_parts(data.as_mut_ptr().cast(), size_of_val(data));
        let request = Request::all_reduce(DataType::Float64, ReduceOp::Sum, None, memory);
        comm.start(request, Some(completion))
    };
    work.expect("started")
}

fn barrier(comms: &[Communicator]) {
    std::thread::scope(|scope| {
        for comm in comms {
            scope.spawn(|| comm.barrier().expect("a barrier"));
        }
    });
}

#[test]
fn none_is_left_when_the_last_group_has_been_closed() {
    let _alone = alone();
    for transport in ["local", "shm", "tcp"] {
        let comms = match transport {
            "local" => local(3),
            _ => join(3, transport),
        };
        barrier(&comms);
        let expected: &[&str] = match transport {
            "local" => &["unisono-drive", "unisono-relieve", "unisono-tell"],
            _ => &[
                "unisono-accept",
                "unisono-drive",
                "unisono-relieve",
                "unisono-tell",
            ],
        };
        // The system keeps 15 bytes of a name, which a thread gives itself once it runs.
        let has = |name: &&str| threads().contains(&name[..name.len().min(15)].to_owned());
        let late = Instant::now() + LIMIT;
        while !expected.iter().all(has) {
            assert!(Instant::now() < late, "{expected:?}: {:?}", threads());
            std::thread::yield_now();
        }
        let (last, others) = comms.split_last().expect("some");
        others.iter().for_each(Communicator::close);
        assert!(!wait_for_threads(LIMIT), "{transport}: one group is open");
        assert!(!threads().is_empty());
        last.close();
        // The communicators are closed, and yet there.
        all_have_ended();
        let error = last.barrier().unwrap_err();
        assert!(error.message.contains("closed"), "{error}");
    }
}

#[test]
fn what_was_to_be_told_is_told_before_they_end() {
    let _alone = alone();
    let told = Arc::new(AtomicUsize::new(0));
    let comms = local(2);
    for round in 0..20 {
        for comm in &comms {
            let told = Arc::clone(&told);
            start(
                comm,
                Box::new(move |_| {
                    if round == 0 {
                        // Long enough for another thread to take those behind it.
                        std::thread::sleep(Duration::from_millis(200));
                    }
                    told.fetch_add(1, Ordering::Relaxed);
                }),
            );
        }
    }
    // One that fails, as its group is closed.
    let error = Arc::new(Mutex::new(None));
    let same = Arc::clone(&error);
    start(
        &comms[0],
        Box::new(move |result| *same.lock().expect("a lock") = result.err()),
    );
    drop(comms);
    all_have_ended();
    assert_eq!(told.load(Ordering::Relaxed), 40);
    assert!(error.lock().expect("a lock").is_some());
}

#[test]
fn a_completion_may_drop_the_last_group() {
    let _alone = alone();
    let comms = join(2, "shm");
    let (hand, handed) = channel::<Vec<Communicator>>();
    let (tell, told) = channel();
    start(
        &comms[0],
        Box::new(move |result| {
            drop(handed.recv_timeout(LIMIT).expect("the groups"));
            drop(tell.send(result));
        }),
    );
    let other = start(&comms[1], Box::new(|_| ()));
    other.wait(Some(LIMIT)).expect("an end");
    hand.send(comms).expect("a completion that waits");
    told.recv_timeout(LIMIT).expect("told").expect("no error");
    all_have_ended();
}

#[test]
fn groups_may_come_and_go_again_and_again() {
    let _alone = alone();
    for _ in 0..200 {
        let comms = local(2);
        let (tell, told) = channel();
        for comm in &comms {
            let tell = tell.clone();
            start(comm, Box::new(move |result| drop(tell.send(result))));
        }
        for _ in &comms {
            told.recv_timeout(LIMIT).expect("told").expect("no error");
        }
        drop(comms);
        // Those that leave and those that come: they do not pile up.
        assert!(threads().len() < 100, "{:?}", threads());
    }
    all_have_ended();
}
