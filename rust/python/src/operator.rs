//! Reduction operators, by object or by name.

use std::hash::{DefaultHasher, Hash, Hasher};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use unisono::types::ReduceOp as Op;

use crate::errors::invalid;

/// How the contributions of the ranks are combined, element by element.
///
/// Wherever an operator is asked for, its name as a string does as well, in any case: ``"sum"`` or
/// ``"SUM"`` for ``ReduceOp.SUM``. Only ``premul_sum`` needs the object, because it carries a factor.
///
/// Attributes
/// ----------
/// SUM, PROD
///     Sum and product; of integers they wrap.
/// AVG
///     The sum, divided by the number of ranks at its end, of all types but bool. That of integers
///     does not wrap and is rounded toward zero. A sum of floats beyond the largest number is
///     infinite, and so is its average.
/// MIN, MAX
///     Minimum and maximum; NaN wins.
/// BAND, BOR, BXOR
///     Bitwise, of integers and bool.
/// LAND, LOR, LXOR
///     Logical: 1 or 0 by which contributions are not zero.
#[pyclass(frozen, module = "unisono", name = "ReduceOp")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReduceOp(pub(crate) Op);

#[pymethods]
#[expect(
    non_snake_case,
    reason = "constants of a Python class are written in capitals"
)]
impl ReduceOp {
    #[classattr]
    fn SUM() -> Self {
        Self(Op::Sum)
    }

    #[classattr]
    fn AVG() -> Self {
        Self(Op::Avg)
    }

    #[classattr]
    fn PROD() -> Self {
        Self(Op::Prod)
    }

    #[classattr]
    fn MIN() -> Self {
        Self(Op::Min)
    }

    #[classattr]
    fn MAX() -> Self {
        Self(Op::Max)
    }

    #[classattr]
    fn BAND() -> Self {
        Self(Op::Band)
    }

    #[classattr]
    fn BOR() -> Self {
        Self(Op::Bor)
    }

    #[classattr]
    fn BXOR() -> Self {
        Self(Op::Bxor)
    }

    #[classattr]
    fn LAND() -> Self {
        Self(Op::Land)
    }

    #[classattr]
    fn LOR() -> Self {
        Self(Op::Lor)
    }

    #[classattr]
    fn LXOR() -> Self {
        Self(Op::Lxor)
    }

    /// The sum of each rank's contribution, of floats or complex numbers, times a factor, which may differ from
    /// rank to rank.
    ///
    /// Parameters
    /// ----------
    /// factor : float
    ///     What this rank's contribution is multiplied by before the sum.
    #[staticmethod]
    fn premul_sum(factor: f64) -> Self {
        Self(Op::PremulSum(factor))
    }

    /// The operator's name, such as ``"sum"``.
    #[getter]
    fn name(&self) -> &'static str {
        self.0.name()
    }

    /// The factor of ``premul_sum``; None for every other operator.
    #[getter]
    fn factor(&self) -> Option<f64> {
        match self.0 {
            Op::PremulSum(factor) => Some(factor),
            _ => None,
        }
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other
            .cast::<Self>()
            .is_ok_and(|other| other.get().0 == self.0)
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.number().hash(&mut hasher);
        self.factor().map(f64::to_bits).hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        match self.0 {
            Op::PremulSum(factor) => format!("ReduceOp.premul_sum({factor})"),
            other => format!("ReduceOp.{}", other.name().to_uppercase()),
        }
    }
}

/// An operator as an argument: a [`ReduceOp`] or a name.
#[derive(Clone, Copy)]
pub(crate) struct Operator(pub(crate) Op);

impl Operator {
    /// The operator of reductions that are not told otherwise.
    pub(crate) const DEFAULT: Self = Self(Op::Sum);
}

impl<'py> FromPyObject<'_, 'py> for Operator {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(op) = object.cast::<ReduceOp>() {
            return Ok(Self(op.get().0));
        }
        let Ok(name) = object.extract::<String>() else {
            return Err(PyTypeError::new_err(format!(
                "an operator is a name such as \"sum\" or a unisono.ReduceOp, not a {}",
                object.get_type().name()?
            )));
        };
        let by_name = || {
            Op::ALL
                .into_iter()
                .filter(|op| !matches!(op, Op::PremulSum(_)))
        };
        if let Some(op) = by_name().find(|op| op.name().eq_ignore_ascii_case(&name)) {
            return Ok(Self(op));
        }
        let names: Vec<_> = by_name().map(Op::name).collect();
        Err(invalid(
            object.py(),
            format!(
                "there is no operator {name:?}; there are {} and ReduceOp.premul_sum(factor)",
                names.join(", ")
            ),
        ))
    }
}
