//! Views of memory: the only place where a pointer becomes a slice.
//!
//! A [`Memory`] is one or more pieces that are treated as one run of bytes, so that a list of tensors can be
//! gathered into, or reduced, without flattening it first. It does not own what it points to, but stands for it as an
//! exclusive reference would: the code that makes one promises that the bytes stay valid, and are left to it alone, until the
//! operation it was given to has completed. So it is never copied, reading borrows it, and writing borrows it exclusively.

use std::ptr::NonNull;

use half::{bf16, f16};

use crate::types::DataType;

/// A Rust type that is a [`DataType`].
///
/// # Safety
/// Every bit pattern of `DTYPE`'s size is a valid value, and the type has that size and no padding.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The element type.
    const DTYPE: DataType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),+ $(,)?) => {$(
        // SAFETY: a plain number of that size; every bit pattern is a value.
        unsafe impl Element for $rust {
            const DTYPE: DataType = DataType::$dtype;
        }
    )+};
}

elements! {
    f16 => Float16, bf16 => BFloat16, f32 => Float32, f64 => Float64,
    i8 => Int8, i16 => Int16, i32 => Int32, i64 => Int64,
    u8 => UInt8, u16 => UInt16, u32 => UInt32, u64 => UInt64,
}

/// One contiguous piece.
#[derive(Clone, Copy, Debug)]
struct Piece {
    start: *mut u8,
    bytes: usize,
    /// Bytes of all pieces before this one.
    before: usize,
}

#[derive(Debug)]
enum Pieces {
    One(Piece),
    Many(Box<[Piece]>),
}

/// A run of bytes made of one or more pieces of memory, which it does not own.
#[derive(Debug)]
pub struct Memory {
    pieces: Pieces,
    bytes: usize,
}

// SAFETY: a `Memory` is an address and a length. The promise made to the unsafe constructors covers use from any
// thread, because an operation may be carried on by the progress thread.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`; shared references allow reading alone.
unsafe impl Sync for Memory {}

impl Memory {
    /// No bytes at all.
    pub const fn empty() -> Self {
        Self {
            pieces: Pieces::One(Piece {
                start: NonNull::dangling().as_ptr(),
                bytes: 0,
                before: 0,
            }),
            bytes: 0,
        }
    }

    /// `bytes` bytes from `start`.
    ///
    /// # Safety
    /// Until the operation that this is given to has completed, or else until it is dropped, on any thread: the bytes stay
    /// allocated and initialised; no other code writes to them; and when it is used as an output, no other code reads them
    /// either, also through another `Memory`. An operation that has completed has let go of its memory.
    pub const unsafe fn from_raw_parts(start: *mut u8, bytes: usize) -> Self {
        if bytes == 0 {
            return Self::empty();
        }
        Self {
            pieces: Pieces::One(Piece {
                start,
                bytes,
                before: 0,
            }),
            bytes,
        }
    }

    /// The pieces `(start, bytes)` one after the other. Each must hold whole elements.
    ///
    /// # Safety
    /// As for [`Memory::from_raw_parts`], for each piece; pieces used as an output do not overlap.
    pub unsafe fn from_pieces(pieces: impl IntoIterator<Item = (*mut u8, usize)>) -> Self {
        let mut before = 0;
        let mut list = Vec::new();
        for (start, bytes) in pieces {
            if bytes > 0 {
                list.push(Piece {
                    start,
                    bytes,
                    before,
                });
                before += bytes;
            }
        }
        match list.as_slice() {
            [] => Self::empty(),
            [one] => Self {
                pieces: Pieces::One(*one),
                bytes: before,
            },
            _ => Self {
                pieces: Pieces::Many(list.into_boxed_slice()),
                bytes: before,
            },
        }
    }

    /// A view of `slice`, to be read.
    ///
    /// # Safety
    /// The borrow outlives the view, or the operation that it is given to.
    pub(crate) unsafe fn of<T: Element>(slice: &[T]) -> Self {
        let start = slice.as_ptr().cast_mut().cast();
        // SAFETY: the bytes are valid and not written to while they are borrowed, and every element is initialised.
        unsafe { Self::from_raw_parts(start, std::mem::size_of_val(slice)) }
    }

    /// A view of `slice`, to be written.
    ///
    /// # Safety
    /// As for [`Memory::of`].
    pub(crate) unsafe fn of_mut<T: Element>(slice: &mut [T]) -> Self {
        // SAFETY: as in `of`, and the borrow is exclusive; every bit pattern is a value of `T`.
        unsafe { Self::from_raw_parts(slice.as_mut_ptr().cast(), std::mem::size_of_val(slice)) }
    }

    /// The whole length in bytes.
    #[inline]
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are no bytes.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether both have a byte in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        if self.bytes == 0 || other.bytes == 0 {
            return false;
        }
        self.pieces().iter().any(|a| {
            other.pieces().iter().any(|b| {
                let (a_start, b_start) = (a.start as usize, b.start as usize);
                a.bytes > 0
                    && b.bytes > 0
                    && a_start < b_start + b.bytes
                    && b_start < a_start + a.bytes
            })
        })
    }

    /// A view of these runs of it alone, ascending and apart: where each begins, and how long it is.
    pub(crate) fn part(self, runs: &[(usize, usize)]) -> Self {
        let (mut pieces, mut end) = (Vec::new(), 0);
        for run in runs.chunk_by(|one, next| one.0 + one.1 == next.0) {
            let (mut at, last) = (run[0].0, run[run.len() - 1]);
            assert!(at >= end, "runs that are not apart");
            end = last.0 + last.1;
            while at < end {
                let (start, bytes) = self.run(at, end - at);
                pieces.push((start, bytes));
                at += bytes;
            }
        }
        // SAFETY: they are parts of what the maker of `self` promised for, which is gone, and have no byte in common.
        unsafe { Self::from_pieces(pieces) }
    }

    /// Views nothing from now on.
    #[inline]
    pub(crate) fn release(&mut self) {
        match &mut self.pieces {
            Pieces::One(piece) => (piece.bytes, self.bytes) = (0, 0),
            Pieces::Many(_) => *self = Self::empty(),
        }
    }

    /// The bytes from `offset` on, at most `max` and at most to the end of their piece.
    #[inline]
    pub(crate) fn read(&self, offset: usize, max: usize) -> &[u8] {
        let (start, bytes) = self.run(offset, max);
        // SAFETY: `run` stays inside one piece, which the maker of `self` promised to be valid and to be written to through
        // `self` alone, which is borrowed.
        unsafe { std::slice::from_raw_parts(start, bytes) }
    }

    /// The bytes from `offset` on, at most `max` and at most to the end of their piece, for writing.
    #[inline]
    pub(crate) fn write(&mut self, offset: usize, max: usize) -> &mut [u8] {
        let (start, bytes) = self.run(offset, max);
        // SAFETY: as in `read`; and nothing else reads the piece, for `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(start, bytes) }
    }

    /// [`Memory::read`] and [`Memory::write`] at once, of bytes that do not overlap.
    pub(crate) fn read_and_write(
        &mut self,
        (from, to): (usize, usize),
        max: usize,
    ) -> (&[u8], &mut [u8]) {
        let ((from, read), (to, written)) = (self.run(from, max), self.run(to, max));
        let (from_start, to_start) = (from.addr(), to.addr());
        assert!(
            from_start + read <= to_start || to_start + written <= from_start,
            "what is read overlaps what is written"
        );
        // SAFETY: as in `read` and `write`; the two have just been seen to lie apart.
        unsafe {
            (
                std::slice::from_raw_parts(from, read),
                std::slice::from_raw_parts_mut(to, written),
            )
        }
    }

    /// The address and the length of the run that begins at `offset`, at most `max` bytes long.
    #[inline]
    pub(crate) fn place(&self, offset: usize, max: usize) -> (usize, usize) {
        let (start, bytes) = self.run(offset, max);
        (start.expose_provenance(), bytes)
    }

    /// A copy of `length` bytes from `offset` on, which may lie in several pieces.
    pub(crate) fn gather(&self, offset: usize, length: usize) -> Vec<u8> {
        let mut whole = Vec::with_capacity(length);
        self.for_each_run(offset, length, |_, run| whole.extend_from_slice(run));
        whole
    }

    /// Calls `visit` with the pieces of `length` bytes from `offset` on, one after the other, each with how many bytes came
    /// before it.
    #[inline]
    pub(crate) fn for_each_run(
        &self,
        offset: usize,
        length: usize,
        mut visit: impl FnMut(usize, &[u8]),
    ) {
        let mut done = 0;
        while done < length {
            let run = self.read(offset + done, length - done);
            visit(done, run);
            done += run.len();
        }
    }

    /// Copies `bytes` to what lies from `offset` on.
    pub(crate) fn copy_from(&mut self, offset: usize, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let target = self.write(offset + done, bytes.len() - done);
            target.copy_from_slice(&bytes[done..done + target.len()]);
            done += target.len();
        }
    }

    /// The contiguous run that begins at `offset`: its address and its length, at most `max`.
    #[inline]
    fn run(&self, offset: usize, max: usize) -> (*mut u8, usize) {
        assert!(
            offset <= self.bytes,
            "offset {offset} lies outside {} bytes",
            self.bytes
        );
        let piece = match &self.pieces {
            Pieces::One(piece) => piece,
            Pieces::Many(list) => {
                // The last piece that begins at or before the offset: pieces are never empty.
                &list[list.partition_point(|piece| piece.before <= offset) - 1]
            }
        };
        let within = offset - piece.before;
        (
            piece.start.wrapping_add(within),
            max.min(piece.bytes - within),
        )
    }

    #[inline]
    fn pieces(&self) -> &[Piece] {
        match &self.pieces {
            Pieces::One(piece) => std::slice::from_ref(piece),
            Pieces::Many(list) => list,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_read_as_one_run() {
        let mut a = [1_u8, 2, 3];
        let mut b: [u8; 0] = [];
        let mut c = [4_u8, 5];
        // SAFETY: the arrays outlive the view and nothing else touches them meanwhile.
        let mut memory = unsafe {
            Memory::from_pieces([
                (a.as_mut_ptr(), 3),
                (b.as_mut_ptr(), 0),
                (c.as_mut_ptr(), 2),
            ])
        };
        assert_eq!(memory.len(), 5);
        assert_eq!(memory.read(1, 9), &[2, 3]);
        assert_eq!(memory.read(3, 9), &[4, 5]);
        assert_eq!(memory.read(5, 9), &[] as &[u8]);
        memory.write(2, 1)[0] = 9;
        assert_eq!(memory.read(2, 9), &[9]);
        let (read, written) = memory.read_and_write((0, 3), 2);
        written.copy_from_slice(read);
        assert_eq!(memory.gather(0, 5), [1, 2, 9, 1, 2]);
    }

    #[test]
    #[should_panic(expected = "what is read overlaps what is written")]
    fn what_is_written_is_not_read() {
        let mut a = [0_u8; 8];
        // SAFETY: the array outlives the view and nothing else touches it meanwhile.
        let mut memory = unsafe { Memory::of_mut(&mut a) };
        memory.read_and_write((0, 3), 4);
    }

    #[test]
    fn parts_view_some_bytes_alone() {
        let mut a = [1_u8, 2, 3, 4];
        let mut b = [5_u8, 6, 7];
        // SAFETY: the arrays outlive the view and nothing else touches them meanwhile.
        let memory = unsafe { Memory::from_pieces([(a.as_mut_ptr(), 4), (b.as_mut_ptr(), 3)]) };
        let part = memory.part(&[(0, 1), (1, 1), (3, 2), (5, 0), (6, 1)]);
        assert_eq!((part.len(), part.pieces().len()), (5, 4));
        assert_eq!(part.gather(0, 5), [1, 2, 4, 5, 7]);
        assert!(part.part(&[]).is_empty());
    }

    #[test]
    fn overlap_is_of_bytes() {
        let mut a = [0_u8; 8];
        let start = a.as_mut_ptr();
        // SAFETY: only addresses are compared.
        unsafe {
            let left = Memory::from_raw_parts(start, 4);
            let right = Memory::from_raw_parts(start.add(4), 4);
            let both = Memory::from_raw_parts(start.add(3), 2);
            assert!(!left.overlaps(&right));
            assert!(left.overlaps(&both) && both.overlaps(&right));
            assert!(!left.overlaps(&Memory::empty()));
        }
    }
}
