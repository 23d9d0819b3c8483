//! The memory that a plan works on, by the names that its spans have.

use crate::buffer::Memory;
use crate::heap::Scratch;
use crate::plan::Buffer;

/// Plans with windows are walked in order by the run in shared memory.
pub(super) const NO_WINDOWS: &str = "a plan of messages uses no windows";

/// The caller's memory, and the operation's own memory.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// The caller's contribution; empty in place.
    input: Memory,
    output: Memory,
    pub(super) scratch: Option<Scratch>,
    /// The multiplied contribution of a `premul_sum`: the plan's input, then.
    multiplied: Option<Scratch>,
}

impl Buffers {
    pub(crate) fn new(input: Option<Memory>, output: Option<Memory>) -> Self {
        Self {
            input: input.unwrap_or_else(Memory::empty),
            output: output.unwrap_or_else(Memory::empty),
            scratch: None,
            multiplied: None,
        }
    }

    /// Takes the memory of the next operation like this one, which needs scratch memory of the same size.
    #[inline]
    pub(super) fn renew(&mut self, input: Option<Memory>, output: Option<Memory>) {
        self.input = input.unwrap_or(Memory::empty());
        self.output = output.unwrap_or(Memory::empty());
    }

    /// Lets go of the caller's memory.
    #[inline]
    pub(super) fn release(&mut self) {
        self.input.release();
        self.output.release();
    }

    #[inline]
    pub(crate) fn input(&self) -> &Memory {
        match &self.multiplied {
            None => &self.input,
            Some(multiplied) => multiplied.memory(),
        }
    }

    #[inline]
    pub(crate) fn output(&self) -> &Memory {
        &self.output
    }

    /// The bytes of the longer one.
    #[inline]
    pub(crate) fn longest(&self) -> usize {
        self.input.len().max(self.output.len())
    }

    /// The caller's contribution, in place or not.
    pub(crate) fn contribution(&self) -> &Memory {
        match self.input.is_empty() {
            true => &self.output,
            false => &self.input,
        }
    }

    /// The memory in which the plan reads the caller's contribution.
    pub(crate) fn source(&self) -> &Memory {
        match self.input().is_empty() {
            true => &self.output,
            false => self.input(),
        }
    }

    /// Bytes of the longer of the caller's two buffers.
    pub(crate) fn longer(&self) -> usize {
        self.input.len().max(self.output.len())
    }

    /// Gives the plan of a `premul_sum`, which is a sum, an input of its own, as long as the contribution. Returns whether
    /// there is one. [`Buffers::multiply`] fills it when the run begins: an earlier operation may still be writing to the
    /// contribution.
    pub(crate) fn multiply_beforehand(&mut self) -> bool {
        let bytes = self.contribution().len();
        self.multiplied = (bytes > 0).then(|| Scratch::new(bytes));
        bytes > 0
    }

    /// Fills that input, run by run.
    pub(super) fn multiply(&mut self, mut scale: impl FnMut(&mut [u8], &[u8])) {
        let source = match self.input.is_empty() {
            true => &self.output,
            false => &self.input,
        };
        if let Some(multiplied) = &mut self.multiplied {
            source.for_each_run(0, source.len(), |at, run| {
                scale(multiplied.write(at, run.len()), run);
            });
        }
    }

    #[inline]
    pub(super) fn get(&self, buffer: Buffer) -> &Memory {
        static NOTHING: Memory = Memory::empty();
        match buffer {
            Buffer::Input => self.input(),
            Buffer::Output => &self.output,
            Buffer::Scratch => self.scratch.as_ref().map_or(&NOTHING, Scratch::memory),
            Buffer::Window { .. } => unreachable!("{NO_WINDOWS}"),
        }
    }

    /// Bytes of a buffer from `offset` on, at most `max` and at most to the end of their piece, for writing.
    #[inline]
    pub(super) fn write(&mut self, buffer: Buffer, offset: usize, max: usize) -> &mut [u8] {
        match buffer {
            Buffer::Output => self.output.write(offset, max),
            Buffer::Scratch => scratch(&mut self.scratch).write(offset, max),
            Buffer::Input => unreachable!("a plan does not write its input"),
            Buffer::Window { .. } => unreachable!("{NO_WINDOWS}"),
        }
    }

    /// The same, with as many bytes of a buffer to read. In one buffer the two lie apart, as in each step of a plan.
    pub(super) fn read_and_write(
        &mut self,
        (from, at): (Buffer, usize),
        (to, place): (Buffer, usize),
        (most_read, most_written): (usize, usize),
    ) -> (&[u8], &mut [u8]) {
        match (from, to) {
            (Buffer::Input, _) => {
                let read = match &self.multiplied {
                    None => self.input.read(at, most_read),
                    Some(multiplied) => multiplied.memory().read(at, most_read),
                };
                let written = match to {
                    Buffer::Output => self.output.write(place, most_written),
                    _ => scratch(&mut self.scratch).write(place, most_written),
                };
                (read, written)
            }
            (Buffer::Output, Buffer::Scratch) => (
                self.output.read(at, most_read),
                scratch(&mut self.scratch).write(place, most_written),
            ),
            (Buffer::Scratch, Buffer::Output) => (
                scratch(&mut self.scratch).memory().read(at, most_read),
                self.output.write(place, most_written),
            ),
            (Buffer::Output, _) => self.output.read_and_write((at, place), most_written),
            (_, _) => scratch(&mut self.scratch).read_and_write((at, place), most_written),
        }
    }
}

#[inline]
fn scratch(scratch: &mut Option<Scratch>) -> &mut Scratch {
    scratch
        .as_mut()
        .expect("a plan that uses scratch memory was given some")
}
