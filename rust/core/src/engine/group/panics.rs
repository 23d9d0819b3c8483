//! Panics under a group's lock.
//!
//! A panic is a defect, and the end of the group: half of a step has been done, so no operation may go on, nor may its memory
//! be used. But threads wait for the group, one of them in the place of the others, and the progress thread drives other
//! groups too. So the panic stops at the group: it fails with an `Internal` error, which ends every wait.

use crate::error::Result;
use crate::fence::contained;

use crate::engine::state::{Core, Group};

impl Group {
    /// Calls `work`, whose panic is the end of the group.
    #[inline]
    pub(crate) fn guarded<T>(
        &self,
        core: &mut Core,
        work: impl FnOnce(&mut Core) -> T,
    ) -> Result<T> {
        contained(|| work(core)).inspect_err(|error| self.fail(core, error.clone()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use crate::buffer::Memory;
    use crate::communicator::Communicator;
    use crate::config::Config;
    use crate::engine::Request;
    use crate::engine::links::faulty::{At, Faulty};
    use crate::error::Code;
    use crate::transport::endpoint::Lane;
    use crate::types::{DataType, ReduceOp};

    const PLACES: [At; 6] = [
        At::Send,
        At::Receive,
        At::State,
        At::Arm,
        At::Disarm,
        At::Abort,
    ];

    /// Rank 0 of two, whose link to the other panics the `nth` time that it gets to that place.
    fn faulty(at: At, nth: usize) -> [Communicator; 2] {
        let mut config = Config::default();
        config.set("timeout", "60").unwrap();
        let ranks = Communicator::local(2, &config).unwrap();
        let mut left = nth;
        let reach = move |place| {
            // In an abort always: another panic leads to it.
            let mut is_due = || {
                left = left.wrapping_sub(1);
                left == 0
            };
            let second = at == At::Abort && place == At::State;
            assert!(!(second && is_due()), "on purpose, before an abort");
            let panics = at == place && (place == At::Abort || is_due());
            assert!(!panics, "on purpose, in {place:?}");
            Ok(())
        };
        let link = Faulty {
            reach,
            is_near: false,
        };
        let group = ranks[0].group();
        let mut core = group.core.lock();
        group.read_mail(&mut core);
        core.links
            .establish(Lane::Collective, 1, Box::new(link), "rank 1".to_owned());
        drop(core);
        ranks.try_into().unwrap()
    }

    fn assert_dead(comm: &Communicator, what: &str) {
        let error = comm.error().expect(what);
        assert_eq!(error.code, Code::Internal, "{what}: {error}");
        let core = comm.group().core.lock();
        assert!(!core.leader && !core.sleeping && !core.is_busy(), "{what}");
    }

    /// One thread leads and panics; the others, which wait in its stead, get the error too.
    #[test]
    fn a_panic_of_the_leader_ends_all_waits() {
        for at in PLACES {
            for nth in [1, 3] {
                let what = format!("{at:?}, {nth}");
                let [comm, _other] = faulty(at, nth);
                std::thread::scope(|scope| {
                    for _ in 0..3 {
                        let (comm, what) = (&comm, &what);
                        scope.spawn(move || {
                            let error = comm.barrier().expect_err(what);
                            assert_eq!(error.code, Code::Internal, "{what}: {error}");
                        });
                    }
                });
                assert_dead(&comm, &what);
            }
        }
    }

    /// The progress thread outlives the panic, and drives other groups.
    #[test]
    fn a_panic_in_the_background_ends_the_group_alone() {
        for at in PLACES {
            let [comm, _other] = faulty(at, 2);
            let mut data = vec![1_u8; 4 << 20];
            // SAFETY: the data live until the operation has ended.
            let work = unsafe {
                let memory = Memory::from_raw_parts(data.as_mut_ptr(), data.len());
                let request = Request::all_reduce(DataType::UInt8, ReduceOp::Sum, None, memory);
                comm.start(request, None)
            };
            // Where it panics at once, the call fails.
            if let Ok(work) = work {
                let deadline = Instant::now() + Duration::from_secs(50);
                while !work.is_done() {
                    assert!(Instant::now() < deadline, "{at:?}: no end");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            assert_dead(&comm, &format!("{at:?}"));
        }
        let others = Communicator::local(2, &Config::default()).unwrap();
        let starts = others.iter().map(|comm| {
            // SAFETY: a barrier has no memory.
            unsafe { comm.start(Request::barrier(), None) }.unwrap()
        });
        let works: Vec<_> = starts.collect();
        let deadline = Instant::now() + Duration::from_secs(50);
        while !works.iter().all(|work| work.is_done()) {
            assert!(Instant::now() < deadline, "nothing drives");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
