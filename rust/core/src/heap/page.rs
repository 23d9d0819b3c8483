//! Pages of memory.

/// Bytes of a page of memory here: 4,096 on most systems, 16 or 64 KiB on some with aarch64.
pub fn page() -> usize {
    rustix::param::page_size()
}
