//! Windows: arrays that each rank exposes to the others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use unisono::cuda;
use unisono::fence::guard;
use unisono::interrupts::SLICE;
use unisono::window::{Transfer, View, Window as Core};

use crate::arrays::{self, Array};
use crate::communicator::Communicator;
use crate::errors::{exception, invalid};
use crate::how::How;
use crate::joined::{Shared, register_window};
use crate::running::{Seconds, elsewhere};

/// How long a thread that waits for a stream sleeps between two looks.
const LOOK_PAUSE: Duration = Duration::from_micros(20);

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Window>()
}

/// The shape of an array, and the name of its type, as the note of a window has them.
struct Kind {
    shape: Vec<usize>,
    name: String,
}

impl Kind {
    fn of(array: &Array<'_>) -> Self {
        Self {
            shape: array.shape().to_vec(),
            name: array.type_name().to_owned(),
        }
    }

    fn to_note(&self) -> Vec<u8> {
        let numbers = [self.shape.len()]
            .into_iter()
            .chain(self.shape.iter().copied());
        let mut note: Vec<u8> = numbers
            .flat_map(|number| (number as u64).to_le_bytes())
            .collect();
        note.extend(self.name.as_bytes());
        note
    }

    /// `None` for the note of another door.
    fn read(note: &[u8], bytes: usize, size: usize) -> Option<Self> {
        let number = |bytes: &[u8; 8]| usize::try_from(u64::from_le_bytes(*bytes)).ok();
        let (axes, mut rest) = note.split_first_chunk()?;
        let mut shape = Vec::new();
        for _ in 0..number(axes)? {
            let (extent, after) = rest.split_first_chunk()?;
            shape.push(number(extent)?);
            rest = after;
        }
        let total = shape
            .iter()
            .try_fold(size, |total, extent| total.checked_mul(*extent));
        let name = std::str::from_utf8(rest).ok()?.to_owned();
        (total == Some(bytes)).then_some(Self { shape, name })
    }
}

/// NumPy's type of this name.
fn type_named<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    let numpy = arrays::numpy(py)?;
    numpy.call_method1("dtype", (name,)).or_else(|cause| {
        let added = py.import("ml_dtypes").map_err(|_| cause)?;
        numpy.call_method1("dtype", (added.getattr(name)?,))
    })
}

#[pymethods]
impl Communicator {
    /// Expose an array to all ranks: each may write to it and read it, and this one calls nothing for that.
    /// All ranks call it, each with an array of its own, whatever its shape and type.
    ///
    /// Ranks of the same host use an array that `empty` has made where it lies. Others are reached by messages, which is
    /// slower and works the same, also between hosts.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     A contiguous, writable array, on the host or on a CUDA device, which the window keeps alive.
    ///
    /// Returns
    /// -------
    /// Window
    ///     The arrays of all ranks.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As a collective.
    ///
    /// Examples
    /// --------
    /// >>> halo = unisono.empty(2 * width, "float32")
    /// >>> window = comm.window(halo)
    /// >>> window.put(edge, right, offset=0)
    /// >>> window.signal(right)
    /// >>> window.wait_signal(left)
    fn window(&self, py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<Window> {
        let how = How::new("window", false, None, None);
        let exposed = Array::output(&how, "array", array)?;
        await_stream(py, &how)?;
        let kind = Kind::of(&exposed);
        let (start, bytes, dtype) = (
            exposed.start().expose_provenance(),
            exposed.bytes(),
            exposed.dtype(),
        );
        let (note, owner) = (kind.to_note(), exposed.keep());
        let shared = Arc::clone(&self.shared);
        let make = move || {
            let start = std::ptr::with_exposed_provenance_mut(start);
            // SAFETY: the array is the owner of its memory. Its documentation has programs agree on who uses it when.
            let window = unsafe {
                shared
                    .comm
                    .window((start, bytes), (dtype, &note), Box::new(owner))?
            };
            Ok(register_window(window))
        };
        let interrupt = || self.core().abort("interrupted in window");
        Ok(Window {
            core: elsewhere(py, make, interrupt)?,
            array: array.clone().unbind(),
            _shared: Arc::clone(&self.shared),
        })
    }
}

/// Arrays that the ranks of a group expose to each other, made by `Communicator.window`.
///
/// A rank puts numbers into another's array, or gets numbers of it, and that one calls nothing. It
/// signals when it has put all that belongs together; the other one waits for the signal, and finds
/// there what was put before. Each wait takes one signal.
///
/// Several threads may use a window at once. The ranks agree on who uses which elements when: a signal
/// says that they are written, another one back that they were read.
///
/// **Errors**: a wait for a rank that is gone ends with `PeerLostError`, and all that uses the window
/// afterwards. Shrink the communicator then, and make a new window of that. After `TimeoutError` the
/// window goes on.
#[pyclass(frozen, module = "unisono", name = "Window", weakref)]
pub(crate) struct Window {
    core: Arc<Core>,
    array: Py<PyAny>,
    // A window is of its ranks, and they of the communicator.
    _shared: Arc<Shared>,
}

impl Window {
    fn check_rank(
        &self,
        py: Python<'_>,
        operation: &str,
        name: &str,
        value: i64,
    ) -> PyResult<usize> {
        let world = self.core.world_size();
        match usize::try_from(value) {
            Ok(rank) if rank < world => Ok(rank),
            _ => Err(invalid(
                py,
                format!(
                    "{operation}: {name} {value} is out of range: the window has {world} ranks"
                ),
            )),
        }
    }

    fn kind(&self, py: Python<'_>, rank: usize) -> PyResult<(usize, Kind)> {
        let described = self.core.described(rank);
        let (bytes, dtype, note) = described.map_err(|error| exception(py, &error))?;
        let kind = Kind::read(note, bytes, dtype.size());
        let kind = kind
            .ok_or_else(|| invalid(py, format!("rank {rank} exposes memory that is no array")))?;
        Ok((dtype.size(), kind))
    }

    /// Waits for what is under way on an array, and refuses one on a device where that cannot be.
    fn admit(&self, py: Python<'_>, how: &How, array: &Array<'_>) -> PyResult<()> {
        match await_stream(py, how)? && !self.core.has_devices() {
            false => Ok(()),
            true => Err(array.argument().unsupported(
                py,
                "is on a CUDA device, but no rank of the window exposes an array on one: copy it to the host",
            )),
        }
    }

    /// Where elements like those of `array` begin in that of a rank, in bytes.
    fn place(
        &self,
        py: Python<'_>,
        array: &Array<'_>,
        (rank, offset): (usize, i64),
    ) -> PyResult<usize> {
        let (size, kind) = self.kind(py, rank)?;
        if kind.name != array.type_name() {
            let what = format!(
                "is {}, but the array of rank {rank} is {}",
                array.type_name(),
                kind.name
            );
            return Err(array.argument().invalid(py, &what));
        }
        let at = usize::try_from(offset).ok();
        let at = at.and_then(|offset| offset.checked_mul(size));
        at.ok_or_else(|| invalid(py, format!("offset {offset} is no place in an array")))
    }

    /// Waits until a transfer has ended.
    fn wait(py: Python<'_>, transfer: Option<Transfer>) -> PyResult<()> {
        let Some(transfer) = transfer else {
            return Ok(());
        };
        loop {
            let _ = py.detach(|| guard(|| transfer.wait(Some(SLICE))));
            match transfer.result() {
                Some(Ok(())) => return Ok(()),
                Some(Err(error)) => return Err(exception(py, &error)),
                None => py.check_signals()?,
            }
        }
    }
}

#[pymethods]
impl Window {
    /// This process's number in the group.
    #[getter]
    fn rank(&self) -> usize {
        self.core.rank()
    }

    /// The number of ranks.
    #[getter]
    fn size(&self) -> usize {
        self.core.world_size()
    }

    /// The array that this rank exposes.
    #[getter]
    fn array(&self, py: Python<'_>) -> Py<PyAny> {
        self.array.clone_ref(py)
    }

    /// Write an array into that of another rank.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     What is written: of the type of that rank's array.
    /// dest : int
    ///     The rank; it may be this one.
    /// offset : int, optional
    ///     The number of the first element that is written, in the order of memory.
    /// wait : bool, optional
    ///     Return when the elements are there. False: at once, unless a window has arrays on devices; `flush`, `fence` and a
    ///     `signal` to that rank wait, and until then the array must not be written to.
    ///
    /// Raises
    /// ------
    /// InvalidArgumentError
    ///     The elements do not lie in that rank's array, or are of another type.
    /// PeerLostError
    ///     A rank is gone.
    #[pyo3(signature = (array, dest, offset=0, *, wait=true))]
    fn put(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        dest: i64,
        offset: i64,
        wait: bool,
    ) -> PyResult<()> {
        let how = How::new("put", false, None, None);
        let rank = self.check_rank(py, "put", "dest", dest)?;
        let source = Array::input(&how, "array", array)?;
        self.admit(py, &how, &source)?;
        let at = self.place(py, &source, (rank, offset))?;
        let (start, bytes) = (source.start().expose_provenance(), source.bytes());
        let owner = source.keep();
        let put = py.detach(|| {
            guard(|| {
                let start = std::ptr::with_exposed_provenance(start);
                // SAFETY: the array is the owner of its memory; the documentation has programs leave it alone, and agree on
                // the elements of the other rank.
                unsafe { self.core.put(rank, at, (start, bytes), Box::new(owner)) }
            })
        });
        let transfer = put.map_err(|error| exception(py, &error))?;
        match wait {
            true => Self::wait(py, transfer),
            false => Ok(()),
        }
    }

    /// Read elements of another rank's array.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     Where they go: of the type of that rank's array, and as many as are read.
    /// source : int
    ///     The rank; it may be this one.
    /// offset : int, optional
    ///     The number of the first element that is read, in the order of memory.
    ///
    /// Returns
    /// -------
    /// array
    ///     `array`.
    ///
    /// Raises
    /// ------
    /// InvalidArgumentError
    ///     The elements do not lie in that rank's array, or are of another type.
    /// PeerLostError
    ///     A rank is gone.
    #[pyo3(signature = (array, source, offset=0))]
    fn get(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        source: i64,
        offset: i64,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("get", false, None, None);
        let rank = self.check_rank(py, "get", "source", source)?;
        let target = Array::output(&how, "array", array)?;
        self.admit(py, &how, &target)?;
        let at = self.place(py, &target, (rank, offset))?;
        let (start, bytes) = (target.start().expose_provenance(), target.bytes());
        let owner = target.keep();
        let got = py.detach(|| {
            guard(|| {
                let start = std::ptr::with_exposed_provenance_mut(start);
                // SAFETY: as in `put`; the call waits for the end.
                unsafe { self.core.get(rank, at, (start, bytes), Box::new(owner)) }
            })
        });
        Self::wait(py, got.map_err(|error| exception(py, &error))?)?;
        Ok(array.clone().unbind())
    }

    /// Signal to a rank: what this one has put into its array before is there when that rank's
    /// `wait_signal` returns.
    ///
    /// Parameters
    /// ----------
    /// dest : int
    ///     The rank; it may be this one.
    ///
    /// Raises
    /// ------
    /// PeerLostError
    ///     A rank is gone.
    /// Error
    ///     What ended an earlier `put` to that rank that was not waited for.
    fn signal(&self, py: Python<'_>, dest: i64) -> PyResult<()> {
        let rank = self.check_rank(py, "signal", "dest", dest)?;
        if !self.core.is_flushed() {
            // It waits for what this rank has put.
            let core = Arc::clone(&self.core);
            return elsewhere(py, move || core.signal(rank), || ());
        }
        let signalled = py.detach(|| guard(|| self.core.signal(rank)));
        signalled.map_err(|error| exception(py, &error))
    }

    /// Wait for a signal of a rank, and take it.
    ///
    /// Parameters
    /// ----------
    /// source : int
    ///     The rank; it may be this one.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds to wait. Without it, the communicator's timeout.
    ///
    /// Raises
    /// ------
    /// TimeoutError
    ///     No signal has come; the window goes on.
    /// PeerLostError
    ///     A rank is gone.
    #[pyo3(signature = (source, timeout=None))]
    fn wait_signal(&self, py: Python<'_>, source: i64, timeout: Option<Seconds>) -> PyResult<()> {
        let rank = self.check_rank(py, "wait_signal", "source", source)?;
        let usual = Some(self.core.timeout()).filter(|limit| !limit.is_zero());
        let limit = timeout.map(|Seconds(limit)| limit).or(usual);
        let mut until = None;
        let mut slice = limit.map_or(SLICE, |limit| limit.min(SLICE));
        loop {
            let taken = py.detach(|| guard(|| self.core.try_wait_signal(rank, Some(slice))));
            if taken.map_err(|error| exception(py, &error))? {
                return Ok(());
            }
            py.check_signals()?;
            let Some(limit) = limit else { continue };
            // A wait that is short reads no clock.
            let until = *until.get_or_insert_with(|| Instant::now() + limit.saturating_sub(slice));
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(exception(py, &self.core.late(rank, limit)));
            }
            slice = left.min(SLICE);
        }
    }

    /// Wait until all that this rank has put is in the others' arrays.
    ///
    /// Parameters
    /// ----------
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds to wait. Without it, the communicator's timeout.
    ///
    /// Raises
    /// ------
    /// Error
    ///     What ended a `put` that was not waited for.
    #[pyo3(signature = (timeout=None))]
    fn flush(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<()> {
        let usual = Some(self.core.timeout()).filter(|limit| !limit.is_zero());
        let limit = timeout.map(|Seconds(limit)| limit).or(usual);
        let core = Arc::clone(&self.core);
        match self.core.is_flushed() {
            true => Ok(()),
            false => elsewhere(py, move || core.flush(limit), || ()),
        }
    }

    /// Wait until all ranks have called it: then all that any of them has put before is there.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As `flush` and `barrier`.
    fn fence(&self, py: Python<'_>) -> PyResult<()> {
        self.flush(py, None)?;
        let begun = py.detach(|| guard(|| self.core.start_barrier()));
        let barrier = begun.map_err(|error| exception(py, &error))?;
        loop {
            let _ = py.detach(|| guard(|| barrier.wait(Some(SLICE))));
            if let Some(ended) = self.core.fenced(&barrier) {
                return ended.map_err(|error| exception(py, &error));
            }
            if let Err(interrupt) = py.check_signals() {
                let what = format!("interrupted in fence: {interrupt}");
                self.core.communicator().abort(&what);
                return Err(interrupt);
            }
        }
    }

    /// Whether the array of a rank lies in memory that this process has mapped, so that `map` returns it.
    ///
    /// Parameters
    /// ----------
    /// rank : int
    ///     The rank.
    fn can_map(&self, py: Python<'_>, rank: i64) -> PyResult<bool> {
        let rank = self.check_rank(py, "can_map", "rank", rank)?;
        let is_mapped = self.core.is_mapped(rank);
        let is_mapped = is_mapped.map_err(|error| exception(py, &error))?;
        Ok(is_mapped || rank == self.core.rank())
    }

    /// The array of a rank on this host, as an array of the same memory: nothing is copied.
    ///
    /// It stays that rank's memory as long as arrays over it live, also when the window is closed.
    ///
    /// Parameters
    /// ----------
    /// rank : int
    ///     The rank; for this one it is its own array.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     Of the shape and type of that rank's array. For an array on a CUDA device an object with
    ///     ``__cuda_array_interface__``: ``cupy.asarray`` and ``torch.as_tensor`` make an array of the same memory.
    ///
    /// Raises
    /// ------
    /// UnsupportedError
    ///     The rank is on another host, its array is not one that `empty` has made, or the driver does not
    ///     share that of a device.
    fn map<'py>(&self, py: Python<'py>, rank: i64) -> PyResult<Bound<'py, PyAny>> {
        let rank = self.check_rank(py, "map", "rank", rank)?;
        if rank == self.core.rank() {
            return Ok(self.array.bind(py).clone());
        }
        let (_, kind) = self.kind(py, rank)?;
        let dtype = type_named(py, &kind.name)?;
        let view = py.detach(|| guard(|| self.core.view(rank)));
        let view = view.map_err(|error| exception(py, &error))?;
        if view.is_on_device() {
            let array = DeviceArray {
                view: Some(view),
                shape: kind.shape,
                dtype: dtype.unbind(),
            };
            return Ok(Bound::new(py, array)?.into_any());
        }
        let bytes = arrays::numpy(py)?.call_method1("asarray", (Bound::new(py, Mapped(view))?,))?;
        let elements = bytes.call_method1("view", (dtype,))?;
        elements.call_method1("reshape", (PyTuple::new(py, kind.shape)?,))
    }

    /// End the use of this rank's array by others, and of theirs by this one.
    ///
    /// It waits for nothing that is under way: call `fence` before, on all ranks. The end of a ``with``
    /// block does.
    fn close(&self, py: Python<'_>) {
        // The array is kept for as long as it is in use.
        let _ = py.detach(|| self.core.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        let is_well = exception.iter().next().is_none_or(|kind| kind.is_none());
        let fenced = match is_well && !self.core.is_closed() {
            true => self.fence(py),
            false => Ok(()),
        };
        self.close(py);
        fenced
    }

    fn __repr__(&self) -> String {
        format!("<unisono.Window rank {} of {}>", self.rank(), self.size())
    }
}

impl Drop for DeviceArray {
    fn drop(&mut self) {
        let view = self.view.take();
        // To unmap it may wait for the device, and with it for other threads.
        let _ = Python::try_attach(|py| py.detach(|| drop(view)));
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let core = Arc::clone(&self.core);
        // It may wait for a rank that writes. Not while the interpreter goes away.
        let _ = Python::try_attach(|py| py.detach(|| core.close()));
    }
}

/// Waits for what is under way on the arrays of an operation. Whether they lie on a device.
fn await_stream(py: Python<'_>, how: &How) -> PyResult<bool> {
    let Some(stream) = how.stream(py)? else {
        return Ok(false);
    };
    // By this thread, since one of the streams is each thread's own.
    while !cuda::is_idle(stream).map_err(|error| exception(py, &error))? {
        py.detach(|| std::thread::sleep(LOOK_PAUSE));
        py.check_signals()?;
    }
    Ok(true)
}

/// Mapped memory of another rank on a CUDA device, as an array for libraries that read
/// ``__cuda_array_interface__``: CuPy, Numba, torch.
#[pyclass(frozen, module = "unisono", name = "_DeviceArray")]
struct DeviceArray {
    /// Until it is dropped.
    view: Option<View>,
    shape: Vec<usize>,
    dtype: Py<PyAny>,
}

#[pymethods]
impl DeviceArray {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn dtype(&self, py: Python<'_>) -> Py<PyAny> {
        self.dtype.clone_ref(py)
    }

    /// No stream has anything under way on it that its rank has not waited for.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let description = PyDict::new(py);
        description.set_item("version", 3)?;
        description.set_item("typestr", self.dtype.bind(py).getattr("str")?)?;
        description.set_item("shape", self.shape(py)?)?;
        let view = self.view.as_ref();
        let address = view.map_or(0, |view| view.start().as_ptr().addr());
        description.set_item("data", (address, false))?;
        description.set_item("strides", py.None())?;
        description.set_item("stream", py.None())?;
        Ok(description)
    }
}

/// Mapped memory of another rank, which lives as long as the arrays over it.
#[pyclass(frozen, module = "unisono", name = "_Mapped")]
struct Mapped(View);

#[pymethods]
impl Mapped {
    /// NumPy's description of the bytes, which `numpy.asarray` asks for.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let description = PyDict::new(py);
        description.set_item("version", 3)?;
        description.set_item("typestr", "|u1")?;
        description.set_item("shape", (self.0.len(),))?;
        description.set_item("data", (self.0.start().as_ptr().addr(), false))?;
        Ok(description)
    }
}
