//! Fuzz targets for the data that is parsed before a peer is trusted, or in order to trust it.

use std::fs;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, PoisonError};

use super::file_store::FileStore;
use super::file_store::creator::kernel;
use super::file_store::format::{Header, RECORD_MAGIC, digest, record as written};
use super::records::Seal;
use super::store::Store;
use super::tcp::wire::StoreKey;
use super::tcp::wire::{Channel, FRAME_HEAD, Greeting, HELLO, MAGIC, Request, answer};
use super::tcp::wire::{frame_length, read_reply};
use super::unique_id::{BYTES, UniqueId};
use crate::error::Code;

const VERSION: &str = "1";

/// A client's message to the store's server, once its frames have been opened: a request is the same when it is written and
/// read again.
pub fn store_request(bytes: &[u8]) {
    if let Ok(Some(request)) = Request::read(bytes) {
        let written = request.write();
        assert_eq!(Request::read(&written).expect("a request"), Some(request));
    }
}

/// An answer of the store's server to a client, once its frames have been opened.
pub fn store_reply(bytes: &[u8]) {
    if let Ok(Some((_, value))) = read_reply(bytes) {
        assert!(value.len() < bytes.len());
    }
}

/// Bytes for the store's server, for its client, and for a connection between both: none of them may accept them.
pub fn store_hello(bytes: &[u8]) {
    static KEY: LazyLock<StoreKey> = LazyLock::new(|| StoreKey::new("job", None));
    static OTHER: LazyLock<StoreKey> = LazyLock::new(|| StoreKey::new("other", None));
    let Some((hello, rest)) = bytes.split_first_chunk::<HELLO>() else {
        return;
    };
    // The key of the job that the bytes know may be that of the seed.
    assert!(answer(&OTHER, hello).is_none());
    let _ = answer(&KEY, hello);
    let (greeting, hello) = Greeting::new(&KEY).expect("a hello");
    if let Some(message) = rest.first_chunk() {
        assert!(greeting.finish(message).is_none());
    }
    let (mut channel, _): (Channel, _) = answer(&KEY, &hello).expect("the same key");
    let mut frames = rest;
    while let Some((head, after)) = frames.split_first_chunk::<FRAME_HEAD>()
        && let Some(length) = frame_length(*head)
        && let Some((message, after)) = after.split_at_checked(length)
    {
        let mut content = Vec::new();
        assert!(channel.open(message, &mut content).is_err());
        assert!(content.is_empty());
        frames = after;
    }
    assert_eq!(hello[..MAGIC.len()], *MAGIC);
}

/// A record in the store, with a secret and without: refused, or one that is read as the same when it is written again. Its
/// bytes may differ: texts are cleaned.
pub fn record(bytes: &[u8]) {
    for seal in [OPEN, SEALED] {
        if let Ok(entry) = seal.read_entry(bytes) {
            let again = seal.write_entry(&entry);
            assert!(again.len() <= bytes.len());
            assert_eq!(seal.read_entry(&again), Ok(entry));
        }
        if let Ok(verdict) = seal.read_verdict(bytes) {
            let again = seal.write_verdict(&verdict);
            assert!(again.len() <= bytes.len());
            assert_eq!(seal.read_verdict(&again), Ok(verdict));
        }
        if let Ok(rows) = seal.read_any_page(bytes) {
            // A host may have been there twice, or without a member.
            let again = seal.write_pages(&rows, usize::MAX);
            let read = again
                .first()
                .map(|(named, page)| seal.read_page(page, named));
            assert_eq!(read, (!rows.is_empty()).then_some(Ok(rows)));
        }
    }
}

const OPEN: Seal<'_> = Seal {
    version: VERSION,
    key: None,
};

const SEALED: Seal<'_> = Seal {
    key: Some([7; 32]),
    ..OPEN
};

/// A unique id: refused, or one that writes the same bytes.
pub fn unique_id(bytes: &[u8]) {
    if let Some(bytes) = bytes.first_chunk::<BYTES>()
        && let Ok(id) = UniqueId::from_bytes(*bytes)
    {
        assert_eq!(id.to_bytes(), *bytes);
    }
}

/// The content of a store's file: it is refused, or the store takes a value, and gives it back to the next one that opens it.
/// The first byte says how the others become a file: as they are; behind a header that names a process; as whole records of a
/// key and a value, the last of them torn; or behind a record's head whose check is right.
pub fn store_file(bytes: &[u8]) {
    static PATH: LazyLock<Mutex<PathBuf>> = LazyLock::new(|| {
        let name = format!("unisono-fuzz-{}", std::process::id());
        Mutex::new(std::env::temp_dir().join(name))
    });
    let Some((how, rest)) = bytes.split_first() else {
        return;
    };
    let (contents, last) = contents(*how, rest);
    let path = PATH.lock().unwrap_or_else(PoisonError::into_inner);
    fs::write(&*path, contents).expect("a folder for temporary files");
    let untrusted = |error: crate::error::Error| assert_eq!(error.code, Code::Untrusted, "{error}");
    match FileStore::open(&*path).and_then(|store| store.get(KEY).map(|_| store)) {
        Ok(store) => {
            if let Some((key, value)) = last {
                assert_eq!(store.get(&key).expect("as before"), Some(value));
            }
            store.set(KEY, b"v").expect("what was read can be written");
            let again = FileStore::open(&*path).expect("its own file");
            assert_eq!(
                again.get(KEY).expect("its own record").as_deref(),
                Some(&b"v"[..])
            );
        }
        Err(error) => untrusted(error),
    }
    fs::remove_file(&*path).expect("it was made here");
}

const KEY: &str = "a key";

/// The contents of a file, and the last record that it must have.
fn contents(how: u8, rest: &[u8]) -> (Vec<u8>, Option<(String, Vec<u8>)>) {
    let mut file = Header::write(&[7; 16], "");
    let mut last = None;
    match how & 3 {
        0 => return (rest.to_vec(), None),
        1 => {
            let creator = String::from_utf8_lossy(&rest[..rest.len().min(300)]);
            // The first word is of this host where it is an @.
            return (
                Header::write(&[7; 16], &creator.replacen('@', &kernel(), 1)),
                None,
            );
        }
        2 => {
            let mut rest = rest;
            while let [key, value, parts @ ..] = rest
                && let Some((key, parts)) = parts.split_at_checked(usize::from(*key))
                && let Some((value, parts)) = parts.split_at_checked(usize::from(*value))
            {
                let key = String::from_utf8_lossy(key).into_owned();
                file.extend(written(&key, value));
                last = (!key.is_empty()).then(|| (key, value.to_vec()));
                rest = parts;
            }
            let torn = usize::from(how >> 2);
            if torn > 0 {
                file.truncate(file.len().saturating_sub(torn));
                last = None;
            }
        }
        _ => {
            let (lengths, rest) = rest.split_at(rest.len().min(8));
            let head = [RECORD_MAGIC, lengths].concat();
            file.extend(&head);
            file.extend(&digest(&[&head])[..4]);
            file.extend(rest);
        }
    }
    (file, last)
}

/// Target, name and bytes of what begins a corpus.
#[cfg(test)]
pub(crate) fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    use std::time::Duration;

    use super::records::{Entry, Table, Verdict};
    use super::tcp::wire::reply_head;
    use crate::config::Config;
    use crate::error::{Code, Error};
    use crate::plan::cost::Costs;

    let row = row();
    let entry = Entry {
        rank: 1,
        world: 2,
        process: [1; 16],
        row: row.clone(),
        settings: vec![("a".into(), "b".into())],
    };
    let settings = vec![("a\0\u{1b}".into(), "b".into())];
    let obeyed = Entry {
        settings,
        ..entry.clone()
    };
    let rows = vec![row; 2];
    let pages = OPEN.write_pages(&rows, 1);
    let sealed_pages = SEALED.write_pages(&rows, 1 << 10);
    let named = pages.iter().map(|(named, _)| *named);
    let table = Verdict::Table(Table {
        costs: Costs::TYPICAL.rounded(2),
        world: 2,
        pages: named.collect(),
    });
    let failure = Verdict::Failure(Error::new(Code::Timeout, "late").with_peer(1));
    let id = UniqueId::create(&Config::default()).expect("a port");
    let key = StoreKey::new("job", None);
    let (_, hello) = Greeting::new(&key).expect("a hello");
    let (mut channel, answered) = answer(&key, &hello).expect("the same key");
    let mut frames = [hello, answered].concat();
    channel.seal(b"content", &mut frames);
    let reply = |status, value: &[u8]| [&reply_head(status, value.len())[..], value].concat();
    let mut seeds = vec![
        ("record", "entry", OPEN.write_entry(&entry)),
        ("record", "entry-with-controls", OPEN.write_entry(&obeyed)),
        ("record", "sealed-entry", SEALED.write_entry(&entry)),
        ("record", "table", OPEN.write_verdict(&table)),
        ("record", "page", pages[0].1.clone()),
        ("record", "sealed-page", sealed_pages[0].1.clone()),
        ("record", "failure", OPEN.write_verdict(&failure)),
        ("record", "sealed-failure", SEALED.write_verdict(&failure)),
        ("unique_id", "id", id.to_bytes().to_vec()),
        ("store_request", "set", Request::Set("k", b"v").write()),
        ("store_request", "get", Request::Get("k").write()),
        (
            "store_request",
            "wait",
            Request::Wait("k", Duration::from_secs(1)).write(),
        ),
        ("store_reply", "ok", reply(0, &[7, 7])),
        ("store_reply", "absent", reply(1, &[])),
        ("store_hello", "hello-answer-and-frame", frames),
    ];
    seeds.extend(files());
    seeds
}

#[cfg(test)]
fn row() -> super::records::Row {
    super::records::Row {
        key: [2; 32],
        attempt: [3; 16],
        pid: 7,
        node: Some(1),
        is_new: true,
        host: "h".into(),
        hostname: "n".into(),
        address: vec![1, 2],
    }
}

#[cfg(test)]
fn files() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let whole = Header::write(&[7; 16], "x 1 1");
    let file = |how: u8, rest: &[u8]| [&[how], rest].concat();
    vec![
        (
            "store_file",
            "as-it-is",
            file(0, &[&whole[..], &written("k", b"v")].concat()),
        ),
        ("store_file", "a-creator", file(1, b"@ 1 1")),
        ("store_file", "records", file(2, b"\x01\x02kvv\x01\x00k")),
        (
            "store_file",
            "a-torn-record",
            file(2 | 3 << 2, b"\x01\x02kvv"),
        ),
        (
            "store_file",
            "a-head",
            file(3, b"\x01\x00\x00\x00\x01\x00\x00\x00kv"),
        ),
    ]
}
