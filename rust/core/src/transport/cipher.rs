//! Encryption of a connection under the keys that its handshake made.
//!
//! The stream is cut into records: two bytes of length (little-endian), then a Noise transport message, which is the encrypted
//! bytes and a tag of 16 bytes. Each direction has its own key and counts its records; the count is the nonce. A record that
//! was changed, left out, repeated or moved does not open, and nothing behind it is read. An end of the stream proves nothing
//! by itself: only the farewell on the control channel, which is sealed in the same way, says that a peer has left in good
//! order.
//!
//! A direction takes a new key every 2^20 records, long before the bounds that AES-GCM has for one key.

use std::fmt;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use snow::TransportState;

/// The most bytes of a record before they are encrypted: they stay in the first caches, and the tag costs nothing.
pub(super) const RECORD: usize = 32 << 10;
/// The authentication tag of a record.
const TAG: usize = 16;
/// The most bytes that one look at the socket may bring.
const BUFFER: usize = 256 << 10;
/// After this number of records a direction takes a new key.
const REKEY: u64 = 1 << 20;

/// Seals and opens records.
pub struct Cipher {
    session: TransportState,
    sealed: u64,
    opened: u64,
}

/// A record did not open: its bytes are not what the peer sent at this place of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forged;

impl Cipher {
    /// Bytes of a record before the encrypted ones: their number.
    pub const HEAD: usize = 2;

    pub(super) fn new(session: TransportState) -> Self {
        Self {
            session,
            sealed: 0,
            opened: 0,
        }
    }

    /// Appends one record with `bytes`, at most 32 KiB, to `out`.
    pub fn seal(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        let length = bytes.len() + TAG;
        out.extend((length as u16).to_le_bytes());
        out.resize(start + Self::HEAD + length, 0);
        self.session
            .write_message(bytes, &mut out[start + Self::HEAD..])
            .expect("a record is shorter than a Noise message, and 2^64 of them are not reached");
        self.sealed += 1;
        if self.sealed.is_multiple_of(REKEY) {
            self.session.rekey_outgoing();
        }
    }

    /// Opens the record whose encrypted bytes are `record`, into the beginning of `out`. Says how many bytes it had. It is
    /// faster where `out` is as long as the record, whose tag then overwrites what is behind the bytes.
    ///
    /// # Errors
    /// When the record is not the next one that the peer sealed, or `out` is too short for it.
    pub fn open(&mut self, record: &[u8], out: &mut [u8]) -> Result<usize, Forged> {
        let length = self.session.read_message(record, out);
        let length = length.map_err(|_| Forged)?;
        self.opened += 1;
        if self.opened.is_multiple_of(REKEY) {
            self.session.rekey_incoming();
        }
        Ok(length)
    }
}

/// Why nothing was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The socket says so; `AGAIN`: not now.
    Socket(Errno),
    /// The bytes that arrived are not those that the peer sent.
    Forged,
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::Socket(errno)
    }
}

/// A non-blocking stream socket's bytes, sealed and opened.
pub(super) struct Sealed {
    cipher: Cipher,
    /// The record that the socket has not taken completely.
    outgoing: Vec<u8>,
    sent: usize,
    /// The number of the caller's next bytes that are in that record: they count as sent when all of it is.
    owed: usize,
    /// Bytes that arrived and have not been opened.
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    /// A record that was opened when there was too little room for it.
    opened: Vec<u8>,
    taken: usize,
}

impl fmt::Debug for Sealed {
    /// Nothing of the keys or the bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealed")
            .field("owed", &self.owed)
            .field("arrived", &(self.end - self.start))
            .finish_non_exhaustive()
    }
}

/// A socket that carries bytes. None of its calls blocks; `AGAIN`: not now.
pub(crate) trait Carrier {
    /// Takes the first of these bytes, as many as go now.
    fn send(&self, bytes: &[u8]) -> Result<usize, Errno>;

    /// Receives into `bytes`, as much as is there; 0: the peer's end has closed.
    fn receive(&self, bytes: &mut [u8]) -> Result<usize, Errno>;
}

impl<S: AsFd> Carrier for S {
    fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        send(self, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
    }

    fn receive(&self, bytes: &mut [u8]) -> Result<usize, Errno> {
        recv(self, bytes, RecvFlags::DONTWAIT).map(|(_, count)| count)
    }
}

impl Sealed {
    pub(super) fn new(cipher: Cipher) -> Self {
        Self {
            cipher,
            outgoing: Vec::new(),
            sent: 0,
            owed: 0,
            incoming: Vec::new(),
            start: 0,
            end: 0,
            opened: Vec::new(),
            taken: 0,
        }
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> usize {
        self.outgoing.capacity() + self.incoming.capacity() + self.opened.capacity()
    }

    /// How many bytes that an earlier call of [`Sealed::send`] has sealed do not count as sent: the next one begins with them.
    pub(super) fn owed(&self) -> usize {
        self.owed
    }

    /// Sends as much of `bytes` as the socket takes. Says how many of them went; `AGAIN`: none. The next call must begin with
    /// the bytes that did not go.
    pub(super) fn send(&mut self, socket: &impl Carrier, bytes: &[u8]) -> Result<usize, Errno> {
        let mut done = 0;
        loop {
            match self.flush(socket) {
                Ok(()) => {}
                // Another error than "not now" shows again at the next call.
                Err(_) if done > 0 => return Ok(done),
                Err(errno) => return Err(errno),
            }
            let settled = self.owed.min(bytes.len() - done);
            self.owed -= settled;
            done += settled;
            if done == bytes.len() {
                return Ok(done);
            }
            let next = &bytes[done..bytes.len().min(done + RECORD)];
            self.cipher.seal(next, &mut self.outgoing);
            self.owed = next.len();
        }
    }

    fn flush(&mut self, socket: &impl Carrier) -> Result<(), Errno> {
        while self.sent < self.outgoing.len() {
            match socket.send(&self.outgoing[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        self.outgoing.clear();
        self.sent = 0;
        Ok(())
    }

    /// Receives into `bytes`, as much as is there; 0: the peer's end has closed.
    ///
    /// # Errors
    /// `AGAIN` when nothing is there.
    pub(super) fn receive(
        &mut self,
        socket: &impl Carrier,
        bytes: &mut [u8],
    ) -> Result<usize, Failure> {
        let done = self.take(bytes)?;
        if done > 0 {
            return Ok(done);
        }
        let arrived = loop {
            self.make_room();
            match socket.receive(&mut self.incoming[self.end..]) {
                Ok(0) => return Ok(0),
                Ok(count) => break count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        };
        self.end += arrived;
        match self.take(bytes)? {
            0 => Err(Errno::AGAIN.into()),
            done => Ok(done),
        }
    }

    /// Whether [`Sealed::receive`] has something without the socket.
    pub(super) fn is_ready(&self) -> bool {
        self.taken < self.opened.len() || self.record().is_some()
    }

    /// The encrypted bytes of the first record that arrived, if all of it did.
    fn record(&self) -> Option<&[u8]> {
        let arrived = &self.incoming[self.start..self.end];
        let (head, rest) = arrived.split_at_checked(Cipher::HEAD)?;
        rest.get(..usize::from(u16::from_le_bytes([head[0], head[1]])))
    }

    /// Moves what is here into `bytes`.
    fn take(&mut self, bytes: &mut [u8]) -> Result<usize, Failure> {
        let mut done = bytes.len().min(self.opened.len() - self.taken);
        bytes[..done].copy_from_slice(&self.opened[self.taken..][..done]);
        self.taken += done;
        while done < bytes.len() {
            let Some(length) = self.record().map(<[u8]>::len) else {
                break;
            };
            let begin = self.start + Cipher::HEAD;
            let record = &self.incoming[begin..begin + length];
            let room = &mut bytes[done..];
            if room.len() >= length {
                let opened = self.cipher.open(record, room);
                done += opened.map_err(|Forged| Failure::Forged)?;
            } else {
                self.opened.resize(length, 0);
                let opened = self.cipher.open(record, &mut self.opened);
                self.opened
                    .truncate(opened.map_err(|Forged| Failure::Forged)?);
                let count = room.len().min(self.opened.len());
                room[..count].copy_from_slice(&self.opened[..count]);
                self.taken = count;
                done += count;
            }
            self.start = begin + length;
        }
        Ok(done)
    }

    /// Moves what has not been opened to the front: less than a record.
    fn make_room(&mut self) {
        self.incoming.resize(BUFFER, 0);
        self.incoming.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::transport::handshake;

    fn ciphers() -> (Cipher, Cipher) {
        handshake::tests::conversation()
    }

    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().expect("a pair of sockets")
    }

    /// Sends all of `bytes` and receives them in pieces of `piece`.
    fn carry(bytes: &[u8], piece: usize) -> Vec<u8> {
        let (near, far) = pair();
        let (a, b) = ciphers();
        let (mut sender, mut receiver) = (Sealed::new(a), Sealed::new(b));
        let (mut sent, mut received) = (0, Vec::new());
        while received.len() < bytes.len() {
            match sender.send(&near, &bytes[sent..]) {
                Ok(count) => sent += count,
                Err(errno) => assert_eq!(errno, Errno::AGAIN),
            }
            let mut part = vec![0; piece];
            match receiver.receive(&far, &mut part) {
                Ok(count) => received.extend(&part[..count]),
                Err(failure) => assert_eq!(failure, Failure::Socket(Errno::AGAIN)),
            }
        }
        received
    }

    #[test]
    fn bytes_arrive_in_pieces_of_any_length() {
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
        for (length, piece) in [(1, 1), (100, 7), (RECORD + 1, 100), (bytes.len(), 40_000)] {
            assert!(carry(&bytes[..length], piece) == bytes[..length]);
        }
    }

    #[test]
    fn keys_change_on_both_sides_alike() {
        let (mut a, mut b) = ciphers();
        let (mut out, mut opened) = (Vec::new(), [0; 64]);
        (a.sealed, b.opened) = (REKEY - 2, REKEY - 2);
        for number in 0..5 {
            out.clear();
            a.seal(&[number], &mut out);
            assert_eq!(b.open(&out[Cipher::HEAD..], &mut opened), Ok(1));
            assert_eq!(opened[0], number);
        }
    }

    /// Changes that an attacker on the path can make to records: none of them goes unnoticed.
    #[test]
    fn changed_repeated_omitted_and_swapped_records_do_not_open() {
        type Attack = fn([Vec<u8>; 2]) -> Vec<Vec<u8>>;
        let harmless: Attack = |[first, second]| vec![first, second];
        let attacks: [Attack; 5] = [
            |[mut first, _]| {
                first[Cipher::HEAD] ^= 1;
                vec![first]
            },
            |[mut first, second]| {
                first[0] -= 1;
                vec![first, second]
            },
            |[first, _]| vec![first.clone(), first],
            |[_, second]| vec![second],
            |[first, second]| vec![second, first],
        ];
        let outcome = |attack: Attack| {
            let (mut a, b) = ciphers();
            let records = [b"first".as_slice(), b"second"].map(|bytes| {
                let mut record = Vec::new();
                a.seal(bytes, &mut record);
                record
            });
            let (mut near, far) = pair();
            for record in attack(records) {
                near.write_all(&record).expect("send");
            }
            let mut receiver = Sealed::new(b);
            let mut bytes = [0; 64];
            loop {
                match receiver.receive(&far, &mut bytes) {
                    Ok(count) => assert!(count > 0, "the socket is open"),
                    Err(failure) => break failure,
                }
            }
        };
        assert_eq!(outcome(harmless), Failure::Socket(Errno::AGAIN));
        for attack in attacks {
            assert_eq!(outcome(attack), Failure::Forged);
        }
    }

    #[test]
    fn nothing_readable_crosses_and_a_cut_record_is_no_end() {
        let (near, mut far) = pair();
        let (a, b) = ciphers();
        let mut sender = Sealed::new(a);
        let words = b"words that must not be seen".repeat(10);
        assert_eq!(sender.send(&near, &words), Ok(words.len()));
        let mut wire = vec![0; 4096];
        let count = far.read(&mut wire).expect("bytes");
        wire.truncate(count);
        assert!(
            !wire
                .windows(8)
                .any(|seen| words.windows(8).any(|said| said == seen))
        );
        let (mut again, there) = pair();
        again.write_all(&wire[..count - 1]).expect("send");
        // Also where a process that another test is starting has the socket.
        again.shutdown(Shutdown::Write).expect("an end");
        let mut receiver = Sealed::new(b);
        let mut bytes = [0; 4096];
        let first = receiver.receive(&there, &mut bytes);
        assert_eq!(first, Err(Failure::Socket(Errno::AGAIN)));
        assert_eq!(receiver.receive(&there, &mut bytes), Ok(0));
        assert!(!receiver.is_ready());
    }
}
