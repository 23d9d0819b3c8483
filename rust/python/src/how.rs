//! How an operation is to be carried out, as its keywords and its arrays say: whether the caller waits, how long it may
//! take, and where its arrays lie.
//!
//! All arrays of an operation lie in the memory of the host, or all on one CUDA device. On a device the operation happens
//! in the order of one stream: the one that was given, else the first array's own, else the legacy default stream.

use std::cell::Cell;
use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBool;
use unisono::cuda;
use unisono::types::DeviceStream;

use crate::errors::{exception, invalid};
use crate::layout::Argument;
use crate::running::Seconds;

/// The keywords of an operation, and what its arrays add to them.
pub(crate) struct How {
    pub(crate) operation: &'static str,
    pub(crate) asynchronously: bool,
    pub(crate) timeout: Option<Duration>,
    given: Option<Stream>,
    place: Cell<Option<(Place, &'static str)>>,
}

/// Where the arrays of an operation lie.
#[derive(Clone, Copy)]
enum Place {
    Host,
    Device {
        /// None as long as all arrays are empty and do not say.
        device: Option<u32>,
        stream: Stream,
    },
}

impl How {
    pub(crate) fn new(
        operation: &'static str,
        asynchronously: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> Self {
        Self {
            operation,
            asynchronously,
            timeout: timeout.map(|Seconds(limit)| limit),
            given: stream,
            place: Cell::new(None),
        }
    }

    /// Its argument `name`.
    pub(crate) const fn argument(&self, name: &'static str) -> Argument {
        Argument {
            operation: self.operation,
            name,
        }
    }

    /// Takes an array in the memory of the host.
    pub(crate) fn admit_host(&self, py: Python<'_>, argument: Argument) -> PyResult<()> {
        if self.given.is_some() {
            return Err(argument.invalid(
                py,
                "is in the memory of the host, where no stream matters; leave stream= out",
            ));
        }
        match self.place.get() {
            Some((Place::Device { device, .. }, other)) => {
                Err(argument.invalid(py, apart("the host", other, &named(device))))
            }
            _ => {
                self.place.set(Some((Place::Host, argument.name)));
                Ok(())
            }
        }
    }

    /// Takes an array on a CUDA device, with `own` as its stream. Returns the stream of the operation.
    pub(crate) fn admit_device(
        &self,
        py: Python<'_>,
        argument: Argument,
        (device, own): (Option<u32>, Option<Stream>),
    ) -> PyResult<Stream> {
        let (known, stream, first) = match self.place.get() {
            Some((Place::Host, other)) => {
                return Err(argument.invalid(py, apart(&named(device), other, "the host")));
            }
            Some((
                Place::Device {
                    device: known,
                    stream,
                },
                other,
            )) => {
                if let (Some(known), Some(device)) = (known, device)
                    && known != device
                {
                    let (here, there) = (named(Some(device)), named(Some(known)));
                    return Err(argument.invalid(py, apart(&here, other, &there)));
                }
                (known, stream, other)
            }
            None => {
                let stream = self.given.or(own).unwrap_or(Stream::LEGACY);
                (None, stream, argument.name)
            }
        };
        let device = known.or(device);
        self.place
            .set(Some((Place::Device { device, stream }, first)));
        Ok(stream)
    }

    /// The stream in whose order the operation happens; None in the memory of the host.
    pub(crate) fn stream(&self, py: Python<'_>) -> PyResult<Option<DeviceStream>> {
        let (device, stream) = match (self.place.get(), self.given) {
            (Some((Place::Device { device, stream }, _)), _) => (device, stream),
            (None, Some(stream)) => (None, stream),
            _ => return Ok(None),
        };
        let device = match device {
            Some(device) => device,
            None => cuda::device_of_stream(stream.0).map_err(|error| exception(py, &error))?,
        };
        let stream = stream.0;
        Ok(Some(DeviceStream { device, stream }))
    }
}

fn apart(here: &str, other: &str, there: &str) -> String {
    format!(
        "is on {here}, but {other} on {there}; the arrays of an operation must be on one device, or all on the host"
    )
}

fn named(device: Option<u32>) -> String {
    match device {
        Some(device) => format!("CUDA device {device}"),
        None => "a CUDA device".to_owned(),
    }
}

/// A stream of a CUDA device: a `CUstream` as a number, in which 0 stands for the legacy default stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream(pub(crate) usize);

impl Stream {
    pub(crate) const LEGACY: Self = Self(0);

    /// CUDA's `CU_STREAM_LEGACY` is the same stream as 0.
    pub(crate) const fn of(handle: usize) -> Self {
        match handle {
            1 => Self::LEGACY,
            handle => Self(handle),
        }
    }

    /// As `__dlpack__` takes it, for which 0 is ambiguous.
    pub(crate) const fn for_dlpack(self) -> usize {
        match self {
            Self::LEGACY => 1,
            Self(handle) => handle,
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Stream {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let number = |value: &Bound<'py, PyAny>| -> PyResult<Self> {
            let handle: i64 = value.extract()?;
            usize::try_from(handle).map(Self::of).map_err(|_| {
                invalid(
                    py,
                    format!("the stream is {handle}, but must be the address of a CUstream"),
                )
            })
        };
        if !object.is_instance_of::<PyBool>() && object.extract::<i64>().is_ok() {
            return number(&object);
        }
        if let Some(protocol) = object.getattr_opt(intern!(py, "__cuda_stream__"))? {
            // Its first form was an attribute.
            let pair = match protocol.is_callable() {
                true => protocol.call0()?,
                false => protocol,
            };
            let (version, handle): (i64, Bound<'py, PyAny>) = pair.extract()?;
            if version != 0 {
                return Err(invalid(
                    py,
                    format!("the stream speaks version {version} of __cuda_stream__, not 0"),
                ));
            }
            return number(&handle);
        }
        for name in [intern!(py, "cuda_stream"), intern!(py, "ptr")] {
            if let Some(handle) = object.getattr_opt(name)? {
                return number(&handle);
            }
        }
        Err(PyTypeError::new_err(format!(
            "a stream is the address of a CUstream or an object with __cuda_stream__, ptr (CuPy) or cuda_stream \
             (torch), not a {}",
            object.get_type().name()?
        )))
    }
}
