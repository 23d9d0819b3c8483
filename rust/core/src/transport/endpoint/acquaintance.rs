//! The processes of this host that have proved themselves, and links that are opened to them by one message each.
//!
//! A process has the same key pair in all groups that it joins. So when two processes of one host have opened their first
//! link by a handshake, each knows which key the other holds, for good. With the segment of that link goes one end of a pair
//! of sockets, and over these two ends, which nobody else has, either side asks for further links:
//!
//! ```text
//! one process                                           the other
//!     | open {number, lane, group id, from, to}              |
//!     |   with the segment and a socket for its control      | ----> the group is here, and `from` and `to` have these
//!     | ---------------------------------------------------> |       keys and this secret in it: makes its end
//!     |   answer {number, answer}                            |
//!     | <--------------------------------------------------- |
//! ```
//!
//! The link is the same as one that a handshake opens to the same key in the same group, without the handshake's arithmetic,
//! connection and threads. `requests.rs` has the messages. One thread of the endpoint reads all of these sockets. A request for
//! a group that is not here yet waits for it a little. Any other obstacle is answered by [`Answer::Failed`]; then the link is
//! opened by a handshake, which knows other transports and has the errors to report.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::Shutdown;

use super::membership::{Claim, Membership, Permission};
use super::requests::{Gone, Message, Opening};
use super::shared::Shared;
use super::wire::timespec;
use crate::error::{Error, Result};
use crate::fork;
use crate::locks::Mutex;
use crate::threads;
use crate::transport::handshake::{Answer, Lane};
use crate::transport::keys::PairKeys;
use crate::transport::shm::{Program, ShmLink};
use crate::transport::{ControlChannel as _, Link};
use crate::types::Rank;

/// The most sockets to one process: two, where both sides opened their first link at the same time, and some for threads
/// that do so.
const MOST_TO_ONE: usize = 8;
/// The most requests that wait for their groups. A group has a few links to each process, and programs make groups in the
/// same order.
const MOST_WAITING: usize = 128;
/// How often the groups of those are looked for; a group that comes wakes the thread besides.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Messages of one process that are read before others get their turn.
const AT_A_TIME: usize = 64;

const WAKE: u64 = 0;

/// The outcome of a request for a link.
pub enum Heard {
    /// It is there.
    Link(Box<dyn Link>),
    /// The peer is opening it.
    Crossing,
    /// It is to be opened by a handshake.
    NotThisWay,
}

/// Called once with the outcome of a request for a link, by a thread that holds no lock.
pub type Hear = Box<dyn FnOnce(Heard) + Send>;

/// A link that this side has asked for.
struct Asked {
    claim: Claim,
    link: ShmLink,
    hear: Hear,
}

/// A process that has proved itself, at the other end of a socket.
pub(super) struct Acquaintance {
    id: u64,
    pair: PairKeys,
    socket: UnixStream,
    process: Program,
    asked: Mutex<(u32, HashMap<u32, Asked>)>,
}

/// All of an endpoint.
#[derive(Default)]
pub(super) struct Acquaintances {
    reader: OnceLock<Reader>,
    known: Mutex<Vec<Arc<Acquaintance>>>,
}

/// The descriptors that the reading thread sleeps on.
struct Reader {
    epoll: OwnedFd,
    wake: OwnedFd,
}

/// A request, with what the link consists of, whose group is not here yet.
struct Waiting {
    acquaintance: Arc<Acquaintance>,
    opening: Opening,
    files: Vec<OwnedFd>,
    since: Instant,
}

impl Acquaintances {
    /// The process behind `pair`, if it is known. Not this process itself: it needs no proof.
    pub(super) fn of(&self, pair: &PairKeys) -> Option<Arc<Acquaintance>> {
        let known = self.known.lock();
        let found = known.iter().find(|known| known.pair == *pair);
        found.map(Arc::clone)
    }

    /// Two ends of a socket, for this process and for the one behind `pair`, if that is not known yet.
    pub(super) fn introduction(&self, pair: &PairKeys) -> Option<(UnixStream, OwnedFd)> {
        if pair.is_one() || self.of(pair).is_some() {
            return None;
        }
        sockets().ok()
    }

    /// From now on the process behind `pair`, which has proved itself, is known by this socket.
    pub(super) fn add(
        &self,
        shared: &Shared,
        pair: PairKeys,
        socket: UnixStream,
        process: Program,
    ) {
        // Without it links are opened by handshakes.
        if let Err(error) = self.try_add(shared, pair, socket, process) {
            tracing::debug!(%error, "links to a process of this host go on being opened by handshakes");
        }
    }

    fn try_add(
        &self,
        shared: &Shared,
        pair: PairKeys,
        socket: UnixStream,
        process: Program,
    ) -> Result<()> {
        let Some(shared) = shared.this.upgrade() else {
            return Ok(());
        };
        fork::keep_private(&socket);
        let mut known = self.known.lock();
        if known.iter().filter(|known| known.pair == pair).count() >= MOST_TO_ONE {
            return Ok(());
        }
        let reader = match self.reader.get() {
            Some(reader) => reader,
            None => {
                let reader = Reader::new()
                    .map_err(|cause| Error::system("make a set of descriptors", cause))?;
                threads::spawn("unisono-peers", move || run(&shared))
                    .map_err(|cause| Error::system("start a thread", cause))?;
                self.reader.get_or_init(|| reader)
            }
        };
        let id = known.last().map_or(WAKE, |last| last.id) + 1;
        epoll::add(
            &reader.epoll,
            &socket,
            EventData::new_u64(id),
            EventFlags::IN | EventFlags::RDHUP,
        )
        .map_err(|cause| Error::system("watch a socket", cause))?;
        known.push(Arc::new(Acquaintance {
            id,
            pair,
            socket,
            process,
            asked: Mutex::default(),
        }));
        Ok(())
    }

    /// Asks the process behind rank `to` of a group for a link to it, and has `hear` hear of it later. False where that is to
    /// be opened by a handshake; then `hear` is not called.
    pub(super) fn ask(
        &self,
        shared: &Shared,
        (membership, to): (&Arc<Membership>, u32),
        lane: Lane,
        hear: Hear,
    ) -> bool {
        let pair = membership.key.pair(to).filter(|pair| !pair.is_one());
        let Some(acquaintance) = pair.and_then(|pair| self.of(&pair)) else {
            return false;
        };
        let Permission::Open(claim) = membership.claim_connecting(to, lane) else {
            return false;
        };
        if !claim.goes_on() {
            return false;
        }
        let made = sockets().map_err(|cause| Error::system("make a pair of sockets", cause));
        let made = made.and_then(|(control, theirs)| {
            let process = acquaintance.process.clone();
            let (link, segment) = ShmLink::create_with(control, process, shared.ring_bytes)?;
            Ok((link, [segment, theirs]))
        });
        let Ok((link, files)) = made else {
            return false;
        };
        let asked = Asked { claim, link, hear };
        let (from, group) = (membership.rank, membership.key.id());
        acquaintance.ask((lane, group, from, to), &files, asked)
    }

    /// A group is left: links that it has asked for are not needed.
    pub(super) fn forget(&self, membership: &Arc<Membership>) {
        let known = self.known.lock().clone();
        for acquaintance in known {
            let dropped: Vec<Asked> = {
                let mut asked = acquaintance.asked.lock();
                let is_its = |asked: &Asked| Arc::ptr_eq(asked.claim.membership(), membership);
                let all = asked.1.extract_if(|_, asked| is_its(asked));
                all.map(|(_, asked)| asked).collect()
            };
            for mut asked in dropped {
                asked.link.send_farewell();
            }
        }
    }

    /// A group has come, or the endpoint goes.
    pub(super) fn wake(&self) {
        if let Some(reader) = self.reader.get() {
            // An eventfd that is full wakes as well.
            let _ = rustix::io::write(&reader.wake, &1_u64.to_ne_bytes());
        }
    }

    fn with_id(&self, id: u64) -> Option<Arc<Acquaintance>> {
        let known = self.known.lock();
        known.iter().find(|known| known.id == id).cloned()
    }

    fn remove(&self, id: u64) {
        let mut known = self.known.lock();
        let at = known.iter().position(|known| known.id == id);
        let gone = at.map(|at| known.remove(at));
        drop(known);
        if let (Some(gone), Some(reader)) = (gone, self.reader.get()) {
            // Its end alone would leave it there while a forked child has a copy.
            let _ = epoll::delete(&reader.epoll, &gone.socket);
            gone.end();
        }
    }
}

impl Reader {
    fn new() -> rustix::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Self { epoll, wake })
    }
}

/// The thread that reads.
fn run(shared: &Arc<Shared>) {
    let all = &shared.acquaintances;
    let mut waiting: Vec<Waiting> = Vec::new();
    loop {
        let timeout = (!waiting.is_empty()).then(|| timespec(LOOK_INTERVAL));
        let mut events = [const { MaybeUninit::uninit() }; 16];
        let events = match all.reader.get() {
            // The thread was quicker than the one that started it.
            None => {
                std::thread::yield_now();
                continue;
            }
            Some(reader) => match epoll::wait(&reader.epoll, &mut events, timeout.as_ref()) {
                Ok((events, _)) => {
                    let _ = rustix::io::read(&reader.wake, &mut [0; 8]);
                    events.iter().map(|event| event.data.u64()).collect()
                }
                // Interrupted: the loop looks again.
                Err(_) => Vec::new(),
            },
        };
        if shared.stopping.load(Ordering::Acquire) {
            break;
        }
        for id in events.into_iter().filter(|id| *id != WAKE) {
            let Some(acquaintance) = all.with_id(id) else {
                continue;
            };
            if acquaintance.read_all(shared, &mut waiting).is_err() {
                all.remove(id);
                waiting.retain(|waiting| waiting.acquaintance.id != id);
            }
        }
        waiting.retain_mut(|request| {
            let acquaintance = Arc::clone(&request.acquaintance);
            !acquaintance.admit(shared, request)
        });
    }
    let known = std::mem::take(&mut *all.known.lock());
    known.iter().for_each(|known| known.end());
}

impl Acquaintance {
    fn ask(
        &self,
        (lane, group, from, to): (Lane, [u8; 16], u32, u32),
        files: &[OwnedFd; 2],
        asked: Asked,
    ) -> bool {
        // Held until it is known whether the request goes out: the answer may be here before.
        let mut all = self.asked.lock();
        let (last, links) = &mut *all;
        *last = last.wrapping_add(1);
        let opening = Opening {
            number: *last,
            lane,
            group,
            from,
            to,
        };
        let has_gone = Message::Open(opening).send(&self.socket, files).is_ok();
        if has_gone {
            links.insert(*last, asked);
        }
        has_gone
    }

    /// Reads the messages that have come. A request whose group is not here yet is added to `waiting`.
    fn read_all(self: &Arc<Self>, shared: &Shared, waiting: &mut Vec<Waiting>) -> Result<(), Gone> {
        for _ in 0..AT_A_TIME {
            let Some((message, files)) = Message::receive(&self.socket)? else {
                return Ok(());
            };
            match message {
                Message::Answer(number, answer) => self.hear(number, answer),
                Message::Open(opening) => {
                    let mut request = Waiting {
                        acquaintance: Arc::clone(self),
                        opening,
                        files,
                        since: Instant::now(),
                    };
                    if !self.admit(shared, &mut request) {
                        match waiting.len() < MOST_WAITING {
                            true => waiting.push(request),
                            false => {
                                self.answer(&opening, Answer::Failed);
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// An answer to a request of this side, if that is still waited for.
    fn hear(&self, number: u32, answer: Answer) {
        let asked = self.asked.lock().1.remove(&number);
        let Some(Asked { claim, link, hear }) = asked else {
            return;
        };
        let heard = match answer {
            Answer::Accept => {
                claim.linked();
                Heard::Link(Box::new(link))
            }
            Answer::Crossing => Heard::Crossing,
            _ => Heard::NotThisWay,
        };
        drop(claim);
        hear(heard);
    }

    /// Opens the link that is asked for, or says why not. False: its group is waited for.
    fn admit(&self, shared: &Shared, request: &mut Waiting) -> bool {
        let opening = request.opening;
        let Some(membership) = shared.group((opening.group, opening.to as Rank)) else {
            let is_over = request.since.elapsed() >= shared.limits.unknown_group;
            if is_over {
                self.answer(&opening, Answer::Failed);
            }
            return is_over;
        };
        let files = std::mem::take(&mut request.files);
        match self.accept(&membership, &opening, files) {
            Ok((claim, link)) => {
                if self.answer(&opening, Answer::Accept) {
                    claim.deliver(Box::new(link));
                }
            }
            Err(answer) => {
                self.answer(&opening, answer);
            }
        }
        true
    }

    fn accept(
        &self,
        membership: &Arc<Membership>,
        opening: &Opening,
        files: Vec<OwnedFd>,
    ) -> Result<(Claim, ShmLink), Answer> {
        // The proof: this process and the peer's are these ranks of the group, by their keys and its secret.
        if membership.key.pair(opening.from).as_ref() != Some(&self.pair)
            || !membership.has_peer(opening.from)
        {
            tracing::warn!(
                from = opening.from,
                "turned away a request for a link of another rank"
            );
            return Err(Answer::Failed);
        }
        if membership.is_closed() {
            return Err(Answer::Left);
        }
        // Fewer have come where this process has no descriptors left.
        let files = <[OwnedFd; 2]>::try_from(files).map_err(|_| Answer::Failed)?;
        let claim = membership.claim_at_once(opening.from, opening.lane)?;
        let [segment, control] = files;
        let link = ShmLink::open_with(control.into(), self.process.clone(), segment);
        match link {
            Ok(link) => Ok((claim, link)),
            Err(error) => {
                tracing::debug!(%error, "a link was not opened");
                Err(Answer::Failed)
            }
        }
    }

    /// Whether the answer is on its way. Where it is not, the peer has gone or does not read; what it said before is read all
    /// the same, its answers among it, and to it this side is gone.
    fn answer(&self, opening: &Opening, answer: Answer) -> bool {
        let message = Message::Answer(opening.number, answer);
        let is_sent = message.send(&self.socket, &[]).is_ok();
        if !is_sent {
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
        is_sent
    }

    #[cfg(test)]
    pub(super) fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Nothing will be heard of what this side has asked for.
    fn end(&self) {
        let asked = std::mem::take(&mut self.asked.lock().1);
        for (_, Asked { claim, link, hear }) in asked {
            drop((claim, link));
            hear(Heard::NotThisWay);
        }
    }
}

/// Two sockets that are connected to each other.
fn sockets() -> std::io::Result<(UnixStream, OwnedFd)> {
    let mut theirs = None;
    let ours = fork::make_private(|| {
        let (ours, other) = UnixStream::pair()?;
        fork::keep_private(&other);
        theirs = Some(other);
        Ok::<_, std::io::Error>(ours)
    })?;
    let theirs = theirs.ok_or(std::io::ErrorKind::OutOfMemory)?;
    Ok((ours, theirs.into()))
}
