//! Groups that form of handles, which the program passes around.

use std::sync::Arc;

use pyo3::prelude::*;
use unisono::rendezvous::launcher;

use crate::communicator::Communicator;
use crate::errors::exception;
use crate::joined::Shared;
use crate::running::{Seconds, elsewhere};
use crate::settings::Options;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Candidate>()
}

/// A process that may become a member of groups, again and again, with other processes each time.
///
/// It has a `handle`, a text that tells other processes how to reach it. The program passes handles
/// around as it likes: no store, launcher or rank 0 takes part. A process proves that a handle is its
/// own, so one that others read does not let them pose as it. As long as the candidate lives it
/// listens for members of its groups.
///
/// Parameters
/// ----------
/// options : Options, optional
///     Settings of all its groups.
///
/// Examples
/// --------
/// >>> me = unisono.Candidate()
/// >>> handles = exchange(me.handle)  # the program's own: the same list in all processes
/// >>> comm = me.form(handles, number=1)
#[pyclass(frozen, module = "unisono", name = "Candidate")]
pub(crate) struct Candidate {
    candidate: Arc<unisono::Candidate>,
}

#[pymethods]
impl Candidate {
    #[new]
    #[pyo3(signature = (options=None))]
    fn new(py: Python<'_>, options: Option<&Options>) -> PyResult<Self> {
        let options = options.cloned().unwrap_or_default();
        let candidate = py.detach(|| {
            // A launcher's secret is for its ranks, however many of them are in a group.
            unisono::Candidate::new(options.apply()?, launcher::secret(1))
        });
        let candidate = Arc::new(candidate.map_err(|error| exception(py, &error))?);
        Ok(Self { candidate })
    }

    /// The text by which others get to know this process. It tells no secret.
    #[getter]
    fn handle(&self) -> &str {
        self.candidate.handle()
    }

    /// Form a group of the processes with these handles. Blocks until all have come.
    ///
    /// Parameters
    /// ----------
    /// handles : sequence of str
    ///     Of all members, in the order of their ranks: the same list in all of them.
    /// number : int
    ///     The same in all of them, and not used before by any.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds to wait. Without it, as long as joining may take.
    ///
    /// Returns
    /// -------
    /// Communicator
    ///     The group. An earlier one lives on beside it until it is closed.
    ///
    /// Raises
    /// ------
    /// InvalidArgumentError
    ///     This process's handle is missing, one is none or is there twice, or the number was used.
    /// MismatchError
    ///     A process has another version of unisono, other settings or another secret.
    /// TimeoutError
    ///     Not all came; on rank 0 it names those that did not. The number is used up.
    /// PeerLostError
    ///     A process has ended.
    #[pyo3(signature = (handles, number, timeout=None))]
    fn form(
        &self,
        py: Python<'_>,
        handles: Vec<String>,
        number: i64,
        timeout: Option<Seconds>,
    ) -> PyResult<Communicator> {
        let candidate = Arc::clone(&self.candidate);
        let form = move || {
            let patience = timeout.map(|Seconds(limit)| limit);
            Ok(Shared::register(
                candidate.gather(&handles, number, patience)?,
            ))
        };
        elsewhere(py, form, || {}).map(|shared| Communicator { shared })
    }

    fn __repr__(&self) -> String {
        "<unisono.Candidate>".to_owned()
    }
}
