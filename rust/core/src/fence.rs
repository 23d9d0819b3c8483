//! A panic becomes an `Internal` error, in the engine and under every call of a door.
//!
//! A panic must not leave a function that C, C++ or Python has called, and says more to a user as an error. Unwind safety:
//! a panic leaves what it held either unlocked and whole, which the engine sees to by failing the group, or is the end of
//! the communicator ([`crate::Communicator::guard`]).

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};

/// The message of the error for a panic in the engine.
const PANICKED: &str = "a step of the group panicked; the panic's message is on standard error";

/// Runs `body`. A panic in it becomes an `Internal` error with the panic's message.
///
/// # Errors
/// Those of `body`, and `Internal`.
#[inline]
pub fn guard<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(panic) => Err(defect(&*panic)),
    }
}

/// The error that stands for a panic.
#[cold]
fn defect(panic: &(dyn Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message");
    Error::internal(format!("a defect in unisono: {text}; please report it"))
}

/// Calls `work`; a panic in it becomes an error. After a panic the data that `work` was changing must not be used any more.
#[inline]
pub(crate) fn contained<T>(work: impl FnOnce() -> T) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| Error::internal(PANICKED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn a_panic_is_an_error_with_its_message() {
        for error in [
            guard::<()>(|| panic!("on purpose")),
            guard::<()>(|| panic!("{} purpose", "on")),
        ] {
            let error = error.expect_err("a panic");
            assert_eq!(error.code, Code::Internal);
            assert!(error.message.contains("on purpose"), "{error}");
        }
        assert_eq!(guard(|| Ok(1)), Ok(1));
    }
}
