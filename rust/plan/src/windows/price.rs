//! The costs of a collective through windows, where all ranks agree to it.

use super::HALVES;
use crate::cost::{Bill, Work};
use crate::shared::{CHUNK, chunk, price_of_agreement};
use crate::types::Collective;

/// The time to copy a byte into the rank's own window, in copies of a byte that another core has just written.
const INTO_WINDOW: f64 = 0.5;

/// Bytes of windows that are still in the caches nearest to the cores that have read them.
const NEAR_BYTES: f64 = (HALVES * CHUNK) as f64;

/// Through windows, chunk by chunk.
pub(super) fn price(collective: Collective, work: &Work, bill: &mut Bill) {
    let whole = work.longer_buffer(collective);
    let chunk = chunk(collective, work.world, bill.at.cores) as f64;
    // All contributions must be there; of an all_reduce, all parts of the result too.
    let meetings = match collective {
        Collective::AllReduce => 2.0,
        _ => 1.0,
    };
    price_of_agreement(work, bill);
    // The bytes that a rank puts into its window.
    let put = match collective {
        Collective::AllGather => work.bytes,
        _ => whole,
    };
    bill.rounds += (put / chunk).ceil() * meetings * bill.round(false);
    let copy = bill.costs.copy;
    let (into, fold) = (INTO_WINDOW * copy, bill.costs.fold * work.widening);
    if !bill.is_crowded() {
        // The lines of the window are still where the operation before it has left them: in the others' caches.
        bill.alone += whole.min(NEAR_BYTES) * copy;
    }
    let others = (work.world - 1) as f64;
    let slice = whole / work.world as f64;
    match collective {
        Collective::AllReduce => bill.reaches(2.0 * others * slice),
        Collective::Reduce => bill.root_reaches(others * whole),
        Collective::Broadcast => bill.reaches(whole),
        Collective::Scan | Collective::Exscan => bill.reaches(0.5 * others * whole),
        _ => bill.reaches(others * work.bytes),
    }
    match collective {
        Collective::AllReduce => {
            bill.each += whole * into + others * slice * fold + whole * copy;
        }
        // The root reads all windows while the others fill them.
        Collective::Reduce => {
            bill.each += whole * into;
            bill.root += whole * (others * fold - into);
        }
        Collective::ReduceScatter => bill.each += others * work.bytes * (into + fold),
        // The last rank reads all windows, the others fewer.
        Collective::Scan | Collective::Exscan => {
            bill.each += whole * (into + copy) + 0.5 * others * whole * fold;
            bill.root += 0.5 * others * whole * fold;
        }
        // The others read the root's window while it fills it.
        Collective::Broadcast => bill.each += whole * copy,
        _ => bill.each += work.bytes * (copy + into) + others * work.bytes * copy,
    }
}
