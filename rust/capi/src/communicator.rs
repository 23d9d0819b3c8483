//! Making a communicator, asking it, and leaving it.

use std::ffi::c_char;
use std::time::Duration;

use unisono::config::Config;
use unisono::error::{Error, Result};
use unisono::rendezvous::{MeetingPlace, launcher, unique_id};

use crate::config::{self, Settings};
use crate::error::{Status, output};
use crate::fence::{fence, fence_with};
pub use crate::joined::Communicator;
use crate::joined::{COMMUNICATORS, Joined, on, register};
use crate::log;
use crate::store::{self, StoreFunctions};
use crate::types::{LONGEST_WAIT, list, seconds, string};

/// `unisono_unique_id`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    pub bytes: [u8; unique_id::BYTES],
}

/// The color that stands for none.
pub const NO_COLOR: i64 = i64::MIN;

/// The settings of `config`, or of the environment.
pub(crate) fn settings(config: *const Settings) -> Result<Config> {
    let config = config::copy(config)?;
    log::start(&config);
    Ok(config)
}

/// A rank and a world size that C gives.
fn place(rank: i32, world_size: i32) -> Result<(usize, usize)> {
    match (usize::try_from(rank), usize::try_from(world_size)) {
        (Ok(rank), Ok(world)) if rank < world => Ok((rank, world)),
        _ => Err(Error::invalid(format!(
            "rank {rank} is out of range for a world size of {world_size}"
        ))),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_from_environment(
    config: *const Settings,
    comm: *mut *mut Communicator,
) -> Status {
    fence(|| {
        let place = output("comm", comm)?;
        let config = settings(config)?;
        let launch = launcher::detect()?;
        let seat = (launch.rank, launch.world);
        let comm = unisono::Communicator::meet(MeetingPlace::Launch(launch), seat, config)?;
        place.write(register(comm)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_from_url(
    url: *const c_char,
    rank: i32,
    world_size: i32,
    config: *const Settings,
    comm: *mut *mut Communicator,
) -> Status {
    fence(|| {
        let target = output("comm", comm)?;
        // SAFETY: the header asks for a text.
        let url = unsafe { string("url", url)? };
        let (rank, world) = place(rank, world_size)?;
        let config = settings(config)?;
        let url = MeetingPlace::Url(url.to_owned());
        let comm = unisono::Communicator::meet(url, (rank, world), config)?;
        target.write(register(comm)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_unique_id_create(
    config: *const Settings,
    id: *mut UniqueId,
) -> Status {
    fence(|| {
        let place = output("id", id)?;
        let id = unique_id::UniqueId::create(&settings(config)?)?;
        place.write(UniqueId {
            bytes: id.to_bytes(),
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_from_id(
    id: *const UniqueId,
    rank: i32,
    world_size: i32,
    config: *const Settings,
    comm: *mut *mut Communicator,
) -> Status {
    fence(|| {
        let target = output("comm", comm)?;
        if id.is_null() {
            return Err(Error::invalid("an id is needed, but NULL was given"));
        }
        // SAFETY: the header asks for an id.
        let id = unique_id::UniqueId::from_bytes(unsafe { (*id).bytes })?;
        let (rank, world) = place(rank, world_size)?;
        let config = settings(config)?;
        let comm = unisono::Communicator::meet(MeetingPlace::Id(id), (rank, world), config)?;
        target.write(register(comm)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_from_store(
    store: *const StoreFunctions,
    rank: i32,
    world_size: i32,
    config: *const Settings,
    comm: *mut *mut Communicator,
) -> Status {
    fence(|| {
        let target = output("comm", comm)?;
        // SAFETY: the header asks for a struct of the size that it says.
        let store = unsafe { store::Callbacks::new(store)? };
        let (rank, world) = place(rank, world_size)?;
        let config = settings(config)?;
        let comm = unisono::Communicator::join(&store, rank, world, config)?;
        target.write(register(comm)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_split(
    comm: *mut Communicator,
    color: i64,
    key: i64,
    part: *mut *mut Communicator,
) -> Status {
    on(comm, |joined| {
        let place = output("part", part)?;
        let color = (color != NO_COLOR).then_some(color);
        let part = match joined.comm.split(color, key)? {
            Some(part) => register(part)?,
            None => std::ptr::null_mut(),
        };
        place.write(part);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_shrink(
    comm: *mut Communicator,
    excluded: *const i32,
    excluded_count: usize,
    patience: f64,
    shrunk: *mut *mut Communicator,
) -> Status {
    // SAFETY: the header asks for as many ranks.
    on(comm, |joined| unsafe {
        let wish = (excluded, excluded_count, patience);
        left(
            joined,
            wish,
            ("shrunk", shrunk),
            unisono::Communicator::shrink,
        )
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_mask(
    comm: *mut Communicator,
    excluded: *const i32,
    excluded_count: usize,
    patience: f64,
    masked: *mut *mut Communicator,
) -> Status {
    // SAFETY: the header asks for as many ranks.
    on(comm, |joined| unsafe {
        let wish = (excluded, excluded_count, patience);
        left(
            joined,
            wish,
            ("masked", masked),
            unisono::Communicator::mask,
        )
    })
}

/// Writes the communicator of the ranks that are left, which `make` makes.
///
/// # Safety
/// There are as many excluded ranks.
unsafe fn left(
    joined: &Joined,
    (excluded, count, patience): (*const i32, usize, f64),
    (name, target): (&'static str, *mut *mut Communicator),
    make: fn(&unisono::Communicator, &[usize], Duration) -> Result<unisono::Communicator>,
) -> Result<()> {
    let place = output(name, target)?;
    // SAFETY: the caller's promise.
    let excluded = unsafe { list("excluded ranks", excluded, count)? };
    let excluded = excluded
        .iter()
        .map(|rank| {
            usize::try_from(*rank)
                .map_err(|_| Error::invalid(format!("rank {rank} cannot be excluded")))
        })
        .collect::<Result<Vec<_>>>()?;
    let patience = seconds("the patience", patience)?.unwrap_or(Duration::MAX);
    let made = make(&joined.comm, &excluded, patience)?;
    place.write(register(made)?);
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_living(
    comm: *const Communicator,
    ranks: *mut i32,
    count: *mut usize,
) -> Status {
    // SAFETY: the header asks for room for as many as the group has ranks.
    on(comm, |joined| unsafe {
        tell(&joined.comm.living(), ranks, count)
    })
}

/// Writes `list` to the caller's memory.
///
/// # Safety
/// There is room for as many as the group has ranks.
unsafe fn tell(list: &[usize], ranks: *mut i32, count: *mut usize) -> Result<()> {
    let target = output("count", count)?;
    output("ranks", ranks)?;
    for (at, rank) in list.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { ranks.add(at).write(*rank as i32) };
    }
    target.write(list.len());
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_grow(
    comm: *mut Communicator,
    url: *const c_char,
    world_size: i32,
    patience: f64,
    grown: *mut *mut Communicator,
) -> Status {
    on(comm, |joined| {
        let target = output("grown", grown)?;
        let world = match usize::try_from(world_size) {
            Ok(0) => None,
            Ok(world) => Some(world),
            Err(_) => {
                return Err(Error::invalid(format!(
                    "a world size of {world_size} is none"
                )));
            }
        };
        let place = match url.is_null() {
            true => None,
            // SAFETY: the header asks for a text.
            false => Some(MeetingPlace::Url(unsafe { string("url", url)? }.to_owned())),
        };
        let patience = seconds("the patience", patience)?.unwrap_or(LONGEST_WAIT);
        target.write(register(joined.comm.grow(place, world, patience)?)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_newcomers(
    comm: *const Communicator,
    ranks: *mut i32,
    count: *mut usize,
) -> Status {
    // SAFETY: the header asks for room for as many as the group has ranks.
    on(comm, |joined| unsafe {
        tell(joined.comm.newcomers(), ranks, count)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_former(
    comm: *const Communicator,
    ranks: *mut i32,
    ended: *mut u64,
) -> Status {
    on(comm, |joined| {
        let count = output("ended", ended)?;
        let (Some(former), Some(before)) = (joined.comm.former_ranks(), joined.comm.former_ended())
        else {
            return Err(Error::invalid(
                "this communicator was not made by unisono_communicator_shrink",
            ));
        };
        output("ranks", ranks)?;
        for (at, rank) in former.iter().enumerate() {
            // SAFETY: the header asks for room for as many as the group has ranks.
            unsafe { ranks.add(at).write(*rank as i32) };
        }
        count.write(before);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_ended(
    comm: *const Communicator,
    ended: *mut u64,
) -> Status {
    on(comm, |joined| {
        output("ended", ended)?.write(joined.comm.ended());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_rank(
    comm: *const Communicator,
    rank: *mut i32,
) -> Status {
    on(comm, |joined| {
        output("rank", rank)?.write(joined.comm.rank() as i32);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_world_size(
    comm: *const Communicator,
    world_size: *mut i32,
) -> Status {
    on(comm, |joined| {
        output("world_size", world_size)?.write(joined.comm.world_size() as i32);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_set_timeout(
    comm: *mut Communicator,
    timeout: f64,
) -> Status {
    on(comm, |joined| {
        let limit = match seconds("the timeout", timeout)? {
            Some(limit) if limit.is_zero() => {
                return Err(Error::invalid(
                    "the timeout is 0 s, but must be more than 0 or UNISONO_FOREVER",
                ));
            }
            // The core counts milliseconds, and zero is no limit.
            Some(limit) => limit.max(Duration::from_millis(1)),
            None => Duration::ZERO,
        };
        joined.comm.set_timeout(limit);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_status(comm: *const Communicator) -> Status {
    on(comm, |joined| {
        joined.comm.check_process()?;
        joined.comm.error().map_or(Ok(()), Err)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_abort(
    comm: *mut Communicator,
    reason: *const c_char,
) -> Status {
    on(comm, |joined| {
        let reason = match reason.is_null() {
            true => "the program asked for it",
            // SAFETY: the header asks for a text.
            false => unsafe { string("reason", reason)? },
        };
        joined.comm.check_process()?;
        joined.comm.abort(reason);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_report(
    comm: *const Communicator,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Status {
    let report = |joined: &Joined| Ok(joined.comm.recent_operations().join("\n"));
    // SAFETY: as the caller promises.
    unsafe { write_text(comm, (text, capacity, length), report) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_stats(
    comm: *const Communicator,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Status {
    // SAFETY: as the caller promises.
    unsafe { write_text(comm, (text, capacity, length), |joined| joined.comm.stats()) }
}

/// Writes what `what` tells of a communicator with a terminating 0, as far as there is room, and the length of the whole.
///
/// # Safety
/// `text` has room for `capacity` bytes, and `length` is an output.
unsafe fn write_text(
    comm: *const Communicator,
    (text, capacity, length): (*mut c_char, usize, *mut usize),
    what: impl FnOnce(&Joined) -> Result<String>,
) -> Status {
    on(comm, |joined| {
        if text.is_null() && capacity > 0 {
            return Err(Error::invalid("text is needed, but NULL was given"));
        }
        let place = output("length", length)?;
        joined.comm.check_process()?;
        let told = what(joined)?;
        if let Some(room) = capacity.checked_sub(1) {
            let part = room.min(told.len());
            // SAFETY: the caller has room for `capacity` bytes; `part` bytes and the 0 are no more.
            unsafe {
                text.copy_from_nonoverlapping(told.as_ptr().cast(), part);
                text.add(part).write(0);
            }
        }
        place.write(told.len());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_communicator_destroy(comm: *mut Communicator) -> Status {
    if comm.is_null() {
        return Status::OK;
    }
    fence_with(
        || {
            let joined = COMMUNICATORS.remove(comm)?;
            // Waits for device operations whose calls have returned, which the program takes for done. A failure of one
            // is reported to the group.
            let _ = joined.comm.finish(None);
            joined.close();
            Ok(())
        },
        |_| false,
    )
}
