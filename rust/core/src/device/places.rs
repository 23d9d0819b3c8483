//! Buffers that peers read and write where they lie, so that nothing is copied into windows.
//!
//! A rank puts data into its window for its peers alone. Where its buffer lies in a [heap](crate::transport::cuda::heap)
//! segment that the peers have mapped, it puts nothing, and tells them where the buffer is: the kernels of the peers find all
//! contributions by what each rank says of its own ([`find_places`](crate::transport::cuda::kernels::find_places)). So whether
//! a buffer is read in place is for its rank alone to decide, in each call, and the plan is the same in either case.
//!
//! A rank tells its peers of a segment when a collective first comes with a buffer in it, and uses it when all that are to read
//! it have mapped it. They do so in a call of a collective before which nothing is under way, since a driver may have a call
//! wait to map memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::engine::Request;
use crate::error::Result;
use crate::locks::Mutex;
use crate::plan::Plan;
use crate::plan::signals::Peers;
use crate::plan::windows::{InPlace, Put};
use crate::transport::cuda::driver::{Device, Pinned};
use crate::transport::cuda::flags::{Flags, Located};
use crate::transport::cuda::heap::{self, Segment, ToldSegment};
use crate::transport::cuda::kernels::MOST_ENTRIES;
use crate::transport::cuda::mappings::map;
use crate::transport::cuda::telling::Told;
use crate::transport::cuda::window::PeerWindow;
use crate::types::{Collective, Rank, ReduceOp};

use super::copies::locate;
use super::patience::Patience;

/// Bytes of an address in a table.
const ADDRESS: usize = 8;
/// How long after a failure a kernel of a peer is taken to be at work that has begun before it heard.
const LATE_WRITES: Duration = Duration::from_millis(100);
/// In which places are counted.
const UNIT: i64 = 16;

/// The ranks' mappings of each other's heaps.
pub(super) struct Places {
    device: &'static Device,
    /// For each rank, where its segments are that this rank has mapped: [`MOST_ENTRIES`] addresses.
    tables: Pinned,
    /// Held by a thread that maps.
    mapping: Mutex<()>,
    /// Peers write to this rank's buffers in some operation.
    is_written: AtomicBool,
    state: Mutex<State>,
}

struct State {
    own: Vec<Own>,
    peers: Vec<Peer>,
    patience: Patience,
}

struct Own {
    segment: ToldSegment,
    mapped_by: Peers,
}

#[derive(Default)]
struct Peer {
    /// How many of the own segments it has been told of, and has answered to.
    told: u32,
    answered: u32,
    /// How many of its segments have been looked at.
    looked_at: u32,
    mapped: Vec<Arc<PeerWindow>>,
}

/// The parts of an operation that are read in place: the place that peers are told, and the address where the half would begin.
pub(super) type FoundPlaces = InPlace<(Located, u64)>;

impl Places {
    /// Of a group of `world` ranks.
    ///
    /// # Errors
    /// `System` where the driver registers no memory.
    pub(super) fn new(device: &'static Device, world: usize) -> Result<Self> {
        let tables = Pinned::private(device, world * MOST_ENTRIES * ADDRESS)?;
        let peers = (0..world).map(|_| Peer::default()).collect();
        Ok(Self {
            device,
            tables,
            mapping: Mutex::default(),
            is_written: AtomicBool::new(false),
            state: Mutex::new(State {
                own: Vec::new(),
                peers,
                patience: Patience::default(),
            }),
        })
    }

    /// The table of a rank's segments, as the device knows it.
    pub(super) fn table(&self, rank: Rank) -> u64 {
        self.tables.address() + (rank * MOST_ENTRIES * ADDRESS) as u64
    }

    /// Takes the answers of peers, and tells them of what they have not been told of. Calls nothing of the driver.
    pub(super) fn tell(&self, flags: &Flags) {
        let State { own, peers, .. } = &mut *self.state.lock();
        if own.is_empty() {
            return;
        }
        for (rank, peer) in peers.iter_mut().enumerate() {
            let Some(telling) = flags.telling(rank) else {
                continue;
            };
            let answer = telling.answered();
            if peer.told > peer.answered && answer.number == peer.told {
                peer.answered = peer.told;
                let own = &mut own[peer.told as usize - 1];
                if answer.is_mapped {
                    own.mapped_by = own.mapped_by.union([rank].into_iter().collect());
                }
            }
            let next = own.get(peer.told as usize);
            if peer.told == peer.answered
                && let Some(Ok(record)) = next.map(|own| own.segment.record())
            {
                peer.told += 1;
                telling.tell(peer.told, &record);
            }
        }
    }

    /// Whether a peer has told of memory that has not been looked at.
    pub(super) fn lacks_something(&self, flags: &Flags) -> bool {
        let state = self.state.lock();
        let mut peers = state.peers.iter().enumerate();
        peers.any(|(rank, peer)| {
            let heard = flags.heard(rank);
            heard.is_some_and(|heard| heard.number() > peer.looked_at)
        })
    }

    /// Whether kernels of peers may still write to this rank's buffers so long after the group has failed. None begins to once
    /// this rank has marked that it has failed, which each looks at first.
    pub(super) fn may_be_written(&self, since: Duration) -> bool {
        self.is_written.load(Ordering::Relaxed) && since < LATE_WRITES
    }

    /// Until when a call may wait for a moment at which it can [map](Self::map) something.
    pub(super) fn patience(&self) -> Option<Instant> {
        self.state.lock().patience.next()
    }

    /// Maps what peers have told of. To be called while nothing is under way.
    pub(super) fn map(&self, flags: &Flags) {
        let _one = self.mapping.lock();
        let world = self.state.lock().peers.len();
        for rank in 0..world {
            let Some(heard) = flags.heard(rank) else {
                continue;
            };
            let Some((number, record)) = heard.told() else {
                continue;
            };
            let is_new = number == self.state.lock().peers[rank].looked_at + 1;
            if !is_new || number as usize > MOST_ENTRIES {
                continue;
            }
            let mapped = map(self.device, &record);
            let is_mapped = mapped.is_ok();
            let mut state = self.state.lock();
            let peer = &mut state.peers[rank];
            peer.looked_at = number;
            match mapped {
                Ok(window) => {
                    self.enter((rank, number), window.half(0));
                    peer.mapped.push(window);
                }
                Err(error) => tracing::debug!(
                    "buffers of rank {rank} on device {} go through its window: {error}",
                    self.device.number()
                ),
            }
            drop(state);
            heard.answer(Told { number, is_mapped });
        }
    }

    /// Unmaps the peers' memory. Peers may use the segments that they have been told of until the result is dropped.
    /// `is_clean`: no stream of this rank will look into the tables.
    pub(super) fn close_peers(self, is_clean: bool) -> impl Send {
        let State { own, peers, .. } = self.state.into_inner();
        drop(peers);
        if is_clean {
            self.tables.give_back();
        }
        own
    }

    /// Puts an address into a rank's table.
    fn enter(&self, (rank, number): (Rank, u32), address: u64) {
        let at = (rank * MOST_ENTRIES + number as usize - 1) * ADDRESS;
        let halves = [address as u32, (address >> 32) as u32];
        for (half, value) in halves.into_iter().enumerate() {
            self.tables
                .word(at + 4 * half)
                .store(value, Ordering::Release);
        }
    }

    /// The parts of `plan` that happen where the buffers lie; the number `operation` tells it from others. A segment that peers
    /// have not been told of is noted, to be announced, and is not used yet.
    pub(super) fn in_place(&self, plan: &Plan, request: &Request, operation: u32) -> FoundPlaces {
        let is_multiplied = matches!(request.op, Some(ReduceOp::PremulSum(_)));
        let found = InPlace::find(plan, request.collective, |put, to| match is_multiplied {
            true => None,
            false => self.locate(put, request, (to, operation)),
        });
        if request.collective == Collective::AllReduce && found.is_any() {
            self.is_written.store(true, Ordering::Relaxed);
        }
        found
    }

    /// Where the window would begin that has this part of a buffer where it is put.
    fn locate(
        &self,
        put: &Put,
        request: &Request,
        (to, operation): (Peers, u32),
    ) -> Option<(Located, u64)> {
        let size = request.dtype.size();
        let bytes = put.src.len * size;
        let (memory, offset) = locate(request, put.src).ok()?;
        let (address, run) = memory.place(offset, bytes);
        let address = address as u64;
        if run < bytes || bytes == 0 {
            return None;
        }
        let segment = heap::find(address, bytes as u64)?;
        let begin = address.wrapping_sub((put.at * size) as u64);
        let before = begin.wrapping_sub(segment.address()).cast_signed();
        let units = i32::try_from(before / UNIT).ok()?;
        let entry = self.entry(&segment, to)?;
        let located = Located {
            entry,
            units,
            operation,
        };
        (before % UNIT == 0).then_some((located, begin))
    }

    /// The number of a segment that all of `to` have mapped. One that they have not been told of is noted.
    fn entry(&self, segment: &Arc<Segment>, to: Peers) -> Option<u32> {
        let mut state = self.state.lock();
        let is_it = |own: &Own| own.segment.is(segment);
        let Some(at) = state.own.iter().position(is_it) else {
            if state.own.len() < MOST_ENTRIES {
                state.own.push(Own {
                    segment: ToldSegment::new(Arc::clone(segment)),
                    mapped_by: Peers::none(),
                });
            }
            return None;
        };
        let mapped_by = state.own[at].mapped_by;
        let is_mapped = to.iter().all(|peer| mapped_by.contains(peer));
        is_mapped.then_some(at as u32 + 1)
    }
}
