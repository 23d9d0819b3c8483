//! One operation's completion: a result that is set once, and the callback that gets it.

use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::engine::traffic::TrafficClass;
use crate::error::Result;
use crate::locks::Mutex;
use crate::types::{Collective, DataType, DeviceStream, Rank};

/// Called once with an operation's result, on a thread of its own that may take locks and run callbacks.
pub type Completion = Box<dyn FnOnce(Result<()>) + Send>;

/// Options of a point-to-point operation.
#[derive(Default)]
pub struct PointToPoint {
    /// How long it may take; `None` for the communicator's timeout.
    pub timeout: Option<Duration>,
    /// Called when it ends, on a thread made for that.
    pub completion: Option<Completion>,
    /// The caller waits at once ([`crate::Work::wait`]) and drives the operation itself; no other thread does.
    pub blocking: bool,
    /// The stream of a buffer that is a device's memory; `None` for memory of the host.
    pub stream: Option<DeviceStream>,
    /// A receive into memory of the host takes a shorter message, too.
    pub takes_shorter: bool,
}

/// The description of a message that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The rank that sent it.
    pub source: Rank,
    /// Its length in bytes.
    pub bytes: usize,
    /// The type of its elements.
    pub dtype: DataType,
}

/// The state of one operation, shared by the engine and the threads that wait for it.
pub(crate) struct WorkState {
    pub(crate) collective: Collective,
    /// The operation's number in its group, from 1; counted apart for point-to-point.
    pub(crate) sequence: u64,
    /// When it was started.
    pub(crate) started: Instant,
    /// When it has taken too long; `None`: never.
    pub(crate) deadline: Option<Instant>,
    /// Where it counts.
    pub(crate) place: TrafficClass,
    result: OnceLock<(Result<()>, Duration)>,
    completion: Mutex<Option<Completion>>,
    received: OnceLock<Received>,
}

impl WorkState {
    pub(crate) fn new(
        collective: Collective,
        sequence: u64,
        (started, timeout): (Instant, Duration),
        completion: Option<Completion>,
    ) -> Self {
        let deadline = if timeout.is_zero() {
            None
        } else {
            started.checked_add(timeout)
        };
        Self {
            collective,
            sequence,
            started,
            deadline,
            place: TrafficClass::of(collective, 0),
            result: OnceLock::new(),
            completion: Mutex::new(completion),
            received: OnceLock::new(),
        }
    }

    /// The same, which counts at another place than those without bytes.
    pub(crate) fn counted_at(self, place: TrafficClass) -> Self {
        Self { place, ..self }
    }

    /// `all_reduce #17`, as errors name it.
    pub(crate) fn name(&self) -> String {
        format!("{} #{}", self.collective, self.sequence)
    }

    /// Sets the result at the time `now`; the first one stays. Returns the completion to be called, if this was the first.
    pub(crate) fn finish(
        &self,
        result: Result<()>,
        now: Instant,
    ) -> Option<(Completion, Result<()>)> {
        let result = result.map_err(|error| match error.operation {
            Some(_) => error,
            None => error.with_operation(self.name()),
        });
        let took = now.saturating_duration_since(self.started);
        if self.result.set((result.clone(), took)).is_err() {
            return None;
        }
        self.completion
            .lock()
            .take()
            .map(|completion| (completion, result))
    }

    pub(crate) fn result(&self) -> Option<&Result<()>> {
        self.result.get().map(|(result, _)| result)
    }

    pub(crate) fn duration(&self) -> Option<Duration> {
        self.result.get().map(|(_, duration)| *duration)
    }

    /// Notes which message a receive has got, or a probe has found.
    pub(crate) fn set_received(&self, received: Received) {
        let _ = self.received.set(received);
    }

    pub(crate) fn received(&self) -> Option<Received> {
        self.received.get().copied()
    }
}

impl fmt::Debug for WorkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("name", &self.name())
            .field("result", &self.result())
            .finish()
    }
}
