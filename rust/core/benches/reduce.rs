//! How fast reductions run beside a copy of as many bytes.
//!
//! `cargo bench -p unisono --bench reduce [-- KIB]`
//!
//! Prints gigabytes of accumulator per second, the best of several rounds, for buffers of 16 KiB,
//! 256 KiB and 16 MiB or of the given size.

use std::hint::black_box;
use std::time::{Duration, Instant};

use unisono::reduce::{self, Kernel};
use unisono::types::{DataType, ReduceOp};

const SHOWN: [(DataType, &[ReduceOp]); 11] = {
    use ReduceOp::{Band, Land, Max, Prod, Sum};
    [
        (DataType::Float32, &[Sum, Prod, Max, Land]),
        (DataType::Float64, &[Sum, Max]),
        (DataType::Float16, &[Sum, Max]),
        (DataType::BFloat16, &[Sum, Max]),
        (DataType::Float8E4M3, &[Sum]),
        (DataType::Float8E5M2, &[Sum]),
        (DataType::Int32, &[Sum, Prod, Max, Band]),
        (DataType::Int64, &[Sum, Prod, Max]),
        (DataType::UInt8, &[Sum, Prod, Max]),
        (DataType::Bool, &[Sum]),
        (DataType::Complex64, &[Sum, Prod]),
    ]
};

fn main() {
    let sizes: Vec<usize> = match std::env::args().filter_map(|a| a.parse().ok()).next() {
        Some(kib) => vec![kib],
        None => vec![16, 256, 16 * 1024],
    };
    for kib in sizes {
        measure(kib * 1024);
    }
}

fn measure(bytes: usize) {
    println!("{} KiB of accumulator, GB/s", bytes / 1024);
    let src = vec![0_u8; bytes];
    let mut dst = vec![0_u8; bytes];
    let copy = rate(bytes, || reduce::copy(black_box(&mut dst), black_box(&src)));
    println!("  {:<14} {:<6} {copy:7.1}", "", "copy");
    for (dtype, ops) in SHOWN {
        let wide = dtype.accumulator().size();
        let contribution = ones(dtype, bytes / wide);
        let mut acc = vec![0_u8; bytes];
        let mut result = contribution.clone();
        for op in ops {
            let kernel = Kernel::new(*op, dtype).expect("a meaningful pair");
            reduce::widen(dtype, &mut acc, &contribution);
            let fold = rate(bytes, || {
                kernel.fold_element(black_box(&mut acc), black_box(&contribution));
            });
            println!(
                "  {dtype:<14} {op:<6} {fold:7.1}",
                dtype = dtype.name(),
                op = op.name()
            );
        }
        if wide != dtype.size() {
            let narrow = rate(bytes, || {
                reduce::narrow(dtype, black_box(&mut result), black_box(&acc));
            });
            println!("  {:<14} {:<6} {narrow:7.1}", dtype.name(), "narrow");
        }
    }
}

/// Bytes per second over 1e9, in the fastest of 20 rounds of a few milliseconds.
fn rate(bytes: usize, mut work: impl FnMut()) -> f64 {
    let repeats = (64_usize << 20).div_ceil(bytes).max(2) / 2;
    let round = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..repeats).for_each(|_| work());
        start.elapsed()
    };
    let best = (0..20).map(|_| round(&mut work)).min();
    let best = best.unwrap_or(Duration::MAX).as_secs_f64();
    bytes as f64 * repeats as f64 / best / 1e9
}

/// Elements of 1, so that no sum soon meets infinities or subnormals.
fn ones(dtype: DataType, count: usize) -> Vec<u8> {
    let one: Vec<u8> = match dtype {
        DataType::Float16 => vec![0x00, 0x3c],
        DataType::BFloat16 => vec![0x80, 0x3f],
        DataType::Float8E4M3 => vec![0x38],
        DataType::Float8E5M2 => vec![0x3c],
        DataType::Float64 => 1_f64.to_le_bytes().to_vec(),
        DataType::Float32 | DataType::Complex64 => 1_f32.to_le_bytes().to_vec(),
        _ => vec![1],
    };
    let size = dtype.size() * count;
    one.into_iter().cycle().take(size).collect()
}
