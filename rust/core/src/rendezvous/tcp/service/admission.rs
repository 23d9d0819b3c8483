//! Which connections the server has: it accepts while there is room, and closes those that have the least claim to stay
//! when there is none. The [module above](super) says why strangers keep out no member.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};

use super::super::connection::{Connection, Stage};
use super::{LISTENER, Server};
use crate::fork;

/// How long the server accepts nothing after it could not.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The most connections that are accepted before the others are looked at again.
const ACCEPTED_AT_ONCE: usize = 64;

/// The connections that may be closed to make room for others, in this order, once they have been in their stage for that time:
/// strangers that have not said hello, those that have not proved it, and members.
pub(super) const CLASSES: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(250),
    Duration::from_secs(1),
];
pub(super) const MEMBERS: usize = 2;

pub(super) fn class(stage: &Stage) -> usize {
    match stage {
        Stage::Greeting => 0,
        Stage::Answered => 1,
        Stage::Ready | Stage::Waiting(_) | Stage::Replying => MEMBERS,
    }
}

impl Server {
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            let now = Instant::now();
            let wait = self.make_room(now);
            if !wait.is_zero() {
                return self.pause_accepting(now + wait);
            }
            let Some(listener) = &self.listener else {
                return;
            };
            match listener.accept() {
                Ok((stream, from)) => {
                    fork::keep_private(&stream);
                    self.welcome(stream, from, now);
                }
                Err(cause) => match cause.kind() {
                    ErrorKind::WouldBlock => return,
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    // Out of descriptors or memory: the listener stays readable, so do not come back at once.
                    _ => {
                        if let Some(suppressed) = self.failures.line() {
                            tracing::warn!(%cause, suppressed, "the store server cannot accept a connection");
                        }
                        self.evict(now, CLASSES.len());
                        return self.pause_accepting(now + ACCEPT_PAUSE);
                    }
                },
            }
        }
    }

    /// How long it takes until there is room for another connection: nothing, if there is now.
    fn make_room(&mut self, now: Instant) -> Duration {
        let unproven = self.classes[..MEMBERS]
            .iter()
            .map(BTreeSet::len)
            .sum::<usize>();
        let classes = if unproven >= self.bounds.unproven {
            MEMBERS
        } else if self.bounds.are_reached(self.connections.len()) {
            CLASSES.len()
        } else {
            return Duration::ZERO;
        };
        self.evict(now, classes)
    }

    /// Closes the connection that has the least claim to stay among the first `classes`. Returns how long it takes
    /// until there is one, if there is none now.
    fn evict(&mut self, now: Instant, classes: usize) -> Duration {
        let mut wait = ACCEPT_PAUSE;
        for (class, age) in CLASSES.iter().enumerate().take(classes) {
            let Some(&(since, id)) = self.classes[class].first() else {
                continue;
            };
            let left = age.saturating_sub(now.saturating_duration_since(since));
            if left.is_zero() {
                if class < MEMBERS
                    && let Some(suppressed) = self.strangers.line()
                {
                    tracing::info!(
                        suppressed,
                        "the store closes connections that say nothing, to make room"
                    );
                }
                self.close(id);
                return Duration::ZERO;
            }
            wait = wait.min(left);
        }
        wait
    }

    fn pause_accepting(&mut self, until: Instant) {
        self.accepts_from = Some(until);
        self.listen_for(EventFlags::empty());
    }

    pub(super) fn resume_accepting(&mut self) {
        if self.accepts_from.take().is_some() {
            self.listen_for(EventFlags::IN);
        }
    }

    fn listen_for(&self, interest: EventFlags) {
        if let Some(listener) = &self.listener {
            let data = EventData::new_u64(LISTENER);
            if let Err(cause) = epoll::modify(&self.epoll, listener, data, interest) {
                tracing::error!(%cause, "the store server accepts no more connections");
            }
        }
    }

    fn welcome(&mut self, stream: TcpStream, from: SocketAddr, now: Instant) {
        let id = self.next;
        self.next += 1;
        let ready = Connection::new(stream, &self.kept, now).and_then(|connection| {
            let data = EventData::new_u64(id);
            epoll::add(&self.epoll, connection.stream(), data, connection.interest)?;
            Ok(connection)
        });
        match ready {
            // Its hello has often arrived with it.
            Ok(connection) => self.proceed(id, connection),
            Err(cause) => tracing::debug!(%cause, %from, "the store cannot serve a connection"),
        }
    }
}
