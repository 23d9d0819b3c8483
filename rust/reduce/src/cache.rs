//! How large the last cache is, as the kernel tells it.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Where the kernel does not tell.
const USUAL: usize = 32 << 20;

/// Bytes of the cache nearest to memory that the first processor has.
#[inline]
pub fn last_level() -> usize {
    match BYTES.load(Ordering::Relaxed) {
        0 => ask(),
        known => known,
    }
}

/// 0 until it is known. No thread waits for another one that asks: in a forked child that one would be missing.
static BYTES: AtomicUsize = AtomicUsize::new(0);

#[cold]
fn ask() -> usize {
    let told = if cfg!(miri) {
        None
    } else {
        told(Path::new("/sys/devices/system/cpu/cpu0/cache"))
    };
    let bytes = told.unwrap_or(USUAL);
    BYTES.store(bytes, Ordering::Relaxed);
    bytes
}

/// The largest cache of the highest level listed in a directory of `index0`, `index1` and so on.
fn told(directory: &Path) -> Option<usize> {
    let indices = fs::read_dir(directory).ok()?.flatten();
    let sizes = indices.filter_map(|index| {
        let read = |file| fs::read_to_string(index.path().join(file)).ok();
        let level: u32 = read("level")?.trim().parse().ok()?;
        Some((level, bytes(read("size")?.trim())?))
    });
    sizes.max().map(|(_, size)| size)
}

/// `512K` or `32M` as a number; nothing that is empty.
fn bytes(size: &str) -> Option<usize> {
    let digits = size.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &size[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    let size = digits.parse::<usize>().ok()?.checked_mul(unit)?;
    (size > 0).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_the_kernel_writes_them() {
        assert_eq!(bytes("512K"), Some(512 << 10));
        assert_eq!(bytes("32M"), Some(32 << 20));
        assert_eq!(bytes("49152"), Some(49152));
        for nonsense in ["", "K", "0K", "12Q", "-3K", "99999999999999999999G"] {
            assert_eq!(bytes(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn the_last_level_counts_not_the_largest_number() {
        let directory = std::env::temp_dir().join(format!("unisono-cache-{}", std::process::id()));
        for (index, level, size) in [(0, "1", "99M"), (1, "3", "32768K"), (2, "2", "1M")] {
            let index = directory.join(format!("index{index}"));
            fs::create_dir_all(&index).unwrap();
            fs::write(index.join("level"), format!("{level}\n")).unwrap();
            fs::write(index.join("size"), format!("{size}\n")).unwrap();
        }
        let told = told(&directory);
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(told, Some(32 << 20));
        assert_eq!(super::told(&directory), None);
    }
}
