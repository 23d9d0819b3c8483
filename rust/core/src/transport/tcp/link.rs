//! A link over two TCP connections: one for the bytes, which it carries as they are, and one for
//! control. For long messages more may come, see [`stripes`](super::stripes).
//!
//! Small receives go through a buffer, so that a message's header and what follows it cost one
//! system call; large ones go from the kernel straight into their destination. A fold lends the
//! buffer.
//!
//! A connection that breaks without a farewell is opened again, see [`mending`](super::mending): the link is lost only when
//! that cannot be, and until then the peer counts as present. After a farewell the bytes before it may be on their way for
//! long, on a slow network, and their end comes, or that of the host: there is no limit. An abort is reported at once.

use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use socket2::SockRef;

use super::breaches::Breaches;
use super::buffer::{Buffer, UNBUFFERED_FROM};
use super::connection::Connection;
use super::keepalive;
use super::mending::{Breach, Hindrance, Mend, Outage, SocketId};
use super::streams::{Incoming, Outgoing};
use super::stripes::Stripe;
use crate::error::{Code, Error, Result};
use crate::reduce::Workers;
use crate::transport::cipher::{Cipher, Failure};
use crate::transport::control::{Control, Frame, describe};
use crate::transport::{
    ControlChannel, Interest, Link, MESSAGE_HEADER, Notice, PeerState, Position,
};

/// How long an answer of the peer's process may take before it is worth a word.
const SILENCE: Duration = Duration::from_secs(1);

/// How long an answer may take before the connections are looked at.
const UNANSWERED: Duration = Duration::from_millis(100);

/// The most one call moves, so that a caller with several links comes round to all of them.
const MOST_AT_ONCE: usize = 4 << 20;

/// One end of a link over TCP.
pub struct TcpLink {
    data: Connection,
    outgoing: Outgoing,
    incoming: Incoming,
    control: Control,
    /// The number of sockets that the control channel had before the present one.
    control_sockets: u32,
    /// This side has opened the link, and opens its connections again.
    dials: bool,
    /// The connections that are broken.
    breaches: Breaches,
    /// It is not known whether something comes back over all connections: each look asks the system.
    in_doubt: bool,
    /// Sockets that the peer has been told are dark, since they were last in doubt.
    doubted: Vec<SocketId>,
    peer: String,
    buffer: Buffer,
    /// Bytes in the buffer that the last fold left: a part of an element, whose rest has yet to come.
    part: usize,
    /// Receiving has come to its end.
    drained: bool,
    /// This side has said farewell.
    leaving: bool,
    /// The reason for the end of the link.
    broken: Option<String>,
    /// After how many seconds without an answer the peer's host is lost.
    host_limit: Option<u32>,
    /// Whether something was seen that [`ControlChannel::peer_state`] has not told yet.
    news: bool,
}

impl TcpLink {
    /// This side's end of a link over two connections to the same peer: `data`, and `control` for its control channel. `peer`
    /// is the peer's address, for messages. `dials`: this side has opened the connections.
    ///
    /// # Errors
    /// `System` when a socket does not take its options.
    pub fn new(data: TcpStream, control: TcpStream, peer: String, dials: bool) -> Result<Self> {
        let set_up = |cause| Error::system(format_args!("set up tcp {peer}"), cause);
        let is_near = data.peer_addr().is_ok_and(|peer| peer.ip().is_loopback());
        let data = Connection::new(data, None).map_err(set_up)?;
        control
            .set_nonblocking(true)
            .and_then(|()| control.set_nodelay(true))
            .map_err(set_up)?;
        Ok(Self {
            data,
            outgoing: Outgoing::new(is_near),
            incoming: Incoming::default(),
            control: Control::new(control),
            control_sockets: 0,
            dials,
            breaches: Breaches::default(),
            in_doubt: false,
            doubted: Vec::new(),
            peer,
            buffer: Buffer::default(),
            part: 0,
            drained: false,
            leaving: false,
            broken: None,
            host_limit: None,
            news: false,
        })
    }

    /// The link with all that it carries encrypted, in both directions. Both ends do so before they use it.
    #[must_use]
    pub fn encrypted(mut self, data: Cipher, control: Cipher) -> Self {
        self.data.seal(data);
        Self {
            control: self.control.encrypted(control),
            ..self
        }
    }

    /// Makes the system call, again after a signal; returns how many bytes it sent.
    fn sent_by(&mut self, mut call: impl FnMut(&mut Self) -> Result<usize, Errno>) -> usize {
        while self.broken.is_none() && !self.leaving {
            match call(self) {
                Ok(count) => return count,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(errno) => self.end(describe(errno)),
            }
        }
        0
    }

    /// Receives into the buffer, as much as it has room for, where `most` bytes are wanted. True when something came.
    fn fill(&mut self, most: usize) -> Result<bool> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let received = self.receive(buffer.room(most));
        buffer.fill(received.as_ref().copied().unwrap_or(0));
        self.buffer = buffer;
        received.map(|count| count > 0)
    }

    /// Receives into `bytes` by one system call.
    fn receive(&mut self, bytes: &mut [u8]) -> Result<usize> {
        while !self.drained {
            let received = self.incoming.receive(&mut self.data, bytes);
            match received {
                Ok(count) => return Ok(count),
                Err(Failure::Socket(Errno::AGAIN)) => return Ok(0),
                Err(Failure::Socket(Errno::INTR)) => {}
                Err(Failure::Socket(Errno::PROTO)) => {
                    self.end_receiving("bytes that are no frame".to_owned());
                    return Err(self.corrupt());
                }
                Err(Failure::Socket(errno)) => self.end_receiving(describe(errno)),
                Err(Failure::Forged) => {
                    self.end_receiving("forged bytes".to_owned());
                    return Err(self.forged());
                }
            }
        }
        Ok(0)
    }

    /// Whether a connection has bytes that a peer may lack which has not left.
    fn may_lack(&self, has: impl FnMut(&Connection) -> bool) -> bool {
        let outgoing = self.outgoing.stripes().iter();
        let mut connections = outgoing.chain(self.incoming.stripes()).chain([&self.data]);
        self.broken.is_none() && !self.control.has_left() && connections.any(has)
    }

    fn forged(&self) -> Error {
        let message = format!(
            "bytes from {} were changed, repeated or left out on the way: an attacker on the path, or a faulty device, alters the connection",
            self.peer
        );
        Error::new(Code::Untrusted, message)
    }

    fn corrupt(&self) -> Error {
        let message = format!(
            "{} sent bytes that are no frame: its memory is damaged, or its version of unisono differs",
            self.peer
        );
        Error::new(Code::Untrusted, message)
    }

    fn end_receiving(&mut self, what: String) {
        self.drained = true;
        self.end(what);
    }

    fn end(&mut self, what: String) {
        if self.broken.is_none() {
            self.broken = Some(what);
            self.news = true;
        }
    }

    /// Has a socket of the link end with the peer's host, as the caller has said.
    fn limit(&self, limited: std::io::Result<()>) {
        if let Err(cause) = limited {
            tracing::warn!(peer = %self.peer, %cause, "the end of this peer's host may go unnoticed");
        }
    }

    /// Follows the peer's announcement of frames, and its answer to that of this side.
    fn follow(&mut self) {
        if let Some(until) = self.control.take_framing() {
            match self.incoming.announce(until) {
                true => self.control.send(&Frame::FramingHeard),
                false => {
                    let what = "frames announced where none can begin";
                    self.end_receiving(what.to_owned());
                    self.control.refuse(what.to_owned());
                }
            }
        }
        if self.control.take_framing_heard() {
            self.outgoing.is_heard();
        }
    }
}

impl Link for TcpLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize> {
        let bytes = &bytes[..bytes.len().min(MOST_AT_ONCE)];
        if bytes.is_empty() {
            return Ok(0);
        }
        Ok(self.sent_by(|link| link.outgoing.send(&mut link.data, &[], bytes)))
    }

    fn try_send_message(&mut self, header: &[u8], payload: &[u8]) -> Result<usize> {
        let payload = &payload[..payload.len().min(MOST_AT_ONCE)];
        Ok(self.sent_by(|link| link.outgoing.send(&mut link.data, header, payload)))
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> Result<usize> {
        self.part = 0;
        let mut received = self.buffer.take(bytes);
        if received == bytes.len() {
            return Ok(received);
        }
        if bytes.len() - received >= UNBUFFERED_FROM {
            let limit = bytes.len().min(received + MOST_AT_ONCE);
            received += self.receive(&mut bytes[received..limit])?;
        } else if self.fill(0)? {
            received += self.buffer.take(&mut bytes[received..]);
        }
        Ok(received)
    }

    fn try_recv_by(&mut self, _: &dyn Fn(&mut [u8], &[u8]), bytes: &mut [u8]) -> Result<usize> {
        // The kernel copies, by the threads of this rank where there are several.
        self.try_recv(bytes)
    }

    fn share(&mut self, workers: &Arc<Workers>) {
        self.buffer.share(workers.threads());
        self.outgoing.share(Arc::clone(workers));
        self.incoming.share(Arc::clone(workers));
    }

    fn try_fold(&mut self, max: usize, align: usize, fold: &mut dyn FnMut(&[u8])) -> Result<usize> {
        assert!(
            (1..=16).contains(&align) && max.is_multiple_of(align),
            "a fold of at most {max} bytes in elements of {align}"
        );
        // A single connection is received by one thread, in pieces that stay in its caches.
        self.part = 0;
        let has_several = self.incoming.stripes().next().is_some();
        let (mut folded, wanted) = (0, if has_several { max } else { 0 });
        while folded < max.min(MOST_AT_ONCE) {
            let run = self.buffer.bytes().len().min(max - folded) / align * align;
            if run > 0 {
                fold(&self.buffer.bytes()[..run]);
                self.buffer.consume(run);
                folded += run;
            } else if !self.fill(wanted)? {
                self.part = self.buffer.bytes().len();
                break;
            }
        }
        Ok(folded)
    }

    fn peek(&mut self) -> Result<Option<[u8; MESSAGE_HEADER]>> {
        // A link over which nothing comes needs no buffer.
        let may_come = self.buffer.bytes().len() < MESSAGE_HEADER && !self.drained;
        if may_come && self.incoming.may_receive(&self.data) {
            self.fill(0)?;
        }
        Ok(self.buffer.bytes().first_chunk().copied())
    }

    fn arm(&mut self, interest: Interest) -> bool {
        if self.news || self.control.has_news() {
            return true;
        }
        // Readiness is watched by its edges, and this asks for its level: what an earlier wake-up
        // announced and has not been taken since is not slept through.
        let has = || {
            let is_here = self.buffer.bytes().len() > self.part;
            is_here || (!self.drained && self.incoming.may_receive(&self.data))
        };
        let mut connections = self
            .outgoing
            .stripes()
            .iter()
            .chain(self.incoming.stripes());
        if self.data.may_go_on() || connections.any(Connection::may_go_on) {
            return true;
        }
        let takes = || {
            let may_send = self.broken.is_none() && !self.leaving;
            may_send && self.outgoing.may_send(&self.data)
        };
        (interest.readable && has()) || (interest.writable && takes())
    }

    fn disarm(&mut self) {}

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let stripes = self.outgoing.stripes().iter();
        let stripes = stripes.chain(self.incoming.stripes()).map(AsFd::as_fd);
        [self.data.as_fd(), self.control.fd()]
            .into_iter()
            .chain(stripes)
            .collect()
    }

    fn memory(&self) -> usize {
        let connections = self.data.memory() + self.incoming.memory() + self.outgoing.memory();
        self.buffer.memory() + connections
    }

    fn describe(&self) -> String {
        match self.data.is_sealed() {
            false => format!("tcp {}", self.peer),
            true => format!("encrypted tcp {}", self.peer),
        }
    }

    fn wants_stripes(&mut self) -> Option<Range<u8>> {
        match self.broken.is_none() && !self.leaving {
            true => self.outgoing.wants(),
            false => None,
        }
    }

    fn add_stripe(&mut self, stripe: Stripe) {
        let (number, is_ours, connection) = stripe.into_parts();
        self.limit(keepalive::limit_data(connection.socket(), self.host_limit));
        if !is_ours {
            self.incoming.add(number, connection);
        } else if let Some(until) = self.outgoing.add(number, connection) {
            self.control.send(&Frame::Framing(until));
        }
    }

    fn give_up_stripes(&mut self) {
        self.outgoing.give_up();
    }

    fn wants_mending(&mut self) -> Option<Breach> {
        self.breaches.next_untold()
    }

    fn mend(&mut self, mend: Mend) {
        self.replace(mend);
    }

    fn cannot_mend(&mut self, socket: SocketId, why: &Hindrance) {
        if let Some(what) = self.breaches.end(socket, why) {
            self.end(what);
        }
    }

    fn needs_mending(&self, socket: SocketId) -> bool {
        self.breaches.has(socket) && self.broken.is_none()
    }

    fn is_mending(&self) -> bool {
        let outgoing = self.outgoing.stripes().iter();
        let mut connections = outgoing.chain(self.incoming.stripes()).chain([&self.data]);
        let all_flow = connections.all(Connection::is_flowing);
        (self.breaches.outage().is_some() || !all_flow) && self.broken.is_none()
    }

    fn is_owing(&self) -> bool {
        self.may_lack(Connection::is_owing)
    }

    fn is_settled(&self) -> bool {
        !self.may_lack(|connection| !connection.is_acknowledged())
    }

    fn is_unanswered(&self) -> bool {
        let silence = self.control.silence();
        silence.is_some_and(|silence| silence >= UNANSWERED) && self.broken.is_none()
    }

    fn is_in_doubt(&self) -> bool {
        self.in_doubt && self.broken.is_none()
    }

    fn take_healed(&mut self) -> Option<Outage> {
        self.breaches.take_healed()
    }
}

impl ControlChannel for TcpLink {
    fn peer_state(&mut self) -> PeerState {
        self.news = false;
        let mut said = self.control.peer_state();
        if self.control.take_questioned() {
            // The bytes for which it waits may have gone into a connection over which nothing comes there any more.
            self.doubt();
        }
        self.follow();
        if self.control.has_news() {
            said = self.control.peer_state();
        }
        if matches!(said, PeerState::Aborted(_) | PeerState::Broken(_)) {
            return said;
        }
        if said == PeerState::Present && self.outgoing.is_broken() {
            self.end("a connection for long messages broke".to_owned());
        }
        self.outgoing.drop_delivered();
        self.incoming.drop_ended();
        if said == PeerState::Left {
            self.breaches = Breaches::default();
            // The last bytes may be on their way again.
            self.each(|_, connection| {
                connection.go_on();
            });
            return match self.drained || self.incoming.has_ended(&self.data) {
                true => said,
                false => PeerState::Present,
            };
        }
        if self.broken.is_none() {
            self.look_for_breaches(match said {
                PeerState::Lost(cause) => Some(cause),
                _ => None,
            });
        }
        match &self.broken {
            Some(what) => PeerState::Lost(what.clone()),
            None => PeerState::Present,
        }
    }

    fn lose_silent_host_after(&mut self, seconds: Option<u32>) {
        self.host_limit = seconds;
        let Some(seconds) = seconds else { return };
        let control = SockRef::from(&self.control);
        self.limit(keepalive::limit(self.data.socket(), control, seconds));
    }

    fn ask(&mut self) {
        // Looked at more closely with the state.
        self.doubt();
        self.control.ask();
    }

    fn questions(&self) -> Option<BorrowedFd<'_>> {
        Some(self.control.fd())
    }

    fn stall(&self) -> Option<String> {
        if let Some(Outage { since, cause }) = self.breaches.outage() {
            let seconds = since.elapsed().as_secs_f64();
            return Some(format!(
                "a connection to it broke {seconds:.1} s ago ({cause}) and is being opened again"
            ));
        }
        let silence = self
            .control
            .silence()
            .filter(|silence| *silence >= SILENCE)?;
        let seconds = silence.as_secs_f64();
        // A host that had not answered for that long would be lost.
        let limit = self
            .host_limit
            .map(|limit| Duration::from_secs(limit.into()));
        Some(match limit.is_some_and(|limit| silence > limit + SILENCE) {
            true => format!(
                "its host answers, but its process has not for {seconds:.1} s: it is stopped, or starved of time or memory"
            ),
            false => format!(
                "its process has not answered for {seconds:.1} s: it is stopped, or starved of time or memory, or its \
                 host cannot be reached"
            ),
        })
    }

    fn send_abort(&mut self, notice: &Notice) {
        self.control.send(&Frame::Abort(notice.clone()));
    }

    fn send_farewell(&mut self) {
        self.control.send(&Frame::Farewell);
        // The peer sees the end of the bytes at once, also where this side keeps the link for a
        // while. Failing to say so costs the peer the time to settle.
        self.leaving = true;
        self.data.finish();
        self.outgoing.finish();
    }

    fn has_left(&mut self) -> bool {
        self.control.drain();
        self.follow();
        self.control.has_left()
    }

    fn is_delivered(&mut self) -> bool {
        // A socket that is closed while something unread is there, or to which something comes afterwards, resets the
        // connection: what it had not sent by then is lost.
        let (mut unread, mut discarded) = ([0; 4096], 0);
        while !self.drained {
            match self.receive(&mut unread) {
                Ok(0) => break,
                Ok(_) if discarded > MOST_AT_ONCE => return false,
                Ok(count) => discarded += count,
                Err(_) => return true,
            }
        }
        self.drained || (self.data.is_acknowledged() && self.outgoing.is_acknowledged())
    }

    fn send_position(&mut self, position: &Position) {
        self.control.send(&Frame::Position(*position));
    }

    fn take_position(&mut self) -> Option<Position> {
        self.control.take_position()
    }
}

mod healing;
#[cfg(test)]
pub(in crate::transport) mod tests;
