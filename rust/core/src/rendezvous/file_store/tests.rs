//! One store file, many processes, and what else may lie in its place.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

use proptest::prelude::*;
use rustix::fs::{FlockOperation, flock};

use super::creator::kernel;
use super::format::{Header, record};
use super::*;
use crate::error::Code;
use crate::rendezvous::store::suite;
use crate::skips::skipped;
use crate::temporary::Temporary;

const SOON: Duration = Duration::from_secs(20);

#[test]
fn passes_the_suite() {
    let path = Temporary::new();
    suite::run(|| FileStore::open(&path.0).expect("open"));
}

#[test]
fn an_empty_file_is_taken_over() {
    let path = Temporary::new();
    File::create(&path.0).expect("create");
    suite::run(|| FileStore::open(&path.0).expect("open"));
}

fn refused(path: &Path) -> String {
    let error = FileStore::open(path).expect_err("refused");
    assert_eq!(error.code, Code::Untrusted, "{error}");
    error.message
}

#[test]
fn links_pipes_and_devices_are_refused_at_once() {
    let (target, link) = (Temporary::new(), Temporary::new());
    fs::write(&target.0, "precious").expect("write");
    symlink(&target.0, &link.0).expect("a link");
    assert!(refused(&link.0).contains("is a link"));
    fs::remove_file(&target.0).expect("remove");
    // Nor is what it leads to made.
    assert!(refused(&link.0).contains("is a link"));
    assert!(!target.0.exists());
    let pipe = Temporary::new();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe.0, mode).expect("a pipe");
    assert!(refused(&pipe.0).contains("no regular file"));
    assert!(refused(Path::new("/dev/null")).contains("no regular file"));
}

#[test]
fn a_file_that_others_can_write_is_refused_with_what_to_do() {
    for mode in [0o620, 0o602, 0o666] {
        let path = Temporary::new();
        fs::write(&path.0, "").expect("write");
        fs::set_permissions(&path.0, Permissions::from_mode(mode)).expect("a mode");
        let message = refused(&path.0);
        assert!(
            message.contains(&format!("has mode {mode:04o}")),
            "{message}"
        );
        assert!(message.contains("chmod 600"), "{message}");
        assert_eq!(fs::read(&path.0).expect("read"), b"");
    }
    let path = Temporary::new();
    FileStore::open(&path.0).expect("open");
    assert_eq!(fs::metadata(&path.0).expect("made").mode() & 0o777, 0o600);
}

#[test]
fn a_file_of_another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        skipped("only root can give a file to another user");
        return;
    }
    let path = Temporary::new();
    FileStore::open(&path.0).expect("open");
    chown(&path.0, Some(65534), None).expect("give away");
    assert!(refused(&path.0).contains("belongs to user 65534"));
}

#[test]
fn many_threads_lose_nothing() {
    let path = Temporary::new();
    thread::scope(|scope| {
        for thread in 0..4 {
            let path = &path.0;
            scope.spawn(move || {
                let store = FileStore::open(path).expect("open");
                for i in 0..40 {
                    store
                        .set(&format!("{thread}/{i}"), &[thread; 100])
                        .expect("set");
                }
            });
        }
    });
    let store = FileStore::open(&path.0).expect("open");
    for thread in 0..4 {
        for i in 0..40 {
            let value = store.get(&format!("{thread}/{i}")).expect("get");
            assert_eq!(value, Some(vec![thread; 100]));
        }
    }
}

#[test]
fn a_record_torn_anywhere_is_passed_over_and_cut_off() {
    let torn = record("torn", b"half a value");
    for length in 0..torn.len() {
        let path = Temporary::new();
        let store = FileStore::open(&path.0).expect("open");
        store.set("whole", b"value").expect("set");
        let mut bytes = fs::read(&path.0).expect("read");
        bytes.extend(&torn[..length]);
        fs::write(&path.0, &bytes).expect("write");
        assert_eq!(store.get("torn").expect("get"), None);
        assert_eq!(
            store.get("whole").expect("get").as_deref(),
            Some(&b"value"[..])
        );
        let other = FileStore::open(&path.0).expect("open again");
        other.set("next", b"after").expect("set");
        assert_eq!(
            store.get("next").expect("get").as_deref(),
            Some(&b"after"[..])
        );
        assert_eq!(other.get("torn").expect("get"), None);
    }
}

#[test]
fn a_torn_header_is_written_anew() {
    let whole = Header::write(&[7; 16], &creator());
    for length in 0..whole.len() {
        let path = Temporary::new();
        fs::write(&path.0, &whole[..length]).expect("write");
        let store = FileStore::open(&path.0).expect("open");
        store.set("key", b"value").expect("set");
        let other = FileStore::open(&path.0).expect("open");
        assert_eq!(
            other.get("key").expect("get").as_deref(),
            Some(&b"value"[..])
        );
    }
}

#[test]
fn something_else_is_refused() {
    let path = Temporary::new();
    fs::write(&path.0, "dear diary, today I trained a model").expect("write");
    let error = FileStore::open(&path.0).expect_err("not a store");
    assert_eq!(error.code, Code::Untrusted);
    assert!(error.message.contains("remove it"), "{error}");
    let error = FileStore::open("/nonexistent/folder/store").expect_err("no folder");
    assert_eq!(error.code, Code::System);
}

#[test]
fn a_file_of_a_process_that_is_gone_is_started_anew() {
    let path = Temporary::new();
    // This process id with another start time: an earlier process that had the same id.
    let gone = format!("{} {} 1", kernel(), std::process::id());
    let old = FileStore::open_as(&path.0, &gone, SOON).expect("open");
    old.set("rank/0", b"stale").expect("set");
    let new = FileStore::open(&path.0).expect("open");
    assert_eq!(new.get("rank/0").expect("get"), None);
    let error = old.get("rank/0").expect_err("taken over");
    assert!(error.message.contains("another job"), "{error}");
    // Made on another host, or by this very process: it stays.
    for creator in ["elsewhere:pid:[1] 17 99", &creator()] {
        let path = Temporary::new();
        let first = FileStore::open_as(&path.0, creator, SOON).expect("open");
        first.set("key", b"kept").expect("set");
        let second = FileStore::open(&path.0).expect("open");
        assert_eq!(
            second.get("key").expect("get").as_deref(),
            Some(&b"kept"[..])
        );
    }
}

/// As long as a process that was stopped in the middle, or any that may read the file, keeps the lock.
#[test]
fn a_lock_that_is_held_is_waited_for_no_longer_than_the_time_to_join() {
    let path = Temporary::new();
    let patience = Duration::from_millis(300);
    let store = FileStore::open_within(&path.0, patience).expect("open");
    store.set("key", b"value").expect("set");
    // Of a file that was opened anew, as by another process.
    let other = File::open(&path.0).expect("open");
    flock(&other, FlockOperation::LockExclusive).expect("nobody has it");
    let begun = Instant::now();
    let what = [
        FileStore::open_within(&path.0, patience).map(drop),
        store.set("key", b"other"),
        store.get("key").map(drop),
        store.wait("key", SOON).map(drop),
    ];
    for result in what {
        let error = result.expect_err("locked");
        assert_eq!(error.code, Code::Timeout, "{error}");
        assert!(error.message.contains("was locked by"), "{error}");
    }
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    flock(&other, FlockOperation::Unlock).expect("held");
    assert_eq!(store.get("key").expect("free"), Some(b"value".to_vec()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_changed_byte_is_never_believed(at in any::<prop::sample::Index>(), flip in 1..=255_u8) {
        let path = Temporary::new();
        let entries = [("one", &b"first value"[..]), ("two", b"second"), ("three", b"")];
        {
            let store = FileStore::open(&path.0).expect("open");
            for (key, value) in entries {
                store.set(key, value).expect("set");
            }
        }
        let mut bytes = fs::read(&path.0).expect("read");
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        fs::write(&path.0, &bytes).expect("write");
        if let Ok(store) = FileStore::open(&path.0) {
            for (key, value) in entries {
                // An error, nothing, or the truth.
                if let Ok(Some(found)) = store.get(key) {
                    prop_assert_eq!(&found[..], value);
                }
            }
        }
    }

    #[test]
    fn any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let path = Temporary::new();
        let mut whole = Header::write(&[1; 16], &creator());
        whole.extend(bytes);
        fs::write(&path.0, &whole).expect("write");
        let store = FileStore::open(&path.0).expect("the header is good");
        let _ = store.get("key");
        let _ = store.set("key", b"value");
    }
}
