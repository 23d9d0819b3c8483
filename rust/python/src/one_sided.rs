//! Ports for one-sided transfers, as `unisono.transports` builds on them.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use unisono::PerProcess;
use unisono::config::Config;
use unisono::error::Error;
use unisono::fence::guard;
use unisono::interrupts::SLICE;
use unisono::locks::Mutex;
use unisono::one_sided;

use crate::errors::{exception, invalid};
use crate::running;

/// The ports of this process, to be closed when the interpreter ends.
static OPEN: PerProcess<Mutex<Vec<Weak<one_sided::Port>>>> = PerProcess::new(Mutex::default);

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    // As attributes alone: they are not public, so not in `__all__`.
    module.setattr("_Port", py.get_type::<Port>())?;
    module.setattr("_Region", py.get_type::<Region>())?;
    module.setattr("_RemoteRegion", py.get_type::<RemoteRegion>())?;
    module.setattr("_Transfer", py.get_type::<Transfer>())
}

/// Closes what the program left open.
pub(crate) fn close_all() {
    let open = std::mem::take(&mut *OPEN.lock());
    for port in open.iter().filter_map(Weak::upgrade) {
        // The interpreter ends: no caller is left to get an error.
        let _ = guard(|| port.close(Duration::ZERO));
    }
}

/// How long something may take, as torch has it: seconds from 0 on.
struct Patience(Duration);

impl<'py> FromPyObject<'_, 'py> for Patience {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let seconds: f64 = object.extract()?;
        let wrong = |_| {
            let what = format!("the timeout is {seconds} s, but must be finite and not negative");
            invalid(object.py(), what)
        };
        Duration::try_from_secs_f64(seconds)
            .map(Self)
            .map_err(wrong)
    }
}

/// Runs `body` without the GIL; its error becomes an exception.
fn detached<T: Send>(
    py: Python<'_>,
    body: impl FnOnce() -> unisono::error::Result<T> + Send,
) -> PyResult<T> {
    py.detach(|| guard(body))
        .map_err(|error| exception(py, &error))
}

/// One end of one-sided transfers.
#[pyclass(frozen, module = "unisono", name = "_Port")]
struct Port(Arc<one_sided::Port>);

#[pymethods]
impl Port {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        let port = detached(py, || {
            let config = Config::from_env()?;
            crate::log::start(&config);
            let port = Arc::new(one_sided::Port::new(config)?);
            let mut open = OPEN.lock();
            open.retain(|known| known.strong_count() > 0);
            open.push(Arc::downgrade(&port));
            Ok(port)
        })?;
        Ok(Self(port))
    }

    /// Let peers connect. Returns what they need for that, which holds a secret.
    fn bind<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let id = detached(py, || self.0.bind())?;
        Ok(PyBytes::new(py, &id))
    }

    /// Connect to the peer whose ``bind`` returned these bytes.
    fn connect(&self, py: Python<'_>, peer: Vec<u8>, timeout: Patience) -> PyResult<()> {
        let port = Arc::clone(&self.0);
        running::elsewhere(py, move || port.connect(&peer, timeout.0), || ())
    }

    /// Whether there is a peer that lives, as far as is known.
    fn is_connected(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.is_connected())
    }

    /// Register memory that lies in ``owner``, which is kept as long as needed.
    fn register(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        owner: Py<PyAny>,
    ) -> PyResult<Region> {
        if address == 0 {
            return Err(invalid(py, "memory at no address cannot be registered"));
        }
        let register = || {
            let start = std::ptr::with_exposed_provenance_mut(address);
            // SAFETY: the caller, `unisono.transports`, passes the memory of `owner`, a tensor that it has looked at; and
            // its documentation has users agree on who touches what during transfers.
            unsafe { self.0.register(start, length, Box::new(owner)) }
        };
        let region = detached(py, register)?;
        Ok(Region(region))
    }

    /// End a registration, and wait for the transfers that use it.
    fn unregister(&self, py: Python<'_>, region: &Region, timeout: Patience) -> PyResult<()> {
        detached(py, || self.0.unregister(&region.0, timeout.0))
    }

    /// The region as peers know it.
    fn remote(&self, py: Python<'_>, region: &Region) -> PyResult<RemoteRegion> {
        let remote = self.0.remote(&region.0);
        Ok(RemoteRegion(remote.map_err(|error| exception(py, &error))?))
    }

    /// Start to write ``length`` bytes at ``offset`` of a region to a peer's memory.
    fn write(
        &self,
        py: Python<'_>,
        region: &Region,
        offset: usize,
        length: usize,
        remote: &RemoteRegion,
    ) -> PyResult<Transfer> {
        let range = offset..offset.saturating_add(length);
        let start = || self.0.write(&region.0, range, &remote.0, None);
        detached(py, start).map(Transfer)
    }

    /// Start to read a peer's memory into ``length`` bytes at ``offset`` of a region.
    fn read(
        &self,
        py: Python<'_>,
        region: &Region,
        offset: usize,
        length: usize,
        remote: &RemoteRegion,
    ) -> PyResult<Transfer> {
        let range = offset..offset.saturating_add(length);
        let start = || self.0.read(&region.0, range, &remote.0, None);
        detached(py, start).map(Transfer)
    }

    /// End all transfers and registrations. Memory in use is kept until it is not.
    fn close(&self, py: Python<'_>, timeout: Patience) -> PyResult<()> {
        detached(py, || self.0.close(timeout.0))
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // The last use of a port closes it, which waits for peers, without the GIL. Not while the interpreter goes away.
        let port = Arc::clone(&self.0);
        Python::try_attach(|py| {
            py.detach(|| {
                if Arc::strong_count(&port) <= 2 {
                    let _ = guard(|| port.close(Duration::ZERO));
                }
            });
        });
    }
}

/// Memory that is registered with a port.
#[pyclass(frozen, module = "unisono", name = "_Region", eq)]
#[derive(PartialEq, Eq)]
struct Region(one_sided::Region);

#[pymethods]
impl Region {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// Whether it has not been unregistered.
    fn is_registered(&self) -> bool {
        self.0.is_registered()
    }

    /// Whether the driver has told that it lies on a CUDA device.
    fn is_on_device(&self) -> bool {
        self.0.is_on_device()
    }
}

/// Registered memory of a peer, or a part of it.
#[pyclass(frozen, module = "unisono", name = "_RemoteRegion", eq)]
#[derive(PartialEq, Eq)]
struct RemoteRegion(one_sided::RemoteRegion);

#[pymethods]
impl RemoteRegion {
    /// A region from the bytes that ``to_bytes`` returned at the peer.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        let remote = one_sided::RemoteRegion::from_bytes(data);
        Ok(Self(remote.map_err(|error| exception(py, &error))?))
    }

    /// To be given to the peer that may use the memory.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    /// ``length`` bytes from ``offset`` on.
    fn part(&self, py: Python<'_>, offset: u64, length: u64) -> PyResult<Self> {
        let part = self.0.part(offset, length);
        Ok(Self(part.map_err(|error| exception(py, &error))?))
    }

    /// How many bytes it has.
    #[getter]
    fn length(&self) -> u64 {
        self.0.len()
    }
}

/// A transfer under way, or ended.
#[pyclass(frozen, module = "unisono", name = "_Transfer")]
struct Transfer(one_sided::Transfer);

#[pymethods]
impl Transfer {
    /// Whether it has ended, well or not.
    fn done(&self) -> bool {
        self.0.is_done()
    }

    /// Wait for the end; return whether it has come. Raises what ended the transfer.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Patience>) -> PyResult<bool> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout.0));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let slice = left.map_or(SLICE, |left| left.min(SLICE));
            let waited = py.detach(|| guard(|| Ok(self.0.wait(Some(slice)))));
            if let Err(error) = waited.map_err(|error| exception(py, &error))?
                && !self.0.is_done()
                && error.code != unisono::error::Code::Timeout
            {
                return Err(exception(py, &error));
            }
            match self.0.result() {
                Some(Ok(())) => return Ok(true),
                Some(Err(error)) => return Err(exception(py, &error)),
                None if left.is_some_and(|left| left.is_zero()) => return Ok(false),
                None => py.check_signals()?,
            }
        }
    }

    /// Call ``callback`` when it has ended: at once if it has, else on a thread of the library.
    fn when_done(&self, py: Python<'_>, callback: Py<PyAny>) {
        let completion = Box::new(move |_| {
            // Not while the interpreter goes away: no object is left then that could be told.
            Python::try_attach(|py| {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, Some(callback.bind(py)));
                }
            });
        });
        py.detach(|| self.0.when_done(completion));
    }

    /// The error that ended it; None where it went well or still goes on.
    fn exception(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let error: Error = self.0.result()?.err()?;
        Some(exception(py, &error).into_value(py).into_any())
    }
}
