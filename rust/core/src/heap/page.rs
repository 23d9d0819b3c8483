//! Pages of memory.

/// Bytes of a page of memory here: 4,096 on most systems, 16 or 64 KiB on some with aarch64.
///
/// The C library knows. (rustix reads the kernel's values for the process, and the copy of them that valgrind makes is wrong.)
pub fn page() -> usize {
    // SAFETY: it takes a number and returns one.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).expect("every Linux tells the size of its pages")
}
