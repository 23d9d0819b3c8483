//! The direct way: ranks of one host whose devices read each other's windows. An operation is enqueued whole on the
//! caller's stream; ranks meet there by words in pages that they share, and no host waits for anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustc_hash::FxHashMap;

use crate::engine::{PlanKey, Request, Sizes};
use crate::error::{Error, Result};
use crate::plan::signals::{HALVES, Semaphore};
use crate::plan::windows::{self, Room, Shots};
use crate::plan::{Plan, Shape, Step};
use crate::transport::cuda::flags::{Flags, Signal, Spot};
use crate::transport::cuda::window::Windows;
use crate::types::{Collective, Rank, ReduceOp};

use super::places::{FoundPlaces, Places};
use super::staged::Staged;

/// Work on memory is fastest from multiples of this number of bytes on.
const ALIGNMENT: usize = 16;

/// From this size on two shots are better where they save anything, and from that between two ranks.
const TWO_SHOTS_FROM: usize = 256 << 10;
const TWO_SHOTS_OF_TWO_FROM: usize = 1 << 20;

/// From this number of bytes on, ranks read each other's buffers in place, where they can: of a rank's input or output,
/// whichever has the same length on all ranks.
const IN_PLACE_FROM: usize = 256 << 10;

/// Plans kept for reuse; beyond it the cache starts anew.
const CACHED_PLANS: usize = 256;

/// Bytes of the longest buffer of a collective that goes through host memory where processes share a device. On an H200 with 16
/// cores an all_reduce of 512 KiB between 2 ranks takes 0.20 ms so and 0.18 ms through windows at the rate of many calls, and
/// 0.24 and 0.45 ms where each call is waited for; 1 MiB between 4 ranks 0.52 and 0.55 ms, and 0.56 and 1.08 ms.
fn most_brief(world: usize) -> usize {
    (256 << 10) * world.min(4)
}

/// How often the ranks meet in vain for longer windows before they do no more.
const PUT_OFF: usize = 16;

/// Bytes of a slot for them: the longest fits one.
pub(super) fn brief_slot(world: usize) -> usize {
    2 * most_brief(world)
}

/// About what a device could move in the time in which it goes from one process to another (an H200: 0.14 ms at 4.2 TB/s).
const BYTES_PER_SWITCH: usize = 512 << 20;

/// The state of a group that goes the direct way.
pub(super) struct Direct {
    pub(super) flags: Arc<Flags>,
    /// `None` in a world of one.
    pub(super) windows: Option<Arc<Windows>>,
    /// The ranks' mappings of each other's memory besides windows; `None` in a world of one.
    pub(super) places: Option<Arc<Places>>,
    /// Those from before: operations may be under way in them, and graphs use them as long as there are any.
    pub(super) older: Vec<Arc<Windows>>,
    /// For short collectives, where processes share a device: no copy there waits for this process's turn.
    pub(super) brief: Option<Arc<Staged>>,
    /// Bytes of a half.
    pub(super) half: usize,
    /// The most that a half may become; the same on all ranks.
    pub(super) most: AtomicUsize,
    /// How often growing was put off, which is the same on all ranks.
    pub(super) put_off: AtomicUsize,
    /// How many devices the ranks have together.
    pub(super) devices: usize,
    /// Several processes use one of them, so that their work takes turns there.
    pub(super) takes_turns: bool,
}

/// Plans by what they were made from.
pub(super) type Plans = FxHashMap<PlanKey, Arc<Plan>>;

impl Direct {
    /// The plan of a request, and which shots it takes; the same on all ranks.
    ///
    /// # Errors
    /// `Internal` for what should have been refused before.
    pub(super) fn plan(
        &self,
        request: &Request,
        shape: &Shape,
        plans: &mut Plans,
    ) -> Result<Arc<Plan>> {
        let size = request.dtype.size();
        let premultiplied = matches!(request.op, Some(ReduceOp::PremulSum(_)));
        let key = PlanKey::of(shape, (size, request.partial().size())).map(|key| PlanKey {
            premultiplied,
            ..key
        });
        if let Some(plan) = key.as_ref().and_then(|key| plans.get(key)) {
            return Ok(Arc::clone(plan));
        }
        let align = (ALIGNMENT / size).max(1);
        let room = Room {
            half: self.half / size,
            align,
        };
        let shots = self.shots(request, shape);
        let plan = windows::build(shape, &room, shots, premultiplied).ok_or_else(|| {
            Error::internal(format!("no plan over windows for {}", request.collective))
        })?;
        let plan = Arc::new(plan);
        if let Some(key) = key {
            if plans.len() >= CACHED_PLANS {
                plans.clear();
            }
            plans.insert(key, Arc::clone(&plan));
        }
        Ok(plan)
    }

    /// Counted in what crosses the memory of one device, or the wires between several.
    fn shots(&self, request: &Request, shape: &Shape) -> Shots {
        let world = shape.world;
        let bytes = even_bytes(request, 1).unwrap_or(0);
        match request.collective {
            Collective::AllReduce if self.takes_turns && self.devices == 1 => {
                // A second meeting costs a device about half a turn more for each chunk. Of that chunk the ranks move
                // 6 world - 4 times its bytes then, and world (world + 3) times in one shot.
                let saved = bytes.min(self.half) * (world.pow(2) + 4).saturating_sub(3 * world);
                match 2 * saved >= BYTES_PER_SWITCH {
                    true => Shots::ByFirst,
                    false => Shots::One,
                }
            }
            Collective::AllReduce if world == 2 && bytes >= TWO_SHOTS_OF_TWO_FROM => Shots::Two,
            Collective::AllReduce if world > 2 && bytes >= TWO_SHOTS_FROM => Shots::Two,
            // Between devices, a root's wire is the bottleneck; within one there is none.
            Collective::Reduce | Collective::Broadcast
                if world > 2 && self.devices > 1 && bytes >= TWO_SHOTS_FROM =>
            {
                Shots::Two
            }
            _ => Shots::One,
        }
    }

    /// Whether ranks may read the buffers of others in place in this operation, which is the same on all ranks: each rank looks
    /// there whether they are to.
    pub(super) fn is_in_place(&self, request: &Request, shape: &Shape) -> bool {
        let is_long = even_bytes(request, 1).is_some_and(|bytes| bytes >= IN_PLACE_FROM);
        let is_apart = match request.collective {
            // In one shot a rank writes its output while others read its input, which may be the same.
            Collective::AllReduce => self.shots(request, shape) != Shots::One,
            Collective::Scan | Collective::Exscan => false,
            // To wait until all have read costs ranks that take turns more than the copy (an H200: 64 MiB between 4 ranks 1.18
            // and 0.77 ms).
            Collective::AllGather | Collective::AllToAll => !self.takes_turns,
            _ => true,
        };
        is_long && is_apart && self.places.is_some()
    }

    /// The parts of an operation, announced as `print`, that happen where this rank's buffers lie, and the number that tells it
    /// from other operations; `None` where ranks read windows alone.
    pub(super) fn in_place(
        &self,
        plan: &Plan,
        (request, shape): (&Request, &Shape),
        print: &[u8],
    ) -> Option<(FoundPlaces, u32)> {
        let places = self.places.as_deref();
        let places = places.filter(|_| self.is_in_place(request, shape))?;
        let operation = number_of(print);
        let found = places.in_place(plan, request, operation);
        places.tell(&self.flags);
        Some((found, operation))
    }

    /// The staged way that carries out `request` through host memory, if that is better; `None` for counts that not every rank
    /// knows.
    pub(super) fn brief(&self, request: &Request, world: usize) -> Option<&Staged> {
        let bytes = longest_buffer(request, world)?;
        let is_brief = (1..=most_brief(world)).contains(&bytes);
        self.brief.as_deref().filter(|_| is_brief)
    }

    /// How long a half should become before `request` is enqueued, if it is too short for it and may grow: where processes
    /// share a device, each chunk costs it a turn of every rank or, under MPS, the host some calls of the driver. Counts that
    /// not every rank knows say nothing.
    pub(super) fn wanted(&self, request: &Request, world: usize) -> Option<usize> {
        let blocks = match request.collective.gives_blocks() {
            true => world,
            false => 1,
        };
        let bytes = even_bytes(request, blocks)?;
        let most = self.most.load(Ordering::Relaxed);
        let wanted = bytes.checked_next_power_of_two().unwrap_or(most).min(most);
        (bytes > self.half && wanted > self.half).then_some(wanted)
    }

    /// Bytes of this rank's windows.
    pub(super) fn bytes(&self) -> usize {
        let windows = self.older.iter().chain(&self.windows);
        windows
            .map(|windows| HALVES * windows.own().half_bytes())
            .sum()
    }

    /// Notes that the windows could not grow this time. To be called on all ranks alike.
    pub(super) fn put_off(&self) {
        if self.put_off.fetch_add(1, Ordering::Relaxed) >= PUT_OFF {
            self.stay();
        }
    }

    /// Lets the windows stay as they are. To be called on all ranks alike.
    pub(super) fn stay(&self) {
        self.most.store(self.half, Ordering::Relaxed);
    }

    /// The ranks that the stream waits for at `step` of a captured plan, and in words for what.
    pub(super) fn missing(&self, step: &Step, number: u64) -> (Vec<Rank>, &'static str) {
        let Step::Wait {
            half, what, from, ..
        } = *step
        else {
            return (Vec::new(), "");
        };
        let (signal, spot) = flag_of(half, number, what);
        (self.flags.missing(signal, spot, from.iter()), purpose(what))
    }

    /// Where a stream is in operation number `number`, which it has not got past, as its words say.
    pub(super) fn progress(&self, plan: &Plan, number: u64, first_wait: u32) -> Progress {
        let end = first_wait.wrapping_add(plan.steps.len() as u32);
        let mut has_begun = false;
        for (index, step) in plan.steps.iter().enumerate() {
            let Step::Wait {
                half,
                what,
                from,
                take,
            } = *step
            else {
                continue;
            };
            let (signal, spot) = flag_of(half, number, what);
            // Words are used again within an operation, so that a later wait may have left its own.
            let waits = first_wait.wrapping_add(index as u32)..end;
            let missing = self.flags.missing_before(signal, spot, from.iter(), &waits);
            if !missing.is_empty() {
                return Progress::WaitsFor(missing, purpose(what));
            }
            let takes = take.iter().next().is_some();
            let has_waited = self.flags.has_waited(signal, spot, take.iter(), &waits);
            match (takes && !has_waited, has_begun) {
                // None is missing, and it has not come there.
                (true, true) => return Progress::Works,
                (true, false) => return Progress::Before,
                _ => has_begun |= has_waited,
            }
        }
        match has_begun {
            true => Progress::Works,
            false => Progress::Unknown,
        }
    }
}

/// A number that tells an announcement from others: FNV-1a, of 32 bits.
fn number_of(print: &[u8]) -> u32 {
    print.iter().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}

/// Bytes of the longest buffer of any rank, where each rank knows that.
fn longest_buffer(request: &Request, world: usize) -> Option<usize> {
    even_bytes(request, request.collective.blocks(world))
}

/// Bytes of `blocks` blocks, where all have the same length, which each rank knows.
fn even_bytes(request: &Request, blocks: usize) -> Option<usize> {
    match request.sizes {
        Sizes::Even(count) => count.checked_mul(request.dtype.size())?.checked_mul(blocks),
        _ => None,
    }
}

/// How far a stream is in an operation.
pub(super) enum Progress {
    /// Its words do not tell: it waits for nothing that it clears.
    Unknown,
    /// It has not come to it.
    Before,
    /// At a wait for these ranks, or before it; in words, for what.
    WaitsFor(Vec<Rank>, &'static str),
    /// It waits for none.
    Works,
}

/// For what a semaphore is awaited.
fn purpose(what: Semaphore) -> &'static str {
    match what {
        Semaphore::Empty => "to have read what this rank left",
        Semaphore::Contributions => "to contribute",
        Semaphore::Results => "to finish its part",
    }
}

/// Which flags are a semaphore's. Operations begin with the halves in turn.
pub(super) fn flag_of(half: usize, number: u64, what: Semaphore) -> (Signal, Spot) {
    let (signal, meeting) = match what {
        Semaphore::Contributions => (Signal::Full, 0),
        Semaphore::Results => (Signal::Full, 1),
        Semaphore::Empty => (Signal::Empty, 0),
    };
    let half = half_of(half, number);
    (signal, Spot { half, meeting })
}

pub(super) fn half_of(half: usize, number: u64) -> usize {
    (half + (number % HALVES as u64) as usize) % HALVES
}
