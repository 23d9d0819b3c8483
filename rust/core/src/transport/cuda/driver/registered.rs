//! Host memory that devices use: pages that were there before, registered with the driver.
//!
//! The driver registers whole pages, and each page once per process. Several users of the same pages (both ends
//! of a link inside a process) share one registration, which goes with the last of them.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::symbols::numbers;
use super::{Device, Failure, is_forked};
use crate::error::{Error, Result};
use crate::transport::Page;

/// The pages of this process that are registered, by their first address.
static REGISTRATIONS: Mutex<BTreeMap<usize, Registration>> = Mutex::new(BTreeMap::new());

/// Signalled when pages have been given back.
static GIVEN_BACK: Condvar = Condvar::new();

struct Registration {
    bytes: usize,
    /// 0 while the driver is taking them back.
    users: usize,
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

// SAFETY: it owns a share of a registration, and through `_keep` of a mapping, neither of which belongs to a thread.
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

    /// Registers whole pages.
    ///
    /// # Safety
    /// `start..start + bytes` are whole pages that stay mapped while `keep` lives.
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
            while is_leaving(&registrations, start.addr().get(), bytes) {
                GIVEN_BACK.wait(&mut registrations);
            }
            match share(&mut registrations, start.addr().get(), bytes)? {
                Some(registration) => registration,
                None => {
                    let flags = numbers::HOST_REGISTER_PORTABLE | numbers::HOST_REGISTER_DEVICEMAP;
                    let place: *mut c_void = start.as_ptr().cast();
                    // SAFETY: the pages are mapped until after they are unregistered (see `drop`).
                    let code =
                        unsafe { (device.driver.symbols.mem_host_register)(place, bytes, flags) };
                    Failure::check(code).map_err(|failure| failure.while_doing(doing))?;
                    let first = start.as_ptr().expose_provenance();
                    registrations.insert(first, Registration { bytes, users: 1 });
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

/// Takes a share in a registration that covers the range. `None` when nothing of it is registered yet.
fn share(
    registrations: &mut BTreeMap<usize, Registration>,
    start: usize,
    bytes: usize,
) -> Result<Option<usize>> {
    let before = registrations.range_mut(..start + bytes).next_back();
    match before {
        Some((&first, registration)) if first + registration.bytes > start => {
            if first > start || first + registration.bytes < start + bytes {
                return Err(Error::internal(format!(
                    "{bytes} bytes of host memory at {start:#x} are registered in part"
                )));
            }
            registration.users += 1;
            Ok(Some(first))
        }
        _ => Ok(None),
    }
}

/// Whether something of the range is being given back.
fn is_leaving(registrations: &BTreeMap<usize, Registration>, start: usize, bytes: usize) -> bool {
    let before = registrations.range(..start + bytes).next_back();
    before.is_some_and(|(first, registration)| {
        first + registration.bytes > start && registration.users == 0
    })
}

impl Drop for Registered {
    fn drop(&mut self) {
        if is_forked() {
            // The lock may be held by a thread that is not here.
            return;
        }
        let mut registrations = REGISTRATIONS.lock();
        let Some(registration) = registrations.get_mut(&self.registration) else {
            return;
        };
        registration.users -= 1;
        if registration.users > 0 {
            return;
        }
        // The driver may wait for the device, and a stream for who registers other pages meanwhile. Who wants these waits.
        drop(registrations);
        let place: *mut c_void = ptr::with_exposed_provenance_mut(self.registration);
        // SAFETY: this was registered, and this was its last user. `_keep` goes after it.
        self.device
            .release("unregister host memory", |symbols| unsafe {
                (symbols.mem_host_unregister)(place)
            });
        REGISTRATIONS.lock().remove(&self.registration);
        GIVEN_BACK.notify_all();
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

    #[test]
    fn pages_are_registered_once() {
        let mut registrations = BTreeMap::new();
        assert_eq!(share(&mut registrations, 4096, 4096).unwrap(), None);
        let whole = Registration {
            bytes: 3 * 4096,
            users: 1,
        };
        registrations.insert(4096, whole);
        // Inside, neighbours on both sides, and over the edge.
        assert_eq!(share(&mut registrations, 8192, 4096).unwrap(), Some(4096));
        assert_eq!(
            share(&mut registrations, 4096, 3 * 4096).unwrap(),
            Some(4096)
        );
        assert_eq!(registrations[&4096].users, 3);
        assert_eq!(share(&mut registrations, 0, 4096).unwrap(), None);
        assert_eq!(share(&mut registrations, 4 * 4096, 4096).unwrap(), None);
        assert!(share(&mut registrations, 0, 8192).is_err());
        assert!(share(&mut registrations, 3 * 4096, 8192).is_err());
        assert!(share(&mut registrations, 0, 9 * 4096).is_err());
    }
}
