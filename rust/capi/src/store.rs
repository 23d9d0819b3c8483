//! A store made of three functions that C gives.

use std::ffi::{CString, c_char, c_void};
use std::time::Duration;

use unisono::error::{Code, Error, Result};
use unisono::rendezvous::store::{MAX_VALUE, Store};

use crate::error::Status;
use crate::sized::{Given, Growing, sized_in};

/// `unisono_store`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct StoreFunctions {
    pub size: usize,
    pub context: *mut c_void,
    pub set:
        Option<unsafe extern "C" fn(*mut c_void, *const c_char, *const c_void, usize) -> Status>,
    pub get: Option<
        unsafe extern "C" fn(*mut c_void, *const c_char, *mut c_void, usize, *mut usize) -> Status,
    >,
    pub wait: Option<
        unsafe extern "C" fn(
            *mut c_void,
            *const c_char,
            f64,
            *mut c_void,
            usize,
            *mut usize,
        ) -> Status,
    >,
}

// SAFETY: the size comes first.
unsafe impl Growing for StoreFunctions {
    const FIRST_SIZE: usize = 40;
}

// SAFETY: an address that is not dereferenced, and functions, each of them possibly absent.
unsafe impl Given for StoreFunctions {
    const INITIAL: Self = Self {
        size: std::mem::size_of::<Self>(),
        context: std::ptr::null_mut(),
        set: None,
        get: None,
        wait: None,
    };
}

/// The length that says that there is no value.
pub const NOT_SET: usize = usize::MAX;
/// Room for a value at the first attempt.
const FIRST_ROOM: usize = 4 << 10;

/// The functions, all there.
#[derive(Clone, Copy)]
pub(crate) struct Callbacks {
    context: *mut c_void,
    set: unsafe extern "C" fn(*mut c_void, *const c_char, *const c_void, usize) -> Status,
    get: unsafe extern "C" fn(*mut c_void, *const c_char, *mut c_void, usize, *mut usize) -> Status,
    wait: unsafe extern "C" fn(
        *mut c_void,
        *const c_char,
        f64,
        *mut c_void,
        usize,
        *mut usize,
    ) -> Status,
}

// SAFETY: a group uses its store in the thread that joins, while it joins; it is made there and dropped there. The
// bounds are the trait's, for stores that are shared.
unsafe impl Send for Callbacks {}
// SAFETY: as above.
unsafe impl Sync for Callbacks {}

impl Callbacks {
    /// # Safety
    /// `store` is NULL, or leads to a struct of the size that it says, with functions that do what the header says.
    pub(crate) unsafe fn new(store: *const StoreFunctions) -> Result<Self> {
        // SAFETY: as the caller promises.
        let store = unsafe { sized_in("store", store)? };
        match (store.set, store.get, store.wait) {
            (Some(set), Some(get), Some(wait)) => Ok(Self {
                context: store.context,
                set,
                get,
                wait,
            }),
            _ => Err(Error::invalid(
                "the store lacks one of its functions set, get and wait",
            )),
        }
    }

    /// The value that `call` writes, which gets the place for it, its size, and the place for the length.
    fn value(
        what: &str,
        key: &str,
        mut call: impl FnMut(*mut c_void, usize, *mut usize) -> Status,
    ) -> Result<Option<Vec<u8>>> {
        let mut room = vec![0_u8; FIRST_ROOM];
        loop {
            let mut length = NOT_SET;
            let status = call(room.as_mut_ptr().cast(), room.len(), &raw mut length);
            check(what, key, status)?;
            match length {
                NOT_SET => return Ok(None),
                length if length <= room.len() => {
                    room.truncate(length);
                    return Ok(Some(room));
                }
                length if length <= MAX_VALUE => room.resize(length, 0),
                length => {
                    return Err(Error::new(
                        Code::Untrusted,
                        format!("the store has a value of {length} bytes for key {key:?}"),
                    ));
                }
            }
        }
    }
}

/// The error of a function that failed.
fn check(what: &str, key: &str, status: Status) -> Result<()> {
    match status.code() {
        None => Ok(()),
        Some(code) => Err(Error::new(
            code,
            format!(
                "the program's store failed to {what} key {key:?}: status {} ({})",
                status.0,
                code.name()
            ),
        )),
    }
}

/// `key` for C. Keys are ours and hold no 0.
fn text(key: &str) -> Result<CString> {
    CString::new(key).map_err(|_| Error::internal(format!("a store key with a 0: {key:?}")))
}

impl Store for Callbacks {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let name = text(key)?;
        // SAFETY: what the header promises to the function: a text, and as many bytes.
        let status = unsafe {
            (self.set)(
                self.context,
                name.as_ptr(),
                value.as_ptr().cast(),
                value.len(),
            )
        };
        check("set", key, status)
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let name = text(key)?;
        let seconds = timeout.as_secs_f64();
        let found = Self::value("wait for", key, |place, room, length| {
            // SAFETY: as in `set`: `room` bytes at `place`, and a place for the length.
            unsafe { (self.wait)(self.context, name.as_ptr(), seconds, place, room, length) }
        })?;
        found.ok_or_else(|| {
            Error::new(
                Code::Timeout,
                format!("key {key:?} was not set within {seconds:.3} s"),
            )
        })
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let name = text(key)?;
        Self::value("get", key, |place, room, length| {
            // SAFETY: as in `wait`.
            unsafe { (self.get)(self.context, name.as_ptr(), place, room, length) }
        })
    }
}
