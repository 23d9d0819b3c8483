//! The fence around every function: a failure becomes a status and the thread's last error, a panic becomes `Internal`.

use std::cell::RefCell;
use std::ffi::CString;

use unisono::error::{Error, Result};
use unisono::fence::guard;

use crate::error::Status;

/// The last failure on a thread, as C reads it.
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
    status(guard(body), is_fatal)
}

/// The status of a call that was guarded already. Of its failure, `is_fatal` says whether it is the end of a communicator.
#[inline]
pub(crate) fn status(result: Result<()>, is_fatal: impl FnOnce(&Error) -> bool) -> Status {
    match result {
        Ok(()) => Status::OK,
        Err(error) => fail(error, is_fatal),
    }
}

#[cold]
fn fail(error: Error, is_fatal: impl FnOnce(&Error) -> bool) -> Status {
    // It may look at a communicator.
    let fatal = guard(|| Ok(is_fatal(&error))).unwrap_or(true);
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

/// `text` for C, which ends at the first 0.
pub(crate) fn text(text: impl Into<Vec<u8>>) -> CString {
    let mut bytes = text.into();
    bytes.retain(|byte| *byte != 0);
    CString::new(bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use unisono::error::Code;

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
