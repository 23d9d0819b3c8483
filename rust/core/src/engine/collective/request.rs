//! The request of a caller, checked before a byte moves.

use std::mem;
use std::time::Duration;

use crate::buffer::Memory;
use crate::error::{Error, Result};
use crate::plan::{Counts, Shape};
use crate::types::{Collective, DataType, DeviceStream, Rank, ReduceOp};

use crate::engine::collective::header::{Fingerprint, digest};

/// How many elements each rank contributes or gets; the owned form of [`Counts`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// The same number everywhere; see [`Counts::Even`].
    Even(usize),
    /// One number per rank. In `gather` and `scatter` only the root knows all of them: the other ranks give
    /// their own number in their place and zeros elsewhere.
    PerRank(Vec<usize>),
    /// `all_to_all`: to each rank and from each rank.
    PerPair {
        /// Elements to each rank.
        send: Vec<usize>,
        /// Elements from each rank.
        recv: Vec<usize>,
    },
}

impl Sizes {
    /// The borrowed form that plans are made from.
    pub fn counts(&self) -> Counts<'_> {
        match self {
            Self::Even(count) => Counts::Even(*count),
            Self::PerRank(counts) => Counts::PerRank(counts),
            Self::PerPair { send, recv } => Counts::PerPair { send, recv },
        }
    }
}

/// A collective operation with its buffers.
///
/// `input: None` means in place where the operation allows it: the input lies in the output, at the same place
/// (`all_reduce`, `scan`, `exscan`, `reduce` on the root) or as this rank's block (`all_gather`).
#[derive(Debug)]
pub struct Request {
    /// The operation.
    pub collective: Collective,
    /// The type of the elements.
    pub dtype: DataType,
    /// How contributions are combined, in reductions.
    pub op: Option<ReduceOp>,
    /// The root of a rooted operation, else 0.
    pub root: Rank,
    /// This rank's contribution; `None` in place, and where it contributes nothing.
    pub input: Option<Memory>,
    /// Where the result goes; `None` where this rank gets none.
    pub output: Option<Memory>,
    /// Element counts.
    pub sizes: Sizes,
    /// How long the operation may take; `None` for the communicator's timeout.
    pub timeout: Option<Duration>,
    /// The stream of buffers that are a device's memory; `None` for memory of the host.
    pub stream: Option<DeviceStream>,
    /// A reduction folds in rank order, so that its result does not depend on the algorithm. Must be the same on every rank.
    pub in_rank_order: bool,
}

impl Request {
    fn new(collective: Collective, dtype: DataType, sizes: Sizes) -> Self {
        Self {
            collective,
            dtype,
            op: None,
            root: 0,
            input: None,
            output: None,
            sizes,
            timeout: None,
            stream: None,
            in_rank_order: false,
        }
    }

    /// Every rank's `output` becomes the reduction of all inputs. `input: None`: of the outputs, in place.
    pub fn all_reduce(
        dtype: DataType,
        op: ReduceOp,
        input: Option<Memory>,
        output: Memory,
    ) -> Self {
        let sizes = Sizes::Even(output.len() / dtype.size());
        Self {
            op: Some(op),
            input,
            output: Some(output),
            ..Self::new(Collective::AllReduce, dtype, sizes)
        }
    }

    /// Every rank's `output` becomes the reduction of the inputs of the ranks up to itself: `((x0 op x1) op ...) op xr`, in
    /// this order by every algorithm, so that it is bit for bit what continues the result of the rank before, which of floats
    /// that are summed in a wider type is not rounded yet. An average is that of these ranks. `input: None`: in place.
    pub fn scan(dtype: DataType, op: ReduceOp, input: Option<Memory>, output: Memory) -> Self {
        Self {
            collective: Collective::Scan,
            ..Self::all_reduce(dtype, op, input, output)
        }
    }

    /// As [`Request::scan`], of the ranks before this one. On rank 0 `output` stays as it is, and may be `None`.
    pub fn exscan(
        dtype: DataType,
        op: ReduceOp,
        input: Option<Memory>,
        output: Option<Memory>,
    ) -> Self {
        Self {
            collective: Collective::Exscan,
            ..Self::reduce(dtype, op, 0, input, output)
        }
    }

    /// The root's `output` becomes the reduction of all inputs. On the root `input: None` means in place; the
    /// other ranks give `output: None`.
    pub fn reduce(
        dtype: DataType,
        op: ReduceOp,
        root: Rank,
        input: Option<Memory>,
        output: Option<Memory>,
    ) -> Self {
        let bytes = input.as_ref().or(output.as_ref()).map_or(0, Memory::len);
        let sizes = Sizes::Even(bytes / dtype.size());
        Self {
            op: Some(op),
            root,
            input,
            output,
            ..Self::new(Collective::Reduce, dtype, sizes)
        }
    }

    /// Every rank's `buffer` becomes the root's.
    pub fn broadcast(dtype: DataType, root: Rank, buffer: Memory) -> Self {
        let sizes = Sizes::Even(buffer.len() / dtype.size());
        Self {
            root,
            output: Some(buffer),
            ..Self::new(Collective::Broadcast, dtype, sizes)
        }
    }

    /// Every rank's `output` becomes all inputs in rank order. `input: None`: its own block lies there already.
    pub fn all_gather(
        dtype: DataType,
        input: Option<Memory>,
        output: Memory,
        sizes: Sizes,
    ) -> Self {
        Self {
            input,
            output: Some(output),
            ..Self::new(Collective::AllGather, dtype, sizes)
        }
    }

    /// This rank's `output` becomes its block of the reduction of all inputs.
    pub fn reduce_scatter(
        dtype: DataType,
        op: ReduceOp,
        input: Memory,
        output: Memory,
        sizes: Sizes,
    ) -> Self {
        Self {
            op: Some(op),
            input: Some(input),
            output: Some(output),
            ..Self::new(Collective::ReduceScatter, dtype, sizes)
        }
    }

    /// The root's `output` becomes all inputs in rank order.
    pub fn gather(
        dtype: DataType,
        root: Rank,
        input: Memory,
        output: Option<Memory>,
        sizes: Sizes,
    ) -> Self {
        Self {
            root,
            input: Some(input),
            output,
            ..Self::new(Collective::Gather, dtype, sizes)
        }
    }

    /// This rank's `output` becomes its block of the root's `input`.
    pub fn scatter(
        dtype: DataType,
        root: Rank,
        input: Option<Memory>,
        output: Memory,
        sizes: Sizes,
    ) -> Self {
        Self {
            root,
            input,
            output: Some(output),
            ..Self::new(Collective::Scatter, dtype, sizes)
        }
    }

    /// Block r of this rank's `input` goes to rank r; block r of its `output` comes from rank r.
    pub fn all_to_all(dtype: DataType, input: Memory, output: Memory, sizes: Sizes) -> Self {
        Self {
            input: Some(input),
            output: Some(output),
            ..Self::new(Collective::AllToAll, dtype, sizes)
        }
    }

    /// No rank leaves before all ranks have come.
    pub fn barrier() -> Self {
        Self::new(Collective::Barrier, DataType::UInt8, Sizes::Even(0))
    }

    /// The request, in whose place a barrier is left.
    pub(crate) fn take(&mut self) -> Self {
        mem::replace(self, Self::barrier())
    }

    /// The same request with a timeout of its own.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The same request on memory of a device: its addresses are the device's, and it happens in the order of `stream`.
    #[must_use]
    pub fn on(mut self, stream: DeviceStream) -> Self {
        self.stream = Some(stream);
        self
    }

    /// Refuses what cannot be carried out, before anything is sent: a root out of range, an operator without
    /// meaning for the type, buffers that do not have the size that the counts call for.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported`, naming the argument.
    pub(crate) fn check(&self, rank: Rank, world: usize) -> Result<()> {
        if self.root >= world {
            return Err(Error::invalid(format!(
                "{}: root {} is out of range: the group has {world} ranks",
                self.collective, self.root
            )));
        }
        match self.op {
            Some(op) if self.collective.reduces() => op.check(self.dtype)?,
            None if self.collective.reduces() => {
                return Err(Error::invalid(format!(
                    "{}: no operator was given",
                    self.collective
                )));
            }
            _ => {}
        }
        let (input, output) = self.expected_counts(rank, world)?;
        self.check_buffer("input", self.input.as_ref(), input)?;
        self.check_buffer("output", self.output.as_ref(), output)?;
        if let (Some(input), Some(output)) = (&self.input, &self.output)
            && input.overlaps(output)
        {
            return Err(Error::invalid(format!(
                "{}: input and output overlap; for an operation in place give the output alone",
                self.collective
            )));
        }
        Ok(())
    }

    /// Elements that input and output must have on this rank; `None` where the buffer must be absent.
    fn expected_counts(&self, rank: Rank, world: usize) -> Result<(Expected, Expected)> {
        use Expected::{Absent, Exactly, Optional};
        let root = rank == self.root;
        let own = match &self.sizes {
            Sizes::Even(count) => *count,
            Sizes::PerRank(counts) if counts.len() == world => counts[rank],
            Sizes::PerRank(counts) => return Err(self.wrong_length("counts", counts.len(), world)),
            Sizes::PerPair { .. } => 0,
        };
        let all = match &self.sizes {
            Sizes::Even(count) => count.checked_mul(world),
            Sizes::PerRank(counts) => Some(self.sum(counts)?),
            Sizes::PerPair { .. } => Some(0),
        };
        let all = all.ok_or_else(|| self.too_much())?;
        Ok(match self.collective {
            // Rank 0 gets nothing, and gives what it has in either.
            Collective::Exscan if rank == 0 && (self.input.is_some() || own == 0) => {
                (Optional(own), Optional(own))
            }
            Collective::AllReduce | Collective::Scan | Collective::Exscan => {
                (Optional(own), Exactly(own))
            }
            Collective::Reduce if root => (Optional(own), Exactly(own)),
            Collective::Reduce => (Exactly(own), Absent),
            Collective::Broadcast => (Absent, Exactly(own)),
            Collective::AllGather => (Optional(own), Exactly(all)),
            Collective::ReduceScatter => (Exactly(all), Exactly(own)),
            Collective::Gather => (Exactly(own), if root { Exactly(all) } else { Absent }),
            Collective::Scatter => (if root { Exactly(all) } else { Absent }, Exactly(own)),
            Collective::AllToAll => match &self.sizes {
                Sizes::PerPair { send, recv } => {
                    for (name, list) in [("send counts", send), ("receive counts", recv)] {
                        if list.len() != world {
                            return Err(self.wrong_length(name, list.len(), world));
                        }
                    }
                    (Exactly(self.sum(send)?), Exactly(self.sum(recv)?))
                }
                _ => (Exactly(all), Exactly(all)),
            },
            Collective::Barrier => (Absent, Absent),
            Collective::Send | Collective::Recv => {
                return Err(Error::internal("point-to-point is no collective request"));
            }
        })
    }

    fn sum(&self, counts: &[usize]) -> Result<usize> {
        counts
            .iter()
            .try_fold(0_usize, |sum, count| sum.checked_add(*count))
            .ok_or_else(|| self.too_much())
    }

    fn too_much(&self) -> Error {
        Error::invalid(format!(
            "{}: the counts add up to too much",
            self.collective
        ))
    }

    fn wrong_length(&self, what: &str, length: usize, world: usize) -> Error {
        Error::invalid(format!(
            "{}: {length} {what} for a group of {world} ranks; there must be one per rank",
            self.collective
        ))
    }

    fn check_buffer(&self, name: &str, memory: Option<&Memory>, expected: Expected) -> Result<()> {
        let (count, optional) = match expected {
            Expected::Exactly(count) => (count, false),
            Expected::Optional(count) => (count, true),
            Expected::Absent => {
                return match memory {
                    Some(memory) if !memory.is_empty() => Err(Error::invalid(format!(
                        "{}: this rank takes no {name}, but {} bytes were given",
                        self.collective,
                        memory.len()
                    ))),
                    _ => Ok(()),
                };
            }
        };
        let bytes = count.checked_mul(self.dtype.size()).ok_or_else(|| {
            Error::invalid(format!(
                "{}: {count} elements are too many",
                self.collective
            ))
        })?;
        match memory {
            Some(memory) if memory.len() == bytes => Ok(()),
            Some(memory) => Err(Error::invalid(format!(
                "{}: the {name} has {} bytes, but the counts call for {count} elements of {}, {bytes} bytes",
                self.collective,
                memory.len(),
                self.dtype
            ))),
            None if optional || bytes == 0 => Ok(()),
            None => Err(Error::invalid(format!(
                "{}: the {name} is missing",
                self.collective
            ))),
        }
    }

    /// Whether the input lies in the output.
    pub(crate) fn in_place(&self) -> bool {
        self.input.is_none() && self.collective.may_be_in_place()
    }

    /// The fingerprint by which it is compared with the calls of other ranks.
    pub(crate) fn fingerprint(&self, sequence: u64, algorithm: u8) -> Fingerprint {
        let (count, counts) = match &self.sizes {
            Sizes::Even(count) => (*count, 0),
            // Every rank knows all counts of these; of the others each rank knows its own only.
            Sizes::PerRank(counts)
                if matches!(
                    self.collective,
                    Collective::AllGather | Collective::ReduceScatter
                ) =>
            {
                (counts.iter().sum(), digest(counts))
            }
            _ => (0, 0),
        };
        Fingerprint {
            sequence,
            collective: self.collective as u8,
            dtype: self.dtype as u8,
            op: self.op.map_or(0, ReduceOp::number),
            algorithm,
            root: self.root as u32,
            count: count as u64,
            counts,
            length: 0,
        }
    }

    /// The type of partial sums and other results under way.
    pub(crate) fn partial(&self) -> DataType {
        let accumulator = |op: ReduceOp| op.accumulator(self.dtype);
        self.op.map_or(self.dtype, accumulator)
    }

    /// The shape from which the plan is made.
    pub(crate) fn shape(&self, rank: Rank, world: usize) -> Shape<'_> {
        Shape {
            collective: self.collective,
            rank,
            world,
            counts: self.sizes.counts(),
            root: self.root,
            in_place: self.in_place(),
            widen: self.partial() != self.dtype,
        }
    }
}

/// The number of elements a buffer must have.
enum Expected {
    Exactly(usize),
    /// As many, or absent (in place).
    Optional(usize),
    Absent,
}
