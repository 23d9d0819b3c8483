//! The kernels against the core's reductions: the same bits for every operator, type, count and
//! alignment, reaching no byte but theirs.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::Once;

use unisono::reduce::{Kernel as Reference, Source, Streaming, scale};
use unisono::types::{DataType, ReduceOp};

use super::{Kernel, find, kernels, translate_with};

/// The memory that a simulated thread may reach, and its accesses beyond.
#[derive(Default)]
struct Reachable {
    read: Vec<Range<usize>>,
    written: Vec<Range<usize>>,
    faults: Vec<String>,
}

thread_local! {
    static REACHABLE: RefCell<Reachable> = RefCell::default();
}

extern "C" fn translate(address: *const c_void, bytes: usize, writes: c_int) -> *mut c_void {
    REACHABLE.with_borrow_mut(|reachable| {
        let (start, end) = (address.addr(), address.addr() + bytes);
        let inside = |range: &Range<usize>| range.start <= start && end <= range.end;
        let allowed = if writes == 0 {
            &reachable.read
        } else {
            &reachable.written
        };
        if start.is_multiple_of(bytes) && allowed.iter().any(inside) {
            return address.cast_mut();
        }
        let access = if writes == 0 { "read" } else { "write" };
        let fault = format!("{access} of {bytes} bytes at {start:#x}");
        // A kernel gone wrong may go on for ever; a panic here ends the process.
        let few = reachable.faults.len() < 10_000;
        assert!(few, "{fault}, after {:?}", &reachable.faults[..8]);
        reachable.faults.push(fault);
        std::ptr::null_mut()
    })
}

/// Launches `kernel`, which may read `read` and write `written` alone, and gives its faults.
fn launch(
    kernel: &Kernel,
    parameters: &[&[u8]],
    (grid, block): ([u32; 3], u32),
    read: Vec<Range<usize>>,
    written: Vec<Range<usize>>,
) -> Vec<String> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| translate_with(translate));
    let reachable = Reachable {
        read,
        written,
        faults: Vec::new(),
    };
    REACHABLE.set(reachable);
    // SAFETY: `translate` lets the kernel reach nothing but the ranges given, which the callers
    // take from buffers that they hold until this returns, mutably where they are written.
    unsafe { kernel.launch(parameters, grid, [block, 1, 1]) };
    REACHABLE.take().faults
}

/// Bytes that begin `offset` bytes after a multiple of 16.
struct Shifted {
    storage: Vec<u128>,
    offset: usize,
    len: usize,
}

impl Shifted {
    fn new(offset: usize, content: &[u8]) -> Self {
        let storage = vec![0; (offset + content.len()).div_ceil(16) + 1];
        let len = content.len();
        let mut shifted = Self {
            storage,
            offset,
            len,
        };
        shifted.bytes().copy_from_slice(content);
        shifted
    }

    fn bytes(&mut self) -> &mut [u8] {
        let start = self.storage.as_mut_ptr().cast::<u8>();
        // SAFETY: the storage has room for the offset and the content, all of it initialised, and
        // is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(start.add(self.offset), self.len) }
    }

    fn range(&mut self) -> Range<usize> {
        let bytes = self.bytes().as_mut_ptr_range();
        bytes.start.expose_provenance()..bytes.end.expose_provenance()
    }
}

/// Numbers to draw from (xorshift64*, Vigna 2016).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 33) as usize % limit
    }
}

/// A rank's elements: arbitrary bits, special values and small numbers, a third of each.
fn contribution(dtype: DataType, count: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for _ in 0..count {
        match random.below(3) {
            0 => bytes.extend((0..dtype.size()).map(|_| (random.next() >> 40) as u8)),
            1 => bytes.extend(special(dtype, random)),
            _ => bytes.extend(element(dtype, random.below(41) as f64 - 20.0)),
        }
    }
    bytes
}

fn special(dtype: DataType, random: &mut Random) -> Vec<u8> {
    const VALUES: [f64; 12] = [
        0.0,
        -0.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        448.0,
        60000.0,
        1e-45,
        6e-8,
        3e38,
        0.001,
        -7.0 / 3.0,
    ];
    let bytes = element(dtype, VALUES[random.below(VALUES.len())]);
    if !dtype.is_complex() {
        return bytes;
    }
    let other = element(dtype, VALUES[random.below(VALUES.len())]);
    [&bytes[..dtype.size() / 2], &other[..dtype.size() / 2]].concat()
}

fn sum_of(dtype: DataType) -> Reference {
    Reference::new(ReduceOp::Sum, dtype).unwrap()
}

fn element(dtype: DataType, value: f64) -> Vec<u8> {
    match dtype {
        DataType::Float32 => (value as f32).to_ne_bytes().to_vec(),
        DataType::Float64 => value.to_ne_bytes().to_vec(),
        DataType::Complex64 => [value as f32, 1.5].map(f32::to_ne_bytes).concat(),
        DataType::Complex128 => [value, 1.5].map(f64::to_ne_bytes).concat(),
        DataType::Bool => vec![u8::from(value > 0.0)],
        _ if dtype.is_float() => {
            let mut bytes = vec![0; dtype.size()];
            sum_of(dtype).narrow(&mut bytes, &(value as f32).to_ne_bytes());
            bytes
        }
        _ => (value as i64).to_ne_bytes()[..dtype.size()].to_vec(),
    }
}

/// Whether the parts of one element that differ are NaN in both.
fn same_but_nan(dtype: DataType, a: &[u8], b: &[u8]) -> bool {
    let single = |bytes: &[u8]| f32::from_ne_bytes(bytes.try_into().unwrap()).is_nan();
    let double = |bytes: &[u8]| f64::from_ne_bytes(bytes.try_into().unwrap()).is_nan();
    let is_nan = |bytes: &[u8]| match dtype {
        DataType::Float32 | DataType::Complex64 => single(bytes),
        DataType::Float64 | DataType::Complex128 => double(bytes),
        _ if dtype.is_float() => {
            let mut wide = [0; 4];
            sum_of(dtype).widen(&mut wide, bytes);
            single(&wide)
        }
        _ => false,
    };
    let part = dtype.size() / if dtype.is_complex() { 2 } else { 1 };
    let mut parts = a.chunks(part).zip(b.chunks(part));
    parts.all(|(a, b)| a == b || (is_nan(a) && is_nan(b)))
}

/// Which NaN an addition or a multiplication gives is the hardware's choice; where neither happens all bits
/// are the same.
fn assert_same(dtype: DataType, calculates: bool, result: &[u8], expected: &[u8], what: &str) {
    assert_eq!(result.len(), expected.len(), "{what}");
    let size = dtype.size();
    for (i, (r, e)) in result.chunks(size).zip(expected.chunks(size)).enumerate() {
        let same = r == e || (calculates && same_but_nan(dtype, r, e));
        assert!(same, "{what}, element {i}: {r:02x?}, expected {e:02x?}");
    }
}

fn meaningful() -> impl Iterator<Item = (ReduceOp, DataType)> {
    let operators = ReduceOp::ALL.into_iter();
    let pairs = operators.flat_map(|op| DataType::ALL.map(|dtype| (op, dtype)));
    pairs.filter(|(op, dtype)| op.check(*dtype).is_ok())
}

/// The operators that have a kernel: a premultiplied sum is a sum of what was scaled.
fn reductions() -> impl Iterator<Item = (ReduceOp, DataType)> {
    meaningful().filter(|(op, _)| !matches!(op, ReduceOp::PremulSum(_)))
}

/// Where the buffers of a reduction begin, and how it is launched.
#[derive(Clone, Copy, Debug)]
struct Case {
    count: usize,
    sources: usize,
    /// In bytes from a multiple of 16, of the result and of the sources.
    offsets: (usize, usize),
    /// Whether the last source begins somewhere else than the others.
    odd_one: bool,
    /// The source whose place the result takes.
    in_place: Option<usize>,
    grid: u32,
    block: u32,
    divisor: u32,
    /// The bits of sources that get a copy of the result.
    copies: u64,
    /// Addresses are counted from words.
    based: bool,
}

/// Launches a reduction of what is at these addresses and in these ranges.
fn reduce(
    (op, dtype): (ReduceOp, DataType),
    case: Case,
    (mut addresses, read): ([usize; 64], Vec<Range<usize>>),
    to: Range<usize>,
) {
    let what = format!("{op} of {dtype}, {case:?}");
    let kernel = find(dtype.name(), &format!("unisono_reduce_{op}")).expect(&what);
    // Some addresses are counted from words.
    let before: Vec<usize> = (0..case.sources).map(|rank| rank * 4096).collect();
    let words: Vec<u8> = before.iter().flat_map(|at| at.to_ne_bytes()).collect();
    let mut words = Shifted::new(0, &words);
    let mut bases = 0..0;
    if case.based {
        bases = words.range();
        for (address, before) in addresses.iter_mut().zip(&before) {
            *address = address.wrapping_sub(*before);
        }
    }
    let parameters: [&[u8]; 8] = [
        &to.start.to_ne_bytes(),
        &addresses.map(usize::to_ne_bytes).concat(),
        &(case.sources as u32).to_ne_bytes(),
        &(case.count as u64).to_ne_bytes(),
        &case.divisor.to_ne_bytes(),
        &0_usize.to_ne_bytes(),
        &bases.start.to_ne_bytes(),
        &case.copies.to_ne_bytes(),
    ];
    let shape = ([case.grid, 1, 1], case.block);
    let ranges = read.iter().enumerate();
    let written = ranges.filter(|(rank, _)| case.copies >> rank & 1 == 1);
    let written = written.map(|(_, range)| range.clone()).chain([to]);
    let written = written.collect();
    let readable = read.into_iter().chain([bases]).collect();
    let faults = launch(kernel, &parameters, shape, readable, written);
    assert!(faults.is_empty(), "{what}: {faults:?}");
}

fn check(op: ReduceOp, dtype: DataType, case: Case, random: &mut Random) {
    let what = format!("{op} of {dtype}, {case:?}");
    let ranks: Vec<_> = (0..case.sources)
        .map(|_| contribution(dtype, case.count, random))
        .collect();
    let sources: Vec<_> = ranks.iter().map(|rank| Source::Element(rank)).collect();
    let mut expected = vec![0; case.count * dtype.size()];
    let reference = Reference::new(op, dtype).unwrap();
    reference.reduce(
        &mut expected,
        &sources,
        case.divisor as usize,
        Streaming::No,
    );

    let mut out = Shifted::new(case.offsets.0, &vec![0x77; expected.len()]);
    let mut buffers: Vec<_> = (ranks.iter().enumerate())
        .map(|(rank, content)| {
            let odd = case.odd_one && rank + 1 == case.sources;
            let further = if odd { dtype.size() } else { 0 };
            Shifted::new(case.offsets.1 + further, content)
        })
        .collect();
    let read: Vec<_> = buffers.iter_mut().map(Shifted::range).collect();
    let to = case
        .in_place
        .map_or_else(|| out.range(), |rank| read[rank].clone());
    let mut addresses = [0; 64];
    for (address, range) in addresses.iter_mut().zip(&read) {
        *address = range.start;
    }
    let gets_copy = |rank: usize| case.copies >> rank & 1 == 1;
    reduce((op, dtype), case, (addresses, read), to);
    let result = match case.in_place {
        Some(rank) => buffers[rank].bytes(),
        None => out.bytes(),
    };
    let calculates = case.sources > 1
        && matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Prod)
        || op == ReduceOp::Avg;
    assert_same(dtype, calculates, result, &expected, &what);
    let result = result.to_vec();
    for (rank, buffer) in buffers.iter_mut().enumerate() {
        if gets_copy(rank) {
            assert!(buffer.bytes() == result, "{what}: rank {rank} got no copy");
            continue;
        }
        let unchanged = buffer.bytes() == ranks[rank] || case.in_place == Some(rank);
        assert!(unchanged, "{what}: wrote to source {rank}");
    }
}

#[test]
fn every_operator_of_every_type_has_a_kernel_and_no_other_has() {
    let mut expected: Vec<_> = meaningful()
        .map(|(op, dtype)| match op {
            ReduceOp::PremulSum(_) => (dtype.name(), "unisono_scale".to_owned()),
            _ => (dtype.name(), format!("unisono_reduce_{op}")),
        })
        .chain(
            [
                "unisono_copy",
                "unisono_poison",
                "unisono_look",
                "unisono_place",
            ]
            .map(|name| ("uint8", name.to_owned())),
        )
        .collect();
    let mut present: Vec<_> = kernels()
        .iter()
        .map(|kernel| (kernel.dtype(), kernel.name().to_owned()))
        .collect();
    expected.sort();
    present.sort();
    assert_eq!(present, expected);
}

#[test]
fn reductions_match_the_reference_wherever_the_buffers_begin() {
    let mut random = Random(1);
    for (op, dtype) in reductions() {
        let size = dtype.size();
        for count in (0..20).chain([33, 64, 65, 130, 257]) {
            let places = 16_usize.div_ceil(size);
            let shift = |place: usize| place % places * size;
            for places in [(0, 0), (1, 1), (3, 3), (0, 1), (7, 2)] {
                let sources = 1 + random.below(5);
                let case = Case {
                    count,
                    sources,
                    offsets: (shift(places.0), shift(places.1)),
                    odd_one: random.below(4) == 0,
                    in_place: Some(random.below(2 * sources)).filter(|rank| *rank < sources),
                    grid: 1 + random.below(4) as u32,
                    block: 1 + random.below(40) as u32,
                    divisor: 1 + random.below(9) as u32,
                    copies: random.below(1 << sources) as u64,
                    based: random.below(2) == 0,
                };
                check(op, dtype, case, &mut random);
            }
        }
    }
}

#[test]
fn as_many_contributions_as_there_may_be() {
    let mut random = Random(2);
    for (op, dtype) in reductions() {
        for sources in [8, 9, 63, 64] {
            let case = Case {
                count: 203,
                sources,
                offsets: (dtype.size() % 16, dtype.size() % 16),
                odd_one: false,
                in_place: Some(sources / 2),
                grid: 2,
                block: 3,
                divisor: sources as u32,
                copies: u64::MAX >> (64 - sources),
                based: true,
            };
            check(op, dtype, case, &mut random);
        }
    }
}

#[test]
fn averages_divide_by_any_number_of_ranks() {
    let mut random = Random(3);
    for dtype in DataType::ALL {
        if ReduceOp::Avg.check(dtype).is_err() {
            continue;
        }
        for divisor in [1, 2, 3, 7, 127, 128, 255, 256, 65_537, 1 << 31, u32::MAX] {
            let case = Case {
                count: 500,
                sources: 2,
                offsets: (0, 0),
                odd_one: false,
                in_place: None,
                grid: 1,
                block: 32,
                divisor,
                copies: 0,
                based: false,
            };
            check(ReduceOp::Avg, dtype, case, &mut random);
        }
    }
}

fn check_scale(dtype: DataType, content: &[u8], factor: f64, offsets: (usize, usize)) {
    let what = format!("{dtype} times {factor} from and to {offsets:?}");
    let mut expected = vec![0; content.len()];
    scale(dtype, &mut expected, content, factor);
    let mut from = Shifted::new(offsets.0, content);
    let mut to = Shifted::new(offsets.1, &vec![0x77; content.len()]);
    let parameters: [&[u8]; 4] = [
        &to.range().start.to_ne_bytes(),
        &from.range().start.to_ne_bytes(),
        &((content.len() / dtype.size()) as u64).to_ne_bytes(),
        &factor.to_ne_bytes(),
    ];
    let kernel = find(dtype.name(), "unisono_scale").unwrap();
    let (read, written) = (vec![from.range()], vec![to.range()]);
    let faults = launch(kernel, &parameters, ([2, 1, 1], 24), read, written);
    assert!(faults.is_empty(), "{what}: {faults:?}");
    assert_same(dtype, true, to.bytes(), &expected, &what);
}

const FACTORS: [f64; 22] = [
    1.0,
    0.0,
    -0.0,
    0.5,
    -1.0,
    1.0 / 3.0,
    -7.7,
    1e-3,
    1e-6,
    3.0,
    300.0,
    65_537.0,
    1e10,
    1e18,
    9_223_372_036_854_774_784.0,
    9_223_372_036_854_775_808.0,
    -9_223_372_036_854_775_808.0,
    1e300,
    -1e300,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
];

#[test]
fn scaling_matches_the_reference() {
    let mut random = Random(4);
    for dtype in DataType::ALL {
        if ReduceOp::PremulSum(1.0).check(dtype).is_err() {
            continue;
        }
        for factor in FACTORS {
            let content = contribution(dtype, 200, &mut random);
            let offset = random.below(16) / dtype.size() * dtype.size();
            check_scale(dtype, &content, factor, (0, 0));
            check_scale(dtype, &content, factor, (offset, 0));
        }
    }
}

/// Every value of the small floats, rounded from many places between two values.
#[test]
fn small_floats_round_as_the_reference_does() {
    for dtype in [
        DataType::Float16,
        DataType::BFloat16,
        DataType::Float8E4M3,
        DataType::Float8E5M2,
    ] {
        let values: Vec<u8> = match dtype.size() {
            1 => (0..=u8::MAX).collect(),
            _ => (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect(),
        };
        let between = [1.03, 1.07, 0.97, 1.25, 0.75, 1.125, 1.0625, 1.5, 1e-38];
        for factor in FACTORS.into_iter().chain(between) {
            check_scale(dtype, &values, factor, (0, 0));
        }
        // Half-way between two values, from the sum of neighbours halved.
        let mut random = Random(5);
        for sources in [2, 3] {
            let case = Case {
                count: 30_000,
                sources,
                offsets: (0, 0),
                odd_one: false,
                in_place: None,
                grid: 1,
                block: 64,
                divisor: 2,
                copies: 0,
                based: false,
            };
            check(ReduceOp::Avg, dtype, case, &mut random);
        }
    }
}

/// Of a failed group nothing is read: the sources are no memory.
#[test]
fn what_cannot_be_made_is_no_number() {
    for (op, dtype) in reductions() {
        let what = format!("{op} of {dtype}");
        let mut word = Shifted::new(0, &1_u32.to_ne_bytes());
        let mut out = Shifted::new(dtype.size(), &vec![1; 33 * dtype.size()]);
        let (dead, to) = (word.range(), out.range());
        let kernel = find(dtype.name(), &format!("unisono_reduce_{op}")).expect(&what);
        let parameters: [&[u8]; 8] = [
            &to.start.to_ne_bytes(),
            &[64_usize; 64].map(usize::to_ne_bytes).concat(),
            &2_u32.to_ne_bytes(),
            &33_u64.to_ne_bytes(),
            &2_u32.to_ne_bytes(),
            &dead.start.to_ne_bytes(),
            &64_usize.to_ne_bytes(),
            &3_u64.to_ne_bytes(),
        ];
        let faults = launch(kernel, &parameters, ([2, 1, 1], 5), vec![dead], vec![to]);
        assert!(faults.is_empty(), "{what}: {faults:?}");
        let element: &[u8] = match dtype {
            DataType::Float16 => &0x7e00_u16.to_ne_bytes(),
            DataType::BFloat16 => &0x7fc0_u16.to_ne_bytes(),
            DataType::Float32 | DataType::Complex64 => &f32::NAN.to_ne_bytes(),
            DataType::Float64 | DataType::Complex128 => &f64::NAN.to_ne_bytes(),
            DataType::Float8E4M3 | DataType::Float8E5M2 => &[0x7f],
            _ => &[0],
        };
        let expected = element.repeat(33 * dtype.size() / element.len());
        assert_eq!(out.bytes(), expected, "{what}");
    }
}

#[test]
fn a_word_that_is_set_is_seen() {
    for (word, before, after) in [(0_u32, 0_u32, 0_u32), (7, 0, 1), (0, 1, 1)] {
        let kernel = find("uint8", "unisono_look").unwrap();
        let mut dead = Shifted::new(4, &word.to_ne_bytes());
        let mut seen = Shifted::new(8, &before.to_ne_bytes());
        let (from, to) = (dead.range(), seen.range());
        let parameters: [&[u8]; 2] = [&from.start.to_ne_bytes(), &to.start.to_ne_bytes()];
        let faults = launch(kernel, &parameters, ([1, 1, 1], 1), vec![from], vec![to]);
        assert!(faults.is_empty(), "{faults:?}");
        assert_eq!(seen.bytes(), after.to_ne_bytes());
    }
}

/// A place is the window, unless its words name an entry of the table that is there, and this operation.
#[test]
fn places_are_found() {
    const WINDOW: u64 = 0x70_0000;
    const ENTRY: u64 = 0x10_0000;
    const OPERATION: u32 = 77;
    let kernel = find("uint8", "unisono_place").unwrap();
    let mut table = Shifted::new(0, &[ENTRY, 0].map(u64::to_ne_bytes).concat());
    let entries = table.range();
    for (words, (dead, marks), expected) in [
        (Some([0_u32, 5, OPERATION]), (0_u32, 0_u32), WINDOW),
        (Some([1, 5, OPERATION]), (0, 2), ENTRY + 5 * 16),
        (Some([1, u32::MAX, OPERATION]), (1, 0), ENTRY - 16),
        (Some([1, 5, 78]), (0, 3), WINDOW),
        (Some([2, 5, OPERATION]), (0, 0), WINDOW),
        (Some([257, 5, OPERATION]), (0, 1), WINDOW),
        (None, (1, 1), WINDOW),
    ] {
        let content = words.unwrap_or_default().map(u32::to_ne_bytes).concat();
        let (mut told, mut failed) = (
            Shifted::new(8, &content),
            Shifted::new(4, &dead.to_ne_bytes()),
        );
        let (mut seen, mut bases) = (Shifted::new(0, &[0; 4]), Shifted::new(0, &[1; 24]));
        let mut marked = Shifted::new(0, &marks.to_ne_bytes());
        let mark = marked.range();
        let readable = [told.range(), failed.range(), entries.clone(), mark.clone()];
        let at = words.map_or(0, |_| readable[0].start);
        let mut places = [[0; 40]; 64];
        for place in &mut places[..3] {
            let parts = [
                at,
                entries.start,
                WINDOW as usize,
                OPERATION as usize,
                mark.start,
            ];
            place.copy_from_slice(&parts.map(usize::to_ne_bytes).concat());
        }
        let parameters: [&[u8]; 5] = [
            &places.concat(),
            &3_u32.to_ne_bytes(),
            &bases.range().start.to_ne_bytes(),
            &readable[1].start.to_ne_bytes(),
            &seen.range().start.to_ne_bytes(),
        ];
        let written = vec![bases.range(), seen.range()];
        let shape = ([1, 1, 1], 64);
        let faults = launch(kernel, &parameters, shape, readable.to_vec(), written);
        assert!(faults.is_empty(), "{faults:?}");
        // A rank's failure is as good as the group's.
        assert_eq!(seen.bytes(), (dead | marks & 1).to_ne_bytes());
        assert_eq!(bases.bytes(), expected.to_ne_bytes().repeat(3));
    }
}

#[test]
fn copies_of_a_failed_group_become_the_pattern() {
    let pattern = 0x0807_0605_0403_0201_u64;
    for (name, set) in [
        ("unisono_copy", 1_u32),
        ("unisono_poison", 1),
        ("unisono_poison", 0),
    ] {
        let kernel = find("uint8", name).unwrap();
        let mut word = Shifted::new(4, &set.to_ne_bytes());
        let mut to = Shifted::new(3, &[9; 21]);
        let (dead, written) = (word.range(), to.range());
        let mut segments = [[0; 32]; 64];
        segments[0].copy_from_slice(&[64, written.start, 21, 0].map(usize::to_ne_bytes).concat());
        let parameters: [&[u8]; 4] = [
            &segments.concat(),
            &1_u32.to_ne_bytes(),
            &dead.start.to_ne_bytes(),
            &pattern.to_ne_bytes(),
        ];
        let faults = launch(
            kernel,
            &parameters,
            ([2, 1, 1], 7),
            vec![dead],
            vec![written],
        );
        assert!(faults.is_empty(), "{name}: {faults:?}");
        let expected: Vec<u8> = match set {
            0 => vec![9; 21],
            _ => (1..=8).cycle().take(21).collect(),
        };
        assert_eq!(to.bytes(), expected, "{name}");
    }
}

#[test]
fn what_is_copied_begins_where_a_word_says() {
    let kernel = find("uint8", "unisono_copy").unwrap();
    let content: Vec<u8> = (0..=199).collect();
    let pattern = 0x0807_0605_0403_0201_u64;
    for (shift, first, length, set) in [
        (0, 0, 160, 0_u32),
        (3, 5, 160, 0),
        (8, 40, 33, 1),
        (0, 7, 0, 0),
    ] {
        let mut from = Shifted::new(shift, &content);
        let mut to = Shifted::new(0, &[255; 200]);
        let (read, written) = (from.range(), to.range());
        let mut word = Shifted::new(8, &read.start.to_ne_bytes());
        let base = word.range();
        let mut failed = Shifted::new(4, &set.to_ne_bytes());
        let dead = failed.range();
        let mut segments = [[0; 32]; 64];
        let parts = [(first, 0, length), (1, 170, 9)];
        for (segment, (at, out, bytes)) in segments.iter_mut().zip(parts) {
            let part = [at, written.start + out, bytes, base.start];
            segment.copy_from_slice(&part.map(usize::to_ne_bytes).concat());
        }
        let parameters: [&[u8]; 4] = [
            &segments.concat(),
            &2_u32.to_ne_bytes(),
            &dead.start.to_ne_bytes(),
            &pattern.to_ne_bytes(),
        ];
        let shape = ([2, 2, 1], 7);
        let readable = match set {
            0 => vec![read, base, dead],
            _ => vec![dead],
        };
        let faults = launch(kernel, &parameters, shape, readable, vec![written]);
        assert!(faults.is_empty(), "{faults:?}");
        let mut expected = vec![255; 200];
        for (at, out, bytes) in parts {
            let made = match set {
                0 => content[at..at + bytes].to_vec(),
                _ => (1..=8).cycle().take(bytes).collect(),
            };
            expected[out..out + bytes].copy_from_slice(&made);
        }
        assert_eq!(to.bytes(), expected);
    }
}

#[test]
fn copies_move_every_byte_and_no_other() {
    let mut random = Random(6);
    let kernel = find("uint8", "unisono_copy").unwrap();
    for count in [0, 1, 2, 5, 64] {
        let mut from: Vec<_> = (0..count)
            .map(|_| {
                let len = random.below(200);
                let content: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
                Shifted::new(random.below(16), &content)
            })
            .collect();
        let mut to: Vec<_> = from
            .iter()
            .map(|from| Shifted::new(random.below(16), &vec![0; from.len]))
            .collect();
        let (read, written): (Vec<_>, Vec<_>) = from
            .iter_mut()
            .zip(&mut to)
            .map(|(from, to)| (from.range(), to.range()))
            .unzip();
        let mut segments = [[0; 32]; 64];
        for (i, segment) in segments.iter_mut().enumerate().take(count) {
            let words = [read[i].start, written[i].start, from[i].len, 0];
            segment.copy_from_slice(&words.map(usize::to_ne_bytes).concat());
        }
        for rows in [1, 3, 64] {
            let parameters: [&[u8]; 4] = [
                &segments.concat(),
                &(count as u32).to_ne_bytes(),
                &0_usize.to_ne_bytes(),
                &0_u64.to_ne_bytes(),
            ];
            let shape = ([2, rows, 1], 7);
            let faults = launch(kernel, &parameters, shape, read.clone(), written.clone());
            assert!(faults.is_empty(), "{faults:?}");
            for (from, to) in from.iter_mut().zip(&mut to) {
                assert_eq!(from.bytes(), to.bytes());
                to.bytes().fill(0);
            }
        }
    }
}

#[test]
fn addresses_that_a_device_refuses_are_faults() {
    let kernel = find("float32", "unisono_scale").unwrap();
    let scaled = |from: &mut Shifted, to: &mut Shifted, count: u64, offset: usize| {
        let parameters: [&[u8]; 4] = [
            &to.range().start.to_ne_bytes(),
            &(from.range().start + offset).to_ne_bytes(),
            &count.to_ne_bytes(),
            &2.0_f64.to_ne_bytes(),
        ];
        let (read, written) = (vec![from.range()], vec![to.range()]);
        launch(kernel, &parameters, ([1, 1, 1], 1), read, written).len()
    };
    let mut from = Shifted::new(0, &1.0_f32.to_ne_bytes().repeat(5));
    let mut to = Shifted::new(0, &[0; 20]);
    assert_eq!(scaled(&mut from, &mut to, 5, 0), 0);
    assert_eq!(to.bytes(), 2.0_f32.to_ne_bytes().repeat(5));
    assert_eq!(
        scaled(&mut from, &mut to, 6, 0),
        2,
        "beyond the end of both"
    );
    assert_eq!(scaled(&mut from, &mut to, 1, 2), 1, "not a multiple of 4");
}
