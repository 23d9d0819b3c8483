//! A store in a file that all ranks can open: `file:///path`, on a local disk or a shared one.
//!
//! The file is a log. It begins with a header that names the process that made it. One record for each set follows; the
//! last one of a key is its value:
//!
//! ```text
//! header:  magic (8)  id (16)  length of creator (4)  creator  check (4)
//! record:  magic (4)  key length (4)  value length (4)  check (4)  key  value  check (8)
//! ```
//!
//! Writers hold an exclusive `flock`, readers a shared one; the kernel releases both when a process dies. So an
//! incomplete record at the end that a lock holder sees was left by a process that died in the middle: readers
//! pass over it, and the next writer cuts it off. The check in the record's head tells this case from a damaged
//! length, which is an error like all other damage: nothing is guessed.
//!
//! **Whose file it is.** In a shared directory such as /tmp another user may have put a file of that name first, or a
//! link to somewhere else. So the path itself must be a regular file, which belongs to this process's user and which
//! no other can write; links are not followed, pipes and devices not waited for.
//!
//! **A file left over from an earlier job.** The header names the process that made the file (kernel boot, process
//! namespace, process id, start time). If that process is known to be gone when the file is opened, no job of which
//! it was a member can still form, and the file is started anew. If it cannot be known (another host made it), the
//! file is taken as it is; ranks of the earlier job then show as ranks that were claimed twice, which is an error
//! that names the file's entries. Use a fresh name for each job across hosts.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use super::store::{MAX_KEY, MAX_VALUE, Store, check_key, check_value, not_set};
use crate::error::{Code, Error, Result};

const FILE_MAGIC: &[u8; 8] = b"unisono1";
pub(super) const RECORD_MAGIC: &[u8; 4] = b"rec\n";
/// Magic, id and the creator's length.
const HEADER_FIXED: usize = 8 + 16 + 4;
/// The longest creator that is believed.
const MAX_CREATOR: usize = 1024;
/// Magic, two lengths, check.
const RECORD_HEAD: usize = 16;
const RECORD_CHECK: usize = 8;
/// The pauses between two looks at the file while waiting.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// A store in a file. See the module for what it does about processes that die and files that are left over.
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    log: Mutex<Log>,
}

impl FileStore {
    /// Opens the store at `path`, making the file when it does not exist. An empty file is taken over.
    ///
    /// # Errors
    /// `System` when the file cannot be opened or locked, `Untrusted` when it is something else or is damaged, or when
    /// another user owns it or can write to it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_as(path.as_ref(), &creator())
    }

    fn open_as(path: &Path, creator: &str) -> Result<Self> {
        let file = open_own(path)?;
        let mut log = Log {
            file,
            path: path.to_owned(),
            id: [0; 16],
            end: 0,
            values: HashMap::new(),
        };
        log.begin(creator)?;
        Ok(Self {
            path: path.to_owned(),
            log: Mutex::new(log),
        })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        check_value(key, value)?;
        self.log.lock().append(key, value)
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let begun = Instant::now();
        let mut pause = SHORTEST_PAUSE;
        loop {
            // The lock is released before the pause, so that another thread of this process can set.
            if let Some(value) = self.get(key)? {
                return Ok(value);
            }
            let left = timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(not_set(key, timeout));
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let mut log = self.log.lock();
        log.refresh()?;
        Ok(log.values.get(key).cloned())
    }
}

/// Opens or makes the file at `path`, which no other user may have put there or can change.
fn open_own(path: &Path) -> Result<File> {
    // Between the two attempts of a round another rank may make the file, or remove it.
    for _ in 0..100 {
        for makes in [false, true] {
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(makes)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
                .open(path);
            match (opened, makes) {
                (Ok(file), _) => return check_owner(&file, path).map(|()| file),
                (Err(cause), false) if cause.kind() == io::ErrorKind::NotFound => {}
                (Err(cause), true) if cause.kind() == io::ErrorKind::AlreadyExists => {}
                (Err(cause), _) if cause.raw_os_error() == Some(libc::ELOOP) => {
                    return Err(untrusted(path, "is a link; give the path that it leads to"));
                }
                // A pipe that is not read.
                (Err(cause), _) if cause.raw_os_error() == Some(libc::ENXIO) => {
                    return Err(untrusted(path, "is no regular file"));
                }
                (Err(cause), _) => {
                    let doing = format!("open store file {}", path.display());
                    return Err(Error::system(doing, cause));
                }
            }
        }
    }
    let doing = format!("open store file {}", path.display());
    Err(Error::system(doing, "it comes and goes"))
}

/// Refuses a file that another user could have written. The open file is looked at, since the path may lead elsewhere
/// a moment later.
fn check_owner(file: &File, path: &Path) -> Result<()> {
    let about = file
        .metadata()
        .map_err(|cause| Error::system(format!("look at store file {}", path.display()), cause))?;
    if !about.is_file() {
        return Err(untrusted(path, "is no regular file"));
    }
    let user = rustix::process::geteuid().as_raw();
    if about.uid() != user {
        let why = format!(
            "belongs to user {}, not to user {user}, who runs this process; remove it or use another path, best in a \
             directory of your own",
            about.uid()
        );
        return Err(untrusted(path, &why));
    }
    if about.mode() & 0o022 != 0 {
        let why = format!(
            "has mode {:04o}, so that other users can write to it; `chmod 600` it, or remove it",
            about.mode() & 0o7777
        );
        return Err(untrusted(path, &why));
    }
    Ok(())
}

fn untrusted(path: &Path, why: &str) -> Error {
    let message = format!("store file {} {why}", path.display());
    Error::new(Code::Untrusted, message)
}

/// The open file and what of it has been read.
#[derive(Debug)]
struct Log {
    file: File,
    path: PathBuf,
    /// The header's id: another one means that the file was started anew under us.
    id: [u8; 16],
    /// The end of the last complete record.
    end: u64,
    values: HashMap<String, Vec<u8>>,
}

impl Log {
    /// Checks the header, or writes one when the file is empty, torn, or left over from an earlier job.
    fn begin(&mut self, creator: &str) -> Result<()> {
        let _lock = Lock::take(&self.file, &self.path, FlockOperation::LockExclusive)?;
        let bytes = self.read_from(0, HEADER_FIXED + MAX_CREATOR + 4)?;
        match Header::parse(&bytes) {
            Parsed::Complete(header) if !is_gone(&header.creator) => {
                self.id = header.id;
                self.end = header.len as u64;
                return Ok(());
            }
            Parsed::Complete(header) => {
                tracing::info!(
                    path = %self.path.display(),
                    creator = %header.creator,
                    "starting a store file anew that was left over from an earlier job"
                );
            }
            Parsed::Incomplete => {}
            Parsed::Damaged => return Err(self.damaged(0, "it does not begin as a store file")),
        }
        getrandom::fill(&mut self.id).map_err(|cause| Error::system("read random bytes", cause))?;
        let header = Header::write(&self.id, creator);
        self.file
            .set_len(0)
            .map_err(|cause| self.failed("truncate", cause))?;
        self.file
            .write_all_at(&header, 0)
            .map_err(|cause| self.failed("write", cause))?;
        self.end = header.len() as u64;
        Ok(())
    }

    /// Reads the records that were added since the last time.
    fn refresh(&mut self) -> Result<()> {
        let lock = Lock::take(&self.file, &self.path, FlockOperation::LockShared)?;
        let result = read_new(&self.file, &self.path, &self.id, self.end);
        drop(lock);
        self.accept(result?);
        Ok(())
    }

    /// Appends a record after the last complete one.
    fn append(&mut self, key: &str, value: &[u8]) -> Result<()> {
        let lock = Lock::take(&self.file, &self.path, FlockOperation::LockExclusive)?;
        let result = read_new(&self.file, &self.path, &self.id, self.end).and_then(|tail| {
            let record = record(key, value);
            let end = tail.end;
            // Whatever follows the last complete record was left by a process that died while it wrote.
            self.file
                .set_len(end)
                .map_err(|cause| self.failed("truncate", cause))?;
            self.file
                .write_all_at(&record, end)
                .map_err(|cause| self.failed("write", cause))?;
            Ok((tail, end + record.len() as u64))
        });
        drop(lock);
        let (tail, end) = result?;
        self.accept(tail);
        self.end = end;
        self.values.insert(key.to_owned(), value.to_vec());
        Ok(())
    }

    fn accept(&mut self, tail: Tail) {
        self.end = tail.end;
        self.values.extend(tail.records);
    }

    fn read_from(&self, offset: u64, most: usize) -> Result<Vec<u8>> {
        read_at_most(&self.file, offset, most).map_err(|cause| self.failed("read", cause))
    }

    fn failed(&self, doing: &str, cause: io::Error) -> Error {
        Error::system(format!("{doing} store file {}", self.path.display()), cause)
    }

    fn damaged(&self, offset: u64, why: &str) -> Error {
        damaged(&self.path, offset, why)
    }
}

/// A held `flock`, released when dropped.
struct Lock<'a>(&'a File);

impl<'a> Lock<'a> {
    fn take(file: &'a File, path: &Path, how: FlockOperation) -> Result<Self> {
        loop {
            match flock(file, how) {
                Ok(()) => return Ok(Self(file)),
                Err(rustix::io::Errno::INTR) => {}
                Err(cause) => {
                    let doing = format!("lock store file {}", path.display());
                    return Err(Error::system(doing, cause));
                }
            }
        }
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        // Nothing can be done about a failure here; closing the file releases the lock in any case.
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}

/// Records that were read, and where the last complete one ends.
struct Tail {
    records: Vec<(String, Vec<u8>)>,
    end: u64,
}

/// Reads the records from `from` on. The caller holds a lock.
fn read_new(file: &File, path: &Path, id: &[u8; 16], from: u64) -> Result<Tail> {
    let failed =
        |cause: io::Error| Error::system(format!("read store file {}", path.display()), cause);
    let start = read_at_most(file, 0, 24).map_err(failed)?;
    if start.get(8..24) != Some(&id[..]) {
        return Err(Error::new(
            Code::Untrusted,
            format!(
                "store file {} was started anew by another job; give each job a file of its own",
                path.display()
            ),
        ));
    }
    let length = file.metadata().map_err(failed)?.len();
    let mut tail = Tail {
        records: Vec::new(),
        end: from,
    };
    while tail.end < length {
        let head = read_at_most(file, tail.end, RECORD_HEAD).map_err(failed)?;
        let (key, value) = match record_lengths(&head) {
            Parsed::Complete(lengths) => lengths,
            Parsed::Incomplete => break,
            Parsed::Damaged => return Err(damaged(path, tail.end, "no record begins there")),
        };
        let body = key + value + RECORD_CHECK;
        let bytes = read_at_most(file, tail.end + RECORD_HEAD as u64, body).map_err(failed)?;
        if bytes.len() < body {
            break;
        }
        let (content, check) = bytes.split_at(key + value);
        if check != &digest(&[&head, content])[..RECORD_CHECK] {
            return Err(damaged(path, tail.end, "its record's checksum is wrong"));
        }
        let Ok(name) = std::str::from_utf8(&content[..key]) else {
            return Err(damaged(path, tail.end, "its record's key is not UTF-8"));
        };
        tail.records
            .push((name.to_owned(), content[key..].to_vec()));
        tail.end += (RECORD_HEAD + body) as u64;
    }
    Ok(tail)
}

/// Up to `most` bytes at `offset`: fewer at the end of the file.
fn read_at_most(file: &File, offset: u64, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; most];
    let mut filled = 0;
    while filled < most {
        match file.read_at(&mut bytes[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(cause),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn damaged(path: &Path, offset: u64, why: &str) -> Error {
    Error::new(
        Code::Untrusted,
        format!(
            "store file {} is damaged or is no store file at byte {offset}: {why}; remove it or use another path",
            path.display()
        ),
    )
}

/// The outcome of parsing a prefix of something.
enum Parsed<T> {
    Complete(T),
    Incomplete,
    Damaged,
}

/// The head of the file.
pub(super) struct Header {
    id: [u8; 16],
    creator: String,
    len: usize,
}

impl Header {
    pub(super) fn write(id: &[u8; 16], creator: &str) -> Vec<u8> {
        let mut bytes = FILE_MAGIC.to_vec();
        bytes.extend(id);
        bytes.extend((creator.len() as u32).to_le_bytes());
        bytes.extend(creator.as_bytes());
        let check = digest(&[&bytes]);
        bytes.extend(&check[..4]);
        bytes
    }

    fn parse(bytes: &[u8]) -> Parsed<Self> {
        let magic = &bytes[..bytes.len().min(FILE_MAGIC.len())];
        if !FILE_MAGIC.starts_with(magic) {
            return Parsed::Damaged;
        }
        let Some(fixed) = bytes.get(..HEADER_FIXED) else {
            return Parsed::Incomplete;
        };
        let length = u32_at(fixed, 24) as usize;
        if length > MAX_CREATOR {
            return Parsed::Damaged;
        }
        let end = HEADER_FIXED + length;
        let (Some(content), Some(check)) = (bytes.get(..end), bytes.get(end..end + 4)) else {
            return Parsed::Incomplete;
        };
        let Ok(creator) = std::str::from_utf8(&content[HEADER_FIXED..]) else {
            return Parsed::Damaged;
        };
        if check != &digest(&[content])[..4] {
            return Parsed::Damaged;
        }
        let mut id = [0; 16];
        id.copy_from_slice(&fixed[8..24]);
        Parsed::Complete(Self {
            id,
            creator: creator.to_owned(),
            len: end + 4,
        })
    }
}

pub(super) fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let mut bytes = RECORD_MAGIC.to_vec();
    bytes.extend((key.len() as u32).to_le_bytes());
    bytes.extend((value.len() as u32).to_le_bytes());
    let check = digest(&[&bytes]);
    bytes.extend(&check[..4]);
    bytes.extend(key.as_bytes());
    bytes.extend(value);
    let check = digest(&[&bytes]);
    bytes.extend(&check[..RECORD_CHECK]);
    bytes
}

/// The lengths of key and value from a record's head.
fn record_lengths(head: &[u8]) -> Parsed<(usize, usize)> {
    let magic = &head[..head.len().min(RECORD_MAGIC.len())];
    if !RECORD_MAGIC.starts_with(magic) {
        return Parsed::Damaged;
    }
    if head.len() < RECORD_HEAD {
        return Parsed::Incomplete;
    }
    let (key, value) = (u32_at(head, 4) as usize, u32_at(head, 8) as usize);
    if head[12..16] != digest(&[&head[..12]])[..4] || key > MAX_KEY || value > MAX_VALUE {
        return Parsed::Damaged;
    }
    Parsed::Complete((key, value))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(four)
}

pub(super) fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part);
    }
    hash.finalize().into()
}

/// This process, as `boot id, pid namespace, pid, start time`; parts that cannot be read are empty.
fn creator() -> String {
    let pid = std::process::id();
    format!("{} {pid} {}", kernel(), start_time(pid).unwrap_or_default())
}

/// This running kernel and process namespace, in one word: only in the same one do process ids compare.
pub(super) fn kernel() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{}:{}", boot.trim(), space.display())
}

/// When process `pid` began, in clock ticks since boot: a reused process id has another one. `None`: it has ended,
/// though its parent may not have noticed yet.
fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in parentheses and may hold anything; the start time is the 22nd.
    let mut rest = stat[stat.rfind(')')? + 1..].split_whitespace();
    let state = rest.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    rest.nth(18).map(str::to_owned)
}

/// Whether the process described by `creator` is known to be gone.
fn is_gone(creator: &str) -> bool {
    let mut words = creator.split(' ');
    let (Some(place), Some(pid), Some(start)) = (words.next(), words.next(), words.next()) else {
        return false;
    };
    // Without a boot id or a start time nothing can be known.
    if place != kernel() || place.starts_with(':') || start.is_empty() {
        return false;
    }
    match pid.parse() {
        Ok(pid) => start_time(pid).as_deref() != Some(start),
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::sync::atomic::{AtomicU32, Ordering};

    use proptest::prelude::*;

    use super::*;
    use crate::rendezvous::store::suite;
    use crate::skips::skipped;

    /// A path in the temporary folder, removed when dropped.
    struct Temporary(PathBuf);

    impl Temporary {
        fn new() -> Self {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let name = format!("unisono-file-store-{}-{number}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let _ = fs::remove_file(&path);
            Self(path)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

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
        let old = FileStore::open_as(&path.0, &gone).expect("open");
        old.set("rank/0", b"stale").expect("set");
        let new = FileStore::open(&path.0).expect("open");
        assert_eq!(new.get("rank/0").expect("get"), None);
        let error = old.get("rank/0").expect_err("taken over");
        assert!(error.message.contains("another job"), "{error}");
        // Made on another host, or by this very process: it stays.
        for creator in ["elsewhere:pid:[1] 17 99", &creator()] {
            let path = Temporary::new();
            let first = FileStore::open_as(&path.0, creator).expect("open");
            first.set("key", b"kept").expect("set");
            let second = FileStore::open(&path.0).expect("open");
            assert_eq!(
                second.get("key").expect("get").as_deref(),
                Some(&b"kept"[..])
            );
        }
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
}
