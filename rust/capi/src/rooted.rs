//! The collectives with a root.

use std::ffi::c_void;

use unisono::{Request, Sizes};

use crate::collectives::{sum, times};
use crate::error::Status;
use crate::joined::Communicator;
use crate::joined::on;
use crate::run::collective;
use crate::types::{Buffer, Checked, DType, Op, Options, list, rank};
use crate::work::Work;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_reduce(
    comm: *mut Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    op: Op,
    root: i32,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        // SAFETY: here and in all functions of this file, addresses are what the header asks for.
        let options = unsafe { Checked::new(options)? };
        let (dtype, op) = (dtype.check()?, options.operator(op)?);
        let root = rank("reduce: root", root, joined.comm.world_size())?;
        let is_root = root == joined.comm.rank();
        let target = match is_root {
            true => Some(options.buffer("reduce: output", output, count, dtype)?),
            false => None,
        };
        let source = match is_root && input == output.cast_const() {
            true => None,
            false => Some(options.buffer("reduce: input", input, count, dtype)?),
        };
        collective(joined, &options, work, || {
            Request::reduce(
                dtype,
                op,
                root,
                source.map(Buffer::memory),
                target.map(Buffer::memory),
            )
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_broadcast(
    comm: *mut Communicator,
    buffer: *mut c_void,
    count: usize,
    dtype: DType,
    root: i32,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        // SAFETY: as in `unisono_reduce`.
        let options = unsafe { Checked::new(options)? };
        let dtype = dtype.check()?;
        let root = rank("broadcast: root", root, joined.comm.world_size())?;
        let whole = options.buffer("broadcast: buffer", buffer, count, dtype)?;
        collective(joined, &options, work, || {
            Request::broadcast(dtype, root, whole.memory())
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_gather(
    comm: *mut Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    root: i32,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        let world = joined.comm.world_size();
        // SAFETY: as in `unisono_reduce`.
        let options = unsafe { Checked::new(options)? };
        let dtype = dtype.check()?;
        let root = rank("gather: root", root, world)?;
        let whole = times("gather", count, world)?;
        let source = options.buffer("gather: input", input, count, dtype)?;
        let target = match root == joined.comm.rank() {
            true => Some(options.buffer("gather: output", output, whole, dtype)?),
            false => None,
        };
        collective(joined, &options, work, || {
            Request::gather(
                dtype,
                root,
                source.memory(),
                target.map(Buffer::memory),
                Sizes::Even(count),
            )
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_gather_v(
    comm: *mut Communicator,
    input: *const c_void,
    count: usize,
    output: *mut c_void,
    counts: *const usize,
    dtype: DType,
    root: i32,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        let (own, world) = (joined.comm.rank(), joined.comm.world_size());
        // SAFETY: as in `unisono_reduce`.
        let options = unsafe { Checked::new(options)? };
        let dtype = dtype.check()?;
        let root = rank("gather_v: root", root, world)?;
        let source = options.buffer("gather_v: input", input, count, dtype)?;
        // SAFETY: as above.
        let given = unsafe { per_rank("gather_v", counts, count, (own == root, own, world))? };
        let target = match own == root {
            true => {
                let whole = sum("gather_v: counts", &given)?;
                Some(options.buffer("gather_v: output", output, whole, dtype)?)
            }
            false => None,
        };
        collective(joined, &options, work, || {
            Request::gather(
                dtype,
                root,
                source.memory(),
                target.map(Buffer::memory),
                Sizes::PerRank(given),
            )
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_scatter(
    comm: *mut Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    root: i32,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        let world = joined.comm.world_size();
        // SAFETY: as in `unisono_reduce`.
        let options = unsafe { Checked::new(options)? };
        let dtype = dtype.check()?;
        let root = rank("scatter: root", root, world)?;
        let whole = times("scatter", count, world)?;
        let source: Option<Buffer> = match root == joined.comm.rank() {
            true => Some(options.buffer("scatter: input", input, whole, dtype)?),
            false => None,
        };
        let target = options.buffer("scatter: output", output, count, dtype)?;
        collective(joined, &options, work, || {
            Request::scatter(
                dtype,
                root,
                source.map(Buffer::memory),
                target.memory(),
                Sizes::Even(count),
            )
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_scatter_v(
    comm: *mut Communicator,
    input: *const c_void,
    counts: *const usize,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    root: i32,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        let (own, world) = (joined.comm.rank(), joined.comm.world_size());
        // SAFETY: as in `unisono_reduce`.
        let options = unsafe { Checked::new(options)? };
        let dtype = dtype.check()?;
        let root = rank("scatter_v: root", root, world)?;
        let target = options.buffer("scatter_v: output", output, count, dtype)?;
        // SAFETY: as above.
        let given = unsafe { per_rank("scatter_v", counts, count, (own == root, own, world))? };
        let source = match own == root {
            true => {
                let whole = sum("scatter_v: counts", &given)?;
                Some(options.buffer("scatter_v: input", input, whole, dtype)?)
            }
            false => None,
        };
        collective(joined, &options, work, || {
            Request::scatter(
                dtype,
                root,
                source.map(Buffer::memory),
                target.memory(),
                Sizes::PerRank(given),
            )
        })
    })
}

/// The counts of all ranks on the root, and this rank's own among zeros elsewhere.
///
/// # Safety
/// On the root there are `world` counts.
unsafe fn per_rank(
    name: &str,
    counts: *const usize,
    own_count: usize,
    (is_root, own, world): (bool, usize, usize),
) -> unisono::error::Result<Vec<usize>> {
    if !is_root {
        let mut given = vec![0; world];
        given[own] = own_count;
        return Ok(given);
    }
    // SAFETY: as the caller promises.
    let given = unsafe { list(&format!("{name}: counts"), counts, world)? };
    if given[own] != own_count {
        return Err(unisono::error::Error::invalid(format!(
            "{name}: the count is {own_count}, but counts[{own}], which is this rank's, is {}",
            given[own]
        )));
    }
    Ok(given.to_vec())
}
