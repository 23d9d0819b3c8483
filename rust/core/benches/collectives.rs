//! Times all_reduce between processes of this host: `cargo bench -p unisono --bench collectives [-- RANKS...]`.
//!
//! Starts itself once per rank; the ranks meet in a file. For each size it prints the median over batches of the
//! time of one call in microseconds, on rank 0, in place, float32, and the algorithmic bandwidth.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use unisono::Communicator;
use unisono::config::Config;
use unisono::rendezvous;
use unisono::types::ReduceOp;

const BYTES: [usize; 8] = [
    8,
    512,
    4 << 10,
    16 << 10,
    128 << 10,
    1 << 20,
    8 << 20,
    64 << 20,
];
const PLACE: &str = "UNISONO_TEST_BENCH_PLACE";

fn main() {
    if let Ok(place) = std::env::var(PLACE) {
        let mut part = place.splitn(3, ' ');
        let rank = part
            .next()
            .and_then(|text| text.parse().ok())
            .expect("a rank");
        let world = part
            .next()
            .and_then(|text| text.parse().ok())
            .expect("a world size");
        return be(rank, world, part.next().expect("a URL"));
    }
    let mut worlds: Vec<usize> = std::env::args()
        .filter_map(|text| text.parse().ok())
        .collect();
    if worlds.is_empty() {
        worlds = vec![2, 4];
    }
    for world in worlds {
        println!("{world} ranks: bytes, microseconds, GB/s");
        let path = std::env::temp_dir().join(format!("unisono-bench-{}", std::process::id()));
        let program = std::env::current_exe().expect("this program");
        let mut ranks: Vec<_> = (0..world)
            .map(|rank| {
                Command::new(&program)
                    .env(PLACE, format!("{rank} {world} file://{}", path.display()))
                    .stdin(Stdio::null())
                    .spawn()
                    .expect("a rank")
            })
            .collect();
        for rank in &mut ranks {
            assert!(rank.wait().expect("a status").success(), "a rank failed");
        }
        std::fs::remove_file(&path).expect("the file can go");
    }
}

fn be(rank: usize, world: usize, url: &str) {
    let config = Config::from_env().expect("settings");
    let timeout = config.join_timeout.duration();
    let store = rendezvous::open_url(url, rank, world, timeout).expect("the store");
    let comm = Communicator::join(&*store, rank, world, config).expect("the group");
    for bytes in BYTES {
        let mut data = vec![0.0_f32; (bytes / 4).max(1)];
        let mut call = || {
            comm.all_reduce(&mut data, ReduceOp::Sum)
                .expect("all_reduce")
        };
        for _ in 0..3 {
            call();
        }
        let started = Instant::now();
        call();
        let mut once = [started.elapsed().as_secs_f64()];
        comm.all_reduce(&mut once, ReduceOp::Max)
            .expect("all_reduce");
        let batch = ((0.02 / once[0]) as usize).clamp(1, 2000);
        let batches = if bytes >= 8 << 20 { 9 } else { 21 };
        let mut times: Vec<Duration> = (0..batches)
            .map(|_| {
                comm.barrier().expect("barrier");
                let started = Instant::now();
                for _ in 0..batch {
                    comm.all_reduce(&mut data, ReduceOp::Sum)
                        .expect("all_reduce");
                }
                started.elapsed() / batch as u32
            })
            .collect();
        times.sort();
        let median = times[times.len() / 2].as_secs_f64();
        if rank == 0 {
            println!(
                "{bytes:>10} {:>12.2} {:>8.2}",
                median * 1e6,
                bytes as f64 / median / 1e9
            );
        }
    }
}
