//! Runs a plan over links.
//!
//! The rule of `plan`: a step may overlap earlier unfinished ones when they share no link direction and no bytes.
//! [`Prepared`] works out once, for a whole plan, which of the [`WINDOW`] steps before each one it must wait for;
//! [`Execution`] then moves whatever may move, without ever blocking. Operations of one group share its links:
//! a later operation may use a link direction once every earlier one is done with it, so that messages arrive in
//! the order in which the receiver's own plans expect them.

use std::sync::Arc;

use crate::buffer::{Memory, Scratch};
use crate::error::Result;
use crate::plan::{Buffer, Plan, Span, Step, Wire};
use crate::reduce::{self, Kernel};
use crate::transport::endpoint::Lane;
use crate::types::{DataType, Rank};

use super::links::{LinkTable, OpenLink};
use super::wire::{Fingerprint, HEADER};

/// Steps that may be unfinished at once.
pub(crate) const WINDOW: usize = 16;

/// Payloads up to this length travel with their header in one write.
const TOGETHER: usize = 216;

/// Which way a step uses its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    Send,
    Receive,
}

/// A plan with what the executor needs to know of it, worked out once and cached.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) plan: Plan,
    pub(crate) algorithm: u8,
    /// Bit k of entry i: step i waits for step i - 1 - k.
    waits: Vec<u16>,
    /// The last step on each link direction, sorted.
    last_use: Vec<((Rank, Direction), usize)>,
}

impl Prepared {
    pub(crate) fn new(plan: Plan, algorithm: u8) -> Self {
        let steps = &plan.steps;
        let waits = (0..steps.len())
            .map(|i| {
                (0..WINDOW.min(i))
                    .filter(|k| steps[i].must_follow(&steps[i - 1 - k]))
                    .fold(0, |mask, k| mask | (1 << k))
            })
            .collect();
        let mut last_use = std::collections::BTreeMap::new();
        for (i, step) in steps.iter().enumerate() {
            if let Some(direction) = link_direction(step) {
                last_use.insert(direction, i);
            }
        }
        Self {
            plan,
            algorithm,
            waits,
            last_use: last_use.into_iter().collect(),
        }
    }
}

/// The link direction a step uses.
fn link_direction(step: &Step) -> Option<(Rank, Direction)> {
    match *step {
        Step::Send { to, .. } => Some((to, Direction::Send)),
        Step::Recv { from, .. } | Step::Fold { from, .. } => Some((from, Direction::Receive)),
        Step::Copy { .. } | Step::Reduce { .. } | Step::Finish { .. } => None,
    }
}

/// How far a step in the window has come.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    done: bool,
    /// Bytes of header and payload sent, or of payload received.
    bytes: usize,
    /// The header of the message being received has been read and compared.
    header_read: bool,
}

/// What a step does next, for reports and for deciding what to wake for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) peer: Rank,
    pub(crate) direction: Direction,
    pub(crate) bytes: usize,
    pub(crate) of: usize,
}

/// One plan under way.
pub(crate) struct Execution {
    prepared: Arc<Prepared>,
    input: Memory,
    output: Memory,
    scratch: Memory,
    /// Owns what `scratch` views.
    pub(crate) scratch_owner: Option<Scratch>,
    /// What the input is multiplied with beforehand.
    pub(crate) factor: Option<Factor>,
    kernel: Option<Kernel>,
    /// The same operator on the type of scratch memory.
    partial_kernel: Option<Kernel>,
    dtype: DataType,
    /// The type of scratch memory: wider than `dtype` in reductions of 16-bit and 8-bit floats only.
    partial: DataType,
    fingerprint: Fingerprint,
    rank: Rank,
    world: usize,
    /// The first unfinished step.
    base: usize,
    window: [Progress; WINDOW],
}

/// A multiplication of the input, done when the execution begins.
pub(crate) struct Factor {
    /// The caller's input.
    pub(crate) source: Memory,
    pub(crate) factor: f64,
    pub(crate) applied: bool,
    /// Owns what the execution's input views.
    pub(crate) _scratch: Scratch,
}

/// What an execution works on.
pub(crate) struct Operands {
    pub(crate) input: Memory,
    pub(crate) output: Memory,
    pub(crate) dtype: DataType,
    pub(crate) kernel: Option<Kernel>,
    pub(crate) partial_kernel: Option<Kernel>,
}

impl Operands {
    /// The element type of scratch memory.
    pub(crate) fn partial(&self) -> DataType {
        if self.kernel.is_some() {
            self.dtype.accumulator()
        } else {
            self.dtype
        }
    }
}

impl Execution {
    pub(crate) fn new(
        prepared: Arc<Prepared>,
        operands: Operands,
        scratch_owner: Option<Scratch>,
        fingerprint: Fingerprint,
        (rank, world): (Rank, usize),
    ) -> Self {
        let partial = operands.partial();
        let bytes = prepared.plan.scratch * partial.size();
        let scratch = match &scratch_owner {
            Some(owner) => owner.view(bytes),
            None => Memory::empty(),
        };
        Self {
            prepared,
            input: operands.input,
            output: operands.output,
            scratch,
            scratch_owner,
            factor: None,
            kernel: operands.kernel,
            partial_kernel: operands.partial_kernel,
            dtype: operands.dtype,
            partial,
            fingerprint,
            rank,
            world,
            base: 0,
            window: [Progress::default(); WINDOW],
        }
    }

    /// The peers this operation exchanges messages with; one may be named twice.
    pub(crate) fn peers(&self) -> impl Iterator<Item = Rank> + '_ {
        self.prepared.last_use.iter().map(|((peer, _), _)| *peer)
    }

    /// Whether the operation writes bytes that `other` touches, or the other way round.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.output.overlaps(&other.output)
            || self.output.overlaps(other.source())
            || self.source().overlaps(&other.output)
    }

    /// The caller's input.
    fn source(&self) -> &Memory {
        self.factor
            .as_ref()
            .map_or(&self.input, |factor| &factor.source)
    }

    /// Multiplies the input, once.
    fn apply_factor(&mut self) {
        let Some(factor) = self.factor.as_mut().filter(|factor| !factor.applied) else {
            return;
        };
        let (mut done, bytes) = (0, factor.source.len());
        while done < bytes {
            let run = factor.source.read(done, bytes - done);
            let target = self.input.write(done, run.len());
            reduce::scale(self.dtype, target, run, factor.factor);
            done += run.len();
        }
        factor.applied = true;
    }

    pub(crate) fn is_done(&self) -> bool {
        self.base == self.prepared.plan.steps.len()
    }

    /// Whether this operation will use the link direction no more.
    pub(crate) fn has_left(&self, direction: (Rank, Direction)) -> bool {
        let uses = &self.prepared.last_use;
        match uses.binary_search_by_key(&direction, |(key, _)| *key) {
            Ok(found) => self.is_step_done(uses[found].1),
            Err(_) => true,
        }
    }

    /// What every message of the operation begins with, but for the message's own length.
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    fn is_step_done(&self, step: usize) -> bool {
        step < self.base || (step < self.base + WINDOW && self.window[step % WINDOW].done)
    }

    /// Moves every step that may move. Returns whether anything did. `free` says whether all operations before this
    /// one are done with a link direction.
    pub(crate) fn advance(
        &mut self,
        links: &mut LinkTable,
        free: &dyn Fn((Rank, Direction)) -> bool,
    ) -> Result<bool> {
        self.apply_factor();
        let mut moved = false;
        let mut index = self.base;
        while index < (self.base + WINDOW).min(self.prepared.plan.steps.len()) {
            if !self.is_step_done(index) && self.may_start(index, free) {
                moved |= self.move_step(index, links)?;
            }
            index += 1;
            while self.base < self.prepared.plan.steps.len() && self.window[self.base % WINDOW].done
            {
                self.window[self.base % WINDOW] = Progress::default();
                self.base += 1;
            }
        }
        Ok(moved)
    }

    fn may_start(&self, index: usize, free: &dyn Fn((Rank, Direction)) -> bool) -> bool {
        let mut waits = self.prepared.waits[index];
        while waits != 0 {
            let k = waits.trailing_zeros() as usize;
            if !self.is_step_done(index - 1 - k) {
                return false;
            }
            waits &= waits - 1;
        }
        match link_direction(&self.prepared.plan.steps[index]) {
            Some(direction) => free(direction),
            None => true,
        }
    }

    /// The peers that steps are waiting for now.
    pub(crate) fn waiting(
        &self,
        free: &dyn Fn((Rank, Direction)) -> bool,
        mut visit: impl FnMut(Waiting),
    ) {
        let end = (self.base + WINDOW).min(self.prepared.plan.steps.len());
        for index in self.base..end {
            if self.is_step_done(index) || !self.may_start(index, free) {
                continue;
            }
            let step = &self.prepared.plan.steps[index];
            if let Some((peer, direction)) = link_direction(step) {
                let bytes = self.window[index % WINDOW].bytes;
                let of = self.message_bytes(step);
                let bytes = match direction {
                    Direction::Send => bytes.saturating_sub(HEADER),
                    Direction::Receive => bytes,
                };
                visit(Waiting {
                    peer,
                    direction,
                    bytes,
                    of,
                });
            }
        }
    }

    fn move_step(&mut self, index: usize, links: &mut LinkTable) -> Result<bool> {
        let step = self.prepared.plan.steps[index];
        let slot = index % WINDOW;
        match step {
            Step::Send { to, src } => {
                let Some(open) = links.open(Lane::Collective, to) else {
                    return Ok(false);
                };
                let before = self.window[slot].bytes;
                let progress = self.send(open, src, self.window[slot])?;
                self.window[slot] = progress;
                Ok(progress.bytes > before || progress.done)
            }
            Step::Recv { from, dst, wire } | Step::Fold { from, dst, wire } => {
                let Some(open) = links.open(Lane::Collective, from) else {
                    return Ok(false);
                };
                let before = self.window[slot];
                let fold = matches!(step, Step::Fold { .. });
                let progress = self.receive(open, from, (dst, wire, fold), before)?;
                self.window[slot] = progress;
                Ok(progress.bytes > before.bytes
                    || progress.header_read != before.header_read
                    || progress.done)
            }
            Step::Copy { src, dst } => {
                self.zip(src, dst, |this, dst, src, (wide_dst, wide_src)| {
                    match (wide_dst, wide_src) {
                        (true, false) => reduce::widen(this.dtype, dst, src),
                        (false, true) => reduce::narrow(this.dtype, dst, src),
                        _ => reduce::copy(dst, src),
                    }
                });
                self.window[slot].done = true;
                Ok(true)
            }
            Step::Reduce { src, dst } => {
                let kernel = self.kernel.expect("a plan that reduces has an operator");
                self.zip(src, dst, |_, dst, src, (wide_dst, wide_src)| {
                    if wide_dst == wide_src {
                        kernel.fold(dst, src);
                    } else {
                        kernel.fold_element(dst, src);
                    }
                });
                self.window[slot].done = true;
                Ok(true)
            }
            Step::Finish { src, dst } => {
                self.finish(src, dst);
                self.window[slot].done = true;
                Ok(true)
            }
        }
    }

    fn message_bytes(&self, step: &Step) -> usize {
        match *step {
            Step::Send { src, .. } => src.len * self.element_size(src.buffer),
            Step::Recv { dst, wire, .. } | Step::Fold { dst, wire, .. } => {
                dst.len * self.wire_type(wire).size()
            }
            _ => 0,
        }
    }

    fn send(&self, open: &mut OpenLink, src: Span, mut progress: Progress) -> Result<Progress> {
        let size = self.element_size(src.buffer);
        let (offset, length) = (src.offset * size, src.len * size);
        let memory = self.memory(src.buffer);
        while progress.bytes < HEADER {
            // The header and a short payload in one write: one message, one publication, one wake-up.
            let mut together = [0_u8; HEADER + TOGETHER];
            let print = Fingerprint {
                length: length as u64,
                ..self.fingerprint
            };
            together[..HEADER].copy_from_slice(&print.encode());
            let payload = memory.read(offset, length.min(TOGETHER));
            together[HEADER..HEADER + payload.len()].copy_from_slice(payload);
            match open
                .link
                .try_send(&together[progress.bytes..HEADER + payload.len()])?
            {
                0 => return Ok(progress),
                n => progress.bytes += n,
            }
        }
        while progress.bytes < HEADER + length {
            let sent = progress.bytes - HEADER;
            let payload = memory.read(offset + sent, length - sent);
            match open.link.try_send(payload)? {
                0 => return Ok(progress),
                n => progress.bytes += n,
            }
        }
        progress.done = true;
        Ok(progress)
    }

    fn receive(
        &self,
        open: &mut OpenLink,
        from: Rank,
        (dst, wire, fold): (Span, Wire, bool),
        mut progress: Progress,
    ) -> Result<Progress> {
        let incoming = self.wire_type(wire).size();
        let length = dst.len * incoming;
        if !progress.header_read {
            if !open.read_header()? {
                return Ok(progress);
            }
            let expected = Fingerprint {
                length: length as u64,
                ..self.fingerprint
            };
            compare(&expected, &open.header, self.rank, from)?;
            open.header_bytes = 0;
            progress.header_read = true;
        }
        let size = self.element_size(dst.buffer);
        let memory = self.memory(dst.buffer);
        let convert = match (self.is_wide(dst.buffer), wire) {
            (true, Wire::Element) => Convert::Widen,
            (false, Wire::Partial) if self.partial != self.dtype => Convert::Narrow,
            _ => Convert::Keep,
        };
        while progress.bytes < length {
            let elements = progress.bytes / incoming;
            let offset = (dst.offset + elements) * size;
            let target = memory.write(offset, (dst.len - elements) * size);
            let received = if fold || convert != Convert::Keep {
                let max = target.len() / size * incoming;
                let mut at = 0;
                open.link.try_fold(max, incoming, &mut |run| {
                    let target = &mut target[at..at + run.len() / incoming * size];
                    at += target.len();
                    self.absorb(target, run, fold, convert);
                })?
            } else {
                // A plain receive may stop inside an element.
                let within = progress.bytes % incoming;
                open.link.try_recv(&mut target[within..])?
            };
            if received == 0 {
                return Ok(progress);
            }
            progress.bytes += received;
        }
        progress.done = true;
        Ok(progress)
    }

    fn absorb(&self, target: &mut [u8], run: &[u8], fold: bool, convert: Convert) {
        match (fold, convert) {
            (true, Convert::Widen) => self.reducer().fold_element(target, run),
            // A fold that narrows would round more than once; no plan asks for one.
            (true, Convert::Keep | Convert::Narrow) => self.reducer().fold(target, run),
            (false, Convert::Widen) => reduce::widen(self.dtype, target, run),
            (false, Convert::Narrow) => reduce::narrow(self.dtype, target, run),
            (false, Convert::Keep) => reduce::copy(target, run),
        }
    }

    fn reducer(&self) -> &Kernel {
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

    fn memory(&self, buffer: Buffer) -> &Memory {
        match buffer {
            Buffer::Input => &self.input,
            Buffer::Output => &self.output,
            Buffer::Scratch => &self.scratch,
        }
    }

    /// Whether the buffer's elements are in an accumulation type that differs from the element type.
    fn is_wide(&self, buffer: Buffer) -> bool {
        buffer == Buffer::Scratch && self.partial != self.dtype
    }

    fn element_size(&self, buffer: Buffer) -> usize {
        match buffer {
            Buffer::Scratch => self.partial.size(),
            Buffer::Input | Buffer::Output => self.dtype.size(),
        }
    }

    fn wire_type(&self, wire: Wire) -> DataType {
        match wire {
            Wire::Element => self.dtype,
            Wire::Partial => self.partial,
        }
    }
}

/// What becomes of the elements of a message on their way into a buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Convert {
    Keep,
    /// From the element type to the accumulation type.
    Widen,
    /// From the accumulation type to the element type: the one rounding of a finished result.
    Narrow,
}

/// Compares the header that arrived with the one that must come next.
fn compare(expected: &Fingerprint, header: &[u8; HEADER], rank: Rank, peer: Rank) -> Result<()> {
    match Fingerprint::decode(header) {
        Some(theirs) if theirs == *expected => Ok(()),
        Some(theirs) => Err(expected.mismatch(&theirs, rank, peer)),
        None => Err(crate::error::Error::new(
            crate::error::Code::Untrusted,
            format!("rank {peer} sent bytes that do not begin a message; its stream is corrupt"),
        )
        .with_peer(peer)),
    }
}
