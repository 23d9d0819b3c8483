//! A collective on memory that only a stage can reach, as data: chunks that fit a slot of the stage.
//!
//! For each chunk a rank copies what it contributes from the caller's memory into a slot, all ranks carry out the
//! collective on their slots, and the rank copies what it has got back. It gets nothing from where it has put something else
//! of the same chunk. All ranks cut alike, from the room of a slot, the
//! world and the counts. In `gather`, `scatter` and `all_to_all` with a count per rank or pair they do not know each
//! other's counts, and need not have the same number of chunks ([`is_known`]): a rank that has fewer takes part in the
//! others with [`nothing`], once the ranks have told each other how many there are.

use super::{Algorithm, Buffer, Counts, Shape, Span, applicable};
use crate::types::Collective;

/// The counts of a chunk; the owned form of [`Counts`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// See [`Counts::Even`].
    Even(usize),
    /// See [`Counts::PerRank`].
    PerRank(Vec<usize>),
    /// See [`Counts::PerPair`].
    PerPair {
        /// To each rank.
        send: Vec<usize>,
        /// From each rank.
        recv: Vec<usize>,
    },
}

/// Elements of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotSpan {
    /// The first one.
    pub at: usize,
    /// How many.
    pub len: usize,
}

/// One chunk on one rank. The collective itself has the same kind and root as the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The copies into the slot, which come first: where from in the caller's memory, and where to.
    pub puts: Vec<(Span, usize)>,
    /// The collective's counts.
    pub part: Part,
    /// The collective's input; `None` in place, and where this rank contributes nothing.
    pub input: Option<SlotSpan>,
    /// The collective's output; `None` where this rank gets none.
    pub output: Option<SlotSpan>,
    /// The copies out of the slot, which come last: where from, and where to in the caller's memory.
    pub gets: Vec<(usize, Span)>,
}

/// Whether every rank knows how many chunks all others have: as many as itself.
pub fn is_known(shape: &Shape) -> bool {
    let knows_all = [Collective::AllGather, Collective::ReduceScatter];
    match shape.counts {
        Counts::Even(_) => true,
        Counts::PerRank(_) => knows_all.contains(&shape.collective),
        Counts::PerPair { .. } => false,
    }
}

/// This rank's chunks in slots of `room` elements. `None` for a shape that is malformed and a slot that is too small:
/// twice as many elements as there are ranks will do.
pub fn chunks(shape: &Shape, room: usize) -> Option<Vec<Chunk>> {
    let piece = piece(shape, room);
    if piece == 0 || !applicable(Algorithm::Direct, shape) {
        return None;
    }
    let longest = match shape.collective {
        Collective::Barrier => 1,
        _ => longest(shape),
    };
    Some(
        (0..longest.div_ceil(piece))
            .map(|index| chunk(shape, piece, index))
            .collect(),
    )
}

/// The chunk with which a rank takes part that has nothing left.
pub fn nothing(shape: &Shape) -> Chunk {
    chunk(shape, 1, longest(shape))
}

/// Elements of one contribution, block or buffer that a chunk may have.
fn piece(shape: &Shape, room: usize) -> usize {
    let world = shape.world.max(1);
    match shape.collective {
        Collective::AllGather => room / world,
        Collective::AllReduce | Collective::Reduce | Collective::Scan | Collective::Exscan => {
            room / 2
        }
        Collective::ReduceScatter | Collective::Gather | Collective::Scatter => room / (world + 1),
        Collective::AllToAll => room / (2 * world),
        _ => room,
    }
}

/// The longest contribution, block or buffer that this rank knows of.
fn longest(shape: &Shape) -> usize {
    match shape.counts {
        Counts::Even(count) => count,
        Counts::PerRank(counts) => counts.iter().copied().max().unwrap_or(0),
        Counts::PerPair { send, recv } => send.iter().chain(recv).copied().max().unwrap_or(0),
    }
}

/// Blocks of the caller's memory, and the pieces of them that make a chunk, one after the other.
struct Blocks {
    /// By rank: where the piece lies in the caller's memory, where in the chunk, and its length.
    pieces: Vec<(usize, usize, usize)>,
    len: usize,
}

impl Blocks {
    fn new(counts: &[usize], piece: usize, index: usize) -> Self {
        let (mut before, mut len) = (0, 0);
        let pieces = counts
            .iter()
            .map(|count| {
                let own = count.saturating_sub(index * piece).min(piece);
                let place = (before + index * piece, len, own);
                before += count;
                len += own;
                place
            })
            .collect();
        Self { pieces, len }
    }

    fn counts(&self) -> Vec<usize> {
        self.pieces.iter().map(|piece| piece.2).collect()
    }

    /// The copies between `buffer` and the slot from `at` on.
    fn copies(&self, buffer: Buffer, at: usize) -> impl Iterator<Item = (Span, usize)> {
        self.pieces
            .iter()
            .filter(|(_, _, len)| *len > 0)
            .map(move |&(from, to, len)| (Span::new(buffer, from, len), at + to))
    }
}

#[expect(clippy::too_many_lines, reason = "one arm for each collective")]
fn chunk(shape: &Shape, piece: usize, index: usize) -> Chunk {
    let (rank, world) = (shape.rank, shape.world);
    let is_root = rank == shape.root;
    let mut chunk = Chunk {
        puts: Vec::new(),
        part: Part::Even(0),
        input: None,
        output: None,
        gets: Vec::new(),
    };
    let (counts, received) = match shape.counts {
        Counts::Even(count) => (vec![count; world], vec![count; world]),
        Counts::PerRank(counts) => (counts.to_vec(), counts.to_vec()),
        Counts::PerPair { send, recv } => (send.to_vec(), recv.to_vec()),
    };
    let blocks = Blocks::new(&counts, piece, index);
    let own = blocks.pieces[rank].2;
    let whole = Span::new(Buffer::Output, index * piece, own);
    chunk.part = match shape.counts {
        Counts::Even(_) => Part::Even(own),
        Counts::PerRank(_) => Part::PerRank(blocks.counts()),
        Counts::PerPair { .. } => Part::PerPair {
            send: blocks.counts(),
            recv: Blocks::new(&received, piece, index).counts(),
        },
    };
    let source = match shape.in_place {
        true => Buffer::Output,
        false => Buffer::Input,
    };
    let contribution = Span {
        buffer: source,
        ..whole
    };
    let slot = |at, len| Some(SlotSpan { at, len });
    match shape.collective {
        Collective::AllReduce | Collective::Reduce | Collective::Scan | Collective::Exscan => {
            chunk.puts.push((contribution, 0));
            chunk.input = slot(0, own);
            let gets = match shape.collective {
                Collective::Reduce => is_root,
                _ => shape.contributors() > 0,
            };
            if gets {
                chunk.output = slot(piece, own);
                chunk.gets.push((piece, whole));
            }
        }
        Collective::Broadcast => {
            chunk.output = slot(0, own);
            match is_root {
                true => chunk.puts.push((whole, 0)),
                false => chunk.gets.push((0, whole)),
            }
        }
        Collective::AllGather => {
            let (block, at, _) = blocks.pieces[rank];
            let from = if shape.in_place { block } else { index * piece };
            chunk.puts.push((Span::new(source, from, own), at));
            chunk.output = slot(0, blocks.len);
            let there =
                |(span, _): &(Span, usize)| !(shape.in_place && own > 0 && span.offset == block);
            let copies = blocks.copies(Buffer::Output, 0).filter(there);
            chunk.gets.extend(copies.map(|(span, at)| (at, span)));
        }
        Collective::ReduceScatter => {
            chunk.puts.extend(blocks.copies(Buffer::Input, 0));
            chunk.input = slot(0, blocks.len);
            chunk.output = slot(world * piece, own);
            chunk.gets.push((world * piece, whole));
        }
        Collective::Gather => {
            let input = Span::new(Buffer::Input, index * piece, own);
            chunk.puts.push((input, world * piece));
            chunk.input = slot(world * piece, own);
            if is_root {
                chunk.output = slot(0, blocks.len);
                let copies = blocks.copies(Buffer::Output, 0);
                chunk.gets.extend(copies.map(|(span, at)| (at, span)));
            }
        }
        Collective::Scatter => {
            if is_root {
                chunk.puts.extend(blocks.copies(Buffer::Input, 0));
                chunk.input = slot(0, blocks.len);
            }
            chunk.output = slot(world * piece, own);
            chunk.gets.push((world * piece, whole));
        }
        Collective::AllToAll => {
            let incoming = Blocks::new(&received, piece, index);
            chunk.puts.extend(blocks.copies(Buffer::Input, 0));
            chunk.input = slot(0, blocks.len);
            chunk.output = slot(world * piece, incoming.len);
            let copies = incoming.copies(Buffer::Output, world * piece);
            chunk.gets.extend(copies.map(|(span, at)| (at, span)));
        }
        Collective::Barrier | Collective::Send | Collective::Recv => {}
    }
    chunk.puts.retain(|(span, _)| span.len > 0);
    chunk.gets.retain(|(_, span)| span.len > 0);
    chunk
}

#[cfg(test)]
mod tests;
