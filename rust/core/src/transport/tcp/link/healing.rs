//! The connections of a link that break, and those that take their place.

use std::os::fd::AsFd;

use rustix::io::Errno;
use socket2::SockRef;

use super::TcpLink;
use crate::transport::Link;
use crate::transport::control::{Frame, describe};
use crate::transport::tcp::breaches::{Fault, FoundConnection};
use crate::transport::tcp::connection::{Connection, say};
use crate::transport::tcp::keepalive;
use crate::transport::tcp::kernel::{is_unanswered, unacknowledged};
use crate::transport::tcp::mending::{Mend, Part, SocketId};

/// The errors of a connection that the system has given up, since the host has been silent for too long.
const SILENT: [Errno; 4] = [
    Errno::TIMEDOUT,
    Errno::HOSTUNREACH,
    Errno::NETUNREACH,
    Errno::HOSTDOWN,
];

/// Whether a connection with this cause of its end had been without an answer.
fn is_silence(cause: &str) -> bool {
    SILENT.into_iter().any(|errno| cause == describe(errno))
}

impl TcpLink {
    /// Calls `visit` for each connection that carries bytes: which it is, and whether this side opens it.
    pub(super) fn each(&mut self, mut visit: impl FnMut((Part, bool), &mut Connection)) {
        visit((Part::Data, self.dials), &mut self.data);
        for (number, stripe) in self.outgoing.numbered() {
            visit((Part::Stripe(number), true), stripe);
        }
        for (number, stripe) in self.incoming.numbered() {
            visit((Part::Stripe(number), false), stripe);
        }
    }

    /// Goes on with connections that have been made again, and finds those that have broken. `control`: how its channel broke.
    pub(super) fn look_for_breaches(&mut self, control: Option<String>) {
        self.hear_of_breaks();
        let mut found = Vec::new();
        let mut note = |(part, is_ours), number, cause: String| {
            found.push(FoundConnection {
                socket: SocketId { part, number },
                is_ours,
                fault: match is_silence(&cause) {
                    true => Fault::Silent(cause),
                    false => Fault::Broken(cause),
                },
            });
        };
        // Nothing comes back over the others either, if they lead the same way.
        let was_silent = control.as_ref().is_some_and(|cause| is_silence(cause));
        if let Some(cause) = control {
            note((Part::Control, self.dials), self.control_sockets, cause);
        }
        let (mut beyond, mut all_flow) = (None, true);
        let control = SocketId {
            part: Part::Control,
            number: self.control_sockets,
        };
        let mut sockets = vec![(control, self.dials)];
        self.each(|(part, is_ours), connection| {
            // The peer closes a stripe that it uses no more.
            if is_ours || part == Part::Data {
                connection.look();
            }
            all_flow &= connection.go_on();
            let number = connection.sockets();
            sockets.push((SocketId { part, number }, is_ours));
            if let Some(cause) = connection.cause() {
                note((part, is_ours), number, cause.to_owned());
            }
            let cause = || connection.beyond().map(str::to_owned);
            beyond = beyond.take().or_else(cause);
        });
        if self.in_doubt || was_silent || self.is_unanswered() {
            self.suspect(was_silent, &sockets, &mut found);
        }
        match (beyond, self.breaches.look(found, &sockets)) {
            (Some(what), _) | (None, Err(what)) => self.end(what),
            (None, Ok(new)) => {
                for socket in new {
                    self.news = true;
                    self.tell_of_break(socket);
                }
                let dark: Vec<SocketId> = self.breaches.dark().collect();
                self.each(|(part, is_ours), connection| {
                    let number = connection.sockets();
                    let is_dark = is_ours && dark.contains(&SocketId { part, number });
                    connection.freeze(is_dark);
                });
            }
        }
        if all_flow {
            self.breaches.settle();
        }
    }

    /// The peer has seen connections break that this side opens.
    fn hear_of_breaks(&mut self) {
        for socket in self.control.take_broken() {
            self.each(|(part, is_ours), connection| {
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
        self.each(|(part, is_ours), connection| {
            is_theirs |= !is_ours
                && (part, connection.sockets()) == (socket.part, socket.number)
                && connection.cause().is_some();
        });
        if is_theirs {
            self.control.send(&Frame::Broken(socket));
        }
    }

    /// Looks at the next look more closely whether anything comes back.
    pub(super) fn doubt(&mut self) {
        self.in_doubt = true;
        self.doubted.clear();
    }

    /// Adds the connections that this side opens, where nothing comes back over one of the link. The peer opens the others: it
    /// may see nothing of it, so it is told.
    fn suspect(
        &mut self,
        was_silent: bool,
        sockets: &[(SocketId, bool)],
        found: &mut Vec<FoundConnection>,
    ) {
        let mut is_dark = was_silent || is_unanswered(self.control.fd());
        // The system may yet send again what is on its way.
        let mut is_on_its_way = unacknowledged(&self.control) > 0;
        let mut theirs = Vec::new();
        self.each(|(part, is_ours), connection| {
            is_on_its_way |= connection.is_flowing() && unacknowledged(connection) > 0;
            if connection.is_flowing() && is_unanswered(connection.as_fd()) {
                is_dark = true;
                let number = connection.sockets();
                theirs.extend((!is_ours).then_some(SocketId { part, number }));
            }
        });
        self.in_doubt = is_dark || is_on_its_way;
        for socket in theirs {
            if !self.doubted.contains(&socket) {
                self.doubted.push(socket);
                self.control.send(&Frame::Broken(socket));
            }
        }
        for (socket, is_ours) in sockets.iter().copied() {
            let is_known =
                |found: &FoundConnection| (found.socket, found.is_ours) == (socket, is_ours);
            if is_dark && is_ours && !found.iter().any(is_known) {
                found.push(FoundConnection {
                    socket,
                    is_ours,
                    fault: Fault::Dark,
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
            answer,
        } = mend;
        self.news = true;
        if part == Part::Control {
            say(&stream, &answer);
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
                for socket in self.breaches.theirs().collect::<Vec<_>>() {
                    self.tell_of_break(socket);
                }
            }
            return;
        }
        self.limit(keepalive::limit_data(&stream, self.host_limit));
        let mut replaced = Ok(());
        let mut further = Some((stream, cipher));
        self.each(|place, connection| {
            if place == (part, is_ours)
                && number > connection.sockets()
                && let Some((stream, cipher)) = further.take()
            {
                replaced = connection.replace(number, stream, cipher, &answer);
            }
        });
        if let Some((stream, cipher)) = further {
            // A stripe that is not here broke before this side had it. Another one is of a try that the peer has given up, and
            // learns that by its end.
            say(&stream, &answer);
            if let (Part::Stripe(stripe), false) = (part, is_ours) {
                replaced = Connection::further(number, stream, cipher)
                    .map(|connection| self.incoming.add_again(stripe, connection));
            }
        }
        if let Err(cause) = replaced {
            self.end(cause.to_string());
        }
    }
}
