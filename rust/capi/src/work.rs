//! Operations under way: testing and waiting.

use std::cell::Cell;
use std::time::{Duration, Instant};

use unisono::error::{Code, Error, Result};
use unisono::{Received, Work as Started};

use crate::error::{Status, output};
use crate::fence::{fence, fence_with};
use crate::handles::{Held, Table};
use crate::types::{elements, list, seconds};

/// `unisono_work`.
#[repr(C)]
pub struct Work {
    _opaque: [u8; 0],
}

static WORKS: Table<Parts> = Table::new(2, "a work");

/// The value of a handle: one operation, or those of a group.
enum Parts {
    One(Started),
    Many(Vec<Started>),
}

/// A handle for one operation.
pub(crate) fn handle(started: Started) -> Result<*mut Work> {
    WORKS.insert(Parts::One(started))
}

/// A handle for all of them.
pub(crate) fn handle_of_all(started: Vec<Started>) -> Result<*mut Work> {
    WORKS.insert(Parts::Many(started))
}

impl Parts {
    fn all(&self) -> &[Started] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }

    fn is_done(&self) -> bool {
        self.all().iter().all(Started::is_done)
    }

    /// An operation that has not ended, if there is one.
    fn unfinished(&self) -> Option<&Started> {
        self.all().iter().find(|part| !part.is_done())
    }

    /// How it ended, once it has: the first failure of its parts.
    fn result(&self) -> Result<()> {
        let mut results = self.all().iter().filter_map(Started::result);
        results.find(Result::is_err).unwrap_or(Ok(()))
    }

    /// Waits for the end, until `until`.
    fn wait(&self, until: Option<Instant>) -> Result<()> {
        for part in self.all() {
            // Its own failure is found below; a wait that is over, or that cannot be, is not.
            let waited = part.wait(left(until));
            if !part.is_done() {
                return waited;
            }
        }
        self.result()
    }
}

fn left(until: Option<Instant>) -> Option<Duration> {
    until.map(|until| until.saturating_duration_since(Instant::now()))
}

fn deadline(value: f64) -> Result<Option<Instant>> {
    let limit = seconds("the time to wait", value)?;
    Ok(limit.and_then(|limit| Instant::now().checked_add(limit)))
}

/// The works that C gives, without the NULLs, each with its place in the list.
///
/// # Safety
/// There are `count` of them at `works`.
unsafe fn held(works: *const *mut Work, count: usize) -> Result<Vec<(usize, Held<Parts>)>> {
    // SAFETY: as the caller promises.
    let works = unsafe { list("works", works, count)? };
    let given = works.iter().enumerate().filter(|(_, work)| !work.is_null());
    given
        .map(|(index, work)| Ok((index, WORKS.find(*work)?)))
        .collect()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_test(work: *mut Work, done: *mut i32) -> Status {
    fence_with(
        || {
            let parts = WORKS.find(work)?;
            let place = output("done", done)?;
            let is_done = parts.is_done();
            place.write(i32::from(is_done));
            match is_done {
                true => parts.result(),
                // In a forked child it never will be.
                false => parts.all().iter().try_for_each(Started::check_process),
            }
        },
        |error| error.code.is_fatal(),
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_wait(work: *mut Work, seconds: f64) -> Status {
    let ended = Cell::new(false);
    let waited = || {
        let parts = WORKS.find(work)?;
        let result = parts.wait(deadline(seconds)?);
        ended.set(parts.is_done());
        result
    };
    fence_with(waited, |error| ended.get() && error.code.is_fatal())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_wait_any(
    works: *const *mut Work,
    count: usize,
    seconds: f64,
    index: *mut usize,
) -> Status {
    let ended = Cell::new(false);
    let waited = || {
        // SAFETY: the header asks for a list of this length.
        let held = unsafe { held(works, count)? };
        let place = output("index", index)?;
        if held.is_empty() {
            return Err(Error::invalid("there is no work among those to wait for"));
        }
        let until = deadline(seconds)?;
        loop {
            if let Some((at, parts)) = held.iter().find(|(_, parts)| parts.is_done()) {
                ended.set(true);
                place.write(*at);
                return parts.result();
            }
            let unfinished: Vec<&Started> = held
                .iter()
                .filter_map(|(_, parts)| parts.unfinished())
                .collect();
            if unfinished.len() == held.len()
                && Started::wait_any(&unfinished, left(until))?.is_none()
            {
                return Err(over(seconds, held.len(), unfinished.first()));
            }
        }
    };
    fence_with(waited, |error| ended.get() && error.code.is_fatal())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_wait_all(
    works: *const *mut Work,
    count: usize,
    seconds: f64,
) -> Status {
    let ended = Cell::new(false);
    let waited = || {
        // SAFETY: the header asks for a list of this length.
        let held = unsafe { held(works, count)? };
        let until = deadline(seconds)?;
        let mut first = Ok(());
        for (_, parts) in &held {
            let result = parts.wait(until);
            if !parts.is_done() {
                return result;
            }
            first = first.and(result);
        }
        ended.set(true);
        first
    };
    fence_with(waited, |error| ended.get() && error.code.is_fatal())
}

fn over(seconds: f64, count: usize, one: Option<&&Started>) -> Error {
    let waits = one.map_or_else(String::new, |work| format!(": {}", work.waits_for()));
    Error::new(
        Code::Timeout,
        format!("the wait ended after {seconds:.3} s, before any of {count} operations{waits}"),
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_source(work: *const Work, source: *mut i32) -> Status {
    fence(|| {
        let place = output("source", source)?;
        place.write(received(work)?.source as i32);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_received(work: *const Work, count: *mut usize) -> Status {
    fence(|| {
        let place = output("count", count)?;
        place.write(elements(received(work)?));
        Ok(())
    })
}

/// The message that a receive has got.
fn received(work: *const Work) -> Result<Received> {
    let parts = WORKS.find(work)?;
    let Parts::One(one) = &*parts else {
        return Err(Error::invalid("the work of a group has no message"));
    };
    one.received().filter(|_| one.is_done()).ok_or_else(|| {
        Error::invalid(format!(
            "{} has no message: only a receive that has ended well has one",
            one.name()
        ))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_destroy(work: *mut Work) -> Status {
    if work.is_null() {
        return Status::OK;
    }
    fence(|| WORKS.remove(work).map(drop))
}
