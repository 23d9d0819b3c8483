//! A group as the progress thread drives it: what no caller waits for.

use std::time::Instant;

use crate::transport::endpoint::Lane;
use crate::types::Rank;

use crate::engine::collective::pair_counts::Outlook;
use crate::engine::drive::backoff::Parker;
use crate::engine::drive::progress::{Driven, Findings};
use crate::engine::state::{Core, Group};

impl Driven for Group {
    fn number(&self) -> u32 {
        self.number
    }

    fn parker(&self) -> &Parker {
        &self.parker
    }

    fn drive(&self, look_around: bool) -> Findings {
        let Some(mut core) = self.core.try_lock() else {
            return Findings::default();
        };
        let recent = std::mem::take(&mut core.handed_over);
        if core.leader || !core.is_busy() {
            return Findings {
                recent,
                ..Findings::default()
            };
        }
        let moved = self.step(&mut core);
        if look_around {
            self.look_around(&mut core);
        }
        Findings {
            moved,
            waits: core.is_busy(),
            recent,
        }
    }

    fn dismiss(&self) -> bool {
        let mut core = self.core.lock();
        core.watched = core.is_busy() && !core.leader;
        !core.watched
    }

    fn prepare_sleep(&self, until: &mut Option<Instant>) -> bool {
        let mut core = self.core.lock();
        if core.leader {
            // It sleeps on the same descriptors, and its announcements are not ours to change.
            return true;
        }
        let compiled = self.guarded(&mut core, |core| self.prepare(core, until));
        compiled.unwrap_or(true)
    }

    fn finish_sleep(&self) {
        let mut core = self.core.lock();
        core.dozing = false;
        if !core.leader {
            let _ = self.guarded(&mut core, |core| self.disarm(core));
            self.look_around(&mut core);
        }
    }

    fn attend(&self, lane: Lane, peer: Rank) {
        let mut core = self.core.lock();
        if let Some(open) = core.links.open(lane, peer)
            && open.ended.is_none()
        {
            // Whatever it returns, the link returns it again at the next look.
            let _ = open.link.peer_state();
            self.mend_links(&mut core);
            if core.leader {
                // It may be about to sleep until something comes that has just been read.
                self.parker().unpark();
            }
        }
    }

    fn look_out(&self, seen: &mut u64) -> Outlook {
        let mut core = self.core.lock();
        let outlook = self.guarded(&mut core, |core| self.look_for_strays(core, seen));
        match outlook {
            Ok(outlook) if !self.is_closed() && self.error().is_none() => outlook,
            _ => Outlook::Over,
        }
    }
}

impl Group {
    fn prepare(&self, core: &mut Core, until: &mut Option<Instant>) -> bool {
        // The events that are forgotten here are looked at afterwards.
        self.parker().clear();
        self.look_around(core);
        // It may have read what an operation was waiting for.
        if self.step(core) || !core.is_busy() {
            return true;
        }
        core.dozing = true;
        self.arm(core, until)
    }
}
