//! Device memory and streams, as a user of the library would have them from CUDA.

use std::sync::Mutex;

use unisono::buffer::Memory;
use unisono::transport::cuda::driver::{Device, DeviceMemory, Stream};
use unisono::transport::cuda::heap;
use unisono::types::DeviceStream;

/// Memory that tests have used, for others to come. To free memory the driver waits for the whole device: also for the
/// streams of other ranks in the same process, which may be waiting for the rank that frees.
static SPARE: Mutex<Vec<DeviceMemory>> = Mutex::new(Vec::new());

/// The same of blocks of the heap.
static SPARE_BLOCKS: Mutex<Vec<(&'static Device, u64)>> = Mutex::new(Vec::new());

/// Frees what was used, once no rank of the process waits for another.
pub(crate) fn free_memory() {
    SPARE.lock().expect("no panic").clear();
    for (device, block) in SPARE_BLOCKS.lock().expect("no panic").drain(..) {
        assert!(heap::free(device, block).expect("freed"));
    }
}

fn memory_of(device: &'static Device, bytes: usize) -> DeviceMemory {
    let mut spare = SPARE.lock().expect("no panic");
    let fits = |memory: &DeviceMemory| {
        memory.device().number() == device.number() && memory.bytes() >= bytes
    };
    if let Some(at) = spare.iter().position(fits) {
        return spare.swap_remove(at);
    }
    drop(spare);
    DeviceMemory::allocate(device, bytes).expect("memory")
}

/// A buffer on a device.
pub(crate) struct Array {
    memory: Option<Held>,
    bytes: usize,
}

enum Held {
    Own(DeviceMemory),
    /// A block of the heap, and where the array begins in it.
    Block(&'static Device, u64, u64),
}

impl Array {
    /// `bytes`, on the device when this returns.
    pub(crate) fn of(stream: &Stream, bytes: &[u8]) -> Self {
        let memory = (!bytes.is_empty()).then(|| {
            let memory = memory_of(stream.device(), bytes.len());
            stream.write(memory.address(), bytes).expect("written");
            Held::Own(memory)
        });
        Self {
            memory,
            bytes: bytes.len(),
        }
    }

    /// The same in memory that peers may read in place, from byte `offset` of a block on.
    pub(crate) fn in_heap(stream: &Stream, bytes: &[u8], offset: usize) -> Self {
        let device = stream.device();
        let block = heap::allocate(device, offset + bytes.len()).expect("memory");
        stream.write(block + offset as u64, bytes).expect("written");
        Self {
            memory: Some(Held::Block(device, block, offset as u64)),
            bytes: bytes.len(),
        }
    }

    pub(crate) fn address(&self) -> u64 {
        match &self.memory {
            None => 0,
            Some(Held::Own(memory)) => memory.address(),
            Some(Held::Block(_, block, offset)) => block + offset,
        }
    }

    /// The bytes after all that is in `stream`.
    pub(crate) fn read(&self, stream: &Stream) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        if !bytes.is_empty() {
            stream.read(self.address(), &mut bytes).expect("read");
        }
        bytes
    }

    /// Writes in the order of `stream`.
    pub(crate) fn write(&self, stream: &Stream, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        if !bytes.is_empty() {
            stream.write(self.address(), bytes).expect("written");
        }
    }

    /// As a request takes it. The array outlives the operation in every test.
    pub(crate) fn memory(&self) -> Memory {
        self.part(0, self.bytes)
    }

    pub(crate) fn part(&self, offset: usize, bytes: usize) -> Memory {
        assert!(offset + bytes <= self.bytes);
        let start = std::ptr::without_provenance_mut((self.address() as usize) + offset);
        // SAFETY: an address of the device, which the operation does not use on the host; the tests keep the array
        // until its stream has got past it.
        unsafe { Memory::from_raw_parts(start, bytes) }
    }

    /// In pieces of the given lengths, which add up to the whole.
    pub(crate) fn pieces(&self, lengths: &[usize]) -> Memory {
        let mut at = 0;
        let pieces: Vec<(*mut u8, usize)> = lengths
            .iter()
            .map(|length| {
                let start = std::ptr::without_provenance_mut((self.address() as usize) + at);
                at += length;
                (start, *length)
            })
            .collect();
        assert_eq!(at, self.bytes);
        // SAFETY: as in `part`.
        unsafe { Memory::from_pieces(pieces) }
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        match self.memory.take() {
            Some(Held::Own(memory)) => SPARE.lock().expect("no panic").push(memory),
            Some(Held::Block(device, block, _)) => {
                SPARE_BLOCKS.lock().expect("no panic").push((device, block));
            }
            None => {}
        }
    }
}

/// A new stream of a device.
pub(crate) fn stream_of(device: u32) -> Stream {
    Stream::create(Device::of(device).expect("a device")).expect("a stream")
}

/// A new stream, and its name.
pub(crate) fn stream() -> (Stream, DeviceStream) {
    let stream = stream_of(0);
    let named = stream.handle();
    (stream, named)
}

pub(crate) fn bytes_of<T: Copy>(values: &[T]) -> Vec<u8> {
    let bytes = std::mem::size_of_val(values);
    // SAFETY: the tests use it for numbers, which have no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), bytes) }.to_vec()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|four| f32::from_ne_bytes(four.try_into().expect("four bytes")))
        .collect()
}
