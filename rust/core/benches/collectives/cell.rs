//! One collective at one size with its buffers: how it is called, and what its result must be.

use unisono::buffer::{Element, Memory};
use unisono::error;
use unisono::types::{Collective, ReduceOp};
use unisono::{Communicator, Request};

/// The operations that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    Gather,
    Scatter,
    AllToAll,
    Barrier,
    PingPong,
    SendRecv,
}

impl Kind {
    pub(crate) const ALL: [Self; 11] = [
        Self::AllReduce,
        Self::Reduce,
        Self::Broadcast,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Barrier,
        Self::PingPong,
        Self::SendRecv,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Reduce => "reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
            Self::PingPong => "ping_pong",
            Self::SendRecv => "send_recv",
        }
    }

    /// The collective, where it is one.
    pub(crate) fn collective(self) -> Option<Collective> {
        Some(match self {
            Self::AllReduce => Collective::AllReduce,
            Self::Reduce => Collective::Reduce,
            Self::Broadcast => Collective::Broadcast,
            Self::AllGather => Collective::AllGather,
            Self::ReduceScatter => Collective::ReduceScatter,
            Self::Gather => Collective::Gather,
            Self::Scatter => Collective::Scatter,
            Self::AllToAll => Collective::AllToAll,
            Self::Barrier => Collective::Barrier,
            Self::PingPong | Self::SendRecv => return None,
        })
    }

    pub(crate) fn parse(name: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == name);
        known.ok_or_else(|| format!("there is no {name} here"))
    }
}

/// Where buffers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// In each process's own memory.
    Private,
    /// In the heap that the ranks of a host share.
    Heap,
}

impl Storage {
    pub(crate) fn parse(name: &str) -> Result<Self, String> {
        match name {
            "private" => Ok(Self::Private),
            "heap" => Ok(Self::Heap),
            _ => Err(format!("--memory is {name:?}, but takes private or heap")),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Heap => "heap",
        }
    }
}

/// Elements aligned to a cache line, as other runtimes' buffers are in their own measurements.
enum Buffer<T: Element> {
    Private {
        memory: Vec<T>,
        first: usize,
        count: usize,
    },
    Heap(unisono::heap::Buffer<T>),
}

impl<T: Number> Buffer<T> {
    const ALIGNMENT: usize = 64;

    /// Written, so that no page of it is the kernel's page of zeros.
    fn new(count: usize, storage: Storage) -> Result<Self, String> {
        if storage == Storage::Heap {
            let mut buffer = unisono::heap::Buffer::zeroed(count);
            if count > 0 && !buffer.is_shared() {
                return Err("the shared heap is full or off (UNISONO_HEAP_BYTES)".to_owned());
            }
            buffer.fill(T::from_small(1));
            return Ok(Self::Heap(buffer));
        }
        let spare = Self::ALIGNMENT / size_of::<T>();
        let memory = vec![T::from_small(1); count + spare];
        let first = memory.as_ptr().align_offset(Self::ALIGNMENT);
        Ok(Self::Private {
            memory,
            first,
            count,
        })
    }

    fn as_slice(&self) -> &[T] {
        match self {
            Self::Private {
                memory,
                first,
                count,
            } => &memory[*first..first + count],
            Self::Heap(buffer) => buffer,
        }
    }

    fn as_mut_slice(&mut self) -> &mut [T] {
        match self {
            Self::Private {
                memory,
                first,
                count,
            } => &mut memory[*first..*first + *count],
            Self::Heap(buffer) => buffer,
        }
    }

    /// A view for requests that are made by hand.
    fn view(&mut self) -> Memory {
        let slice = self.as_mut_slice();
        // SAFETY: `call` is the only user, and waits for the end of the operation before it returns; it holds the
        // cell mutably meanwhile, so that no other code reads or writes the buffer.
        unsafe { Memory::from_raw_parts(slice.as_mut_ptr().cast(), size_of_val(slice)) }
    }
}

/// A number that small sums are exact in.
pub(crate) trait Number: Element + PartialEq {
    fn from_small(value: u16) -> Self;
}

impl Number for f32 {
    fn from_small(value: u16) -> Self {
        Self::from(value)
    }
}

impl Number for u8 {
    /// Sums of bytes wrap around, too.
    fn from_small(value: u16) -> Self {
        value as Self
    }
}

/// A collective on buffers of its own, whatever their type.
pub(crate) trait Measured {
    /// Calls it `iterations` times, one call after the other.
    fn repeat(&mut self, comm: &Communicator, iterations: usize) -> error::Result<()>;

    /// Calls it on known data, once for each root unless it is large. Returns how many elements are wrong.
    fn check(&mut self, comm: &Communicator) -> error::Result<usize>;
}

/// Makes the buffers of `kind` for a whole of `bytes`.
pub(crate) fn prepare(
    kind: Kind,
    bytes: usize,
    comm: &Communicator,
    storage: Storage,
    out_of_place: bool,
) -> Result<Box<dyn Measured>, String> {
    Ok(if bytes.is_multiple_of(4) {
        let cell = Cell::<f32>::new(kind, bytes / 4, comm, storage, out_of_place)?;
        Box::new(cell)
    } else {
        Box::new(Cell::<u8>::new(kind, bytes, comm, storage, out_of_place)?)
    })
}

struct Cell<T: Number> {
    kind: Kind,
    input: Buffer<T>,
    output: Buffer<T>,
    shard: usize,
    rank: usize,
    world: usize,
    out_of_place: bool,
    /// The sums of all ranks' contributions to a check, which repeat.
    sums: [u16; PERIOD],
    /// The root of the next call: it moves on by one rank, so that no root can run ahead of its receivers.
    root: usize,
}

impl<T: Number> Cell<T> {
    fn new(
        kind: Kind,
        elements: usize,
        comm: &Communicator,
        storage: Storage,
        out_of_place: bool,
    ) -> Result<Self, String> {
        use Kind::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        let (rank, world) = (comm.rank(), comm.world_size());
        let shard = (elements / world).max(1);
        let (input, output) = match kind {
            AllGather | Gather => (shard, shard * world),
            ReduceScatter | Scatter => (shard * world, shard),
            AllToAll => (shard * world, shard * world),
            _ => (elements, elements),
        };
        Ok(Self {
            kind,
            input: Buffer::new(input, storage)?,
            output: Buffer::new(output, storage)?,
            shard,
            rank,
            world,
            out_of_place,
            sums: std::array::from_fn(|index| (0..world).map(|rank| value(rank, index)).sum()),
            root: 0,
        })
    }

    fn call(&mut self, comm: &Communicator) -> error::Result<()> {
        const SUM: ReduceOp = ReduceOp::Sum;
        let root = self.root;
        let is_root = root == self.rank;
        self.root = (root + 1) % self.world;
        let (input, output) = (self.input.as_slice(), self.output.as_mut_slice());
        match self.kind {
            Kind::AllReduce if self.out_of_place => self.all_reduce_out_of_place(comm),
            Kind::AllReduce => comm.all_reduce(output, SUM),
            Kind::Reduce => comm.reduce(output, SUM, root),
            Kind::Broadcast => comm.broadcast(output, root),
            Kind::AllGather => comm.all_gather(input, output),
            Kind::ReduceScatter => comm.reduce_scatter(input, output, SUM),
            Kind::Gather if is_root => comm.gather(input, output, root),
            Kind::Gather => comm.gather(input, &mut [], root),
            Kind::Scatter if is_root => comm.scatter(input, output, root),
            Kind::Scatter => comm.scatter(&[], output, root),
            Kind::AllToAll => comm.all_to_all(input, output),
            Kind::Barrier => comm.barrier(),
            Kind::PingPong => self.ping_pong(comm),
            Kind::SendRecv => self.send_recv(comm),
        }
    }

    fn all_reduce_out_of_place(&mut self, comm: &Communicator) -> error::Result<()> {
        let (input, output) = (self.input.view(), self.output.view());
        let request = Request::all_reduce(T::DTYPE, ReduceOp::Sum, Some(input), output);
        // SAFETY: the buffers are this cell's, and `run` returns when the operation has ended.
        unsafe { comm.run(request) }.map(drop)
    }

    fn ping_pong(&mut self, comm: &Communicator) -> error::Result<()> {
        let peer = self.rank ^ 1;
        if peer >= self.world {
            return Ok(());
        }
        let (input, output) = (self.input.as_slice(), self.output.as_mut_slice());
        if self.rank.is_multiple_of(2) {
            comm.send_slice(input, peer, 0)?;
            comm.receive_slice(output, Some(peer), 0).map(drop)
        } else {
            comm.receive_slice(output, Some(peer), 0)?;
            comm.send_slice(input, peer, 0)
        }
    }

    fn send_recv(&mut self, comm: &Communicator) -> error::Result<()> {
        let (next, previous) = (self.next(), self.previous());
        let (input, output) = (self.input.as_slice(), self.output.as_mut_slice());
        comm.send_receive_slices((input, next), (output, Some(previous)), 0)
            .map(drop)
    }

    fn next(&self) -> usize {
        (self.rank + 1) % self.world
    }

    fn previous(&self) -> usize {
        (self.rank + self.world - 1) % self.world
    }

    /// Whether the collective's contribution lies in the output.
    fn is_in_place(&self) -> bool {
        match self.kind {
            Kind::Broadcast | Kind::Reduce => true,
            Kind::AllReduce => !self.out_of_place,
            _ => false,
        }
    }

    /// The value that element `index` of the output must have after a call; `None` where the call leaves nothing.
    fn expected(&self, index: usize, root: usize) -> Option<u16> {
        let (block, within) = (index / self.shard, index % self.shard);
        let own = self.shard * self.rank;
        let is_root = self.rank == root;
        match self.kind {
            Kind::AllReduce => Some(self.sum(index)),
            Kind::Reduce => is_root.then(|| self.sum(index)),
            Kind::Broadcast => Some(value(root, index)),
            Kind::AllGather => Some(value(block, within)),
            Kind::ReduceScatter => Some(self.sum(own + index)),
            Kind::Gather => is_root.then(|| value(block, within)),
            Kind::Scatter => Some(value(root, own + index)),
            Kind::AllToAll => Some(value(block, own + within)),
            Kind::Barrier => None,
            Kind::PingPong => {
                let peer = self.rank ^ 1;
                (peer < self.world).then(|| value(peer, index))
            }
            Kind::SendRecv => Some(value(self.previous(), index)),
        }
    }

    fn sum(&self, index: usize) -> u16 {
        self.sums[index % PERIOD]
    }
}

/// The number of elements after which contributions to a check repeat.
const PERIOD: usize = 7;

/// Up to this number of bytes a check tries every root.
const ALL_ROOTS_UP_TO: usize = 1 << 20;

/// Element `index` of `rank`'s contribution to a check: small, so that sums are exact in every type.
fn value(rank: usize, index: usize) -> u16 {
    ((3 * rank + index) % PERIOD) as u16 + 1
}

impl<T: Number> Measured for Cell<T> {
    fn repeat(&mut self, comm: &Communicator, iterations: usize) -> error::Result<()> {
        (0..iterations).try_for_each(|_| self.call(comm))
    }

    fn check(&mut self, comm: &Communicator) -> error::Result<usize> {
        let (rank, in_place) = (self.rank, self.is_in_place());
        let mut wrong = 0;
        let bytes = size_of_val(self.output.as_slice());
        let rounds = if bytes <= ALL_ROOTS_UP_TO {
            self.world
        } else {
            1
        };
        for _ in 0..rounds {
            for (index, element) in self.input.as_mut_slice().iter_mut().enumerate() {
                *element = T::from_small(value(rank, index));
            }
            for (index, element) in self.output.as_mut_slice().iter_mut().enumerate() {
                *element = T::from_small(if in_place { value(rank, index) } else { 0 });
            }
            let root = self.root;
            self.call(comm)?;
            let result = self.output.as_slice().iter().enumerate();
            wrong += result
                .filter_map(|(index, element)| Some((element, self.expected(index, root)?)))
                .filter(|(element, expected)| **element != T::from_small(*expected))
                .count();
        }
        // Sums in place would grow without end.
        self.input.as_mut_slice().fill(T::from_small(0));
        self.output.as_mut_slice().fill(T::from_small(0));
        Ok(wrong)
    }
}
