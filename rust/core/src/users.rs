//! Whose processes and files are this process's own.
//!
//! In a user namespace the kernel shows every user that the namespace does not know as one number, the overflow number (65534,
//! `nobody`). Two files or processes with that number may belong to two users, and a process that is shown to itself by it
//! shares it with strangers. So there that number is no user: nobody is the same user as anybody. Where the namespace
//! knows all users, as on a host, the number stands for a user like any other.

use std::fs;

use rustix::process::geteuid;

use crate::fork::PerProcess;

/// The kernel's, unless it is set up otherwise.
const OVERFLOW: u32 = 65534;

/// The number of users there can be.
const ALL: u64 = u32::MAX as u64;

/// The effective user of this process. `None`: one that its user namespace does not know.
pub(crate) fn own() -> Option<u32> {
    let user = geteuid().as_raw();
    is_user(user).then_some(user)
}

/// Whether what the kernel shows as `user`'s is this process's user's.
pub(crate) fn is_own(user: u32) -> bool {
    own() == Some(user)
}

/// `user 1000`, for messages.
pub(crate) fn name(user: u32) -> String {
    match is_user(user) {
        true => format!("user {user}"),
        false => {
            format!("user {user}, which stands for all that this user namespace does not know")
        }
    }
}

/// Whether this process's user namespace has a user of this number.
fn is_user(user: u32) -> bool {
    // A process may enter another namespace at any time, but not before it has no thread beside itself.
    static NAMESPACE: PerProcess<Namespace> = PerProcess::new(|| {
        let map = fs::read_to_string("/proc/self/uid_map");
        let overflow = fs::read_to_string("/proc/sys/kernel/overflowuid");
        Namespace::of(map.ok().as_deref(), overflow.ok().as_deref())
    });
    user != NAMESPACE.overflow || NAMESPACE.is_whole
}

struct Namespace {
    overflow: u32,
    /// It knows all users.
    is_whole: bool,
}

impl Namespace {
    /// As the kernel's files tell. A kernel without user namespaces has no map, and all users; where `/proc` is not there
    /// that looks the same, and the number is no user.
    fn of(map: Option<&str>, overflow: Option<&str>) -> Self {
        let known = map.map(|map| map.lines().filter_map(length).sum::<u64>());
        Self {
            overflow: overflow
                .and_then(|number| number.trim().parse().ok())
                .unwrap_or(OVERFLOW),
            is_whole: known.is_some_and(|known| known >= ALL),
        }
    }
}

/// How many users a line of the map is about: the first of them inside, outside, and how many.
fn length(line: &str) -> Option<u64> {
    line.split_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(map: &str, overflow: &str) -> (u32, bool) {
        let found = Namespace::of(Some(map), Some(overflow));
        (found.overflow, found.is_whole)
    }

    #[test]
    fn a_namespace_is_whole_when_it_knows_all_users() {
        let whole = "         0          0 4294967295\n";
        assert_eq!(namespace(whole, "65534\n"), (65534, true));
        let one = "         0       1000          1\n";
        assert_eq!(namespace(one, "65534\n"), (65534, false));
        let container = "0 1000 1\n1 100000 65536\n";
        assert_eq!(namespace(container, "60000\n"), (60000, false));
        let divided = "0 1 1\n1 0 1\n2 2 4294967293\n";
        assert_eq!(namespace(divided, "65534"), (65534, true));
        let unknown = Namespace::of(None, None);
        assert_eq!((unknown.overflow, unknown.is_whole), (65534, false));
    }

    #[test]
    fn this_process_has_a_user() {
        let user = geteuid().as_raw();
        assert!(is_own(user) || !is_user(user));
        assert!(!is_own(user ^ 1));
        assert!(name(user).starts_with(&format!("user {user}")));
    }
}
