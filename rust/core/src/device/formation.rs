//! How the ranks of a device group learn whether they can read each other's windows. They meet at the first collective on
//! device memory, by collectives on the host; what comes of it is the same on all of them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::buffer::Memory;
use crate::engine::{Group, Request, Sizes};
use crate::error::{Code, Error, Result};
use crate::locks::Mutex;
use crate::plan::signals::HALVES;
use crate::transport::cuda::driver::{Device, Pinned};
use crate::transport::cuda::flags::Flags;
use crate::transport::cuda::kernels;
use crate::transport::cuda::window::{RECORD, Record, Window, Windows};
use crate::types::{DataType, Rank};

use super::direct::{Direct, brief_slot};
use super::disposal::dispose;
use super::places::Places;
use super::staged::{SLOT, Staged};
use super::state::{DeviceGroup, HERE, Way};
use super::words::MOST_RANKS;

/// Bytes of a half where no setting says otherwise.
const HALF: usize = 16 << 20;
/// The most that it becomes then, on devices that processes share, and the part of the device's memory that the windows of all
/// ranks of a group take at most.
const MOST_HALF: usize = 256 << 20;
const PART_OF_MEMORY: usize = 16;

/// Registered host memory that is there for messages.
const FOR_MESSAGES: usize = 8 << 20;

/// The smallest half: an element of the largest type for as many ranks as there can be.
const SMALLEST_HALF: usize = 4096;

/// Bytes of a reason, as it travels.
const REASON: usize = 240;

/// The message of a rank to the others: whether it can, and why not.
type Word = [u8; 1 + REASON];

/// Why the ranks do not go the direct way.
enum Detour {
    /// Because of where the ranks are, or of a setting.
    Meant(String),
    /// They share a host, and one of them met with this.
    Refused(Refusal),
}

/// The reason of the first rank that has not succeeded.
#[derive(Debug)]
pub(super) struct Refusal {
    rank: String,
    said: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rank, self.said)
    }
}

/// Finds the way. Blocks until all ranks have come.
///
/// # Errors
/// What ends a collective of the host; `System` when this rank lacks memory for either way.
pub(super) fn form(device: &'static Device, cpu: &Arc<Group>) -> Result<Way> {
    let (rank, world) = (cpu.rank(), cpu.world());
    device.memory_operations().map_err(|error| {
        Error::unsupported(format!(
            "streams of device {} cannot wait for words of host memory, by which collectives on device memory are \
             ordered: {}",
            device.number(),
            error.message
        ))
    })?;
    warn_of_a_crowd(device);
    load_kernels(device, cpu)?;
    if world == 1 {
        let told = cpu.config().window_bytes.map_or(HALF, |bytes| bytes.0);
        let half = told.max(SMALLEST_HALF);
        return Ok(Way::Direct(Direct {
            flags: Arc::new(Flags::new(device, rank, vec![None])?),
            windows: None,
            places: None,
            older: Vec::new(),
            brief: None,
            half,
            most: AtomicUsize::new(half),
            put_off: AtomicUsize::new(0),
            devices: 1,
            takes_turns: false,
        }));
    }
    let reason = match open(device, cpu)? {
        Ok(direct) => return Ok(Way::Direct(direct)),
        Err(detour) => tell(rank, device, detour),
    };
    let staged = Staged::new(device, cpu, (SLOT, reason));
    // Ranks of one process share the device's context, and registering memory may wait for it: no rank begins before
    // all have what they need.
    let all = agree(cpu, staged.as_ref().map(|_| ()))?;
    let staged = staged?;
    match all {
        Ok(()) => Ok(Way::Staged(staged)),
        Err(refusal) => Err(Error::new(Code::System, refusal.to_string())),
    }
}

/// Loads the common kernels: on one rank of each host first, for which the driver compiles what it has not kept from
/// earlier, and then on the others, which find that.
fn load_kernels(device: &'static Device, cpu: &Group) -> Result<()> {
    let load = || {
        if let Err(error) = kernels::prepare_common(device) {
            // The operation that needs them says so, where it can be refused.
            tracing::debug!(rank = cpu.rank(), "{}", error.message);
        }
    };
    let is_first = cpu.is_first_of_host();
    if is_first {
        load();
    }
    if cpu.world() > 1 {
        gather(cpu, &[0])?;
    }
    if !is_first {
        load();
    }
    Ok(())
}

/// Logs why collectives go through host memory, and returns it. For ranks of one host, which lose much of their speed
/// that way and seldom intend it, the line is a warning, once in a process for each reason.
fn tell(rank: Rank, device: &'static Device, detour: Detour) -> String {
    static WARNED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let number = device.number();
    let (reason, is_new) = match detour {
        Detour::Meant(reason) => (reason, false),
        Detour::Refused(refusal) => {
            let mut warned = WARNED.lock();
            let is_new = !warned.contains(&refusal.said);
            if is_new {
                warned.push(refusal.said.clone());
            }
            (refusal.to_string(), is_new)
        }
    };
    if is_new {
        tracing::warn!(
            rank,
            "collectives on memory of device {number} go through host memory, which is slower, though all ranks are on one \
             host: {reason}"
        );
    } else {
        tracing::info!(
            rank,
            "collectives on memory of device {number} go through host memory: {reason}"
        );
    }
    reason
}

/// Hardware queues that the driver spreads the streams of a process over, unless [`QUEUES_VARIABLE`] says otherwise.
const QUEUES: usize = 8;
/// The same under the Multi-Process Service, whose clients take their queues from one pool.
const QUEUES_OF_A_CLIENT: usize = 2;
/// The most that there can be.
const MOST_QUEUES: usize = 32;
const QUEUES_VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Says once that the streams of this process's groups may hold each other up, where they are many for the queues.
fn warn_of_a_crowd(device: &'static Device) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let here: Vec<Arc<DeviceGroup>> = HERE
        .lock()
        .iter()
        .filter_map(|(_, group)| group.upgrade())
        .collect();
    let others = here
        .iter()
        .filter(|group| group.number() == device.number());
    // The one that forms, too.
    let groups = others.count() + 1;
    let told = std::env::var(QUEUES_VARIABLE).ok();
    let queues = told.and_then(|told| told.trim().parse().ok());
    let (usual, remedy) = match device.has_mps() {
        true => (
            QUEUES_OF_A_CLIENT,
            "8, or as many as the Multi-Process Service has for each of its clients (all together about 100)",
        ),
        false => (QUEUES, "32"),
    };
    let queues = queues.unwrap_or(usual);
    if is_crowded(groups, queues) && !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "{groups} groups use device {} in this process, and its streams share {queues} hardware queues: a stream that \
             waits for a peer holds up the others in its queue, and ranks that use their groups in different orders may \
             come to wait for each other; set {QUEUES_VARIABLE} to {remedy} before the process uses CUDA",
            device.number()
        );
    }
}

/// Whether two of `groups` streams that wait are likely to share one of `queues` queues: the caller's other streams take turns
/// with them.
fn is_crowded(groups: usize, queues: usize) -> bool {
    groups > 1 && 2 * groups > queues && queues < MOST_QUEUES
}

/// Opens the windows of all ranks, or says why that is not possible.
fn open(device: &'static Device, cpu: &Arc<Group>) -> Result<Result<Direct, Detour>> {
    let (rank, world) = (cpu.rank(), cpu.world());
    let meant = |reason: String| Ok(Err(Detour::Meant(reason)));
    if !cpu.is_on_one_host() {
        return meant("the ranks are on several hosts".to_owned());
    }
    if world > MOST_RANKS {
        return meant(format!("more than {MOST_RANKS} ranks share the host"));
    }
    let told = cpu.config().window_bytes.map(|bytes| bytes.0);
    if told == Some(0) {
        return meant("window_bytes is 0".to_owned());
    }
    let half = told.unwrap_or(HALF).max(SMALLEST_HALF);
    let Opened { windows, records } = match open_windows(device, cpu, half)? {
        Ok(opened) => opened,
        Err(refusal) => return Ok(Err(Detour::Refused(refusal))),
    };
    let pages = (0..world).map(|peer| match cpu.page(peer) {
        None if peer != rank => Err(Error::unsupported(format!(
            "ranks {rank} and {peer} share no memory of the host"
        ))),
        page => Ok(page),
    });
    let met = pages.collect::<Result<Vec<_>>>().and_then(|pages| {
        Ok((
            Flags::new(device, rank, pages)?,
            Places::new(device, world)?,
        ))
    });
    if let Err(refusal) = agree(cpu, met.as_ref().map(|_| ()))? {
        shut(cpu, windows)?;
        return Ok(Err(Detour::Refused(refusal)));
    }
    let (flags, places) = met?;
    let devices = distinct(&records);
    let is_shared = is_shared(&records);
    let takes_turns = is_shared && take_turns(device, cpu)?;
    let half = windows.own().half_bytes();
    let most = match told {
        None if is_shared => most_half(device, cpu, &records)?.max(half),
        _ => half,
    };
    // Where a setting says how long windows are, everything goes through them.
    let brief = match told {
        None if takes_turns => brief(device, cpu)?,
        _ => None,
    };
    Ok(Ok(Direct {
        flags: Arc::new(flags),
        windows: Some(Arc::new(windows)),
        places: Some(Arc::new(places)),
        older: Vec::new(),
        brief,
        half,
        most: AtomicUsize::new(most),
        put_off: AtomicUsize::new(0),
        devices,
        takes_turns,
    }))
}

/// Whether several processes use one device.
fn is_shared(records: &[Record]) -> bool {
    records.iter().enumerate().any(|(at, record)| {
        let before = &records[..at];
        before.iter().any(|other| other.shares_device_with(record))
    })
}

/// Whether the work of processes that share a device takes turns there: under the Multi-Process Service it runs at the same
/// time.
fn take_turns(device: &'static Device, cpu: &Group) -> Result<bool> {
    let all = gather(cpu, &[u8::from(device.has_mps())])?;
    Ok(all.iter().any(|[has_mps]| *has_mps == 0))
}

/// The staged way of short collectives where processes share a device; `None` where a rank lacks the memory for it.
fn brief(device: &'static Device, cpu: &Arc<Group>) -> Result<Option<Arc<Staged>>> {
    let slot = brief_slot(cpu.world());
    let staged = Staged::new(device, cpu, (slot, String::new()));
    let all = agree(cpu, staged.as_ref().map(|_| ()))?;
    let Ok(staged) = staged else {
        return Ok(None);
    };
    if all.is_err() {
        staged.give_back();
        return Ok(None);
    }
    // It comes from what had been registered for messages.
    if let Err(error) = Pinned::shared(device, FOR_MESSAGES).map(Pinned::give_back) {
        tracing::debug!("messages go in small pieces: {error}");
    }
    Ok(Some(Arc::new(staged.in_rank_order())))
}

/// Windows of all ranks, and what they were opened by.
pub(super) struct Opened {
    pub(super) windows: Windows,
    records: Vec<Record>,
}

/// Makes a window with halves of at least `half` bytes on each rank, and opens those of the others.
pub(super) fn open_windows(
    device: &'static Device,
    cpu: &Group,
    half: usize,
) -> Result<Result<Opened, Refusal>> {
    let window = Window::create(device, half);
    let window = window.and_then(|window| Ok((window.record()?, window)));
    let record = match &window {
        Ok((record, _)) => record.encode(),
        Err(_) => [0; RECORD],
    };
    if let Err(refusal) = agree(cpu, window.as_ref().map(|_| ()))? {
        // There is too little memory somewhere, perhaps on this device.
        if let Ok((_, window)) = window {
            window.set_unwanted();
            dispose(move || drop(window));
        }
        return Ok(Err(refusal));
    }
    let records: Vec<Record> = gather(cpu, &record)?.iter().map(Record::decode).collect();
    meet(cpu)?;
    let own = window.as_ref().map(|(_, window)| Arc::clone(window)).ok();
    let opened = window.and_then(|(_, window)| Windows::open(window, cpu.rank(), &records));
    if let Err(refusal) = agree(cpu, opened.as_ref().map(|_| ()))? {
        // Some ranks may have mapped the windows of others, which are freed when all have let go of them.
        drop(opened);
        gather(cpu, &[0])?;
        if let Some(own) = own {
            own.set_clean();
        }
        return Ok(Err(refusal));
    }
    let windows = opened?;
    Ok(Ok(Opened { windows, records }))
}

/// Gives back windows that nothing was put into, on all ranks.
fn shut(cpu: &Group, windows: Windows) -> Result<()> {
    let own = windows.close_peers();
    gather(cpu, &[0])?;
    own.set_clean();
    Ok(())
}

/// The most that a half of a window may become where processes share devices: so much that the windows of all ranks of a device
/// take a small part of its memory, whatever else the process has there.
fn most_half(device: &'static Device, cpu: &Group, records: &[Record]) -> Result<usize> {
    let uuid = device.uuid();
    let here = records
        .iter()
        .filter(|record| record.device == uuid)
        .count();
    // Windows that were shorter stay: together they are no longer than the longest.
    let halves = 2 * HALVES * here.max(1);
    let own = (device.memory() / PART_OF_MEMORY / halves).min(MOST_HALF);
    let all = gather(cpu, &(own as u64).to_le_bytes())?;
    let least = all.into_iter().map(u64::from_le_bytes).min().unwrap_or(0);
    // Lengths are powers of two; this is the longest.
    Ok(match least.checked_ilog2() {
        Some(power) => 1 << power,
        None => 0,
    })
}

fn distinct(records: &[Record]) -> usize {
    let mut devices: Vec<[u8; 16]> = records.iter().map(|record| record.device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices.len()
}

/// Tells all ranks whether this one has succeeded, and returns the reason of the first rank that has not.
fn agree(cpu: &Group, own: Result<(), &Error>) -> Result<Result<(), Refusal>> {
    let mut word: Word = [0; 1 + REASON];
    match own {
        Ok(()) => word[0] = 1,
        Err(error) => {
            let bytes = error.message.as_bytes();
            let length = bytes.len().min(REASON);
            word[1..=length].copy_from_slice(&bytes[..length]);
        }
    }
    let all = gather(cpu, &word)?;
    let refusal = all.iter().enumerate().find(|(_, word)| word[0] != 1);
    Ok(match refusal {
        None => Ok(()),
        Some((of, word)) => {
            let said = word[1..].split(|byte| *byte == 0).next().unwrap_or(&[]);
            Err(Refusal {
                rank: cpu.name_of(of),
                said: String::from_utf8_lossy(said).into_owned(),
            })
        }
    })
}

/// The `own` of all ranks, in rank order.
pub(super) fn gather<const N: usize>(cpu: &Group, own: &[u8; N]) -> Result<Vec<[u8; N]>> {
    let mut all = vec![0_u8; N * cpu.world()];
    let request = Request::all_gather(DataType::UInt8, None, Memory::empty(), Sizes::Even(N));
    carry_out(cpu, request, own, &mut all)?;
    Ok(all
        .chunks_exact(N)
        .map(|one| one.try_into().expect("so many bytes"))
        .collect())
}

/// Sends a message from every rank to every other, so that all links are open.
fn meet(cpu: &Group) -> Result<()> {
    let world = cpu.world();
    let input = vec![0_u8; world];
    let mut output = vec![0_u8; world];
    let sizes = Sizes::PerPair {
        send: vec![1; world],
        recv: vec![1; world],
    };
    let nothing = Memory::empty;
    let request = Request {
        input: None,
        ..Request::all_to_all(DataType::UInt8, nothing(), nothing(), sizes)
    };
    carry_out(cpu, request, &input, &mut output)
}

fn carry_out(cpu: &Group, request: Request, input: &[u8], output: &mut [u8]) -> Result<()> {
    let ran = cpu.run_on(request, Some(input), Some(output));
    ran.map(drop).map_err(|error| {
        let mut message = format!(
            "while the ranks met to set up memory on their devices: {}",
            error.message
        );
        if error.code == Code::Timeout {
            message.push_str("; every rank must call it");
        }
        Error {
            message,
            operation: None,
            ..error
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{MOST_QUEUES, QUEUES, is_crowded};

    #[test]
    fn a_few_groups_are_no_crowd() {
        assert!(!is_crowded(1, 1) && is_crowded(2, 1));
        assert!(!is_crowded(4, QUEUES) && is_crowded(5, QUEUES));
        // There is nothing better to be had.
        assert!(!is_crowded(100, MOST_QUEUES));
    }
}
