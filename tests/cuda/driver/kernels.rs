//! The embedded kernels, launched by their wrapper. Their results are tested with the kernels themselves; these tests see
//! that the right one gets the right parameters.

use half::bf16;
use unisono::buffer::Element;
use unisono::error::Code;
use unisono::error::Result;
use unisono::transport::cuda::driver::{DeviceMemory, Pinned, Stream};
use unisono::transport::cuda::kernels::{
    self, Contributions, Guard, Segment, copy, poison, prepare, scale,
};
use unisono::types::{DataType, ReduceOp};

use crate::driver_calls::{capture, device};
use crate::harness;

harness::tests! {
    EmulatedAndClean {
        every_kernel_there_should_be_is_there
        contributions_are_reduced_in_order
        a_result_may_take_the_place_of_a_contribution
        a_contribution_is_scaled
        pieces_are_copied_in_several_launches
        nothing_is_made_of_what_is_gone
        large_launches_see_the_word_too
        the_first_launch_may_be_captured
        what_has_no_meaning_is_refused
    }
    Emulated {
        a_driver_without_a_compiler_says_so { FAIL: "cuModuleLoadData:1=221" }
    }
}

/// Elements in device memory.
struct Array(DeviceMemory, usize);

impl Array {
    fn new<T: Element>(values: &[T]) -> Self {
        let bytes = std::mem::size_of_val(values);
        let memory = DeviceMemory::allocate(device(), bytes).unwrap();
        // SAFETY: plain numbers.
        let raw = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), bytes) };
        memory.write(0, raw).unwrap();
        Self(memory, values.len())
    }

    fn read<T: Element + Default>(&self) -> Vec<T> {
        let mut values = vec![T::default(); self.1];
        let bytes = std::mem::size_of_val(&values[..]);
        // SAFETY: plain numbers; every pattern is a value.
        let raw = unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), bytes) };
        self.0.read(0, raw).unwrap();
        values
    }

    fn at(&self) -> u64 {
        self.0.address()
    }
}

/// Contributions at these addresses.
fn of(at: &[u64]) -> Contributions<'_> {
    Contributions {
        at,
        bases: 0,
        copies: 0,
    }
}

/// A reduction of a group that lives.
fn reduce(
    stream: &Stream,
    what: (DataType, ReduceOp),
    out: u64,
    sources: &[u64],
    count: u64,
    divisor: u32,
) -> Result<()> {
    let sources = of(sources);
    kernels::reduce(stream, what, out, sources, count, (divisor, Guard::NONE))
}

fn every_kernel_there_should_be_is_there() {
    let stream = Stream::create(device()).unwrap();
    let memory = DeviceMemory::allocate(device(), 1024).unwrap();
    for dtype in DataType::ALL {
        for op in ReduceOp::ALL {
            if op.check(dtype).is_ok() {
                reduce(
                    &stream,
                    (dtype, op),
                    memory.address(),
                    &[memory.address()],
                    3,
                    1,
                )
                .unwrap();
            }
        }
        if ReduceOp::PremulSum(2.0).check(dtype).is_ok() {
            scale(&stream, dtype, memory.address(), memory.address(), 3, 2.0).unwrap();
        }
    }
    stream.synchronize().unwrap();
}

fn contributions_are_reduced_in_order() {
    let stream = Stream::create(device()).unwrap();
    // The order shows in float32: 1e8 takes no 1, but two of them cancel.
    let inputs = [
        Array::new(&vec![1e8_f32; 10_001]),
        Array::new(&vec![1.0_f32; 10_001]),
        Array::new(&vec![-1e8_f32; 10_001]),
    ];
    let out = Array::new(&vec![5.0_f32; 10_001]);
    let at = |ranks: [usize; 3]| ranks.map(|rank| inputs[rank].at());
    let sum = (DataType::Float32, ReduceOp::Sum);
    reduce(&stream, sum, out.at(), &at([0, 1, 2]), 10_001, 3).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(out.read::<f32>(), vec![0.0; 10_001]);
    reduce(&stream, sum, out.at(), &at([0, 2, 1]), 10_000, 3).unwrap();
    stream.synchronize().unwrap();
    let seen = out.read::<f32>();
    assert_eq!(seen[..10_000], vec![1.0; 10_000]);
    assert_eq!(seen[10_000], 0.0);

    // The divisor, rounding once.
    let inputs = [
        bf16::from_f32(1.0),
        bf16::from_f32(2.0),
        bf16::from_f32(4.5),
    ]
    .map(|value| Array::new(&[value; 77]));
    let out = Array::new(&[bf16::ZERO; 77]);
    let from = [0, 1, 2].map(|rank: usize| inputs[rank].at());
    reduce(
        &stream,
        (DataType::BFloat16, ReduceOp::Avg),
        out.at(),
        &from,
        77,
        3,
    )
    .unwrap();
    stream.synchronize().unwrap();
    assert_eq!(out.read::<bf16>(), [bf16::from_f32(2.5); 77]);

    // Every source that there can be.
    let inputs: Vec<_> = (0..64_i64).map(|rank| Array::new(&[rank - 7; 3])).collect();
    let from: Vec<u64> = inputs.iter().map(Array::at).collect();
    let out = Array::new(&[0_i64; 3]);
    for (op, expected) in [
        (ReduceOp::Max, 56),
        (ReduceOp::Min, -7),
        (ReduceOp::Sum, 1568),
    ] {
        reduce(&stream, (DataType::Int64, op), out.at(), &from, 3, 64).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(out.read::<i64>(), [expected; 3]);
    }
}

fn a_result_may_take_the_place_of_a_contribution() {
    let stream = Stream::create(device()).unwrap();
    let inputs = [Array::new(&[2_u8; 1000]), Array::new(&[3_u8; 1000])];
    let from = [inputs[0].at(), inputs[1].at()];
    reduce(
        &stream,
        (DataType::UInt8, ReduceOp::Prod),
        from[1],
        &from,
        1000,
        2,
    )
    .unwrap();
    stream.synchronize().unwrap();
    assert_eq!(inputs[1].read::<u8>(), [6; 1000]);
}

fn a_contribution_is_scaled() {
    let stream = Stream::create(device()).unwrap();
    let input = Array::new(&[3.0_f64, -1.5, 0.25]);
    let out = Array::new(&[0.0_f64; 3]);
    scale(&stream, DataType::Float64, out.at(), input.at(), 3, 0.5).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(out.read::<f64>(), [1.5, -0.75, 0.125]);
}

fn pieces_are_copied_in_several_launches() {
    let stream = Stream::create(device()).unwrap();
    let values: Vec<u8> = (0..60_000_u32).map(|at| (at * 7) as u8).collect();
    let (from, to) = (Array::new(&values), Array::new(&vec![0_u8; 60_000]));
    // 150 pieces of all lengths and alignments, in the reverse order.
    let (mut segments, mut expected) = (Vec::new(), vec![0; 60_000]);
    let (mut read, mut write) = (0_usize, 60_000_usize);
    for length in 0..150 {
        write -= length + 1;
        let range = read..read + length;
        expected[write..write + length].copy_from_slice(&values[range]);
        segments.push(Segment::new(
            from.at() + read as u64,
            to.at() + write as u64,
            length as u64,
        ));
        read += length;
    }
    copy(&stream, &segments, Guard::NONE).unwrap();
    copy(&stream, &[], Guard::NONE).unwrap();
    stream.synchronize().unwrap();
    assert!(to.read::<u8>() == expected);
}

/// Where the word is set no source is read: these are no memory.
fn nothing_is_made_of_what_is_gone() {
    let stream = Stream::create(device()).unwrap();
    let word = Pinned::private(device(), 4096).unwrap();
    let guard = Guard::new(word.address(), 0, DataType::Float32);
    let source = Array::new(&[1.0_f32; 1000]);
    let out = Array::new(&[5.0_f32; 1000]);
    let sum = (DataType::Float32, ReduceOp::Sum);
    let piece = |from: u64, at: usize| Segment::new(from, out.at() + 4 * at as u64, 400);
    // Not yet.
    kernels::reduce(
        &stream,
        sum,
        out.at(),
        of(&[source.at(), source.at()]),
        1000,
        (1, guard),
    )
    .unwrap();
    copy(&stream, &[piece(source.at(), 0)], guard).unwrap();
    poison(&stream, &[piece(0, 100)], guard).unwrap();
    stream.synchronize().unwrap();
    let values = out.read::<f32>();
    assert!(values[..100].iter().all(|value| *value == 1.0));
    assert!(values[100..].iter().all(|value| *value == 2.0));

    word.word(0).store(1, std::sync::atomic::Ordering::Release);
    let out_of = |at: usize| out.at() + 4 * at as u64;
    copy(&stream, &[piece(8, 0)], guard).unwrap();
    poison(&stream, &[piece(8, 100)], guard).unwrap();
    kernels::reduce(&stream, sum, out_of(200), of(&[8, 16]), 100, (1, guard)).unwrap();
    stream.synchronize().unwrap();
    let values = out.read::<f32>();
    assert!(values[..300].iter().all(|value| value.is_nan()));
    assert!(values[300..].iter().all(|value| *value == 2.0));
}

/// Launches of many blocks are given a word of the device's memory.
fn large_launches_see_the_word_too() {
    let stream = Stream::create(device()).unwrap();
    let word = Pinned::private(device(), 4096).unwrap();
    let seen = Array::new(&[0_u32]);
    let guard = Guard::new(word.address(), seen.at(), DataType::Float32);
    let sum = (DataType::Float32, ReduceOp::Sum);
    let count = 100_000_u64;
    let (source, out) = (
        Array::new(&vec![1.0_f32; count as usize]),
        Array::new(&vec![0.0_f32; count as usize]),
    );
    for set in [false, true] {
        let expected = |value: f32| {
            move |seen: &f32| match set {
                true => seen.is_nan(),
                false => *seen == value,
            }
        };
        word.word(0)
            .store(u32::from(set), std::sync::atomic::Ordering::Release);
        let from = [source.at(), source.at()];
        kernels::reduce(&stream, sum, out.at(), of(&from), count, (1, guard)).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(seen.read::<u32>(), [u32::from(set)]);
        assert!(out.read::<f32>().iter().all(expected(2.0)));
        let piece = Segment::new(source.at(), out.at(), 4 * count);
        copy(&stream, &[piece], guard).unwrap();
        stream.synchronize().unwrap();
        assert!(out.read::<f32>().iter().all(expected(1.0)));
    }
}

fn the_first_launch_may_be_captured() {
    let stream = Stream::create(device()).unwrap();
    let value = Array::new(&[1_i32; 100]);
    let graph = capture(&stream, || {
        prepare(device(), DataType::Int32, Some(ReduceOp::Sum)).unwrap();
        let from = [value.at(), value.at()];
        reduce(
            &stream,
            (DataType::Int32, ReduceOp::Sum),
            value.at(),
            &from,
            100,
            2,
        )
        .unwrap();
    });
    for _ in 0..3 {
        graph.launch(&stream);
    }
    stream.synchronize().unwrap();
    assert_eq!(value.read::<i32>(), [8; 100]);
}

fn what_has_no_meaning_is_refused() {
    let stream = Stream::create(device()).unwrap();
    let code = |what, from: &[u64]| reduce(&stream, what, 0, from, 1, 1).unwrap_err().code;
    let sum = (DataType::Float32, ReduceOp::Sum);
    assert_eq!(
        code((DataType::Complex64, ReduceOp::Min), &[0]),
        Code::Unsupported
    );
    assert_eq!(code(sum, &[]), Code::InvalidArgument);
    assert_eq!(code(sum, &[0; 65]), Code::InvalidArgument);
    assert_eq!(
        scale(&stream, DataType::Bool, 0, 0, 1, 1.0)
            .unwrap_err()
            .code,
        Code::Unsupported
    );
    reduce(&stream, sum, 0, &[0], 0, 1).unwrap();
}

fn a_driver_without_a_compiler_says_so() {
    let stream = Stream::create(device()).unwrap();
    let memory = Array::new(&[1.0_f32]);
    let from = [memory.at()];
    let sum = || {
        reduce(
            &stream,
            (DataType::Float32, ReduceOp::Sum),
            memory.at(),
            &from,
            1,
            1,
        )
    };
    let error = sum().unwrap_err();
    assert_eq!(error.code, Code::Unsupported);
    assert!(
        error.message.contains("libnvidia-ptxjitcompiler"),
        "{error}"
    );
    assert!(
        error.message.contains("kernels for float32 on device 0"),
        "{error}"
    );
    // It is tried again.
    sum().unwrap();
    stream.synchronize().unwrap();
}
