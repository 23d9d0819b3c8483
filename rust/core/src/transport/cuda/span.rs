//! Bytes of users' own device memory that other processes of the host read and write where they lie.
//!
//! The driver exports whole allocations, and a user's bytes lie somewhere in one: in a block that a framework has cut from it.
//! So a [`Span`] has the handle of the allocation, and the place of the bytes in it. It travels to the peers by whatever way
//! there is, and each [maps](Mapped::open) it. The driver counts how often a process has mapped an allocation, which it maps
//! once. Inside the process that has it there is nothing to map, and a table leads to the memory: an address that a peer tells
//! is never used.
//!
//! A handle names a process by a number, which means another process in another PID namespace. So a span names the namespace,
//! and is mapped in that one alone. That its owner is on the same host at all is for the caller to know.

use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Weak};

use super::driver::{
    Device, Driver, Handle, Imported, Kind, allocation, check_buffer, device_if_in_use, export,
    look_again, only_on_device, place,
};
use super::window::{Nonce, nonce, process};
use crate::error::{Error, Result};
use crate::locks::Mutex;

/// Bytes of a span as it travels, before its handle or the reason that it has none.
const HEAD: usize = 16 + 16 + 16 + 8 + 8 + 8;

/// The memory that spans of this process stand for, by their nonces.
static OWN: Mutex<Vec<(Nonce, Weak<Exposed>)>> = Mutex::new(Vec::new());

/// Device memory, as peers find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    process: Nonce,
    nonce: Nonce,
    /// The device that it lies on ([`Device::uuid`]).
    device: [u8; 16],
    /// The PID namespace of the process.
    namespace: u64,
    /// Where it begins in its allocation.
    offset: u64,
    bytes: u64,
    /// The handle of the allocation, or why there is none.
    handle: Result<Handle, String>,
}

/// Device memory of this process that ranks of this process can map by its span, as long as this lives.
#[derive(Debug)]
pub struct Exposed {
    span: Span,
    address: u64,
}

/// A span, as this process knows it.
#[derive(Debug)]
pub struct Mapped {
    address: u64,
    /// Keeps it mapped.
    _import: Option<Imported>,
}

impl Exposed {
    /// `bytes` bytes from `address` on, if they lie [on a device](device_of). It is no error here that the driver does not
    /// export them: then only ranks of this process can map them.
    ///
    /// # Errors
    /// As [`device_of`]; `System` when the system has no random numbers.
    pub fn find(address: usize, bytes: usize) -> Result<Option<Arc<Self>>> {
        let Some(device) = device_of(address, bytes)? else {
            return Ok(None);
        };
        let address = address as u64;
        let (offset, handle) = match exported(device, address, bytes) {
            Ok((offset, handle)) => (offset, Ok(handle)),
            Err(error) => (0, Err(error.message)),
        };
        let span = Span {
            process: process()?,
            nonce: nonce()?,
            device: device.uuid(),
            namespace: namespace(),
            offset,
            bytes: bytes as u64,
            handle,
        };
        let nonce = span.nonce;
        let exposed = Arc::new(Self { span, address });
        let mut own = OWN.lock();
        own.retain(|(_, exposed)| exposed.strong_count() > 0);
        own.push((nonce, Arc::downgrade(&exposed)));
        Ok(Some(exposed))
    }

    /// The span for the peers.
    pub fn span(&self) -> &Span {
        &self.span
    }
}

impl Span {
    /// How many bytes it has.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    #[cfg(test)]
    pub(crate) fn sample() -> Self {
        Self {
            process: [1; 16],
            nonce: [4; 16],
            device: [2; 16],
            namespace: 3,
            offset: 5,
            bytes: 6,
            handle: Ok([0; 64]),
        }
    }

    /// Whether it is memory of this process, which is not mapped.
    ///
    /// # Errors
    /// `System` when the system has no random numbers.
    pub fn is_of_this_process(&self) -> Result<bool> {
        Ok(self.process == process()?)
    }

    /// Why other processes cannot map it, if its driver does not export it.
    pub fn reason(&self) -> Option<&str> {
        self.handle.as_ref().err().map(String::as_str)
    }

    /// The device on which it lies, if this process sees it.
    ///
    /// # Errors
    /// As [`Driver::load`] and [`Driver::device_with`]; `Unsupported` where this process does not see it.
    pub fn device(&self) -> Result<&'static Device> {
        let found = Driver::load()?.device_with(self.device)?;
        found.ok_or_else(|| {
            Error::unsupported(
                "it lies on a device that this process does not see (CUDA_VISIBLE_DEVICES)",
            )
        })
    }

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let numbers = [self.namespace, self.offset, self.bytes];
        let mut out = [self.process, self.nonce, self.device].concat();
        out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        match &self.handle {
            Ok(handle) => out.extend([&[1], handle.as_slice()].concat()),
            Err(reason) => out.extend([&[0], reason.as_bytes()].concat()),
        }
        out
    }

    /// The span that [`Span::encode`] wrote; `None` for other bytes. A handle that is none is found out when it is mapped.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
        let number = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight"));
        let name = |at: usize| head[at..at + 16].try_into().expect("sixteen");
        let handle = match rest {
            [1, handle @ ..] => Ok(Handle::try_from(handle).ok()?),
            [0, reason @ ..] => Err(str::from_utf8(reason).ok()?.to_owned()),
            _ => return None,
        };
        let (offset, bytes) = (number(56), number(64));
        offset.checked_add(bytes)?;
        Some(Self {
            process: name(0),
            nonce: name(16),
            device: name(32),
            namespace: number(48),
            offset,
            bytes,
            handle,
        })
    }
}

/// The device on which `bytes` bytes from `address` on lie, if the host cannot read them. Does not load the driver for that.
///
/// # Errors
/// `InvalidArgument` for bytes that lie there in part; `System` when the driver cannot answer.
pub fn device_of(address: usize, bytes: usize) -> Result<Option<&'static Device>> {
    if bytes == 0 {
        return Ok(None);
    }
    look_again();
    let found = only_on_device(address as u64).or_else(|| device_if_in_use(address));
    let Some(device) = found.map(Device::of).transpose()? else {
        return Ok(None);
    };
    check_buffer(device, address as u64, bytes, "memory")?;
    Ok(Some(device))
}

/// Where the bytes are in their allocation, and its handle.
fn exported(device: &'static Device, address: u64, bytes: usize) -> Result<(u64, Handle)> {
    let (base, whole) = allocation(device, address)?;
    let offset = address - base;
    if offset + bytes as u64 > whole as u64 {
        let what = "it is not of one allocation";
        return Err(Error::unsupported(what));
    }
    let handle = export(device, base, whole).map_err(|error| Error {
        message: format!(
            "{}; only memory of cuMemAlloc and cudaMalloc can be shared, which is not that of pools and of expandable segments",
            error.message
        ),
        ..error
    })?;
    Ok((offset, handle))
}

impl Mapped {
    /// Maps the span for `device`.
    ///
    /// # Errors
    /// `Unsupported` when its process does not export it, sees other processes than this one or has a device that `device`
    /// does not reach; `System` when the driver refuses.
    pub fn open(device: &'static Device, span: &Span) -> Result<Self> {
        if span.process == process()? {
            return Self::here(device, span);
        }
        let handle = span.handle.as_ref().map_err(Error::unsupported)?;
        if span.namespace != namespace() || span.namespace == 0 {
            return Err(Error::unsupported(
                "processes in containers need the same PID and IPC namespaces for this",
            ));
        }
        let end = span.offset + span.bytes;
        let import = Imported::open(device, handle, end as usize)?;
        check_end(device, import.address(), end)?;
        Ok(Self {
            address: import.address() + span.offset,
            _import: Some(import),
        })
    }

    fn here(device: &'static Device, span: &Span) -> Result<Self> {
        let own = OWN.lock();
        let found = own.iter().find(|(nonce, _)| *nonce == span.nonce);
        let exposed = found
            .and_then(|(_, exposed)| exposed.upgrade())
            .filter(|exposed| exposed.span == *span)
            .ok_or_else(|| Error::internal("memory of this process is gone"))?;
        drop(own);
        device.enable_peer(span.device()?)?;
        Ok(Self {
            address: exposed.address,
            _import: None,
        })
    }

    /// The first byte, as this process knows it.
    pub fn address(&self) -> u64 {
        self.address
    }
}

/// Refuses an imported allocation that ends before byte `end`.
fn check_end(device: &'static Device, start: u64, end: u64) -> Result<()> {
    let is_inside = match allocation(device, start) {
        Ok((base, whole)) => end <= whole as u64 && base == start,
        // A driver may not say how long memory of others is.
        Err(_) => end == 0 || place(device, start + (end - 1))?.kind == Kind::Device,
    };
    match is_inside {
        true => Ok(()),
        false => Err(Error::unsupported(
            "the driver mapped less memory than the other process has told of",
        )),
    }
}

/// The number of this process's PID namespace; 0 where the system does not tell.
fn namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |of| of.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_travels_and_nothing_else_does() {
        let span = Span::sample();
        let refused = Span {
            handle: Err("x".repeat(64)),
            ..span.clone()
        };
        for span in [span.clone(), refused] {
            assert_eq!(Span::decode(&span.encode()).as_ref(), Some(&span));
        }
        let bytes = span.encode();
        assert!(Span::decode(&bytes[..bytes.len() - 1]).is_none());
        assert!(Span::decode(&[&bytes[..], &[0]].concat()).is_none());
        let beyond = Span {
            offset: u64::MAX - 5,
            ..span
        };
        assert!(Span::decode(&beyond.encode()).is_none());
    }
}
