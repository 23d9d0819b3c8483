//! Waiting from Python: with the GIL released, and in slices, between which the main thread looks whether a signal has
//! come, so that Ctrl-C ends every wait.
//!
//! A blocking operation that is interrupted cannot be taken back: other ranks may have this rank's part already,
//! and still have theirs to deliver. So it aborts its communicator, after which nothing touches the arrays any
//! more. A wait for a [`Work`](crate::work::Work) only ends, and its operation goes on.
//!
//! An operation on a CUDA device is only put into its stream: the call returns, and the arrays are kept until the stream
//! has got past it.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use unisono::error::{Code, Error, Result};
use unisono::fence::guard;
use unisono::interrupts::SLICE;
use unisono::types::DeviceStream;
use unisono::{Communicator, PointToPoint, Request};

use crate::errors::{exception, invalid};

/// An operation to run, and the objects that it needs.
pub(crate) struct Call {
    pub(crate) action: Action,
    /// The owners of the memory.
    pub(crate) keep: Vec<Py<PyAny>>,
    /// The value that the operation returns in the end.
    pub(crate) value: Py<PyAny>,
}

impl Call {
    /// The peer of a message.
    pub(crate) fn peer(&self) -> Option<usize> {
        match &self.action {
            Action::Message(message) => message.peer,
            Action::Collective(_) => None,
        }
    }
}

/// An operation with its memory.
pub(crate) enum Action {
    Collective(Request),
    Message(Message),
}

/// A send, or a receive.
pub(crate) struct Message {
    pub(crate) is_send: bool,
    pub(crate) dtype: unisono::types::DataType,
    pub(crate) memory: unisono::buffer::Memory,
    /// None: from any rank.
    pub(crate) peer: Option<usize>,
    pub(crate) tag: u64,
    pub(crate) timeout: Option<Duration>,
    /// Of memory on a device.
    pub(crate) stream: Option<DeviceStream>,
}

impl Action {
    pub(crate) fn is_on_device(&self) -> bool {
        match self {
            Self::Collective(request) => request.stream.is_some(),
            Self::Message(message) => message.stream.is_some(),
        }
    }
}

/// Carries out a send and a receive at the same time, neither of them on a device. Returns how the receive went.
pub(crate) fn run_both(
    py: Python<'_>,
    comm: &Communicator,
    (sending, receiving): (Call, Call),
) -> PyResult<unisono::Work> {
    let keep = [sending.keep, receiving.keep];
    let begun = py.detach(|| {
        comm.guard(|comm| {
            let begin = |action| match action {
                // SAFETY: `keep` lives until both have ended, or for ever. The caller sees to it that no other code uses the
                // arrays.
                Action::Message(message) => unsafe { send_or_receive(comm, message, None) },
                Action::Collective(_) => Err(Error::internal("a message that is a collective")),
            };
            // A message to oneself that finds its receive is not copied twice.
            let received = begin(receiving.action)?;
            let sent = begin(sending.action);
            if let Ok(sent) = &sent {
                let _ = sent.wait(Some(SLICE));
                let _ = received.wait(Some(SLICE));
            }
            Ok((received, sent))
        })
    });
    let (received, sent) = begun.map_err(|error| exception(py, &error))?;
    let sent = match sent {
        Ok(sent) => sent,
        Err(error) => {
            // The receive goes on, and its array is kept for it.
            std::mem::forget(keep);
            return Err(exception(py, &error));
        }
    };
    // The receive needs its array also where the send has failed: the group has failed then, and ends both.
    let outcomes = [await_end(py, comm, &sent), await_end(py, comm, &received)];
    drop(keep);
    for outcome in outcomes {
        outcome?;
    }
    Ok(received)
}

/// Carries out `call` and returns how it went. On a device it has only been put into its stream then.
pub(crate) fn run(py: Python<'_>, comm: &Communicator, call: Call) -> PyResult<unisono::Work> {
    if call.action.is_on_device() {
        return start(py, comm, call).map(|(work, _)| work);
    }
    let Call {
        action,
        keep,
        value: _,
    } = call;
    let work = py.detach(|| {
        comm.guard(|comm| {
            let work = match action {
                // SAFETY: `keep` lives until the operation has ended, which is when this function returns. The
                // caller sees to it that no other code uses the arrays.
                Action::Collective(request) => unsafe { comm.begin(request)? },
                // SAFETY: as above.
                Action::Message(message) => unsafe { send_or_receive(comm, message, None)? },
            };
            // Most operations end within the first slice, for which the GIL is given up once.
            let _ = work.wait(Some(SLICE));
            Ok(work)
        })
    });
    let work = work.map_err(|error| exception(py, &error))?;
    await_end(py, comm, &work)?;
    drop(keep);
    Ok(work)
}

/// Waits until an operation has ended, and returns how it went. A signal whose handler raises aborts the communicator.
fn await_end(py: Python<'_>, comm: &Communicator, work: &unisono::Work) -> PyResult<()> {
    while !work.is_done() {
        if let Err(interrupt) = py.check_signals() {
            comm.abort(&format!("interrupted in {}: {interrupt}", work.name()));
            // Nothing waits for a dead group; this makes sure of what the arrays depend on.
            let _ = py.detach(|| work.wait(None));
            return Err(interrupt);
        }
        let _ = py.detach(|| comm.guard(|_| Ok(work.wait(Some(SLICE)))));
    }
    match work.result() {
        Some(Err(error)) => Err(exception(py, &error)),
        _ => Ok(()),
    }
}

/// Starts `call` and returns at once. Its arrays are kept until it has ended.
pub(crate) fn start(
    py: Python<'_>,
    comm: &Communicator,
    call: Call,
) -> PyResult<(unisono::Work, Py<PyAny>)> {
    let Call {
        action,
        keep,
        value,
    } = call;
    // The completion may run while the interpreter goes away and must not wait for the GIL: what it drops without
    // holding it, PyO3 puts on a list, and drops it when a thread next holds the GIL.
    let completion: unisono::Completion = Box::new(move |_| drop(keep));
    let work = py.detach(|| {
        comm.guard(|comm| {
            match action {
                // SAFETY: the completion keeps what owns the memory until the operation has ended. The caller
                // sees to it that no other code uses the arrays.
                Action::Collective(request) => unsafe { comm.start(request, Some(completion)) },
                // SAFETY: as above.
                Action::Message(message) => unsafe {
                    send_or_receive(comm, message, Some(completion))
                },
            }
        })
    });
    match work {
        Ok(work) => Ok((work, value)),
        Err(error) => Err(exception(py, &error)),
    }
}

/// # Safety
/// As for [`Communicator::start`].
unsafe fn send_or_receive(
    comm: &Communicator,
    message: Message,
    completion: Option<unisono::Completion>,
) -> Result<unisono::Work> {
    let Message {
        is_send,
        dtype,
        memory,
        peer,
        tag,
        timeout,
        stream,
    } = message;
    let options = PointToPoint {
        timeout,
        blocking: completion.is_none(),
        completion,
        stream,
        takes_shorter: true,
    };
    // SAFETY: the caller's promise is the one asked for.
    unsafe {
        match peer {
            Some(to) if is_send => comm.send(dtype, memory, to, tag, options),
            _ => comm.receive(dtype, memory, peer, tag, options),
        }
    }
}

/// Waits for `work`, at most `timeout`. Returns without an error when it has ended, well or not.
pub(crate) fn wait(
    py: Python<'_>,
    work: &unisono::Work,
    timeout: Option<Duration>,
) -> PyResult<()> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    while !work.is_done() {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            let error = Error::new(
                Code::Timeout,
                format!(
                    "not complete {} s after the wait began, and goes on: {}",
                    timeout.unwrap_or_default().as_secs_f64(),
                    py.detach(|| work.waits_for())
                ),
            );
            return Err(exception(py, &error.with_operation(work.name())));
        }
        py.check_signals()?;
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        let waited = py.detach(|| guard(|| Ok(work.wait(Some(slice)))));
        waited
            .map_err(|error| exception(py, &error))?
            .or_else(|error| {
                // The slice is over, or this is no process that can wait for it.
                if work.is_done() || error.code == Code::Timeout {
                    Ok(())
                } else {
                    Err(exception(py, &error))
                }
            })?;
    }
    Ok(())
}

/// Waits until what is under way on devices has ended, well or not. At a signal, aborts it.
pub(crate) fn finish(py: Python<'_>, comm: &Communicator) -> PyResult<()> {
    while py.detach(|| guard(|| comm.finish(Some(SLICE)))).is_err() && comm.error().is_none() {
        if comm.check_process().is_err() {
            break;
        }
        if let Err(interrupt) = py.check_signals() {
            comm.abort("interrupted in close");
            return Err(interrupt);
        }
    }
    Ok(())
}

/// Has a thread of its own carry out what blocks and knows no slices, while this one looks for signals; at one, calls
/// `interrupted`.
pub(crate) fn elsewhere<T: Send + 'static>(
    py: Python<'_>,
    body: impl FnOnce() -> Result<T> + Send + 'static,
    interrupted: impl FnOnce(),
) -> PyResult<T> {
    let (sender, mut receiver) = channel();
    let thread = std::thread::Builder::new().name("unisono-call".to_owned());
    let spawned = thread.spawn(move || {
        // If the receiver is gone, whatever was made is closed by being dropped.
        let _ = sender.send(guard(body));
    });
    if let Err(cause) = spawned {
        return Err(exception(py, &Error::system("start a thread", cause)));
    }
    loop {
        let answer;
        (answer, receiver) = py.detach(move || (receiver.recv_timeout(SLICE), receiver));
        match answer {
            Ok(result) => return result.map_err(|error| exception(py, &error)),
            Err(RecvTimeoutError::Timeout) => {
                if let Err(interrupt) = py.check_signals() {
                    interrupted();
                    return Err(interrupt);
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                let error = Error::internal("a thread ended without an answer");
                return Err(exception(py, &error));
            }
        }
    }
}

/// A time limit of an operation as an argument: seconds, or a `datetime.timedelta`.
#[derive(Clone, Copy)]
pub(crate) struct Seconds(pub(crate) Duration);

/// The same of a wait, which may be zero.
#[derive(Clone, Copy)]
pub(crate) struct Patience(pub(crate) Duration);

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let seconds = seconds(&object)?;
        match Duration::try_from_secs_f64(seconds) {
            Ok(limit) if !limit.is_zero() => Ok(Self(limit)),
            _ => Err(invalid(
                object.py(),
                format!("the timeout is {seconds} s, but must be more than 0 and finite"),
            )),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Patience {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let seconds = seconds(&object)?;
        Duration::try_from_secs_f64(seconds).map(Self).map_err(|_| {
            invalid(
                object.py(),
                format!("the timeout is {seconds} s, but must be 0 or more and finite"),
            )
        })
    }
}

fn seconds(object: &Bound<'_, PyAny>) -> PyResult<f64> {
    match object.extract::<f64>() {
        Ok(seconds) => Ok(seconds),
        Err(_) => object.call_method0("total_seconds")?.extract(),
    }
}
