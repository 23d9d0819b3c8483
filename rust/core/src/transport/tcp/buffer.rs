//! Bytes that were received ahead of the calls that want them.

/// Size of a receive buffer: what a loopback or a 100 Gb/s link delivers between two looks at it.
const BUFFER: usize = 256 << 10;

/// From this size on bytes go from the kernel straight into their destination, past the buffer.
pub(super) const UNBUFFERED_FROM: usize = 32 << 10;

/// A buffer is no longer, however many threads take what is in it.
const LONGEST_BUFFER: usize = 2 << 20;

/// Bytes that were received ahead. Its memory is made when first needed.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    memory: Vec<u8>,
    /// The number of threads that take its bytes, less one.
    helpers: usize,
    start: usize,
    end: usize,
}

impl Buffer {
    /// Sets the number of threads that take its bytes.
    pub(super) fn share(&mut self, threads: usize) {
        self.helpers = threads.saturating_sub(1);
    }

    /// The bytes in it.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }

    /// Moves as much of it into `bytes` as fits.
    pub(super) fn take(&mut self, bytes: &mut [u8]) -> usize {
        let count = bytes.len().min(self.end - self.start);
        bytes[..count].copy_from_slice(&self.bytes()[..count]);
        self.start += count;
        count
    }

    /// The first `count` of its bytes have been used.
    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
    }

    /// The free room after its content, which moves to the front: at most part of an element, since
    /// more is received only when what is here does not suffice. It is longer than usual, and several threads have a share
    /// of it, where `most` bytes are wanted.
    pub(super) fn room(&mut self, most: usize) -> &mut [u8] {
        let size = most.clamp(BUFFER, LONGEST_BUFFER.min(BUFFER * (self.helpers + 1)));
        if self.memory.len() < size {
            self.memory.resize(size, 0);
        }
        self.memory.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        &mut self.memory[self.end..size]
    }

    /// The first `count` bytes of the room have been filled.
    pub(super) fn fill(&mut self, count: usize) {
        self.end += count;
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> usize {
        self.memory.len()
    }
}
