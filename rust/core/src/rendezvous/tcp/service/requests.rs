//! The server's work on the connections that it has: it reads requests, answers them, holds waits until their key is set or
//! their time is over, and keeps each connection in the lists of its stage.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};

use super::super::connection::{Close, Connection, Stage, Value};
use super::super::wire::{ABSENT, FULL, OK, Request};
use super::admission::{MEMBERS, class};
use super::{Expected, Server};
use crate::rendezvous::LEFT;
use crate::types::Rank;

/// The cost of a key beside its bytes and its value's.
const KEY_COST: usize = size_of::<(String, Arc<Value>, Value)>() + 64;

impl Server {
    /// Reads, answers and writes what connection `id` is ready for.
    pub(super) fn service(&mut self, id: u64) {
        if let Some(connection) = self.take(id) {
            self.proceed(id, connection);
        }
    }

    /// Does with a connection what can be done now, and keeps it unless it is to be closed.
    pub(super) fn proceed(&mut self, id: u64, mut connection: Connection) {
        match self.advance(id, &mut connection) {
            Ok(()) => self.put(id, connection),
            Err(Close::Ended) => self.forget(id, &connection),
            Err(Close::Stranger) => {
                if let Some(suppressed) = self.strangers.line() {
                    let from = connection.stream().peer_addr().ok();
                    tracing::info!(
                        ?from,
                        suppressed,
                        "the store refused a process of another job, or with another secret or version"
                    );
                }
                self.forget(id, &connection);
            }
        }
    }

    fn advance(&mut self, id: u64, connection: &mut Connection) -> Result<(), Close> {
        if connection.stage != Stage::Replying
            && connection.receive(&self.key, &mut self.scratch)?
        {
            let bytes = connection.take_request();
            // It was parsed before.
            let request = Request::read(&bytes).ok().flatten().ok_or(Close::Ended)?;
            self.answer(id, connection, &request)?;
        }
        if connection.stage == Stage::Replying && connection.flush()? && self.farewell.is_some() {
            return Err(Close::Ended);
        }
        Ok(())
    }

    fn answer(
        &mut self,
        id: u64,
        connection: &mut Connection,
        request: &Request<'_>,
    ) -> Result<(), Close> {
        match *request {
            Request::Set(key, value) => {
                let status = self.set(key, value);
                connection.reply(status, None);
            }
            Request::Get(key) => match self.values.get(key) {
                Some(value) => connection.reply(OK, Some(Arc::clone(value))),
                None => connection.reply(ABSENT, None),
            },
            Request::Wait(key, time) => match self.values.get(key) {
                Some(value) => connection.reply(OK, Some(Arc::clone(value))),
                None if time.is_zero() => connection.reply(ABSENT, None),
                None => {
                    connection.wait_for(key.to_owned(), time)?;
                    self.waiters.entry(key.to_owned()).or_default().insert(id);
                }
            },
        }
        Ok(())
    }

    /// Sets a value and answers the clients that wait for it. Returns the status for the reply.
    fn set(&mut self, key: &str, value: &[u8]) -> u8 {
        let mut share = self.stored.share();
        if share.resize(KEY_COST + key.len() + value.len()).is_err() {
            return FULL;
        }
        let value = Value::new(value, share);
        self.values.insert(key.to_owned(), Arc::clone(&value));
        for waiter in self.waiters.remove(key).unwrap_or_default() {
            self.end_wait(waiter, OK, Some(&value));
        }
        if let Some(rank) = key.strip_prefix(LEFT).and_then(|rank| rank.parse().ok()) {
            self.note_leaving(rank, &value.bytes);
        }
        OK
    }

    /// Rank `rank` of as many as `world` says needs the store no longer.
    fn note_leaving(&mut self, rank: Rank, world: &[u8]) {
        let mut meeting = self.control.meeting.lock();
        if meeting.is_none() {
            // The process that made a unique id need not be one of the group.
            let world = std::str::from_utf8(world)
                .ok()
                .and_then(|text| text.parse().ok());
            *meeting = world.map(|world| Expected {
                world,
                patience: Duration::MAX,
            });
        }
        let Some(group) = meeting.filter(|group| rank < group.world) else {
            return;
        };
        self.left.insert(rank);
        if rank == 0 {
            self.ends = Instant::now().checked_add(group.patience);
        }
    }

    /// Ends the wait of connection `id`, which is no longer among the waiters of its key.
    fn end_wait(&mut self, id: u64, status: u8, value: Option<&Arc<Value>>) {
        if let Some(mut connection) = self.take(id) {
            connection.reply(status, value.map(Arc::clone));
            self.proceed(id, connection);
        }
    }

    /// Ends what has run out of time.
    pub(super) fn expire(&mut self) {
        let now = Instant::now();
        if self.accepts_from.is_some_and(|from| from <= now) {
            self.resume_accepting();
        }
        while let Some(&(deadline, id)) = self.deadlines.first() {
            if deadline > now {
                return;
            }
            let stage = self
                .connections
                .get(&id)
                .map(|connection| &connection.stage);
            match stage {
                Some(Stage::Waiting(key)) => {
                    let key = key.clone();
                    self.forget_waiter(&key, id);
                    self.end_wait(id, ABSENT, None);
                }
                _ => self.close(id),
            }
        }
    }

    fn forget_waiter(&mut self, key: &str, id: u64) {
        if let Some(waiters) = self.waiters.get_mut(key) {
            waiters.remove(&id);
            if waiters.is_empty() {
                self.waiters.remove(key);
            }
        }
    }

    /// Takes connection `id` out of all lists.
    fn take(&mut self, id: u64) -> Option<Connection> {
        let connection = self.connections.remove(&id)?;
        self.classes[class(&connection.stage)].remove(&(connection.since, id));
        if let Some(deadline) = connection.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        Some(connection)
    }

    /// Puts a connection into the lists of its stage, and waits for what it needs.
    fn put(&mut self, id: u64, mut connection: Connection) {
        let interest = match connection.stage {
            Stage::Replying => EventFlags::OUT,
            _ => EventFlags::IN,
        };
        if connection.interest != interest {
            connection.interest = interest;
            let data = EventData::new_u64(id);
            if epoll::modify(&self.epoll, connection.stream(), data, interest).is_err() {
                return self.forget(id, &connection);
            }
        }
        let class = class(&connection.stage);
        self.classes[class].insert((connection.since, id));
        if let Some(deadline) = connection.deadline {
            self.deadlines.insert((deadline, id));
        }
        self.connections.insert(id, connection);
        if class == MEMBERS {
            // One fewer that has proved nothing.
            self.resume_accepting();
        }
    }

    pub(super) fn close(&mut self, id: u64) {
        if let Some(connection) = self.take(id) {
            self.forget(id, &connection);
        }
    }

    /// Lets go of a connection that is in no list any more.
    fn forget(&mut self, id: u64, connection: &Connection) {
        // Its end alone would leave it there while a forked child has a copy.
        let _ = epoll::delete(&self.epoll, connection.stream());
        if let Stage::Waiting(key) = &connection.stage {
            self.forget_waiter(key, id);
        }
        self.resume_accepting();
    }
}
