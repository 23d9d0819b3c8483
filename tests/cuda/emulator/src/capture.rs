//! Stream capture: what streams would do becomes a graph.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use parking_lot::Mutex;

use crate::abi::{CAPTURE_ACTIVE, CAPTURE_INVALIDATED, CAPTURE_NONE, Handle};
use crate::graph::{self, Graph};
use crate::operation::Operation;
use crate::status::{Outcome, Status};
use crate::stream::{Kind, Stream};

/// Which calls a capture forbids, and how a thread takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    pub(crate) fn from_number(number: u32) -> Outcome<Self> {
        match number {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(Status::INVALID_VALUE),
        }
    }
}

/// A capture under way, in the stream where it began and in those that joined it by events.
pub(crate) struct Capture {
    pub(crate) id: u64,
    mode: Mode,
    thread: ThreadId,
    origin: Handle,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    graph: Graph,
    /// The nodes that the next one of each stream comes after.
    ends: HashMap<u64, Vec<usize>>,
    streams: Vec<Weak<Stream>>,
    spoiled: bool,
    over: bool,
}

/// The nodes of a capture that a recorded event stands for.
#[derive(Clone)]
pub(crate) struct Captured {
    capture: Arc<Capture>,
    nodes: Vec<usize>,
}

impl Captured {
    /// Spoils the capture, for a question that cannot be answered inside it.
    pub(crate) fn spoil(&self) {
        self.capture.spoil();
    }
}

static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

impl Capture {
    /// Adds an operation behind what the stream has captured.
    pub(crate) fn add(&self, stream: &Stream, operation: Operation) -> Outcome {
        let mut state = self.state.lock();
        if state.spoiled {
            return Err(Status::STREAM_CAPTURE_INVALIDATED);
        }
        let after = state.ends.remove(&stream.id).unwrap_or_default();
        let node = state.graph.add(operation, after);
        state.ends.insert(stream.id, vec![node]);
        Ok(())
    }

    /// The nodes that an event recorded now in the stream stands for.
    pub(crate) fn mark(self: &Arc<Self>, stream: &Stream) -> Outcome<Captured> {
        let state = self.state.lock();
        if state.spoiled {
            return Err(Status::STREAM_CAPTURE_INVALIDATED);
        }
        Ok(Captured {
            capture: self.clone(),
            nodes: state.ends.get(&stream.id).cloned().unwrap_or_default(),
        })
    }

    fn spoil(&self) {
        self.state.lock().spoiled = true;
    }

    fn status(&self) -> u32 {
        if self.state.lock().spoiled {
            CAPTURE_INVALIDATED
        } else {
            CAPTURE_ACTIVE
        }
    }

    fn admit(self: &Arc<Self>, stream: &Arc<Stream>, nodes: Vec<usize>) {
        let mut state = self.state.lock();
        state.ends.insert(stream.id, nodes);
        state.streams.push(Arc::downgrade(stream));
        *stream.capture.lock() = Some(self.clone());
    }
}

/// The capture the stream takes part in.
pub(crate) fn of(stream: &Stream) -> Option<Arc<Capture>> {
    stream.capture.lock().clone()
}

/// Begins a capture.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` for the legacy stream, `ILLEGAL_STATE` when the stream is capturing.
pub(crate) fn begin(stream: &Arc<Stream>, mode: Mode) -> Outcome {
    static IDS: AtomicU64 = AtomicU64::new(1);
    if stream.kind == Kind::Legacy {
        return Err(Status::STREAM_CAPTURE_UNSUPPORTED);
    }
    if of(stream).is_some() {
        return Err(Status::ILLEGAL_STATE);
    }
    let capture = Arc::new(Capture {
        id: IDS.fetch_add(1, Ordering::Relaxed),
        mode,
        thread: std::thread::current().id(),
        origin: stream.handle,
        state: Mutex::new(State::default()),
    });
    capture.admit(stream, Vec::new());
    ACTIVE.lock().push(capture);
    Ok(())
}

/// Ends the capture that began in this stream, with its graph.
///
/// # Errors
/// `ILLEGAL_STATE` without a capture, `STREAM_CAPTURE_WRONG_THREAD`, `STREAM_CAPTURE_UNMATCHED` in a stream that joined; after
/// these the capture goes on. `STREAM_CAPTURE_INVALIDATED` and `STREAM_CAPTURE_UNJOINED` end it without a graph.
pub(crate) fn end(stream: &Arc<Stream>) -> Outcome<Handle> {
    let capture = of(stream).ok_or(Status::ILLEGAL_STATE)?;
    if capture.origin != stream.handle {
        capture.spoil();
        return Err(Status::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != Mode::Relaxed && capture.thread != std::thread::current().id() {
        return Err(Status::STREAM_CAPTURE_WRONG_THREAD);
    }
    ACTIVE
        .lock()
        .retain(|active| !Arc::ptr_eq(active, &capture));
    let mut state = capture.state.lock();
    state.over = true;
    for member in state
        .streams
        .drain(..)
        .filter_map(|member| member.upgrade())
    {
        *member.capture.lock() = None;
    }
    if state.spoiled {
        return Err(Status::STREAM_CAPTURE_INVALIDATED);
    }
    let joined = state.ends.get(&stream.id).cloned().unwrap_or_default();
    if !state.graph.all_lead_to(&joined) {
        return Err(Status::STREAM_CAPTURE_UNJOINED);
    }
    Ok(graph::keep(std::mem::take(&mut state.graph)))
}

/// Makes the stream wait for an event of a capture, by which it joins that.
///
/// # Errors
/// `CAPTURED_EVENT` when that capture is over, `STREAM_CAPTURE_MERGE` when the stream is in another, which spoils both.
pub(crate) fn join(stream: &Arc<Stream>, mark: &Captured) -> Outcome {
    let capture = &mark.capture;
    {
        let state = capture.state.lock();
        if state.over {
            return Err(Status::CAPTURED_EVENT);
        }
        if state.spoiled {
            return Err(Status::STREAM_CAPTURE_INVALIDATED);
        }
    }
    match of(stream) {
        Some(own) if Arc::ptr_eq(&own, capture) => {
            let mut state = capture.state.lock();
            let ends = state.ends.entry(stream.id).or_default();
            ends.extend(&mark.nodes);
            ends.sort_unstable();
            ends.dedup();
        }
        Some(own) => {
            own.spoil();
            capture.spoil();
            return Err(Status::STREAM_CAPTURE_MERGE);
        }
        None if stream.kind == Kind::Legacy => {
            capture.spoil();
            return Err(Status::STREAM_CAPTURE_IMPLICIT);
        }
        None => capture.admit(stream, mark.nodes.clone()),
    }
    Ok(())
}

/// Spoils the capture the stream is in, and gives the reason.
pub(crate) fn spoil(stream: &Stream, reason: Status) -> Outcome {
    if let Some(capture) = of(stream) {
        capture.spoil();
    }
    Err(reason)
}

/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` when the stream is capturing, which that spoils.
pub(crate) fn refuse_captured(stream: &Stream) -> Outcome {
    match of(stream) {
        Some(_) => spoil(stream, Status::STREAM_CAPTURE_UNSUPPORTED),
        None => Ok(()),
    }
}

/// # Errors
/// As [`refuse_captured`] and [`refuse_implicit`].
pub(crate) fn refuse_capturing(stream: &Stream) -> Outcome {
    refuse_captured(stream)?;
    refuse_implicit(stream)
}

/// # Errors
/// `STREAM_CAPTURE_IMPLICIT` when the stream is the legacy one and a stream it waits for is capturing, which that
/// spoils.
pub(crate) fn refuse_implicit(stream: &Stream) -> Outcome {
    if stream.kind != Kind::Legacy {
        return Ok(());
    }
    let streams = stream.context.streams();
    let blocking = streams.iter().filter(|other| other.kind == Kind::Blocking);
    let captures: Vec<_> = blocking.filter_map(|other| of(other)).collect();
    captures.iter().for_each(|capture| capture.spoil());
    if captures.is_empty() {
        Ok(())
    } else {
        Err(Status::STREAM_CAPTURE_IMPLICIT)
    }
}

/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` when a capture of any stream of the context is under way, which that spoils.
pub(crate) fn refuse_any(context: &crate::context::Context) -> Outcome {
    let captures: Vec<_> = context
        .streams()
        .iter()
        .filter_map(|stream| of(stream))
        .collect();
    captures.iter().for_each(|capture| capture.spoil());
    if captures.is_empty() {
        Ok(())
    } else {
        Err(Status::STREAM_CAPTURE_UNSUPPORTED)
    }
}

/// Before a call that may not happen while something is captured, as far as the thread takes part.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED`, and the captures that forbid the call are spoilt.
pub(crate) fn refuse_unsafe() -> Outcome {
    let mode = MODE.get();
    if mode == Mode::Relaxed {
        return Ok(());
    }
    let thread = std::thread::current().id();
    let mut outcome = Ok(());
    for capture in ACTIVE.lock().iter() {
        let own = capture.thread == thread && capture.mode != Mode::Relaxed;
        let everybodys = mode == Mode::Global && capture.mode == Mode::Global;
        if own || everybodys {
            capture.spoil();
            outcome = Err(Status::STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    outcome
}

/// Sets how this thread takes captures.
///
/// # Returns
/// How it took them before.
pub(crate) fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

/// The capture status and id of a stream.
///
/// # Errors
/// `STREAM_CAPTURE_IMPLICIT` for the legacy stream while a stream it waits for is capturing; that spoils nothing.
pub(crate) fn status(stream: &Stream) -> Outcome<(u32, u64)> {
    if let Some(capture) = of(stream) {
        return Ok((capture.status(), capture.id));
    }
    let streams = stream.context.streams();
    let mut blocking = streams.iter().filter(|other| other.kind == Kind::Blocking);
    if stream.kind == Kind::Legacy && blocking.any(|other| of(other).is_some()) {
        return Err(Status::STREAM_CAPTURE_IMPLICIT);
    }
    Ok((CAPTURE_NONE, 0))
}
