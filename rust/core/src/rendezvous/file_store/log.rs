//! Reading the file and appending to it. Writers hold an exclusive `flock`, readers a shared one; the kernel releases both
//! when a process dies. So an incomplete record at the end that a lock holder sees was left by a process that died in the
//! middle: readers pass over it, and the next writer cuts it off.
//!
//! The lock is tried again and again and not waited for: the kernel has no wait for it with a limit.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::creator::is_gone;
use super::format::{
    HEADER_FIXED, Header, MAX_CREATOR, Parsed, RECORD_CHECK, RECORD_HEAD, digest, record,
    record_lengths,
};
use super::{LONGEST_PAUSE, SHORTEST_PAUSE};
use crate::error::{Code, Error, Result};

/// The open file and what of it has been read.
#[derive(Debug)]
pub(super) struct Log {
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
    pub(super) fn begin(
        file: File,
        path: &Path,
        creator: &str,
        until: Option<Instant>,
    ) -> Result<Self> {
        let mut log = Self {
            file,
            path: path.to_owned(),
            id: [0; 16],
            end: 0,
            values: HashMap::new(),
        };
        log.begin_as(creator, until)?;
        Ok(log)
    }

    /// The value of `key` that was read last.
    pub(super) fn value(&self, key: &str) -> Option<Vec<u8>> {
        self.values.get(key).cloned()
    }

    fn begin_as(&mut self, creator: &str, until: Option<Instant>) -> Result<()> {
        let _lock = Lock::write(&self.file, &self.path, until)?;
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

    /// Reads the records that were added since the last time. Waits for the lock until then.
    pub(super) fn refresh(&mut self, until: Option<Instant>) -> Result<()> {
        let lock = Lock::read(&self.file, &self.path, until)?;
        let result = read_new(&self.file, &self.path, &self.id, self.end);
        drop(lock);
        self.accept(result?);
        Ok(())
    }

    /// Appends a record after the last complete one. Waits for the lock until then.
    pub(super) fn append(&mut self, key: &str, value: &[u8], until: Option<Instant>) -> Result<()> {
        let lock = Lock::write(&self.file, &self.path, until)?;
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
    fn read(file: &'a File, path: &Path, until: Option<Instant>) -> Result<Self> {
        Self::take(file, path, (FlockOperation::NonBlockingLockShared, until))
    }

    fn write(file: &'a File, path: &Path, until: Option<Instant>) -> Result<Self> {
        Self::take(
            file,
            path,
            (FlockOperation::NonBlockingLockExclusive, until),
        )
    }

    fn take(
        file: &'a File,
        path: &Path,
        (how, until): (FlockOperation, Option<Instant>),
    ) -> Result<Self> {
        let begun = Instant::now();
        let mut pause = SHORTEST_PAUSE;
        loop {
            match flock(file, how) {
                Ok(()) => return Ok(Self(file)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if until.is_some_and(|until| Instant::now() >= until) => {
                    return Err(is_held(file, path, begun));
                }
                Err(Errno::AGAIN) => {
                    thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Err(cause) => {
                    let doing = format!("lock store file {}", path.display());
                    return Err(Error::system(doing, cause));
                }
            }
        }
    }
}

/// The error of a lock that another process keeps.
fn is_held(file: &File, path: &Path, since: Instant) -> Error {
    let by = holder(file).map_or_else(
        || "another process".to_owned(),
        |pid| format!("process {pid}"),
    );
    Error::new(
        Code::Timeout,
        format!(
            "store file {} was locked by {by} for the {:.1} s that this rank waited: is that a rank which is stopped, or a \
             program that should not touch the file?",
            path.display(),
            since.elapsed().as_secs_f64()
        ),
    )
}

/// The process that holds a lock of this file, as far as the kernel tells: its lines are
/// `1: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF`, with the device and the number of the file.
fn holder(file: &File) -> Option<u32> {
    let number = file.metadata().ok()?.ino().to_string();
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let is_flock = words.next() == Some("FLOCK");
        let pid = words.nth(2)?.parse().ok()?;
        let is_it = words.next()?.rsplit(':').next() == Some(&number);
        (is_flock && is_it && pid != std::process::id()).then_some(pid)
    })
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
