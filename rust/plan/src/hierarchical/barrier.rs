//! A barrier in two levels: first all ranks of a host hear from each other, then the hosts.
//!
//! In the rounds of a dissemination barrier over all ranks, some message crosses between hosts in each, so each takes a
//! network's latency. Here only log2(h) of the rounds do. Each rank of the smallest host, and as many of the others, hears
//! from its counterparts; the others wait for one of these.

use super::levels::Levels;
use crate::bruck::distances;
use crate::builder::Steps;
use crate::types::Rank;
use crate::{Plan, Shape};

/// Dissemination inside, then across.
pub(super) fn barrier(shape: &Shape, levels: &Levels) -> Plan {
    let mut steps = Steps::of(shape);
    disseminate(&mut steps, levels.inside(), levels.place);
    let shards = levels.shards();
    if levels.place >= shards {
        steps.await_signal(levels.inside()[levels.place % shards]);
        return steps.done();
    }
    disseminate(&mut steps, &levels.across(), levels.host);
    for waiting in (levels.place + shards..levels.inside().len()).step_by(shards) {
        steps.signal(levels.inside()[waiting]);
    }
    steps.done()
}

/// After the round at distance d, the rank at `place` has heard from the 2d of `ranks` that end with itself.
fn disseminate(steps: &mut Steps, ranks: &[Rank], place: usize) {
    let world = ranks.len();
    for distance in distances(world) {
        steps.signal(ranks[(place + distance) % world]);
        steps.await_signal(ranks[(place + world - distance) % world]);
    }
}
