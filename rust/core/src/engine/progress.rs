//! The thread of a process that drives groups nobody waits for. It is started when first needed and sleeps when there is
//! nothing to do.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::error::{Error, Result};

use super::completions;
use super::group::Group;
use super::sleep::{Next, Patience, Sleeper};

/// The process's progress thread, seen from outside.
pub(crate) struct Progress {
    adopted: Mutex<Vec<Arc<Group>>>,
    sleeper: Sleeper,
}

static PROGRESS: OnceLock<Option<Arc<Progress>>> = OnceLock::new();

/// Rounds between two looks at deadlines and at the state of peers, beside the one before each sleep.
const ROUNDS_PER_LOOK: u32 = 256;

/// Starts it and those that tell of completions, if they do not run yet, so that a failure to start them is an error
/// of the call that needs them.
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
    if progress.is_none() || !completions::start() {
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
