//! A plan of a smaller world as a part of a larger one, and the scratch memory of such parts.

use crate::builder::Steps;
use crate::types::Rank;
use crate::{Buffer, Plan, Span, Step, Wire};

/// Where an embedded plan takes place.
pub(super) struct Embedding<'a> {
    /// The larger world's rank for each of the plan's.
    pub(super) members: &'a [Rank],
    pub(super) input: Span,
    pub(super) output: Span,
    /// At least as long as the plan needs.
    pub(super) scratch: Span,
    /// Sums are handed on to a later phase, and finished there.
    pub(super) is_partial: bool,
}

/// The parts are plans of messages.
const NO_WINDOWS: &str = "a part of a hierarchy uses no windows";

/// Writes `plan`, which was made for a smaller world, into `steps`: its ranks become [`Embedding::members`], its buffers
/// become spans of the larger plan's. Any plan of messages can be a part. [`check`](crate::check) proves the result as it
/// proves any other plan.
///
/// Elements of the plan's input travel in the type of the larger plan's buffer: partial sums, where that is `Scratch`.
/// Plans that widen receive what was input in `Scratch` alone, and others have an input of the type of the output.
pub(super) fn embed(steps: &mut Steps, plan: &Plan, at: &Embedding) {
    debug_assert!(plan.scratch <= at.scratch.len);
    let span = |span: Span| {
        let whole = match span.buffer {
            Buffer::Input => at.input,
            Buffer::Output => at.output,
            Buffer::Scratch => at.scratch,
            Buffer::Window { .. } => unreachable!("{NO_WINDOWS}"),
        };
        Span::new(whole.buffer, whole.offset + span.offset, span.len)
    };
    let takes_partial = at.input.buffer == Buffer::Scratch;
    let carries = |wire: Wire, dst: &Span| match takes_partial && dst.buffer == Buffer::Scratch {
        true => Wire::Partial,
        false => wire,
    };
    for step in &plan.steps {
        match *step {
            Step::Send { to, src } => steps.send(at.members[to], span(src)),
            Step::Recv { from, dst, wire } => {
                steps.recv(at.members[from], span(dst), carries(wire, &dst));
            }
            Step::Fold { from, dst, wire } => {
                steps.fold(at.members[from], span(dst), carries(wire, &dst));
            }
            Step::Copy { src, dst } => steps.copy(span(src), span(dst)),
            Step::Reduce { src, dst } => steps.reduce(span(src), span(dst)),
            Step::Finish { src, dst } if at.is_partial => steps.copy(span(src), span(dst)),
            Step::Finish { src, dst } => steps.finish(span(src), span(dst)),
            Step::ReduceAll { .. } | Step::Signal { .. } | Step::Wait { .. } => {
                unreachable!("{NO_WINDOWS}")
            }
        }
    }
}

/// Scratch memory of one phase, for the pieces with even numbers and for those with odd ones. It is taken when first
/// needed; no piece needs more than the first.
#[derive(Default)]
pub(super) struct Alternating([Option<Span>; 2]);

impl Alternating {
    /// `len` elements for `piece`.
    pub(super) fn span(&mut self, steps: &mut Steps, piece: usize, len: usize) -> Span {
        let whole = self.0[piece % 2].get_or_insert_with(|| steps.scratch(len));
        whole.part(0..len)
    }
}
