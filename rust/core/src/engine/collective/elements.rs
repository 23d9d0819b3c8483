//! The elements of an operation: their types, and the computations on them.

use std::sync::Arc;

use crate::error::Result;
use crate::plan::{Buffer, Span, Wire};
use crate::reduce::{self, Kernel, Source, Streaming, Workers};
use crate::types::{DataType, ReduceOp};

/// The types of an operation's elements, and how they are combined.
#[derive(Debug)]
pub(crate) struct Elements {
    pub(crate) dtype: DataType,
    kernel: Option<Kernel>,
    /// The same operator on the type of scratch memory.
    partial_kernel: Option<Kernel>,
    contributors: usize,
    /// Threads that share large passes, if there are any.
    pub(super) workers: Option<Arc<Workers>>,
}

/// The conversion of a message's elements on their way into a buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Convert {
    Keep,
    /// From the element type to the accumulation type.
    Widen,
    /// From the accumulation type to the element type: the one rounding of a finished result.
    Narrow,
}

impl Elements {
    /// Elements of `dtype` that `op` combines, those of `contributors` ranks in each result.
    ///
    /// # Errors
    /// When the operator has no meaning for the type.
    pub(crate) fn new(
        dtype: DataType,
        op: Option<ReduceOp>,
        contributors: usize,
        workers: Option<Arc<Workers>>,
    ) -> Result<Self> {
        let kernel = op.map(|op| Kernel::new(op, dtype)).transpose()?;
        Ok(Self {
            dtype,
            partial_kernel: kernel.map(Kernel::of_partials),
            kernel,
            contributors,
            workers,
        })
    }

    /// How many ranks contribute to each result.
    pub(super) fn contributors(&self) -> usize {
        self.contributors
    }

    /// The element type of scratch memory: in reductions the accumulation type.
    #[inline]
    pub(crate) fn partial(&self) -> DataType {
        self.kernel.as_ref().map_or(self.dtype, Kernel::accumulator)
    }

    /// Whether the buffer's elements are in an accumulation type that differs from the element type.
    #[inline]
    pub(super) fn is_wide(&self, buffer: Buffer) -> bool {
        matches!(buffer, Buffer::Scratch) && self.partial() != self.dtype
    }

    #[inline]
    pub(super) fn size_in(&self, buffer: Buffer) -> usize {
        match buffer {
            Buffer::Scratch => self.partial().size(),
            Buffer::Input | Buffer::Output | Buffer::Window { .. } => self.dtype.size(),
        }
    }

    #[inline]
    pub(super) fn wire_type(&self, wire: Wire) -> DataType {
        match wire {
            Wire::Element => self.dtype,
            Wire::Partial => self.partial(),
        }
    }

    /// The conversion of elements that come by `wire`, on their way to `dst`.
    #[inline]
    pub(super) fn conversion(&self, dst: Span, wire: Wire) -> Convert {
        match (self.is_wide(dst.buffer), wire) {
            (true, Wire::Element) => Convert::Widen,
            (false, Wire::Partial) if self.partial() != self.dtype => Convert::Narrow,
            _ => Convert::Keep,
        }
    }

    pub(crate) fn reducer(&self) -> &Kernel {
        self.kernel
            .as_ref()
            .expect("a plan that reduces has an operator")
    }

    /// The kernel that finishes a result in `buffer`. A result that stays in scratch memory is divided but not rounded yet.
    pub(super) fn finisher(&self, buffer: Buffer) -> &Kernel {
        let kernel = if self.is_wide(buffer) {
            &self.partial_kernel
        } else {
            &self.kernel
        };
        kernel
            .as_ref()
            .expect("a plan that reduces has an operator")
    }

    /// Takes `run`, which has come, into `target`.
    #[inline]
    pub(super) fn absorb(
        &self,
        target: &mut [u8],
        run: &[u8],
        fold: bool,
        convert: Convert,
        streaming: Streaming,
    ) {
        if let Some(workers) = &self.workers {
            let both = [Source::Destination, Source::Partial(run)];
            match (fold, convert) {
                (true, Convert::Keep) => {
                    return workers.fold_all(self.reducer(), target, &both, Streaming::No);
                }
                (false, Convert::Keep) => return workers.copy(target, run, streaming),
                _ => {}
            }
        }
        match (fold, convert) {
            (true, Convert::Widen) => self.reducer().fold_element(target, run),
            // A fold that narrows would round more than once; no plan asks for one.
            (true, Convert::Keep | Convert::Narrow) => self.reducer().fold(target, run),
            (false, Convert::Widen) => self.reducer().widen(target, run),
            (false, Convert::Narrow) => self.reducer().narrow(target, run),
            (false, Convert::Keep) => reduce::copy_hinted(target, run, streaming),
        }
    }

    /// `target` becomes the finished result of one source for each contributor, in rank order.
    pub(super) fn reduce_all(
        &self,
        target: &mut [u8],
        sources: &[Source<'_>],
        streaming: Streaming,
    ) {
        let kernel = self.reducer();
        match &self.workers {
            Some(workers) => workers.reduce(kernel, target, sources, self.contributors, streaming),
            None => kernel.reduce(target, sources, self.contributors, streaming),
        }
    }

    /// `target` becomes `run`, without a conversion.
    pub(super) fn copy(&self, target: &mut [u8], run: &[u8], streaming: Streaming) {
        match &self.workers {
            Some(workers) => workers.copy(target, run, streaming),
            None => reduce::copy_hinted(target, run, streaming),
        }
    }
}
