//! Groups that form of handles, which the program passes around.

use std::ffi::{CString, c_char};
use std::slice;

use unisono::error::{Error, Result};
use unisono::rendezvous::launcher;

use crate::communicator::settings;
use crate::config::Settings;
use crate::error::{Status, output};
use crate::fence::{fence, text};
use crate::handles::Table;
use crate::joined::{Communicator, register};
use crate::types::{LONGEST_WAIT, seconds, string};

/// `unisono_candidate`.
#[repr(C)]
pub struct Candidate {
    _opaque: [u8; 0],
}

static CANDIDATES: Table<Kept> = Table::new(4, "a candidate");

struct Kept {
    candidate: unisono::Candidate,
    handle: CString,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_candidate_create(
    config: *const Settings,
    candidate: *mut *mut Candidate,
) -> Status {
    fence(|| {
        let place = output("candidate", candidate)?;
        // A launcher's secret is for its ranks, however many of them are in a group.
        let candidate = unisono::Candidate::new(settings(config)?, launcher::secret(1))?;
        let handle = text(candidate.handle().to_owned());
        place.write(CANDIDATES.insert(Kept { candidate, handle })?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_candidate_handle(
    candidate: *const Candidate,
    handle: *mut *const c_char,
) -> Status {
    fence(|| {
        let kept = CANDIDATES.find(candidate.cast_mut())?;
        output("handle", handle)?.write(kept.handle.as_ptr());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_candidate_form(
    candidate: *mut Candidate,
    handles: *const *const c_char,
    count: usize,
    number: i64,
    patience: f64,
    comm: *mut *mut Communicator,
) -> Status {
    fence(|| {
        let kept = CANDIDATES.find(candidate)?;
        let place = output("comm", comm)?;
        if handles.is_null() {
            return Err(Error::invalid("handles are needed, but NULL was given"));
        }
        // SAFETY: the header asks for as many texts.
        let handles = unsafe { slice::from_raw_parts(handles, count) };
        let handles = handles
            .iter()
            // SAFETY: as above.
            .map(|handle| Ok(unsafe { string("handle", *handle)? }.to_owned()))
            .collect::<Result<Vec<_>>>()?;
        let patience = seconds("the patience", patience)?.unwrap_or(LONGEST_WAIT);
        let formed = kept.candidate.gather(&handles, number, Some(patience))?;
        place.write(register(formed)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_candidate_destroy(candidate: *mut Candidate) -> Status {
    if candidate.is_null() {
        return Status::OK;
    }
    fence(|| CANDIDATES.remove(candidate).map(drop))
}
