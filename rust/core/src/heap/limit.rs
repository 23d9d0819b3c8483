//! How much memory there is, and how much of it the heap may take.

use std::fs;
use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::fork::PerProcess;

/// The limit that the environment gives: the setting, or half of the memory. 0 when the environment's settings are wrong, which
/// joining a group will say.
pub(super) fn from_environment() -> usize {
    match Config::from_env() {
        Ok(config) => config.heap_bytes.map_or_else(half, |bytes| bytes.0),
        Err(error) => {
            tracing::warn!("no shared heap: {error}");
            0
        }
    }
}

/// Half of the memory that this process can have, in whole pages.
pub(super) fn half() -> usize {
    of_the_machine() / 2 / super::page() * super::page()
}

/// The memory of the machine, or of the container when that is limited.
pub(super) fn of_the_machine() -> usize {
    static MEMORY: PerProcess<usize> = PerProcess::new(|| {
        let machine = rustix::system::sysinfo();
        let bytes = (machine.totalram as u64).saturating_mul(u64::from(machine.mem_unit.max(1)));
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let limit = group_limit(Path::new("/sys/fs/cgroup"), &groups);
        usize::try_from(bytes.min(limit.unwrap_or(u64::MAX))).unwrap_or(usize::MAX)
    });
    *MEMORY
}

/// Whether the system counts memory before it is touched (`vm.overcommit_memory` 2).
pub(super) fn is_strict() -> bool {
    static STRICT: PerProcess<bool> = PerProcess::new(|| {
        fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "2")
    });
    *STRICT
}

/// The least memory limit of the control groups in `groups`, the text of `/proc/self/cgroup`, and of those around
/// them. `root` is where they are mounted; version 2 has them there, version 1 in a folder `memory`. A container that
/// sees its own group at the root finds it there whatever the text says.
fn group_limit(root: &Path, groups: &str) -> Option<u64> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (root, name) = if controllers.is_empty() {
            (root.to_owned(), "memory.max")
        } else if controllers
            .split(',')
            .any(|controller| controller == "memory")
        {
            (root.join("memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        let inside = Path::new(path.trim_start_matches('/'));
        files.extend(
            inside
                .ancestors()
                .map(|folder| root.join(folder).join(name)),
        );
    }
    files
        .into_iter()
        .filter_map(|file: PathBuf| fs::read_to_string(file).ok()?.trim().parse().ok())
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temporary::Temporary;

    #[test]
    fn there_is_memory() {
        assert!(of_the_machine() > 1 << 20);
        assert!(half() > 0 && half() <= of_the_machine() / 2);
    }

    #[test]
    fn the_least_limit_around_the_group_counts() {
        let folder = Temporary::new();
        let root = &folder.0;
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::create_dir_all(root.join("memory/c")).unwrap();
        fs::write(root.join("a/memory.max"), "5000\n").unwrap();
        fs::write(root.join("a/b/memory.max"), "max\n").unwrap();
        fs::write(root.join("memory/c/memory.limit_in_bytes"), "7000\n").unwrap();
        assert_eq!(group_limit(root, "0::/a/b\n"), Some(5000));
        assert_eq!(
            group_limit(root, "3:cpu:/a\n2:memory,pids:/c\n"),
            Some(7000)
        );
        assert_eq!(group_limit(root, "0::/elsewhere\nnonsense\n"), None);
    }
}
