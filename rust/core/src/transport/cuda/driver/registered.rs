//! Host memory that devices use: pages that were there before, registered with the driver.
//!
//! The driver registers whole pages, and each page once per process. Several users of the same pages (both ends
//! of a link inside a process) share one registration.
//!
//! To take pages back the driver waits until the device is idle, which it is not while a stream of any group waits for a
//! peer. So a registration without users stays, and its memory mapped, until no registration of the process has users:
//! then there is no group left whose stream could wait. Only when there are [`MOST_IDLE`] of them they go earlier.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::symbols::numbers;
use super::{Device, Failure, is_forked};
use crate::error::{Error, Result};
use crate::locks::{Condvar, Mutex};
use crate::transport::Page;

/// Registrations without users that are kept: each may keep a link's shared memory, some hundred KiB, mapped.
const MOST_IDLE: usize = 64;

/// The pages of this process that are registered.
static REGISTRATIONS: Mutex<Registrations> = Mutex::new(Registrations {
    by_address: BTreeMap::new(),
    users: 0,
});

/// Signalled when pages have been given back.
static GIVEN_BACK: Condvar = Condvar::new();

struct Registrations {
    by_address: BTreeMap<usize, Registration>,
    /// Of all of them.
    users: usize,
}

#[derive(Default)]
struct Registration {
    bytes: usize,
    users: usize,
    /// Keeps the memory mapped while there are no users.
    kept: Option<Arc<dyn Any + Send + Sync>>,
    /// The driver is taking them back.
    leaving: bool,
}

/// Registered host memory: a stream of any device can copy from and to it, and write and await its words.
pub struct Registered {
    device: &'static Device,
    start: NonNull<u8>,
    bytes: usize,
    /// The first address of the registration that it is part of.
    registration: usize,
    address: u64,
    /// Keeps the memory mapped.
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: it owns a share of a registration, and through `_keep` of a mapping; neither belongs to a thread.
unsafe impl Send for Registered {}
// SAFETY: as above; nothing changes through a shared reference.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers a link's page, or takes a share in its registration.
    ///
    /// # Errors
    /// `Unsupported` or `System` where the driver cannot register shared memory.
    pub fn page(device: &'static Device, page: &Page) -> Result<Self> {
        let start = NonNull::from(page.words()).cast();
        // SAFETY: the page is mapped while `page`, or a clone of it, lives.
        unsafe {
            Self::pages(
                device,
                start,
                size_of_val(page.words()),
                Arc::new(page.clone()),
            )
        }
    }

    /// Registers the pages in which these bytes lie: `start` begins one.
    ///
    /// # Safety
    /// They stay mapped while `keep` lives, and nothing else in them is registered.
    pub(super) unsafe fn pages(
        device: &'static Device,
        start: NonNull<u8>,
        bytes: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let doing = format_args!(
            "register {bytes} bytes of host memory with device {}",
            device.number()
        );
        let _entered = device.set_up()?;
        let registration = {
            let mut registrations = REGISTRATIONS.lock();
            while registrations.is_leaving(start.addr().get(), bytes) {
                GIVEN_BACK.wait(&mut registrations);
            }
            match registrations.share(start.addr().get(), bytes)? {
                Some(registration) => registration,
                None => {
                    let flags = numbers::HOST_REGISTER_PORTABLE | numbers::HOST_REGISTER_DEVICEMAP;
                    let place: *mut c_void = start.as_ptr().cast();
                    // SAFETY: the pages are mapped until after they are unregistered (see `drop`).
                    let code =
                        unsafe { (device.driver.symbols.mem_host_register)(place, bytes, flags) };
                    Failure::check(code).map_err(|failure| failure.while_doing(doing))?;
                    let first = start.as_ptr().expose_provenance();
                    registrations.add(first, bytes);
                    first
                }
            }
        };
        // From here on dropping it gives the share back.
        let mut registered = Self {
            device,
            start,
            bytes,
            registration,
            address: 0,
            _keep: keep,
        };
        let mut address = 0;
        let first = ptr::with_exposed_provenance_mut(registered.registration);
        // SAFETY: it stores an address; this is where a registration begins.
        let code =
            unsafe { (device.driver.symbols.mem_host_get_device_pointer)(&mut address, first, 0) };
        Failure::check(code).map_err(|failure| failure.while_doing(doing))?;
        registered.address = address + (start.addr().get() - registered.registration) as u64;
        Ok(registered)
    }

    /// The first byte, as the device knows it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The first byte, as the host knows it.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Registrations {
    /// Takes a share in a registration that covers the range. `None` when nothing of it is registered yet.
    fn share(&mut self, start: usize, bytes: usize) -> Result<Option<usize>> {
        let before = self.by_address.range_mut(..start + bytes).next_back();
        match before {
            Some((&first, registration)) if first + registration.bytes > start => {
                if first > start || first + registration.bytes < start + bytes {
                    return Err(Error::internal(format!(
                        "{bytes} bytes of host memory at {start:#x} are registered in part"
                    )));
                }
                registration.users += 1;
                registration.kept = None;
                self.users += 1;
                Ok(Some(first))
            }
            _ => Ok(None),
        }
    }

    fn add(&mut self, first: usize, bytes: usize) {
        let registration = Registration {
            bytes,
            users: 1,
            ..Registration::default()
        };
        self.by_address.insert(first, registration);
        self.users += 1;
    }

    /// Whether something of the range is being given back.
    fn is_leaving(&self, start: usize, bytes: usize) -> bool {
        let before = self.by_address.range(..start + bytes).next_back();
        before.is_some_and(|(first, registration)| {
            first + registration.bytes > start && registration.leaving
        })
    }

    /// Gives a share back. Those that it returns are to be unregistered now, which the caller does.
    fn leave(&mut self, first: usize, keep: &Arc<dyn Any + Send + Sync>) -> Vec<usize> {
        let Some(registration) = self.by_address.get_mut(&first) else {
            return Vec::new();
        };
        registration.users -= 1;
        self.users -= 1;
        if registration.users == 0 {
            registration.kept = Some(Arc::clone(keep));
        }
        let is_idle = |of: &Registration| of.users == 0 && !of.leaving;
        let idle = self.by_address.values().filter(|of| is_idle(of)).count();
        if self.users > 0 && idle <= MOST_IDLE {
            return Vec::new();
        }
        let leaving = self.by_address.iter_mut().filter(|(_, of)| is_idle(of));
        leaving
            .map(|(first, registration)| {
                registration.leaving = true;
                *first
            })
            .collect()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if is_forked() {
            // The lock may be held by a thread that is not here.
            return;
        }
        let leaving = REGISTRATIONS.lock().leave(self.registration, &self._keep);
        // The driver may wait for the device, and a stream for a thread that registers other pages meanwhile: no lock is held.
        for first in leaving {
            let place: *mut c_void = ptr::with_exposed_provenance_mut(first);
            // SAFETY: this was registered and has no users; the table keeps the memory mapped.
            self.device
                .release("unregister host memory", |symbols| unsafe {
                    (symbols.mem_host_unregister)(place)
                });
            let gone = REGISTRATIONS.lock().by_address.remove(&first);
            GIVEN_BACK.notify_all();
            drop(gone);
        }
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered({} bytes at {:?})", self.bytes, self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none() -> Registrations {
        Registrations {
            by_address: BTreeMap::new(),
            users: 0,
        }
    }

    #[test]
    fn pages_are_registered_once() {
        let mut registrations = none();
        assert_eq!(registrations.share(4096, 4096).unwrap(), None);
        registrations.add(4096, 3 * 4096);
        // Inside, neighbours on both sides, and over the edge.
        assert_eq!(registrations.share(8192, 4096).unwrap(), Some(4096));
        assert_eq!(registrations.share(4096, 3 * 4096).unwrap(), Some(4096));
        assert_eq!(registrations.by_address[&4096].users, 3);
        assert_eq!(registrations.share(0, 4096).unwrap(), None);
        assert_eq!(registrations.share(4 * 4096, 4096).unwrap(), None);
        assert!(registrations.share(0, 8192).is_err());
        assert!(registrations.share(3 * 4096, 8192).is_err());
        assert!(registrations.share(0, 9 * 4096).is_err());
    }

    #[test]
    fn what_nobody_uses_stays_until_nothing_is_used() {
        let keep: Arc<dyn Any + Send + Sync> = Arc::new(());
        let mut registrations = none();
        registrations.add(4096, 4096);
        registrations.add(16384, 4096);
        assert!(registrations.leave(4096, &keep).is_empty());
        assert_eq!(Arc::strong_count(&keep), 2);
        // A caller that wants it again has it.
        assert_eq!(registrations.share(4096, 4096).unwrap(), Some(4096));
        assert_eq!(Arc::strong_count(&keep), 1);
        assert!(registrations.leave(4096, &keep).is_empty());
        assert_eq!(registrations.leave(16384, &keep), [4096, 16384]);
        assert!(registrations.is_leaving(4096, 4096));
    }

    #[test]
    fn so_much_stays_and_no_more() {
        let keep: Arc<dyn Any + Send + Sync> = Arc::new(());
        let mut registrations = none();
        for page in 0..=MOST_IDLE + 1 {
            registrations.add(8192 * (page + 1), 4096);
        }
        for page in 0..MOST_IDLE {
            assert!(registrations.leave(8192 * (page + 1), &keep).is_empty());
        }
        let gone = registrations.leave(8192 * (MOST_IDLE + 1), &keep);
        assert_eq!(gone.len(), MOST_IDLE + 1);
    }
}
