//! Operations: collectives, sends and receives that are started or carried out, and what is asked of one that goes on.

use cxx::UniquePtr;
use unisono::error::{Error, Result};
use unisono::fence::guard;
use unisono::{Completion, PointToPoint, Work};

use crate::ffi;
use crate::group::Group;
use crate::interrupts::outcome_of_wait;
use crate::status::{ok, outcome, status};
use crate::values::{data_type, memory, request, stream, timeout};

/// A started operation; empty when starting failed, which the status beside it says.
pub(crate) struct Operation(Option<Work>);

/// # Safety
/// The memory of `call` keeps the promise of [`Memory::from_raw_parts`](unisono::buffer::Memory::from_raw_parts) until
/// `completion` has been called, and a device's until what is in its stream now has passed.
pub(crate) unsafe fn start(
    group: &Group,
    call: &ffi::Call<'_>,
    completion: UniquePtr<ffi::Completion>,
) -> ffi::Started {
    started(group.guard(|communicator| {
        // SAFETY: the caller's promise is the one asked for here.
        unsafe { communicator.start(request(call)?, Some(upcall(completion))) }
    }))
}

/// # Safety
/// The memory of `call` keeps the promise of [`Memory::from_raw_parts`](unisono::buffer::Memory::from_raw_parts) until this
/// returns.
pub(crate) unsafe fn run(group: &Group, call: &ffi::Call<'_>) -> ffi::Ran {
    let ran = group.guard_wait(|communicator| {
        // SAFETY: the operation has completed when `run` returns, and the caller vouches until then.
        unsafe { communicator.run(request(call)?) }
    });
    let sequence = *ran.as_ref().unwrap_or(&0);
    ffi::Ran {
        status: outcome_of_wait(ran.map(drop)),
        sequence,
    }
}

/// # Safety
/// As for [`start`].
pub(crate) unsafe fn send(
    group: &Group,
    message: &ffi::Message<'_>,
    completion: UniquePtr<ffi::Completion>,
) -> ffi::Started {
    started(group.guard(|communicator| {
        let to = usize::try_from(message.peer)
            .map_err(|_| Error::invalid(format!("send: rank {} is out of range", message.peer)))?;
        let options = PointToPoint {
            completion: Some(upcall(completion)),
            timeout: timeout(message.timeout_ms),
            blocking: false,
            stream: stream(message.place),
            takes_shorter: false,
        };
        // SAFETY: the caller's promise is the one asked for here, of the memory and of its use.
        unsafe {
            let memory = memory(message.pieces);
            communicator.send(data_type(message.dtype)?, memory, to, message.tag, options)
        }
    }))
}

/// # Safety
/// As for [`start`].
pub(crate) unsafe fn receive(
    group: &Group,
    message: &ffi::Message<'_>,
    completion: UniquePtr<ffi::Completion>,
) -> ffi::Started {
    started(group.guard(|communicator| {
        let from = usize::try_from(message.peer).ok();
        let options = PointToPoint {
            completion: Some(upcall(completion)),
            timeout: timeout(message.timeout_ms),
            blocking: false,
            stream: stream(message.place),
            takes_shorter: false,
        };
        // SAFETY: the caller's promise is the one asked for here, of the memory and of its use.
        unsafe {
            let memory = memory(message.pieces);
            communicator.receive(
                data_type(message.dtype)?,
                memory,
                from,
                message.tag,
                options,
            )
        }
    }))
}

impl Operation {
    pub(crate) fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(Work::is_done)
    }

    /// Waits for at most `timeout_ms`, for ever when it is negative.
    pub(crate) fn wait(&self, timeout_ms: i64) -> ffi::Status {
        outcome_of_wait(guard(|| match &self.0 {
            Some(work) => work.wait(timeout(timeout_ms)),
            None => Err(Error::internal("the operation was never started")),
        }))
    }

    /// The rank a message came from, or -1.
    pub(crate) fn source(&self) -> i64 {
        self.0
            .as_ref()
            .and_then(Work::source)
            .map_or(-1, |rank| rank as i64)
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.0.as_ref().map_or(0, Work::sequence)
    }

    /// How long it took, or a negative number while it goes on.
    pub(crate) fn milliseconds(&self) -> f64 {
        self.0
            .as_ref()
            .and_then(Work::duration)
            .map_or(-1.0, |took| took.as_secs_f64() * 1e3)
    }
}

/// A completion on its way to the thread that will call it.
struct Upcall(UniquePtr<ffi::Completion>);

// SAFETY: the C++ class behind it holds references to a `Work`, whose counts are atomic, and its `finish` takes the
// lock of that `Work`; it is called once, from one thread.
unsafe impl Send for Upcall {}

impl Upcall {
    fn finish(mut self, result: Result<()>) {
        if let Some(completion) = self.0.as_mut() {
            completion.finish(&outcome(result));
        }
    }
}

fn upcall(completion: UniquePtr<ffi::Completion>) -> Completion {
    let upcall = Upcall(completion);
    Box::new(move |result| upcall.finish(result))
}

fn started(result: Result<Work>) -> ffi::Started {
    match result {
        Ok(work) => ffi::Started {
            status: ok(),
            operation: Box::new(Operation(Some(work))),
        },
        Err(error) => ffi::Started {
            status: status(&error),
            operation: Box::new(Operation(None)),
        },
    }
}
