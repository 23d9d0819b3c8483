//! Buffers that peers read, and write in an `all_reduce`, in place of windows.

use super::run::Run;
use crate::signals::{HALVES, Semaphore};
use crate::types::Rank;
use crate::windows::InPlace;
use crate::{Buffer, Plan, Shape, Span, Step};

/// Where a half would begin in a buffer.
type Begin = (Buffer, isize);

/// Of a rank's operation.
#[derive(Default)]
pub(super) struct Placed {
    found: Option<InPlace<Begin>>,
    /// By half, where peers find what has been published.
    published: [Vec<(Rank, Begin)>; HALVES],
    /// By half, where they leave results.
    results: [Option<Begin>; HALVES],
    /// The semaphores that it has awaited last are contributions.
    reads: bool,
}

impl Placed {
    pub(super) fn new(plan: &Plan, shape: &Shape, is_in_place: bool) -> Self {
        let find = || {
            InPlace::find(plan, shape.collective, |put, _| {
                let before = put.src.offset.cast_signed() - put.at.cast_signed();
                Some((put.src.buffer, before))
            })
        };
        Self {
            found: is_in_place.then(find),
            ..Self::default()
        }
    }

    /// Whether a step is not taken.
    pub(super) fn skips(&self, step: usize) -> bool {
        self.found.as_ref().is_some_and(|found| found.skips(step))
    }

    /// The rank has taken step `index`, in this half of the windows.
    pub(super) fn note(&mut self, index: usize, step: &Step, half: usize) {
        match *step {
            Step::Wait { what, .. } => match what {
                Semaphore::Empty => {
                    self.published[half].clear();
                    self.results[half] = None;
                }
                Semaphore::Contributions => self.reads = true,
                Semaphore::Results => self.reads = false,
            },
            Step::Signal {
                what: Semaphore::Contributions,
                to,
                ..
            } => {
                if let Some(found) = &self.found {
                    let located = |peer| Some((peer, found.located(index, peer)?));
                    self.published[half] = to.iter().filter_map(located).collect();
                    self.results[half] = found.results(index);
                }
            }
            _ => {}
        }
    }
}

impl<const WORDS: usize> Run<'_, WORDS> {
    /// The span of a buffer of `owner`'s that `rank` reads in place of one of its half.
    pub(super) fn in_place(
        &self,
        (owner, half): (Rank, usize),
        rank: Rank,
        (at, len): (usize, usize),
    ) -> Result<Option<Span>, String> {
        let placed = &self.ranks[owner].placed;
        let begin = match owner == rank {
            true => placed.results[half],
            false if !self.ranks[rank].placed.reads => None,
            false => {
                let mut found = placed.published[half].iter();
                found
                    .find(|(peer, _)| *peer == rank)
                    .map(|(_, begin)| *begin)
            }
        };
        let Some((buffer, before)) = begin else {
            return Ok(None);
        };
        if self.ranks[owner].operation != self.ranks[rank].operation {
            return Err(format!(
                "uses a buffer of rank {owner}, which is in another operation"
            ));
        }
        let offset = at.checked_add_signed(before);
        let offset = offset.ok_or("goes outside a buffer that is read in place")?;
        Ok(Some(Span::new(buffer, offset, len)))
    }

    /// Whether the buffers of `rank` are its own again.
    pub(super) fn check_buffers(&mut self, rank: Rank) -> Result<(), String> {
        let state = &mut self.ranks[rank];
        match state.buffers.take_back(rank, &state.clock) {
            Err(other) => Err(format!(
                "rank {rank} ends while rank {other} may still use its buffers"
            )),
            Ok(()) => Ok(()),
        }
    }
}
