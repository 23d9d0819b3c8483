//! Streams: ordered queues of operations, each worked off by a thread.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

use parking_lot::{Condvar, Mutex};

use crate::abi::{Handle, STREAM_LEGACY, STREAM_PER_THREAD};
use crate::capture::{self, Capture};
use crate::context::{self, Context};
use crate::faults::Pauses;
use crate::handles::{self, Handles};
use crate::operation::Operation;
use crate::point::Point;
use crate::settings::settings;
use crate::status::{Outcome, Status};

/// How a stream stands to the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It waits for all blocking streams, and they wait for it.
    Legacy,
    Blocking,
    NonBlocking,
}

/// An ordered queue.
pub(crate) struct Stream {
    pub(crate) handle: Handle,
    pub(crate) id: u64,
    pub(crate) context: Arc<Context>,
    pub(crate) kind: Kind,
    pub(crate) priority: i32,
    /// The capture the stream takes part in.
    pub(crate) capture: Mutex<Option<Arc<Capture>>>,
    queue: Arc<Queue>,
    end: Mutex<Arc<Point>>,
}

struct Item {
    /// Keeps a destroyed stream until it is done.
    stream: Arc<Stream>,
    before: Vec<Arc<Point>>,
    operation: Operation,
    point: Arc<Point>,
}

/// The work of a thread: one stream, or the streams that share a hardware queue.
struct Queue {
    number: u64,
    state: Mutex<State>,
    changed: Condvar,
    room: Condvar,
    started: OnceLock<()>,
}

#[derive(Default)]
struct State {
    items: VecDeque<Item>,
    /// Streams that may still put something in; without any the thread ends.
    streams: usize,
}

static STREAMS: Handles<Stream> = Handles::new();
/// By context and thread.
type OfThreads = HashMap<(Handle, ThreadId), Arc<Stream>>;

static PER_THREAD: Mutex<Option<OfThreads>> = Mutex::new(None);
static UNFINISHED: AtomicU64 = AtomicU64::new(0);

impl Stream {
    pub(crate) fn new(handle: Handle, context: Arc<Context>, kind: Kind, priority: i32) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(1);
        Self {
            handle,
            id: IDS.fetch_add(1, Ordering::Relaxed),
            context,
            kind,
            priority,
            capture: Mutex::new(None),
            queue: Queue::next(),
            end: Mutex::new(Point::passed()),
        }
    }

    /// The point that ends what is in the stream now.
    pub(crate) fn end(&self) -> Arc<Point> {
        self.end.lock().clone()
    }

    /// Puts an operation into the stream, or into the graph being captured from it.
    ///
    /// # Errors
    /// What has broken the context; what a capture forbids.
    pub(crate) fn enqueue(self: &Arc<Self>, operation: Operation) -> Outcome<Arc<Point>> {
        self.context.check()?;
        if let Some(capture) = capture::of(self) {
            capture.add(self, operation)?;
            return Ok(Point::passed());
        }
        capture::refuse_implicit(self)?;
        self.queue.await_room();
        let order = self.context.submission.lock();
        let mut before: Vec<Arc<Point>> = match self.kind {
            Kind::NonBlocking => Vec::new(),
            Kind::Blocking => vec![self.context.legacy().end()],
            Kind::Legacy => {
                let streams = self.context.streams();
                let blocking = streams
                    .iter()
                    .filter(|stream| stream.kind == Kind::Blocking);
                blocking.map(|stream| stream.end()).collect()
            }
        };
        before.retain(|point| !point.is_reached());
        let point = Point::new();
        *self.end.lock() = point.clone();
        self.queue.push(Item {
            stream: self.clone(),
            before,
            operation,
            point: point.clone(),
        });
        drop(order);
        Ok(point)
    }

    /// # Errors
    /// `STREAM_CAPTURE_UNSUPPORTED` during a capture, which it spoils; what has broken the context.
    pub(crate) fn synchronize(self: &Arc<Self>) -> Outcome {
        capture::refuse_capturing(self)?;
        self.context.check()?;
        self.last().wait();
        self.context.check()
    }

    /// # Errors
    /// `NOT_READY` while work is left, and as [`Stream::synchronize`].
    pub(crate) fn query(self: &Arc<Self>) -> Outcome {
        capture::refuse_capturing(self)?;
        self.context.check()?;
        if self.last().is_reached() {
            self.context.check()
        } else {
            Err(Status::NOT_READY)
        }
    }

    /// The end of what synchronizing with the stream waits for: for the legacy stream that is the blocking streams, too.
    fn last(self: &Arc<Self>) -> Arc<Point> {
        if self.kind == Kind::Legacy {
            self.enqueue(Operation::Nothing)
                .unwrap_or_else(|_| self.end())
        } else {
            self.end()
        }
    }
}

impl Queue {
    fn new(number: u64, streams: usize) -> Arc<Self> {
        Arc::new(Self {
            number,
            state: Mutex::new(State {
                items: VecDeque::new(),
                streams,
            }),
            changed: Condvar::new(),
            room: Condvar::new(),
            started: OnceLock::new(),
        })
    }

    /// The queue of the next new stream. Shared ones stay for good.
    fn next() -> Arc<Self> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        static SHARED: OnceLock<Vec<Arc<Queue>>> = OnceLock::new();
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        match settings().connections {
            None => Self::new(number, 1),
            Some(count) => {
                let make = || {
                    (0..count as u64)
                        .map(|number| Self::new(number, 1))
                        .collect()
                };
                let queue = SHARED.get_or_init(make)[number as usize % count].clone();
                queue.state.lock().streams += 1;
                queue
            }
        }
    }

    fn push(self: &Arc<Self>, item: Item) {
        UNFINISHED.fetch_add(1, Ordering::Relaxed);
        self.state.lock().items.push_back(item);
        self.changed.notify_one();
        self.started.get_or_init(|| {
            let queue = self.clone();
            std::thread::Builder::new()
                .name(format!("cuda-queue-{}", self.number))
                .spawn(move || queue.work())
                .expect("the emulator needs a thread for every stream");
        });
    }

    /// Waits until there is room for another item.
    fn await_room(&self) {
        let mut state = self.state.lock();
        while state.items.len() >= settings().depth {
            self.room.wait(&mut state);
        }
    }

    /// Works off items until no more can be put in.
    fn work(self: Arc<Self>) {
        let mut pauses = Pauses::new(self.number);
        while let Some(item) = self.take() {
            item.before.iter().for_each(|point| point.wait());
            let context = &item.stream.context;
            if !context.is_broken() {
                pauses.pause();
                if let Err(error) = item.operation.execute(context) {
                    context.fail(error);
                }
            }
            // First, so that a thread that has waited for it finds it done in a report.
            UNFINISHED.fetch_sub(1, Ordering::Relaxed);
            item.point.reach();
        }
    }

    fn take(&self) -> Option<Item> {
        let mut state = self.state.lock();
        loop {
            if let Some(item) = state.items.pop_front() {
                self.room.notify_all();
                return Some(item);
            }
            if state.streams == 0 {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.queue.state.lock().streams -= 1;
        self.queue.changed.notify_all();
    }
}

/// Makes a stream of a context.
pub(crate) fn create(context: &Arc<Context>, kind: Kind, priority: i32) -> Arc<Stream> {
    let stream = STREAMS.insert(|handle| Stream::new(handle, context.clone(), kind, priority));
    context.adopt(&stream);
    stream
}

/// The stream with this handle; the default streams are those of the current context.
///
/// # Errors
/// `INVALID_CONTEXT`, `INVALID_HANDLE`, what has broken the stream's context.
pub(crate) fn get(handle: Handle) -> Outcome<Arc<Stream>> {
    let current = context::current()?;
    let stream = match handle {
        0 | STREAM_LEGACY => current.legacy(),
        STREAM_PER_THREAD => per_thread(&current),
        _ => STREAMS.get(handle)?,
    };
    stream.context.check()?;
    Ok(stream)
}

fn per_thread(context: &Arc<Context>) -> Arc<Stream> {
    let key = (context.handle, std::thread::current().id());
    let mut streams = PER_THREAD.lock();
    let make = || {
        let handle = handles::next();
        let stream = Arc::new(Stream::new(handle, context.clone(), Kind::Blocking, 0));
        context.adopt(&stream);
        stream
    };
    streams
        .get_or_insert_default()
        .entry(key)
        .or_insert_with(make)
        .clone()
}

/// Destroys a stream; what is in it is still done.
pub(crate) fn destroy(handle: Handle) -> Outcome {
    if handle <= STREAM_PER_THREAD {
        return Err(Status::INVALID_HANDLE);
    }
    let stream = STREAMS.get(handle)?;
    capture::refuse_capturing(&stream)?;
    STREAMS.remove(handle)?;
    Ok(())
}

/// Forgets the streams of a destroyed context.
pub(crate) fn forget(context: &Arc<Context>) {
    STREAMS.retain(|stream| !Arc::ptr_eq(&stream.context, context));
    if let Some(streams) = PER_THREAD.lock().as_mut() {
        streams.retain(|_, stream| !Arc::ptr_eq(&stream.context, context));
    }
}

/// Streams that were created and not destroyed.
pub(crate) fn count() -> usize {
    STREAMS.count()
}

/// Operations that are in streams and not done.
pub(crate) fn unfinished() -> u64 {
    UNFINISHED.load(Ordering::Relaxed)
}
