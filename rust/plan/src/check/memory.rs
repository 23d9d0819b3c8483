//! The memory that plans work on, element by element.

use super::expression::{Id, UNINITIALISED};
use super::order::{Accesses, Clock};
use crate::signals::HALVES;
use crate::types::Rank;
use crate::{Buffer, Span};

/// One element of a half of a window.
#[derive(Clone, Default)]
struct Cell {
    /// The operation it was written in, and what it holds.
    value: Option<(usize, Id)>,
    accesses: Accesses,
}

/// The windows of all ranks.
pub(super) struct Windows {
    /// Elements of a half.
    half: usize,
    /// By rank and half; empty where the ranks have none.
    cells: Vec<[Vec<Cell>; HALVES]>,
}

impl Windows {
    pub(super) fn new(world: usize, half: usize) -> Self {
        let window = || [vec![Cell::default(); half], vec![Cell::default(); half]];
        let world = if half == 0 { 0 } else { world };
        Self {
            half,
            cells: (0..world).map(|_| window()).collect(),
        }
    }

    fn cells(
        &mut self,
        (owner, half): (Rank, usize),
        at: usize,
        len: usize,
    ) -> Result<&mut [Cell], String> {
        let cells = self.cells.get_mut(owner);
        let cells = cells.and_then(|window| window[half].get_mut(at..at + len));
        cells.ok_or_else(|| format!("goes outside its half of {} elements", self.half))
    }

    /// `rank` writes to a half of `owner` in `operation`.
    pub(super) fn write(
        &mut self,
        rank: Rank,
        (owner, half): (Rank, usize),
        at: usize,
        values: &[Id],
        (operation, clock): (usize, &Clock),
    ) -> Result<(), String> {
        let cells = self.cells((owner, half), at, values.len())?;
        for (index, (cell, value)) in cells.iter_mut().zip(values).enumerate() {
            cell.accesses.write(rank, clock).map_err(|other| {
                format!(
                    "writes element {} of half {half} of rank {owner}, which may still be in use by rank {other}",
                    at + index
                )
            })?;
            cell.value = Some((operation, *value));
        }
        Ok(())
    }

    /// `rank` reads from a half of `owner` what was written in the same operation.
    pub(super) fn read(
        &mut self,
        rank: Rank,
        (owner, half): (Rank, usize),
        (at, len): (usize, usize),
        (operation, clock): (usize, &Clock),
    ) -> Result<Vec<Id>, String> {
        let cells = self.cells((owner, half), at, len)?;
        let read = |(index, cell): (usize, &mut Cell)| {
            let is_after = cell.accesses.read(rank, clock);
            match cell.value {
                Some((when, value)) if when == operation && is_after => Ok(value),
                _ => Err(format!(
                    "reads element {} of half {half} of rank {owner}, which may not have been written yet",
                    at + index
                )),
            }
        };
        cells.iter_mut().enumerate().map(read).collect()
    }
}

/// The buffers of one rank in one operation.
#[derive(Default)]
pub(super) struct Buffers {
    pub(super) input: Vec<Id>,
    pub(super) output: Vec<Id>,
    pub(super) scratch: Vec<Id>,
    /// Of the output, while the rank lends it or has it used in place; else empty.
    pub(super) lent: Vec<Accesses>,
    /// Of the input, while it is read in place; else empty.
    pub(super) lent_input: Vec<Accesses>,
}

impl Buffers {
    /// Whether other ranks may use them.
    pub(super) fn is_lent(&self) -> bool {
        !self.lent.is_empty() || !self.lent_input.is_empty()
    }

    /// `rank`, whose they are, uses all of them for something else.
    ///
    /// # Errors
    /// A rank that may still use them.
    pub(super) fn take_back(&mut self, rank: Rank, clock: &Clock) -> Result<(), Rank> {
        let mut all = self.lent.iter_mut().chain(&mut self.lent_input);
        all.try_for_each(|accesses| accesses.write(rank, clock))
    }

    /// `span` of them, which is not of a window.
    pub(super) fn of(&mut self, span: Span) -> Result<&mut [Id], String> {
        let buffer = match span.buffer {
            Buffer::Input => &mut self.input,
            Buffer::Output => &mut self.output,
            Buffer::Scratch => &mut self.scratch,
            Buffer::Window { .. } => return Err("uses a window like a buffer".into()),
        };
        let len = buffer.len();
        span.offset
            .checked_add(span.len)
            .and_then(|end| buffer.get_mut(span.offset..end))
            .ok_or_else(|| {
                format!(
                    "needs {} elements from {} of the {len} in {:?}",
                    span.len, span.offset, span.buffer
                )
            })
    }

    pub(super) fn read(&mut self, span: Span) -> Result<Vec<Id>, String> {
        let values = self.of(span)?;
        match values.iter().position(|&id| id == UNINITIALISED) {
            Some(at) => Err(format!(
                "reads element {} of {:?}, which nothing was written to",
                span.offset + at,
                span.buffer
            )),
            None => Ok(values.to_vec()),
        }
    }

    /// Notes that `rank` reads `span`, or `writes` to it, while other ranks may do so too. `owner`: whose they are.
    pub(super) fn touch(
        &mut self,
        (owner, span): (Rank, Span),
        (rank, clock): (Rank, &Clock),
        writes: bool,
    ) -> Result<(), String> {
        let lent = match span.buffer {
            Buffer::Output => &mut self.lent,
            Buffer::Input => &mut self.lent_input,
            _ => return Ok(()),
        };
        let lent = lent.iter_mut().enumerate();
        for (at, accesses) in lent.skip(span.offset).take(span.len) {
            let conflict = match writes {
                true => accesses.write(rank, clock).err(),
                false => (!accesses.read(rank, clock)).then_some(owner),
            };
            if let Some(other) = conflict {
                return Err(format!(
                    "uses element {at} of the {} of rank {owner}, which may still be in use by rank {other}",
                    match span.buffer {
                        Buffer::Input => "input",
                        _ => "output",
                    }
                ));
            }
        }
        Ok(())
    }
}
