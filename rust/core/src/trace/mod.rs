//! The trace of a process: its operations in time, in a file that Perfetto opens.
//!
//! Each group of a process has a [`Track`]. An operation that has ended is put into the track's buffer, which costs a lock that
//! hardly any other thread wants. One thread of the process writes what has gathered twice a second, or sooner when there is
//! much; closing a track writes the rest. So a process that is killed loses the last half second. A buffer that is full
//! because the file cannot be written as fast loses events, and counts them.
//!
//! Times are those of the monotonic clock, which the processes of a host share; the file also says where the clock of the
//! day stood. The offset between two hosts is measured over the group's links (`communicator/clocks.rs`) and
//! [noted](Track::note_clock). `unisono trace` reads the files (`python/unisono/_trace/`), by the names that events and
//! annotations have here.

mod proto;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

use self::proto::{BEGIN, BOOTTIME, END, INSTANT, MONOTONIC, Message, REALTIME};
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::locks::{Condvar, Mutex};
use crate::threads;
use crate::types::{Algorithm, Collective, Rank};

/// How often events are written.
const WRITE_INTERVAL: Duration = Duration::from_millis(500);

/// The events of a group that have the thread write them at once, and the most that are kept.
const WRITTEN_AT: usize = 1 << 12;
const MOST_KEPT: usize = 1 << 16;

/// An operation that has ended.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) collective: Collective,
    /// Its number in the group; messages are counted apart.
    pub(crate) sequence: u64,
    pub(crate) bytes: usize,
    pub(crate) algorithm: Option<Algorithm>,
    /// The root of a collective that has one; the other rank of a message.
    pub(crate) peer: Option<Rank>,
    pub(crate) tag: Option<u64>,
    pub(crate) begin: Instant,
    pub(crate) end: Instant,
    /// For whom it has waited.
    pub(crate) waited: Vec<(Rank, Duration)>,
    /// Why it failed, if it did.
    pub(crate) failure: Option<String>,
}

/// A rank in a group, as its track says.
#[derive(Debug)]
pub(crate) struct Member {
    /// The same on all ranks of the group.
    pub(crate) group: String,
    pub(crate) rank: Rank,
    /// The number of each rank in the whole job.
    pub(crate) numbers: Vec<Rank>,
}

/// A group's part of the trace.
#[derive(Debug)]
pub(crate) struct Track {
    writer: Arc<Writer>,
    buffer: Arc<Buffer>,
}

/// The events of a group that have not been written.
#[derive(Debug)]
struct Buffer {
    uuid: u64,
    events: Mutex<Vec<Event>>,
    lost: AtomicU64,
}

/// The file of a process in one folder.
#[derive(Debug)]
struct Writer {
    output: Mutex<Output>,
    wake: Condvar,
}

#[derive(Debug)]
struct Output {
    file: File,
    path: PathBuf,
    number: u32,
    process: u64,
    epoch: Epoch,
    message: Message,
    /// The last description, as it is written: many operations are alike.
    described: (Option<Description>, Message),
    tracks: Vec<Lanes>,
    /// Memory for events, to be swapped for a full buffer.
    spare: Vec<Event>,
    next_uuid: u64,
    is_running: bool,
    has_failed: bool,
}

/// The rows of a track. Those that overlap need several: events of one row follow each other.
#[derive(Debug)]
struct Lanes {
    buffer: Arc<Buffer>,
    name: String,
    /// The uuid of each, and when its last event ended.
    lanes: Vec<(u64, Option<Instant>)>,
}

/// One time on two clocks.
#[derive(Clone, Copy, Debug)]
struct Epoch {
    instant: Instant,
    monotonic: u64,
}

impl Epoch {
    fn monotonic(&self, at: Instant) -> u64 {
        match at.checked_duration_since(self.instant) {
            Some(after) => self.monotonic + after.as_nanos() as u64,
            None => self
                .monotonic
                .saturating_sub((self.instant - at).as_nanos() as u64),
        }
    }
}

/// The writers of a process, by their folders.
type Writers = Mutex<Vec<(PathBuf, Weak<Writer>)>>;

static WRITERS: PerProcess<Writers> = PerProcess::new(Mutex::default);

/// The reading of the monotonic clock, in nanoseconds.
pub(crate) fn monotonic() -> u64 {
    reading(ClockId::CLOCK_MONOTONIC)
}

fn reading(clock: ClockId) -> u64 {
    let time = clock_gettime(clock).map_or(Duration::ZERO, Duration::from);
    time.as_nanos() as u64
}

impl Track {
    /// A track for a member of a group, in the file of this process in `folder`, which is made if there is none.
    ///
    /// # Errors
    /// `System` where that cannot be.
    pub(crate) fn open(folder: &Path, member: &Member) -> Result<Self> {
        let refused = |cause| {
            let folder = folder.display();
            Error::system(format!("write a trace into {folder}"), cause)
        };
        let mut writers = WRITERS.lock();
        writers.retain(|(_, writer)| writer.strong_count() > 0);
        let known = writers.iter().find(|(known, _)| known == folder);
        let known = known.and_then(|(_, writer)| writer.upgrade());
        let writer = match known {
            Some(writer) => writer,
            None => {
                let writer = Arc::new(Writer::create(folder, member).map_err(refused)?);
                writers.push((folder.to_owned(), Arc::downgrade(&writer)));
                writer
            }
        };
        let buffer = writer.add(member).map_err(refused)?;
        Ok(Self { writer, buffer })
    }

    /// Puts an event into the trace.
    pub(crate) fn record(&self, event: Event) {
        let mut events = self.buffer.events.lock();
        if events.len() == MOST_KEPT {
            self.buffer.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        events.push(event);
        let is_many = events.len() == WRITTEN_AT;
        drop(events);
        if is_many {
            self.writer.wake.notify_one();
        }
    }

    /// Notes that the monotonic clock of rank 0's host stands `offset` nanoseconds before this host's, give or take `error`.
    pub(crate) fn note_clock(&self, offset: i64, error: u64) {
        let mut output = self.writer.output.lock();
        let at = monotonic();
        output.instant(at, self.buffer.uuid, "clock", |event| {
            event.annotate_number("to_rank", 0);
            event.annotate_signed("offset_ns", offset);
            event.annotate_number("error_ns", error);
        });
        output.flush();
    }
}

impl Drop for Track {
    fn drop(&mut self) {
        let mut output = self.writer.output.lock();
        output.write_events();
        output
            .tracks
            .retain(|lanes| !Arc::ptr_eq(&lanes.buffer, &self.buffer));
        self.writer.wake.notify_one();
    }
}

impl Writer {
    fn create(folder: &Path, member: &Member) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy().into_owned();
        let (rank, pid) = (member.numbers[member.rank], std::process::id());
        let (file, path) = create_file(folder, &format!("rank-{rank:04}-{}-{pid}", clean(&host)))?;
        let mut random = [0; 12];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let (uuid, number) = random.split_at(8);
        let uuid = u64::from_le_bytes(uuid.try_into().expect("eight bytes"));
        let number = u32::from_le_bytes(number.try_into().expect("four bytes"));
        let mut output = Output {
            file,
            path,
            number: number.max(1),
            process: uuid,
            epoch: Epoch {
                instant: Instant::now(),
                monotonic: monotonic(),
            },
            message: Message::default(),
            described: (None, Message::default()),
            tracks: Vec::new(),
            spare: Vec::new(),
            next_uuid: uuid,
            is_running: false,
            has_failed: false,
        };
        output.begin(&host, rank);
        Ok(Self {
            output: Mutex::new(output),
            wake: Condvar::new(),
        })
    }

    /// Adds a track, and starts the thread that writes where there is none.
    fn add(self: &Arc<Self>, member: &Member) -> io::Result<Arc<Buffer>> {
        let mut output = self.output.lock();
        if !output.is_running {
            let writer = Arc::clone(self);
            threads::spawn("unisono-trace", move || writer.run())?;
            output.is_running = true;
        }
        let buffer = output.add(member);
        output.flush();
        Ok(buffer)
    }

    fn run(&self) {
        let mut output = self.output.lock();
        while !output.tracks.is_empty() {
            let _ = self.wake.wait_for(&mut output, WRITE_INTERVAL);
            output.write_events();
        }
        output.is_running = false;
    }
}

/// A new file with this name, or this name and a number.
fn create_file(folder: &Path, name: &str) -> io::Result<(File, PathBuf)> {
    let mut count = 1;
    loop {
        let suffix = match count {
            1 => String::new(),
            _ => format!("-{count}"),
        };
        let path = folder.join(format!("{name}{suffix}.pftrace"));
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => count += 1,
            opened => return Ok((opened?, path)),
        }
    }
}

/// A host's name as a part of a file's.
fn clean(host: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-.".contains(letter);
    host.chars().filter(|letter| is_plain(*letter)).collect()
}

impl Output {
    fn new_uuid(&mut self) -> u64 {
        self.next_uuid = self.next_uuid.wrapping_add(1);
        self.next_uuid
    }

    /// The process and its clocks.
    fn begin(&mut self, host: &str, rank: Rank) {
        let (process, pid, number) = (self.process, std::process::id(), self.number);
        let at = self.epoch.monotonic;
        let realtime = reading(ClockId::CLOCK_REALTIME);
        let readings = [
            (MONOTONIC, at),
            (BOOTTIME, reading(ClockId::CLOCK_BOOTTIME)),
            (REALTIME, realtime),
        ];
        self.message.packet(number, at, |packet| {
            packet.clocks(&readings);
        });
        let name = format!("rank {rank} ({host})");
        self.message.packet(number, at, |packet| {
            packet.process(process, pid, &name);
        });
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        self.instant(at, process, "process", |event| {
            event.annotate_text("host", host);
            event.annotate_text("boot", boot.trim());
            event.annotate_number("pid", u64::from(pid));
            event.annotate_number("rank", rank as u64);
            event.annotate_signed("realtime_ns", realtime as i64 - at as i64);
        });
    }

    fn add(&mut self, member: &Member) -> Arc<Buffer> {
        let Member {
            group,
            rank,
            numbers,
        } = member;
        let short = group.get(..8).unwrap_or(group);
        let name = format!("rank {rank} of {}, group {short}", numbers.len());
        let uuid = self.new_uuid();
        let buffer = Arc::new(Buffer {
            uuid,
            events: Mutex::default(),
            lost: AtomicU64::new(0),
        });
        let (number, process, at) = (self.number, self.process, monotonic());
        self.message.packet(number, at, |packet| {
            packet.track(uuid, process, &name);
        });
        self.instant(at, uuid, "group", |event| {
            event.annotate_text("group", group);
            event.annotate_number("rank", *rank as u64);
            event.annotate("numbers", |it| {
                for number in numbers {
                    it.nest(12, |value| {
                        value.number(3, *number as u64);
                    });
                }
            });
        });
        self.tracks.push(Lanes {
            buffer: Arc::clone(&buffer),
            name,
            lanes: vec![(uuid, None)],
        });
        buffer
    }

    fn instant(&mut self, at: u64, track: u64, name: &str, more: impl FnOnce(&mut Message)) {
        self.message.packet(self.number, at, |packet| {
            packet.event(INSTANT, track, |event| {
                event.name(name);
                more(event);
            });
        });
    }

    /// Writes the events of all tracks.
    fn write_events(&mut self) {
        for at in 0..self.tracks.len() {
            let buffer = Arc::clone(&self.tracks[at].buffer);
            let mut events = std::mem::take(&mut self.spare);
            std::mem::swap(&mut *buffer.events.lock(), &mut events);
            for event in &events {
                self.write_event(at, event);
            }
            events.clear();
            self.spare = events;
            let lost = buffer.lost.swap(0, Ordering::Relaxed);
            if lost > 0 {
                self.instant(monotonic(), buffer.uuid, "lost", |event| {
                    event.annotate_number("events", lost);
                });
            }
        }
        self.flush();
    }

    /// Writes an event, on the row whose last one ended last before it.
    fn write_event(&mut self, at: usize, event: &Event) {
        let lanes = self.tracks[at].lanes.iter().enumerate();
        let free = lanes.filter(|(_, (_, last))| last.is_none_or(|last| last <= event.begin));
        let lane = free
            .max_by_key(|(_, (_, last))| *last)
            .map(|(lane, _)| lane);
        let lane = lane.unwrap_or_else(|| self.add_lane(at, event.begin));
        let row = &mut self.tracks[at].lanes[lane];
        row.1 = Some(event.end);
        let (number, uuid) = (self.number, row.0);
        let (begin, end) = (
            self.epoch.monotonic(event.begin),
            self.epoch.monotonic(event.end),
        );
        let description = Some(Description::of(event));
        let (known, described) = &mut self.described;
        if *known != description {
            described.clear();
            describe(described, event);
            *known = description;
        }
        self.message.packet(number, begin, |packet| {
            packet.event(BEGIN, uuid, |it| {
                it.append(described);
                it.annotate_number("sequence", event.sequence);
                tell(it, event);
            });
        });
        self.message.packet(number, end, |packet| {
            packet.event(END, uuid, |_| ());
        });
    }

    /// Adds a row for events beside those of the others: Perfetto shows tracks of one name and one parent as one.
    fn add_lane(&mut self, at: usize, begin: Instant) -> usize {
        let (uuid, number, parent) = (self.new_uuid(), self.number, self.process);
        let begin = self.epoch.monotonic(begin);
        let track = &mut self.tracks[at];
        track.lanes.push((uuid, None));
        let name = format!("{}, beside {}", track.name, track.lanes.len());
        let lane = track.lanes.len() - 1;
        let main = track.lanes[0].0;
        self.message.packet(number, begin, |packet| {
            packet.track(uuid, parent, &name);
        });
        self.instant(begin, uuid, "beside", |event| {
            event.annotate_number("track", main);
        });
        lane
    }

    fn flush(&mut self) {
        if !self.has_failed
            && let Err(error) = self.file.write_all(self.message.bytes())
        {
            self.has_failed = true;
            let path = self.path.display();
            tracing::warn!(%path, %error, "the trace ends here: its file cannot be written");
        }
        self.message.clear();
    }
}

/// All of an event that operations which are alike have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Description {
    collective: Collective,
    bytes: usize,
    algorithm: Option<Algorithm>,
    peer: Option<Rank>,
    tag: Option<u64>,
}

impl Description {
    fn of(event: &Event) -> Self {
        Self {
            collective: event.collective,
            bytes: event.bytes,
            algorithm: event.algorithm,
            peer: event.peer,
            tag: event.tag,
        }
    }
}

/// Writes the name of an event, and its [`Description`].
fn describe(message: &mut Message, event: &Event) {
    message.name(event.collective.name());
    message.annotate_number("bytes", event.bytes as u64);
    if let Some(algorithm) = event.algorithm {
        message.annotate_text("algorithm", algorithm.name());
    }
    if let Some(peer) = event.peer {
        let is_message = matches!(event.collective, Collective::Send | Collective::Recv);
        message.annotate_number(if is_message { "peer" } else { "root" }, peer as u64);
    }
    if let Some(tag) = event.tag {
        message.annotate_number("tag", tag);
    }
}

/// Writes what an event has of its own.
fn tell(message: &mut Message, event: &Event) {
    if !event.waited.is_empty() {
        message.annotate("waited_ns", |it| {
            for (rank, waited) in &event.waited {
                it.nest(11, |entry| {
                    entry.text(10, &rank.to_string());
                    entry.number(3, waited.as_nanos() as u64);
                });
            }
        });
    }
    if let Some(failure) = &event.failure {
        message.annotate_text("failure", failure);
    }
}

#[cfg(test)]
mod tests;
