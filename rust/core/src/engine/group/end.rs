//! The end of a group: by a failure, which ends every operation on every rank, or in good order.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::{Code, Error};
use crate::fence::contained;
use crate::transport::{Notice, WRITERS_PATIENCE};

use crate::engine::collective::shared::SharedMemory;
use crate::engine::links::LinkTable;
use crate::engine::reports::notice;
use crate::engine::state::{Core, Group};

/// How long a group that closes waits for what it has sent to arrive: as long as a peer may take to hear of the farewell and
/// to stop sending.
pub(crate) const LINGER: Duration = Duration::from_millis(250);

/// How long a rank that leaves waits at most until what it sent has been acknowledged, from when its connections were last
/// mended. A connection that has broken on the way
/// shows it sooner, once the system has sent the same bytes again.
const SETTLE: Duration = Duration::from_secs(1);

/// A group that leaves, and waits for its links.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parting {
    begun: Instant,
    /// When it last had a connection that is to be made again.
    mended: Instant,
}

impl Parting {
    pub(crate) fn begin(now: Instant) -> Self {
        Self {
            begun: now,
            mended: now,
        }
    }
}

impl Group {
    /// The group has failed: every operation fails with the first cause, and the other ranks get a notice.
    pub(crate) fn fail(&self, core: &mut Core, error: Error) {
        let error = self.membership.members.clarify(error);
        let notice = notice(&error, (self.rank, &self.own_number()));
        self.fail_with(core, error, &notice);
    }

    /// As [`Group::fail`], passing on another rank's notice.
    pub(crate) fn fail_with(&self, core: &mut Core, error: Error, notice: &Notice) {
        if self.failure.set((error.clone(), notice.clone())).is_err() {
            return;
        }
        tracing::info!(rank = self.rank, error = %error, "the group has failed");
        // First of all: it revokes what is lent, before the memory of the operations can be used for anything else. A
        // link that panics keeps neither the others from it nor the operations from their end.
        for (_, _, open) in core.links.iter_open() {
            let _ = contained(|| open.link.send_abort(notice));
        }
        let until = self.clock.now() + WRITERS_PATIENCE;
        for (_, _, open) in core.links.iter_open() {
            let _ = contained(|| open.link.as_neighbour(|peer| peer.await_writer(until)));
        }
        core.ended_before_failure = Some(core.ended());
        // Each operation's error names the operation itself.
        let each = Error {
            operation: None,
            ..error
        };
        for operation in core.operations.drain(..) {
            core.finished.push((operation.work, Err(each.clone())));
        }
        for work in core.matching.clear() {
            core.finished.push((work, Err(each.clone())));
        }
        // Links that are new hear of it as they are read.
        let _ = contained(|| self.read_mail(core));
        self.settle(core);
        self.parker.unpark();
    }

    /// Ends every operation on every rank.
    pub(crate) fn abort(&self, reason: &str) {
        if !self.home.is_here() {
            // The connections are the parent's, which goes on.
            return;
        }
        let error = Error::new(
            Code::Aborted,
            format!("{} aborted the group: {reason}", self.own_number()),
        );
        self.fail(&mut self.core.lock(), error);
    }

    /// Leaves in good order. Threads that worked for this group alone end soon after; this does not wait for them.
    pub(crate) fn close(&self) {
        self.await_mending();
        let Some(links) = self.leave() else { return };
        self.tell_waits();
        linger(links);
        let endpoint = self.membership.endpoint.lock().take();
        let stay = self.stay.lock().take();
        drop((endpoint, stay));
    }

    /// Waits until the peers' systems have what was sent: connections are not made again after the farewell.
    fn await_mending(&self) {
        let mut parting = Parting::begin(Instant::now());
        while !self.is_closed() && self.home.is_here() && self.error().is_none() {
            let mut core = self.core.lock();
            self.read_mail(&mut core);
            let owes = self.owes(&mut core, &mut parting, Instant::now());
            self.mend_links(&mut core);
            drop(core);
            if !owes {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether a group that leaves waits for its links still: for a peer that cannot be reached as long as its host may be
    /// silent, and for one that does not read what was sent for [`SETTLE`] after that.
    pub(crate) fn owes(&self, core: &mut Core, parting: &mut Parting, now: Instant) -> bool {
        let (mut is_owing, mut is_settled) = (false, true);
        for (_, _, open) in core.links.iter_open() {
            // Whatever it returns, the link returns it again at the next look.
            let _ = open.link.peer_state();
            if open.ended.is_some() {
                continue;
            }
            let owes = open.link.is_owing();
            if !owes && open.link.is_settled() {
                continue;
            }
            is_owing |= owes;
            is_settled = false;
            // A connection over which nothing comes back is found by a question.
            if now.saturating_duration_since(parting.begun) > LINGER {
                open.link.ask();
            }
        }
        if is_owing {
            parting.mended = now;
            return now < parting.begun + self.mending_limit();
        }
        !is_settled && now < parting.mended + SETTLE
    }

    /// Says farewell, and ends what is under way. Returns the links, over which sent bytes may still be on their way, unless
    /// the group was closed before.
    pub(crate) fn leave(&self) -> Option<LinkTable> {
        if self.closed.swap(true, Ordering::AcqRel) || !self.home.is_here() {
            return None;
        }
        if let Some(endpoint) = self.membership.endpoint() {
            endpoint.unregister(&self.membership.key.id(), self.rank);
        }
        let mut core = self.core.lock();
        if core.has_unfinished() {
            self.abort_on_close(&mut core);
        }
        self.read_mail(&mut core);
        if self.failure.get().is_none() {
            for (_, _, open) in core.links.iter_open() {
                open.link.send_farewell();
            }
        }
        let links = std::mem::replace(&mut core.links, LinkTable::new(self.world));
        core.shared = SharedMemory::default();
        // A message that came in part, and for which no receive was posted.
        core.matching.clear();
        let timeline = core.timeline.take();
        drop(core);
        // It writes the rest of the trace.
        drop(timeline);
        // The progress thread may hold the group still.
        self.parker.unpark();
        self.staff.progress.forget(self.number);
        // After a failure nothing is owed any more.
        match self.failure.get() {
            None => Some(links),
            Some(_) => Some(LinkTable::new(0)),
        }
    }

    fn abort_on_close(&self, core: &mut Core) {
        let waits = self.describe_waits(core);
        let error = Error::new(
            Code::Aborted,
            format!(
                "{} closed its communicator while operations were under way: {waits}",
                self.own_number()
            ),
        );
        self.fail(core, error);
    }
}

/// Keeps links over which farewell has been said until what was sent has arrived, for [`LINGER`] at most.
fn linger(mut links: LinkTable) {
    let until = Instant::now() + LINGER;
    while !are_delivered(&mut links) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether everything sent over all of these links has arrived. Bytes that come over them are discarded.
pub(crate) fn are_delivered(links: &mut LinkTable) -> bool {
    // All of them each time.
    let links = links.iter_open();
    links.fold(true, |all, (_, _, open)| open.link.is_delivered() && all)
}
