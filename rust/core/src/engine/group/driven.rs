//! A group as the progress thread drives it.

use std::time::Instant;

use crate::transport::endpoint::Lane;
use crate::types::Rank;

use crate::engine::collective::pair_counts::Outlook;
use crate::engine::state::Group;
use crate::engine::wait::backoff::Parker;
use crate::engine::wait::progress::{Driven, Found};

impl Driven for Group {
    fn number(&self) -> u32 {
        self.number
    }

    fn parker(&self) -> &Parker {
        &self.parker
    }

    fn drive(&self, look_around: bool) -> Found {
        self.drive(look_around)
    }

    fn dismiss(&self) -> bool {
        self.dismiss()
    }

    fn prepare_sleep(&self, until: &mut Option<Instant>) -> bool {
        self.prepare_sleep(until)
    }

    fn finish_sleep(&self) {
        self.finish_sleep();
    }

    fn attend(&self, lane: Lane, peer: Rank) {
        self.attend(lane, peer);
    }

    fn look_out(&self, seen: &mut u64) -> Outlook {
        self.look_out(seen)
    }
}
