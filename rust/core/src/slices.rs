//! The collectives on Rust slices: safe and blocking. What takes foreign memory or returns before the end is in
//! [`crate::communicator`].

use crate::buffer::{Element, Memory};
use crate::communicator::Communicator;
use crate::engine::{Request, Sizes};
use crate::error::Result;
use crate::types::{Rank, ReduceOp};

impl Communicator {
    /// `data` becomes the reduction of every rank's `data`.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported` before anything is sent, else what ended the operation.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let request = Request {
            sizes: Sizes::Even(data.len()),
            ..Request::all_reduce(T::DTYPE, op, None, Memory::empty())
        };
        self.carry_out(request, None, Some(data))
    }

    /// On the root, `data` becomes the reduction of every rank's `data`; elsewhere it stays as it is.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce<T: Element>(&self, data: &mut [T], op: ReduceOp, root: Rank) -> Result<()> {
        let request = Request {
            sizes: Sizes::Even(data.len()),
            ..Request::reduce(T::DTYPE, op, root, None, None)
        };
        match self.rank() == root {
            true => self.carry_out(request, None, Some(data)),
            false => self.carry_out(request, Some(data), None),
        }
    }

    /// `data` becomes the root's.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<()> {
        let request = Request {
            sizes: Sizes::Even(data.len()),
            ..Request::broadcast(T::DTYPE, root, Memory::empty())
        };
        self.carry_out(request, None, Some(data))
    }

    /// `output` becomes every rank's `input` in rank order; it is `world_size` times as long.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let sizes = Sizes::Even(input.len());
        let request = Request::all_gather(T::DTYPE, None, Memory::empty(), sizes);
        self.carry_out(request, Some(input), Some(output))
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
        let nothing = Memory::empty;
        let request = Request::reduce_scatter(T::DTYPE, op, nothing(), nothing(), sizes);
        self.carry_out(request, Some(input), Some(output))
    }

    /// On the root, `output` becomes every rank's `input` in rank order. The others give an empty one.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let sizes = Sizes::Even(input.len());
        let output = (self.rank() == root || !output.is_empty()).then_some(output);
        let request = Request::gather(T::DTYPE, root, Memory::empty(), None, sizes);
        self.carry_out(request, Some(input), output)
    }

    /// `output` becomes this rank's block of the root's `input`. The others give an empty one.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let sizes = Sizes::Even(output.len());
        let input = (self.rank() == root || !input.is_empty()).then_some(input);
        let request = Request::scatter(T::DTYPE, root, None, Memory::empty(), sizes);
        self.carry_out(request, input, Some(output))
    }

    /// Block r of `input` goes to rank r; block r of `output` comes from rank r.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let sizes = Sizes::Even(output.len() / self.world_size());
        let nothing = Memory::empty;
        let request = Request::all_to_all(T::DTYPE, nothing(), nothing(), sizes);
        self.carry_out(request, Some(input), Some(output))
    }

    /// Blocks until every rank has come.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        self.carry_out::<u8>(Request::barrier(), None, None)
    }

    /// Sends `data` to rank `to`; returns when `data` may be changed again.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn send_slice<T: Element>(&self, data: &[T], to: Rank, tag: u64) -> Result<()> {
        // SAFETY: `data` is borrowed until `send_now` returns, which is after the end of the operation.
        unsafe { self.send_now(T::DTYPE, Memory::of(data), (to, tag), None) }
    }

    /// Receives exactly `data.len()` elements from rank `from`, or from any; returns the rank they came from.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn receive_slice<T: Element>(
        &self,
        data: &mut [T],
        from: Option<Rank>,
        tag: u64,
    ) -> Result<Rank> {
        // SAFETY: `data` is borrowed until `receive_now` returns, which is after the end of the operation.
        unsafe { self.receive_now(T::DTYPE, Memory::of_mut(data), (from, tag), None) }
    }

    /// Sends `outgoing` to rank `to` and receives exactly `incoming.len()` elements from rank `from`, or from any, at the
    /// same time; returns the rank they came from.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn send_receive_slices<T: Element>(
        &self,
        (outgoing, to): (&[T], Rank),
        (incoming, from): (&mut [T], Option<Rank>),
        tag: u64,
    ) -> Result<Rank> {
        // SAFETY: both slices are borrowed until `send_receive_now` returns, which is after the end of both operations.
        unsafe {
            let outgoing = (Memory::of(outgoing), to, tag);
            let incoming = (Memory::of_mut(incoming), from, tag);
            self.send_receive_now(T::DTYPE, outgoing, incoming, None)
        }
    }

    /// Carries out `request`, which has no memory yet, on these slices.
    fn carry_out<T: Element>(
        &self,
        mut request: Request,
        input: Option<&[T]>,
        output: Option<&mut [T]>,
    ) -> Result<()> {
        // SAFETY: the slices are borrowed by the caller of this method, and `run` returns only when the operation has
        // ended.
        unsafe {
            request.input = input.map(|input| Memory::of(input));
            request.output = output.map(|output| Memory::of_mut(output));
            self.run(request).map(drop)
        }
    }
}
