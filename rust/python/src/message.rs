//! Messages that have come, as Python sees them.

use pyo3::prelude::*;
use unisono::Received;

/// A message that `recv` has received or `probe` has found.
///
/// Attributes
/// ----------
/// source : int
///     The rank that it came from.
/// count : int
///     How many elements it has.
/// dtype : str
///     The type of these, by NumPy's name.
#[pyclass(frozen, get_all, eq, module = "unisono", name = "Message")]
#[derive(PartialEq)]
pub(crate) struct Message {
    source: usize,
    count: usize,
    dtype: &'static str,
}

impl From<Received> for Message {
    fn from(received: Received) -> Self {
        Self {
            source: received.source,
            count: received.bytes / received.dtype.size(),
            dtype: received.dtype.name(),
        }
    }
}

#[pymethods]
impl Message {
    fn __repr__(&self) -> String {
        let Self {
            source,
            count,
            dtype,
        } = self;
        format!("Message(source={source}, count={count}, dtype='{dtype}')")
    }
}
