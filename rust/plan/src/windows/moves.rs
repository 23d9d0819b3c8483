//! Collectives that move elements and reduce nothing.

use super::{Chunk, Chunks, Peers, Step, Task, piece_len, pieces};
use crate::types::{Collective, Rank};
use crate::{Buffer, Span};

impl Task<'_> {
    /// No rank leaves before all ranks have come.
    pub(super) fn barrier(&self) -> Chunks {
        self.chunks(1, |_, half| Chunk {
            front: vec![
                self.claim(half, self.others),
                self.publish(half, self.others),
            ],
            back: vec![
                self.await_from(half, self.others),
                self.release(half, self.others),
            ],
        })
    }

    /// The copy of the data that stays on this rank.
    pub(super) fn keep(&self) -> Option<Step> {
        let shape = self.shape;
        let rank = shape.rank;
        let is_root = rank == shape.root;
        let (from, to) = match shape.collective {
            Collective::AllGather if !shape.in_place => (0, self.before(rank)),
            Collective::Gather if is_root => (0, self.before(rank)),
            Collective::Scatter if is_root => (self.before(rank), 0),
            Collective::AllToAll => (self.before(rank), self.before_from(rank)),
            _ => return None,
        };
        let len = self.count(rank);
        Some(Step::Copy {
            src: Span::new(Buffer::Input, from, len),
            dst: Span::new(Buffer::Output, to, len),
        })
    }

    /// The root puts, the others get.
    pub(super) fn broadcast(&self) -> Chunks {
        let (shape, chunk) = (self.shape, self.room.chunk());
        let root: Peers = [shape.root].into_iter().collect();
        self.chunks(pieces(shape.count(), chunk), |index, half| {
            let offset = index * chunk;
            let len = piece_len(shape.count(), chunk, index);
            if shape.rank == shape.root {
                return Chunk {
                    front: self.put_whole(half, Span::new(Buffer::Output, offset, len)),
                    back: Vec::new(),
                };
            }
            Chunk {
                front: Vec::new(),
                back: vec![
                    self.await_from(half, root),
                    self.get(half, (shape.root, 0), self.output(offset, len)),
                    self.release(half, root),
                ],
            }
        })
    }

    /// The root puts; each of the others takes a slice into its own window and the other slices from theirs.
    pub(super) fn broadcast_two_shot(&self) -> Chunks {
        let (shape, chunk) = (self.shape, self.room.chunk());
        let (rank, root) = (shape.rank, shape.root);
        let the_root: Peers = [root].into_iter().collect();
        let beside = self.others.without(root);
        self.chunks(pieces(shape.count(), chunk), |index, half| {
            let offset = index * chunk;
            let len = piece_len(shape.count(), chunk, index);
            if rank == root {
                return Chunk {
                    front: self.put_whole(half, Span::new(Buffer::Output, offset, len)),
                    back: Vec::new(),
                };
            }
            // The slices are those of the ranks without the root.
            let slice = |of: Rank| self.slice(len, shape.world - 1, of - usize::from(of > root));
            let own = slice(rank);
            let mut back = vec![
                self.await_from(half, the_root),
                self.get(
                    half,
                    (root, own.start),
                    self.window(half, own.start, own.len()),
                ),
                self.publish_results(half, beside),
                self.get(
                    half,
                    (rank, own.start),
                    self.output(offset + own.start, own.len()),
                ),
                self.await_results(half, beside),
            ];
            back.extend(beside.iter().map(|from| {
                self.get(
                    half,
                    (from, slice(from).start),
                    self.output(offset + slice(from).start, slice(from).len()),
                )
            }));
            back.push(self.release(half, self.others));
            Chunk {
                front: vec![self.claim(half, beside)],
                back,
            }
        })
    }

    /// Every rank puts a piece of its contribution and gets a piece of every rank's.
    pub(super) fn all_gather(&self) -> Chunks {
        let (rank, chunk) = (self.shape.rank, self.room.chunk());
        let longest = (0..self.shape.world).map(|of| self.count(of)).max();
        // In place the contribution lies in the output, as this rank's block.
        let start = if self.shape.in_place {
            self.before(rank)
        } else {
            0
        };
        self.chunks(pieces(longest.unwrap_or(0), chunk), |index, half| {
            let own = piece_len(self.count(rank), chunk, index);
            let src = Span::new(self.source(), start + index * chunk, own);
            let from = self.those(|of| piece_len(self.count(of), chunk, index) > 0);
            Chunk {
                front: if own > 0 {
                    self.put_whole(half, src)
                } else {
                    Vec::new()
                },
                back: self.get_blocks(half, from, index, chunk, 0),
            }
        })
    }

    /// The others put their contributions, the root gets them.
    pub(super) fn gather(&self) -> Chunks {
        let (shape, chunk) = (self.shape, self.room.chunk());
        let root: Peers = [shape.root].into_iter().collect();
        if shape.rank != shape.root {
            let own = self.count(shape.rank);
            return self.chunks(pieces(own, chunk), |index, half| Chunk {
                front: vec![
                    self.claim(half, root),
                    self.put(
                        half,
                        Span::new(Buffer::Input, index * chunk, piece_len(own, chunk, index)),
                        0,
                    ),
                    self.publish(half, root),
                ],
                back: Vec::new(),
            });
        }
        let longest = self.others.iter().map(|of| self.count(of)).max();
        self.chunks(pieces(longest.unwrap_or(0), chunk), |index, half| {
            let from = self.those(|of| piece_len(self.count(of), chunk, index) > 0);
            Chunk {
                front: Vec::new(),
                back: self.get_blocks(half, from, index, chunk, 0),
            }
        })
    }

    /// The root puts a piece for each of the others, each gets its own.
    pub(super) fn scatter(&self) -> Chunks {
        let (shape, share) = (self.shape, self.room.share(self.shape.world));
        if shape.rank == shape.root {
            let longest = self.others.iter().map(|of| self.count(of)).max();
            return self.chunks(pieces(longest.unwrap_or(0), share), |index, half| Chunk {
                front: self.put_blocks(half, index, share),
                back: Vec::new(),
            });
        }
        let root: Peers = [shape.root].into_iter().collect();
        let own = self.count(shape.rank);
        self.chunks(pieces(own, share), |index, half| Chunk {
            front: Vec::new(),
            back: vec![
                self.await_from(half, root),
                self.get(
                    half,
                    (shape.root, shape.rank * share),
                    self.output(index * share, piece_len(own, share, index)),
                ),
                self.release(half, root),
            ],
        })
    }

    /// Every rank puts a piece for each rank and gets its own from each.
    pub(super) fn all_to_all(&self) -> Chunks {
        let (rank, share) = (self.shape.rank, self.room.share(self.shape.world));
        let longest = self
            .others
            .iter()
            .map(|peer| self.count(peer).max(self.count_from(peer)))
            .max();
        self.chunks(pieces(longest.unwrap_or(0), share), |index, half| {
            let from = self.those(|of| piece_len(self.count_from(of), share, index) > 0);
            Chunk {
                front: self.put_blocks(half, index, share),
                back: self.get_blocks(half, from, index, share, rank * share),
            }
        })
    }

    /// The front of a chunk that all others read whole.
    pub(super) fn put_whole(&self, half: usize, src: Span) -> Vec<Step> {
        vec![
            self.claim(half, self.others),
            self.put(half, src, 0),
            self.publish(half, self.others),
        ]
    }

    /// The front of chunk `index` of blocks for the others, `share` elements of each at a time: the
    /// piece for rank r lies at r times that.
    pub(super) fn put_blocks(&self, half: usize, index: usize, share: usize) -> Vec<Step> {
        let len = |of: Rank| piece_len(self.count(of), share, index);
        let readers = self.those(|of| len(of) > 0);
        if readers.is_empty() {
            return Vec::new();
        }
        let mut front = vec![self.claim(half, readers)];
        front.extend(readers.iter().map(|of| {
            self.put(
                half,
                Span::new(Buffer::Input, self.before(of) + index * share, len(of)),
                of * share,
            )
        }));
        front.push(self.publish(half, readers));
        front
    }

    /// The back of chunk `index` of blocks from `from`, `share` elements at a time, which lie at `at` in their halves.
    fn get_blocks(
        &self,
        half: usize,
        from: Peers,
        index: usize,
        share: usize,
        at: usize,
    ) -> Vec<Step> {
        let mut back = vec![self.await_from(half, from)];
        back.extend(from.iter().map(|of| {
            self.get(
                half,
                (of, at),
                self.output(
                    self.before_from(of) + index * share,
                    piece_len(self.count_from(of), share, index),
                ),
            )
        }));
        back.push(self.release(half, from));
        back
    }
}
