//! The exchanges of one piece of a call between hosts, and how long a call waits.

use std::time::Duration;

use super::{Call, Part, Place, shares};
use crate::buffer::{Element, Memory};
use crate::communicator::Work;
use crate::engine::{Request, Sizes};
use crate::error::{Code, Error, Result};
use crate::reduce::int8::{add_decoded, coded_bytes, decode, encode};
use crate::types::{DataType, Rank};

/// How long a call waits in one group until it asks whether another one has failed.
const WAIT_SLICE: Duration = Duration::from_millis(50);
/// Bytes before a coded part: how many values the call has, and whether it averages.
const HEADER: usize = 16;

/// Memory of pieces that have ended, for those to come: what is new costs a fault for every page.
pub(super) struct Spare {
    floats: Vec<Vec<f32>>,
    bytes: Vec<Vec<u8>>,
    /// There is one piece: nothing else is done while it is on its way.
    is_single: bool,
}

impl Spare {
    pub(super) fn new(pieces: usize) -> Self {
        Self {
            floats: Vec::new(),
            bytes: Vec::new(),
            is_single: pieces == 1,
        }
    }

    pub(super) fn shard(&mut self) -> Vec<f32> {
        self.floats.pop().unwrap_or_default()
    }

    pub(super) fn keep(&mut self, shard: Vec<f32>) {
        self.floats.push(shard);
    }

    /// A buffer of `count` bytes with unspecified content.
    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = self.bytes.pop().unwrap_or_default();
        bytes.resize(count, 0);
        bytes
    }
}

/// A shard whose parts are on their way to the ranks that add them up.
pub(super) struct Contribution<'a> {
    shard: Vec<f32>,
    counts: Vec<usize>,
    call: Call,
    exchange: Exchange<'a>,
}

/// A shard whose sums are on their way to all.
pub(super) struct Sums<'a> {
    shard: Vec<f32>,
    counts: Vec<usize>,
    exchange: Exchange<'a>,
}

impl<'a> Contribution<'a> {
    pub(super) fn send(
        place: Place<'a>,
        shard: Vec<f32>,
        call: Call,
        spare: &mut Spare,
    ) -> Result<Self> {
        let between = &place.0.between.comm;
        let (own, world) = (between.rank(), between.world_size());
        let counts = shares(shard.len(), world);
        let bytes = |rank: Rank, peer: Rank| match peer == own {
            true => 0,
            false => HEADER + coded_bytes(counts[rank]),
        };
        let send: Vec<usize> = (0..world).map(|peer| bytes(peer, peer)).collect();
        let recv: Vec<usize> = (0..world).map(|peer| bytes(own, peer)).collect();
        let mut coded = spare.bytes(send.iter().sum());
        let (mut values, mut rest) = (&shard[..], &mut coded[..]);
        for peer in 0..world {
            let (part, after) = values.split_at(counts[peer]);
            values = after;
            let (out, after) = rest.split_at_mut(send[peer]);
            rest = after;
            if peer != own {
                let (header, codes) = out.split_at_mut(HEADER);
                header.copy_from_slice(&call.header());
                encode(part, codes);
            }
        }
        let received = spare.bytes(recv.iter().sum());
        let nothing = Memory::empty;
        let sizes = Sizes::PerPair { send, recv };
        let request = Request::all_to_all(DataType::UInt8, nothing(), nothing(), sizes);
        Ok(Self {
            shard,
            counts,
            call,
            exchange: Exchange::start(place, request, (coded, received), spare)?,
        })
    }

    /// Adds what the others have for this rank's part, and sends the sums out.
    pub(super) fn add(self, spare: &mut Spare) -> Result<Sums<'a>> {
        let place = self.exchange.waiting.place;
        let between = &place.0.between;
        let (counts, mut shard) = (self.counts, self.shard);
        let own = between.comm.rank();
        let received = self.exchange.finish(spare)?;
        let first: usize = counts[..own].iter().sum();
        let part = &mut shard[first..first + counts[own]];
        let bytes = coded_bytes(part.len());
        let peers = (0..between.comm.world_size()).filter(|peer| *peer != own);
        for (peer, contribution) in peers.zip(received.chunks_exact(HEADER + bytes)) {
            let (header, codes) = contribution.split_at(HEADER);
            self.call.compare(header, between.ranks[peer])?;
            add_decoded(codes, part);
        }
        if self.call.average {
            let ranks = place.1.group.world() as f32;
            part.iter_mut().for_each(|value| *value /= ranks);
        }
        let mut coded = spare.bytes(bytes);
        encode(part, &mut coded);
        let bytes: Vec<usize> = counts.iter().map(|count| coded_bytes(*count)).collect();
        let all = spare.bytes(bytes.iter().sum());
        spare.bytes.push(received);
        let sizes = Sizes::PerRank(bytes);
        let request = Request::all_gather(DataType::UInt8, None, Memory::empty(), sizes);
        Ok(Sums {
            shard,
            counts,
            exchange: Exchange::start(place, request, (coded, all), spare)?,
        })
    }
}

impl Sums<'_> {
    /// The shard, the same on all ranks that have it.
    pub(super) fn finish(self, spare: &mut Spare) -> Result<Vec<f32>> {
        let mut shard = self.shard;
        let gathered = self.exchange.finish(spare)?;
        let (mut coded, mut values) = (&gathered[..], &mut shard[..]);
        for count in self.counts {
            let (part, after) = values.split_at_mut(count);
            values = after;
            let (codes, after) = coded.split_at(coded_bytes(count));
            coded = after;
            decode(codes, part);
        }
        spare.bytes.push(gathered);
        Ok(shard)
    }
}

impl Call {
    fn header(self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&(self.count as u64).to_le_bytes());
        header[8] = self.average.into();
        header
    }

    /// # Errors
    /// `Mismatch` where `peer` is in another call.
    fn compare(self, header: &[u8], peer: Rank) -> Result<()> {
        if header == self.header() {
            return Ok(());
        }
        let count = header.first_chunk().map(|count| u64::from_le_bytes(*count));
        let op = |average: bool| if average { "average" } else { "sum" };
        let error = Error::new(
            Code::Mismatch,
            format!(
                "all_reduce_int8: the {} of {} values here, the {} of {} values on rank {peer}",
                op(self.average),
                self.count,
                op(header[8] != 0),
                count.unwrap_or_default(),
            ),
        );
        Err(error.with_peer(peer))
    }
}

/// An exchange of bytes between hosts that is under way, with its memory.
struct Exchange<'a> {
    /// First, so that it is dropped before the memory.
    waiting: Waiting<'a>,
    input: Vec<u8>,
    output: Vec<u8>,
}

impl<'a> Exchange<'a> {
    fn start(
        place: Place<'a>,
        request: Request,
        (input, mut output): (Vec<u8>, Vec<u8>),
        spare: &Spare,
    ) -> Result<Self> {
        // SAFETY: both vectors go into the result, which drops them after the operation has ended; moving them does not move
        // what they hold, and nothing touches that meanwhile.
        let waiting = unsafe {
            let buffers = (Some(&input[..]), &mut output[..]);
            Waiting::begin(place, &place.0.between, request, buffers, spare.is_single)?
        };
        Ok(Self {
            waiting,
            input,
            output,
        })
    }

    /// Waits for the end, and returns what was received.
    fn finish(mut self, spare: &mut Spare) -> Result<Vec<u8>> {
        self.waiting.wait()?;
        spare.bytes.push(std::mem::take(&mut self.input));
        Ok(std::mem::take(&mut self.output))
    }
}

/// Carries out a collective of one of the groups.
pub(super) fn run<T: Element>(
    place: Place<'_>,
    part: &Part,
    request: Request,
    input: Option<&[T]>,
    output: &mut [T],
) -> Result<()> {
    // SAFETY: both are borrowed until this returns, and `Waiting` is dropped before, when the operation has ended.
    let waiting = unsafe { Waiting::begin(place, part, request, (input, output), true)? };
    waiting.wait()
}

/// A collective of one of the groups that is under way. Dropping it ends it.
struct Waiting<'a> {
    place: Place<'a>,
    part: &'a Part,
    work: Work,
}

impl<'a> Waiting<'a> {
    /// `is_driven`: the caller waits for it at once.
    ///
    /// # Safety
    /// Nothing else uses the buffers until the result has been dropped, and they stay where they are.
    unsafe fn begin<T: Element>(
        place: Place<'a>,
        part: &'a Part,
        mut request: Request,
        (input, output): (Option<&[T]>, &mut [T]),
        is_driven: bool,
    ) -> Result<Self> {
        // SAFETY: the caller's promise.
        let work = unsafe {
            request.input = input.map(|input| Memory::of(input));
            request.output = Some(Memory::of_mut(output));
            match is_driven {
                true => part.comm.begin(request),
                false => part.comm.start(request, None),
            }
        };
        let work = work.map_err(|error| part.renumber(error))?;
        Ok(Self { place, part, work })
    }

    /// Waits for the end, or until another group of the call has failed.
    fn wait(&self) -> Result<()> {
        let (level, comm) = self.place;
        loop {
            // Its end is asked for by itself: it may come just after this wait has given up.
            let _ = self.work.wait(Some(WAIT_SLICE));
            if let Some(ended) = self.work.result() {
                return ended.map_err(|error| self.part.renumber(error));
            }
            if let Some(error) = level.error(comm) {
                self.part.fail(&error);
                let _ = self.work.wait(None);
                return Err(error);
            }
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.work.is_done() {
            // Another part of the call has failed on this rank.
            self.part
                .comm
                .abort("another part of its all_reduce_int8 has failed");
            let _ = self.work.wait(None);
        }
    }
}
