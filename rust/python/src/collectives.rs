//! Shared by the collectives: arrays in, a request for the core, and the value it returns. The methods are in
//! `reductions.rs`, `exchanges.rs` and `rooted.rs`.
//!
//! Everything that Python's callers can get wrong is refused there or by the core's own check, before anything is
//! sent.

use pyo3::prelude::*;
use unisono::Request;

use crate::arrays::Array;
use crate::communicator::Communicator;
use crate::errors::invalid;
use crate::how::How;
use crate::running::{Action, Call};

impl Communicator {
    /// Carries out `request` on `arrays`, which it keeps until the end, and returns `value` or a `Work`.
    pub(crate) fn finish(
        &self,
        py: Python<'_>,
        mut request: Request,
        arrays: Vec<Array<'_>>,
        value: &Bound<'_, PyAny>,
        how: &How,
    ) -> PyResult<Py<PyAny>> {
        if request.op.is_some() {
            arrays.iter().try_for_each(Array::check_reduced)?;
        }
        request.timeout = how.timeout;
        request.stream = how.stream(py)?;
        let keep = arrays.iter().map(Array::keep).collect();
        let value = value.clone().unbind();
        let call = Call {
            action: Action::Collective(request),
            keep,
            value,
        };
        self.carry_out(py, call, how.asynchronously)
    }

    /// The output for a result of `shape`: `out` if it was given, else a new array like `input`.
    pub(crate) fn target<'py>(
        &self,
        how: &How,
        out: Option<&Bound<'py, PyAny>>,
        input: &Array<'py>,
        shape: &[usize],
    ) -> PyResult<Array<'py>> {
        let Some(out) = out else {
            let made = input.new_like(how, shape)?;
            if self.core().is_masked() {
                // Nothing comes for the blocks of ranks that are gone.
                made.clear()?;
            }
            return Ok(made);
        };
        let out = Array::output(how, "out", out)?;
        out.check_output_for(input, shape.iter().product())?;
        Ok(out)
    }

    /// The shape of one of `world_size` blocks of `array`. If only the number of elements matters, it is flat.
    pub(crate) fn block_shape(&self, array: &Array<'_>, flat: bool) -> PyResult<Vec<usize>> {
        let world = self.core().world_size();
        if array.shape().first() == Some(&world) {
            return Ok(array.shape()[1..].to_vec());
        }
        if flat && array.count().is_multiple_of(world) {
            return Ok(vec![array.count() / world]);
        }
        let advice = if flat {
            format!(
                "{} elements, which cannot be divided among {world} ranks",
                array.count()
            )
        } else {
            format!(
                "shape {:?}, but its first extent must be the number of ranks, {world}",
                array.shape()
            )
        };
        Err(array
            .argument()
            .invalid(array.object().py(), format!("has {advice}")))
    }

    pub(crate) fn refuse_out(
        &self,
        py: Python<'_>,
        name: &str,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        match out {
            None => Ok(()),
            Some(_) => Err(invalid(
                py,
                format!(
                    "{name}: out is given on rank {}, but only the root gets a result",
                    self.core().rank()
                ),
            )),
        }
    }
}

/// Python's None, as what an operation without a result returns.
pub(crate) fn none(py: Python<'_>) -> Bound<'_, PyAny> {
    py.None().into_bound(py)
}
