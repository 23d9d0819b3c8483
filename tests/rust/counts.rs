//! Ranks whose counts do not fit together, with a zero among them: all of the ranks learn of it.
//!
//! A rank whose counts are all zero has nothing to move, and must not leave with success while another waits for it.

mod ranks;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use unisono::buffer::Memory;
use unisono::error::{Code, Error, Result};
use unisono::types::{DataType, ReduceOp};
use unisono::{Communicator, Request, Sizes};

use ranks::Transport;

/// Elements where another rank has none: a message that is posted, and one that is lent or streamed.
const COUNTS: [usize; 2] = [3, 300_000];

fn run(transport: Transport, world: usize, body: impl Fn(&Communicator) + Send + Sync) {
    ranks::run(transport, world, &[("timeout", "30")], |comm| body(&comm));
}

/// Where ranks wait for each other before they leave: a rank that has left cannot hear of a mistake, nor tell the
/// others.
#[derive(Default)]
struct Meeting(AtomicUsize);

impl Meeting {
    /// Waits until `ranks` have come, though not for ever: one may have panicked.
    fn wait_for(&self, ranks: usize) {
        let begun = Instant::now();
        self.0.fetch_add(1, Ordering::AcqRel);
        while self.0.load(Ordering::Acquire) < ranks && begun.elapsed().as_secs() < 20 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
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

/// The error is a mismatch of `operation` that names rank 1, another rank and both counts.
fn assert_names(error: &Error, operation: &str, count: usize, what: &str) {
    assert_eq!(error.code, Code::Mismatch, "{what}: {error}");
    let name = format!("{operation} #1");
    let counts = [" 0 elements", &format!(" {count} elements")];
    for part in ["rank 1", &name].into_iter().chain(counts) {
        let found = error.message.contains(part);
        assert!(found, "{what}: {part} is missing in: {error}");
    }
    let other = error.message.contains("rank 0") || error.message.contains("rank 2");
    assert!(other, "{what}: only one rank is named in: {error}");
}

/// All ranks fail with a mismatch of `operation`, in the call or, where a rank was through before the others noticed, in
/// one of the next: of a barrier a rank may be through too before another has come to what is wrong.
fn assert_mismatch(operation: &str, call: impl Fn(usize, usize, usize) -> Call + Sync) {
    for transport in [Transport::Shm, Transport::Tcp] {
        for world in [2, 3] {
            for count in COUNTS {
                let what = format!("{operation}, {transport:?}, {world} ranks, {count} elements");
                let through = Meeting::default();
                run(transport, world, |comm| {
                    let begun = Instant::now();
                    let mut result = call(comm.rank(), world, count).carry_out(comm);
                    while result.is_ok() && begun.elapsed().as_secs() < 20 {
                        result = comm.barrier();
                    }
                    let error = result.expect_err(&what);
                    assert_names(&error, operation, count, &what);
                    assert!(begun.elapsed().as_secs() < 20, "{what}: by a timeout");
                    // The first to leave must not turn the other's error into its own loss.
                    through.wait_for(world);
                });
            }
        }
    }
}

/// The same where ranks 0 and 1 call nothing else: neither may have to wait for the other, and the one that has nothing
/// may have been idle for long when the other comes.
fn assert_mismatch_of_idle_ranks(
    operation: &str,
    call: impl Fn(usize, usize, usize) -> Call + Sync,
) {
    for transport in [Transport::Shm, Transport::Tcp] {
        for (count, late) in [
            (COUNTS[0], 0),
            (COUNTS[1], 0),
            (COUNTS[0], 600),
            (COUNTS[1], 600),
        ] {
            let what = format!("{operation}, {transport:?}, {count} elements, {late} ms late");
            let through = Meeting::default();
            run(transport, 3, |comm| {
                if comm.rank() == 0 {
                    std::thread::sleep(Duration::from_millis(late));
                }
                let begun = Instant::now();
                let result = call(comm.rank(), 3, count).carry_out(comm);
                let mut error = result.err();
                while comm.rank() < 2 && error.is_none() {
                    let waited = begun.elapsed();
                    assert!(
                        waited.as_secs() < 20,
                        "{what}: rank {} heard nothing",
                        comm.rank()
                    );
                    std::thread::sleep(Duration::from_millis(1));
                    error = comm.error();
                }
                if let Some(error) = error {
                    assert_names(&error, operation, count, &what);
                }
                through.wait_for(3);
            });
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
fn a_rank_that_is_idle_learns_that_another_waits_for_it() {
    assert_mismatch_of_idle_ranks("all_to_all", |rank, world, count| match rank {
        0 => all_to_all(vec![0; world], only(world, 1, count)),
        _ => all_to_all(vec![0; world], vec![0; world]),
    });
    assert_mismatch_of_idle_ranks("gather", |rank, world, count| match rank {
        0 => gather(rank, only(world, 1, count)),
        _ => gather(rank, vec![0; world]),
    });
    assert_mismatch_of_idle_ranks("scatter", |rank, world, count| match rank {
        1 => scatter(rank, only(world, 1, count)),
        _ => scatter(rank, vec![0; world]),
    });
}

#[test]
fn a_rank_that_is_idle_learns_that_another_sends_to_it() {
    assert_mismatch_of_idle_ranks("all_to_all", |rank, world, count| match rank {
        0 => all_to_all(only(world, 1, count), vec![0; world]),
        _ => all_to_all(vec![0; world], vec![0; world]),
    });
    assert_mismatch_of_idle_ranks("gather", |rank, world, count| match rank {
        1 => gather(rank, only(world, 1, count)),
        _ => gather(rank, vec![0; world]),
    });
    assert_mismatch_of_idle_ranks("scatter", |rank, world, count| match rank {
        0 => scatter(rank, only(world, 1, count)),
        _ => scatter(rank, vec![0; world]),
    });
}

/// Ranks 1 to 3 go on among themselves, and never wait for long, while rank 0 waits for rank 1 or has sent to it.
#[test]
fn ranks_that_work_on_without_the_other_learn_of_it() {
    const WORLD: usize = 4;
    for transport in [Transport::Shm, Transport::Tcp] {
        for count in COUNTS {
            for sends in [false, true] {
                let what = format!("{transport:?}, {count} elements, sends: {sends}");
                let through = Meeting::default();
                run(transport, WORLD, |comm| {
                    let rank = comm.rank();
                    let begun = Instant::now();
                    if rank == 0 {
                        let list = only(WORLD, 1, count);
                        let call = match sends {
                            true => all_to_all(list, vec![0; WORLD]),
                            false => all_to_all(vec![0; WORLD], list),
                        };
                        let mut error = call.carry_out(comm).err();
                        while error.is_none() {
                            assert!(begun.elapsed().as_secs() < 20, "{what}");
                            std::thread::sleep(Duration::from_millis(1));
                            error = comm.error();
                        }
                        let error = error.expect("an error");
                        assert_names(&error, "all_to_all", count, &what);
                    } else {
                        let silent = all_to_all(vec![0; WORLD], vec![0; WORLD]);
                        silent.carry_out(comm).expect("nothing is wrong yet");
                        let (after, before) = (rank % 3 + 1, (rank + 1) % 3 + 1);
                        let error = loop {
                            assert!(begun.elapsed().as_secs() < 20, "{what}");
                            let (to, from) = (only(WORLD, after, 5), only(WORLD, before, 5));
                            if let Err(error) = all_to_all(to, from).carry_out(comm) {
                                break error;
                            }
                        };
                        assert_names(&error, "all_to_all", count, &what);
                    }
                    through.wait_for(WORLD);
                });
            }
        }
    }
}

/// Links that are open on this rank.
fn links(comm: &Communicator) -> u64 {
    let memory = comm.memory();
    let links = memory.iter().find(|(name, _)| *name == "links");
    links.expect("a number of links").1
}

/// The resources of a rank grow with the ranks it talks to, and not with the ranks there are.
#[test]
fn only_ranks_that_exchange_something_have_links() {
    const WORLD: usize = 7;
    for transport in [Transport::Shm, Transport::Tcp] {
        for count in COUNTS {
            // A rank that is ahead opens the links of what comes next.
            let [first, second, last] = [(); 3].map(|()| Meeting::default());
            run(transport, WORLD, |comm| {
                let rank = comm.rank();
                let (after, before) = ((rank + 1) % WORLD, (rank + WORLD - 1) % WORLD);
                let nothing = || vec![0; WORLD];
                for call in [
                    all_to_all(nothing(), nothing()),
                    gather(rank, nothing()),
                    scatter(rank, nothing()),
                ] {
                    call.carry_out(comm).expect("nothing is wrong");
                }
                assert_eq!(links(comm), 0);
                first.wait_for(WORLD);
                for _ in 0..3 {
                    let (to, from) = (only(WORLD, after, count), only(WORLD, before, count));
                    all_to_all(to, from).carry_out(comm).expect("neighbours");
                }
                assert_eq!(links(comm), 2);
                second.wait_for(WORLD);
                // Rank 0 is the root; ranks 3 and 5 have something.
                let mut counts = only(WORLD, 3, count);
                counts[5] = 1;
                for call in [gather, scatter] {
                    call(rank, counts.clone()).carry_out(comm).expect("a root");
                }
                let more = [2, 0, 0, 1, 0, 1, 0][rank];
                assert_eq!(links(comm), 2 + more, "rank {rank}");
                last.wait_for(WORLD);
            });
        }
    }
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
    for transport in [Transport::Shm, Transport::Tcp] {
        let through = Meeting::default();
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
            through.wait_for(4);
        });
    }
}

/// Nothing is wrong with nothing, and the next operation finds its messages.
#[test]
fn nothing_everywhere_is_in_order() {
    for transport in [Transport::Shm, Transport::Tcp] {
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

/// The cost of an `all_to_all` with many zeros: `cargo test --release --test counts -- --ignored --nocapture`.
#[test]
#[ignore = "run by hand: it measures and asserts nothing, and a claim about time is no test"]
fn the_cost_of_zeros() {
    for transport in [Transport::Shm, Transport::Tcp] {
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
                    let mut best = Duration::MAX;
                    for _ in 0..5 {
                        comm.barrier().unwrap();
                        let begun = Instant::now();
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
                            "{transport:?}, {world} ranks, {pattern}, {elements} elements: {each:.2} us"
                        );
                    }
                });
            }
        }
    }
}
