//! An all_reduce in the shared heap, in one pass over memory.
//!
//! Where the buffers of all ranks lie in heaps that all of them have mapped, nothing has to be sent. Each rank sums up
//! its slice of all buffers, block by block, and stores each sum to all of them while the lines it was made of are
//! still in the cache: every line of every buffer is read once and written once, by one rank. No plan of messages comes
//! near that, since there each rank writes its own memory alone, and reads what others have written.
//!
//! ```text
//! buffers of    rank 0   rank 1   rank 2
//! slice 0       a0       b0       c0      rank 0: a0 = b0 = c0 = a0 + b0 + c0
//! slice 1       a1       b1       c1      rank 1: a1 = b1 = c1 = a1 + b1 + c1
//! slice 2       a2       b2       c2      rank 2: ...
//! ```
//!
//! # Safety of the memory
//!
//! What a rank shares it leaves alone until it is back: slice `r` is used by rank `r` alone, and each rank's own slice
//! is shared with no rank. After a failure see [`Neighbour::await_writer`](crate::transport::Neighbour::await_writer).

use crate::engine::collective::transfer::Operands;
use crate::reduce::{Source, Streaming, copy_hinted};
use crate::transport::Shared;
use crate::types::Rank;

use super::MOST_RANKS;

/// Bytes of the slice that are summed up before they are stored: with as many from every rank they stay in the cache.
const BLOCK: usize = 4 << 10;

/// Bytes of the slice between two looks at whether the peers still share.
const STRETCH: usize = 64 << 10;

/// Bytes of the slice between two turns of other operations.
const TURN: usize = 256 << 10;

/// One rank's slice, whose bytes no other rank writes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slice {
    /// The first byte in every buffer.
    pub(super) start: usize,
    /// Its length.
    pub(super) bytes: usize,
}

/// Sums up and stores some more of the own slice, of which `done` bytes are done. False when a peer has taken back what
/// it shared: its end, or its abort, will be heard of.
pub(super) fn work<'a>(
    operands: &Operands,
    slice: Slice,
    done: &mut usize,
    shared: impl Iterator<Item = (Rank, &'a mut Shared)>,
) -> bool {
    let most = TURN
        * operands
            .workers
            .as_ref()
            .map_or(1, |workers| workers.threads());
    let end = slice.bytes.min(*done + most);
    let mut together: Vec<(Rank, &mut Shared)> = Vec::with_capacity(operands.world);
    together.extend(shared);
    let (stretch, block) = match &operands.workers {
        Some(_) => (most, most),
        None => (STRETCH, BLOCK),
    };
    while *done < end {
        let stretch = stretch.min(end - *done);
        let allowed = together.iter_mut().all(|(_, shared)| shared.begin());
        if allowed {
            for at in (0..stretch).step_by(block) {
                let (at, count) = (*done + at, block.min(stretch - at));
                let sum = operands.output.write(slice.start + at, count);
                reduce(operands, sum, at, &mut together);
            }
            *done += stretch;
        }
        together.iter_mut().for_each(|(_, shared)| shared.end());
        if !allowed {
            return false;
        }
    }
    true
}

/// `sum` and the same bytes of what is shared, which are `at` bytes from the beginning of the slice, become the sum of
/// all, in rank order.
fn reduce(operands: &Operands, sum: &mut [u8], at: usize, shared: &mut [(Rank, &mut Shared)]) {
    let kernel = operands.reducer();
    let mut sources = [Source::Destination; MOST_RANKS];
    for (peer, shared) in &*shared {
        // Two numbers have one sum in either order, which is then made where the own one lies.
        let place = if operands.world == 2 { 1 } else { *peer };
        sources[place] = Source::Element(shared.read(at, sum.len()));
    }
    let sources = &sources[..operands.world];
    match &operands.workers {
        Some(workers) => workers.reduce(kernel, sum, sources, operands.world, Streaming::No),
        None => kernel.reduce(sum, sources, operands.world, Streaming::No),
    }
    for (_, shared) in shared {
        let copy = shared.write(at, sum.len());
        match &operands.workers {
            Some(workers) => workers.copy(copy, sum, Streaming::No),
            None => copy_hinted(copy, sum, Streaming::No),
        }
    }
}
