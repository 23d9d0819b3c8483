//! A slice in the heap, for Rust programs.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::buffer::Element;

/// The alignment of private memory, so that both kinds are alike.
const ALIGNMENT: usize = 64;

/// A slice of numbers in the shared heap, freed when it is dropped.
///
/// Where the heap has no room the memory is private; nothing but the speed of collectives tells the difference.
///
/// ```
/// # use unisono::heap::Buffer;
/// let mut gradients = Buffer::<f32>::zeroed(1 << 20);
/// gradients[7] = 1.0;
/// assert_eq!(gradients.iter().sum::<f32>(), 1.0);
/// ```
pub struct Buffer<T: Element> {
    start: NonNull<T>,
    length: usize,
    /// Whether it lies in the heap.
    shared: bool,
    owns: PhantomData<T>,
}

// SAFETY: it owns its elements as a `Vec` does. Peers that map the heap only read it.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// `length` zeros.
    pub fn zeroed(length: usize) -> Self {
        let layout = Self::layout(length);
        let block = super::allocate_zeroed(layout.size(), ALIGNMENT);
        let shared = block.is_some();
        let start = match block {
            Some(block) => block.address,
            // SAFETY: the layout's size is not zero (see `layout`).
            None => NonNull::new(unsafe { alloc_zeroed(layout) })
                .unwrap_or_else(|| handle_alloc_error(layout)),
        };
        Self {
            start: start.cast(),
            length,
            shared,
            owns: PhantomData,
        }
    }

    /// A copy of `values`.
    pub fn from_slice(values: &[T]) -> Self {
        let mut buffer = Self::zeroed(values.len());
        buffer.copy_from_slice(values);
        buffer
    }

    /// Whether it lies in the shared heap.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    fn layout(length: usize) -> Layout {
        let bytes = length
            .checked_mul(size_of::<T>())
            .expect("a length that fits the memory");
        Layout::from_size_align(bytes.max(1), ALIGNMENT).expect("a length that fits the memory")
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `length` elements were allocated and zeroed, zeros are values of `T`, and the borrow of `self` keeps others
        // from writing: peers that have the memory mapped write only while an operation shares it, which borrows `self`
        // exclusively.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the borrow is exclusive, and peers use only what an operation was given, which borrows
        // `self` meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.shared {
            // SAFETY: `self` owned it, and operations that use it borrow `self`.
            let freed = unsafe { super::free(self.start.cast()) };
            debug_assert!(freed);
        } else {
            // SAFETY: it came from the allocator with this layout.
            unsafe { dealloc(self.start.as_ptr().cast(), Self::layout(self.length)) }
        }
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
