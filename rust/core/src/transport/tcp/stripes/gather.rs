//! Receiving: each frame from the connection that its head names.

use std::collections::VecDeque;
use std::sync::Arc;

use rustix::io::Errno;

use super::super::buffer::Buffer;
use super::{Connection, HEAD, HERE, MOST, abreast};
use crate::reduce::Workers;
use crate::transport::cipher::Failure;

/// From this size on bytes go from the kernel straight into their destination.
const DIRECT: usize = 32 << 10;

/// The receiving half of a link whose stream consists of frames, or will.
#[derive(Debug, Default)]
pub(in crate::transport::tcp) struct Gather {
    places: [Place; MOST as usize],
    /// What the first connection brought, from a head on or within a frame.
    raw: Buffer,
    /// The frame that is being read and those whose heads have been read: of which connection, and how many bytes are to come.
    frames: VecDeque<(u8, usize)>,
    /// Threads that receive long payloads together.
    workers: Option<Arc<Workers>>,
}

/// What heads name by one number: a stripe and, after its end, others of higher numbers.
#[derive(Debug, Default)]
struct Place {
    number: u8,
    stripe: Option<Connection>,
    /// Whether something has been read from it.
    is_used: bool,
    next: VecDeque<(u8, Connection)>,
}

impl Place {
    /// Adds a stripe. It takes the place of one of its own number over which nothing has come: the peer opens another when it
    /// has heard no answer.
    fn add(&mut self, number: u8, stripe: Connection) {
        if number == self.number && !self.is_used {
            self.stripe = Some(stripe);
        } else if number > self.next.back().map_or(self.number, |(last, _)| *last) {
            self.next.push_back((number, stripe));
            if self.stripe.is_none() {
                self.go_on();
            }
        }
    }

    /// The stripe has ended. Whether there is another.
    fn go_on(&mut self) -> bool {
        self.stripe = None;
        if let Some((number, stripe)) = self.next.pop_front() {
            (self.number, self.stripe, self.is_used) = (number, Some(stripe), false);
        }
        self.stripe.is_some()
    }

    fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Failure> {
        loop {
            // The peer uses it as soon as it is open; it is about to come.
            let stripe = self.stripe.as_mut().ok_or(Errno::AGAIN)?;
            let received = stripe.receive(bytes)?;
            if received > 0 || self.next.is_empty() || !self.go_on() {
                return Ok(received);
            }
        }
    }

    fn stripes(&self) -> impl Iterator<Item = &Connection> {
        let next = self.next.iter().map(|(_, stripe)| stripe);
        self.stripe.iter().chain(next)
    }
}

/// Frames whose heads are read before their turn, at most.
const AHEAD: usize = 64;

impl Gather {
    /// These threads receive long payloads together.
    pub(in crate::transport::tcp) fn share(&mut self, workers: Arc<Workers>) {
        self.workers = Some(workers);
    }

    /// Adds a stripe.
    pub(in crate::transport::tcp) fn add(&mut self, number: u8, stripe: Connection) {
        self.places[usize::from(number % MOST)].add(number, stripe);
    }

    /// Lets go of stripes that their sender has closed, with nothing left to read.
    pub(in crate::transport::tcp) fn drop_ended(&mut self) {
        let is_read = |number| {
            let mut frames = self.frames.iter();
            frames.any(|(place, _)| usize::from(*place) == number)
        };
        for (number, place) in self.places.iter_mut().enumerate() {
            let stripe = place.stripe.as_ref();
            if !is_read(number) && stripe.is_some_and(Connection::is_at_its_end) {
                place.go_on();
            }
        }
    }

    /// Receives into `bytes`, by one system call where there is something; 0: the stream has ended.
    ///
    /// # Errors
    /// `AGAIN` when nothing is there; `PROTO` when it has no frame where one should be.
    pub(in crate::transport::tcp) fn receive(
        &mut self,
        main: &mut Connection,
        bytes: &mut [u8],
    ) -> Result<usize, Failure> {
        if self.frames.is_empty() && !self.next(main)? {
            return Ok(0);
        }
        if bytes.len() >= abreast::WORTH
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
            number => self.places[usize::from(number)].receive(bytes)?,
        };
        self.have_come(received);
        Ok(received)
    }

    /// So many bytes of the first frames have been received.
    fn have_come(&mut self, mut bytes: usize) {
        while bytes > 0
            && let Some((place, left)) = self.frames.front_mut()
        {
            if let Some(place) = self.places.get_mut(usize::from(*place)) {
                place.is_used = true;
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
        let mut shares: [_; MOST as usize] = Default::default();
        for (share, place) in shares.iter_mut().zip(&mut self.places) {
            let stripe = place.stripe.as_mut();
            *share = stripe.map(|stripe| (stripe, None, Vec::new()));
        }
        let (mut received, mut rest) = (0, bytes);
        for (place, left) in &self.frames {
            let share = shares.get_mut(usize::from(*place)).and_then(Option::as_mut);
            let Some((stripe, arrived, parts)) = share else {
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
        if received < abreast::WORTH {
            return Ok(0);
        }
        let work = shares.into_iter().flatten();
        let work = work.map(|(stripe, _, parts)| (stripe, parts)).collect();
        abreast::receive(workers, work)?;
        self.have_come(received);
        Ok(received)
    }

    /// Reads the heads that are here, up to the first frame whose bytes follow its head.
    fn look_ahead(&mut self, main: &mut Connection) -> Result<(), Failure> {
        while self.frames.len() < AHEAD
            && self.frames.back().is_some_and(|(place, _)| *place != HERE)
        {
            match self.next(main) {
                Ok(true) => {}
                Err(Failure::Socket(Errno::PROTO)) => return Err(Errno::PROTO.into()),
                // What has gone wrong shows again when the frames before have been received.
                Ok(false) | Err(Failure::Socket(_)) => break,
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// Reads the next head. False at the end of the stream.
    fn next(&mut self, main: &mut Connection) -> Result<bool, Failure> {
        while self.raw.bytes().len() < HEAD {
            match main.receive(self.raw.room(0))? {
                0 => return Ok(false),
                received => self.raw.fill(received),
            }
        }
        let mut head = [0; HEAD];
        self.raw.take(&mut head);
        let head = u32::from_le_bytes(head);
        let (place, length) = ((head >> 24) as u8, (head & 0xff_ffff) as usize);
        if length == 0 || (place != HERE && place >= MOST) {
            return Err(Errno::PROTO.into());
        }
        self.frames.push_back((place, length));
        Ok(true)
    }

    fn receive_here(&mut self, main: &mut Connection, bytes: &mut [u8]) -> Result<usize, Failure> {
        if self.raw.bytes().is_empty() {
            if bytes.len() >= DIRECT {
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
                let stripe = &self.places[usize::from(*number)].stripe;
                stripe.as_ref().is_some_and(Connection::may_receive)
            }
            None => self.raw.bytes().len() >= HEAD || main.may_receive(),
        }
    }

    /// Whether nothing more will arrive on any stripe than what the kernel has.
    pub(in crate::transport::tcp) fn has_ended(&self) -> bool {
        self.stripes().all(Connection::has_ended)
    }

    pub(in crate::transport::tcp) fn stripes(&self) -> impl Iterator<Item = &Connection> {
        self.places.iter().flat_map(Place::stripes)
    }

    pub(in crate::transport::tcp) fn memory(&self) -> usize {
        let stripes = self.stripes().map(Connection::memory);
        self.raw.memory() + stripes.sum::<usize>()
    }
}
