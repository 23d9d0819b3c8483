//! Collectives that reduce. One kernel reads all ranks' halves in rank order, so the result has the same bits wherever
//! it is made and however it is cut.

use std::ops::Range;

use super::{Chunk, Chunks, Peers, Step, Task, piece_len, pieces};
use crate::types::{Collective, Rank};
use crate::{Buffer, Sources, Span};

impl Task<'_> {
    /// Every rank puts all and reduces all.
    pub(super) fn all_reduce(&self) -> Chunks {
        let (shape, chunk) = (self.shape, self.room.chunk());
        self.chunks(pieces(shape.count(), chunk), |index, half| {
            let offset = index * chunk;
            let len = piece_len(shape.count(), chunk, index);
            Chunk {
                front: self.put_whole(half, Span::new(self.source(), offset, len)),
                back: vec![
                    self.await_from(half, self.others),
                    self.reduce_window(half, 0, None, self.output(offset, len)),
                    self.release(half, self.others),
                ],
            }
        })
    }

    /// Every rank puts all but its slice, reduces its slice, and stores the sum where the others have put theirs.
    ///
    /// The data that a rank puts and the data that it is given lie at the same places: where its window is its buffer, each
    /// line of the buffers is read once and written once.
    pub(super) fn all_reduce_two_shot(&self) -> Chunks {
        let (shape, chunk) = (self.shape, self.room.chunk());
        self.chunks(pieces(shape.count(), chunk), |index, half| {
            let offset = index * chunk;
            let len = piece_len(shape.count(), chunk, index);
            let slices = self.slices(len);
            let own = &slices[shape.rank];
            let given = |part: Range<usize>| {
                let dst = self.output(offset + part.start, part.len());
                self.get(half, (shape.rank, part.start), dst)
            };
            let src = Span::new(self.source(), offset + own.start, own.len());
            Chunk {
                front: self.put_slices(half, offset, &slices),
                back: vec![
                    self.await_from(half, self.others),
                    self.reduce_and_give(
                        (half, own.start),
                        self.own(src),
                        self.output(offset + own.start, own.len()),
                    ),
                    self.publish_results(half, self.others),
                    self.await_results(half, self.others),
                    // After that, so that a rank that hears of it may send results again.
                    self.release(half, self.others),
                    given(0..own.start),
                    given(own.end..len),
                ],
            }
        })
    }

    /// All ranks but the first put all; the first reduces all, and stores the sum where the others have put theirs.
    pub(super) fn all_reduce_by_first(&self) -> Chunks {
        const FIRST: Rank = 0;
        let (shape, chunk) = (self.shape, self.room.chunk());
        let first: Peers = [FIRST].into_iter().collect();
        self.chunks(pieces(shape.count(), chunk), |index, half| {
            let offset = index * chunk;
            let len = piece_len(shape.count(), chunk, index);
            let src = Span::new(self.source(), offset, len);
            if shape.rank != FIRST {
                return Chunk {
                    front: vec![
                        self.claim(half, first),
                        self.put(half, src, 0),
                        self.publish(half, first),
                    ],
                    back: vec![
                        self.await_results(half, first),
                        self.release(half, first),
                        self.get(half, (shape.rank, 0), self.output(offset, len)),
                    ],
                };
            }
            let mut front = vec![self.claim(half, self.others)];
            if self.premultiplied {
                front.push(self.put(half, src, 0));
            }
            Chunk {
                front,
                back: vec![
                    self.await_from(half, self.others),
                    self.reduce_and_give((half, 0), self.own(src), self.output(offset, len)),
                    self.publish_results(half, self.others),
                    self.release(half, self.others),
                ],
            }
        })
    }

    /// As in two shots, one chunk after the other: see [`build_in_step`](super::build_in_step).
    pub(super) fn all_reduce_in_step(&self, chunk: usize) -> Vec<Step> {
        let (half, count, to) = (0, self.shape.count(), self.others);

        if count == 0 {
            return Vec::new();
        }
        let mut steps = vec![self.claim(half, self.others)];
        for index in 0..pieces(count, chunk) {
            let offset = index * chunk;
            let slices = self.slices(piece_len(count, chunk, index));
            // The results lie behind the contributions, so that these may change while those are read.
            let get = |from: Rank| {
                let slice = slices[from].clone();
                self.get(
                    half,
                    (from, chunk + slice.start),
                    self.output(offset + slice.start, slice.len()),
                )
            };
            steps.extend(self.put_slices(half, offset, &slices).into_iter().skip(1));
            for step in self.reduce_slice(half, offset, &slices) {
                steps.push(match step {
                    Step::ReduceAll { srcs, dst, copies } => Step::ReduceAll {
                        srcs,
                        dst: self.window(half, chunk + dst.offset, dst.len),
                        copies,
                    },
                    other => other,
                });
            }
            steps.push(self.publish_results(half, to));
            steps.push(get(self.shape.rank));
            let from = self.others;
            steps.push(self.await_results(half, from));
            steps.extend(self.others.iter().map(get));
        }
        steps.push(self.release(half, to));
        steps
    }

    /// Every rank puts all for those after it, and reduces what those before it have put, with its own for a scan.
    pub(super) fn prefix(&self) -> Chunks {
        let (shape, chunk) = (self.shape, self.room.chunk());
        let before = self.those(|rank| rank < shape.rank);
        let after = self.those(|rank| rank > shape.rank);
        self.chunks(pieces(shape.count(), chunk), |index, half| {
            let (offset, len) = (index * chunk, piece_len(shape.count(), chunk, index));
            let src = Span::new(self.source(), offset, len);
            let is_inclusive = shape.collective == Collective::Scan;
            let front = match (after.is_empty(), is_inclusive) {
                (true, true) => self.put_for_itself(half, src, 0),
                (true, false) => Vec::new(),
                _ => vec![
                    self.claim(half, after),
                    self.put(half, src, 0),
                    self.publish(half, after),
                ],
            };
            let mut back = vec![self.await_from(half, before)];
            if shape.contributors() > 0 {
                let own = self.own(src).filter(|_| is_inclusive);
                back.push(self.reduce_window(half, 0, own, self.output(offset, len)));
            }
            back.push(self.release(half, before));
            Chunk { front, back }
        })
    }

    /// All ranks but the root put all, the root reduces all.
    pub(super) fn reduce(&self) -> Chunks {
        let (shape, chunk) = (self.shape, self.room.chunk());
        let root: Peers = [shape.root].into_iter().collect();
        self.chunks(pieces(shape.count(), chunk), |index, half| {
            let src = Span::new(
                self.source(),
                index * chunk,
                piece_len(shape.count(), chunk, index),
            );
            if shape.rank != shape.root {
                return Chunk {
                    front: vec![
                        self.claim(half, root),
                        self.put(half, src, 0),
                        self.publish(half, root),
                    ],
                    back: Vec::new(),
                };
            }
            Chunk {
                front: self.put_for_itself(half, src, 0),
                back: vec![
                    self.await_from(half, self.others),
                    self.reduce_window(half, 0, self.own(src), self.output(src.offset, src.len)),
                    self.release(half, self.others),
                ],
            }
        })
    }

    /// Every rank puts all but its slice and reduces its slice, the root gets the slices.
    pub(super) fn reduce_two_shot(&self) -> Chunks {
        let (shape, chunk) = (self.shape, self.room.chunk());
        let (rank, root) = (shape.rank, shape.root);
        self.chunks(pieces(shape.count(), chunk), |index, half| {
            let offset = index * chunk;
            let len = piece_len(shape.count(), chunk, index);
            let slices = self.slices(len);
            let mut back = self.reduce_slice(half, offset, &slices);
            if rank == root {
                back.push(self.get_slice(half, offset, &slices, rank));
                back.push(self.await_results(half, self.others));
                let others = self.others.iter();
                back.extend(others.map(|from| self.get_slice(half, offset, &slices, from)));
            } else {
                back.push(self.publish_results(half, [root].into_iter().collect()));
            }
            back.push(self.release(half, self.others));
            Chunk {
                front: self.put_slices(half, offset, &slices),
                back,
            }
        })
    }

    /// Every rank puts pieces of the blocks of the others and reduces a piece of its own.
    pub(super) fn reduce_scatter(&self) -> Chunks {
        let (rank, share) = (self.shape.rank, self.room.share(self.shape.world));
        let longest = (0..self.shape.world).map(|of| self.count(of)).max();
        self.chunks(pieces(longest.unwrap_or(0), share), |index, half| {
            let len = piece_len(self.count(rank), share, index);
            let src = Span::new(Buffer::Input, self.before(rank) + index * share, len);
            let at = rank * share;
            let mut front = self.put_blocks(half, index, share);
            if self.premultiplied && len > 0 {
                // With the pieces for the others, under their claim where there is one.
                let put = self.put(half, src, at);
                match front.len() {
                    0 => front = vec![self.claim(half, Peers::none()), put],
                    _ => front.insert(1, put),
                }
            }
            let back = match len {
                0 => Vec::new(),
                _ => vec![
                    self.await_from(half, self.others),
                    self.reduce_window(half, at, self.own(src), self.output(index * share, len)),
                    self.release(half, self.others),
                ],
            };
            Chunk { front, back }
        })
    }

    /// As [`Task::reduce_window`], with the result also where the others' contributions lie.
    fn reduce_and_give(
        &self,
        (half, offset): (usize, usize),
        own: Option<Span>,
        dst: Span,
    ) -> Step {
        Step::ReduceAll {
            srcs: Sources::Windows { half, offset, own },
            dst,
            copies: self.others,
        }
    }

    /// The own contribution to a reduction, where it need not go through the window.
    fn own(&self, src: Span) -> Option<Span> {
        (!self.premultiplied).then_some(src)
    }

    /// The steps of a rank that puts nothing for others and, only if the sum is premultiplied, something for itself.
    fn put_for_itself(&self, half: usize, src: Span, at: usize) -> Vec<Step> {
        if !self.premultiplied {
            return Vec::new();
        }
        vec![self.claim(half, Peers::none()), self.put(half, src, at)]
    }

    /// The slices of a chunk of `len` elements, by rank.
    fn slices(&self, len: usize) -> Vec<Range<usize>> {
        let world = self.shape.world;
        (0..world).map(|of| self.slice(len, world, of)).collect()
    }

    /// Slice `index` of `parts` of a chunk of `len` elements: from a multiple of the alignment on, the last ones shorter
    /// or empty.
    pub(super) fn slice(&self, len: usize, parts: usize, index: usize) -> Range<usize> {
        let step = len.div_ceil(parts).next_multiple_of(self.room.align);
        let start = (step * index).min(len);
        start..(start + step).min(len)
    }

    /// The front of a chunk in two shots.
    fn put_slices(&self, half: usize, offset: usize, slices: &[Range<usize>]) -> Vec<Step> {
        let own = &slices[self.shape.rank];
        let len = slices.iter().map(|slice| slice.end).max().unwrap_or(0);
        let put = |part: Range<usize>| {
            self.put(
                half,
                Span::new(self.source(), offset + part.start, part.len()),
                part.start,
            )
        };
        let mut front = vec![self.claim(half, self.others)];
        if self.premultiplied {
            front.push(put(0..len));
        } else {
            front.push(put(0..own.start));
            front.push(put(own.end..len));
        }
        front.push(self.publish(half, self.others));
        front
    }

    /// Awaits the contributions and leaves this rank's slice of the result in its window.
    fn reduce_slice(&self, half: usize, offset: usize, slices: &[Range<usize>]) -> Vec<Step> {
        let own = &slices[self.shape.rank];
        let src = Span::new(self.source(), offset + own.start, own.len());
        vec![
            self.await_from(half, self.others),
            self.reduce_window(
                half,
                own.start,
                self.own(src),
                self.window(half, own.start, own.len()),
            ),
        ]
    }

    /// Gets the result that `from` left in its window.
    fn get_slice(&self, half: usize, offset: usize, slices: &[Range<usize>], from: Rank) -> Step {
        self.get(
            half,
            (from, slices[from].start),
            self.output(offset + slices[from].start, slices[from].len()),
        )
    }
}
