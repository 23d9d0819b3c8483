//! Events.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::abi::{EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, Handle};
use crate::capture::{self, Captured};
use crate::context::{self, Context};
use crate::handles::Handles;
use crate::operation::Operation;
use crate::point::Point;
use crate::status::{Outcome, Status};
use crate::stream::Stream;

/// A mark in a stream that others wait for.
pub(crate) struct Event {
    pub(crate) handle: Handle,
    pub(crate) context: Arc<Context>,
    timed: bool,
    last: Mutex<Last>,
}

/// The last recording of an event.
#[derive(Clone)]
enum Last {
    Nothing,
    Point(Arc<Point>),
    Captured(Captured),
}

static EVENTS: Handles<Event> = Handles::new();

/// Makes an event of the current context.
///
/// # Errors
/// `INVALID_VALUE` for unknown flags or an interprocess event with timing; `INVALID_CONTEXT`.
pub(crate) fn create(flags: u32) -> Outcome<Handle> {
    let known = EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING | EVENT_INTERPROCESS;
    let timed = flags & EVENT_DISABLE_TIMING == 0;
    if flags & !known != 0 || (timed && flags & EVENT_INTERPROCESS != 0) {
        return Err(Status::INVALID_VALUE);
    }
    let context = context::current()?;
    let event = EVENTS.insert(|handle| Event {
        handle,
        context,
        timed,
        last: Mutex::new(Last::Nothing),
    });
    Ok(event.handle)
}

/// Destroys an event; a stream that waits for it goes on waiting.
pub(crate) fn destroy(handle: Handle) -> Outcome {
    EVENTS.remove(handle).map(|_| ())
}

/// The event with this handle.
pub(crate) fn get(handle: Handle) -> Outcome<Arc<Event>> {
    EVENTS.get(handle)
}

impl Event {
    /// Marks the present end of the stream.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when the stream is another context's; as [`Stream::enqueue`].
    pub(crate) fn record(&self, stream: &Arc<Stream>) -> Outcome {
        if !Arc::ptr_eq(&self.context, &stream.context) {
            return Err(Status::INVALID_HANDLE);
        }
        let last = match capture::of(stream) {
            Some(capture) => Last::Captured(capture.mark(stream)?),
            None => Last::Point(stream.enqueue(Operation::Nothing)?),
        };
        *self.last.lock() = last;
        Ok(())
    }

    /// Makes the stream wait for what was recorded last; for nothing when nothing was.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_ISOLATION` and the other errors of mixing captured and other work; as [`Stream::enqueue`].
    pub(crate) fn awaited_by(&self, stream: &Arc<Stream>) -> Outcome {
        let last = self.last.lock().clone();
        match last {
            Last::Captured(mark) => capture::join(stream, &mark),
            Last::Nothing | Last::Point(_) if capture::of(stream).is_some() => {
                capture::spoil(stream, Status::STREAM_CAPTURE_ISOLATION)
            }
            Last::Nothing => Ok(()),
            Last::Point(point) => stream.enqueue(Operation::Await(point)).map(|_| ()),
        }
    }

    /// # Errors
    /// `NOT_READY`; `CAPTURED_EVENT`; what has broken the event's context.
    pub(crate) fn query(&self) -> Outcome {
        match self.point()? {
            Some(point) if !point.is_reached() => Err(Status::NOT_READY),
            _ => self.context.check(),
        }
    }

    /// # Errors
    /// `CAPTURED_EVENT`; what has broken the event's context.
    pub(crate) fn synchronize(&self) -> Outcome {
        if let Some(point) = self.point()? {
            point.wait();
        }
        self.context.check()
    }

    fn point(&self) -> Outcome<Option<Arc<Point>>> {
        self.context.check()?;
        match &*self.last.lock() {
            Last::Nothing => Ok(None),
            Last::Point(point) => Ok(Some(point.clone())),
            Last::Captured(mark) => {
                mark.spoil();
                Err(Status::CAPTURED_EVENT)
            }
        }
    }

    /// Milliseconds from this event to `end`.
    ///
    /// # Errors
    /// `INVALID_HANDLE` without timing or when one was not recorded, `NOT_READY`.
    pub(crate) fn elapsed(&self, end: &Self) -> Outcome<f32> {
        let recorded = |event: &Self| match event.point()? {
            Some(point) if event.timed => point.time().ok_or(Status::NOT_READY),
            _ => Err(Status::INVALID_HANDLE),
        };
        let (start, end) = (recorded(self)?, recorded(end)?);
        let seconds = match end.checked_duration_since(start) {
            Some(after) => after.as_secs_f32(),
            None => -start.duration_since(end).as_secs_f32(),
        };
        Ok(seconds * 1e3)
    }
}

/// Forgets the events of a destroyed context.
pub(crate) fn forget(context: &Arc<Context>) {
    EVENTS.retain(|event| !Arc::ptr_eq(&event.context, context));
}

/// Events that were created and not destroyed.
pub(crate) fn count() -> usize {
    EVENTS.count()
}
