//! Windows over device memory: mapped, and through the host; beside memory of the host; and the ends.

use std::time::{Duration, Instant};

use unisono::Communicator;
use unisono::error::{Code, Error};
use unisono::heap::Buffer;
use unisono::one_sided::Owner;
use unisono::transport::cuda::driver::{DeviceMemory, Stream};
use unisono::types::{DataType, Rank};
use unisono::window::Window;

use crate::gpu::{Array, bytes_of, stream_of};
use crate::harness::{Ranks, Test};

const SOON: Duration = Duration::from_secs(30);
const LENGTH: usize = 1000;
const BYTES: usize = 4 * LENGTH;
/// Where exposed bytes begin in their allocation.
const INSIDE: usize = 5000;

/// Memory that a window exposes: numbers, each that of the rank at first.
enum Exposed {
    Device(Array, Stream),
    Heap(Buffer<u32>),
    Private(Vec<u32>),
}

impl Exposed {
    fn on_device(rank: Rank, device: u32) -> Self {
        let stream = stream_of(device);
        let mut bytes = vec![0xee; INSIDE];
        bytes.extend(bytes_of(&[rank as u32; LENGTH]));
        Self::Device(Array::of(&stream, &bytes), stream)
    }

    fn in_heap(rank: Rank) -> Self {
        let mut numbers = Buffer::zeroed(LENGTH);
        numbers.fill(rank as u32);
        Self::Heap(numbers)
    }

    fn start(&mut self) -> *mut u8 {
        match self {
            Self::Device(array, _) => address(array.address() + INSIDE as u64),
            Self::Heap(numbers) => numbers.as_mut_ptr().cast(),
            Self::Private(numbers) => numbers.as_mut_ptr().cast(),
        }
    }

    fn number(&self, at: usize) -> u32 {
        match self {
            Self::Device(array, stream) => read(stream, array.address() + (INSIDE + 4 * at) as u64),
            Self::Heap(numbers) => numbers[at],
            Self::Private(numbers) => numbers[at],
        }
    }

    fn window(&mut self, comm: &Communicator) -> Result<Window, Error> {
        expose(comm, self.start(), Box::new(()))
    }
}

fn address(of: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(of as usize)
}

fn read(stream: &Stream, at: u64) -> u32 {
    let mut bytes = [0; 4];
    stream.read(at, &mut bytes).expect("read");
    u32::from_ne_bytes(bytes)
}

fn expose(comm: &Communicator, start: *mut u8, owner: Owner) -> Result<Window, Error> {
    // SAFETY: tests keep the memory until the window is closed, or the owner has it, and agree on who uses it when.
    unsafe { comm.window((start, BYTES), (DataType::UInt32, &[]), owner) }
}

fn put(window: &Window, to: Rank, at: usize, source: *const u8, count: usize) -> Result<(), Error> {
    // SAFETY: the source outlives the call.
    let put = unsafe { window.put(to, 4 * at, (source, 4 * count), Box::new(()))? };
    put.map_or(Ok(()), |transfer| transfer.wait(Some(SOON)))
}

fn get(window: &Window, from: Rank, at: usize, target: *mut u8, count: usize) -> Result<(), Error> {
    // SAFETY: as in `put`.
    let got = unsafe { window.get(from, 4 * at, (target, 4 * count), Box::new(()))? };
    got.map_or(Ok(()), |transfer| transfer.wait(Some(SOON)))
}

/// Each rank puts into the next one's memory, from the host and from its device, and reads the one before.
fn exchange(comm: &Communicator, exposed: &Exposed, window: &Window, device: u32) {
    let (rank, world) = (comm.rank(), comm.world_size());
    let (next, before) = ((rank + 1) % world, (rank + world - 1) % world);
    let stream = stream_of(device);
    let own = Array::of(&stream, &bytes_of(&[0_u32; 10]));
    for round in 0..6_u32 {
        let sent = [round * 100 + rank as u32; 10];
        let source = match round % 2 {
            0 => sent.as_ptr().cast(),
            _ => {
                own.write(&stream, &bytes_of(&sent));
                address(own.address()).cast_const()
            }
        };
        put(window, next, 20, source, 10).unwrap();
        window.signal(next).unwrap();
        window.wait_signal(before, Some(SOON)).unwrap();
        let came = round * 100 + before as u32;
        let numbers = [19, 20, 29, 30].map(|at| exposed.number(at));
        assert_eq!(numbers, [rank as u32, came, came, rank as u32]);
        let mut got = [0_u32; 3];
        get(window, before, LENGTH - 3, got.as_mut_ptr().cast(), 3).unwrap();
        assert_eq!(got, [before as u32; 3]);
        get(window, before, 0, address(own.address()), 3).unwrap();
        assert_eq!(read(&stream, own.address() + 8), before as u32);
        // That this rank has read.
        window.signal(before).unwrap();
        window.wait_signal(next, Some(SOON)).unwrap();
    }
    // One's own, from another place of it.
    put(window, rank, 40, [7_u32; 2].as_ptr().cast(), 2).unwrap();
    assert_eq!(exposed.number(41), 7);
    window.fence().unwrap();
}

#[test]
fn ranks_write_to_each_others_devices() {
    let cases: [(Ranks, &[_]); 5] = [
        // A copy that is not waited for would come late.
        (Ranks::Processes, &[("DELAY", "copy:2000")]),
        (Ranks::Processes, &[("DEVICES", "2"), ("REUSE", "yes")]),
        (Ranks::Processes, &[("HOST_POINTERS", "separate")]),
        (Ranks::Local, &[("DELAY", "copy:2000")]),
        (Ranks::Local, &[("DEVICES", "2")]),
    ];
    for (ranks, driver) in cases {
        let test = Test {
            driver,
            ..Test::new(ranks, 3)
        };
        test.run(|comm| {
            let rank = comm.rank();
            let device = match driver {
                [("DEVICES", _), ..] => rank as u32 % 2,
                _ => 0,
            };
            let mut exposed = Exposed::on_device(rank, device);
            let window = exposed.window(&comm).unwrap();
            assert!(window.has_devices());
            exchange(&comm, &exposed, &window, device);
            let next = (rank + 1) % 3;
            let view = window.view(next).unwrap();
            assert!(view.is_on_device() && view.len() == BYTES);
            let seen = view.start().as_ptr().expose_provenance() as u64;
            assert_eq!(read(&stream_of(device), seen), next as u32);
            drop(view);
            window.fence().unwrap();
            window.close().unwrap();
        });
    }
}

/// In the heap, and where it is reached by messages.
#[test]
fn some_ranks_expose_memory_of_the_host() {
    for ranks in [Ranks::Processes, Ranks::Local] {
        let test = Test::new(ranks, 3);
        test.run(|comm| {
            let rank = comm.rank();
            for on_host in [Exposed::in_heap(1), Exposed::Private(vec![1; LENGTH])] {
                let mut exposed = match rank {
                    1 => on_host,
                    _ => Exposed::on_device(rank, 0),
                };
                let window = exposed.window(&comm).unwrap();
                exchange(&comm, &exposed, &window, 0);
                window.close().unwrap();
            }
        });
    }
}

#[test]
fn memory_that_cannot_be_mapped_is_reached_through_the_host() {
    let cases: [(Ranks, &[_], &[_], &str); 5] = [
        (
            Ranks::Processes,
            &[],
            &[("IPC", "refuse-import")],
            "of another process",
        ),
        (
            Ranks::Processes,
            &[],
            &[("IPC", "refuse-export")],
            "only memory of cuMemAlloc",
        ),
        // Device 0 does not reach device 1.
        (
            Ranks::Processes,
            &[],
            &[("DEVICES", "2"), ("PEER_ACCESS", "no")],
            "memory of",
        ),
        (
            Ranks::Processes,
            &[("transport", "tcp")],
            &[("SEED", "1")],
            "over TCP",
        ),
        (Ranks::Threads, &[("host", "two")], &[], "not on this host"),
    ];
    for (ranks, config, driver, why) in cases {
        let test = Test {
            config,
            driver,
            ..Test::new(ranks, 2)
        };
        test.run(|comm| {
            let device = match driver {
                [("DEVICES", _), ..] => comm.rank() as u32,
                _ => 0,
            };
            let mut exposed = Exposed::on_device(comm.rank(), device);
            let window = exposed.window(&comm).unwrap();
            assert_eq!(window.is_mapped(1 - comm.rank()), Ok(false));
            let error = window.view(1 - comm.rank()).unwrap_err();
            assert_eq!(error.code, Code::Unsupported, "{error}");
            assert!(error.message.contains(why), "{error}");
            exchange(&comm, &exposed, &window, device);
            window.close().unwrap();
        });
    }
}

/// The owner of the memory is kept until no peer has it mapped, however early its window is closed.
#[test]
fn memory_stays_while_a_peer_has_it_mapped() {
    let test = Test::new(Ranks::Processes, 2);
    test.run(|comm| {
        let stream = stream_of(0);
        let memory = DeviceMemory::allocate(stream.device(), BYTES).unwrap();
        memory
            .write(0, &bytes_of(&[comm.rank() as u32; LENGTH]))
            .unwrap();
        let start = address(memory.address());
        let window = expose(&comm, start, Box::new(memory)).unwrap();
        let view = (comm.rank() == 1).then(|| window.view(0).unwrap());
        window.fence().unwrap();
        window.close().unwrap();
        comm.barrier().unwrap();
        // Rank 0 has closed its window.
        if let Some(view) = view {
            let seen = view.start().as_ptr().expose_provenance() as u64;
            assert_eq!(read(&stream, seen), 0);
        }
        comm.barrier().unwrap();
        // To make a window lets go of what no rank views any more.
        let mut exposed = Exposed::in_heap(comm.rank());
        exposed.window(&comm).unwrap().fence().unwrap();
    });
}

#[test]
fn a_peer_that_dies_ends_the_waits_and_is_unmapped() {
    let test = Test {
        dies: Some(1),
        ..Test::new(Ranks::Processes, 3)
    };
    test.run(|comm| {
        let mut exposed = Exposed::on_device(comm.rank(), 0);
        let window = exposed.window(&comm).unwrap();
        window.fence().unwrap();
        let begun = Instant::now();
        let error = match comm.rank() {
            0 => loop {
                match put(&window, 1, 0, [1_u32; LENGTH].as_ptr().cast(), LENGTH) {
                    Ok(()) => assert!(begun.elapsed() < SOON, "no loss is seen"),
                    Err(error) => break error,
                }
            },
            // SAFETY: it ends the process, without anything that would tell the others.
            1 => unsafe { libc::_exit(9) },
            _ => window.wait_signal(1, Some(SOON)).unwrap_err(),
        };
        assert_eq!(
            (error.code, error.peer),
            (Code::PeerLost, Some(1)),
            "{error}"
        );
        let error = window.signal(1).unwrap_err();
        assert!(error.message.contains("no further use"), "{error}");
        window.close().unwrap();
        assert!(begun.elapsed() < SOON);
    });
}
