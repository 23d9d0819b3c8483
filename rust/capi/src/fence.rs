//! The fence around every function: a failure becomes a status and the thread's last error, a panic becomes `Internal`.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

use unisono::error::{Code, Error, Result};

use crate::error::Status;

/// What went wrong last on a thread, as C reads it.
pub(crate) struct Last {
    pub(crate) status: Status,
    pub(crate) fatal: bool,
    pub(crate) peer: Option<usize>,
    pub(crate) message: CString,
    pub(crate) operation: Option<CString>,
}

thread_local! {
    pub(crate) static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// Runs `body`, whose failure concerns no communicator.
#[inline]
pub(crate) fn fence(body: impl FnOnce() -> Result<()>) -> Status {
    fence_with(body, |_| false)
}

/// Runs `body`. Of its failure, `is_fatal` says whether it is the end of a communicator.
#[inline]
pub(crate) fn fence_with(
    body: impl FnOnce() -> Result<()>,
    is_fatal: impl FnOnce(&Error) -> bool,
) -> Status {
    // Unwind safety: whoever panics leaves what it held either unlocked and whole (the core says so of itself, and
    // aborts the group) or is the end of the communicator.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Status::OK,
        Ok(Err(error)) => fail(error, is_fatal),
        Err(panic) => fail(defect(&*panic), is_fatal),
    }
}

#[cold]
fn fail(error: Error, is_fatal: impl FnOnce(&Error) -> bool) -> Status {
    // It may look at a communicator, or end it.
    let fatal = catch_unwind(AssertUnwindSafe(|| is_fatal(&error))).unwrap_or(true);
    let status = Status::of(error.code);
    let last = Last {
        status,
        fatal,
        peer: error.peer,
        message: text(error.to_string()),
        operation: error.operation.map(text),
    };
    // A thread that is about to end has no place for it any more.
    let _ = LAST.try_with(|slot| *slot.borrow_mut() = Some(last));
    status
}

/// The error that stands for a panic.
#[cold]
fn defect(panic: &(dyn Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message");
    Error::new(
        Code::Internal,
        format!("a defect in unisono: {text}; please report it"),
    )
}

/// `text` for C, which ends at the first 0.
pub(crate) fn text(text: impl Into<Vec<u8>>) -> CString {
    let mut bytes = text.into();
    bytes.retain(|byte| *byte != 0);
    CString::new(bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_status_and_a_sentence() {
        let status = fence(|| panic!("on purpose"));
        assert_eq!(status, Status::of(Code::Internal));
        LAST.with_borrow(|last| {
            let last = last.as_ref().expect("an error");
            assert!(last.message.to_str().expect("text").contains("on purpose"));
        });
    }
}
