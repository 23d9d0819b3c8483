//! Every collective, on device memory against the same on the host's, bit by bit.

use unisono::buffer::Memory;
use unisono::transport::cuda::driver::Stream;
use unisono::types::{Collective, DataType, ReduceOp};
use unisono::{Communicator, Request, Sizes};

use crate::gpu::Array;

/// One collective, as all ranks call it.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) collective: Collective,
    pub(crate) dtype: DataType,
    pub(crate) op: Option<ReduceOp>,
    pub(crate) root: usize,
    pub(crate) in_place: bool,
    pub(crate) counts: Counts,
}

/// Elements.
#[derive(Clone, Debug)]
pub(crate) enum Counts {
    Even(usize),
    /// By rank.
    Uneven(Vec<usize>),
    /// From rank, to rank.
    Pairs(Vec<Vec<usize>>),
}

impl Case {
    pub(crate) fn even(collective: Collective, dtype: DataType, count: usize) -> Self {
        Self {
            collective,
            dtype,
            op: None,
            root: 0,
            in_place: false,
            counts: Counts::Even(count),
        }
    }

    pub(crate) fn reducing(mut self, op: ReduceOp) -> Self {
        self.op = Some(op);
        self
    }

    pub(crate) fn rooted(mut self, root: usize) -> Self {
        self.root = root;
        self
    }

    pub(crate) fn in_place(mut self) -> Self {
        self.in_place = true;
        self
    }

    pub(crate) fn counting(mut self, counts: Counts) -> Self {
        self.counts = counts;
        self
    }

    fn sizes(&self, rank: usize) -> Sizes {
        match &self.counts {
            Counts::Even(count) => Sizes::Even(*count),
            Counts::Uneven(counts) => {
                let known = matches!(
                    self.collective,
                    Collective::AllGather | Collective::ReduceScatter
                ) || rank == self.root;
                let seen = counts.iter().enumerate();
                let seen = seen.map(|(of, count)| if known || of == rank { *count } else { 0 });
                Sizes::PerRank(seen.collect())
            }
            Counts::Pairs(matrix) => Sizes::PerPair {
                send: matrix[rank].clone(),
                recv: matrix.iter().map(|row| row[rank]).collect(),
            },
        }
    }

    /// Elements of input and output on `rank`; `None` where there is none.
    fn lengths(&self, rank: usize, world: usize) -> (Option<usize>, Option<usize>) {
        let is_root = rank == self.root;
        let (own, all) = match &self.counts {
            Counts::Even(count) => (*count, count * world),
            Counts::Uneven(counts) => (counts[rank], counts.iter().sum()),
            Counts::Pairs(matrix) => (
                matrix[rank].iter().sum(),
                matrix.iter().map(|row| row[rank]).sum(),
            ),
        };
        let (input, output) = match self.collective {
            Collective::AllReduce | Collective::Scan | Collective::Exscan => (Some(own), Some(own)),
            Collective::Reduce => (Some(own), is_root.then_some(own)),
            Collective::Broadcast => (None, Some(own)),
            Collective::AllGather => (Some(own), Some(all)),
            Collective::ReduceScatter => (Some(all), Some(own)),
            Collective::Gather => (Some(own), is_root.then_some(all)),
            Collective::Scatter => (is_root.then_some(all), Some(own)),
            Collective::AllToAll => match self.counts {
                Counts::Pairs(_) => (Some(own), Some(all)),
                _ => (Some(all), Some(all)),
            },
            _ => (None, None),
        };
        let in_place = self.in_place
            && self.collective.may_be_in_place()
            && (self.collective != Collective::Reduce || is_root);
        (input.filter(|_| !in_place), output)
    }

    fn request(&self, rank: usize, input: Option<Memory>, output: Option<Memory>) -> Request {
        Request {
            collective: self.collective,
            dtype: self.dtype,
            op: self.op,
            root: self.root,
            input,
            output,
            sizes: self.sizes(rank),
            timeout: None,
            stream: None,
            in_rank_order: false,
        }
    }

    /// Carries it out on both, and compares.
    pub(crate) fn compare(&self, comm: &Communicator, stream: &Stream) {
        self.compare_with(comm, stream, |bytes| Array::of(stream, bytes));
    }

    /// The same with arrays from `array`.
    pub(crate) fn compare_with(
        &self,
        comm: &Communicator,
        stream: &Stream,
        array: impl Fn(&[u8]) -> Array,
    ) {
        let (rank, world) = (comm.rank(), comm.world_size());
        let (input, output) = self.lengths(rank, world);
        let fill = |salt: usize, count: usize| values(self.dtype, count, rank * 7919 + salt);
        let input = input.map(|count| fill(1, count));
        let mut expected = output.map(|count| fill(2, count));
        let on_device = |bytes: &Option<Vec<u8>>| bytes.as_ref().map(|bytes| array(bytes));
        let (from, to) = (on_device(&input), on_device(&expected));

        let view = |bytes: &[u8]| {
            // SAFETY: the vectors live until `run` has returned, and nothing else touches them.
            unsafe { Memory::from_raw_parts(bytes.as_ptr().cast_mut(), bytes.len()) }
        };
        let there = expected.as_mut().map(|bytes| {
            // SAFETY: as above; it is exclusive.
            unsafe { Memory::from_raw_parts(bytes.as_mut_ptr(), bytes.len()) }
        });
        let request = self.request(rank, input.as_deref().map(view), there);
        // SAFETY: as above.
        unsafe { comm.run(request) }
            .unwrap_or_else(|error| panic!("{self:?} on the host: {error}"));

        let memory = |array: &Option<Array>| array.as_ref().map(Array::memory);
        let request = self.request(rank, memory(&from), memory(&to));
        // SAFETY: the arrays live until the stream has got past the operation, below.
        unsafe { comm.run(request.on(stream.handle())) }
            .unwrap_or_else(|error| panic!("{self:?} on the device: {error}"));
        if let (Some(to), Some(expected)) = (&to, &expected) {
            let got = to.read(stream);
            if let Some(at) = got.iter().zip(expected).position(|(a, b)| a != b) {
                let size = self.dtype.size();
                let at = at / size;
                panic!(
                    "{self:?}, rank {rank} of {world}: element {at} is {:?}, not {:?}",
                    &got[at * size..][..size],
                    &expected[at * size..][..size]
                );
            }
        }
        if let (Some(from), Some(input)) = (&from, &input) {
            assert!(
                from.read(stream) == *input,
                "{self:?}: the input was written"
            );
        }
        // No array goes before the stream has got past it.
        stream.synchronize().expect("the stream");
    }
}

/// Elements that are numbers of every kind the type has but not-a-number, whose payload is unspecified.
fn values(dtype: DataType, count: usize, seed: usize) -> Vec<u8> {
    let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for _ in 0..count {
        let bits = next();
        let small = ((bits >> 20) % 2001) as f64 / 250.0 - 4.0;
        match dtype {
            DataType::Float16 => bytes.extend(half::f16::from_f64(small).to_ne_bytes()),
            DataType::BFloat16 => bytes.extend(half::bf16::from_f64(small).to_ne_bytes()),
            DataType::Float32 => bytes.extend((small as f32).to_ne_bytes()),
            DataType::Float64 => bytes.extend(small.to_ne_bytes()),
            // Any exponent but the highest two: no infinity, no not-a-number.
            DataType::Float8E4M3 | DataType::Float8E5M2 => bytes.push((bits >> 30) as u8 & 0xb7),
            DataType::Bool => bytes.push((bits >> 33) as u8 & 1),
            DataType::Complex64 => {
                bytes.extend((small as f32).to_ne_bytes());
                bytes.extend((((bits >> 40) % 17) as f32 - 8.0).to_ne_bytes());
            }
            DataType::Complex128 => {
                bytes.extend(small.to_ne_bytes());
                bytes.extend((((bits >> 40) % 17) as f64 - 8.0).to_ne_bytes());
            }
            integer => bytes.extend(&bits.to_ne_bytes()[..integer.size()]),
        }
    }
    bytes
}

/// Every collective in every form, with about `count` elements.
pub(crate) fn all(world: usize, count: usize, dtype: DataType, op: ReduceOp) -> Vec<Case> {
    let uneven = Counts::Uneven(
        (0..world)
            .map(|of| (of * 37 + count) % (count + 1))
            .collect(),
    );
    let pairs = |from: usize| (0..world).map(move |to| (from * 31 + to * 7 + count) % (count + 1));
    let pairs = Counts::Pairs((0..world).map(|from| pairs(from).collect()).collect());
    let case = |collective| Case::even(collective, dtype, count);
    let root = world - 1;
    let mut cases = vec![
        case(Collective::Broadcast).rooted(root),
        case(Collective::AllGather),
        case(Collective::AllGather).in_place(),
        case(Collective::AllGather).counting(uneven.clone()),
        case(Collective::AllGather)
            .counting(uneven.clone())
            .in_place(),
        case(Collective::Gather).rooted(root),
        case(Collective::Gather).counting(uneven.clone()),
        case(Collective::Scatter).rooted(root),
        case(Collective::Scatter).counting(uneven.clone()),
        case(Collective::AllToAll),
        case(Collective::AllToAll).counting(pairs),
        case(Collective::Barrier).counting(Counts::Even(0)),
    ];
    if op.check(dtype).is_ok() {
        cases.extend([
            case(Collective::AllReduce).reducing(op),
            case(Collective::AllReduce).reducing(op).in_place(),
            case(Collective::Scan).reducing(op),
            case(Collective::Scan).reducing(op).in_place(),
            case(Collective::Exscan).reducing(op),
            case(Collective::Exscan).reducing(op).in_place(),
            case(Collective::Reduce).reducing(op).rooted(root),
            case(Collective::Reduce).reducing(op).in_place(),
            case(Collective::ReduceScatter).reducing(op),
            case(Collective::ReduceScatter)
                .reducing(op)
                .counting(uneven),
        ]);
    }
    cases
}
