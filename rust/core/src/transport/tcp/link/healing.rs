//! The connections of a link that break, and those that take their place.

use std::os::fd::AsFd;

use rustix::io::Errno;
use socket2::SockRef;

use super::TcpLink;
use crate::transport::Link;
use crate::transport::control::{Frame, describe};
use crate::transport::tcp::breaches::{Fault, Found};
use crate::transport::tcp::connection::Connection;
use crate::transport::tcp::keepalive;
use crate::transport::tcp::kernel::is_unanswered;
use crate::transport::tcp::mending::{Mend, Part, SocketId};

impl TcpLink {
    /// Calls `visit` for each connection that carries bytes: which it is, whether this side opens it, and whether bytes are to
    /// come or go over it.
    pub(super) fn each(&mut self, mut visit: impl FnMut((Part, bool), bool, &mut Connection)) {
        visit((Part::Data, self.dials), true, &mut self.data);
        for (number, stripe) in self.outgoing.numbered() {
            visit((Part::Stripe(number), true), true, stripe);
        }
        // A stripe over which nothing is to come may have been closed by the peer.
        let expected = self.incoming.expected();
        for (number, stripe) in self.incoming.numbered() {
            visit(
                (Part::Stripe(number), false),
                expected.contains(&number),
                stripe,
            );
        }
    }

    /// Goes on with connections that have been made again, and finds those that have broken. `control`: how its channel broke.
    pub(super) fn look_for_breaches(&mut self, control: Option<String>) {
        self.hear_of_breaks();
        let mut found = Vec::new();
        let mut note = |(part, is_ours), number, cause: String| {
            found.push(Found {
                socket: SocketId { part, number },
                is_ours,
                fault: match cause == describe(Errno::TIMEDOUT) {
                    true => Fault::Silent(cause),
                    false => Fault::Broken(cause),
                },
            });
        };
        if let Some(cause) = control {
            note((Part::Control, self.dials), self.control_sockets, cause);
        }
        let (mut beyond, mut all_flow) = (None, true);
        self.each(|place, is_used, connection| {
            if is_used {
                connection.look();
            }
            all_flow &= connection.go_on();
            if let Some(cause) = connection.cause() {
                note(place, connection.sockets(), cause.to_owned());
            }
            let cause = || connection.beyond().map(str::to_owned);
            beyond = beyond.take().or_else(cause);
        });
        if self.is_dark || self.is_unanswered() {
            self.suspect(&mut found);
        }
        match (beyond, self.breaches.look(found)) {
            (Some(what), _) | (None, Err(what)) => self.end(what),
            (None, Ok(new)) => {
                for socket in new {
                    self.news = true;
                    self.tell_of_break(socket);
                }
            }
        }
        if all_flow {
            self.breaches.settle();
        }
    }

    /// The peer has seen connections break that this side opens.
    fn hear_of_breaks(&mut self) {
        for socket in self.control.take_broken() {
            self.each(|(part, is_ours), _, connection| {
                let is_it = (part, connection.sockets()) == (socket.part, socket.number);
                if is_ours && is_it {
                    connection.stop("the peer's end of it broke");
                }
            });
        }
    }

    /// Tells the peer, where it is the one that opens the connection: it may have seen nothing.
    fn tell_of_break(&mut self, socket: SocketId) {
        let mut is_theirs = false;
        self.each(|(part, is_ours), _, connection| {
            is_theirs |= !is_ours
                && (part, connection.sockets()) == (socket.part, socket.number)
                && connection.cause().is_some();
        });
        if is_theirs {
            self.control.send(&Frame::Broken(socket));
        }
    }

    /// Adds the connections that this side opens, where nothing comes back over one of the link.
    fn suspect(&mut self, found: &mut Vec<Found>) {
        let mut is_dark = is_unanswered(self.control.fd());
        let control = SocketId {
            part: Part::Control,
            number: self.control_sockets,
        };
        let mut sockets = vec![(control, self.dials)];
        self.each(|(part, is_ours), _, connection| {
            let number = connection.sockets();
            sockets.push((SocketId { part, number }, is_ours));
            is_dark |= connection.is_flowing() && is_unanswered(connection.as_fd());
        });
        self.is_dark = is_dark;
        for (socket, is_ours) in sockets {
            let is_known = |found: &Found| (found.socket, found.is_ours) == (socket, is_ours);
            if is_dark && is_ours && !found.iter().any(is_known) {
                let fault = Fault::Dark;
                found.push(Found {
                    socket,
                    is_ours,
                    fault,
                });
            }
        }
    }

    /// Puts a further socket in its place.
    pub(super) fn replace(&mut self, mend: Mend) {
        let Mend {
            socket: SocketId { part, number },
            is_ours,
            stream,
            cipher,
        } = mend;
        self.news = true;
        if part == Part::Control {
            if number > self.control_sockets && is_ours == self.dials {
                self.control_sockets = number;
                let set_up = stream
                    .set_nonblocking(true)
                    .and_then(|()| stream.set_nodelay(true));
                self.limit(set_up);
                if let Some(seconds) = self.host_limit {
                    self.limit(keepalive::end_when_silent(SockRef::from(&stream), seconds));
                }
                self.control.replace(stream, cipher);
            }
            return;
        }
        self.limit(keepalive::limit_data(&stream, self.host_limit));
        let mut replaced = Ok(());
        let mut further = Some((stream, cipher));
        self.each(|place, _, connection| {
            if place == (part, is_ours)
                && number > connection.sockets()
                && let Some((stream, cipher)) = further.take()
            {
                replaced = connection.replace(number, stream, cipher);
            }
        });
        if let Err(cause) = replaced {
            self.end(cause.to_string());
        }
    }
}
