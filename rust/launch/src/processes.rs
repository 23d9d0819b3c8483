//! The processes below this one, and their end.
//!
//! This process is the reaper of its descendants (`PR_SET_CHILD_SUBREAPER`): one that loses its parent becomes its
//! child. A child's number stays its own until it is reaped, which only this process does, so a signal to a child or
//! to the group of an unreaped leader cannot reach an unrelated process. Deeper descendants are left until their parent
//! has ended.

use std::fs;
use std::thread;
use std::time::Duration;

use rustix::io;
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait, waitpid,
};

/// A line of the process table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    pub(crate) name: String,
    parent: i32,
    pub(crate) group: i32,
    has_ended: bool,
}

/// From now on whatever loses its parent below this process becomes its child. Where this fails it becomes a child of
/// some process above, and is not found any more.
pub(crate) fn adopt_orphans() -> io::Result<()> {
    set_child_subreaper(Some(getpid()))
}

/// All processes below this one that have not ended, except those in `except`. Those that have ended, and are children
/// of this process, are reaped.
pub(crate) fn descendants(except: &[Pid]) -> Vec<Process> {
    let all = table();
    let mut found: Vec<Process> = Vec::new();
    let mut parents = vec![getpid().as_raw_pid()];
    while let Some(parent) = parents.pop() {
        for process in all.iter().filter(|process| process.parent == parent) {
            parents.push(process.pid.as_raw_pid());
            if except.contains(&process.pid) {
                continue;
            }
            // It is our child, so the number is still its own. Of one that cannot be reaped only the first thread has ended.
            let is_alive = match process.has_ended {
                true => {
                    is_child(process)
                        && matches!(waitpid(Some(process.pid), WaitOptions::NOHANG), Ok(None))
                }
                false => true,
            };
            if is_alive {
                found.push(process.clone());
            }
        }
    }
    found
}

/// Kills all processes below this one, and reaps them. The kernel then counts what they have used for this one.
pub(crate) fn end_all() {
    // After [`adopt_orphans`] a process without children has no descendants, whatever the table has missed: one that was
    // started and left while it was read. Where there is no table, as without /proc, nothing can be found.
    let mut tables_without_a_child = 0;
    while !reap() && tables_without_a_child < 3 {
        tables_without_a_child += 1;
        for process in descendants(&[]).iter().filter(|process| is_child(process)) {
            tables_without_a_child = 0;
            let _ = kill_process(process.pid, Signal::KILL);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Reaps the children that have ended, and returns whether none is left.
fn reap() -> bool {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(io::Errno::INTR) => {}
            Ok(None) => return false,
            // There is none to wait for.
            Err(_) => return true,
        }
    }
}

/// Whether `process` was this process's own child when the table was read.
pub(crate) fn is_child(process: &Process) -> bool {
    process.parent == getpid().as_raw_pid()
}

fn table() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| {
            let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
            parse(&String::from_utf8_lossy(&stat))
        })
        .collect()
}

/// Reads `4711 (name) S 1 4711 ...`. The name may hold anything, parentheses too.
fn parse(stat: &str) -> Option<Process> {
    let (before, after) = stat.rsplit_once(')')?;
    let (pid, name) = before.split_once(" (")?;
    let mut fields = after.split_ascii_whitespace();
    let state = fields.next()?;
    Some(Process {
        pid: Pid::from_raw(pid.parse().ok()?)?,
        name: name.to_owned(),
        parent: fields.next()?.parse().ok()?,
        group: fields.next()?.parse().ok()?,
        has_ended: matches!(state, "Z" | "X"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_table() {
        let process = parse("42 (a) b (c)) Z 7 41 1 0 -1").expect("well formed");
        assert_eq!(process.name, "a) b (c)");
        assert_eq!(
            (process.parent, process.group, process.has_ended),
            (7, 41, true)
        );
        assert_eq!(parse("42 (cut"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn this_process_is_in_the_table() {
        assert!(table().iter().any(|process| process.pid == getpid()));
    }
}
