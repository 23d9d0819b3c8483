//! Sends and receives.

use pyo3::prelude::*;

use crate::arrays::Array;
use crate::communicator::{ANY_SOURCE, Communicator};
use crate::errors::{exception, invalid};
use crate::how::{How, Stream};
use crate::running::{Action, Call, Message, Seconds, run, run_both, start, wait};
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
    ///     Where the message goes, of exactly its type and number of elements.
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
    /// int
    ///     The rank that the message came from.
    ///
    /// Raises
    /// ------
    /// MismatchError
    ///     The message has another type or length.
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
    ) -> PyResult<usize> {
        let how = How::new("recv", false, timeout, stream);
        let call = self.receiving(py, &how, array, (source, tag))?;
        let work = run(py, self.core(), call)?;
        self.source(py, source, &work)
    }

    /// Start to receive into an array and return at once; see `recv`.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     Where the message goes, of exactly its type and number of elements.
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
    ///     Done when the message is there; its `source` then says where it came from.
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
    ///     Where the message that comes goes, of exactly its type and number of elements. Not a part of `array`.
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
    /// int
    ///     The rank that the message came from.
    ///
    /// Raises
    /// ------
    /// MismatchError
    ///     A message and its receive differ in type or length.
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
    ) -> PyResult<usize> {
        let how = How::new("sendrecv", false, timeout, stream);
        let sending = self.sending(py, &how, array, (dest, tag))?;
        let receiving = self.receiving(py, &how, out, (source, tag))?;
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
        self.source(py, source, &work)
    }
}

impl Communicator {
    /// The rank that a message came from which was received from `source`.
    fn source(&self, py: Python<'_>, source: i64, work: &unisono::Work) -> PyResult<usize> {
        if source == ANY_SOURCE && !work.is_done() {
            // On a device; the sender is not known before the message has come.
            wait(py, work, None)?;
        }
        if let Some(Err(error)) = work.result() {
            return Err(exception(py, &error));
        }
        Ok(match usize::try_from(source) {
            Ok(source) => source,
            Err(_) => work.source().unwrap_or_else(|| self.core().rank()),
        })
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
        let peer = match source {
            ANY_SOURCE => None,
            source => Some(self.check_rank(py, how.operation, "source", source)?),
        };
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
        let tag = u64::try_from(tag)
            .map_err(|_| invalid(py, format!("{}: tag {tag} is below 0", how.operation)))?;
        let message = Message {
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
