//! One-sided transfers where either side's memory, or both, lies on a device.

use std::time::Duration;

use unisono::Communicator;
use unisono::config::Config;
use unisono::error::Code;
use unisono::one_sided::{Port, RemoteRegion};
use unisono::transport::cuda::driver::Stream;

use crate::gpu::{Array, stream_of};
use crate::harness::{Ranks, Test};

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
            ..Test::new("one_sided::memory_of_devices_is_written_and_read", ranks, 2)
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
