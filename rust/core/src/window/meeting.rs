//! How the ranks of a window meet: those of one host map each other's memory, and each tells all of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::held::{Copies, Held, OnDevice};
use super::peer::{Far, Near, Peer, Turn};
use super::state::take_back;
use crate::buffer::Memory;
use crate::communicator::{Communicator, Work};
use crate::engine::PointToPoint;
use crate::error::{Code, Error, Result};
use crate::heap::{self, Place};
use crate::one_sided::{Owner, Port, RemoteRegion};
use crate::transport::cuda::driver::Stream;
use crate::transport::cuda::span::{self, Span};
use crate::transport::ends::{End, await_unmapping, keep_while_viewed};
use crate::types::{DataType, Rank};

/// The tag of the messages by which ranks of one host meet, and tell that they have heard of each other's memory.
const MEETING: u64 = 1;

/// Numbers in the description of a rank's memory.
pub(super) const NUMBERS: usize = 7;

/// More bytes than are written about a rank's memory.
const MOST_WORDS: u64 = 1 << 20;

/// The memory of all ranks, the port by which the own one is reached, and the means to copy.
pub(super) type Met = (Vec<Arc<Peer>>, Option<Port>, Copies);

/// The memory of this rank, while a window of it is made.
pub(super) struct Exposed<'a> {
    pub(super) start: usize,
    pub(super) bytes: usize,
    pub(super) dtype: DataType,
    pub(super) note: &'a [u8],
    /// Of memory of a device.
    pub(super) exposed: Option<Arc<span::Exposed>>,
    pub(super) owner: Arc<Owner>,
}

impl Exposed<'_> {
    /// Exchanges with all ranks what each has of the others' memory.
    pub(super) fn meet(&self, comm: &Communicator) -> Result<Met> {
        let (world, own) = (comm.world_size(), comm.rank());
        let hosts = comm.group().host_of();
        let near: Vec<Rank> = (0..world)
            .filter(|rank| *rank != own && hosts[*rank] == hosts[own])
            .collect();
        self.meet_all(comm, &near).inspect_err(|_| {
            // Another rank may have its window, and use it.
            let pages = near
                .iter()
                .map(|rank| comm.group().page_and_end(*rank).zip(Some(*rank)));
            let ends = pages
                .flatten()
                .map(|((page, is_gone), rank)| (End::new(page, own < rank), is_gone));
            let ends: Vec<_> = ends.collect();
            let all = ends.iter().map(|(end, is_gone)| (end, is_gone));
            take_back(all.clone(), (self.start, self.bytes));
            if self.exposed.is_some() {
                await_unmapping(all);
            }
            keep_while_viewed(ends, Box::new(Arc::clone(&self.owner)));
        })
    }

    fn meet_all(&self, comm: &Communicator, near: &[Rank]) -> Result<Met> {
        let world = comm.world_size();
        let is_reached = self.meet_those_near(comm, near)?;
        let is_everywhere = is_reached && near.len() + 1 == world;
        let port = match self.bytes > 0 && !is_everywhere {
            true => Some(self.open_port(comm)?),
            false => None,
        };
        let described = self.describe(comm, port.as_ref())?;
        let copies = self.copies(&described)?;
        let peers = described.into_iter().enumerate().map(|(rank, it)| {
            let near = match near.contains(&rank) {
                true => it.find(comm, rank, &copies),
                false => None,
            };
            Arc::new(Peer {
                bytes: it.bytes,
                dtype: it.dtype,
                note: it.note,
                near,
                far: it
                    .far
                    .map(|(remote, invitation)| Far::new(remote, invitation)),
                turn: Turn::default(),
            })
        });
        Ok((peers.collect(), port, copies))
    }

    /// The means to copy. A rank without memory of a device works on the first one that it sees of those on which others have
    /// theirs.
    fn copies(&self, described: &[Description]) -> Result<Copies> {
        let stream = match &self.exposed {
            Some(own) => Some(Stream::create(own.span().device()?)?),
            None => {
                let mut of_others = described.iter().filter_map(|it| it.span.as_ref());
                let seen = of_others.find_map(|span| span.device().ok());
                // Without one its window is as good for memory of the host.
                seen.and_then(|device| Stream::create(device).ok())
            }
        };
        Ok(Copies(stream.map(Arc::new)))
    }

    /// Opens the links to the ranks of this host, and has them map the memory. Returns whether all of them reach it.
    fn meet_those_near(&self, comm: &Communicator, near: &[Rank]) -> Result<bool> {
        let group = comm.group();
        let begun = near.iter().map(|rank| start_meeting(comm, *rank));
        for (sent, received) in begun.collect::<Result<Vec<_>>>()? {
            received.wait(None)?;
            sent.wait(None)?;
        }
        // Each rank says to the others when it has all answers, and reads on until all have said so.
        let begun = near.iter().map(|rank| await_meeting(comm, *rank));
        let heard = begun.collect::<Result<Vec<_>>>()?;
        let until = Instant::now() + comm.config().join_timeout.duration();
        let mut answer = None;
        loop {
            if answer.is_none() {
                let asked = near.iter().map(|rank| match self.bytes {
                    0 => Some(true),
                    // That shows when the others map it.
                    _ if self.exposed.is_some() => Some(false),
                    bytes => group.is_reached(*rank, (self.start, bytes)),
                });
                let all = |all: Option<bool>, one: Option<bool>| {
                    all.zip(one).map(|(all, one)| all && one)
                };
                // All are asked at the same time.
                answer = asked.fold(Some(true), all);
                if answer.is_some() {
                    near.iter().try_for_each(|rank| tell_meeting(comm, *rank))?;
                }
            }
            if let Some(answer) = answer
                && heard.iter().all(Work::is_done)
            {
                heard.iter().try_for_each(|work| work.wait(None))?;
                return Ok(answer);
            }
            // This reads what the others say on all links.
            if let Some(error) = group.lost(|_| true) {
                return Err(error);
            }
            if Instant::now() > until {
                let what = "the ranks of this host have not mapped each other's memory in time";
                return Err(Error::new(Code::Timeout, what));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// A port by which the memory is reached.
    fn open_port(&self, comm: &Communicator) -> Result<Port> {
        let port = Port::new(comm.config().clone())?;
        port.bind()?;
        Ok(port)
    }

    /// Tells all ranks of the memory, and hears of theirs.
    fn describe(&self, comm: &Communicator, port: Option<&Port>) -> Result<Vec<Description>> {
        let far = match port {
            Some(port) => Some((self.region(port)?, port.bind()?)),
            None => None,
        };
        let own = Description {
            bytes: self.bytes,
            dtype: self.dtype,
            note: self.note.to_vec(),
            place: heap::locate(std::ptr::without_provenance(self.start), self.bytes),
            span: self.exposed.as_ref().map(|it| it.span().clone()),
            far,
        };
        let (numbers, mut words) = own.write();
        let world = comm.world_size();
        let mut all = vec![0_u64; NUMBERS * world];
        comm.all_gather(&numbers, &mut all)?;
        let longest = all
            .chunks_exact(NUMBERS)
            .map(|numbers| numbers[NUMBERS - 1]);
        let longest = longest.max().unwrap_or(0);
        if longest > MOST_WORDS {
            return Err(untrusted());
        }
        let longest = longest as usize;
        words.resize(longest, 0);
        let mut texts = vec![0_u8; longest * world];
        comm.all_gather(&words, &mut texts)?;
        let each = all.chunks_exact(NUMBERS).enumerate();
        each.map(|(rank, numbers)| {
            let text = &texts[rank * longest..][..longest];
            Description::read(numbers, text).ok_or_else(|| untrusted().with_peer(rank))
        })
        .collect()
    }

    fn region(&self, port: &Port) -> Result<RemoteRegion> {
        let start = std::ptr::with_exposed_provenance_mut(self.start);
        let owner: Owner = Box::new(Arc::clone(&self.owner));
        // SAFETY: the maker of the window promised it of the memory and its owner.
        let region = unsafe { port.register(start, self.bytes, owner)? };
        port.remote(&region)
    }
}

/// The memory of a rank, as it tells of it.
pub(super) struct Description {
    bytes: usize,
    dtype: DataType,
    note: Vec<u8>,
    place: Option<Place>,
    /// Of memory of a device.
    span: Option<Span>,
    /// For ranks that do not map it: the memory, and the invitation of the port that leads to it.
    far: Option<(RemoteRegion, Vec<u8>)>,
}

impl Description {
    /// As it travels: numbers, and words, whose length the last number is.
    pub(super) fn write(&self) -> ([u64; NUMBERS], Vec<u8>) {
        let mut words = self.note.clone();
        let span = self.span.as_ref().map(Span::encode).unwrap_or_default();
        words.extend(&span);
        if let Some((remote, invitation)) = &self.far {
            words.extend(remote.to_bytes());
            words.extend(invitation);
        }
        let place = self.place;
        let numbers = [
            self.bytes as u64,
            u64::from(self.dtype as u8),
            place.map_or(0, |place| u64::from(place.segment)),
            place.map_or(0, |place| place.offset),
            self.note.len() as u64,
            span.len() as u64,
            words.len() as u64,
        ];
        (numbers, words)
    }

    /// `None` for what no rank of this version tells. The words are followed by zeros where another rank has more of them.
    pub(super) fn read(numbers: &[u64], words: &[u8]) -> Option<Self> {
        let [bytes, dtype, segment, offset, note, span, length] =
            *<&[u64; NUMBERS]>::try_from(numbers).ok()?;
        let bytes = usize::try_from(bytes).ok()?;
        let (words, zeros) = words.split_at_checked(usize::try_from(length).ok()?)?;
        let (note, rest) = words.split_at_checked(usize::try_from(note).ok()?)?;
        let (span, rest) = rest.split_at_checked(usize::try_from(span).ok()?)?;
        let span = match span.is_empty() {
            true => None,
            false => Some(Span::decode(span)?),
        };
        let far = match rest.split_first_chunk::<{ RemoteRegion::BYTES }>() {
            Some((region, invitation)) => {
                Some((RemoteRegion::from_bytes(region).ok()?, invitation.to_vec()))
            }
            None => None,
        };
        let place = (segment != 0).then_some(Place {
            segment: u32::try_from(segment).ok()?,
            offset,
        });
        let is_told = isize::try_from(bytes).is_ok()
            && zeros.iter().all(|byte| *byte == 0)
            && (far.is_some() || rest.is_empty())
            && far.as_ref().is_none_or(|(it, _)| it.len() == bytes as u64)
            && span.as_ref().is_none_or(|it| it.bytes() == bytes as u64)
            && (span.is_none() || place.is_none())
            && (place.is_some() || offset == 0);
        is_told.then_some(Self {
            bytes,
            dtype: DataType::from_number(u8::try_from(dtype).ok()?)?,
            note: note.to_vec(),
            place,
            span,
            far,
        })
    }

    /// The memory of a rank on this host, as far as it is mapped here.
    fn find(&self, comm: &Communicator, rank: Rank, copies: &Copies) -> Option<Near> {
        let group = comm.group();
        let (page, is_gone) = group.page_and_end(rank)?;
        let end = End::new(page, comm.rank() < rank);
        let held = match (self.place.filter(|_| self.bytes > 0), &self.span) {
            // One that has not been announced was refused a descriptor, and is reached by its port.
            (Some(place), _) => {
                let held = group.reach(rank, place, self.bytes).unwrap_or_default();
                let held = held.filter(heap::Held::is_writable).map(Held::Host);
                held.ok_or_else(elsewhere)
            }
            (None, Some(span)) => OnDevice::open(span, &end, copies).map(Held::on_device),
            (None, None) => Err(elsewhere()),
        };
        if let (Err(error), Some(_)) = (&held, &self.span) {
            let peer = group.name_of(rank);
            tracing::warn!(%error, peer, "memory of a device is not mapped, and is reached through that of the host");
        }
        Some(Near { end, is_gone, held })
    }
}

/// Why memory of the host is not mapped.
fn elsewhere() -> Error {
    Error::unsupported(
        "it does not lie in the shared heap of its process: allocate it by unisono.empty(), unisono_mem_alloc() or \
         allocateTensor",
    )
}

#[cold]
fn untrusted() -> Error {
    let what = "a rank tells of its memory what no rank of this version tells";
    Error::new(Code::Untrusted, what)
}

fn start_meeting(comm: &Communicator, rank: Rank) -> Result<(Work, Work)> {
    // SAFETY: it has no memory.
    let sent = unsafe {
        comm.send(
            DataType::UInt8,
            Memory::empty(),
            rank,
            MEETING,
            PointToPoint::default(),
        )?
    };
    Ok((sent, await_meeting(comm, rank)?))
}

fn await_meeting(comm: &Communicator, rank: Rank) -> Result<Work> {
    let options = PointToPoint::default();
    // SAFETY: it has no memory.
    unsafe {
        comm.receive(
            DataType::UInt8,
            Memory::empty(),
            Some(rank),
            MEETING,
            options,
        )
    }
}

fn tell_meeting(comm: &Communicator, rank: Rank) -> Result<()> {
    let options = PointToPoint::default();
    // SAFETY: it has no memory.
    unsafe { comm.send(DataType::UInt8, Memory::empty(), rank, MEETING, options) }.map(drop)
}
