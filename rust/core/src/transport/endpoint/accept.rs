//! Accepting: one thread waits on the listening sockets; each connection is judged on a short-lived thread of its
//! own, within a total time and a total number (`crowd.rs`). What a proven member asks for is then served by the
//! transport whose row in `transports` has that purpose.
//!
//! Over the Unix socket only processes of this process's user are heard: what is shared there is memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{SendFlags, send};

use super::crowd::{Crowd, Guest};
use super::listen::Listeners;
use super::membership::Membership;
use super::parked::Parked;
use super::rate;
use super::shared::Shared;
use super::transports::TRANSPORTS;
use super::visit::{Reason, Stream, Visit, peer_of};
use super::wire::{Patience, foreign_user, has_ended, timespec};
use crate::fork;
use crate::threads;
use crate::transport::handshake::{Answer, Challenged, HELLO_BYTES, PROOF_BYTES, Reply, Stranger};
use crate::transport::keys::Hex;

/// How often the accepting thread looks for parked streams that no group has asked for.
const SWEEP: Duration = Duration::from_secs(1);

/// The accepting thread.
pub(super) fn run(shared: &Arc<Shared>, mut listeners: Listeners) {
    let crowd = Arc::new(Crowd::new());
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

/// Takes a connection from its first byte to a link, or to its end.
fn receive(shared: &Shared, stream: Stream, guest: &Guest) -> Result<(), Reason> {
    let patience = Patience {
        deadline: guest.since + shared.limits.handshake,
        called_off: [&guest.shown_out, &shared.stopping],
        turn: None,
    };
    if let Stream::Unix(stream) = &stream
        && let Some(user) = foreign_user(stream)
    {
        return Err(Reason::new(format!("it belongs to {user}")));
    }
    let mut hello = [0; HELLO_BYTES];
    if let Err(cut) = patience.read(&stream, &mut hello) {
        refuse(&stream, guest);
        return Err(cut.into());
    }
    if let (Stream::Tcp(stream), true) = (&stream, rate::is_asked_for(&hello)) {
        return Ok(rate::answer(stream, &shared.is_being_measured, &patience)?);
    }
    let challenged = match examine(shared, hello, (&stream, guest), &patience) {
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
    serve(visit, stream)
}

/// Judges a hello: the connection holds the key of a member, or a recording of one that did.
fn examine(
    shared: &Shared,
    hello: [u8; HELLO_BYTES],
    (stream, guest): (&Stream, &Guest),
    patience: &Patience<'_>,
) -> Result<(Arc<Membership>, Challenged), Reason> {
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

/// Does what a proven member asks for.
fn serve(mut visit: Visit<'_>, stream: Stream) -> Result<(), Reason> {
    let from = visit.hello.from;
    if !visit.membership.has_peer(from) {
        visit.answer(&stream, Answer::Failed)?;
        return Err(Reason::new(format!(
            "it says that it is rank {from}, as this is"
        )));
    }
    let purpose = visit.hello.purpose;
    let serves = TRANSPORTS
        .iter()
        .find(|row| row.purposes.contains(&purpose));
    match serves {
        Some(transport) => (transport.accept)(visit, stream),
        None => visit.turn_away(&stream),
    }
}
