//! Groups of calls: between start and end an operation that would block is started instead.
//!
//! A link carries messages of many operations at once, so nothing is gained by holding calls back until the end of the
//! group, and no order of them can block. Only receives in a stream are held back: a stream does one thing after the other.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};

use unisono::Work as Started;
use unisono::error::{Error, Result};

use crate::error::{Status, output};
use crate::fence::fence_with;
use crate::run::Receive;
use crate::work::{self, Work};

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static STARTED: RefCell<Vec<Part>> = const { RefCell::new(Vec::new()) };
    static LAST: RefCell<Vec<Receive>> = const { RefCell::new(Vec::new()) };
}

/// An operation of a group.
struct Part {
    started: Started,
    /// It goes on in the order of a stream, and the end of the group does not wait for it.
    is_on_stream: bool,
}

/// Whether any thread has ever opened a group: a program that never does is spared the look at its thread's own depth.
static OPENED: AtomicBool = AtomicBool::new(false);

/// Whether this thread has a group open.
#[inline]
pub(crate) fn is_open() -> bool {
    OPENED.load(Ordering::Relaxed) && DEPTH.get() > 0
}

/// Makes `started` a part of the group.
pub(crate) fn add(started: Started, is_on_stream: bool) {
    let part = Part {
        started,
        is_on_stream,
    };
    STARTED.with_borrow_mut(|all| all.push(part));
}

/// Has `receive` start when the group ends.
pub(crate) fn add_last(receive: Receive) {
    LAST.with_borrow_mut(|all| all.push(receive));
}

#[unsafe(no_mangle)]
pub extern "C" fn unisono_group_start() -> Status {
    OPENED.store(true, Ordering::Relaxed);
    DEPTH.set(DEPTH.get() + 1);
    Status::OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_group_end(work: *mut *mut Work) -> Status {
    fence_with(|| end(work), |error| error.code.is_fatal())
}

fn end(place: *mut *mut Work) -> Result<()> {
    let Some(depth) = DEPTH.get().checked_sub(1) else {
        return Err(Error::invalid(
            "unisono_group_end without unisono_group_start on this thread",
        ));
    };
    DEPTH.set(depth);
    if depth > 0 {
        if !place.is_null() {
            return Err(Error::invalid(
                "a group inside another has no work of its own: give NULL, and ask for the work of the outermost",
            ));
        }
        return Ok(());
    }
    let mut first = Ok(());
    for receive in LAST.take() {
        match receive.start() {
            Ok(started) => add(started, true),
            Err(error) => first = first.and(Err(error)),
        }
    }
    let started = STARTED.take();
    if !place.is_null() {
        first?;
        let all = started.into_iter().map(|part| part.started).collect();
        output("work", place)?.write(work::handle_of_all(all)?);
        return Ok(());
    }
    for part in &started {
        first = first.and(match part.is_on_stream {
            true => part.started.result().unwrap_or(Ok(())),
            false => part.started.wait(None),
        });
    }
    first
}
