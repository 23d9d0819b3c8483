//! How a group's links are opened: one is asked for when it is first needed, and threads of the endpoint make it. They post
//! what became of it, which the thread that drives the group takes in.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::config::LendBytes;
use crate::error::Error;
use crate::fence::contained;
use crate::processors::cores;
use crate::transport::endpoint::{
    ConnectRequest, Heard, Lane, Outcome, Seat, TransportChoice, Turn,
};
use crate::transport::{Hindrance, Link, Mend, Part, Stripe};
use crate::types::Rank;

use crate::engine::links::Slot;
use crate::engine::state::{Core, Group, Mail};

/// How long to wait for the link that a peer is making before trying to make one ourselves.
const PEER_CONNECTS_WITHIN: Duration = Duration::from_secs(2);

impl Group {
    /// Begins to open the link to `peer`, unless it is open or on its way.
    pub(crate) fn ensure_link(&self, core: &mut Core, lane: Lane, peer: Rank) {
        // The link may have been posted already: in one process all of them come that way and cannot be opened again.
        if matches!(core.links.slot(lane, peer), Slot::Closed) {
            self.read_mail(core);
        }
        let stale = |since: &Instant| self.clock.since(*since) > PEER_CONNECTS_WITHIN;
        let needed = match core.links.slot(lane, peer) {
            Slot::Closed => true,
            Slot::Opening {
                awaited: Some(since),
            } => stale(since),
            _ => false,
        };
        if !needed || peer == self.rank {
            return;
        }
        // Of two attempts that meet the lower rank's wins; the other may find the link there when its turn comes. A link that
        // was awaited and has not come is late already.
        let goes_first = self.rank < peer || !matches!(core.links.slot(lane, peer), Slot::Closed);
        if matches!(core.links.slot(lane, peer), Slot::Closed) {
            core.links.note_opening(self.clock.now());
        }
        let slot = match self.connect_in_background(lane, peer, goes_first) {
            Ok(()) => Slot::Opening { awaited: None },
            Err(error) => Slot::Unreachable(Box::new(error)),
        };
        core.links.set(lane, peer, slot);
    }

    fn connect_in_background(&self, lane: Lane, peer: Rank, goes_first: bool) -> Result<(), Error> {
        // A simulated world makes all links by itself, in its time.
        #[cfg(any(test, feature = "simulate"))]
        if self.clock.is_simulated() {
            return Ok(());
        }
        match self.ask_for_link(lane, peer, goes_first) {
            true => Ok(()),
            false => self.shake_hands_in_background(lane, peer, goes_first),
        }
    }

    /// Asks a process of this host that has proved itself for the link, by one message. False: it takes a handshake.
    fn ask_for_link(&self, lane: Lane, peer: Rank, goes_first: bool) -> bool {
        let Some(endpoint) = self.membership.endpoint() else {
            return false;
        };
        if self.config.transport == TransportChoice::Tcp {
            return false;
        }
        let this = Weak::clone(&self.this);
        let hear = move |heard: Heard| {
            let Some(this) = this.upgrade() else { return };
            let mail = match heard {
                Heard::Link(link) => Mail::Established { lane, peer, link },
                Heard::Crossing => Mail::Awaited { lane, peer },
                Heard::NotThisWay => match this.shake_hands_in_background(lane, peer, goes_first) {
                    Ok(()) => return,
                    Err(error) => Mail::Failed { lane, peer, error },
                },
            };
            this.post(mail);
        };
        let key = &self.membership.key;
        endpoint.ask(key, (self.rank, peer), lane, Box::new(hear))
    }

    fn shake_hands_in_background(
        &self,
        lane: Lane,
        peer: Rank,
        goes_first: bool,
    ) -> Result<(), Error> {
        self.with_request_in_background((lane, peer), goes_first, move |this, seat, request| {
            this.post(match contained(|| seat.connect(request)) {
                Ok(Ok(Outcome::Link(link))) => Mail::Established { lane, peer, link },
                Ok(Ok(Outcome::Crossing)) => Mail::Awaited { lane, peer },
                Ok(Err(error)) | Err(error) => Mail::Failed { lane, peer, error },
            });
        })
    }

    /// Begins to open further connections for what this rank sends to `peer`. The link goes on without those that do not come.
    /// False: no thread can be had for that.
    pub(crate) fn open_stripes(&self, lane: Lane, peer: Rank, numbers: Range<u8>) -> bool {
        let begun =
            self.with_request_in_background((lane, peer), false, move |this, seat, request| {
                let post = |stripe| this.post(Mail::Striped { lane, peer, stripe });
                let take = |stripe| post(Some(stripe));
                let opened = contained(|| seat.open_stripes(request, numbers, take));
                if let Ok(Err(error)) | Err(error) = opened {
                    tracing::debug!(peer, %error, "no further connections for long messages");
                    post(None);
                }
            });
        if let Err(error) = &begun {
            tracing::debug!(peer, %error, "no further connections for long messages");
        }
        begun.is_ok()
    }

    /// Takes in a further socket for a connection of the link to a peer.
    fn take_mend(&self, core: &mut Core, (lane, peer): (Lane, Rank), mend: Mend) {
        let is_control = mend.socket().part == Part::Control;
        let watched = self.parker().watch(mend.as_fd());
        let Some(open) = core.links.open(lane, peer) else {
            return;
        };
        match watched {
            Ok(()) => open.link.mend(mend),
            Err(error) => {
                let why = Hindrance::NotSoFar(error.message);
                open.link.cannot_mend(mend.socket(), &why);
            }
        }
        if is_control {
            self.answer_questions_of(lane, peer, &core.links);
        }
    }

    /// Does this on another thread, with what it takes to open connections to `peer`.
    pub(crate) fn with_request_in_background(
        &self,
        (lane, peer): (Lane, Rank),
        goes_first: bool,
        act: impl FnOnce(&Arc<Self>, &Seat, &ConnectRequest<'_>) + Send + 'static,
    ) -> Result<(), Error> {
        let (this, address) = (self.this.upgrade(), &self.membership.members[peer].address);
        let (Some(endpoint), Some(this), Some(_)) = (self.membership.endpoint(), this, address)
        else {
            return Err(self.no_way_to(peer));
        };
        endpoint.begin_to_connect(goes_first, move |turn: &Turn| {
            // There was a way when it began: in a group that has been left since there is nothing to do.
            let _ = this.with_request((lane, peer), Some(turn), |seat, request| {
                act(&this, seat, request);
            });
        })
    }

    /// Runs `act` with a request for a link to `peer`.
    pub(crate) fn with_request<T>(
        &self,
        (lane, peer): (Lane, Rank),
        turn: Option<&Turn>,
        act: impl FnOnce(&Seat, &ConnectRequest<'_>) -> T,
    ) -> Result<T, Error> {
        let members = &self.membership.members;
        let (Some(endpoint), Some(target)) = (self.membership.endpoint(), &members[peer].address)
        else {
            return Err(self.no_way_to(peer));
        };
        let request = ConnectRequest {
            key: &self.membership.key,
            from: self.rank,
            to: peer,
            known_as: (members.known_as(self.rank), members.known_as(peer)),
            lane,
            target,
            deadline: Instant::now() + self.config.join_timeout.duration(),
            silence: self.config.peer_timeout.seconds(),
            transport: self.config.transport,
            cancelled: &self.closed,
            turn,
        };
        Ok(act(&endpoint.clone(), &request))
    }

    #[cold]
    fn no_way_to(&self, peer: Rank) -> Error {
        Error::internal(format!("no way to reach rank {peer}"))
    }

    /// Takes in what the threads that make connections have posted. Returns whether there was anything.
    pub(crate) fn read_mail(&self, core: &mut Core) -> bool {
        let mails = self.take_mail();
        let any = !mails.is_empty();
        for mail in mails {
            self.read(core, mail);
        }
        any
    }

    fn read(&self, core: &mut Core, mail: Mail) {
        match mail {
            Mail::Established { lane, peer, link } => self.take_link(core, (lane, peer), link),
            Mail::Awaited { lane, peer } => {
                if matches!(core.links.slot(lane, peer), Slot::Opening { .. }) {
                    let awaited = Some(self.clock.now());
                    core.links.set(lane, peer, Slot::Opening { awaited });
                }
            }
            Mail::Striped { lane, peer, stripe } => self.take_stripe(core, (lane, peer), stripe),
            Mail::Mended { lane, peer, mend } => self.take_mend(core, (lane, peer), mend),
            Mail::Beyond {
                lane,
                peer,
                socket,
                why,
            } => {
                if let Some(open) = core.links.open(lane, peer) {
                    open.link.cannot_mend(socket, &why);
                }
            }
            Mail::Failed { lane, peer, error } => {
                if matches!(core.links.slot(lane, peer), Slot::Opening { .. }) {
                    let error = self.membership.members.clarify(error.with_peer(peer));
                    core.links
                        .set(lane, peer, Slot::Unreachable(Box::new(error)));
                }
            }
        }
    }

    /// Takes in the link to a peer.
    fn take_link(&self, core: &mut Core, (lane, peer): (Lane, Rank), mut link: Box<dyn Link>) {
        if let Some(notice) = self.notice() {
            link.send_abort(notice);
        } else if self.is_closed() {
            link.send_farewell();
        }
        if self.is_closed() {
            return;
        }
        for fd in link.fds() {
            if let Err(error) = self.parker().watch(fd) {
                self.fail(core, error);
                return;
            }
        }
        link.lose_silent_host_after(self.config.peer_timeout.seconds());
        self.share_workers(&mut *link);
        if let Some(neighbour) = link.neighbour() {
            match self.config.lend_bytes {
                LendBytes::Auto => {}
                LendBytes::None => neighbour.lend_private_from(usize::MAX),
                LendBytes::From(bytes) => neighbour.lend_private_from(bytes),
            }
            if core.backoff.is_crowded() {
                neighbour.expect_a_crowd();
            }
        }
        tracing::debug!(rank = self.rank, peer, lane = ?lane, via = %link.describe(), "link open");
        let name = self.name_of(peer);
        core.links.establish(lane, peer, link, name);
        self.answer_questions_of(lane, peer, &core.links);
    }

    /// Of this group's ranks one copies while the other waits: from now on two threads may read what a peer on this host lends,
    /// unless the user wants one thread.
    pub(crate) fn read_by_two(&self) {
        if self.config.threads.is_some_and(|threads| threads.0 == 1) {
            return;
        }
        let mut core = self.core.lock();
        self.reads_by_two.store(true, Ordering::Relaxed);
        let ranks = self.membership.topology.ranks_beside(self.rank);
        core.backoff.make_room(ranks, cores());
        for (_, _, open) in core.links.iter_open() {
            self.share_workers(&mut *open.link);
        }
    }

    /// Tells a link which threads may take part in what goes over it.
    fn share_workers(&self, link: &mut dyn Link) {
        // Under the group's lock, as all that sets it.
        let by_two = self.reads_by_two.load(Ordering::Relaxed);
        if let Some(workers) = &self.workers {
            link.share(workers);
        } else if by_two && link.neighbour().is_some() {
            link.share(&self.staff.readers);
        }
    }

    /// Takes in a further connection of the link to a peer, or that those which this side wanted do not come.
    fn take_stripe(&self, core: &mut Core, (lane, peer): (Lane, Rank), stripe: Option<Stripe>) {
        let watched = match &stripe {
            Some(stripe) => self.parker().watch(stripe.as_fd()),
            None => Ok(()),
        };
        match (watched, core.links.open(lane, peer)) {
            (Ok(()), Some(open)) => match stripe {
                Some(stripe) => open.link.add_stripe(stripe),
                None => open.link.give_up_stripes(),
            },
            // The peer may count on it.
            (Err(error), Some(_)) => self.fail(core, error),
            (_, None) => {}
        }
    }
}
