//! Work on memory, collected until the order demands that it be enqueued: runs of bytes, few of them one by one, many in
//! one launch.

use crate::buffer::Memory;
use crate::engine::Request;
use crate::error::{Error, Result};
use crate::plan::{Buffer, Span};
use crate::transport::cuda::driver::{Device, Stream, check_buffer};
use crate::transport::cuda::kernels::{self, Guard, Segment};

/// Up to this number of copies are enqueued one by one.
const MOST_SINGLE_COPIES: usize = 2;

/// Pieces of a buffer that are looked at, from its beginning and its end.
const LOOKED_AT: usize = 8;

/// Where a copy begins to read: at the address `at`; or, if `base` is not 0, `at` bytes after the address that the device's
/// memory holds at `base`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) at: u64,
    pub(super) base: u64,
}

impl Origin {
    pub(super) fn at(at: u64) -> Self {
        Self { at, base: 0 }
    }

    fn after(self, bytes: usize) -> Self {
        Self {
            at: self.at.wrapping_add(bytes as u64),
            ..self
        }
    }
}

/// Copies to be enqueued together: none reads or writes what another one writes.
pub(super) struct Copies {
    segments: Vec<Segment>,
    /// Data that peers have already written to its place.
    given: Vec<Segment>,
    guard: Guard,
    /// Some of them have to do with peers.
    is_guarded: bool,
}

impl Copies {
    /// None yet. Those that have to do with peers look at `guard`.
    pub(super) fn new(guard: Guard) -> Self {
        Self {
            segments: Vec::new(),
            given: Vec::new(),
            guard,
            is_guarded: false,
        }
    }

    /// From here on they read what a peer has written, or write what one reads, until they are enqueued: all of that looks at
    /// the guard.
    pub(super) fn guarded(&mut self) -> &mut Self {
        self.is_guarded = true;
        self
    }

    /// Those that have to do with peers look at `guard` from now on.
    pub(super) fn guard_by(&mut self, guard: Guard) {
        self.guard = guard;
    }

    /// `bytes` bytes from `from` to `to`.
    pub(super) fn push(&mut self, from: Origin, to: u64, bytes: usize) {
        let segment = Segment {
            base: from.base,
            ..Segment::new(from.at, to, bytes as u64)
        };
        match bytes > 0 {
            true if from != Origin::at(to) => self.segments.push(segment),
            true if self.is_guarded => self.given.push(Segment::new(0, to, bytes as u64)),
            _ => {}
        }
    }

    /// `bytes` bytes of `memory` from `offset` on, to `to`.
    pub(super) fn gather(&mut self, memory: &Memory, offset: usize, bytes: usize, to: u64) {
        for_each_run(memory, offset, bytes, |done, address, run| {
            self.push(Origin::at(address), to + done as u64, run);
        });
    }

    /// `bytes` bytes from `from`, to `memory` from `offset` on.
    pub(super) fn scatter(&mut self, from: Origin, memory: &Memory, offset: usize, bytes: usize) {
        for_each_run(memory, offset, bytes, |done, address, run| {
            self.push(from.after(done), address, run);
        });
    }

    /// Between two places of the caller's memory.
    pub(super) fn between(
        &mut self,
        (from, from_offset): (&Memory, usize),
        (to, to_offset): (&Memory, usize),
        bytes: usize,
    ) {
        for_each_run(from, from_offset, bytes, |done, address, run| {
            self.scatter(Origin::at(address), to, to_offset + done, run);
        });
    }

    /// Enqueues copies from memory of this process's host, by an engine for copies where they are few.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn flush_by_engine(&mut self, stream: &Stream) -> Result<()> {
        if self.segments.len() > MOST_SINGLE_COPIES {
            return self.flush(stream);
        }
        self.segments.drain(..).try_for_each(|segment| {
            stream.copy_from_host(segment.to, segment.from, segment.bytes as usize)
        })
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.given.is_empty()
    }

    /// Enqueues them.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn flush(&mut self, stream: &Stream) -> Result<()> {
        let is_guarded = std::mem::take(&mut self.is_guarded);
        // The driver's own copies look at nothing.
        if self.segments.len() <= MOST_SINGLE_COPIES
            && !is_guarded
            && self.segments.iter().all(|segment| segment.base == 0)
        {
            for segment in self.segments.drain(..) {
                stream.copy(segment.to, segment.from, segment.bytes as usize)?;
            }
            return Ok(());
        }
        let guard = match is_guarded {
            true => self.guard,
            false => Guard::NONE,
        };
        let copied = kernels::copy(stream, &self.segments, guard)
            .and_then(|()| kernels::poison(stream, &self.given, guard));
        self.segments.clear();
        self.given.clear();
        copied
    }
}

/// Calls `visit` with each contiguous run of `bytes` bytes from `offset` on: how much came before it, its address, its
/// length.
pub(super) fn for_each_run(
    memory: &Memory,
    offset: usize,
    bytes: usize,
    mut visit: impl FnMut(usize, u64, usize),
) {
    let mut done = 0;
    while done < bytes {
        let (address, run) = memory.place(offset + done, bytes - done);
        visit(done, address as u64, run);
        done += run;
    }
}

/// As [`for_each_run`], with a visitor that may fail.
pub(super) fn try_each_run(
    memory: &Memory,
    offset: usize,
    bytes: usize,
    mut visit: impl FnMut(usize, u64, usize) -> Result<()>,
) -> Result<()> {
    let mut result = Ok(());
    for_each_run(memory, offset, bytes, |done, address, run| {
        if result.is_ok() {
            result = visit(done, address, run);
        }
    });
    result
}

/// The caller's memory that a span is of, and the span's place in it in bytes.
pub(super) fn locate(request: &Request, span: Span) -> Result<(&Memory, usize)> {
    let memory = match span.buffer {
        Buffer::Input => request.input.as_ref(),
        Buffer::Output => request.output.as_ref(),
        Buffer::Scratch | Buffer::Window { .. } => None,
    };
    let memory = memory.ok_or_else(|| {
        Error::internal(format!("{}: a plan for other buffers", request.collective))
    })?;
    Ok((memory, span.offset * request.dtype.size()))
}

/// Refuses memory that is not `device`'s, as far as the driver can tell.
///
/// # Errors
/// `InvalidArgument`, saying what it is instead.
pub(super) fn check_memory(device: &'static Device, memory: &Memory, what: &str) -> Result<()> {
    let mut runs = Vec::new();
    for_each_run(memory, 0, memory.len(), |_, address, run| {
        runs.push((address, run));
    });
    let skipped = runs.len().saturating_sub(LOOKED_AT);
    let looked_at = runs.iter().enumerate().filter(|(at, _)| {
        let first = LOOKED_AT / 2;
        *at < first || *at >= first + skipped
    });
    for (_, (address, run)) in looked_at {
        check_buffer(device, *address, *run, what)?;
    }
    Ok(())
}
