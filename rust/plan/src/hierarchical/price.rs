//! The costs of each collective: inside hosts, across, inside.

use super::all_reduce::algorithm_across;
use super::levels::at_once;
use super::nodes::{Level, pays};
use crate::Algorithm;
use crate::cost::{Bill, Taken, Work};
use crate::topology::Nodes;
use crate::types::Collective;

/// Puts all that the plan for `collective` does on the bill.
pub(super) fn price(collective: Collective, work: &Work, bill: &mut Bill) {
    bill.at = bill.at.by_node();
    match collective {
        Collective::AllReduce => all_reduce(work, bill),
        Collective::Reduce | Collective::Broadcast => along_a_chain(collective, work, bill),
        Collective::AllGather => blocks(Taken::Copied, work, bill),
        Collective::ReduceScatter => {
            bill.pass(work.bytes * work.widening);
            blocks(Taken::Folded, work, bill);
        }
        Collective::Barrier => {
            bill.rounds += rounds_to_hear_from(bill.at.beside) * bill.round(false)
                + rounds_to_hear_from(bill.at.hosts) * bill.round(true);
        }
        Collective::AllToAll => all_to_all(work, bill),
        Collective::Gather => gather(work, bill),
        Collective::Scatter => scatter(work, bill),
        _ => {}
    }
}

/// Rounds of a dissemination among `ranks`.
fn rounds_to_hear_from(ranks: usize) -> f64 {
    ranks.next_power_of_two().ilog2().into()
}

/// Where the ranks of a host meet by memory node, what that takes beside as many messages as without.
fn inside_by_node(collective: Collective, work: &Work, bill: &mut Bill) {
    let widens = work.widening > 1.0;
    let at = bill.at;
    let pays = |nodes: &Nodes| pays(collective, work.elements, widens, *nodes, at.cores);
    if let Some(nodes) = at.nodes().filter(pays) {
        let level = Level::of(collective, work.widening, nodes);
        let shard = work.bytes / nodes.ranks as f64;
        bill.rounds += level.rounds * (bill.round(false) + bill.costs.latency);
        bill.pass(level.copied * shard);
        bill.goes_by_node(level.crossing * shard);
    }
}

/// Each host sums up, the ranks exchange their shards with their counterparts on the other hosts, each host gathers.
fn all_reduce(work: &Work, bill: &mut Bill) {
    inside_by_node(Collective::AllReduce, work, bill);
    let (beside, fewest, hosts) = (bill.at.beside, bill.at.fewest, bill.at.hosts);
    let near = (beside - 1) as f64;
    let shard = work.bytes / fewest as f64;
    let message = work.elements.div_ceil(fewest * hosts);
    let pieces = message.div_ceil(work.piece).max(1) as f64;
    let across = algorithm_across(
        hosts,
        at_once(hosts, message.min(work.piece), bill.at.longest_at_once),
    );
    let inside = shard / pieces;
    let messages = messages_across(across, hosts);
    let rounds = match across {
        Algorithm::TwoShot => 1.0,
        _ => messages,
    };
    bill.rounds += 2.0 * bill.round(false) + 2.0 * rounds * bill.round(true);
    if fewest == beside {
        bill.exchanges(near * pieces, false, inside, Taken::Folded, work.widening);
        bill.exchanges(near * pieces, false, inside, Taken::Copied, 1.0);
    } else {
        // On the larger hosts some ranks send all they have to those that carry shards, and receive the results.
        let (given, taken) = (
            bill.sending(inside) + bill.taking(inside, Taken::Copied, 1.0),
            bill.taking(inside, Taken::Folded, work.widening) + bill.sending(inside),
        );
        bill.each += fewest as f64 * pieces * given;
        bill.root += near * pieces * taken;
        bill.reaches(2.0 * work.bytes * near / beside as f64);
    }
    let sent = shard * (hosts - 1) as f64 / hosts as f64;
    let across = sent / messages / pieces;
    let messages = messages * pieces;
    bill.exchanges(messages, true, across * work.widening, Taken::Folded, 1.0);
    bill.exchanges(messages, true, across, Taken::Copied, 1.0);
    // Sums in place wait in scratch memory until all have contributed.
    bill.pass(shard);
    // Inside, ranks work on the pieces before and after.
    bill.waits_between(rounds * (pieces - 1.0) + 1.0, bill.each / pieces);
    bill.wire += work.bytes * (hosts - 1) as f64 / hosts as f64 * (work.widening + 1.0);
}

/// Messages that a rank sends to sum up its shard between hosts, and as many to share the sum.
fn messages_across(algorithm: Algorithm, hosts: usize) -> f64 {
    match algorithm {
        Algorithm::Halving => hosts.ilog2().into(),
        _ => (hosts - 1) as f64,
    }
}

/// Shards go along the hosts, each host takes them from the one before it and gives them to the next.
fn along_a_chain(collective: Collective, work: &Work, bill: &mut Bill) {
    inside_by_node(collective, work, bill);
    let (beside, fewest, hosts) = (bill.at.beside, bill.at.fewest, bill.at.hosts);
    let pieces = work.pieces_of(work.elements.div_ceil(fewest));
    let shard = work.bytes / fewest as f64 / pieces;
    let near = (beside - 1) as f64 * pieces;
    let (taken, wide) = match collective {
        Collective::Reduce => (Taken::Folded, work.widening),
        _ => (Taken::Copied, 1.0),
    };
    bill.rounds += 2.0 * bill.round(false) + (hosts - 1) as f64 * bill.round(true);
    bill.exchanges(near, false, shard, taken, wide);
    // The shards that the root takes from the ranks beside it, or gives to them.
    let given = bill.sending(shard) + bill.taking(shard, Taken::Copied, 1.0);
    bill.root += (fewest - 1) as f64 * pieces * given;
    bill.exchanges(pieces, true, shard * wide, taken, 1.0);
    // The first piece is on one link after the other.
    let first = shard * wide * fewest as f64;
    bill.wire += work.bytes * wide + (hosts - 2) as f64 * first;
}

/// Blocks for other hosts go to their carriers, and from there, with those of the ranks beside, across. `work.bytes` are one
/// block.
fn all_to_all(work: &Work, bill: &mut Bill) {
    let (beside, fewest, hosts) = (bill.at.beside, bill.at.fewest, bill.at.hosts);
    let (near, far) = ((beside - 1) as f64, (work.world - fewest) as f64);
    // On the smallest host each rank carries for most.
    let carried = (far / fewest as f64).ceil();
    bill.rounds += bill.round(false) + bill.round(true);
    bill.exchanges(near, false, work.bytes, Taken::Copied, 1.0);
    bill.exchanges(near, false, carried * work.bytes, Taken::Copied, 1.0);
    if hosts > 2 || fewest < beside {
        // They are copied together, and apart.
        bill.pass(2.0 * near * carried * work.bytes);
    }
    bill.pass((carried + 1.0) * work.bytes);
    bill.exchanges(
        carried,
        true,
        beside as f64 * work.bytes,
        Taken::Copied,
        1.0,
    );
    if !bill.at.is_in_blocks() {
        bill.pass(far * work.bytes);
    }
    bill.wire += beside as f64 * far * work.bytes;
}

/// The first rank of each host takes the blocks beside it, and the root those of each host. `work.bytes` are one block.
fn gather(work: &Work, bill: &mut Bill) {
    let beside = bill.at.beside;
    let (near, far) = beside_and_far_from_the_root(work, bill);
    let taken = near * bill.taking(work.bytes, Taken::Copied, 1.0);
    let carried = (beside - 1) as f64 * bill.taking(work.bytes, Taken::Copied, 1.0);
    bill.rounds += bill.round(false) + bill.round(true);
    bill.each += bill.sending(work.bytes);
    bill.pass(work.bytes);
    // Nothing crosses before a carrier has all blocks of its host.
    bill.alone += carried;
    bill.root += taken + at_the_root(work, bill);
    bill.root_reaches(near * work.bytes);
    bill.wire += far * work.bytes;
}

/// The root sends the first rank of each host what is for that host. `work.bytes` are one block.
fn scatter(work: &Work, bill: &mut Bill) {
    let beside = bill.at.beside;
    let (near, far) = beside_and_far_from_the_root(work, bill);
    let given = near * bill.sending(work.bytes);
    let carried = (beside - 1) as f64 * bill.sending(work.bytes);
    bill.rounds += bill.round(false) + bill.round(true);
    bill.each += bill.taking(work.bytes, Taken::Copied, 1.0);
    bill.pass(work.bytes);
    // A carrier gives on what has come whole.
    bill.alone += carried + bill.taking_from_afar(beside as f64 * work.bytes);
    bill.root += given + at_the_root(work, bill);
    bill.root_reaches(near * work.bytes);
    bill.wire += far * work.bytes;
}

/// How many other ranks are on the root's host, and how many on others.
fn beside_and_far_from_the_root(work: &Work, bill: &Bill) -> (f64, f64) {
    let beside = bill.at.beside_root();
    ((beside - 1) as f64, (work.world - beside) as f64)
}

/// The root's time for the messages of all other hosts.
fn at_the_root(work: &Work, bill: &Bill) -> f64 {
    let (beside, hosts) = (bill.at.beside, bill.at.hosts);
    let messages = (hosts - 1) as f64 * bill.taking_from_afar(beside as f64 * work.bytes);
    let copies = match bill.at.is_in_blocks() {
        true => 0.0,
        false => beside_and_far_from_the_root(work, bill).1 * work.bytes * bill.costs.copy,
    };
    messages + copies
}

/// Every block goes to or from one rank of each other host, and there from or to all. `work.bytes` are one block.
fn blocks(taken: Taken, work: &Work, bill: &mut Bill) {
    let (beside, fewest, hosts) = (bill.at.beside, bill.at.fewest, bill.at.hosts);
    let pieces = Work::pieces(work.elements);
    let piece = work.bytes / pieces;
    let wide = if taken == Taken::Folded {
        work.widening
    } else {
        1.0
    };
    let rounds = match at_once(hosts, work.elements, bill.at.longest_at_once) {
        true => 1,
        false => hosts - 1,
    };
    bill.rounds += bill.round(false) + rounds as f64 * bill.round(true);
    // The ranks of the smallest host carry most; beside the others there are most to share with.
    let carried = (work.world - fewest) as f64 / fewest as f64;
    bill.exchanges(carried * pieces, true, piece * wide, taken, 1.0);
    let handled = work.world as f64 / beside as f64;
    bill.exchanges(
        (beside - 1) as f64 * handled * pieces,
        false,
        piece,
        taken,
        wide,
    );
    if taken == Taken::Folded {
        // Sums begin with a copy of what this rank contributes.
        bill.pass((handled - 1.0) * work.bytes * wide);
    }
    let leaving = beside * (hosts - 1);
    let coming = work.world - fewest;
    bill.wire += leaving.max(coming) as f64 * work.bytes * wide;
}
