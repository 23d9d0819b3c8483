//! Ranks that were given counts that do not fit together, of which one is zero: all of them learn of it.
//!
//! A rank whose counts are all zero has nothing to move, and must not leave with success while another waits for it.

use unisono::buffer::Memory;
use unisono::config::Config;
use unisono::error::{Code, Result};
use unisono::rendezvous::memory::MemoryStore;
use unisono::types::{DataType, ReduceOp};
use unisono::{Communicator, Request, Sizes};

/// Elements where another rank has none: a message that is posted, and one that is lent or streamed.
const COUNTS: [usize; 2] = [3, 300_000];

/// Runs `body` as every rank, each on a thread of its own.
fn run(transport: &str, world: usize, body: impl Fn(&Communicator) + Sync) {
    let mut config = Config::default();
    config.set("timeout", "30").expect("a setting");
    config.set("transport", transport).expect("a setting");
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        for rank in 0..world {
            let (body, store, config) = (&body, &store, config.clone());
            scope.spawn(move || {
                let comm = Communicator::join(store, rank, world, config);
                body(&comm.expect("a communicator"));
            });
        }
    });
}

/// A collective of one rank with its counts.
struct Call {
    request: fn(Memory, Memory, Sizes) -> Request,
    sizes: Sizes,
    /// Elements of the input and of the output.
    lengths: (usize, usize),
}

impl Call {
    fn carry_out(self, comm: &Communicator) -> Result<()> {
        let input = vec![1_f32; self.lengths.0];
        let mut output = vec![0_f32; self.lengths.1];
        let (from, to) = (input.as_ptr().cast_mut().cast(), output.as_mut_ptr().cast());
        // SAFETY: both buffers live until `run` returns, which is after the end of the operation; the input is not
        // written.
        unsafe {
            let from = Memory::from_raw_parts(from, size_of_val(&input[..]));
            let to = Memory::from_raw_parts(to, size_of_val(&output[..]));
            comm.run((self.request)(from, to, self.sizes)).map(drop)
        }
    }
}

fn all_to_all(send: Vec<usize>, recv: Vec<usize>) -> Call {
    Call {
        request: |input, output, sizes| {
            Request::all_to_all(DataType::Float32, input, output, sizes)
        },
        lengths: (send.iter().sum(), recv.iter().sum()),
        sizes: Sizes::PerPair { send, recv },
    }
}

fn gather(rank: usize, counts: Vec<usize>) -> Call {
    Call {
        request: |input, output, sizes| {
            let output = (!output.is_empty()).then_some(output);
            Request::gather(DataType::Float32, 0, input, output, sizes)
        },
        lengths: (
            counts[rank],
            if rank == 0 { counts.iter().sum() } else { 0 },
        ),
        sizes: Sizes::PerRank(counts),
    }
}

fn scatter(rank: usize, counts: Vec<usize>) -> Call {
    Call {
        request: |input, output, sizes| {
            let input = (!input.is_empty()).then_some(input);
            Request::scatter(DataType::Float32, 0, input, output, sizes)
        },
        lengths: (
            if rank == 0 { counts.iter().sum() } else { 0 },
            counts[rank],
        ),
        sizes: Sizes::PerRank(counts),
    }
}

fn all_gather(rank: usize, counts: Vec<usize>) -> Call {
    Call {
        request: |input, output, sizes| {
            Request::all_gather(DataType::Float32, Some(input), output, sizes)
        },
        lengths: (counts[rank], counts.iter().sum()),
        sizes: Sizes::PerRank(counts),
    }
}

fn reduce_scatter(rank: usize, counts: Vec<usize>) -> Call {
    Call {
        request: |input, output, sizes| {
            Request::reduce_scatter(DataType::Float32, ReduceOp::Sum, input, output, sizes)
        },
        lengths: (counts.iter().sum(), counts[rank]),
        sizes: Sizes::PerRank(counts),
    }
}

fn all_reduce(count: usize) -> Call {
    Call {
        request: |_, output, _| Request::all_reduce(DataType::Float32, ReduceOp::Sum, None, output),
        lengths: (0, count),
        sizes: Sizes::Even(count),
    }
}

/// All ranks fail with a mismatch of `operation` that names rank 1, another rank and both counts, in the call or, where a
/// rank was through before the others noticed, in the next.
fn assert_mismatch(operation: &str, call: impl Fn(usize, usize, usize) -> Call + Sync) {
    for transport in ["shm", "tcp"] {
        for world in [2, 3] {
            for count in COUNTS {
                let what = format!("{operation}, {transport}, {world} ranks, {count} elements");
                run(transport, world, |comm| {
                    let begun = std::time::Instant::now();
                    let error = call(comm.rank(), world, count)
                        .carry_out(comm)
                        .and_then(|()| comm.barrier())
                        .expect_err(&what);
                    assert_eq!(error.code, Code::Mismatch, "{what}: {error}");
                    assert!(begun.elapsed().as_secs() < 20, "{what}: by a timeout");
                    let name = format!("{operation} #1");
                    let counts = [" 0 elements", &format!(" {count} elements")];
                    for part in ["rank 1", &name].into_iter().chain(counts) {
                        let found = error.message.contains(part);
                        assert!(found, "{what}: {part} is missing in: {error}");
                    }
                    let other =
                        error.message.contains("rank 0") || error.message.contains("rank 2");
                    assert!(other, "{what}: only one rank is named in: {error}");
                    // The first to leave must not turn the other's error into its own loss.
                    std::thread::sleep(std::time::Duration::from_millis(100));
                });
            }
        }
    }
}

/// `value` at `index` of a list of zeros.
fn only(world: usize, index: usize, value: usize) -> Vec<usize> {
    let mut counts = vec![0; world];
    counts[index] = value;
    counts
}

#[test]
fn all_to_all_where_a_rank_sends_nothing_to_one_that_waits() {
    assert_mismatch("all_to_all", |rank, world, count| match rank {
        0 => all_to_all(vec![0; world], only(world, 1, count)),
        _ => all_to_all(vec![0; world], vec![0; world]),
    });
}

#[test]
fn all_to_all_where_a_rank_sends_to_one_that_expects_nothing() {
    assert_mismatch("all_to_all", |rank, world, count| match rank {
        0 => all_to_all(only(world, 1, count), vec![0; world]),
        _ => all_to_all(vec![0; world], vec![0; world]),
    });
}

#[test]
fn gather_where_only_one_side_has_nothing() {
    assert_mismatch("gather", |rank, world, count| match rank {
        0 => gather(rank, only(world, 1, count)),
        _ => gather(rank, vec![0; world]),
    });
    assert_mismatch("gather", |rank, world, count| match rank {
        1 => gather(rank, only(world, 1, count)),
        _ => gather(rank, vec![0; world]),
    });
}

#[test]
fn scatter_where_only_one_side_has_nothing() {
    assert_mismatch("scatter", |rank, world, count| match rank {
        0 => scatter(rank, only(world, 1, count)),
        _ => scatter(rank, vec![0; world]),
    });
    assert_mismatch("scatter", |rank, world, count| match rank {
        1 => scatter(rank, only(world, 1, count)),
        _ => scatter(rank, vec![0; world]),
    });
}

#[test]
fn all_gather_where_only_one_rank_believes_in_nothing() {
    assert_mismatch("all_gather", |rank, world, count| match rank {
        1 => all_gather(rank, vec![0; world]),
        _ => all_gather(rank, only(world, 0, count)),
    });
}

#[test]
fn reduce_scatter_where_only_one_rank_believes_in_nothing() {
    assert_mismatch("reduce_scatter", |rank, world, count| match rank {
        1 => reduce_scatter(rank, vec![0; world]),
        _ => reduce_scatter(rank, only(world, 0, count)),
    });
}

#[test]
fn all_reduce_of_nothing_beside_one_of_something() {
    assert_mismatch("all_reduce", |rank, _, count| match rank {
        1 => all_reduce(0),
        _ => all_reduce(count),
    });
}

/// As many elements in all, and messages of the same lengths: what differs is whose they are.
#[test]
fn counts_that_are_distributed_otherwise() {
    for transport in ["shm", "tcp"] {
        run(transport, 4, |comm| {
            let counts = match comm.rank() {
                3 => vec![2, 0, 5, 1],
                _ => vec![2, 5, 0, 1],
            };
            let error = all_gather(comm.rank(), counts)
                .carry_out(comm)
                .and_then(|()| comm.barrier())
                .expect_err("counts that differ");
            assert_eq!(error.code, Code::Mismatch, "{error}");
            assert!(error.message.contains("all_gather #1"), "{error}");
            assert!(error.message.contains("rank 3"), "{error}");
            std::thread::sleep(std::time::Duration::from_millis(100));
        });
    }
}

/// Nothing is wrong with nothing, and the next operation finds its messages.
#[test]
fn nothing_everywhere_is_in_order() {
    for transport in ["shm", "tcp"] {
        run(transport, 3, |comm| {
            for _ in 0..3 {
                all_to_all(vec![0; 3], vec![0; 3]).carry_out(comm).unwrap();
                gather(comm.rank(), vec![0; 3]).carry_out(comm).unwrap();
                scatter(comm.rank(), vec![0; 3]).carry_out(comm).unwrap();
                all_gather(comm.rank(), vec![0; 3]).carry_out(comm).unwrap();
                reduce_scatter(comm.rank(), vec![0; 3])
                    .carry_out(comm)
                    .unwrap();
                all_reduce(0).carry_out(comm).unwrap();
                let mut sum = [1];
                comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [3]);
            }
        });
    }
}

/// What an `all_to_all` with many zeros costs: `cargo test --release --test counts -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn the_cost_of_zeros() {
    for transport in ["shm", "tcp"] {
        for world in [4, 8] {
            for (pattern, elements) in [
                ("no element", 0),
                ("a neighbour", 256),
                ("a neighbour", 65_536),
            ] {
                run(transport, world, |comm| {
                    let after = only(world, (comm.rank() + 1) % world, elements);
                    let before = only(world, (comm.rank() + world - 1) % world, elements);
                    const ROUNDS: u32 = 2000;
                    let mut best = std::time::Duration::MAX;
                    for _ in 0..5 {
                        comm.barrier().unwrap();
                        let begun = std::time::Instant::now();
                        for _ in 0..ROUNDS {
                            let call = all_to_all(after.clone(), before.clone());
                            call.carry_out(comm).unwrap();
                        }
                        comm.barrier().unwrap();
                        best = best.min(begun.elapsed());
                    }
                    if comm.rank() == 0 {
                        let each = best.as_secs_f64() / f64::from(ROUNDS) * 1e6;
                        println!(
                            "{transport}, {world} ranks, {pattern}, {elements} elements: {each:.2} us"
                        );
                    }
                });
            }
        }
    }
}
