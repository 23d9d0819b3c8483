//! How many files and sockets this process may have open.
//!
//! Most systems give a program 1,024 to begin with and let it ask for many more. A rank that exchanges with a few hundred
//! others has a connection or two with each of them, and with such a limit its group would fail at the first all_to_all.

use std::os::fd::AsRawFd;

use crate::fork::PerProcess;
use crate::locks::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Of a peer that is reached over TCP: two lanes, each with a stream and a control connection.
const PER_PEER: u64 = 4;

/// An allowance for the other descriptors of the program.
const OTHERS: u64 = 256;

/// Whether this process has used less than half of the descriptors that it may have. `newest` is the one that it has just got:
/// the system gives the lowest number that is free.
pub(crate) fn are_plenty(newest: &impl AsRawFd) -> bool {
    let number = u64::try_from(newest.as_raw_fd()).unwrap_or(u64::MAX);
    let limit = getrlimit(Resource::Nofile).current;
    limit.is_none_or(|limit| number < limit / 2)
}

/// Raises the limit to the descriptors that a rank among `world` may come to need, if it is lower, but not above the hard
/// limit. Where that is too few, the connection that gets none fails, and says so.
pub(crate) fn make_room(world: usize) {
    static ONE_AT_A_TIME: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);
    let _alone = ONE_AT_A_TIME.lock();
    let limit = getrlimit(Resource::Nofile);
    let Some(more) = more(world, &limit) else {
        return;
    };
    let before = limit.current;
    let raised = Rlimit {
        current: Some(more),
        ..limit
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => tracing::info!(
            world,
            "this process may have {more} descriptors from now on, not {}: its group may need them",
            before.unwrap_or(more)
        ),
        Err(cause) => tracing::info!(world, %cause, "this process may not have {more} descriptors"),
    }
}

/// The limit that a rank among `world` asks for; `None` where the present one will do or is the highest.
fn more(world: usize, limit: &Rlimit) -> Option<u64> {
    let current = limit.current?;
    let wanted = (world as u64).saturating_mul(PER_PEER) + OTHERS;
    let allowed = wanted.min(limit.maximum.unwrap_or(wanted));
    (allowed > current).then_some(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_raised_for_large_groups_and_never_lowered() {
        let limit = |current, maximum| Rlimit { current, maximum };
        let usual = limit(Some(1024), Some(1 << 19));
        assert_eq!(more(8, &usual), None);
        assert_eq!(more(512, &usual), Some(2304));
        assert_eq!(more(1 << 20, &usual), Some(1 << 19));
        assert_eq!(more(512, &limit(Some(1024), None)), Some(2304));
        assert_eq!(more(512, &limit(Some(1024), Some(1024))), None);
        assert_eq!(more(512, &limit(Some(4096), Some(4096))), None);
        assert_eq!(more(512, &limit(None, None)), None);
    }

    #[test]
    fn a_test_has_few() {
        assert!(are_plenty(&std::fs::File::open("/dev/null").unwrap()));
    }

    #[test]
    fn a_small_group_leaves_it_as_it_is() {
        let before = getrlimit(Resource::Nofile);
        make_room(2);
        assert_eq!(getrlimit(Resource::Nofile).current, before.current);
    }
}
