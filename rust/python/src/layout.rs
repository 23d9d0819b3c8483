//! An argument that is an array, and the layout of its memory as its owner describes it.

use pyo3::prelude::*;
use unisono::types::DataType;

use crate::errors::{invalid, unsupported};

/// An argument that is an array: the operation and the name of the argument, for messages.
#[derive(Clone, Copy)]
pub(crate) struct Argument {
    pub(crate) operation: &'static str,
    pub(crate) name: &'static str,
}

impl Argument {
    pub(crate) fn invalid(self, py: Python<'_>, what: impl std::fmt::Display) -> PyErr {
        invalid(py, format!("{}: {} {what}", self.operation, self.name))
    }

    pub(crate) fn unsupported(self, py: Python<'_>, what: impl std::fmt::Display) -> PyErr {
        unsupported(py, format!("{}: {} {what}", self.operation, self.name))
    }
}

/// The layout of an array, as its owner describes it.
pub(crate) struct Layout {
    pub(crate) start: *mut u8,
    pub(crate) dtype: DataType,
    /// The name of a type without arithmetic, whose elements go as the bits of a `dtype`.
    pub(crate) moved: Option<String>,
    pub(crate) shape: Vec<usize>,
    /// In bytes; None when the elements lie in row-major order without gaps.
    pub(crate) strides: Option<Vec<isize>>,
    /// Why it cannot be written to, if it cannot.
    pub(crate) read_only: Option<&'static str>,
}
