//! The kernels: n-way reductions, scaling and copies, embedded as PTX.
//!
//! There is one module of kernels per element type, made from the sources in `kernels/` by `make ptx`; the driver
//! compiles it for the device when it is first needed. None of them waits for anything, and any grid is right: a grid
//! here is as large as the work, and never larger than what the device runs at once, so that ranks that share a device
//! do not queue behind each other for longer than they must.
//!
//! Loading a kernel may wait until the context is idle, which it is not while a stream waits for a peer. Where that is another
//! rank's stream of this process, which may itself wait for the rank that loads, it would wait for ever. So all kernels of a
//! module are loaded with it. The modules of the types that are used most are loaded when the first group forms
//! ([`prepare_common`]), the others once per process ([`prepare`]), by the thread that is about to enqueue, after it has waited
//! for what it has under way.

use std::ffi::c_void;
use std::fmt;

use super::driver::{Device, Function, Stream};
use super::loaded::Loaded;
use crate::error::{Error, Result};
use crate::types::{DataType, ReduceOp};

/// The most ranks whose memory one [`reduce`] reads.
pub const MOST_SOURCES: usize = 64;
/// The most pieces that one launch copies.
const MOST_SEGMENTS: usize = 64;

/// The types whose kernels are loaded when the first group forms: those of gradients, counters and flags, and the one
/// with the copies.
const COMMON: [DataType; 7] = [
    DataType::UInt8,
    DataType::Float32,
    DataType::BFloat16,
    DataType::Float16,
    DataType::Float64,
    DataType::Int32,
    DataType::Int64,
];

/// Threads of a block.
pub(super) const THREADS: u32 = 256;
/// Bytes that a thread moves at a time, of each source.
const VECTOR: u64 = 16;
/// The most blocks that each read a word of the host's memory. The reads come one after the other, at about a microsecond each
/// (an H200: 1,056 blocks take 1 ms); for more blocks a kernel of one reads it into the device's memory first.
const MOST_LOOKING: u64 = 4;

/// Bytes to be copied from one place to another; the places do not overlap with any that the same call writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The first byte to be read, as the device knows it.
    pub from: u64,
    /// The first byte to be written.
    pub to: u64,
    /// How many.
    pub bytes: u64,
    /// The address of a word of the device's memory that holds the address from which `from` is counted. The word keeps its
    /// value until the copy has been made. 0 for none: `from` is counted from 0.
    pub base: u64,
}

impl Segment {
    /// `bytes` bytes from `from` to `to`.
    pub fn new(from: u64, to: u64, bytes: u64) -> Self {
        Self {
            from,
            to,
            bytes,
            base: 0,
        }
    }
}

/// Where the contribution of a rank lies: in its window, or in memory of its own that it tells of by words in a page.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Three words of registered host memory, as the device knows them; 0 for no words. The first is 0 where the contribution
    /// lies in the window, else the number of an entry of `table`, from 1 on. The second is the distance from that entry's
    /// address in units of 16 bytes, a signed number. The third is the number of the operation.
    pub words: u64,
    /// [`MOST_ENTRIES`] addresses in registered host memory.
    pub table: u64,
    /// In the window.
    pub window: u64,
    /// The value that the third word must have, else the rank is in another operation: then it is the window as well. Less than
    /// 2^32.
    pub operation: u64,
    /// A word of registered host memory, as the device knows it, whose lowest bit says that the rank has failed. 0 for none.
    pub failed: u64,
}

/// Entries of a table of [`Place`]s. One that is 0 is not used.
pub const MOST_ENTRIES: usize = 256;

/// The check of a kernel before it reads what a peer has written: once the group has failed, that is no result, and its memory
/// may be gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    /// A word of registered host memory, as the device knows it, that is not 0 once the group has failed. 0 for none.
    pub dead: u64,
    /// A word of the device's memory, 0 at first, that large launches look at instead of `dead`, after the state of `dead` has
    /// been brought there. 0 for none: they look at `dead` themselves.
    pub seen: u64,
    /// The 8 bytes that are written then, again and again, instead of the data.
    pub poison: u64,
}

impl Guard {
    /// Nothing is looked at.
    pub const NONE: Self = Self {
        dead: 0,
        seen: 0,
        poison: 0,
    };

    /// Results of `dtype` become NaN, or zero where it has none, when the word at `dead` is set.
    pub fn new(dead: u64, seen: u64, dtype: DataType) -> Self {
        let poison = match dtype {
            DataType::Float16 => 0x7e00_7e00_7e00_7e00,
            DataType::BFloat16 => 0x7fc0_7fc0_7fc0_7fc0,
            DataType::Float32 | DataType::Complex64 => 0x7fc0_0000_7fc0_0000,
            DataType::Float64 | DataType::Complex128 => 0x7ff8_0000_0000_0000,
            DataType::Float8E4M3 | DataType::Float8E5M2 => 0x7f7f_7f7f_7f7f_7f7f,
            _ => 0,
        };
        Self { dead, seen, poison }
    }

    /// The word for a launch of `blocks` times `rows` blocks, which is enqueued next.
    fn word_for(self, stream: &Stream, (blocks, rows): (u32, u32)) -> Result<u64> {
        let looking = u64::from(blocks) * u64::from(rows);
        if self.dead == 0 || self.seen == 0 || looking <= MOST_LOOKING {
            return Ok(self.dead);
        }
        look(stream, self.dead, self.seen)?;
        Ok(self.seen)
    }
}

/// The kernels' second parameter: where the contributions lie.
#[repr(C)]
struct Sources {
    at: [u64; MOST_SOURCES],
}

/// The parameter of the kernel that finds places.
#[repr(C)]
struct Places {
    at: [Place; MOST_SOURCES],
}

/// The parameter of the copying kernel.
#[repr(C)]
struct Segments {
    at: [Segment; MOST_SEGMENTS],
}

impl Segments {
    /// Bytes of the longest.
    fn longest(&self) -> u64 {
        let lengths = self.at.iter().map(|segment| segment.bytes);
        lengths.max().unwrap_or(0)
    }
}

/// The contributions to a [`reduce`].
#[derive(Clone, Copy, Debug)]
pub struct Contributions<'a> {
    /// Where they lie, in rank order.
    pub at: &'a [u64],
    /// The first of as many words of the device's memory ([`find_places`]); they hold the addresses from which `at` is counted.
    /// 0 for none: `at` are addresses.
    pub bases: u64,
    /// The bits of those whose place the result takes, too.
    pub copies: u64,
}

/// Enqueues `out[i] = sources[0][i] op sources[1][i] op ...` for `count` elements, in that order, so that ranks that
/// give the same sources in the same order get the same bits. The small floats accumulate in float32 and are rounded
/// once. `out` may be one of the sources. `divisor` is what `avg` divides by; the others ignore it. `premul_sum` is a
/// sum here: each contribution has been scaled before ([`scale`]). Where the group has failed `out` becomes what `guard` says.
///
/// # Errors
/// `Unsupported` for an operator without meaning for the type, and where the kernels cannot be loaded; `InvalidArgument`
/// for no or more than [`MOST_SOURCES`] sources; `System`.
pub fn reduce(
    stream: &Stream,
    (dtype, op): (DataType, ReduceOp),
    out: u64,
    sources: Contributions<'_>,
    count: u64,
    (divisor, guard): (u32, Guard),
) -> Result<()> {
    op.check(dtype)?;
    let (mut bases, mut copies) = (sources.bases, sources.copies);
    let sources = sources.at;
    if sources.is_empty() || sources.len() > MOST_SOURCES {
        return Err(Error::invalid(format!(
            "{} contributions to one reduction: from 1 to {MOST_SOURCES} can be",
            sources.len()
        )));
    }
    if count == 0 {
        return Ok(());
    }
    let function = Loaded::of(stream.device())?.reduce(stream.device(), dtype, op)?;
    let mut out = out;
    let mut from = Sources {
        at: [0; MOST_SOURCES],
    };
    from.at[..sources.len()].copy_from_slice(sources);
    let mut number = sources.len() as u32;
    let mut count = count;
    let bytes = count.saturating_mul(dtype.size() as u64);
    let grid = grid(function, bytes, 1);
    let (mut divisor, mut dead) = (divisor, guard.word_for(stream, grid)?);
    let mut parameters: [*mut c_void; 8] = [
        (&raw mut out).cast(),
        (&raw mut from).cast(),
        (&raw mut number).cast(),
        (&raw mut count).cast(),
        (&raw mut divisor).cast(),
        (&raw mut dead).cast(),
        (&raw mut bases).cast(),
        (&raw mut copies).cast(),
    ];
    let sources = sources.len();
    // SAFETY: the kernel takes (void*, Sources, unsigned, unsigned long long, unsigned, const unsigned*, const unsigned long
    // long*, unsigned long long); that the addresses are of memory as long as `count` elements is what the stream's work rests
    // on (see `transport::cuda`).
    unsafe {
        stream.launch(
            function,
            (grid, THREADS),
            &mut parameters,
            format_args!("reduce {count} elements of {dtype} from {sources} ranks by {op}"),
        )
    }
}

/// Loads what the operation `op` on elements of `dtype` needs, and what copies need, so that no later launch fails for want
/// of it. Cheap when it is loaded already.
///
/// # Errors
/// `Unsupported` where the kernels cannot be loaded; `System`.
pub fn prepare(device: &'static Device, dtype: DataType, op: Option<ReduceOp>) -> Result<()> {
    let kernels = Loaded::of(device)?;
    kernels.copy(device)?;
    if let Some(op) = op {
        op.check(dtype)?;
        kernels.reduce(device, dtype, op)?;
        if matches!(op, ReduceOp::PremulSum(_)) {
            kernels.scale(device, dtype)?;
        }
    }
    Ok(())
}

/// Whether [`prepare`] has nothing to load.
pub(crate) fn is_prepared(device: &'static Device, dtype: DataType, op: Option<ReduceOp>) -> bool {
    let Ok(kernels) = Loaded::of(device) else {
        return false;
    };
    kernels.has(DataType::UInt8) && (op.is_none() || kernels.has(dtype))
}

/// Loads the kernels that most programs use, and what copies need. To be called while nothing that waits for a peer is in
/// a stream of this process. Takes up to seconds the first time on a machine; then the driver has kept what it
/// compiled.
///
/// # Errors
/// As [`prepare`].
pub(crate) fn prepare_common(device: &'static Device) -> Result<()> {
    let kernels = Loaded::of(device)?;
    COMMON
        .into_iter()
        .try_for_each(|dtype| kernels.of_type(device, dtype).map(drop))
}

/// Enqueues `out[i] = input[i] * factor`, rounded once. `out` may be `input`.
///
/// # Errors
/// `Unsupported` for bool, and where the kernels cannot be loaded; `System`.
pub fn scale(
    stream: &Stream,
    dtype: DataType,
    out: u64,
    input: u64,
    count: u64,
    factor: f64,
) -> Result<()> {
    ReduceOp::PremulSum(factor).check(dtype)?;
    if count == 0 {
        return Ok(());
    }
    let function = Loaded::of(stream.device())?.scale(stream.device(), dtype)?;
    let (mut out, mut input, mut count, mut factor) = (out, input, count, factor);
    let bytes = count.saturating_mul(dtype.size() as u64);
    let mut parameters: [*mut c_void; 4] = [
        (&raw mut out).cast(),
        (&raw mut input).cast(),
        (&raw mut count).cast(),
        (&raw mut factor).cast(),
    ];
    // SAFETY: the kernel takes (void*, const void*, unsigned long long, double); as in `reduce`.
    unsafe {
        stream.launch(
            function,
            (grid(function, bytes, 1), THREADS),
            &mut parameters,
            format_args!("scale {count} elements of {dtype}"),
        )
    }
}

/// Enqueues copies of all `segments`, in as few launches as they need. The pieces may be of any length and alignment. Where the
/// group has failed they become what `guard` says.
///
/// # Errors
/// `Unsupported` where the kernels cannot be loaded; `System`.
pub fn copy(stream: &Stream, segments: &[Segment], guard: Guard) -> Result<()> {
    let function = Loaded::of(stream.device())?.copy(stream.device())?;
    for_all(stream, (function, Work::Copy), segments, guard)
}

/// Enqueues that the word at `seen`, of the device's memory, becomes 1 where the one at `dead` is set.
fn look(stream: &Stream, dead: u64, seen: u64) -> Result<()> {
    let function = Loaded::of(stream.device())?.look(stream.device())?;
    let (mut dead, mut seen) = (dead, seen);
    let mut parameters: [*mut c_void; 2] = [(&raw mut dead).cast(), (&raw mut seen).cast()];
    // SAFETY: the kernel takes (const unsigned*, unsigned*); as in `reduce`.
    unsafe {
        stream.launch(
            function,
            ((1, 1), 1),
            &mut parameters,
            format_args!("look whether the group has failed"),
        )
    }
}

/// Enqueues that what `segments` say has been copied becomes what `guard` says where the group has failed.
///
/// # Errors
/// As [`copy`].
pub fn poison(stream: &Stream, segments: &[Segment], guard: Guard) -> Result<()> {
    let function = Loaded::of(stream.device())?.poison(stream.device())?;
    for_all(stream, (function, Work::Poison), segments, guard)
}

/// Enqueues that the words of the device's memory from `bases` on become the addresses of `places`, at most [`MOST_SOURCES`];
/// and that the word `seen` of `guard` becomes 1 where the group, or a rank of these places, has failed. Returns a guard that
/// looks at that word alone.
///
/// # Errors
/// As [`copy`].
pub(crate) fn find_places(
    stream: &Stream,
    places: &[Place],
    bases: u64,
    guard: Guard,
) -> Result<Guard> {
    let function = Loaded::of(stream.device())?.place(stream.device())?;
    let mut all = Places {
        at: [Place::default(); MOST_SOURCES],
    };
    all.at[..places.len()].copy_from_slice(places);
    let mut number = places.len() as u32;
    let (mut bases, mut dead, mut seen) = (bases, guard.dead, guard.seen);
    let mut parameters: [*mut c_void; 5] = [
        ptr_to(&mut all),
        (&raw mut number).cast(),
        (&raw mut bases).cast(),
        (&raw mut dead).cast(),
        (&raw mut seen).cast(),
    ];
    // SAFETY: the kernel takes (Places, unsigned, unsigned long long*, const unsigned*, unsigned*); as in `reduce`.
    unsafe {
        stream.launch(
            function,
            ((1, 1), MOST_SOURCES as u32),
            &mut parameters,
            format_args!("find {number} places"),
        )?;
    }
    Ok(Guard {
        dead: guard.seen,
        seen: 0,
        ..guard
    })
}

/// The work of a kernel that takes segments.
#[derive(Clone, Copy)]
enum Work {
    Copy,
    Poison,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Copy => "copy",
            Self::Poison => "look after",
        })
    }
}

/// Launches a kernel that takes segments, as often as they need.
fn for_all(
    stream: &Stream,
    what: (Function, Work),
    segments: &[Segment],
    guard: Guard,
) -> Result<()> {
    let moves = |segment: &&Segment| segment.from != segment.to || segment.base != 0;
    let moved = segments.iter().filter(moves);
    parts(moved).try_for_each(|(mut part, number)| launch(stream, what, (&mut part, number), guard))
}

/// The segments that are not empty, as many at a time as a launch takes.
fn parts<'a>(segments: impl Iterator<Item = &'a Segment>) -> impl Iterator<Item = (Segments, u32)> {
    let mut segments = segments.filter(|segment| segment.bytes > 0);
    std::iter::from_fn(move || {
        let nothing = Segment::new(0, 0, 0);
        let mut part = Segments {
            at: [nothing; MOST_SEGMENTS],
        };
        let mut number = 0;
        for (place, segment) in part.at.iter_mut().zip(segments.by_ref()) {
            *place = *segment;
            number += 1;
        }
        (number > 0).then_some((part, number))
    })
}

fn launch(
    stream: &Stream,
    (function, work): (Function, Work),
    (part, number): (&mut Segments, u32),
    guard: Guard,
) -> Result<()> {
    let longest = part.longest();
    let grid = match work {
        Work::Copy => grid(function, longest, number),
        // They seldom have anything to do but to look.
        Work::Poison => (1, number.min(MOST_LOOKING as u32)),
    };
    let (mut number, mut poison) = (number, guard.poison);
    let mut dead = guard.word_for(stream, grid)?;
    let mut parameters: [*mut c_void; 4] = [
        ptr_to(part),
        (&raw mut number).cast(),
        (&raw mut dead).cast(),
        (&raw mut poison).cast(),
    ];
    // SAFETY: both kernels take (Segments, unsigned, const unsigned*, unsigned long long); as in `reduce`.
    unsafe {
        stream.launch(
            function,
            (grid, THREADS),
            &mut parameters,
            format_args!("{work} {number} pieces of up to {longest} bytes"),
        )
    }
}

fn ptr_to<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}

/// Blocks for `rows` times up to `bytes` bytes: as many as have something to do, at most as many as run at once.
fn grid(function: Function, bytes: u64, rows: u32) -> (u32, u32) {
    let wanted = bytes.div_ceil(VECTOR * u64::from(THREADS)).max(1);
    let most = (function.blocks / rows.max(1)).max(1);
    (wanted.min(u64::from(most)) as u32, rows.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_is_as_large_as_the_work_and_no_larger_than_the_device() {
        let blocks = |blocks, bytes, rows| {
            let raw = std::ptr::null_mut();
            grid(Function::new(raw, blocks), bytes, rows)
        };
        assert_eq!(blocks(1000, 0, 1), (1, 1));
        assert_eq!(blocks(1000, 1, 1), (1, 1));
        assert_eq!(blocks(1000, 4096, 1), (1, 1));
        assert_eq!(blocks(1000, 4097, 1), (2, 1));
        assert_eq!(blocks(1000, u64::MAX, 1), (1000, 1));
        assert_eq!(blocks(1000, u64::MAX, 64), (15, 64));
        assert_eq!(blocks(10, u64::MAX, 64), (1, 64));
    }
}
