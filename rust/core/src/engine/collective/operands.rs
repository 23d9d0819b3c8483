//! What a plan works on, and what is done to elements: copied, converted, reduced, finished.

use std::sync::Arc;

use crate::buffer::Memory;
use crate::engine::collective::bounce::BounceBuffer;
use crate::engine::collective::header::{Fingerprint, HEADER};
use crate::plan::{Buffer, Span, Step, Wire};
use crate::reduce::{self, Kernel, Source, Streaming, Workers};
use crate::types::{Collective, DataType, Rank};

/// What a plan works on.
#[derive(Debug)]
pub(crate) struct Operands {
    pub(crate) collective: Collective,
    pub(crate) input: Memory,
    pub(crate) output: Memory,
    pub(crate) scratch: Memory,
    pub(crate) dtype: DataType,
    pub(crate) kernel: Option<Kernel>,
    /// The same operator on the type of scratch memory.
    pub(crate) partial_kernel: Option<Kernel>,
    pub(crate) print: EncodedHeader,
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    /// Threads that share large passes, if there are any.
    pub(crate) workers: Option<Arc<Workers>>,
    /// Where what goes to several peers is read by all of them.
    pub(crate) bounce: Option<BounceBuffer>,
    /// How to store results that are not read again.
    pub(crate) streaming: Streaming,
}

/// A fingerprint, and the header of a message without payload that has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EncodedHeader {
    fingerprint: Fingerprint,
    header: [u8; HEADER],
}

/// Plans with windows are walked in order by the run in shared memory.
pub(super) const NO_WINDOWS: &str = "a plan of messages uses no windows";

/// What becomes of the elements of a message on their way into a buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Convert {
    Keep,
    /// From the element type to the accumulation type.
    Widen,
    /// From the accumulation type to the element type: the one rounding of a finished result.
    Narrow,
}

impl EncodedHeader {
    pub(crate) fn new(fingerprint: Fingerprint) -> Self {
        Self {
            fingerprint,
            header: fingerprint.encode(),
        }
    }
}

impl Operands {
    /// What every message of the operation begins with, but for the message's own length.
    pub(crate) fn fingerprint(&self) -> &Fingerprint {
        &self.print.fingerprint
    }

    /// The operation has this number.
    #[inline]
    pub(crate) fn number(&mut self, sequence: u64) {
        self.print.fingerprint.sequence = sequence;
        Fingerprint::write_sequence(&mut self.print.header, sequence);
    }

    /// The element type of scratch memory: wider than the element type in reductions of 16-bit and 8-bit floats only.
    #[inline]
    pub(crate) fn partial(&self) -> DataType {
        if self.kernel.is_some() {
            self.dtype.accumulator()
        } else {
            self.dtype
        }
    }

    /// What a message of `length` bytes of payload begins with.
    #[inline]
    pub(crate) fn header(&self, length: usize) -> [u8; HEADER] {
        let mut header = self.print.header;
        Fingerprint::write_length(&mut header, length);
        header
    }

    /// A step that has to do with no other rank.
    pub(super) fn work(&self, step: &Step) {
        match *step {
            Step::Copy { src, dst } => {
                self.zip(src, dst, |this, dst, src, (wide_dst, wide_src)| {
                    match (wide_dst, wide_src) {
                        (true, false) => reduce::widen(this.dtype, dst, src),
                        (false, true) => reduce::narrow(this.dtype, dst, src),
                        _ => reduce::copy(dst, src),
                    }
                });
            }
            Step::Reduce { src, dst } => {
                let kernel = self.reducer();
                self.zip(src, dst, |_, dst, src, (wide_dst, wide_src)| {
                    if wide_dst == wide_src {
                        kernel.fold(dst, src);
                    } else {
                        kernel.fold_element(dst, src);
                    }
                });
            }
            Step::Finish { src, dst } => {
                self.finish(src, dst);
            }
            _ => unreachable!("{step:?} has to do with other ranks"),
        }
    }

    /// What becomes of elements that come by `wire` on their way to `dst`.
    #[inline]
    pub(super) fn conversion(&self, dst: Span, wire: Wire) -> Convert {
        match (self.is_wide(dst.buffer), wire) {
            (true, Wire::Element) => Convert::Widen,
            (false, Wire::Partial) if self.partial() != self.dtype => Convert::Narrow,
            _ => Convert::Keep,
        }
    }

    #[inline]
    pub(super) fn absorb(
        &self,
        target: &mut [u8],
        run: &[u8],
        (fold, convert): (bool, Convert),
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
            (false, Convert::Widen) => reduce::widen(self.dtype, target, run),
            (false, Convert::Narrow) => reduce::narrow(self.dtype, target, run),
            (false, Convert::Keep) => reduce::copy_hinted(target, run, streaming),
        }
    }

    pub(crate) fn reducer(&self) -> &Kernel {
        self.kernel
            .as_ref()
            .expect("a plan that reduces has an operator")
    }

    fn finish(&self, src: Span, dst: Span) {
        // A result that stays in scratch memory is divided but not rounded yet.
        let kernel = if self.is_wide(dst.buffer) {
            self.partial_kernel
        } else {
            self.kernel
        };
        let kernel = kernel.expect("a plan that reduces has an operator");
        if src != dst {
            self.zip(src, dst, |this, dst, src, _| {
                kernel.finish(dst, src, this.world)
            });
            return;
        }
        let size = self.element_size(dst.buffer);
        let memory = self.memory(dst.buffer);
        let (mut at, end) = (dst.offset * size, (dst.offset + dst.len) * size);
        while at < end {
            let run = memory.write(at, end - at);
            kernel.finish_in_place(run, self.world);
            at += run.len();
        }
    }

    /// Calls `f` with the matching runs of both spans, and with whether each side is in the accumulation type.
    fn zip(&self, src: Span, dst: Span, mut f: impl FnMut(&Self, &mut [u8], &[u8], (bool, bool))) {
        let (from, to) = (self.memory(src.buffer), self.memory(dst.buffer));
        let (from_size, to_size) = (self.element_size(src.buffer), self.element_size(dst.buffer));
        let wide = (self.is_wide(dst.buffer), self.is_wide(src.buffer));
        let mut done = 0;
        while done < src.len {
            let left = src.len - done;
            let read = from.read((src.offset + done) * from_size, left * from_size);
            let written = to.write((dst.offset + done) * to_size, left * to_size);
            let elements = (read.len() / from_size).min(written.len() / to_size);
            f(
                self,
                &mut written[..elements * to_size],
                &read[..elements * from_size],
                wide,
            );
            done += elements;
        }
    }

    #[inline]
    pub(crate) fn memory(&self, buffer: Buffer) -> &Memory {
        match buffer {
            Buffer::Input => &self.input,
            Buffer::Output => &self.output,
            Buffer::Scratch => &self.scratch,
            Buffer::Window { .. } => unreachable!("{NO_WINDOWS}"),
        }
    }

    /// Whether the buffer's elements are in an accumulation type that differs from the element type.
    #[inline]
    fn is_wide(&self, buffer: Buffer) -> bool {
        matches!(buffer, Buffer::Scratch) && self.partial() != self.dtype
    }

    #[inline]
    pub(super) fn element_size(&self, buffer: Buffer) -> usize {
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
}
