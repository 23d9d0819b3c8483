//! The parts of a device group, for the files that carry out, watch and end its operations.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::RwLock;

use crate::engine::{Fingerprint, Group, GroupId, WorkState};
use crate::error::Error;
use crate::locks::Mutex;
use crate::plan::Plan;
use crate::plan::signals::Peers;
use crate::transport::cuda::driver::{Device, StreamIdentity};

use super::direct::{Direct, Plans};
use super::messages::Messages;
use super::staged::Staged;
use super::words::Words;

/// How long after a failure operations end although their streams have not got past them.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// How long after a failure streams are not let pass because an operation of the host has not ended.
pub(super) const HOST_PATIENCE: Duration = Duration::from_secs(2);

/// Those of this process whose way has been found, for ranks that share it.
pub(super) static HERE: Mutex<Vec<(GroupId, Weak<DeviceGroup>)>> = Mutex::new(Vec::new());

/// The operations of one communicator on one device.
pub(crate) struct DeviceGroup {
    pub(super) device: &'static Device,
    pub(super) parent: Arc<Group>,
    /// All ranks of the parent, for what the device layer has them do on the host.
    pub(super) cpu: Arc<Group>,
    pub(super) words: Words,
    /// Found at the first collective; gone when it has been taken down.
    pub(super) way: RwLock<Option<Arc<Way>>>,
    /// Held by the thread that finds it.
    pub(super) forming: Mutex<()>,
    pub(super) queue: Mutex<Queue>,
    pub(super) board: Mutex<Board>,
    pub(super) messages: Messages,
    pub(super) failure: OnceLock<(Error, Instant)>,
    /// When it was closed.
    pub(super) closed: OnceLock<Instant>,
    /// Operations have become part of graphs, which may be replayed at any time.
    pub(super) captured: AtomicBool,
    pub(super) health: Arc<Health>,
    pub(super) rest: Rest,
}

/// State that submissions share.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) number: u64,
    /// The last collective that is no part of a graph.
    pub(super) last: u64,
    /// Its stream, if that is known.
    pub(super) stream: Option<StreamIdentity>,
    pub(super) plans: Plans,
    /// Steps of all plans so far, by which their waits are numbered.
    pub(super) steps: u32,
}

/// The operations that are under way.
#[derive(Default)]
pub(super) struct Board {
    pub(super) pending: VecDeque<Pending>,
    /// The number of the last one that was put here.
    pub(super) last: u64,
    pub(super) looked: Option<Instant>,
    /// When it was last asked whether the device still works.
    pub(super) asked: Option<Instant>,
    pub(super) replays: Replays,
    /// Calls that are in the middle of putting something into a stream.
    pub(super) calls: usize,
    /// A stream holds a part of a collective that could not be enqueued as a whole, and will not say when it has got past it.
    pub(super) is_torn: bool,
    /// No call comes in any more.
    pub(super) is_closing: bool,
}

/// A collective that a stream has not got past.
pub(super) struct Pending {
    pub(super) work: Arc<WorkState>,
    pub(super) number: u64,
    pub(super) stream: Option<StreamIdentity>,
    pub(super) print: Fingerprint,
    /// Of the direct way.
    pub(super) plan: Option<Arc<Plan>>,
    /// The number of the wait that the plan's first step would be.
    pub(super) first_wait: u32,
    /// Peers whose announcement has not been compared.
    pub(super) unheard: Peers,
}

/// How the collectives of a group reach the other ranks.
pub(super) enum Way {
    Direct(Direct),
    Staged(Staged),
}

impl Way {
    /// The way through host memory, if anything takes it.
    pub(super) fn staged(&self) -> Option<&Staged> {
        match self {
            Self::Direct(direct) => direct.brief.as_deref(),
            Self::Staged(staged) => Some(staged),
        }
    }
}

/// The health of the device, which a separate thread finds out.
#[derive(Default)]
pub(super) struct Health {
    pub(super) being_asked: AtomicBool,
    /// Why nothing on it works any more in this process.
    pub(super) lost: OnceLock<Error>,
}

/// The end of what graphs may be doing, once the group is closed.
#[derive(Default)]
pub(super) struct Rest {
    pub(super) is_awaited: AtomicBool,
    pub(super) has_come: Arc<AtomicBool>,
}

/// Captured collectives that are remembered by name; older ones are watched all the same.
const REMEMBERED: usize = 1 << 14;

/// Of the collectives of a group that are part of graphs.
#[derive(Default)]
pub(super) struct Replays {
    pub(super) captured: VecDeque<Captured>,
    /// Where a replay was last seen waiting, and since when.
    pub(super) waits: Option<(Place, Instant)>,
}

/// A collective that is part of a graph.
pub(super) struct Captured {
    pub(super) work: Arc<WorkState>,
    pub(super) number: u64,
    pub(super) plan: Arc<Plan>,
}

/// A captured collective and its step, as streams write them.
pub(super) type Place = (u32, u32);

impl Replays {
    pub(super) fn remember(&mut self, work: &Arc<WorkState>, number: u64, plan: &Arc<Plan>) {
        if self.captured.len() >= REMEMBERED {
            self.captured.pop_front();
        }
        self.captured.push_back(Captured {
            work: Arc::clone(work),
            number,
            plan: Arc::clone(plan),
        });
    }

    /// How long a replay has waited at `place`.
    pub(super) fn waited(&mut self, place: Place, now: Instant) -> Duration {
        match self.waits {
            Some((at, since)) if at == place => now.saturating_duration_since(since),
            _ => {
                self.waits = Some((place, now));
                Duration::ZERO
            }
        }
    }
}
