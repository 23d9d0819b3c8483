//! The collectives without a root.

use std::ffi::c_void;

use unisono::error::{Error, Result};
use unisono::types::DataType;
use unisono::{Request, Sizes};

use crate::error::Status;
use crate::joined::Communicator;
use crate::joined::on;
use crate::run::collective;
use crate::types::{Buffer, Checked, DType, Op, Options, list};
use crate::work::Work;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_all_reduce(
    comm: *mut Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    op: Op,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        // SAFETY: here and in all functions of this file, addresses are what the header asks for.
        let options = unsafe { Checked::new(options)? };
        let (dtype, op) = (dtype.check()?, options.operator(op)?);
        let target = options.buffer("all_reduce: output", output, count, dtype)?;
        let source = match input == output.cast_const() {
            true => None,
            false => Some(options.buffer("all_reduce: input", input, count, dtype)?),
        };
        collective(joined, &options, work, || {
            Request::all_reduce(dtype, op, source.map(Buffer::memory), target.memory())
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_scan(
    comm: *mut Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    op: Op,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        // SAFETY: as in `unisono_all_reduce`.
        let options = unsafe { Checked::new(options)? };
        let (dtype, op) = (dtype.check()?, options.operator(op)?);
        let target = options.buffer("scan: output", output, count, dtype)?;
        let source = match input == output.cast_const() {
            true => None,
            false => Some(options.buffer("scan: input", input, count, dtype)?),
        };
        collective(joined, &options, work, || {
            Request::scan(dtype, op, source.map(Buffer::memory), target.memory())
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_exscan(
    comm: *mut Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    op: Op,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        // SAFETY: as in `unisono_all_reduce`.
        let options = unsafe { Checked::new(options)? };
        let (dtype, op) = (dtype.check()?, options.operator(op)?);
        // Rank 0 gets nothing.
        let (source, target) = match (joined.comm.rank(), input == output.cast_const()) {
            (0, _) => (
                Some(options.buffer("exscan: input", input, count, dtype)?),
                None,
            ),
            (_, true) => (
                None,
                Some(options.buffer("exscan: output", output, count, dtype)?),
            ),
            _ => {
                let source = options.buffer("exscan: input", input, count, dtype)?;
                let target = options.buffer("exscan: output", output, count, dtype)?;
                (Some(source), Some(target))
            }
        };
        collective(joined, &options, work, || {
            let target = target.map(Buffer::memory);
            Request::exscan(dtype, op, source.map(Buffer::memory), target)
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_all_gather(
    comm: *mut Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        // SAFETY: as in `unisono_all_reduce`.
        let options = unsafe { Checked::new(options)? };
        let dtype = dtype.check()?;
        let whole = times("all_gather", count, joined.comm.world_size())?;
        let before = count * joined.comm.rank();
        let target = options.buffer("all_gather: output", output, whole, dtype)?;
        let source = match is_block(input, output, before, dtype) && count > 0 {
            true => None,
            false => Some(options.buffer("all_gather: input", input, count, dtype)?),
        };
        collective(joined, &options, work, || {
            Request::all_gather(
                dtype,
                source.map(Buffer::memory),
                target.memory(),
                Sizes::Even(count),
            )
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_all_gather_v(
    comm: *mut Communicator,
    input: *const c_void,
    output: *mut c_void,
    counts: *const usize,
    dtype: DType,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        let (rank, world) = (joined.comm.rank(), joined.comm.world_size());
        // SAFETY: as in `unisono_all_reduce`.
        let options = unsafe { Checked::new(options)? };
        let dtype = dtype.check()?;
        // SAFETY: as above.
        let counts = unsafe { list("all_gather_v: counts", counts, world)? };
        let whole = sum("all_gather_v: counts", counts)?;
        let before = counts[..rank].iter().sum();
        let target = options.buffer("all_gather_v: output", output, whole, dtype)?;
        let source = match is_block(input, output, before, dtype) && counts[rank] > 0 {
            true => None,
            false => Some(options.buffer("all_gather_v: input", input, counts[rank], dtype)?),
        };
        let sizes = Sizes::PerRank(counts.to_vec());
        collective(joined, &options, work, || {
            Request::all_gather(dtype, source.map(Buffer::memory), target.memory(), sizes)
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_reduce_scatter(
    comm: *mut Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    op: Op,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        // SAFETY: as in `unisono_all_reduce`.
        let options = unsafe { Checked::new(options)? };
        let (dtype, op) = (dtype.check()?, options.operator(op)?);
        let whole = times("reduce_scatter", count, joined.comm.world_size())?;
        let source = options.buffer("reduce_scatter: input", input, whole, dtype)?;
        let target = options.buffer("reduce_scatter: output", output, count, dtype)?;
        collective(joined, &options, work, || {
            Request::reduce_scatter(
                dtype,
                op,
                source.memory(),
                target.memory(),
                Sizes::Even(count),
            )
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_reduce_scatter_v(
    comm: *mut Communicator,
    input: *const c_void,
    output: *mut c_void,
    counts: *const usize,
    dtype: DType,
    op: Op,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        let (rank, world) = (joined.comm.rank(), joined.comm.world_size());
        // SAFETY: as in `unisono_all_reduce`.
        let options = unsafe { Checked::new(options)? };
        let (dtype, op) = (dtype.check()?, options.operator(op)?);
        // SAFETY: as above.
        let counts = unsafe { list("reduce_scatter_v: counts", counts, world)? };
        let whole = sum("reduce_scatter_v: counts", counts)?;
        let source = options.buffer("reduce_scatter_v: input", input, whole, dtype)?;
        let target = options.buffer("reduce_scatter_v: output", output, counts[rank], dtype)?;
        let sizes = Sizes::PerRank(counts.to_vec());
        collective(joined, &options, work, || {
            Request::reduce_scatter(dtype, op, source.memory(), target.memory(), sizes)
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_all_to_all(
    comm: *mut Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        // SAFETY: as in `unisono_all_reduce`.
        let options = unsafe { Checked::new(options)? };
        let dtype = dtype.check()?;
        let whole = times("all_to_all", count, joined.comm.world_size())?;
        let source = options.buffer("all_to_all: input", input, whole, dtype)?;
        let target = options.buffer("all_to_all: output", output, whole, dtype)?;
        collective(joined, &options, work, || {
            Request::all_to_all(dtype, source.memory(), target.memory(), Sizes::Even(count))
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_all_to_all_v(
    comm: *mut Communicator,
    input: *const c_void,
    send_counts: *const usize,
    output: *mut c_void,
    receive_counts: *const usize,
    dtype: DType,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        let world = joined.comm.world_size();
        // SAFETY: as in `unisono_all_reduce`.
        let options = unsafe { Checked::new(options)? };
        let dtype = dtype.check()?;
        // SAFETY: as above.
        let send = unsafe { list("all_to_all_v: send_counts", send_counts, world)? };
        // SAFETY: as above.
        let recv = unsafe { list("all_to_all_v: receive_counts", receive_counts, world)? };
        let (sent, received) = (
            sum("all_to_all_v: send_counts", send)?,
            sum("all_to_all_v: receive_counts", recv)?,
        );
        let source = options.buffer("all_to_all_v: input", input, sent, dtype)?;
        let target = options.buffer("all_to_all_v: output", output, received, dtype)?;
        let sizes = Sizes::PerPair {
            send: send.to_vec(),
            recv: recv.to_vec(),
        };
        collective(joined, &options, work, || {
            Request::all_to_all(dtype, source.memory(), target.memory(), sizes)
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_barrier(
    comm: *mut Communicator,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        // SAFETY: as in `unisono_all_reduce`.
        let options = unsafe { Checked::new(options)? };
        collective(joined, &options, work, Request::barrier)
    })
}

/// `count` elements for each of `world` ranks.
#[inline]
pub(crate) fn times(name: &str, count: usize, world: usize) -> Result<usize> {
    count.checked_mul(world).ok_or_else(|| {
        Error::invalid(format!(
            "{name}: {count} elements for each of {world} ranks are too many"
        ))
    })
}

/// The elements of all ranks.
pub(crate) fn sum(name: &str, counts: &[usize]) -> Result<usize> {
    counts
        .iter()
        .try_fold(0_usize, |sum, count| sum.checked_add(*count))
        .ok_or_else(|| Error::invalid(format!("{name} add up to too much")))
}

/// Whether `input` is what lies `before` elements into `output`.
#[inline]
fn is_block(input: *const c_void, output: *const c_void, before: usize, dtype: DataType) -> bool {
    let offset = before.wrapping_mul(dtype.size());
    input.addr() == output.addr().wrapping_add(offset)
}
