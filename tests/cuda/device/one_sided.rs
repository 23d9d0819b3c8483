//! One-sided transfers where either side's memory, or both, lies on a device. Long ones between two devices of a host are
//! copied by the target, which maps the memory of the side that starts them.

use std::time::{Duration, Instant};

use unisono::Communicator;
use unisono::Completion;
use unisono::config::Config;
use unisono::error::{Code, Error};
use unisono::one_sided::{Port, Region, RemoteRegion, Transfer};
use unisono::transport::cuda::driver::{DeviceMemory, Stream};

use crate::calls::reported;
use crate::gpu::{Array, stream, stream_of};
use crate::harness::{Ranks, Test};
use crate::{STAGED, all_reduce, array_of};

const SOON: Duration = Duration::from_secs(30);
const BYTES: usize = 300_001;
/// Where the registered bytes begin in their allocation.
const INSIDE: usize = 77;

/// Registered memory.
enum Place {
    Device(Array, Stream),
    Host(Vec<u8>),
}

impl Place {
    fn new(is_on_device: bool, seed: usize) -> Self {
        let bytes = [vec![0; INSIDE], pattern(seed)].concat();
        match is_on_device {
            true => {
                let stream = stream_of(0);
                Self::Device(Array::of(&stream, &bytes), stream)
            }
            false => Self::Host(bytes),
        }
    }

    fn start(&mut self) -> *mut u8 {
        match self {
            Self::Device(array, _) => {
                std::ptr::with_exposed_provenance_mut(array.address() as usize + INSIDE)
            }
            Self::Host(bytes) => bytes[INSIDE..].as_mut_ptr(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Device(array, stream) => array.read(stream)[INSIDE..].to_vec(),
            Self::Host(bytes) => bytes[INSIDE..].to_vec(),
        }
    }
}

fn pattern(seed: usize) -> Vec<u8> {
    (0..BYTES).map(|i| ((i * 31 + seed) % 251) as u8).collect()
}

/// The bytes of the other of two ranks.
fn swap(comm: &Communicator, own: &[u8]) -> Vec<u8> {
    let mut all = [0; 2];
    comm.all_gather(&[own.len() as u64], &mut all).unwrap();
    let longest = all[0].max(all[1]) as usize;
    let mut padded = own.to_vec();
    padded.resize(longest, 0);
    let mut both = vec![0; 2 * longest];
    comm.all_gather(&padded, &mut both).unwrap();
    let other = 1 - comm.rank();
    both[other * longest..][..all[other] as usize].to_vec()
}

fn exchange(comm: &Communicator, own: &mut Place) {
    let rank = comm.rank();
    let port = Port::new(Config::default()).unwrap();
    let theirs = swap(comm, &port.bind().unwrap());
    port.connect(&theirs, SOON).unwrap();
    // SAFETY: the memory outlives the port, and the ranks take turns.
    let region = unsafe { port.register(own.start(), BYTES, Box::new(())) }.unwrap();
    let remote = port.remote(&region).unwrap();
    let remote = RemoteRegion::from_bytes(&swap(comm, &remote.to_bytes())).unwrap();
    let wait = |transfer: unisono::one_sided::Transfer| transfer.wait(Some(SOON)).unwrap();
    if rank == 0 {
        // A part of it from the middle, and all of the other's.
        let part = remote.part(100, 1000).unwrap();
        wait(port.write(&region, 50..1050, &part, None).unwrap());
    }
    comm.barrier().unwrap();
    if rank == 1 {
        let mut expected = pattern(1);
        expected[100..1100].copy_from_slice(&pattern(0)[50..1050]);
        assert!(own.bytes() == expected);
        wait(port.read(&region, 0..BYTES, &remote, None).unwrap());
        assert!(own.bytes() == pattern(0));
    }
    comm.barrier().unwrap();
    let beyond = port.write(&region, 0..BYTES, &remote.part(0, 10).unwrap(), None);
    assert_eq!(beyond.map(drop).unwrap_err().code, Code::InvalidArgument);
    comm.barrier().unwrap();
    port.close(SOON).unwrap();
}

#[test]
fn memory_of_devices_is_written_and_read() {
    for ranks in [Ranks::Processes, Ranks::Local] {
        let test = Test {
            driver: &[("DELAY", "copy:500")],
            ..Test::new(ranks, 2)
        };
        test.run(|comm| {
            for kinds in [[true, true], [true, false], [false, true]] {
                let is_on_device = kinds[comm.rank()];
                let mut own = Place::new(is_on_device, comm.rank());
                exchange(&comm, &mut own);
            }
        });
    }
}

/// As long as a target maps it, with bytes that are none of it before and after.
const LONG: usize = (1 << 20) + 5;

/// Memory of a device with one number in it, behind a port that is connected to the other rank's.
struct Side {
    port: Port,
    array: Array,
    region: Region,
    remote: RemoteRegion,
    stream: Stream,
}

impl Side {
    fn new(comm: &Communicator, device: u32) -> Self {
        let port = Port::new(comm.config().clone()).unwrap();
        port.connect(&swap(comm, &port.bind().unwrap()), SOON)
            .unwrap();
        let stream = stream_of(device);
        let array = Array::of(&stream, &vec![comm.rank() as u8 + 1; INSIDE + 2 * LONG]);
        let start = std::ptr::with_exposed_provenance_mut(array.address() as usize + INSIDE);
        // SAFETY: the memory outlives the port, and the ranks take turns.
        let region = unsafe { port.register(start, 2 * LONG, Box::new(())) }.unwrap();
        let remote = swap(comm, &port.remote(&region).unwrap().to_bytes());
        let remote = RemoteRegion::from_bytes(&remote).unwrap();
        assert!(remote.is_on_device());
        Self {
            port,
            array,
            region,
            remote,
            stream,
        }
    }

    /// Begins to write the first half of the own memory to the middle of the other's, or to read that.
    fn begin(&self, writes: bool) -> Result<Transfer, Error> {
        self.begin_and_tell(writes, None)
    }

    fn begin_and_tell(&self, writes: bool, then: Option<Completion>) -> Result<Transfer, Error> {
        let middle = self.remote.part(LONG as u64 / 2, LONG as u64).unwrap();
        match writes {
            true => self.port.write(&self.region, 0..LONG, &middle, then),
            false => self.port.read(&self.region, 0..LONG, &middle, then),
        }
    }

    /// Reads, while two threads wait for it; two completions hear of its end, once each.
    fn read_as_many_wait(&self) {
        let (tell, told) = std::sync::mpsc::channel();
        let again = tell.clone();
        let then = Box::new(move |result| tell.send(result).unwrap());
        let read = self.begin_and_tell(false, Some(then)).unwrap();
        read.when_done(Box::new(move |result| again.send(result).unwrap()));
        std::thread::scope(|scope| {
            scope.spawn(|| read.wait(Some(SOON)).unwrap());
            read.wait(Some(SOON)).unwrap();
        });
        let results: Vec<_> = told.iter().collect();
        assert_eq!(results, [Ok(()), Ok(())]);
    }

    /// The bytes: each with how often it comes in a row.
    fn runs(&self) -> Vec<(u8, usize)> {
        let bytes = &self.array.read(&self.stream)[INSIDE..];
        let runs = bytes.chunk_by(|one, next| one == next);
        runs.map(|run| (run[0], run.len())).collect()
    }
}

/// How often this process has asked the driver to map memory of others.
fn mapped() -> u64 {
    reported("cuIpcOpenMemHandle_v2")
}

#[test]
fn long_transfers_between_devices_are_one_copy() {
    // How often rank 0 and rank 1 ask the driver to map memory, for two reads and a write: a target that cannot is not asked
    // again.
    const TCP: &[(&str, &str)] = &[("transport", "tcp")];
    use Ranks::{Local, Processes};
    let cases: [(Ranks, &[_], &[_], [u64; 2]); 7] = [
        // A copy that is not waited for would come late.
        (Processes, &[], &[("DELAY", "copy:2000")], [2, 1]),
        (
            Processes,
            &[],
            &[("DEVICES", "2"), ("REUSE", "yes")],
            [2, 1],
        ),
        (
            Processes,
            &[],
            &[("DEVICES", "2"), ("PEER_ACCESS", "no")],
            [1, 1],
        ),
        (Processes, &[], &[("IPC", "refuse-import")], [1, 1]),
        (Processes, &[], &[("IPC", "refuse-export")], [0, 0]),
        (Processes, TCP, &[], [0, 0]),
        // A target is asked, and refuses.
        (Local, &[], &[], [0, 0]),
    ];
    for (ranks, config, driver, maps) in cases {
        let test = Test {
            config,
            driver,
            ..Test::new(ranks, 2)
        };
        test.run(|comm| {
            let rank = comm.rank();
            let device = match driver {
                [("DEVICES", _), ..] => rank as u32,
                _ => 0,
            };
            let side = Side::new(&comm, device);
            if rank == 0 {
                side.begin(true).unwrap().wait(Some(SOON)).unwrap();
            }
            comm.barrier().unwrap();
            if rank == 1 {
                let rest = 2 * LONG - LONG - LONG / 2;
                assert_eq!(side.runs(), [(2, LONG / 2), (1, LONG), (2, rest)]);
                for _ in 0..2 {
                    side.read_as_many_wait();
                    assert_eq!(side.runs(), [(1, LONG + LONG / 2), (2, rest)]);
                }
            }
            comm.barrier().unwrap();
            assert_eq!(mapped(), maps[rank]);
            side.port.close(SOON).unwrap();
            comm.barrier().unwrap();
        });
    }
}

/// To map memory a driver may wait for the device, which is not idle while a stream waits for a peer: for the one that starts
/// the transfer, here.
#[test]
fn a_target_whose_stream_waits_maps_nothing() {
    let test = Test {
        // The group maps nothing.
        config: STAGED,
        driver: &[("SYNCHRONIZE", "always")],
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let numbers = array_of(&stream, 1.0, 100);
        let sum = || all_reduce(&comm, &numbers, named).unwrap();
        sum().wait(Some(SOON)).unwrap();
        comm.barrier().unwrap();
        let beside = comm.split(Some(0), 0).unwrap().expect("a member");
        let side = Side::new(&comm, 0);
        if comm.rank() == 0 {
            let waits = sum();
            beside.barrier().unwrap();
            waits.wait(Some(SOON)).unwrap();
        } else {
            beside.barrier().unwrap();
            side.begin(false).unwrap().wait(Some(SOON)).unwrap();
            assert_eq!(side.runs(), [(1, LONG), (2, LONG)]);
            sum().wait(Some(SOON)).unwrap();
        }
        comm.barrier().unwrap();
        assert_eq!(mapped(), 0);
        // It is asked again.
        if comm.rank() == 1 {
            side.begin(false).unwrap().wait(Some(SOON)).unwrap();
        }
        comm.barrier().unwrap();
        assert_eq!(mapped(), [1, 0][comm.rank()]);
        side.port.close(SOON).unwrap();
        comm.barrier().unwrap();
    });
}

/// The memory of an initiator that gives up is kept until the target has it mapped no more.
#[test]
fn memory_stays_while_a_target_has_it_mapped() {
    let test = Test {
        driver: &[("DELAY", "copy:1500000")],
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let port = Port::new(comm.config().clone()).unwrap();
        port.connect(&swap(&comm, &port.bind().unwrap()), SOON)
            .unwrap();
        let memory = DeviceMemory::allocate(stream_of(0).device(), LONG).unwrap();
        let start = std::ptr::with_exposed_provenance_mut(memory.address() as usize);
        // SAFETY: the owner is the memory.
        let region = unsafe { port.register(start, LONG, Box::new(memory)) }.unwrap();
        let remote = swap(&comm, &port.remote(&region).unwrap().to_bytes());
        let remote = RemoteRegion::from_bytes(&remote).unwrap();
        if comm.rank() == 1 {
            let read = port.read(&region, 0..LONG, &remote, None).unwrap();
            std::thread::sleep(Duration::from_millis(300));
            let since = Instant::now();
            port.close(SOON).unwrap();
            // The copy ends 1.5 s after it began; a failure alone waits for half a second.
            assert!(since.elapsed() > Duration::from_millis(900));
            assert_eq!(read.wait(Some(SOON)).unwrap_err().code, Code::Aborted);
        }
        comm.barrier().unwrap();
        port.close(SOON).unwrap();
        comm.barrier().unwrap();
    });
}

#[test]
fn a_target_dies_amid_a_copy() {
    let test = Test {
        driver: &[("DELAY", "copy:1500000")],
        dies: Some(0),
        may_leak: true,
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let side = Side::new(&comm, 0);
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(300));
            std::process::abort();
        }
        let read = side.begin(false).unwrap();
        let error = read.wait(Some(SOON)).unwrap_err();
        assert_eq!(error.code, Code::PeerLost, "{error}");
        side.port.close(SOON).unwrap();
    });
}

/// The target goes on, with its device.
#[test]
fn an_initiator_dies_amid_a_copy() {
    let test = Test {
        driver: &[("DELAY", "copy:1000000")],
        dies: Some(1),
        may_leak: true,
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let side = Side::new(&comm, 0);
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            let _read = side.begin(false).unwrap();
            std::thread::sleep(Duration::from_millis(300));
            std::process::abort();
        }
        assert_eq!(comm.barrier().unwrap_err().code, Code::PeerLost);
        side.port.close(SOON).unwrap();
        assert_eq!(side.runs(), [(1, 2 * LONG)]);
    });
}

/// Two peers at one target, with transfers of several pieces: they take turns, and no piece goes through the host.
#[test]
fn several_peers_are_served_piece_by_piece() {
    const BYTES: usize = (32 << 20) + 3;
    let test = Test {
        driver: &[("DELAY", "copy:20000")],
        ..Test::new(Ranks::Processes, 3)
    };
    test.run(|comm| {
        let rank = comm.rank();
        let (stream, port) = (stream_of(0), Port::new(comm.config().clone()).unwrap());
        // Pieces that change places would be seen.
        let own: Vec<u8> = (0..BYTES).map(|i| (i / 999_983 + rank) as u8).collect();
        let array = Array::of(&stream, &own);
        let start = std::ptr::with_exposed_provenance_mut(array.address() as usize);
        // SAFETY: the memory outlives the port, and the ranks take turns.
        let region = unsafe { port.register(start, BYTES, Box::new(())) }.unwrap();
        let remote = port.remote(&region).unwrap().to_bytes();
        let told = [&remote[..], &port.bind().unwrap()].concat();
        let mut all = vec![0; 3 * told.len()];
        comm.all_gather(&told, &mut all).unwrap();
        if rank > 0 {
            let (remote, invitation) = all[..told.len()].split_at(RemoteRegion::BYTES);
            port.connect(invitation, SOON).unwrap();
            let remote = RemoteRegion::from_bytes(remote).unwrap();
            let read = port.read(&region, 0..BYTES, &remote, None).unwrap();
            read.wait(Some(SOON)).unwrap();
            let expected: Vec<u8> = (0..BYTES).map(|i| (i / 999_983) as u8).collect();
            assert!(array.read(&stream) == expected);
        }
        comm.barrier().unwrap();
        assert_eq!(mapped(), [6, 0, 0][rank]);
        port.close(SOON).unwrap();
        comm.barrier().unwrap();
    });
}
