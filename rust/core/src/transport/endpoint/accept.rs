//! Accepting: one thread waits on the listening sockets; each connection is judged on a short-lived thread of its
//! own, within a total time and a total number. When it gets crowded, connections that have proved nothing are closed
//! first, so they cannot keep members waiting for long; a member among them comes again.
//!
//! Over the Unix socket only processes of this process's user are heard: what is shared there is memory.

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{SendFlags, send};

use super::Shared;
use super::membership::{Claim, Membership};
use super::wire::{Cut, Patience, foreign_user, has_ended, timespec};
use crate::error::Error;
use crate::fork;
use crate::threads;
use crate::transport::cipher::Cipher;
use crate::transport::handshake::{
    Answer, Answers, Challenged, HELLO_BYTES, Hello, PROOF_BYTES, Purpose, Reply, Stranger,
};
use crate::transport::keys::Hex;
use crate::transport::shm::ShmLink;
use crate::transport::tcp::TcpLink;

/// How often the accepting thread looks for parked streams that nobody came for.
const SWEEP: Duration = Duration::from_secs(1);

/// What the accepting thread waits on.
pub(super) struct Listeners {
    pub(super) unix: Option<UnixListener>,
    /// What stays as long as the endpoint.
    pub(super) inside: Vec<TcpListener>,
    /// What is closed when no group needs it any more.
    pub(super) outside: Vec<TcpListener>,
}

/// The stream of a TCP link whose control connection is to follow.
pub(super) struct Parked {
    link: [u8; 16],
    claim: Claim,
    data: TcpStream,
    /// What encrypts the stream, where the group asks for that.
    cipher: Option<Cipher>,
    expires: Instant,
}

impl Parked {
    pub(super) fn belongs_to(&self, membership: &Arc<Membership>) -> bool {
        Arc::ptr_eq(self.claim.membership(), membership)
    }
}

/// A connection in the handshake.
struct Guest {
    since: Instant,
    /// Its hello was made with the key of a member: it is one, or it has a recording.
    greeted: AtomicBool,
    /// It has proved that it is a member.
    proven: AtomicBool,
    shown_out: AtomicBool,
}

impl Guest {
    /// Whether it loses its place, where others wait for one, if it has had it for longer than `grace`.
    fn is_in_the_way(&self, greeted: bool, grace: Duration) -> bool {
        !self.proven.load(Ordering::Acquire)
            && !self.shown_out.load(Ordering::Acquire)
            && self.greeted.load(Ordering::Acquire) == greeted
            && self.since.elapsed() >= grace
    }
}

/// How much longer a connection with a right hello keeps its place than one without: what is missing takes a round trip.
const GREETED: u32 = 4;

/// The connections in the handshake.
#[derive(Default)]
struct Crowd {
    guests: Mutex<Vec<Arc<Guest>>>,
    left: Condvar,
}

impl Crowd {
    /// Waits for a free place, showing out the stranger that has had one for longest; who has a recording of a right hello
    /// after the others.
    fn wait_for_room(&self, shared: &Shared) {
        let mut guests = self.guests.lock();
        while guests.len() >= shared.limits.simultaneous && !shared.stopping.load(Ordering::Acquire)
        {
            // Sorted by arrival.
            let grace = shared.limits.grace;
            let find = |greeted, grace| {
                let mut all = guests.iter();
                all.find(|guest| guest.is_in_the_way(greeted, grace))
            };
            if let Some(stranger) = find(false, grace).or_else(|| find(true, grace * GREETED)) {
                stranger.shown_out.store(true, Ordering::Release);
            }
            self.left.wait_for(&mut guests, Duration::from_millis(20));
        }
    }

    fn enter(self: &Arc<Self>) -> Place {
        let guest = Arc::new(Guest {
            since: Instant::now(),
            greeted: AtomicBool::new(false),
            proven: AtomicBool::new(false),
            shown_out: AtomicBool::new(false),
        });
        self.guests.lock().push(Arc::clone(&guest));
        Place {
            crowd: Arc::clone(self),
            guest,
        }
    }
}

/// A guest's place, given back on drop.
struct Place {
    crowd: Arc<Crowd>,
    guest: Arc<Guest>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut guests = self.crowd.guests.lock();
        guests.retain(|guest| !Arc::ptr_eq(guest, &self.guest));
        self.crowd.left.notify_all();
    }
}

/// The accepting thread.
pub(super) fn run(shared: &Arc<Shared>, mut listeners: Listeners) {
    let crowd = Arc::new(Crowd::default());
    let mut timeout = None;
    loop {
        let mut fds = vec![PollFd::new(&shared.wake, PollFlags::IN)];
        let tcp = listeners.inside.iter().chain(&listeners.outside);
        fds.extend(tcp.map(|tcp| PollFd::new(tcp, PollFlags::IN)));
        let unix = listeners.unix.as_ref();
        fds.extend(unix.map(|unix| PollFd::new(unix, PollFlags::IN)));
        // A failure other than an interruption cannot happen with valid arguments; accept will then find nothing.
        let _ = poll(&mut fds, timeout.map(timespec).as_ref());
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
        let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
        if shared.inside_only.load(Ordering::Acquire) && !listeners.outside.is_empty() {
            listeners.outside.clear();
            tracing::info!("all ranks are on this host: listening on loopback alone");
        }
        let waiting = sweep(shared);
        let mut trouble = false;
        for tcp in listeners.inside.iter().chain(&listeners.outside) {
            let accepted = accept_one(tcp, |listener| {
                listener.accept().map(|(stream, _)| Stream::Tcp(stream))
            });
            trouble |= admit(shared, &crowd, accepted);
        }
        if let Some(unix) = &listeners.unix {
            let accepted = accept_one(unix, |listener| {
                listener.accept().map(|(stream, _)| Stream::Unix(stream))
            });
            trouble |= admit(shared, &crowd, accepted);
        }
        if trouble {
            // Most likely no descriptors are left; the connection stays in the backlog meanwhile.
            std::thread::sleep(Duration::from_millis(50));
        }
        timeout = waiting.then_some(SWEEP);
    }
}

/// A connection, nothing when none waits, or the system's refusal.
fn accept_one<L>(
    listener: &L,
    accept: impl FnOnce(&L) -> std::io::Result<Stream>,
) -> std::io::Result<Option<Stream>> {
    use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    match fork::make_private(|| accept(listener)) {
        Ok(stream) => Ok(Some(stream)),
        Err(error) if matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Starts the handshake of an accepted connection. True when the system refused something.
fn admit(
    shared: &Arc<Shared>,
    crowd: &Arc<Crowd>,
    accepted: std::io::Result<Option<Stream>>,
) -> bool {
    let stream = match accepted {
        Ok(Some(stream)) => stream,
        Ok(None) => return false,
        Err(cause) => {
            if let Some(suppressed) = shared.strangers.lock().line() {
                tracing::warn!(%cause, suppressed, "cannot accept a connection");
            }
            return true;
        }
    };
    crowd.wait_for_room(shared);
    let place = crowd.enter();
    let ours = Arc::clone(shared);
    let spawned = threads::spawn("unisono-handshake", move || {
        let peer = stream.peer();
        match receive(&ours, stream, &place.guest) {
            Ok(()) => {}
            Err(reason) if reason.is_usual => {
                tracing::debug!(%peer, %reason, "a connection came to nothing");
            }
            Err(reason) => {
                if let Some(suppressed) = ours.strangers.lock().line() {
                    tracing::warn!(%peer, %reason, suppressed, "turned a connection away");
                }
            }
        }
    });
    if let Err(cause) = &spawned
        && let Some(suppressed) = shared.strangers.lock().line()
    {
        tracing::warn!(%cause, suppressed, "cannot start a thread for a connection, which is closed");
    }
    spawned.is_err()
}

/// Drops parked streams whose time is over. True when some remain.
fn sweep(shared: &Shared) -> bool {
    let now = Instant::now();
    let mut parked = shared.parked.lock();
    let expired: Vec<Parked> = parked
        .extract_if(.., |parked| parked.expires <= now)
        .collect();
    let remain = !parked.is_empty();
    drop(parked);
    for parked in expired {
        let peer = peer_of(&parked.data);
        tracing::warn!(%peer, "the control connection of a link did not come");
    }
    remain
}

/// An accepted connection.
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Stream {
    /// Who is there, for logs.
    fn peer(&self) -> String {
        match self {
            Self::Tcp(stream) => peer_of(stream),
            Self::Unix(_) => "a process of this host".to_owned(),
        }
    }
}

fn peer_of(stream: &TcpStream) -> String {
    match stream.peer_addr() {
        Ok(address) => address.to_string(),
        Err(_) => "an address that is gone".to_owned(),
    }
}

/// Why a connection was turned away, for the log.
struct Reason {
    text: String,
    /// It happens among members: attempts that cross, and ranks that leave.
    is_usual: bool,
}

impl Reason {
    fn new(text: String) -> Self {
        Self {
            text,
            is_usual: false,
        }
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<Cut> for Reason {
    fn from(cut: Cut) -> Self {
        let is_usual = matches!(cut, Cut::Closed | Cut::Refused | Cut::CalledOff);
        let text = match cut {
            Cut::Closed | Cut::Refused => {
                "it closed the connection during the handshake".to_owned()
            }
            Cut::TimedOut | Cut::Silent => "it did not complete the handshake in time".to_owned(),
            Cut::CalledOff => {
                "it had not completed the handshake when its place was needed".to_owned()
            }
            Cut::System(error) => error.to_string(),
        };
        Self { text, is_usual }
    }
}

impl From<Error> for Reason {
    fn from(error: Error) -> Self {
        Self::new(error.message)
    }
}

/// Takes a connection from its first byte to a link, or to its end.
fn receive(shared: &Shared, stream: Stream, guest: &Guest) -> Result<(), Reason> {
    let patience = Patience {
        deadline: guest.since + shared.limits.handshake,
        called_off: [&guest.shown_out, &shared.stopping],
    };
    if let Stream::Unix(stream) = &stream
        && let Some(user) = foreign_user(stream)
    {
        return Err(Reason::new(format!("it belongs to {user}")));
    }
    let challenged = match examine(shared, &stream, guest, &patience) {
        Ok(challenged) => challenged,
        Err(reason) => {
            refuse(&stream, guest);
            return Err(reason);
        }
    };
    let (membership, challenged) = challenged;
    patience.write(&stream, challenged.frame())?;
    let mut proof = [0; PROOF_BYTES];
    patience.read(&stream, &mut proof)?;
    let (hello, answers) = challenged.verify(&proof)?;
    guest.proven.store(true, Ordering::Release);
    let visit = Visit {
        shared,
        membership,
        hello,
        answers,
        patience,
    };
    visit.serve(stream)
}

/// Reads the hello and judges it: the connection holds the key of a member, or a recording of one that did.
fn examine(
    shared: &Shared,
    stream: &Stream,
    guest: &Guest,
    patience: &Patience<'_>,
) -> Result<(Arc<Membership>, Challenged), Reason> {
    let mut hello = [0; HELLO_BYTES];
    patience.read(stream, &mut hello)?;
    let stranger = Stranger::new(hello)?;
    let group = stranger.group();
    let found = shared.group((group, stranger.to()), patience, || has_ended(stream))?;
    let Some(membership) = found else {
        return Err(Reason::new(format!(
            "it asks for rank {} of group {}, which this process is not (or not yet)",
            stranger.to(),
            Hex(&group)
        )));
    };
    let challenged = stranger.challenge(&membership.key)?;
    guest.greeted.store(true, Ordering::Release);
    Ok((membership, challenged))
}

/// Says that nothing will follow: the same byte whatever was wrong, but for a connection that only lost its place.
fn refuse(stream: &Stream, guest: &Guest) {
    let reply = match guest.shown_out.load(Ordering::Acquire) {
        true => Reply::Busy,
        false => Reply::Refused,
    };
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    // A peer that has gone does not need it.
    let _ = send(stream, &[reply as u8], flags);
}

/// A connection from a proven member.
struct Visit<'a> {
    shared: &'a Shared,
    membership: Arc<Membership>,
    hello: Hello,
    answers: Answers,
    patience: Patience<'a>,
}

impl Visit<'_> {
    fn serve(mut self, stream: Stream) -> Result<(), Reason> {
        let from = self.hello.from;
        if !self.membership.has_peer(from) {
            self.answer(&stream, Answer::Failed)?;
            return Err(Reason::new(format!(
                "it says that it is rank {from}, as this is"
            )));
        }
        match (self.hello.purpose, stream) {
            (Purpose::SharedMemory, Stream::Unix(stream)) => self.share_memory(stream),
            (Purpose::TcpData, Stream::Tcp(stream)) => self.park(stream),
            (Purpose::TcpControl, Stream::Tcp(stream)) => self.pair(stream),
            (_, stream) => {
                self.answer(&stream, Answer::Failed)?;
                Err(Reason::new(
                    "it came over the wrong kind of socket".to_owned(),
                ))
            }
        }
    }

    fn answer(&mut self, stream: impl AsFd, answer: Answer) -> Result<(), Reason> {
        let frame = self.answers.frame(answer)?;
        Ok(self.patience.write(stream, &frame)?)
    }

    /// The right to make this link; `None` after the answer that refuses it.
    fn claim(&mut self, stream: impl AsFd) -> Result<Option<Claim>, Reason> {
        let Hello { from, lane, .. } = self.hello;
        if self.membership.is_closed() {
            self.answer(stream, Answer::Left)?;
            return Ok(None);
        }
        match self
            .membership
            .claim_accepting(from, lane, &self.patience)?
        {
            Ok(claim) => Ok(Some(claim)),
            Err(answer) => {
                tracing::debug!(from, %lane, ?answer, "refused a link");
                self.answer(stream, answer)?;
                Ok(None)
            }
        }
    }

    /// Receives the segment of a shared memory link and opens it.
    fn share_memory(mut self, stream: UnixStream) -> Result<(), Reason> {
        let Some(claim) = self.claim(&stream)? else {
            return Ok(());
        };
        self.answer(&stream, Answer::Accept)?;
        let segment = self.patience.receive_fd(&stream)?;
        let channel = fork::make_private(|| stream.try_clone()).map_err(Cut::from)?;
        match ShmLink::open(stream, segment) {
            Ok(link) => {
                self.answer(&channel, Answer::Accept)?;
                claim.deliver(Box::new(link));
                Ok(())
            }
            Err(error) => {
                // The peer will try TCP at once, and needs the claim for that.
                drop(claim);
                self.answer(&channel, Answer::Failed)?;
                Err(error.into())
            }
        }
    }

    /// Keeps the stream of a TCP link until its control connection comes. No thread waits for that: if every place
    /// were taken by streams, their control connections could not come in.
    fn park(mut self, stream: TcpStream) -> Result<(), Reason> {
        let Some(claim) = self.claim(&stream)? else {
            return Ok(());
        };
        let channel = fork::make_private(|| stream.try_clone()).map_err(Cut::from)?;
        let accept = self.answers.frame(Answer::Accept)?;
        let (shared, patience, link) = (self.shared, self.patience, self.hello.link);
        let cipher = self.membership.key.encrypts();
        let cipher = cipher.then(|| self.answers.into_cipher());
        shared.parked.lock().push(Parked {
            link,
            claim,
            data: stream,
            cipher,
            expires: Instant::now() + shared.limits.handshake,
        });
        shared.wake_acceptor();
        // A peer that has gone does not come for it: it expires.
        Ok(patience.write(&channel, &accept)?)
    }

    fn unpark(&self) -> Option<Parked> {
        let Hello {
            from, lane, link, ..
        } = self.hello;
        let mut parked = self.shared.parked.lock();
        let at = parked.iter().position(|parked| {
            parked.link == link && parked.claim.is_for(&self.membership, from, lane)
        })?;
        Some(parked.swap_remove(at))
    }

    /// Joins the control connection with its stream.
    fn pair(mut self, control: TcpStream) -> Result<(), Reason> {
        let Some(Parked {
            claim,
            data,
            cipher,
            ..
        }) = self.unpark()
        else {
            if self.membership.is_closed() {
                self.answer(&control, Answer::Left)?;
                return Ok(());
            }
            self.answer(&control, Answer::Failed)?;
            return Err(Reason::new(
                "a control connection without its stream".to_owned(),
            ));
        };
        let channel = fork::make_private(|| control.try_clone()).map_err(Cut::from)?;
        let peer = peer_of(&data);
        match TcpLink::new(data, control, peer) {
            Ok(link) => {
                self.answer(&channel, Answer::Accept)?;
                let link = match cipher {
                    Some(data) => link.encrypted(data, self.answers.into_cipher()),
                    None => link,
                };
                claim.deliver(Box::new(link));
                Ok(())
            }
            Err(error) => {
                drop(claim);
                self.answer(&channel, Answer::Failed)?;
                Err(error.into())
            }
        }
    }
}
