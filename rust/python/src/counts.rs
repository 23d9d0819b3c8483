//! Lists of counts, which are of rows: the core counts elements.

use pyo3::prelude::*;

use crate::errors::invalid;

/// Rows along the first axis, one count per rank.
pub(crate) struct Counts(pub(crate) Vec<usize>);

impl Counts {
    /// `own` for `rank`, and 0 for all others.
    pub(crate) fn only(rank: usize, own: usize, world: usize) -> Self {
        let mut counts = vec![0; world];
        counts[rank] = own;
        Self(counts)
    }

    pub(crate) fn check(
        &self,
        py: Python<'_>,
        operation: &str,
        name: &str,
        world: usize,
    ) -> PyResult<()> {
        let length = self.0.len();
        if length != world {
            return Err(invalid(
                py,
                format!("{operation}: {name} has {length} entries for a group of {world} ranks"),
            ));
        }
        Ok(())
    }

    /// The rows of all ranks. A sum that is too large to be one is too large for any array, which is noticed there.
    pub(crate) fn rows(&self) -> usize {
        self.0
            .iter()
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The elements per rank, for rows of the shape `row`.
    pub(crate) fn elements(&self, row: &[usize]) -> Vec<usize> {
        let length = row.iter().product::<usize>();
        self.0
            .iter()
            .map(|count| count.saturating_mul(length))
            .collect()
    }
}

impl<'py> FromPyObject<'_, 'py> for Counts {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        // By iteration, because a NumPy array of integers is no Sequence.
        let counts = object.try_iter()?.map(|count| {
            let count: i64 = count?.extract()?;
            usize::try_from(count)
                .map_err(|_| invalid(object.py(), format!("there is a count below 0: {count}")))
        });
        counts.collect::<PyResult<_>>().map(Self)
    }
}
