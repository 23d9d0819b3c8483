//! Sends and receives.

use std::time::Instant;

use pyo3::prelude::*;
use unisono::Received;
use unisono::interrupts::SLICE;
use unisono::types::DataType;

use crate::arrays::Array;
use crate::communicator::{ANY_SOURCE, Communicator};
use crate::errors::{exception, invalid};
use crate::how::{How, Stream};
use crate::message::Message;
use crate::running::{self, Action, Call, Patience, Seconds, run, run_both, start, wait};
use crate::work::Work;

#[pymethods]
impl Communicator {
    /// Send an array to one rank.
    ///
    /// It is received by the first `recv` of that rank that asks for this rank and tag, in the order
    /// of sending. The call returns when the array may be used again, which does not mean that it
    /// has been received.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     What to send.
    /// dest : int
    ///     The rank to send to; it may be this one, for which the array is copied until it is received.
    /// tag : int, optional
    ///     A number of your choice, 0 or more, which the receive must have as well.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    /// stream : int or stream object, optional
    ///     For arrays on a CUDA device, the stream in whose order it happens, as a number or an object with
    ///     ``__cuda_stream__``, ``ptr`` (CuPy) or ``cuda_stream`` (torch). Without it, the array's own.
    ///
    /// Raises
    /// ------
    /// MismatchError
    ///     The receive has another type or length.
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, dest, tag=0, *, timeout=None, stream=None))]
    fn send(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        dest: i64,
        tag: i64,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<()> {
        let how = How::new("send", false, timeout, stream);
        run(py, self.core(), self.sending(py, &how, array, (dest, tag))?)?;
        Ok(())
    }

    /// Start to send an array to one rank and return at once; see `send`.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     What to send.
    /// dest : int
    ///     The rank to send to.
    /// tag : int, optional
    ///     A number of your choice, 0 or more, which the receive must have as well.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    /// stream : int or stream object, optional
    ///     For arrays on a CUDA device, the stream in whose order it happens, as a number or an object with
    ///     ``__cuda_stream__``, ``ptr`` (CuPy) or ``cuda_stream`` (torch). Without it, the array's own.
    ///
    /// Returns
    /// -------
    /// Work
    ///     Done when the array may be used again.
    #[pyo3(signature = (array, dest, tag=0, *, timeout=None, stream=None))]
    fn isend(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        dest: i64,
        tag: i64,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<Work>> {
        let how = How::new("isend", true, timeout, stream);
        self.launch(py, self.sending(py, &how, array, (dest, tag))?)
    }

    /// Receive into an array.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     Where the message goes, of its type and at least its number of elements; what is beyond stays as it is.
    ///     On a CUDA device, of exactly its number.
    /// source : int, optional
    ///     The rank to receive from; by default ``ANY_SOURCE``, whichever sends first.
    /// tag : int, optional
    ///     The tag of the message.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    /// stream : int or stream object, optional
    ///     For arrays on a CUDA device, the stream in whose order it happens, as a number or an object with
    ///     ``__cuda_stream__``, ``ptr`` (CuPy) or ``cuda_stream`` (torch). Without it, the array's own.
    ///
    /// Returns
    /// -------
    /// Message
    ///     The rank that it came from, and how long it was.
    ///
    /// Raises
    /// ------
    /// MismatchError
    ///     The message has another type, or is longer.
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, source=ANY_SOURCE, tag=0, *, timeout=None, stream=None), text_signature = "($self, array, source=-1, tag=0, *, timeout=None, stream=None)")]
    fn recv(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        source: i64,
        tag: i64,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Message> {
        let how = How::new("recv", false, timeout, stream);
        let call = self.receiving(py, &how, array, (source, tag))?;
        let expected = Expected::of(&call);
        let work = run(py, self.core(), call)?;
        self.message_of(py, expected, &work)
    }

    /// Wait for a message and leave it to the next `recv` that asks for it.
    ///
    /// It may come before or after this call. Of two messages of one sender and tag the one that was sent
    /// first is found. For messages of arrays on CUDA devices there is no probe.
    ///
    /// Parameters
    /// ----------
    /// source : int, optional
    ///     The rank that sends; by default ``ANY_SOURCE``, whichever sends first.
    /// tag : int, optional
    ///     The tag of the message.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds to wait; 0: not at all. Without it, until a message has come.
    ///
    /// Returns
    /// -------
    /// Message or None
    ///     The rank that sent it, its number of elements and their type; None if there is none by then.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As every operation; no timeout.
    ///
    /// Examples
    /// --------
    /// >>> message = comm.probe(tag=3)
    /// >>> array = np.empty(message.count, message.dtype)
    /// >>> comm.recv(array, message.source, tag=3)
    #[pyo3(signature = (source=ANY_SOURCE, tag=0, *, timeout=None), text_signature = "($self, source=-1, tag=0, *, timeout=None)")]
    fn probe(
        &self,
        py: Python<'_>,
        source: i64,
        tag: i64,
        timeout: Option<Patience>,
    ) -> PyResult<Option<Message>> {
        let from = self.source(py, "probe", source)?;
        let tag = number_of_tag(py, "probe", tag)?;
        let until = timeout.and_then(|Patience(limit)| Instant::now().checked_add(limit));
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let patience = left.map_or(SLICE, |left| left.min(SLICE));
            let found = py.detach(|| {
                self.core()
                    .guard(|comm| comm.probe(from, tag, Some(patience)))
            });
            let found = found.map_err(|error| exception(py, &error))?;
            if found.is_some() || left.is_some_and(|left| left <= patience) {
                return Ok(found.map(Message::from));
            }
            py.check_signals()?;
        }
    }

    /// Start to receive into an array and return at once; see `recv`.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     Where the message goes, as in `recv`.
    /// source : int, optional
    ///     The rank to receive from; by default ``ANY_SOURCE``, whichever sends first.
    /// tag : int, optional
    ///     The tag of the message.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    /// stream : int or stream object, optional
    ///     For arrays on a CUDA device, the stream in whose order it happens, as a number or an object with
    ///     ``__cuda_stream__``, ``ptr`` (CuPy) or ``cuda_stream`` (torch). Without it, the array's own.
    ///
    /// Returns
    /// -------
    /// Work
    ///     Done when the message is there; its `result` is then a `Message`.
    #[pyo3(signature = (array, source=ANY_SOURCE, tag=0, *, timeout=None, stream=None), text_signature = "($self, array, source=-1, tag=0, *, timeout=None, stream=None)")]
    fn irecv(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        source: i64,
        tag: i64,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<Work>> {
        let how = How::new("irecv", true, timeout, stream);
        self.launch(py, self.receiving(py, &how, array, (source, tag))?)
    }

    /// Send an array to one rank and receive another one from a rank, at the same time.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     What to send.
    /// dest : int
    ///     The rank to send to.
    /// out : array
    ///     Where the message that comes goes, as in `recv`. Not a part of `array`.
    /// source : int, optional
    ///     The rank to receive from; by default ``ANY_SOURCE``, whichever sends first.
    /// tag : int, optional
    ///     The tag of both messages.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds each may take. Without it, the communicator's timeout.
    /// stream : int or stream object, optional
    ///     For arrays on a CUDA device, the stream in whose order it happens, as a number or an object with
    ///     ``__cuda_stream__``, ``ptr`` (CuPy) or ``cuda_stream`` (torch). Without it, the array's own.
    ///
    /// Returns
    /// -------
    /// Message
    ///     The rank that the message came from, and how long it was.
    ///
    /// Raises
    /// ------
    /// MismatchError
    ///     A message and its receive differ in type, or the message is longer.
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, dest, out, source=ANY_SOURCE, tag=0, *, timeout=None, stream=None), text_signature = "($self, array, dest, out, source=-1, tag=0, *, timeout=None, stream=None)")]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn sendrecv(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        dest: i64,
        out: &Bound<'_, PyAny>,
        source: i64,
        tag: i64,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Message> {
        let how = How::new("sendrecv", false, timeout, stream);
        let sending = self.sending(py, &how, array, (dest, tag))?;
        let receiving = self.receiving(py, &how, out, (source, tag))?;
        let expected = Expected::of(&receiving);
        // Neither begins where the other one cannot.
        for peer in [&sending, &receiving].into_iter().filter_map(Call::peer) {
            let living = self.core().check_living(peer);
            living.map_err(|error| exception(py, &error))?;
        }
        let (sends_there, receives_there) = (
            sending.action.is_on_device(),
            receiving.action.is_on_device(),
        );
        let work = match (sends_there, receives_there) {
            (false, false) => run_both(py, self.core(), (sending, receiving))?,
            (false, true) => {
                let (received, _) = start(py, self.core(), receiving)?;
                run(py, self.core(), sending)?;
                wait(py, &received, None)?;
                received
            }
            // A stream waits for what it receives.
            (true, _) => {
                start(py, self.core(), sending)?;
                run(py, self.core(), receiving)?
            }
        };
        self.message_of(py, expected, &work)
    }
}

/// A receive before its message has come.
struct Expected {
    from: Option<usize>,
    dtype: DataType,
    bytes: usize,
}

impl Expected {
    fn of(call: &Call) -> Self {
        match &call.action {
            Action::Message(message) => Self {
                from: message.peer,
                dtype: message.dtype,
                bytes: message.memory.len(),
            },
            Action::Collective(_) => unreachable!("a receive is a message"),
        }
    }
}

/// A tag that Python gives.
fn number_of_tag(py: Python<'_>, operation: &str, tag: i64) -> PyResult<u64> {
    u64::try_from(tag).map_err(|_| invalid(py, format!("{operation}: tag {tag} is below 0")))
}

impl Communicator {
    /// The message that a receive has got, or on a device will get.
    fn message_of(
        &self,
        py: Python<'_>,
        expected: Expected,
        work: &unisono::Work,
    ) -> PyResult<Message> {
        if expected.from.is_none() && !work.is_done() {
            // On a device; the sender is not known before the message has come.
            wait(py, work, None)?;
        }
        if let Some(Err(error)) = work.result() {
            return Err(exception(py, &error));
        }
        let Expected { from, dtype, bytes } = expected;
        let received = work.received().unwrap_or(Received {
            source: from.unwrap_or_else(|| self.core().rank()),
            bytes,
            dtype,
        });
        Ok(Message::from(received))
    }

    /// The rank to receive from; `None`: any.
    fn source(&self, py: Python<'_>, operation: &str, source: i64) -> PyResult<Option<usize>> {
        match source {
            ANY_SOURCE => Ok(None),
            source => self.check_rank(py, operation, "source", source).map(Some),
        }
    }

    fn sending(
        &self,
        py: Python<'_>,
        how: &How,
        array: &Bound<'_, PyAny>,
        (dest, tag): (i64, i64),
    ) -> PyResult<Call> {
        let peer = Some(self.check_rank(py, how.operation, "dest", dest)?);
        let array = Array::input(how, "array", array)?;
        self.message(py, how, &array, (true, peer, tag))
    }

    fn receiving(
        &self,
        py: Python<'_>,
        how: &How,
        array: &Bound<'_, PyAny>,
        (source, tag): (i64, i64),
    ) -> PyResult<Call> {
        let peer = self.source(py, how.operation, source)?;
        let array = Array::output(how, "array", array)?;
        self.message(py, how, &array, (false, peer, tag))
    }

    fn message(
        &self,
        py: Python<'_>,
        how: &How,
        array: &Array<'_>,
        (is_send, peer, tag): (bool, Option<usize>, i64),
    ) -> PyResult<Call> {
        let tag = number_of_tag(py, how.operation, tag)?;
        let message = running::Message {
            is_send,
            dtype: array.dtype(),
            // SAFETY: `keep` below goes the same way as the memory; `run` and `start` see to its end.
            memory: unsafe { array.memory() },
            peer,
            tag,
            timeout: how.timeout,
            stream: how.stream(py)?,
        };
        Ok(Call {
            action: Action::Message(message),
            keep: vec![array.keep()],
            value: py.None(),
        })
    }
}
