//! Broken connections of links are made again: a thread of the endpoint opens one, or waits for the peer to do so and looks
//! whether its process is still there. The peer is lost only when that comes to nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::fence::contained;
use crate::transport::endpoint::{Again, ConnectRequest, Lane, Presence, Seat};
use crate::transport::{Breach, Hindrance, Mend, Outage, SocketId};
use crate::types::Rank;

use crate::engine::links::OpenLink;
use crate::engine::state::{Core, Group, Mail};

/// The pauses between two tries, or two looks, in milliseconds. The last one goes on.
const PAUSES: [u64; 6] = [1, 2, 5, 10, 20, 50];

/// How long one try may take once the peer's host has answered: its process may be short of time.
const TRY_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a connection is tried that the system has given up as long as a host may be silent: another may lead there at once.
const AFTER_SILENCE: Duration = Duration::from_millis(1500);

/// How long a thread stays with a link whose connections have been made again, until they carry bytes.
const SEEN_THROUGH: Duration = Duration::from_secs(60);

/// Longer than any job.
const NEVER: Duration = Duration::from_secs(1 << 30);

/// The connection that a thread sees to.
#[derive(Clone, Copy)]
struct ConnectionId {
    lane: Lane,
    peer: Rank,
    socket: SocketId,
}

impl Group {
    /// Has the connections made again that have been found broken.
    pub(crate) fn mend_links(&self, core: &mut Core) {
        let (mut breaches, mut doubtful) = (Vec::new(), Vec::new());
        for (lane, peer, open) in core.links.iter_open() {
            if self.tell_healed(peer, open) | open.link.is_unanswered() {
                doubtful.push(peer);
            }
            while let Some(breach) = open.link.wants_mending() {
                breaches.push((lane, peer, breach));
            }
        }
        // The other link to that peer may have suffered too, though no operation waits for it yet; and it may be the one that
        // this side opens.
        doubt(core, &doubtful);
        for (lane, peer, breach) in breaches {
            let socket = breach.socket;
            if let Err(error) = self.mend_in_background((lane, peer), breach)
                && let Some(open) = core.links.open(lane, peer)
            {
                open.link
                    .cannot_mend(socket, &Hindrance::NotSoFar(error.message));
            }
        }
    }

    /// Tells, once for each outage, that it is over. Whether one was.
    fn tell_healed(&self, peer: Rank, open: &mut OpenLink) -> bool {
        let Some(Outage { since, cause }) = open.link.take_healed() else {
            return false;
        };
        open.mended += 1;
        let (peer, rank) = (self.name_of(peer), self.rank);
        let seconds = self.clock.since(since).as_secs_f64();
        tracing::info!(rank, %peer, %cause, seconds, "a connection broke and was made again; nothing was lost");
        true
    }

    /// How long a connection that has broken is tried.
    pub(crate) fn mending_limit(&self) -> Duration {
        match self.config.peer_timeout.seconds() {
            None => self.config.join_timeout.duration().min(NEVER),
            Some(seconds) => Duration::from_secs(seconds.into()),
        }
    }

    fn mend_in_background(&self, (lane, peer): (Lane, Rank), breach: Breach) -> Result<(), Error> {
        tracing::debug!(rank = self.rank, peer, ?breach, "a connection broke");
        let socket = breach.socket;
        let place = ConnectionId { lane, peer, socket };
        let limit = match self.config.peer_timeout.seconds() {
            // Where hosts are never lost the system tries on.
            None if breach.is_dark => NEVER,
            _ => self.mending_limit(),
        };
        self.with_request_in_background((lane, peer), true, move |this, seat, request| {
            let now = this.clock.now();
            let outcome = contained(|| match breach.is_ours {
                true => this.open_again(seat, request, place, now + limit),
                false => {
                    let silent = if breach.was_silent {
                        AFTER_SILENCE
                    } else {
                        limit
                    };
                    this.await_again(seat, request, place, (now + silent, now + limit))
                }
            });
            let why = match outcome {
                Ok(Ok(())) => return,
                Ok(Err(why)) => why,
                Err(error) => Hindrance::NotSoFar(error.message),
            };
            let ConnectionId { lane, peer, socket } = place;
            this.post_at_once(Mail::Beyond {
                lane,
                peer,
                socket,
                why,
            });
        })
    }

    /// Opens the connection again, and stays until it carries bytes. An error is the reason for which that has not come about.
    fn open_again(
        &self,
        seat: &Seat,
        request: &ConnectRequest<'_>,
        place: ConnectionId,
        until: Instant,
    ) -> Result<(), Hindrance> {
        for tries in 0.. {
            if !self.needs_mending(place) {
                return Ok(());
            }
            let request = ConnectRequest {
                deadline: self.clock.now() + TRY_TIMEOUT,
                ..*request
            };
            // The peer may have taken the socket of a try that this side gave up.
            let number = place.socket.number + 1 + tries;
            let further = SocketId {
                number,
                ..place.socket
            };
            let why = match seat.open_again(&request, further, tries as usize) {
                Again::Made(mend) => {
                    self.post_mend(place, mend);
                    self.see_through(place, &request);
                    return Ok(());
                }
                Again::Left => return Err(Hindrance::Left),
                Again::Gone => return Err(Hindrance::Ended),
                Again::NotNow(why) => why,
            };
            if self.clock.now() >= until {
                return Err(Hindrance::NotSoFar(why));
            }
            pause(tries as usize, &request);
        }
        Ok(())
    }

    /// Waits until the peer has opened the connection again: until the first of two times while its host does not answer, and
    /// until the second while its process is there. An error is the reason for which that has not come about.
    fn await_again(
        &self,
        seat: &Seat,
        request: &ConnectRequest<'_>,
        place: ConnectionId,
        (silent, there): (Instant, Instant),
    ) -> Result<(), Hindrance> {
        for looks in 0.. {
            if !self.needs_mending(place) {
                return Ok(());
            }
            let (until, why) = match seat.glance(request.target) {
                Presence::Gone => return Err(Hindrance::Ended),
                Presence::There => (there, "its process listens and does not open it"),
                Presence::Unknown => (silent, "its host does not answer"),
            };
            if self.clock.now() >= until {
                return Err(Hindrance::NotSoFar(why.to_owned()));
            }
            pause(looks, request);
        }
        Ok(())
    }

    /// A further socket for a connection that the peer has opened.
    pub(crate) fn take_in_mend(&self, (lane, peer): (Lane, Rank), mend: Mend) {
        let socket = mend.socket();
        let place = ConnectionId { lane, peer, socket };
        self.post_mend(place, mend);
        // One thread for each link, however many sockets come.
        let mut core = self.core.lock();
        // The other link may have suffered too, and it may be the one that this side opens.
        doubt(&mut core, &[peer]);
        match core.links.open(lane, peer) {
            Some(open) if !open.is_watched => open.is_watched = true,
            _ => return,
        }
        drop(core);
        let watch = move |this: &Arc<Self>, _: &Seat, request: &ConnectRequest<'_>| {
            this.see_through(place, request);
            if let Some(open) = this.core.lock().links.open(lane, peer) {
                open.is_watched = false;
            }
        };
        if let Err(error) = self.with_request_in_background((lane, peer), true, watch) {
            tracing::debug!(peer, %error, "a connection goes on when its group does");
        }
    }

    fn post_mend(&self, ConnectionId { lane, peer, .. }: ConnectionId, mend: Mend) {
        self.post_at_once(Mail::Mended { lane, peer, mend });
    }

    /// Posts mail and reads it: no thread may be driving the group.
    fn post_at_once(&self, mail: Mail) {
        self.post(mail);
        self.read_mail(&mut self.core.lock());
        // A driver may be about to sleep until something comes that has just been read.
        self.parker().unpark();
    }

    /// Stays until the connections of the link carry bytes, for some time: no thread may be driving the group. A
    /// connection that breaks again is another thread's.
    fn see_through(&self, place: ConnectionId, request: &ConnectRequest<'_>) {
        let until = self.clock.now() + SEEN_THROUGH;
        for looks in 0.. {
            if !self.is_mending(place) || self.clock.now() >= until {
                return;
            }
            pause(looks, request);
        }
    }

    /// Moves what is being made again, and says whether that connection is still to be opened.
    fn needs_mending(&self, place: ConnectionId) -> bool {
        self.look_at(place, |open| open.link.needs_mending(place.socket))
    }

    /// As [`Self::needs_mending`]: whether not all connections of the link carry bytes.
    fn is_mending(&self, place: ConnectionId) -> bool {
        self.look_at(place, |open| open.link.is_mending())
    }

    fn look_at(
        &self,
        ConnectionId { lane, peer, .. }: ConnectionId,
        asks: impl FnOnce(&OpenLink) -> bool,
    ) -> bool {
        let mut core = self.core.lock();
        self.read_mail(&mut core);
        let Some(open) = core.links.open(lane, peer) else {
            return false;
        };
        if open.ended.is_some() {
            return false;
        }
        // Whatever it returns, the link returns it again at the next look.
        let _ = open.link.peer_state();
        let answer = asks(open);
        self.mend_links(&mut core);
        drop(core);
        self.parker().unpark();
        answer
    }
}

/// Looks at all links to these peers whether anything comes back over them.
fn doubt(core: &mut Core, peers: &[Rank]) {
    if peers.is_empty() {
        return;
    }
    for (_, peer, open) in core.links.iter_open() {
        if peers.contains(&peer) && open.ended.is_none() {
            open.link.ask();
        }
    }
}

/// Waits before the next of some tries.
fn pause(tries: usize, request: &ConnectRequest<'_>) {
    if let Some(turn) = request.turn {
        turn.waits();
    }
    std::thread::sleep(Duration::from_millis(PAUSES[tries.min(PAUSES.len() - 1)]));
}
