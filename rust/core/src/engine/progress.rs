//! The threads of a process: one that drives groups nobody waits for, and one that tells of completions.
//!
//! Both are started when first needed and sleep when there is nothing to do. Completions have a thread of their own
//! because they run foreign code: it may take locks (Python's among them) or wait for another operation, and must
//! not hold up the bytes of other groups meanwhile.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use crossbeam_channel::Sender;
use parking_lot::Mutex;

use crate::error::{Error, Result};

use super::group::Group;
use super::sleep::{Next, Patience, Sleeper};
use super::work::Completion;

/// The process's progress thread, seen from outside.
pub(crate) struct Progress {
    adopted: Mutex<Vec<Arc<Group>>>,
    sleeper: Sleeper,
}

static PROGRESS: OnceLock<Option<Arc<Progress>>> = OnceLock::new();
static COMPLETER: OnceLock<Option<Sender<Told>>> = OnceLock::new();

/// Rounds between two looks at deadlines and at the state of peers, beside the one before each sleep.
const ROUNDS_PER_LOOK: u32 = 256;

/// A completion and what it is to be told.
type Told = (Completion, Result<()>);

/// Starts both threads if they do not run yet, so that a failure to start them is an error of the call that needs
/// them.
pub(crate) fn start() -> Result<()> {
    let progress = PROGRESS.get_or_init(|| {
        let progress = Arc::new(Progress {
            adopted: Mutex::new(Vec::new()),
            sleeper: Sleeper::new().ok()?,
        });
        let same = Arc::clone(&progress);
        std::thread::Builder::new()
            .name("unisono-drive".into())
            .spawn(move || same.run())
            .ok()
            .map(|_| progress)
    });
    let completer = COMPLETER.get_or_init(|| {
        let (sender, receiver) = crossbeam_channel::unbounded::<Told>();
        std::thread::Builder::new()
            .name("unisono-tell".into())
            .spawn(move || {
                for (completion, result) in receiver {
                    // It is foreign code. Its panic has been reported by the hook; the next one is told all the same.
                    let _ = catch_unwind(AssertUnwindSafe(|| completion(result)));
                }
            })
            .ok()
            .map(|_| sender)
    });
    if progress.is_none() || completer.is_none() {
        return Err(Error::system(
            "start the progress thread",
            "the system refused a thread or a descriptor; look at `ulimit -a`",
        ));
    }
    Ok(())
}

/// Hands a group with operations under way to the progress thread. The caller holds the group's lock and has marked it
/// as watched.
pub(crate) fn adopt(group: Arc<Group>) {
    if let Some(Some(progress)) = PROGRESS.get() {
        progress.adopted.lock().push(group);
        progress.sleeper.ring();
    }
}

/// Has `completion` called with `result`, soon, on the thread for that.
pub(crate) fn tell(completion: Completion, result: Result<()>) {
    if let Some(Some(completer)) = COMPLETER.get() {
        // The receiving thread never ends.
        let _ = completer.send((completion, result));
    }
}

impl Progress {
    fn run(&self) {
        let mut groups: Vec<Arc<Group>> = Vec::new();
        let mut patience = Patience::of_background();
        let mut rounds = 0_u32;
        loop {
            for group in self.adopted.lock().drain(..) {
                self.sleeper.watch_set(group.sleeper());
                groups.push(group);
                patience.reset();
            }
            let mut moved = false;
            // Also while one group moves without a pause: the waits of the others may be in vain.
            rounds = rounds.wrapping_add(1);
            let look_around = rounds.is_multiple_of(ROUNDS_PER_LOOK);
            groups.retain(|group| {
                let kept = group.drive(&mut moved, look_around);
                if !kept {
                    self.sleeper.forget_set(group.sleeper());
                }
                kept
            });
            if groups.is_empty() {
                self.sleeper.sleep_forever();
                continue;
            }
            if moved {
                patience.reset();
                continue;
            }
            match patience.next() {
                Next::Spin | Next::Yield => std::thread::yield_now(),
                Next::Sleep => {
                    self.sleep(&groups);
                    patience.reset();
                }
            }
        }
    }

    fn sleep(&self, groups: &[Arc<Group>]) {
        let mut until = None;
        let mut ready = false;
        for group in groups {
            ready |= group.prepare_sleep(&mut until);
        }
        if !ready && self.adopted.lock().is_empty() {
            self.sleeper.sleep(until);
        }
        for group in groups {
            group.finish_sleep();
        }
    }
}
