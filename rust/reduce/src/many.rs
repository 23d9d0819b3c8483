//! Several contributions combined in one pass over memory.
//!
//! The pass goes block by block. A block of the accumulator stays in the first cache while all
//! contributions are folded into it, in their order, and is finished, rounded and stored from
//! there. Each byte of memory is read once and written once, and the result has the bits that the
//! same folds one after the other give.

use std::cell::RefCell;
use std::ops::Range;

use super::simd::{LINE, Streamer};
use super::{DataType, Kernel, Streaming, assert_lengths};

/// Bytes of accumulator that are worked on at a time: little enough that they, what is widened and
/// what comes in fit in the first cache, enough to amortise the calls.
const BLOCK: usize = 4096;

/// A contribution to a result: bytes of whole elements, as many as the result has.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// In the element type, as a rank passes it.
    Element(&'a [u8]),
    /// In the accumulation type: several contributions folded, but not finished.
    Partial(&'a [u8]),
    /// The earlier content of the destination, in the destination's type. Any number of the sources may
    /// be this, at any place.
    Destination,
}

impl Kernel {
    /// `dst = finish(((s0 op s1) op s2) ...)`, with `dst` in the element type: the result of an
    /// operation among `world` ranks, from all its contributions in rank order. Small floats are
    /// rounded once, at the end.
    ///
    /// With [`Streaming::Yes`] the result bypasses the caches, unless the destination is a source;
    /// it is visible to other processors before anything this thread stores later.
    ///
    /// # Panics
    /// If there is no source, or the lengths are not those of equally many whole elements.
    pub fn reduce(
        &self,
        dst: &mut [u8],
        sources: &[Source<'_>],
        world: usize,
        streaming: Streaming,
    ) {
        self.pass_to_result(world).run_all(dst, sources, streaming);
    }

    /// `dst = ((s0 op s1) op s2) ...`, with `dst` in the accumulation type and not finished: to be
    /// folded further. Otherwise as [`Kernel::reduce`].
    pub fn fold_all(&self, dst: &mut [u8], sources: &[Source<'_>], streaming: Streaming) {
        self.pass_to_partial().run_all(dst, sources, streaming);
    }

    /// [`Kernel::reduce`], for threads that each make a part of the result.
    #[inline]
    pub fn pass_to_result(&self, world: usize) -> Pass<'_> {
        Pass {
            kernel: self,
            into: self.element(),
            world: Some(world),
        }
    }

    /// [`Kernel::fold_all`], likewise.
    #[inline]
    pub fn pass_to_partial(&self) -> Pass<'_> {
        Pass {
            kernel: self,
            into: self.accumulator(),
            world: None,
        }
    }
}

/// How a result is made: in which type and, if it is finished, for how many ranks. Each thread [runs](Pass::run) it for
/// parts of its own.
#[derive(Debug)]
pub struct Pass<'a> {
    kernel: &'a Kernel,
    into: DataType,
    world: Option<usize>,
}

impl Pass<'_> {
    fn run_all(&self, dst: &mut [u8], sources: &[Source<'_>], streaming: Streaming) {
        self.check(dst, sources);
        self.run(dst, sources, 0, streaming);
    }

    /// Refuses what the whole result cannot be made from.
    ///
    /// # Panics
    /// If there is no source, or the lengths are not those of equally many whole elements.
    pub fn check(&self, dst: &[u8], sources: &[Source<'_>]) {
        assert!(!sources.is_empty(), "a result of no contributions");
        for source in sources {
            let (dtype, bytes) = match source {
                Source::Element(bytes) => (self.kernel.element(), bytes.len()),
                Source::Partial(bytes) => (self.kernel.accumulator(), bytes.len()),
                Source::Destination => (self.into, dst.len()),
            };
            assert_lengths(self.into, dst.len(), dtype, bytes);
        }
    }

    /// Bytes of an element of the result.
    #[inline]
    pub fn result_size(&self) -> usize {
        self.into.size()
    }

    /// Makes the part of the result that belongs in `dst` and begins with element `first`, from
    /// sources that [are right](Pass::check) for the whole.
    ///
    /// # Panics
    /// If a source is shorter.
    pub fn run(&self, dst: &mut [u8], sources: &[Source<'_>], first: usize, streaming: Streaming) {
        let is_held = |source: &Source<'_>| matches!(source, Source::Destination);
        let streamer = (streaming == Streaming::Yes && !sources.iter().any(is_held))
            .then(|| self.kernel.tier.streamer());
        // The accumulator can be the destination itself if its type is the same, nothing reads what
        // was there after the first fold, and its lines may come into the cache.
        let at_place = self.into == self.kernel.accumulator()
            && streamer.is_none()
            && !sources[1..].iter().any(is_held);
        let size = self.into.size();
        let mut at = first;
        BUFFERS.with_borrow_mut(|buffers| {
            for dst in seams(dst, BLOCK / self.kernel.accumulator().size() * size, size) {
                let elements = at..at + dst.len() / size;
                at = elements.end;
                let block = Block {
                    kernel: self.kernel,
                    sources,
                    elements,
                };
                if at_place {
                    block.fold_at_place(dst, &mut buffers.widened);
                    self.end(dst);
                } else {
                    self.through_buffers(&block, dst, buffers, streamer.as_ref());
                }
            }
        });
    }

    fn through_buffers(
        &self,
        block: &Block<'_>,
        dst: &mut [u8],
        buffers: &mut Buffers,
        streamer: Option<&Streamer>,
    ) {
        let wide = dst.len() / self.into.size() * self.kernel.accumulator().size();
        let acc = &mut buffers.acc.0[..wide];
        let held = if self.into == self.kernel.accumulator() {
            Source::Partial(dst)
        } else {
            Source::Element(dst)
        };
        block.fold(acc, held, &mut buffers.widened);
        self.end(acc);
        let narrows = self.into != self.kernel.accumulator();
        let narrow = |dst: &mut [u8], acc: &[u8]| self.kernel.narrow(dst, acc);
        match (narrows, streamer) {
            (false, None) => dst.copy_from_slice(acc),
            (false, Some(streamer)) => streamer.copy(dst, acc),
            (true, None) => narrow(dst, acc),
            (true, Some(streamer)) => {
                let rounded = &mut buffers.rounded.0[..dst.len()];
                narrow(rounded, acc);
                streamer.copy(dst, rounded);
            }
        }
    }

    /// The last step before rounding.
    fn end(&self, acc: &mut [u8]) {
        if let Some(world) = self.world {
            self.kernel.end(acc, world);
        }
    }
}

/// Some consecutive elements of all sources.
struct Block<'a> {
    kernel: &'a Kernel,
    sources: &'a [Source<'a>],
    elements: Range<usize>,
}

impl<'a> Block<'a> {
    /// `acc = s0 op s1 ...` where only the first source may be the destination, which `acc` is.
    fn fold_at_place(&self, acc: &mut [u8], widened: &mut Buffer) {
        match self.sources {
            [Source::Destination, others @ ..] => {
                self.fold_others(acc, others, Source::Destination, widened)
            }
            _ => self.fold(acc, Source::Destination, widened),
        }
    }

    /// `acc = s0 op s1 ...`, with `held` for a source that is the destination.
    fn fold(&self, acc: &mut [u8], held: Source<'_>, widened: &mut Buffer) {
        let kernel = self.kernel;
        let is_narrow = |source| matches!(self.part(source, held), Source::Element(_));
        if self.sources.iter().copied().all(is_narrow) {
            return self.fold_narrow(acc, held, widened);
        }
        match (self.part(self.sources[0], held), &self.sources[1..]) {
            (Source::Partial(a), [b, others @ ..]) => {
                let b = self.widen(self.part(*b, held), widened);
                (kernel.loops.fold_into)(kernel.tier, acc, a, b);
                self.fold_others(acc, others, held, widened);
            }
            (Source::Partial(only), []) => acc.copy_from_slice(only),
            (Source::Element(first), others) => {
                kernel.widen(acc, first);
                self.fold_others(acc, others, held, widened);
            }
            (Source::Destination, _) => unreachable!("the accumulator does not alias a source"),
        }
    }

    /// The same from elements of a narrower type alone, as many at a time as are kept at hand.
    fn fold_narrow(&self, acc: &mut [u8], held: Source<'_>, widened: &mut Buffer) {
        const TOGETHER: usize = 16;
        let (kernel, dtype) = (self.kernel, self.kernel.element());
        for (group, sources) in self.sources.chunks(TOGETHER).enumerate() {
            let mut parts = [&[][..]; TOGETHER];
            for (part, source) in parts.iter_mut().zip(sources) {
                if let Source::Element(bytes) = self.part(*source, held) {
                    *part = bytes;
                }
            }
            let parts = &parts[..sources.len()];
            let done = kernel.sum_halves(acc, group > 0, parts);
            let acc = &mut acc[done * kernel.accumulator().size()..];
            if acc.is_empty() {
                continue;
            }
            for (i, part) in parts.iter().enumerate() {
                let part = &part[done * dtype.size()..];
                if group == 0 && i == 0 {
                    kernel.widen(acc, part);
                } else {
                    let src = self.widen(Source::Element(part), widened);
                    (kernel.loops.fold)(kernel.tier, acc, src);
                }
            }
        }
    }

    fn fold_others(
        &self,
        acc: &mut [u8],
        others: &[Source<'_>],
        held: Source<'_>,
        widened: &mut Buffer,
    ) {
        let (loops, tier) = (&self.kernel.loops, self.kernel.tier);
        let mut parts = others
            .iter()
            .map(|source| self.part(*source, held))
            .peekable();
        while let Some(part) = parts.next() {
            match (part, parts.peek()) {
                (Source::Partial(a), Some(&Source::Partial(b))) => {
                    (loops.fold_two)(tier, acc, a, b);
                    parts.next();
                }
                _ => (loops.fold)(tier, acc, self.widen(part, widened)),
            }
        }
    }

    /// The elements of this block. An element type that is its own accumulator comes as `Partial`.
    fn part<'b>(&self, source: Source<'b>, held: Source<'b>) -> Source<'b> {
        let of = |bytes: &'b [u8], dtype: DataType| {
            &bytes[self.elements.start * dtype.size()..self.elements.end * dtype.size()]
        };
        match source {
            Source::Element(bytes) if self.kernel.converts() => {
                Source::Element(of(bytes, self.kernel.element()))
            }
            Source::Element(bytes) | Source::Partial(bytes) => {
                Source::Partial(of(bytes, self.kernel.accumulator()))
            }
            Source::Destination => held,
        }
    }

    /// In the accumulation type.
    fn widen<'b>(&self, part: Source<'b>, widened: &'b mut Buffer) -> &'b [u8] {
        match part {
            Source::Partial(bytes) => bytes,
            Source::Element(bytes) => {
                let kernel = self.kernel;
                let elements = bytes.len() / kernel.element().size();
                let wide = &mut widened.0[..elements * kernel.accumulator().size()];
                kernel.widen(wide, bytes);
                wide
            }
            Source::Destination => unreachable!("the accumulator does not alias a source"),
        }
    }
}

/// Divides `dst` into blocks of `block` bytes. The seams lie where cache lines begin if they can,
/// that is, if elements of `size` bytes begin there.
fn seams(dst: &mut [u8], block: usize, size: usize) -> impl Iterator<Item = &mut [u8]> {
    let skew = dst.as_ptr().addr() % LINE;
    let first = if skew.is_multiple_of(size) {
        block - skew
    } else {
        block
    };
    let (first, rest) = dst.split_at_mut(first.min(dst.len()));
    std::iter::once(first).chain(rest.chunks_mut(block))
}

#[repr(align(64))]
struct Buffer([u8; BLOCK]);

/// The buffers of a block beside its sources and its destination.
struct Buffers {
    acc: Buffer,
    widened: Buffer,
    rounded: Buffer,
}

thread_local! {
    /// Kept, since clearing new ones would take as long as a small result.
    static BUFFERS: RefCell<Box<Buffers>> = RefCell::new(Box::new(Buffers {
        acc: Buffer([0; BLOCK]),
        widened: Buffer([0; BLOCK]),
        rounded: Buffer([0; BLOCK]),
    }));
}
