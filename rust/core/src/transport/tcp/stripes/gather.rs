//! Receiving: each frame from the connection that its head names.

use rustix::io::Errno;

use super::super::buffer::Buffer;
use super::{Connection, HEAD, HERE, MOST};
use crate::transport::cipher::Failure;

/// From this size on bytes go from the kernel straight into their destination.
const DIRECT: usize = 32 << 10;

/// The receiving half of a link whose stream consists of frames, or will.
#[derive(Debug, Default)]
pub(in crate::transport::tcp) struct Gather {
    /// By their numbers.
    stripes: [Option<Connection>; MOST as usize],
    /// Whether something has been read from each.
    is_used: [bool; MOST as usize],
    /// What the first connection brought, from a head on or within a frame.
    raw: Buffer,
    /// Of which connection the frame is that is being read, and how many of its bytes are to come.
    frame: Option<(u8, usize)>,
}

impl Gather {
    /// Adds a stripe. It takes the place of one over which nothing has come: the peer opens another when it has heard no
    /// answer.
    pub(in crate::transport::tcp) fn add(&mut self, number: u8, stripe: Connection) {
        let number = usize::from(number);
        if self.is_used.get(number) == Some(&false) {
            self.stripes[number] = Some(stripe);
        }
    }

    /// Lets go of stripes that their sender has closed, with nothing left to read.
    pub(in crate::transport::tcp) fn drop_ended(&mut self) {
        let reading = self.frame.map(|(place, _)| usize::from(place));
        for (number, place) in self.stripes.iter_mut().enumerate() {
            if reading != Some(number) && place.as_ref().is_some_and(Connection::is_at_its_end) {
                *place = None;
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
        let (place, left) = match self.frame {
            Some(frame) => frame,
            None => match self.next(main)? {
                Some(frame) => *self.frame.insert(frame),
                None => return Ok(0),
            },
        };
        let room = bytes.len().min(left);
        let bytes = &mut bytes[..room];
        let received = match place {
            HERE => self.receive_here(main, bytes)?,
            number => match &mut self.stripes[usize::from(number)] {
                Some(stripe) => {
                    let received = stripe.receive(bytes)?;
                    self.is_used[usize::from(number)] = true;
                    received
                }
                // The peer uses it as soon as it is open; it is about to come.
                None => return Err(Errno::AGAIN.into()),
            },
        };
        self.frame = (received < left).then_some((place, left - received));
        Ok(received)
    }

    /// What the next head says; `None` at the end of the stream.
    fn next(&mut self, main: &mut Connection) -> Result<Option<(u8, usize)>, Failure> {
        while self.raw.bytes().len() < HEAD {
            match main.receive(self.raw.room())? {
                0 => return Ok(None),
                received => self.raw.fill(received),
            }
        }
        let mut head = [0; HEAD];
        self.raw.take(&mut head);
        let head = u32::from_le_bytes(head);
        let (place, length) = ((head >> 24) as u8, (head & 0xff_ffff) as usize);
        match length > 0 && (place == HERE || place < MOST) {
            true => Ok(Some((place, length))),
            false => Err(Errno::PROTO.into()),
        }
    }

    fn receive_here(&mut self, main: &mut Connection, bytes: &mut [u8]) -> Result<usize, Failure> {
        if self.raw.bytes().is_empty() {
            if bytes.len() >= DIRECT {
                return main.receive(bytes);
            }
            let received = main.receive(self.raw.room())?;
            self.raw.fill(received);
        }
        Ok(self.raw.take(bytes))
    }

    /// Whether [`Gather::receive`] has something, or may have.
    pub(in crate::transport::tcp) fn may_receive(&self, main: &Connection) -> bool {
        match self.frame {
            Some((HERE, _)) => !self.raw.bytes().is_empty() || main.may_receive(),
            Some((number, _)) => {
                let stripe = &self.stripes[usize::from(number)];
                stripe.as_ref().is_some_and(Connection::may_receive)
            }
            None => self.raw.bytes().len() >= HEAD || main.may_receive(),
        }
    }

    /// Whether nothing more will arrive on any stripe than what the kernel has.
    pub(in crate::transport::tcp) fn has_ended(&self) -> bool {
        self.stripes.iter().flatten().all(Connection::has_ended)
    }

    pub(in crate::transport::tcp) fn stripes(&self) -> impl Iterator<Item = &Connection> {
        self.stripes.iter().flatten()
    }

    pub(in crate::transport::tcp) fn memory(&self) -> usize {
        let stripes = self.stripes.iter().flatten().map(Connection::memory);
        self.raw.memory() + stripes.sum::<usize>()
    }
}
