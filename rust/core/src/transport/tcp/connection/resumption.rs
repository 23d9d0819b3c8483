//! The change to another socket: the old one is emptied, the counts are exchanged, and what the peer lacks goes again.

use std::net::TcpStream;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::{COUNT, Connection, Socket, Stage};
use crate::transport::cipher::{Cipher, Failure};
use crate::transport::control::describe;

/// Bytes that former sockets may leave, at most: more than several of them hold.
const MOST_BACKLOG: usize = 64 << 20;

impl<S: Socket> Connection<S> {
    /// A connection over the socket with that number; those before it have carried nothing here.
    ///
    /// # Errors
    /// When the socket does not take its options.
    pub(in crate::transport::tcp) fn further(
        number: u32,
        socket: S,
        cipher: Option<Cipher>,
    ) -> std::io::Result<Self> {
        Ok(Self {
            sockets: number,
            stage: Stage::Greeting,
            told: 0,
            heard: 0,
            ..Self::new(socket, cipher)?
        })
    }

    /// Goes on over another socket, the one with that number, which has carried nothing. The bytes that
    /// had arrived before count.
    ///
    /// # Errors
    /// When the socket does not take its options.
    pub(crate) fn replace(
        &mut self,
        number: u32,
        socket: S,
        cipher: Option<Cipher>,
        answer: &[u8],
    ) -> std::io::Result<()> {
        let mut further = Self::further(number, socket, cipher)?;
        let mut bytes = vec![0; 64 << 10];
        while self.delivers() {
            if self.backlog.len() > MOST_BACKLOG {
                let what = "more bytes wait to be taken than sockets hold";
                self.stage = Stage::Beyond(what.to_owned());
                return Ok(());
            }
            match self.take_in(&mut bytes) {
                Ok(count) if count > 0 => {
                    self.ledger.note_received(count);
                    self.backlog.extend(&bytes[..count]);
                }
                Err(Failure::Socket(Errno::INTR)) => {}
                _ => break,
            }
        }
        self.ledger
            .stop(self.sealed.as_ref().map_or(0, |sealed| sealed.owed()));
        further.ledger = std::mem::take(&mut self.ledger);
        further.backlog = std::mem::take(&mut self.backlog);
        further.is_finished = self.is_finished;
        *self = further;
        if !answer.is_empty() {
            let _ = self.socket.send(answer);
        }
        self.go_on();
        Ok(())
    }

    /// Does what comes before the caller's bytes, as far as that goes. Whether these may go now.
    pub(crate) fn go_on(&mut self) -> bool {
        if matches!(self.stage, Stage::Greeting) {
            self.greet();
        }
        if matches!(self.stage, Stage::Repeating) {
            self.repeat();
        }
        self.is_flowing()
    }

    /// Exchanges the counts.
    fn greet(&mut self) {
        if self.told < COUNT {
            let own = self.ledger.received().to_le_bytes();
            match self.transmit(&[&own[self.told..]]) {
                Ok(count) => self.told += count,
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => self.stop(&describe(errno)),
            }
        }
        let is_heard = self.delivers();
        if is_heard && self.told == COUNT && matches!(self.stage, Stage::Greeting) {
            self.stage = match self.ledger.go_back(u64::from_le_bytes(self.count)) {
                Ok(()) => Stage::Repeating,
                Err(gap) => Stage::Beyond(gap.to_string()),
            };
        }
    }

    /// Sends again what the peer lacks.
    fn repeat(&mut self) {
        let mut ledger = std::mem::take(&mut self.ledger);
        let broken = loop {
            match ledger.again() {
                [] => {
                    self.stage = Stage::Flowing;
                    break None;
                }
                bytes => match self.transmit(&[bytes]) {
                    Ok(count) => ledger.went_again(count),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break None,
                    Err(errno) => break Some(errno),
                },
            }
        };
        self.ledger = ledger;
        if let Some(errno) = broken {
            self.stop(&describe(errno));
        }
        if self.is_finished && self.is_flowing() {
            self.socket.end_sending();
        }
    }

    /// Whether [`Connection::go_on`] has something to do.
    pub(crate) fn may_go_on(&self) -> bool {
        let wanted = match self.stage {
            Stage::Greeting if self.told < COUNT => PollFlags::IN | PollFlags::OUT,
            Stage::Greeting => PollFlags::IN,
            Stage::Repeating => PollFlags::OUT,
            Stage::Flowing | Stage::Broken { .. } | Stage::Beyond(_) => return false,
        };
        self.ready(wanted).intersects(wanted)
    }

    /// Whether the next bytes that the socket has are the caller's. Reads the peer's count, which comes before them.
    pub(super) fn delivers(&mut self) -> bool {
        if self.is_dry() {
            return false;
        }
        if self.heard < COUNT {
            let mut count = self.count;
            match self.take_in(&mut count[self.heard..]) {
                Ok(bytes) if bytes > 0 => self.heard += bytes,
                Err(Failure::Socket(Errno::AGAIN | Errno::INTR)) => {}
                Ok(_) => self.dry_up("connection closed"),
                Err(Failure::Socket(errno)) => self.dry_up(&describe(errno)),
                Err(Failure::Forged) => self.stage = Stage::Beyond("forged bytes".to_owned()),
            }
            self.count = count;
        }
        self.heard == COUNT
    }
}

/// Sends some bytes over a socket that has carried nothing, and so has room for them. If it breaks, that shows later.
pub(in crate::transport::tcp) fn say(socket: &TcpStream, bytes: &[u8]) {
    if !bytes.is_empty() {
        let _ = send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}
