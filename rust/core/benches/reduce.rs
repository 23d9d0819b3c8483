//! How fast reductions run beside a copy of as many bytes.
//!
//! `cargo bench -p unisono --bench reduce [-- [all] [KIB]]`
//!
//! Prints gigabytes of result per second, the best of several rounds, for results of 16 KiB, 1 MiB
//! and 64 MiB or of the given size. `all` adds every operator worth a loop of its own, folded one
//! contribution at a time.

use std::hint::black_box;
use std::time::{Duration, Instant};

use unisono::reduce::{self, Kernel, Source, Streaming, Workers};
use unisono::types::{DataType, ReduceOp};

const SIZES_KIB: [usize; 3] = [16, 1024, 64 * 1024];

const SHOWN: [DataType; 5] = [
    DataType::Float32,
    DataType::Float64,
    DataType::Float16,
    DataType::BFloat16,
    DataType::Int8,
];

const ALL: [(DataType, &[ReduceOp]); 13] = {
    use ReduceOp::{Avg, Band, Land, Max, Prod, Sum};
    [
        (DataType::Float32, &[Sum, Prod, Max, Land]),
        (DataType::Float64, &[Sum, Max]),
        (DataType::Float16, &[Sum, Max]),
        (DataType::BFloat16, &[Sum, Max]),
        (DataType::Float8E4M3, &[Sum]),
        (DataType::Float8E5M2, &[Sum]),
        (DataType::Int8, &[Sum, Prod, Max]),
        (DataType::Int16, &[Sum, Prod, Max]),
        (DataType::Int32, &[Sum, Prod, Max, Band, Avg]),
        (DataType::Int64, &[Sum, Prod, Max]),
        (DataType::UInt8, &[Sum, Prod, Max]),
        (DataType::Bool, &[Sum]),
        (DataType::Complex64, &[Sum, Prod]),
    ]
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = arguments.iter().find_map(|a| a.parse().ok());
    let sizes = given.map_or(SIZES_KIB.to_vec(), |kib| vec![kib]);
    for kib in sizes {
        copies(kib * 1024);
        passes(kib * 1024);
        if arguments.iter().any(|a| a == "all") {
            folds(kib * 1024);
        }
    }
}

/// Copies: the C library's whole and in blocks, ours by either kind of store.
fn copies(bytes: usize) {
    const BLOCK: usize = 256 << 10;
    println!("{} KiB, GB/s of result", bytes / 1024);
    let src = vec![1_u8; bytes];
    let mut dst = vec![1_u8; bytes];
    let mut show = |what: &str, copy: &mut dyn FnMut(&mut [u8], &[u8])| {
        let speed = rate(bytes, || copy(black_box(&mut dst), black_box(&src)));
        println!("  {what:<32} {speed:7.1}");
    };
    let blocks = |dst: &mut [u8], src: &[u8], streaming| {
        for (dst, src) in dst.chunks_mut(BLOCK).zip(src.chunks(BLOCK)) {
            reduce::copy_hinted(dst, src, streaming);
        }
    };
    show("memcpy", &mut |dst, src| dst.copy_from_slice(src));
    show("copy", &mut reduce::copy);
    show("copy of blocks", &mut |dst, src| {
        blocks(dst, src, Streaming::No)
    });
    show("copy of blocks, streaming", &mut |dst, src| {
        blocks(dst, src, Streaming::Yes);
    });
}

/// A result from several contributions: folded one after the other through an accumulator, in one
/// pass by either kind of store, into one of the contributions, and by two threads.
fn passes(bytes: usize) {
    println!(
        "  {:<10} {:>8} {:>12} {:>12} {:>12} {:>12} {:>12}",
        "sum", "ranks", "one by one", "one pass", "streaming", "in place", "two threads"
    );
    let workers = Workers::new(2);
    let hint = Streaming::for_footprint(3 * bytes);
    for dtype in SHOWN {
        let kernel = Kernel::new(ReduceOp::Sum, dtype).expect("a meaningful pair");
        let ranks = vec![ones(dtype, bytes / dtype.size()); 8];
        let mut acc = vec![0_u8; bytes / dtype.size() * kernel.accumulator().size()];
        let mut dst = vec![0_u8; bytes];
        for world in [2, 4, 8] {
            let sources: Vec<_> = ranks[..world].iter().map(|r| Source::Element(r)).collect();
            let mut held = sources.clone();
            held[world - 1] = Source::Destination;
            let successive = rate(bytes, || {
                kernel.widen(&mut acc, black_box(&ranks[0]));
                for rank in &ranks[1..world] {
                    kernel.fold_element(&mut acc, black_box(rank));
                }
                kernel.finish(black_box(&mut dst), &acc, world);
            });
            let mut pass = |sources: &[Source<'_>], streaming| {
                rate(bytes, || {
                    kernel.reduce(black_box(&mut dst), black_box(sources), world, streaming);
                })
            };
            let alone = [
                pass(&sources, Streaming::No),
                pass(&sources, Streaming::Yes),
                pass(&held, Streaming::No),
            ];
            let shared = rate(bytes, || {
                workers.reduce(&kernel, black_box(&mut dst), &sources, world, hint);
            });
            print!("  {:<10} {world:>8} {successive:>12.1}", dtype.name());
            alone.iter().for_each(|speed| print!(" {speed:>12.1}"));
            println!(" {shared:>12.1}");
        }
    }
}

/// One contribution folded, by operator and type.
fn folds(bytes: usize) {
    for (dtype, ops) in ALL {
        let contribution = ones(dtype, bytes / dtype.size());
        let mut result = contribution.clone();
        let show = |what: &str, speed: f64| {
            println!("  {:<14} {what:<17} {speed:7.1}", dtype.name());
        };
        for op in ops {
            let kernel = Kernel::new(*op, dtype).expect("a meaningful pair");
            let wide = contribution.len() / dtype.size() * kernel.accumulator().size();
            let mut acc = vec![0_u8; wide];
            kernel.widen(&mut acc, &contribution);
            let fold = rate(bytes, || {
                kernel.fold_element(black_box(&mut acc), black_box(&contribution));
            });
            show(op.name(), fold);
            if *op == ReduceOp::Avg {
                let finish = rate(bytes, || kernel.finish(black_box(&mut result), &acc, 3));
                show("finish", finish);
            }
        }
        let kernel = Kernel::new(ReduceOp::Sum, dtype).expect("a meaningful pair");
        if kernel.accumulator() != dtype {
            let wide = contribution.len() / dtype.size() * kernel.accumulator().size();
            let acc = vec![0_u8; wide];
            let narrow = rate(bytes, || {
                kernel.narrow(black_box(&mut result), black_box(&acc))
            });
            show("narrow", narrow);
        }
    }
}

/// Bytes per second over 1e9, in the fastest of 20 rounds of a few milliseconds.
fn rate(bytes: usize, mut work: impl FnMut()) -> f64 {
    let repeats = (32_usize << 20).div_ceil(bytes).max(2) / 2;
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
