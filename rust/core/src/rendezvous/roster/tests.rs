//! Groups of threads form, or fail as they must.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use super::failures::list;
use super::joining::{GRACE, TROUBLE, VERDICT, page_key};
use super::*;
use crate::config::Config;
use crate::plan::cost::Costs;
use crate::rendezvous::file_store::FileStore;
use crate::rendezvous::memory::MemoryStore;
use crate::rendezvous::records::MAX_TEXT;
use crate::rendezvous::secret::Secret;
use crate::rendezvous::tcp_server::TcpStoreServer;
use crate::rendezvous::tcp_store::TcpStore;
use crate::temporary::Temporary;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(800);

fn a_process(rank: Rank, world: usize) -> Introduction {
    Introduction {
        hostname: format!("node{}", rank / 2),
        pid: 1000 + rank as u32,
        ..Introduction::new(rank, world, vec![rank as u8; 5], &Config::default())
            .expect("no secret")
    }
}

/// The costs that rank 0 gives.
fn costs() -> Rounded {
    Costs::TYPICAL.rounded(3)
}

/// As [`a_process`], but in another process on another host.
fn another_process(rank: Rank, world: usize) -> Introduction {
    Introduction {
        hostname: "elsewhere".to_owned(),
        pid: 77,
        process: [7; 16],
        ..a_process(rank, world)
    }
}

fn enter(store: &dyn Store, me: &Introduction, timeout: Duration) -> Result<Roster> {
    join(store, me, timeout, &|_| costs())
}

/// Joins all of `processes` at once and returns their results, in order.
fn join_all(
    store: &dyn Store,
    processes: &[Introduction],
    timeout: Duration,
) -> Vec<Result<Roster>> {
    thread::scope(|scope| {
        let joining: Vec<_> = processes
            .iter()
            .map(|me| scope.spawn(move || enter(store, me, timeout)))
            .collect();
        joining
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect()
    })
}

fn errors(store: &dyn Store, processes: &[Introduction], timeout: Duration) -> Vec<Error> {
    let results = join_all(store, processes, timeout).into_iter();
    results
        .map(|result| result.expect_err("no group"))
        .collect()
}

fn forms(store: &dyn Store, world: usize) {
    let processes: Vec<_> = (0..world).map(|rank| a_process(rank, world)).collect();
    let rosters: Vec<_> = join_all(store, &processes, LONG)
        .into_iter()
        .map(|result| result.expect("a group"))
        .collect();
    for roster in &rosters {
        assert_eq!(roster.members, rosters[0].members);
        assert_eq!(roster.key.id(), rosters[0].key.id());
        assert_eq!(roster.members.len(), world);
        assert_eq!(roster.costs, costs(), "rank 0's hold for all");
        for (rank, member) in roster.members.iter().enumerate() {
            assert_eq!(member.rank, rank);
            assert_eq!(member.address, vec![rank as u8; 5]);
            assert_eq!(
                (member.pid, &member.hostname),
                (processes[rank].pid, &processes[rank].hostname)
            );
        }
    }
}

#[test]
fn groups_form_in_memory() {
    for world in [1, 2, 3, 8, 40] {
        forms(&MemoryStore::default(), world);
    }
}

/// A value of a store has a limit, which a group has not.
#[test]
fn a_large_group_has_several_pages() {
    let store = MemoryStore::default();
    let world = 300;
    let process = |rank: Rank| Introduction {
        address: vec![rank as u8; 4000],
        ..a_process(rank, world)
    };
    let processes: Vec<_> = (0..world).map(process).collect();
    for roster in join_all(&store, &processes, LONG) {
        let members = roster.expect("a group").members;
        assert_eq!(members.len(), world);
        let is_right = |member: &Member| member.address == processes[member.rank].address;
        assert!(members.iter().all(is_right));
    }
    assert!(store.get(&page_key(1)).expect("memory").is_some());
}

/// A store in which ranks 0 and 1 have met.
fn met() -> MemoryStore {
    let store = MemoryStore::default();
    let results = join_all(&store, &[a_process(0, 2), a_process(1, 2)], LONG);
    assert!(results.iter().all(Result::is_ok));
    store
}

#[test]
fn a_page_that_is_not_the_verdict_s_is_refused() {
    let value = |store: &MemoryStore, key: &str| store.get(key).expect("memory").expect("a value");
    let (one, other) = (met(), met());
    let strange = [
        value(&other, &page_key(0)),
        b"what a stranger writes".to_vec(),
        Vec::new(),
    ];
    for page in strange {
        // The group as a rank 1 finds it that comes when all is there.
        let store = MemoryStore::default();
        for key in [VERDICT, &entry_key(0)] {
            store.set(key, &value(&one, key)).expect("memory");
        }
        store.set(&page_key(0), &page).expect("memory");
        let error = enter(&store, &a_process(1, 2), LONG).expect_err("another page");
        assert_eq!(error.code, Code::Untrusted, "{error}");
    }
}

#[test]
fn a_group_forms_over_tcp() {
    let store = TcpStore::own(TcpStoreServer::start("127.0.0.1:0").expect("bind")).expect("own");
    forms(&store, 8);
}

#[test]
fn a_group_forms_in_a_file() {
    let path = Temporary::new();
    forms(&FileStore::open(&path.0).expect("open"), 4);
}

#[test]
fn ids_differ_from_group_to_group() {
    let make = || enter(&MemoryStore::default(), &a_process(0, 1), LONG).expect("alone");
    let (one, two) = (make(), make());
    assert_ne!(one.key.id(), two.key.id());
}

#[test]
fn the_same_processes_join_in_one_store_again_and_again() {
    let store = MemoryStore::default();
    let mut ids = Vec::new();
    for _ in 0..4 {
        let processes = [a_process(0, 2), a_process(1, 2)];
        let rosters = join_all(&store, &processes, LONG);
        let mut formed: Vec<_> = rosters
            .into_iter()
            .map(|roster| roster.expect("a group").key.id())
            .collect();
        formed.dedup();
        assert_eq!(formed.len(), 1, "one group");
        ids.extend(formed);
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 4, "four groups");
    // Then, too, the error of another process names the process that has its rank.
    let error = enter(&store, &another_process(0, 2), SHORT).expect_err("taken");
    assert!(
        error.message.contains("two processes claim rank 0"),
        "{error}"
    );
}

#[test]
fn a_missing_rank_is_named_by_all_within_the_timeout() {
    let store = MemoryStore::default();
    let processes = [0, 1, 3].map(|rank| a_process(rank, 4));
    let begun = Instant::now();
    for error in errors(&store, &processes, SHORT) {
        assert_eq!((error.code, error.peer), (Code::Timeout, Some(2)));
        let says =
            "rank 2 of 4 did not join within 0.8 s; ranks 0, 1, 3 did; is its process running";
        assert!(error.message.contains(says), "{error}");
    }
    assert!(begun.elapsed() < SHORT + 10 * GRACE);
}

#[test]
fn ranks_with_a_longer_timeout_hear_what_rank_0_decided() {
    let store = MemoryStore::default();
    thread::scope(|scope| {
        let patient = scope.spawn(|| enter(&store, &a_process(1, 3), LONG));
        store.wait("rank/1", LONG).expect("introduced");
        let first = enter(&store, &a_process(0, 3), SHORT).expect_err("rank 2 is missing");
        let begun = Instant::now();
        let second = patient.join().expect("no panic").expect_err("told");
        assert!(begun.elapsed() < Duration::from_secs(5));
        assert_eq!((first.code, &first.message), (second.code, &second.message));
        assert_eq!((first.peer, second.peer), (Some(2), Some(2)));
        // The list does not travel.
        assert_eq!(first.missing_ranks(), [2]);
    });
}

#[test]
fn rank_0_missing_is_said() {
    let processes = [1, 2, 3].map(|rank| a_process(rank, 4));
    for error in errors(&MemoryStore::default(), &processes, SHORT) {
        assert_eq!((error.code, error.peer), (Code::Timeout, Some(0)));
        assert!(
            error
                .message
                .contains("rank 0 of 4, which the others wait for"),
            "{error}"
        );
    }
}

#[test]
fn several_missing_ranks_are_listed() {
    let error = errors(&MemoryStore::default(), &[a_process(0, 9)], SHORT).remove(0);
    assert!(
        error.message.contains("ranks 1-8 of 9 did not join"),
        "{error}"
    );
    assert!(error.message.contains("rank 0 did;"), "{error}");
    assert_eq!(error.missing_ranks(), (1..9).collect::<Vec<_>>());
}

#[test]
fn two_processes_with_one_rank_are_both_named() {
    for rank in [0, 1] {
        let store = Arc::new(MemoryStore::default());
        // They run: no other process may take their places.
        let other = Introduction {
            pid: 1,
            ..another_process(rank, 3)
        };
        let own = std::process::id();
        let runs = |rank| Introduction {
            pid: own,
            ..a_process(rank, 3)
        };
        let processes = [runs(0), runs(1), other];
        let begun = Instant::now();
        let errors = errors(&store, &processes, LONG);
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "not only at the timeout"
        );
        for error in errors {
            assert_eq!(error.code, Code::InvalidArgument);
            let says = format!("two processes claim rank {rank}");
            assert!(error.message.contains(&says), "{error}");
            assert!(error.message.contains("process 1 on elsewhere"), "{error}");
            assert!(
                error.message.contains(&format!("process {own} on node0")),
                "{error}"
            );
        }
    }
}

#[test]
fn a_process_that_has_ended_while_it_joined_is_replaced() {
    let store = Arc::new(MemoryStore::default());
    let ended = Introduction {
        pid: 1 << 30,
        ..another_process(1, 2)
    };
    enter(&*store, &ended, Duration::ZERO).expect_err("alone");
    let entry = || store.get(&entry_key(1)).expect("a store");
    let left = entry();
    thread::scope(|scope| {
        let next = scope.spawn(|| enter(&*store, &a_process(1, 2), LONG));
        while entry() == left {
            thread::sleep(Duration::from_millis(1));
        }
        let first = enter(&*store, &a_process(0, 2), LONG);
        for roster in [first, next.join().expect("no panic")] {
            assert_eq!(roster.expect("a group").members[1].pid, 1001);
        }
    });
}

#[test]
fn the_table_shows_which_process_lost_a_race_for_a_rank() {
    // Two entries for rank 1, set at the same moment: the first is overwritten after both had looked.
    let store = MemoryStore::default();
    let (me, other) = (a_process(1, 2), another_process(1, 2));
    let winner = other.entry();
    thread::scope(|scope| {
        let loser = scope.spawn(|| enter(&store, &me, LONG));
        store.wait("rank/1", LONG).expect("introduced");
        store
            .set("rank/1", &other.seal().write_entry(&winner))
            .expect("set");
        enter(&store, &a_process(0, 2), LONG).expect("rank 0 and the winner");
        let error = loser.join().expect("no panic").expect_err("lost");
        assert!(error.message.contains("process 77 on elsewhere"), "{error}");
    });
}

#[test]
fn a_wrong_world_size_names_both() {
    let processes = [a_process(0, 2), a_process(1, 3)];
    for error in errors(&MemoryStore::default(), &processes, LONG) {
        assert_eq!(error.code, Code::Mismatch);
        let both = [
            "rank 0 was started with world size 2, but rank 1 with 3",
            "rank 1 was started with world size 3, but rank 0 with 2",
        ];
        assert!(both.contains(&error.message.as_str()), "{error}");
    }
    // A rank that rank 0 never looks for learns it from the table.
    let store = MemoryStore::default();
    thread::scope(|scope| {
        let stranger = scope.spawn(|| enter(&store, &a_process(2, 3), LONG));
        store.wait("rank/2", LONG).expect("introduced");
        enter(&store, &a_process(0, 1), LONG).expect("alone");
        let error = stranger.join().expect("no panic").expect_err("no member");
        assert!(
            error
                .message
                .contains("rank 0 was started with world size 1"),
            "{error}"
        );
    });
}

#[test]
fn differing_settings_are_named_with_their_values() {
    let mut other = a_process(2, 3);
    for (name, value) in &mut other.settings {
        if name == "ring_bytes" {
            *value = "4096".to_owned();
        }
    }
    let processes = [a_process(0, 3), a_process(1, 3), other];
    for error in errors(&MemoryStore::default(), &processes, LONG) {
        assert_eq!(error.code, Code::Mismatch);
        assert!(error.message.contains("setting ring_bytes"), "{error}");
        assert!(
            error.message.contains("262144") && error.message.contains("4096"),
            "{error}"
        );
    }
}

#[test]
fn differing_versions_are_named() {
    // Patch versions must be the same, too: they may choose other algorithms.
    let mut other = a_process(1, 2);
    other.version.push('1');
    let own = a_process(0, 2).version;
    let both = [
        format!("unisono {own}1, but rank 0 runs {own}:"),
        format!("unisono {own}, but rank 1 runs {own}1:"),
    ];
    let errors = errors(&MemoryStore::default(), &[a_process(0, 2), other], LONG);
    for error in errors {
        assert_eq!(error.code, Code::Mismatch);
        assert!(
            both.iter().any(|said| error.message.contains(said)),
            "{error}"
        );
    }
}

#[test]
fn a_shared_secret_forms_a_group_and_another_does_not() {
    let with = |rank, secret: Option<&[u8]>| Introduction {
        secret: secret.map(Secret::from_bytes),
        ..a_process(rank, 2)
    };
    let ours: &[u8] = b"ours";
    let store = MemoryStore::default();
    for result in join_all(&store, &[with(0, Some(ours)), with(1, Some(ours))], LONG) {
        result.expect("a group");
    }
    // The store holds no key that comes from the secret.
    let secret = Secret::from_bytes(ours);
    for key in ["rank/0", "rank/1", VERDICT] {
        let record = store.get(key).expect("get").expect("set");
        for label in [&b"links"[..], b"records"] {
            let derived = secret.derive(label);
            assert!(!record.windows(32).any(|window| window == derived));
        }
    }
    for theirs in [None, Some(&b"theirs"[..])] {
        let processes = [with(0, Some(ours)), with(1, theirs)];
        for error in errors(&MemoryStore::default(), &processes, LONG) {
            assert_eq!(error.code, Code::Mismatch);
            assert!(error.message.contains("secret"), "{error}");
        }
    }
}

#[test]
fn what_no_rank_would_write_is_refused() {
    for key in ["rank/0", "rank/1", VERDICT, TROUBLE] {
        let store = MemoryStore::default();
        store.set(key, b"\0\xffnonsense").expect("set");
        let processes = [a_process(0, 3), a_process(1, 3)];
        let errors: Vec<_> = join_all(&store, &processes, SHORT)
            .into_iter()
            .filter_map(Result::err)
            .collect();
        assert_eq!(errors.len(), 2, "{key}");
        assert!(
            errors.iter().any(|error| error.code == Code::Untrusted),
            "{key}: {errors:?}"
        );
    }
}

#[test]
fn a_wrong_introduction_is_refused_before_anything_is_written() {
    let store = MemoryStore::default();
    let error = enter(&store, &a_process(2, 2), SHORT).expect_err("out of range");
    assert_eq!(error.code, Code::InvalidArgument);
    let mut long = a_process(0, 1);
    long.host = "h".repeat(MAX_TEXT + 1);
    enter(&store, &long, SHORT).expect_err("too long");
    assert_eq!(store.get("rank/0").expect("get"), None);
}

/// A store that is gone when rank 0 has joined or failed to, and at which the other ranks are slow.
struct Ephemeral {
    values: MemoryStore,
    is_gone: AtomicBool,
}

impl Ephemeral {
    fn answer(&self) -> Result<&MemoryStore> {
        match self.is_gone.load(Ordering::Acquire) {
            true => Err(Error::system("ask the store", "it is gone")),
            false => Ok(&self.values),
        }
    }
}

impl Store for Ephemeral {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.answer()?.set(key, value)
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let value = self.answer()?.wait(key, timeout);
        if key == VERDICT {
            // The table is on a page besides.
            thread::sleep(Duration::from_millis(200));
        }
        value
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.answer()?.get(key)
    }
}

/// A rank in this process.
fn a_thread(rank: Rank, world: usize) -> Introduction {
    Introduction {
        pid: std::process::id(),
        ..a_process(rank, world)
    }
}

/// Joins all of `processes` at a store that ends with rank 0.
fn join_ephemeral(processes: &[Introduction]) -> Vec<Result<Roster>> {
    let store = &Ephemeral {
        values: MemoryStore::default(),
        is_gone: AtomicBool::new(false),
    };
    thread::scope(|scope| {
        let enter = |me| {
            let joined = enter(store, me, LONG);
            store.is_gone.fetch_or(me.rank == 0, Ordering::AcqRel);
            joined
        };
        let join = |me| scope.spawn(move || enter(me));
        let joining: Vec<_> = processes.iter().map(join).collect();
        let joined = joining.into_iter();
        joined
            .map(|thread| thread.join().expect("no panic"))
            .collect()
    })
}

/// Its end, by whatever way, may be the end of the store.
#[test]
fn rank_0_has_joined_when_all_have_what_they_need() {
    let processes = [0, 1, 2].map(|rank| a_thread(rank, 3));
    for result in join_ephemeral(&processes) {
        result.expect("a group");
    }
    let mut other = a_thread(2, 3);
    other.version.push('1');
    for result in join_ephemeral(&[a_thread(0, 3), a_thread(1, 3), other]) {
        let error = result.expect_err("no group");
        assert_eq!(error.code, Code::Mismatch, "{error}");
    }
}

#[test]
fn a_rank_that_died_is_not_seen_off() {
    let store = MemoryStore::default();
    let mut child = Command::new("true").spawn().expect("a process");
    child.wait().expect("it ends");
    let dead = Introduction {
        pid: child.id(),
        ..a_process(1, 2)
    };
    store
        .set(&entry_key(1), &dead.seal().write_entry(&dead.entry()))
        .expect("set");
    let begun = Instant::now();
    enter(&store, &a_thread(0, 2), LONG).expect("all came");
    assert!(begun.elapsed() < Duration::from_secs(8));
}

/// Two jobs at one file, the first of them killed.
#[test]
fn a_file_that_is_left_over_is_said_to_be_one() {
    let path = Temporary::new();
    let store = FileStore::open(&path.0).expect("open");
    let results = join_all(&store, &[a_process(0, 2), a_process(1, 2)], LONG);
    assert!(results.iter().all(Result::is_ok));
    let one_more = [
        another_process(0, 2),
        another_process(1, 2),
        another_process(2, 3),
    ];
    for error in errors(&store, &one_more, SHORT) {
        let hint = format!("or store file {} is left over", path.0.display());
        assert_eq!(error.message.matches(&hint).count(), 1, "{error}");
    }
}

#[test]
fn lists_are_short() {
    assert_eq!(list(&[0, 1, 3]), "0, 1, 3");
    assert_eq!(list(&[2, 3, 4, 9]), "2-4, 9");
    let odd: Vec<Rank> = (0..100).map(|i| 2 * i + 1).collect();
    assert!(list(&odd).ends_with("31 and 84 more"), "{}", list(&odd));
}
