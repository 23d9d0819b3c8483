//! The operands of a plan, and the steps that involve no other rank.

use crate::engine::collective::bounce::StagedSpans;
use crate::engine::collective::buffers::{Buffers, NO_WINDOWS};
use crate::engine::collective::elements::Elements;
use crate::engine::collective::header::{Fingerprint, HEADER};
use crate::engine::members::Members;
use crate::engine::traffic::TrafficClass;
use crate::plan::{Span, Step};
use crate::reduce::{self, Streaming};
use crate::types::{Collective, Rank};

/// The operands of a plan.
#[derive(Debug)]
pub(crate) struct Operands {
    pub(crate) collective: Collective,
    pub(crate) buffers: Buffers,
    pub(crate) elements: Elements,
    pub(crate) print: EncodedHeader,
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    /// The names of the ranks, for errors.
    pub(crate) members: Members,
    /// The memory in which several peers read the data that goes to all of them.
    pub(crate) bounce: Option<StagedSpans>,
    /// How to store results that are not read again.
    pub(crate) streaming: Streaming,
}

/// A fingerprint, and the header of a message without payload that has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EncodedHeader {
    fingerprint: Fingerprint,
    header: [u8; HEADER],
}

impl EncodedHeader {
    pub(crate) fn new(fingerprint: Fingerprint) -> Self {
        Self {
            fingerprint,
            header: fingerprint.encode(),
        }
    }

    /// The header of a message of `length` bytes of payload.
    #[inline]
    pub(super) fn of_length(&self, length: usize) -> [u8; HEADER] {
        let mut header = self.header;
        Fingerprint::write_length(&mut header, length);
        header
    }
}

impl Operands {
    /// Where the operation counts.
    pub(crate) fn traffic(&self) -> TrafficClass {
        TrafficClass::of(self.collective, self.buffers.longest())
    }

    /// The fingerprint of every message of the operation, but for the message's own length.
    pub(crate) fn fingerprint(&self) -> &Fingerprint {
        &self.print.fingerprint
    }

    /// The operation has this number.
    #[inline]
    pub(crate) fn number(&mut self, sequence: u64) {
        self.print.fingerprint.sequence = sequence;
        Fingerprint::write_sequence(&mut self.print.header, sequence);
    }

    /// The header of a message of `length` bytes of payload.
    #[inline]
    pub(crate) fn header(&self, length: usize) -> [u8; HEADER] {
        self.print.of_length(length)
    }

    /// Does a step that involves no other rank.
    pub(super) fn work(&mut self, step: &Step) {
        match *step {
            Step::Copy { src, dst } => {
                self.zip(src, dst, |elements, dst, src, (wide_dst, wide_src)| match (
                    wide_dst, wide_src,
                ) {
                    (true, false) => elements.reducer().widen(dst, src),
                    (false, true) => elements.reducer().narrow(dst, src),
                    _ => reduce::copy(dst, src),
                });
            }
            Step::Reduce { src, dst } => {
                self.zip(src, dst, |elements, dst, src, (wide_dst, wide_src)| {
                    let kernel = elements.reducer();
                    if wide_dst == wide_src {
                        kernel.fold(dst, src);
                    } else {
                        kernel.fold_element(dst, src);
                    }
                });
            }
            Step::Finish { src, dst } if src == dst => self.finish_in_place(dst),
            Step::Finish { src, dst } => {
                self.zip(src, dst, |elements, to, from, _| {
                    let kernel = elements.finisher(dst.buffer);
                    kernel.finish(to, from, elements.contributors());
                });
            }
            _ => unreachable!("{step:?} has to do with other ranks: {NO_WINDOWS}"),
        }
    }

    fn finish_in_place(&mut self, dst: Span) {
        let size = self.elements.size_in(dst.buffer);
        let kernel = self.elements.finisher(dst.buffer);
        let (mut at, end) = (dst.offset * size, (dst.offset + dst.len) * size);
        while at < end {
            let run = self.buffers.write(dst.buffer, at, end - at);
            kernel.finish_in_place(run, self.elements.contributors());
            at += run.len();
        }
    }

    /// Calls `f` with the matching runs of both spans, and with whether each side is in the accumulation type.
    fn zip(
        &mut self,
        src: Span,
        dst: Span,
        mut f: impl FnMut(&Elements, &mut [u8], &[u8], (bool, bool)),
    ) {
        let Self {
            buffers, elements, ..
        } = self;
        let (from_size, to_size) = (elements.size_in(src.buffer), elements.size_in(dst.buffer));
        let wide = (elements.is_wide(dst.buffer), elements.is_wide(src.buffer));
        let mut done = 0;
        while done < src.len {
            let left = src.len - done;
            let (read, written) = buffers.read_and_write(
                (src.buffer, (src.offset + done) * from_size),
                (dst.buffer, (dst.offset + done) * to_size),
                (left * from_size, left * to_size),
            );
            let count = (read.len() / from_size).min(written.len() / to_size);
            f(
                elements,
                &mut written[..count * to_size],
                &read[..count * from_size],
                wide,
            );
            done += count;
        }
    }
}
