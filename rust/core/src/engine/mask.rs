//! Groups whose ranks keep their numbers where some are gone.
//!
//! Such a communicator has a group of the ranks that are left, which numbers them anew. Its callers know all the numbers of
//! before: their buffers have a block for each, also for those that are gone. A request is passed on with the living blocks of
//! its buffers, which are [pieces](Memory::from_pieces) of one run of bytes to the engine, so nothing is copied. The blocks of
//! ranks that are gone are neither read nor written.

use std::sync::Arc;

use super::{Completion, PointToPoint, Received, Request, Sizes};
use crate::buffer::Memory;
use crate::error::{Error, Result};
use crate::types::Rank;

/// The numbers of the ranks of a group whose ranks keep them.
#[derive(Debug)]
pub(crate) struct Mask {
    /// How many numbers there are.
    world: usize,
    /// The number of each rank of the group, in its order there.
    living: Vec<Rank>,
    /// The place of this rank among them.
    own: usize,
}

impl Mask {
    /// `living`: the numbers of those that are left, ascending.
    pub(crate) fn new(world: usize, living: Vec<Rank>, own: usize) -> Self {
        Self { world, living, own }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.living[self.own]
    }

    pub(crate) fn world(&self) -> usize {
        self.world
    }

    pub(crate) fn living(&self) -> &[Rank] {
        &self.living
    }

    /// The place in the group of the rank with this number.
    pub(crate) fn place(&self, rank: Rank) -> Result<usize> {
        self.living.binary_search(&rank).map_err(|_| {
            let what = match rank < self.world {
                true => "is gone, and this communicator goes on without it",
                false => "is out of range",
            };
            Error::invalid(format!(
                "rank {rank} {what}: the ranks that are left, of {}, are {:?}",
                self.world, self.living
            ))
        })
    }

    /// As [`Mask::place`]; none for any.
    pub(crate) fn place_of_any(&self, rank: Option<Rank>) -> Result<Option<usize>> {
        rank.map(|rank| self.place(rank)).transpose()
    }

    /// The number of the rank at this place in the group.
    pub(crate) fn number(&self, place: usize) -> Rank {
        self.living.get(place).copied().unwrap_or(place)
    }

    /// A message of the group, with the number that its sender has here.
    pub(crate) fn numbered(&self, received: Received) -> Received {
        Received {
            source: self.number(received.source),
            ..received
        }
    }

    /// An error of the group, with the number that its peer has here.
    pub(crate) fn renumber(&self, error: Error) -> Error {
        Error {
            peer: error.peer.map(|peer| self.number(peer)),
            ..error
        }
    }

    /// Has the group carry the request out. Apart from calls of other communicators, which are to cost nothing for it.
    #[cold]
    #[inline(never)]
    pub(crate) fn carry<T>(
        &self,
        request: Request,
        act: impl FnOnce(Request) -> Result<T>,
    ) -> Result<T> {
        self.here(act(self.pass_on(request)?))
    }

    /// The result of the group's part of a call.
    #[cold]
    #[inline(never)]
    pub(crate) fn after<T>(&self, act: impl FnOnce() -> Result<T>) -> Result<T> {
        self.here(act())
    }

    /// A result of the group, whose error has the number that its peer has here.
    #[cold]
    pub(crate) fn here<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| self.renumber(error))
    }

    /// The request as the group carries it out.
    fn pass_on(&self, request: Request) -> Result<Request> {
        request.check(self.rank(), self.world)?;
        let root = match request.collective.has_root() {
            true => self.place(request.root)?,
            false => request.root,
        };
        let input = request.collective.gives_blocks();
        let output = request.collective.takes_blocks();
        if !input && !output {
            return Ok(Request { root, ..request });
        }
        let size = request.dtype.size();
        let (of_inputs, of_outputs) = match &request.sizes {
            Sizes::PerPair { send, recv } => (self.blocks(send, size), self.blocks(recv, size)),
            Sizes::PerRank(counts) => {
                let blocks = self.blocks(counts, size);
                (blocks.clone(), blocks)
            }
            Sizes::Even(count) => {
                let blocks = self.blocks(&vec![*count; self.world], size);
                (blocks.clone(), blocks)
            }
        };
        let part = |memory: Option<Memory>, is_in_blocks, blocks: &[_]| match is_in_blocks {
            true => memory.map(|memory| memory.part(blocks)),
            false => memory,
        };
        Ok(Request {
            root,
            input: part(request.input, input, &of_inputs),
            output: part(request.output, output, &of_outputs),
            sizes: match request.sizes {
                Sizes::Even(count) => Sizes::Even(count),
                Sizes::PerRank(counts) => Sizes::PerRank(self.of_living(&counts)),
                Sizes::PerPair { send, recv } => Sizes::PerPair {
                    send: self.of_living(&send),
                    recv: self.of_living(&recv),
                },
            },
            ..request
        })
    }

    fn of_living(&self, counts: &[usize]) -> Vec<usize> {
        self.living.iter().map(|rank| counts[*rank]).collect()
    }

    /// Where the blocks of those that are left lie, in bytes: where each begins, and how long it is.
    fn blocks(&self, counts: &[usize], size: usize) -> Vec<(usize, usize)> {
        let mut begin = 0_usize;
        let all = counts.iter().map(|count| {
            let bytes = count.saturating_mul(size);
            let block = (begin, bytes);
            begin = begin.saturating_add(bytes);
            block
        });
        let all: Vec<_> = all.collect();
        self.living.iter().map(|rank| all[*rank]).collect()
    }

    /// `completion` with errors that have the numbers of this communicator.
    pub(crate) fn completion(
        self: &Arc<Self>,
        completion: Option<Completion>,
    ) -> Option<Completion> {
        let completion = completion?;
        let this = Arc::clone(self);
        Some(Box::new(move |result| {
            completion(this.here(result));
        }))
    }

    pub(crate) fn options(self: &Arc<Self>, options: PointToPoint) -> PointToPoint {
        PointToPoint {
            completion: self.completion(options.completion),
            ..options
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use crate::types::DataType;

    fn mask() -> Mask {
        Mask::new(4, vec![0, 2, 3], 1)
    }

    fn memory(bytes: &mut [u8]) -> Memory {
        // SAFETY: the bytes outlive the view, and nothing else touches them meanwhile.
        unsafe { Memory::of_mut(bytes) }
    }

    #[test]
    fn requests_lose_the_blocks_of_ranks_that_are_gone() {
        let (mut own, mut all) = ([9; 2], [0, 1, 10, 11, 20, 21, 30, 31]);
        let sizes = Sizes::Even(2);
        let gather = Request::all_gather(
            DataType::UInt8,
            Some(memory(&mut own)),
            memory(&mut all),
            sizes,
        );
        let passed = mask().pass_on(gather).expect("a request");
        assert!(passed.check(1, 3).is_ok());
        assert_eq!(passed.sizes, Sizes::Even(2));
        let output = passed.output.expect("an output");
        assert_eq!(output.gather(0, 6), [0, 1, 20, 21, 30, 31]);

        let (send, recv) = (vec![1, 2, 0, 3], vec![0, 1, 0, 2]);
        let (mut input, mut output) = ([0, 10, 11, 30, 31, 32], [5, 6, 7]);
        let sizes = Sizes::PerPair { send, recv };
        let (input, output) = (memory(&mut input), memory(&mut output));
        let exchange = Request::all_to_all(DataType::UInt8, input, output, sizes);
        let passed = mask().pass_on(exchange).expect("a request");
        assert_eq!(
            passed.input.expect("an input").gather(0, 4),
            [0, 30, 31, 32]
        );
        assert_eq!(passed.output.expect("an output").gather(0, 2), [6, 7]);
        let (send, recv) = (vec![1, 0, 3], vec![0, 0, 2]);
        assert_eq!(passed.sizes, Sizes::PerPair { send, recv });
    }

    #[test]
    fn ranks_have_the_numbers_of_before() {
        let mask = mask();
        assert_eq!((mask.rank(), mask.world()), (2, 4));
        let mut buffer = [0; 3];
        for (root, place) in [(0, Some(0)), (1, None), (2, Some(1)), (4, None)] {
            let broadcast = Request::broadcast(DataType::UInt8, root, memory(&mut buffer));
            let passed = mask.pass_on(broadcast).map(|request| request.root);
            match place {
                Some(place) => assert_eq!(passed, Ok(place)),
                None => assert!(passed.is_err_and(|error| error.code == Code::InvalidArgument)),
            }
        }
        let error = Error::new(Code::PeerLost, "gone").with_peer(2);
        assert_eq!(mask.renumber(error).peer, Some(3));
    }
}
