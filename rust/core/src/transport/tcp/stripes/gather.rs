//! Receiving: each frame from the connection that its head names.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use rustix::io::Errno;

use super::super::buffer::{Buffer, UNBUFFERED_FROM};
use super::{Connection, HEAD, HERE, MOST_STRIPES, abreast};
use crate::reduce::Workers;
use crate::transport::cipher::Failure;

/// The receiving half of a link whose stream consists of frames, or will.
#[derive(Debug, Default)]
pub(in crate::transport::tcp) struct Gather {
    /// By their numbers.
    stripes: BTreeMap<u8, Source>,
    /// How many bytes came over stripes that their sender seems to have closed: it may open them again.
    ended: BTreeMap<u8, u64>,
    /// Bytes received from the first connection; they begin at a head or within a frame.
    raw: Buffer,
    /// The frame that is being read and those whose heads have been read: the connection of each, and how many bytes are to
    /// come.
    frames: VecDeque<(u8, usize)>,
    /// Threads that receive long payloads together.
    workers: Option<Arc<Workers>>,
}

/// A stripe that the peer sends over.
#[derive(Debug)]
struct Source {
    connection: Connection,
    /// Whether something has been read from it.
    is_used: bool,
}

/// Frames whose heads are read before their turn, at most.
const MOST_HEADS: usize = 64;

impl Gather {
    /// These threads receive long payloads together.
    pub(in crate::transport::tcp) fn share(&mut self, workers: Arc<Workers>) {
        self.workers = Some(workers);
    }

    /// Adds a stripe. It takes the place of one of its number over which nothing has come: the peer opens another when it has
    /// heard no answer.
    pub(in crate::transport::tcp) fn add(&mut self, number: u8, connection: Connection) {
        let before = self.stripes.get(&number);
        let stays = |stripe: &Source| stripe.is_used || connection.has_ended();
        if !before.is_some_and(stays) {
            let is_used = false;
            let stripe = Source {
                connection,
                is_used,
            };
            self.stripes.insert(number, stripe);
        }
    }

    /// Adds a stripe again that is not here: its end was taken for that of its use, or nothing has come over it.
    pub(in crate::transport::tcp) fn add_again(&mut self, number: u8, mut connection: Connection) {
        let received = self.ended.remove(&number);
        connection.go_on_from(received.unwrap_or(0));
        let is_used = received.is_some();
        self.stripes.entry(number).or_insert(Source {
            connection,
            is_used,
        });
    }

    /// Drops stripes of trials before that of stripe `number`. Called when a frame of that stripe is received: all frames
    /// before it have been received.
    fn drop_older(&mut self, number: u8) {
        let is_older = |other: u8| other / MOST_STRIPES < number / MOST_STRIPES;
        let first = self.stripes.first_key_value();
        if first.is_some_and(|(first, _)| is_older(*first)) {
            self.stripes.retain(|other, _| !is_older(*other));
        }
    }

    /// Lets go of stripes that their sender has closed, with nothing left to read.
    pub(in crate::transport::tcp) fn drop_ended(&mut self) {
        let Self {
            frames,
            stripes,
            ended,
            ..
        } = self;
        let is_read = |number| frames.iter().any(|(place, _)| *place == number);
        stripes.retain(|number, Source { connection, .. }| {
            let stays = is_read(*number) || !connection.is_at_its_end();
            if !stays {
                ended.insert(*number, connection.received());
            }
            stays
        });
    }

    /// Receives into `bytes`, by one system call where there is something.
    ///
    /// # Errors
    /// `AGAIN` when nothing is there; `PROTO` when it has no frame where one should be.
    pub(in crate::transport::tcp) fn receive(
        &mut self,
        main: &mut Connection,
        bytes: &mut [u8],
    ) -> Result<usize, Failure> {
        if self.frames.is_empty() {
            self.next(main)?;
        }
        if bytes.len() >= abreast::WAKES_THREADS_FROM
            && let Some(workers) = self.workers.clone()
        {
            self.look_ahead(main)?;
            let received = self.receive_abreast(&workers, bytes)?;
            if received > 0 {
                return Ok(received);
            }
        }
        let (place, left) = self.frames[0];
        let room = bytes.len().min(left);
        let bytes = &mut bytes[..room];
        let received = match place {
            HERE => self.receive_here(main, bytes)?,
            number => {
                self.drop_older(number);
                match self.stripes.get_mut(&number) {
                    Some(stripe) => stripe.connection.receive(bytes)?,
                    // The peer uses it as soon as it is open; it is about to come.
                    None => return Err(Errno::AGAIN.into()),
                }
            }
        };
        self.have_come(received);
        Ok(received)
    }

    /// The next `bytes` bytes of the first frames have been received.
    fn have_come(&mut self, mut bytes: usize) {
        while bytes > 0
            && let Some((place, left)) = self.frames.front_mut()
        {
            if let Some(stripe) = self.stripes.get_mut(place) {
                stripe.is_used = true;
            }
            let count = bytes.min(*left);
            *left -= count;
            bytes -= count;
            if *left == 0 {
                self.frames.pop_front();
            }
        }
    }

    /// Receives into `bytes` what has arrived of the first frames, where that is worth several threads; 0: it is not.
    fn receive_abreast(&mut self, workers: &Workers, bytes: &mut [u8]) -> Result<usize, Failure> {
        let stripes = self.stripes.iter_mut();
        let mut shares: BTreeMap<u8, _> = stripes
            .map(|(number, stripe)| (*number, (&mut stripe.connection, None, Vec::new())))
            .collect();
        let (mut received, mut rest) = (0, bytes);
        for (place, left) in &self.frames {
            let Some((stripe, arrived, parts)) = shares.get_mut(place) else {
                break;
            };
            let arrived = arrived.get_or_insert_with(|| stripe.arrived());
            let count = rest.len().min(*left).min(*arrived);
            let (part, others) = rest.split_at_mut(count);
            parts.push(part);
            rest = others;
            *arrived -= count;
            received += count;
            if count < *left {
                break;
            }
        }
        if received < abreast::WAKES_THREADS_FROM {
            return Ok(0);
        }
        let work = shares.into_values();
        let work = work.map(|(stripe, _, parts)| (stripe, parts)).collect();
        abreast::receive(workers, work)?;
        self.have_come(received);
        Ok(received)
    }

    /// Reads the heads that are here, up to the first frame whose bytes follow its head.
    fn look_ahead(&mut self, main: &mut Connection) -> Result<(), Failure> {
        while self.frames.len() < MOST_HEADS
            && self.frames.back().is_some_and(|(place, _)| *place != HERE)
        {
            match self.next(main) {
                Ok(()) => {}
                Err(Failure::Socket(Errno::PROTO)) => return Err(Errno::PROTO.into()),
                Err(Failure::Socket(_)) => break,
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// Reads the next head.
    fn next(&mut self, main: &mut Connection) -> Result<(), Failure> {
        while self.raw.bytes().len() < HEAD {
            let received = main.receive(self.raw.room(0))?;
            self.raw.fill(received);
        }
        let mut head = [0; HEAD];
        self.raw.take(&mut head);
        let head = u32::from_le_bytes(head);
        let (place, length) = ((head >> 24) as u8, (head & 0xff_ffff) as usize);
        // Any number may be that of a stripe that is about to come.
        if length == 0 {
            return Err(Errno::PROTO.into());
        }
        self.frames.push_back((place, length));
        Ok(())
    }

    fn receive_here(&mut self, main: &mut Connection, bytes: &mut [u8]) -> Result<usize, Failure> {
        if self.raw.bytes().is_empty() {
            if bytes.len() >= UNBUFFERED_FROM {
                return main.receive(bytes);
            }
            let received = main.receive(self.raw.room(0))?;
            self.raw.fill(received);
        }
        Ok(self.raw.take(bytes))
    }

    /// Whether [`Gather::receive`] has something, or may have.
    pub(in crate::transport::tcp) fn may_receive(&self, main: &Connection) -> bool {
        match self.frames.front() {
            Some((HERE, _)) => !self.raw.bytes().is_empty() || main.may_receive(),
            Some((number, _)) => {
                let stripe = self.stripes.get(number);
                stripe.is_some_and(|stripe| stripe.connection.may_receive())
            }
            None => self.raw.bytes().len() >= HEAD || main.may_receive(),
        }
    }

    /// Whether nothing more will arrive on any stripe than what the kernel has.
    pub(in crate::transport::tcp) fn has_ended(&self) -> bool {
        self.stripes().all(Connection::has_ended)
    }

    /// The stripes by their numbers.
    pub(in crate::transport::tcp) fn numbered(
        &mut self,
    ) -> impl Iterator<Item = (u8, &mut Connection)> {
        let stripes = self.stripes.iter_mut();
        stripes.map(|(number, stripe)| (*number, &mut stripe.connection))
    }

    pub(in crate::transport::tcp) fn stripes(&self) -> impl Iterator<Item = &Connection> {
        self.stripes.values().map(|stripe| &stripe.connection)
    }

    pub(in crate::transport::tcp) fn memory(&self) -> usize {
        let stripes = self.stripes().map(Connection::memory);
        self.raw.memory() + stripes.sum::<usize>()
    }
}
