//! Large payloads between processes, however they go: read in place in the shared heap, read out of private memory
//! by a system call, through the ring, and through the ring because the system call is denied.
//!
//! Ranks are processes: this program again, told by its environment what to be. Where a payload must not be read by
//! the system call, that kills the rank.

#[path = "../../rust/core/src/skips.rs"]
mod skips;

use std::ops::DerefMut;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use half::bf16;
use unisono::buffer::{Element, Memory};
use unisono::config::Config;
use unisono::error::{Code, Result};
use unisono::heap::Buffer;
use unisono::rendezvous::store::Store;
use unisono::rendezvous::tcp_server::TcpStoreServer;
use unisono::rendezvous::tcp_store::TcpStore;
use unisono::types::{DataType, ReduceOp};
use unisono::{Communicator, PointToPoint, Request, Sizes};

use skips::skipped;

const RANK: &str = "UNISONO_TEST_RANK";
const WORLD: &str = "UNISONO_TEST_WORLD";
const STORE: &str = "UNISONO_TEST_STORE";
const MODE: &str = "UNISONO_TEST_MODE";
const TASK: &str = "UNISONO_TEST_TASK";

/// The beginning of a task whose end is in milliseconds.
const UNTIL_AN_ABORT: &str = "gather and reduce until an abort after ";

/// The exit status of a rank that could not install its filter.
const SKIPPED: i32 = 77;

/// After this a rank hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// Lengths in elements of 8 bytes: just enough to be lent, to be lent from private memory, and some odd ones.
const COUNTS: [usize; 4] = [2100, 9000, 70_001, 300_000];

/// Where the memory of a test lies, and what becomes of `process_vm_readv`.
#[derive(Clone, Copy, Debug)]
struct Mode {
    name: &'static str,
    shared: fn(usize) -> bool,
    lend_bytes: &'static str,
    /// The answer of a seccomp filter.
    answer: Option<u32>,
}

const KILL: Option<u32> = Some(libc::SECCOMP_RET_KILL_PROCESS);

const MODES: [Mode; 6] = [
    Mode {
        name: "in place",
        shared: |_| true,
        lend_bytes: "none",
        answer: KILL,
    },
    Mode {
        name: "private",
        shared: |_| false,
        lend_bytes: "4096",
        answer: None,
    },
    Mode {
        name: "some of both",
        shared: |index| index.is_multiple_of(2),
        lend_bytes: "4096",
        answer: None,
    },
    Mode {
        name: "ring",
        shared: |_| false,
        lend_bytes: "none",
        answer: KILL,
    },
    Mode {
        name: "denied",
        shared: |index| index.is_multiple_of(2),
        lend_bytes: "4096",
        answer: Some(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    },
    Mode {
        name: "unknown",
        shared: |_| false,
        lend_bytes: "4096",
        answer: Some(libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    },
];

/// Must not be: shows that private memory is read by the call, and that a filter would tell.
const FORBIDDEN: Mode = Mode {
    name: "forbidden",
    shared: |_| false,
    lend_bytes: "4096",
    answer: KILL,
};

/// Starts every rank of a world on `task`.
fn start(task: &str, mode: Mode, world: usize, store: &TcpStoreServer) -> Vec<Child> {
    let start = |rank: usize| {
        Command::new(std::env::current_exe().expect("a program"))
            .args(["--exact", "a_rank", "--ignored", "--nocapture"])
            .env(RANK, rank.to_string())
            .env(WORLD, world.to_string())
            .env(STORE, store.own_address().to_string())
            .env(MODE, mode.name)
            .env(TASK, task)
            .stdout(Stdio::null())
            .stderr(if mode.name == FORBIDDEN.name {
                Stdio::null()
            } else {
                Stdio::inherit()
            })
            .spawn()
            .expect("a process")
    };
    (0..world).map(start).collect()
}

/// How the rank ended.
fn end(child: &mut Child, what: &str) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child") {
            return status;
        }
        if start.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{what}: a rank hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs `task` on every rank. False when the system has no filters.
fn run(task: &str, mode: Mode, world: usize) -> bool {
    let what = format!("{task}, {}, {world} ranks", mode.name);
    let store = TcpStoreServer::start("127.0.0.1:0").expect("a store");
    let mut ranks = start(task, mode, world, &store);
    let ends: Vec<_> = ranks.iter_mut().map(|rank| end(rank, &what)).collect();
    if ends.iter().any(|status| status.code() == Some(SKIPPED)) {
        skipped(format_args!(
            "{what}: the system installs no seccomp filter"
        ));
        return false;
    }
    assert!(ends.iter().all(ExitStatus::success), "{what}: {ends:?}");
    true
}

#[test]
fn every_collective_is_right_in_every_mode() {
    for mode in MODES {
        for world in [2, 3, 4] {
            run("collectives", mode, world);
        }
    }
}

#[test]
fn private_memory_is_read_by_the_call() {
    let store = TcpStoreServer::start("127.0.0.1:0").expect("a store");
    let mut ranks = start("collectives", FORBIDDEN, 2, &store);
    let ends: Vec<_> = ranks
        .iter_mut()
        .map(|rank| end(rank, "forbidden"))
        .collect();
    if ends.iter().any(|status| status.code() == Some(SKIPPED)) {
        skipped("the system installs no seccomp filter");
        return;
    }
    let killed = |status: &ExitStatus| status.signal() == Some(libc::SIGSYS);
    assert!(ends.iter().any(killed), "{ends:?}");
}

#[test]
fn a_rank_that_is_killed_while_others_read_its_memory_is_named() {
    for mode in [MODES[0], MODES[1], MODES[2]] {
        for milliseconds in [0, 3, 20, 60] {
            let store = TcpStoreServer::start("127.0.0.1:0").expect("a store");
            let mut ranks = start("reduce until it fails", mode, 3, &store);
            // The other ranks say in the store that all are there; a rank that is killed before that is lost as well.
            let address = store.own_address().to_string();
            let client = TcpStore::connect(&address, PATIENCE).expect("a store");
            let started = client.wait("started", PATIENCE);
            started.expect("ranks that start");
            std::thread::sleep(Duration::from_millis(milliseconds));
            ranks[1].kill().expect("a child");
            ranks[1].wait().expect("a child");
            let what = format!("killed after {milliseconds} ms, {}", mode.name);
            for rank in [0, 2] {
                let status = end(&mut ranks[rank], &what);
                if status.code() == Some(SKIPPED) {
                    skipped(format_args!(
                        "{what}: the system installs no seccomp filter"
                    ));
                    continue;
                }
                assert!(status.success(), "{what}, rank {rank}: {status}");
            }
        }
    }
}

/// Wherever in an operation it stops: the others wait, asleep after some milliseconds, and all have the right sums.
#[test]
fn a_rank_that_has_stopped_may_go_on() {
    for mode in [MODES[0], MODES[1], MODES[3]] {
        let store = TcpStoreServer::start("127.0.0.1:0").expect("a store");
        let mut ranks = start("reduce for a while", mode, 3, &store);
        let address = store.own_address().to_string();
        let client = TcpStore::connect(&address, PATIENCE).expect("a store");
        let started = client.wait("started", PATIENCE);
        started.expect("ranks that start");
        for milliseconds in [1, 7, 30] {
            std::thread::sleep(Duration::from_millis(milliseconds));
            signal(&ranks[1], libc::SIGSTOP);
            std::thread::sleep(Duration::from_millis(150));
            signal(&ranks[1], libc::SIGCONT);
        }
        client.set("enough", b"").expect("a store");
        for rank in &mut ranks {
            let status = end(rank, mode.name);
            let skipped = status.code() == Some(SKIPPED);
            assert!(status.success() || skipped, "{}: {status}", mode.name);
        }
    }
}

/// A rank that stops while it works on the others' memory, and goes on when they have given up and use that again.
#[test]
fn writes_of_a_stopped_rank_reach_no_other_rank() {
    let tasks = [
        "reduce until one stops",
        "gather and reduce until one stops",
    ];
    for (task, milliseconds) in tasks
        .iter()
        .flat_map(|task| [0, 5, 20].map(|ms| (task, ms)))
    {
        let store = TcpStoreServer::start("127.0.0.1:0").expect("a store");
        let mut ranks = start(task, MODES[0], 3, &store);
        let address = store.own_address().to_string();
        let client = TcpStore::connect(&address, PATIENCE).expect("a store");
        let started = client.wait("started", PATIENCE);
        started.expect("ranks that start");
        std::thread::sleep(Duration::from_millis(milliseconds));
        signal(&ranks[1], libc::SIGSTOP);
        let others_gave_up = [0, 2].map(|rank| client.wait(&format!("over {rank}"), PATIENCE));
        signal(&ranks[1], libc::SIGCONT);
        let what = format!("{task}, stopped after {milliseconds} ms");
        end(&mut ranks[1], &what);
        client.set("gone", b"").expect("a store");
        for (rank, gave_up) in [0, 2].into_iter().zip(others_gave_up) {
            let status = end(&mut ranks[rank], &what);
            if status.code() == Some(SKIPPED) {
                skipped(format_args!(
                    "{what}: the system installs no seccomp filter"
                ));
                continue;
            }
            gave_up.expect("an end");
            assert!(status.success(), "{what}, rank {rank}: {status}");
        }
    }
}

/// Two operations are under way on every rank when one of them aborts the group.
#[test]
fn nothing_is_written_once_an_abort_has_ended_two_operations() {
    for mode in [MODES[0], MODES[1], MODES[3]] {
        for milliseconds in [0, 4, 15, 40] {
            run(&format!("{UNTIL_AN_ABORT}{milliseconds}"), mode, 3);
        }
    }
}

/// A forked child that drops its copy of a communicator, in whatever state, takes nothing back that its parent lends.
#[test]
fn what_a_forked_child_drops_stays_its_parents() {
    for mode in [MODES[0], MODES[1], MODES[3]] {
        run("reduce around forks", mode, 2);
    }
}

/// Ranks that could read each other's memory are denied it in the middle, while messages are under way.
#[test]
fn memory_that_is_out_of_reach_later_is_copied() {
    for world in [2, 3] {
        run("collectives, then denied", MODES[1], world);
    }
}

fn signal(child: &Child, signal: i32) {
    // SAFETY: it names a child that has not been waited for.
    let sent = unsafe { libc::kill(child.id() as i32, signal) };
    assert_eq!(sent, 0);
}

#[test]
#[ignore = "a rank of the other tests"]
#[expect(clippy::too_many_lines, reason = "one arm for each task of a rank")]
fn a_rank() {
    let variable = |name| std::env::var(name).ok();
    let (Some(mode), Some(task)) = (variable(MODE), variable(TASK)) else {
        return;
    };
    let number = |name| variable(name).and_then(|text| text.parse().ok());
    let (rank, world) = (
        number(RANK).expect("a rank"),
        number(WORLD).expect("a size"),
    );
    let mut modes = MODES.into_iter().chain([FORBIDDEN]);
    let mode = modes.find(|known| known.name == mode).expect("a mode");
    if let Some(answer) = mode.answer
        && !answer_readv_with(answer)
    {
        std::process::exit(SKIPPED);
    }
    let stops = task.ends_with("until one stops");
    let two = task == "gather and reduce until one stops";
    let mut config = Config::default();
    for (name, value) in [
        ("timeout", "60"),
        ("join_timeout", "60"),
        ("transport", "shm"),
        ("lend_bytes", mode.lend_bytes),
    ] {
        config.set(name, value).expect("a setting");
    }
    let store = variable(STORE).expect("an address");
    let store = TcpStore::connect(&store, PATIENCE).expect("a store");
    let comm = Communicator::join(&store, rank, world, config).expect("a communicator");
    if task == "collectives" {
        check_collectives(&comm, &Maker { mode }).expect("collectives");
        return;
    }
    if task == "reduce around forks" {
        return reduce_around_forks(comm, &Maker { mode });
    }
    if let Some(milliseconds) = task.strip_prefix(UNTIL_AN_ABORT) {
        let after = Duration::from_millis(milliseconds.parse().expect("a number"));
        return gather_and_reduce_until_an_abort(&comm, &store, &Maker { mode }, after);
    }
    if task == "collectives, then denied" {
        check_collectives(&comm, &Maker { mode }).expect("collectives");
        if !answer_readv_with(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32) {
            std::process::exit(SKIPPED);
        }
        check_collectives(&comm, &Maker { mode }).expect("collectives");
        return;
    }
    let count = if stops { 8 << 20 } else { 1 << 20 };
    let mut data = Maker { mode }.zeroed::<i64>(rank, count);
    let mut beside = Maker { mode }.zeroed::<i64>(rank, if two { count } else { 0 });
    if task == "reduce for a while" {
        return reduce_for_a_while(&comm, &store, &mut data);
    }
    let mut all = Maker { mode }.zeroed::<i64>(rank, world * count / 4);
    data.fill(1);
    let mut started = false;
    // Rank 1 may be killed when rank 0 has ended the first operation and another rank has not.
    let error = loop {
        let reduced = match two {
            true => gather_and_reduce(&comm, &mut beside, &mut data),
            false => comm.all_reduce(&mut data, ReduceOp::Sum),
        };
        // Data that is not reduced goes another way where memory is private.
        let done = reduced.and_then(|()| match stops {
            true => Ok(()),
            false => comm.all_gather(&data[..count / 4], &mut all),
        });
        if let Err(error) = done {
            break error;
        }
        if stops {
            comm.set_timeout(Duration::from_secs(3));
        }
        if rank == 0 && !started {
            store.set("started", b"").expect("a store");
            started = true;
        }
    };
    if !stops {
        assert_eq!(error.code, Code::PeerLost, "{error}");
        assert_eq!(error.peer, Some(1), "{error}");
        return;
    }
    if rank != 1 {
        assert_eq!(error.code, Code::Timeout, "{error}");
        data.fill(0);
        beside.fill(0);
        store.set(&format!("over {rank}"), b"").expect("a store");
        store.wait("gone", PATIENCE).expect("a store");
        let mut all = data.iter().chain(beside.iter());
        assert!(all.all(|&element| element == 0), "written late");
    }
}

/// Two operations at the same time: what one lends comes back while the other shares its memory.
fn gather_and_reduce(comm: &Communicator, gathered: &mut [i64], sum: &mut [i64]) -> Result<()> {
    let count = gathered.len() / comm.world_size();
    // SAFETY: the memory is borrowed until both have ended, below.
    let works = unsafe {
        let memory = |data: *mut i64, count| Memory::from_raw_parts(data.cast(), 8 * count);
        let all = memory(gathered.as_mut_ptr(), count * comm.world_size());
        let gather = Request::all_gather(DataType::Int64, None, all, Sizes::Even(count));
        let sum = memory(sum.as_mut_ptr(), sum.len());
        let reduce = Request::all_reduce(DataType::Int64, ReduceOp::Sum, None, sum);
        [gather, reduce].map(|request| comm.start(request, None))
    };
    let ends = works.map(|work| work.and_then(|work| work.wait(None)));
    ends.into_iter().collect()
}

/// Rank 1 aborts `after` the first round. From its error on each rank's memory stays as the rank leaves it, whatever the others
/// are doing until they hear of it.
fn gather_and_reduce_until_an_abort(
    comm: &Communicator,
    store: &TcpStore,
    maker: &Maker,
    after: Duration,
) {
    let (rank, count) = (comm.rank(), 3 << 19);
    let mut gathered = maker.zeroed::<i64>(rank, count);
    let mut sum = maker.zeroed::<i64>(rank, count);
    let mut round = || {
        gathered.fill(1);
        sum.fill(1);
        gather_and_reduce(comm, &mut gathered, &mut sum)
    };
    let error = std::thread::scope(|scope| {
        // It may end with the abort on a rank that is the last to end it.
        if let Err(error) = round() {
            assert_ne!(rank, 1, "the first round: {error}");
            return error;
        }
        if rank == 1 {
            scope.spawn(move || {
                std::thread::sleep(after);
                comm.abort("for a test");
            });
        }
        loop {
            if let Err(error) = round() {
                break error;
            }
        }
    });
    gathered.fill(0);
    sum.fill(0);
    assert!(error.message.contains("rank 1 aborted"), "{error}");
    store.set(&format!("over {rank}"), b"").expect("a store");
    for other in 0..comm.world_size() {
        let over = store.wait(&format!("over {other}"), PATIENCE);
        over.expect("an end");
    }
    let mut all = gathered.iter().chain(sum.iter());
    assert!(all.all(|&element| element == 0), "written late");
}

/// All ranks end after the same operation, when there is `enough`.
fn reduce_for_a_while(comm: &Communicator, store: &TcpStore, data: &mut [i64]) {
    let mut is_over = false;
    while !is_over {
        data.fill(comm.rank() as i64);
        comm.all_reduce(data, ReduceOp::Sum).expect("a sum");
        assert!(data.iter().all(|&element| element == 3));
        let mut enough = [0_i64];
        if comm.rank() == 0 {
            store.set("started", b"").expect("a store");
            enough[0] = i64::from(store.wait("enough", Duration::ZERO).is_ok());
        }
        comm.broadcast(&mut enough, 0).expect("a word");
        is_over = enough[0] == 1;
    }
}

fn reduce_around_forks(comm: Communicator, maker: &Maker) {
    let mut data = maker.zeroed::<i64>(comm.rank(), 1 << 20);
    let mut reduce = |comm: &Communicator| {
        data.fill(1);
        comm.all_reduce(&mut data, ReduceOp::Sum).expect("a sum");
        assert!(data.iter().all(|&element| element == 2));
    };
    reduce(&comm);
    for closes in [false, true] {
        // SAFETY: the child has this thread alone. It drops what is tested here, for which it needs the allocator, whose
        // locks a fork leaves free; and ends without running anything else.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = comm.barrier().is_err() && comm.recent_operations().is_empty();
            if closes {
                comm.close();
            }
            drop(comm);
            // SAFETY: as above.
            unsafe { libc::_exit(if refused { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: the child is this process's own and is waited for once.
        let waited = unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!((waited, status), (child, 0));
        for _ in 0..3 {
            reduce(&comm);
        }
    }
}

/// Makes buffers as a mode wants them.
struct Maker {
    mode: Mode,
}

impl Maker {
    fn zeroed<T: Element + Default>(
        &self,
        index: usize,
        count: usize,
    ) -> Box<dyn DerefMut<Target = [T]>> {
        if (self.mode.shared)(index) {
            let buffer = Buffer::zeroed(count);
            assert!(buffer.is_shared());
            return Box::new(buffer);
        }
        Box::new(vec![T::default(); count])
    }

    fn of<T: Element + Default>(
        &self,
        index: usize,
        values: &[T],
    ) -> Box<dyn DerefMut<Target = [T]>> {
        let mut buffer = self.zeroed(index, values.len());
        buffer.copy_from_slice(values);
        buffer
    }
}

/// The element at `index` of the contribution of `rank`.
fn value(rank: usize, index: usize) -> i64 {
    ((rank + 1) * 1000 + index * 7 % 501) as i64
}

fn contribution(rank: usize, count: usize) -> Vec<i64> {
    (0..count).map(|index| value(rank, index)).collect()
}

fn check_collectives(comm: &Communicator, maker: &Maker) -> Result<()> {
    // Twice, since the first payload of a link goes another way than the rest.
    for round in 0..2 {
        for count in COUNTS {
            check_reductions(comm, maker, (round, count))?;
            check_moves(comm, maker, (round, count))?;
            check_messages(comm, maker, (round, count))?;
        }
    }
    comm.barrier()
}

fn check_reductions(
    comm: &Communicator,
    maker: &Maker,
    (round, count): (usize, usize),
) -> Result<()> {
    let (rank, world) = (comm.rank(), comm.world_size());
    let root = (count + round) % world;
    let sum = |index| (0..world).map(|rank| value(rank, index)).sum::<i64>();
    let mut data = maker.of(round, &contribution(rank, count));
    comm.all_reduce(&mut data, ReduceOp::Sum)?;
    assert!(data.iter().enumerate().all(|(i, &found)| found == sum(i)));

    let mut data = maker.of(rank, &contribution(rank, count));
    comm.reduce(&mut data, ReduceOp::Max, root)?;
    let greatest = if rank == root { world - 1 } else { rank };
    assert!(data[..] == contribution(greatest, count));

    // Folded in 32 bits; sums that 8 bits of mantissa hold.
    let small = |rank: usize, index: usize| bf16::from_f32(((rank + index) % 16) as f32);
    let values: Vec<bf16> = (0..4 * count).map(|index| small(rank, index)).collect();
    let mut data = maker.of(round + rank, &values);
    comm.all_reduce(&mut data, ReduceOp::Sum)?;
    for (index, found) in data.iter().enumerate() {
        let sum: f32 = (0..world).map(|rank| small(rank, index).to_f32()).sum();
        assert_eq!(found.to_f32(), sum);
    }

    let blocks = maker.of(round, &contribution(rank, world * count));
    let mut block = maker.zeroed::<i64>(rank, count);
    comm.reduce_scatter(&blocks, &mut block, ReduceOp::Sum)?;
    let at = |i: usize| sum(rank * count + i);
    assert!(block.iter().enumerate().all(|(i, &found)| found == at(i)));
    Ok(())
}

fn check_moves(comm: &Communicator, maker: &Maker, (round, count): (usize, usize)) -> Result<()> {
    let (rank, world) = (comm.rank(), comm.world_size());
    let root = (count + round) % world;
    let mut data = maker.of(round, &contribution(rank, count));
    comm.broadcast(&mut data, root)?;
    assert!(data[..] == contribution(root, count));

    let mine = maker.of(rank + round, &contribution(rank, count));
    let contributions: Vec<i64> = (0..world)
        .flat_map(|rank| contribution(rank, count))
        .collect();
    let mut all = maker.zeroed::<i64>(round, world * count);
    comm.all_gather(&mine, &mut all)?;
    assert!(all[..] == contributions);

    let at_root = if rank == root { world * count } else { 0 };
    let mut gathered = maker.zeroed::<i64>(rank, at_root);
    comm.gather(&mine, &mut gathered, root)?;
    assert!(gathered[..] == contributions[..at_root]);

    let source = maker.of(round, &contributions[..at_root]);
    let mut block = maker.zeroed::<i64>(rank, count);
    comm.scatter(&source, &mut block, root)?;
    assert!(block[..] == mine[..]);

    let blocks = maker.of(rank, &contribution(rank, world * count));
    let mut exchanged = maker.zeroed::<i64>(round, world * count);
    comm.all_to_all(&blocks, &mut exchanged)?;
    let from = |other: usize| (0..count).map(move |i| value(other, rank * count + i));
    assert!(exchanged.iter().copied().eq((0..world).flat_map(from)));
    Ok(())
}

/// Messages that meet their receives in every order: a long one is offered, and the receiver may have no place for it.
fn check_messages(
    comm: &Communicator,
    maker: &Maker,
    (round, count): (usize, usize),
) -> Result<()> {
    const MESSAGES: usize = 3;
    let (rank, world) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
    let content = |rank: usize, tag: usize| contribution(rank + 10 * tag, count + tag);
    for late in [false, true] {
        let sent: Vec<_> = (0..MESSAGES)
            .map(|tag| maker.of(round + tag, &content(rank, tag)))
            .collect();
        let mut received: Vec<_> = (0..MESSAGES)
            .map(|tag| maker.zeroed::<i64>(round, count + tag))
            .collect();
        // SAFETY: the buffers live until both operations have been waited for, and are not touched before.
        let memory = |data: &[i64]| unsafe {
            Memory::from_raw_parts(data.as_ptr().cast_mut().cast(), size_of_val(data))
        };
        let options = PointToPoint::default;
        let send = |tag: usize| {
            // SAFETY: as above.
            unsafe { comm.send(i64::DTYPE, memory(&sent[tag]), next, tag as u64, options()) }
        };
        let mut works = Vec::new();
        if late {
            works.extend((0..MESSAGES).map(send).collect::<Result<Vec<_>>>()?);
            // Whatever was sent has come by now.
            comm.barrier()?;
            std::thread::sleep(Duration::from_millis(2));
        }
        // The last one first, and one of them from any rank.
        for (tag, received) in received.iter_mut().enumerate().rev() {
            let from = (tag != 1).then_some(previous);
            let memory = memory(received);
            // SAFETY: as above.
            works.push(unsafe { comm.receive(i64::DTYPE, memory, from, tag as u64, options())? });
        }
        if !late {
            works.extend((0..MESSAGES).map(send).collect::<Result<Vec<_>>>()?);
        }
        for work in &works {
            work.wait(None)?;
        }
        for (tag, received) in received.iter().enumerate() {
            assert!(received[..] == content(previous, tag));
        }
    }
    Ok(())
}

/// Has the kernel answer `process_vm_readv` with `answer` in this thread and those that it starts. False when it
/// installs no such filter.
fn answer_readv_with(answer: u32) -> bool {
    let statement = |code: u32, k: u32, if_not: u8| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: if_not,
        k,
    };
    let number = std::mem::offset_of!(libc::seccomp_data, nr) as u32;
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, number, 0),
        statement(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            libc::SYS_process_vm_readv as u32,
            1,
        ),
        statement(libc::BPF_RET | libc::BPF_K, answer, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: both calls change what this thread may do and no memory; the kernel copies the program, which is valid
    // during the call.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
                0,
                0,
            ) == 0
    }
}
