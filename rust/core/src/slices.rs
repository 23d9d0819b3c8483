//! The collectives on Rust slices: safe and blocking. Calls that take foreign memory or return before the end are in
//! [`crate::communicator`].

use crate::buffer::{Element, Memory};
use crate::communicator::Communicator;
use crate::engine::{Received, Request, Sizes};
use crate::error::Result;
use crate::types::{Rank, ReduceOp};

impl Communicator {
    /// `data` becomes the reduction of every rank's `data`.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported` before anything is sent, else what ended the operation.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        // SAFETY: the slice is borrowed until `carry_out` returns.
        unsafe {
            let data = Memory::of_mut(data);
            self.carry_out(Request::all_reduce(T::DTYPE, op, None, data))
        }
    }

    /// On the root, `data` becomes the reduction of every rank's `data`; elsewhere it stays as it is.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce<T: Element>(&self, data: &mut [T], op: ReduceOp, root: Rank) -> Result<()> {
        // SAFETY: the slice is borrowed until `carry_out` returns.
        unsafe {
            let (input, output) = match self.rank() == root {
                true => (None, Some(Memory::of_mut(data))),
                false => (Some(Memory::of(data)), None),
            };
            self.carry_out(Request::reduce(T::DTYPE, op, root, input, output))
        }
    }

    /// `data` becomes the reduction of the `data` of the ranks up to this one, as in [`Request::scan`].
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn scan<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        // SAFETY: the slice is borrowed until `carry_out` returns.
        unsafe {
            let data = Memory::of_mut(data);
            self.carry_out(Request::scan(T::DTYPE, op, None, data))
        }
    }

    /// `data` becomes the reduction of the `data` of the ranks before this one, as in [`Request::exscan`]; on rank 0 it stays
    /// as it is.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn exscan<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        // SAFETY: the slice is borrowed until `carry_out` returns.
        unsafe {
            let data = Memory::of_mut(data);
            self.carry_out(Request::exscan(T::DTYPE, op, None, Some(data)))
        }
    }

    /// `data` becomes the root's.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<()> {
        // SAFETY: the slice is borrowed until `carry_out` returns.
        unsafe {
            let data = Memory::of_mut(data);
            self.carry_out(Request::broadcast(T::DTYPE, root, data))
        }
    }

    /// `output` becomes every rank's `input` in rank order; it is `world_size` times as long.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let sizes = Sizes::Even(input.len());
        // SAFETY: the slices are borrowed until `carry_out` returns.
        unsafe {
            let (input, output) = (Memory::of(input), Memory::of_mut(output));
            self.carry_out(Request::all_gather(T::DTYPE, Some(input), output, sizes))
        }
    }

    /// `output` becomes this rank's block of the reduction of every rank's `input`, which is `world_size` times as
    /// long.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        let sizes = Sizes::Even(output.len());
        // SAFETY: the slices are borrowed until `carry_out` returns.
        unsafe {
            let (input, output) = (Memory::of(input), Memory::of_mut(output));
            self.carry_out(Request::reduce_scatter(T::DTYPE, op, input, output, sizes))
        }
    }

    /// On the root, `output` becomes every rank's `input` in rank order. The others give an empty one.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let sizes = Sizes::Even(input.len());
        // SAFETY: the slices are borrowed until `carry_out` returns.
        unsafe {
            let (input, output) = (Memory::of(input), Memory::of_mut(output));
            let output = (self.rank() == root || !output.is_empty()).then_some(output);
            self.carry_out(Request::gather(T::DTYPE, root, input, output, sizes))
        }
    }

    /// `output` becomes this rank's block of the root's `input`. The others give an empty one.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let sizes = Sizes::Even(output.len());
        // SAFETY: the slices are borrowed until `carry_out` returns.
        unsafe {
            let (input, output) = (Memory::of(input), Memory::of_mut(output));
            let input = (self.rank() == root || !input.is_empty()).then_some(input);
            self.carry_out(Request::scatter(T::DTYPE, root, input, output, sizes))
        }
    }

    /// Block r of `input` goes to rank r; block r of `output` comes from rank r.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let sizes = Sizes::Even(output.len() / self.world_size());
        // SAFETY: the slices are borrowed until `carry_out` returns.
        unsafe {
            let (input, output) = (Memory::of(input), Memory::of_mut(output));
            self.carry_out(Request::all_to_all(T::DTYPE, input, output, sizes))
        }
    }

    /// Blocks until every rank has come.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        // SAFETY: a barrier has no memory.
        unsafe { self.carry_out(Request::barrier()) }
    }

    /// Sends `data` to rank `to`; returns when `data` may be changed again.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn send_slice<T: Element>(&self, data: &[T], to: Rank, tag: u64) -> Result<()> {
        // SAFETY: `data` is borrowed until `send_now` returns, which is after the end of the operation.
        unsafe { self.send_now(T::DTYPE, Memory::of(data), (to, tag), None) }
    }

    /// Receives at most `data.len()` elements from rank `from`, or from any.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn receive_slice<T: Element>(
        &self,
        data: &mut [T],
        from: Option<Rank>,
        tag: u64,
    ) -> Result<Received> {
        // SAFETY: `data` is borrowed until `receive_now` returns, which is after the end of the operation.
        unsafe { self.receive_now(T::DTYPE, Memory::of_mut(data), (from, tag), None) }
    }

    /// Sends `outgoing` to rank `to` and receives at most `incoming.len()` elements from rank `from`, or from any, at the
    /// same time.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn send_receive_slices<T: Element>(
        &self,
        (outgoing, to): (&[T], Rank),
        (incoming, from): (&mut [T], Option<Rank>),
        tag: u64,
    ) -> Result<Received> {
        // SAFETY: both slices are borrowed until `send_receive_now` returns, which is after the end of both operations.
        unsafe {
            let outgoing = (Memory::of(outgoing), to, tag);
            let incoming = (Memory::of_mut(incoming), from, tag);
            self.send_receive_now(T::DTYPE, outgoing, incoming, None)
        }
    }

    /// # Safety
    /// What the request views stays borrowed until this returns, which is when the operation has ended.
    #[inline]
    unsafe fn carry_out(&self, request: Request) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.run(request).map(drop) }
    }
}
