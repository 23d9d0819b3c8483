//! Sends and receives.

use pyo3::prelude::*;

use crate::arrays::Array;
use crate::communicator::{ANY_SOURCE, Communicator};
use crate::errors::invalid;
use crate::running::{Action, Call, Message, Seconds, run};
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
    ///     The rank to send to; it may be this one, if the receive is under way already.
    /// tag : int, optional
    ///     A number of your choice, 0 or more, which the receive must have as well.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    ///
    /// Raises
    /// ------
    /// MismatchError
    ///     The receive has another type or length.
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, dest, tag=0, *, timeout=None))]
    fn send(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        dest: i64,
        tag: i64,
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        run(
            py,
            self.core(),
            self.sending(py, "send", array, (dest, tag), timeout)?,
        )?;
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
    ///
    /// Returns
    /// -------
    /// Work
    ///     Done when the array may be used again.
    #[pyo3(signature = (array, dest, tag=0, *, timeout=None))]
    fn isend(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        dest: i64,
        tag: i64,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<Work>> {
        self.launch(py, self.sending(py, "isend", array, (dest, tag), timeout)?)
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
    #[pyo3(signature = (array, source=ANY_SOURCE, tag=0, *, timeout=None), text_signature = "($self, array, source=-1, tag=0, *, timeout=None)")]
    fn recv(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        source: i64,
        tag: i64,
        timeout: Option<Seconds>,
    ) -> PyResult<usize> {
        let call = self.receiving(py, "recv", array, (source, tag), timeout)?;
        let work = run(py, self.core(), call)?;
        Ok(work.source().unwrap_or_else(|| self.core().rank()))
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
    ///
    /// Returns
    /// -------
    /// Work
    ///     Done when the message is there; its `source` then says where it came from.
    #[pyo3(signature = (array, source=ANY_SOURCE, tag=0, *, timeout=None), text_signature = "($self, array, source=-1, tag=0, *, timeout=None)")]
    fn irecv(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        source: i64,
        tag: i64,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<Work>> {
        self.launch(
            py,
            self.receiving(py, "irecv", array, (source, tag), timeout)?,
        )
    }
}

impl Communicator {
    fn sending(
        &self,
        py: Python<'_>,
        operation: &'static str,
        array: &Bound<'_, PyAny>,
        (dest, tag): (i64, i64),
        timeout: Option<Seconds>,
    ) -> PyResult<Call> {
        let peer = Some(self.check_rank(py, operation, "dest", dest)?);
        let array = Array::input(operation, "array", array)?;
        self.message(py, operation, &array, (peer, tag), timeout)
    }

    fn receiving(
        &self,
        py: Python<'_>,
        operation: &'static str,
        array: &Bound<'_, PyAny>,
        (source, tag): (i64, i64),
        timeout: Option<Seconds>,
    ) -> PyResult<Call> {
        let peer = match source {
            ANY_SOURCE => None,
            source => Some(self.check_rank(py, operation, "source", source)?),
        };
        let array = Array::output(operation, "array", array)?;
        self.message(py, operation, &array, (peer, tag), timeout)
    }

    fn message(
        &self,
        py: Python<'_>,
        operation: &'static str,
        array: &Array<'_>,
        (peer, tag): (Option<usize>, i64),
        timeout: Option<Seconds>,
    ) -> PyResult<Call> {
        let tag = u64::try_from(tag)
            .map_err(|_| invalid(py, format!("{operation}: tag {tag} is below 0")))?;
        let message = Message {
            is_send: operation.ends_with("send"),
            dtype: array.dtype(),
            // SAFETY: `keep` below goes the same way as the memory; `run` and `start` see to its end.
            memory: unsafe { array.memory() },
            peer,
            tag,
            timeout: timeout.map(|seconds| seconds.0),
        };
        Ok(Call {
            action: Action::Message(message),
            keep: vec![array.keep()],
            value: py.None(),
        })
    }
}
