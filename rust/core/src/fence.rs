//! What a panic becomes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};

/// What is said of it.
const PANICKED: &str = "a step of the group panicked; the panic's message is on standard error";

/// Calls `work`, whose panic becomes an error. What it was working on is not to be used any more.
#[inline]
pub(crate) fn contained<T>(work: impl FnOnce() -> T) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| Error::internal(PANICKED))
}
