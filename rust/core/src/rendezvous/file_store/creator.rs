//! Whether a file is left over from an earlier job. Its header names the process that made it (kernel boot, process namespace,
//! process id, start time). If that process is known to be gone when the file is opened, no job with it as a member can still
//! form, and the file is started anew. If it cannot be known (another host made it), the file is taken as it is; ranks of the
//! earlier job then show as ranks that were claimed twice, which is an error that names the file's entries. Use a fresh name
//! for each job across hosts.

use std::fs;

/// This process, as `boot id, pid namespace, pid, start time`; parts that cannot be read are empty.
pub(super) fn creator() -> String {
    let pid = std::process::id();
    format!("{} {pid} {}", kernel(), start_time(pid).unwrap_or_default())
}

/// This running kernel and process namespace, in one word: only in the same one do process ids compare.
pub(in crate::rendezvous) fn kernel() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{}:{}", boot.trim(), space.display())
}

/// When process `pid` began, in clock ticks since boot: a reused process id has another one. `None`: it has ended,
/// though its parent may not have noticed yet.
fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in parentheses and may hold anything; the start time is the 22nd.
    let mut rest = stat[stat.rfind(')')? + 1..].split_whitespace();
    let state = rest.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    rest.nth(18).map(str::to_owned)
}

/// Whether a process with this number runs in this process's namespace.
pub(in crate::rendezvous) fn is_running(pid: u32) -> bool {
    start_time(pid).is_some()
}

/// Whether the process described by `creator` is known to be gone.
pub(super) fn is_gone(creator: &str) -> bool {
    let mut words = creator.split(' ');
    let (Some(place), Some(pid), Some(start)) = (words.next(), words.next(), words.next()) else {
        return false;
    };
    // Without a boot id or a start time nothing can be known.
    if place != kernel() || place.starts_with(':') || start.is_empty() {
        return false;
    }
    match pid.parse() {
        Ok(pid) => start_time(pid).as_deref() != Some(start),
        Err(_) => false,
    }
}
