//! How fast the way to another host is: one rank sends bytes without a meaning to a process there, and is told how many
//! have come.
//!
//! ```text
//! sender                                   acceptor
//!     | MAGIC, as long as a hello             |
//!     | bytes, as fast as they go             |   throws them away
//!     | ------------------------------------> |
//!     |   one byte for each MARK_BYTES        |
//!     | <------------------------------------ |
//! ```
//!
//! The rate is that between two of these answers, so neither the latency counts nor what a network lets through at once
//! before it limits a sender. It is asked for before the ranks know each other, and anyone may: an acceptor does it for one
//! at a time, and a bounded number of bytes and time.

use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use socket2::SockRef;

use super::wire::{Cut, Patience, timespec};
use crate::transport::handshake::HELLO_BYTES;

/// The first bytes of a hello that asks for this.
const MAGIC: [u8; 8] = *b"uni-rate";

/// Bytes between two answers.
const MARK_BYTES: usize = 64 << 10;

/// Bytes that are sent at most, and thrown away.
const MOST_BYTES: usize = 32 << 20;

/// Many rate limits let this number of bytes through at once: the answers up to there say nothing.
const UNCOUNTED: usize = 768 << 10;

/// A measurement ends after `SHORTEST_MEASUREMENT` if enough answers count by then, and after `LONGEST_MEASUREMENT` at the
/// latest.
const SHORTEST_MEASUREMENT: Duration = Duration::from_millis(15);
const LONGEST_MEASUREMENT: Duration = Duration::from_millis(100);

/// The fewest answers that must follow the first one that counts.
const FEWEST_MARKS: usize = 8;

/// How long the other host may take to accept.
const ACCEPT_TIMEOUT: Duration = Duration::from_millis(500);

/// A slower connection may have been held up: it is measured twice, and the better rate counts.
const MEASURED_TWICE_BELOW: f64 = 100e6;

/// Whether a hello asks for this.
pub(super) fn is_asked_for(hello: &[u8; HELLO_BYTES]) -> bool {
    hello.starts_with(&MAGIC)
}

/// The bytes a second that come from here to this address; `None` where it cannot be reached, or says nothing.
pub(super) fn measure(target: SocketAddr) -> Option<f64> {
    let first = measure_once(target)?;
    if first > MEASURED_TWICE_BELOW {
        return Some(first);
    }
    Some(measure_once(target).map_or(first, |second| second.max(first)))
}

fn measure_once(target: SocketAddr) -> Option<f64> {
    let never = AtomicBool::new(false);
    let patience = Patience {
        deadline: Instant::now() + ACCEPT_TIMEOUT,
        called_off: [&never; 2],
        turn: None,
    };
    let stream = patience.connect_tcp(target, (None, None)).ok()?;
    // Bytes that have not gone at the end are discarded.
    SockRef::from(&stream)
        .set_linger(Some(Duration::ZERO))
        .ok()?;
    let mut hello = [0; HELLO_BYTES];
    hello[..MAGIC.len()].copy_from_slice(&MAGIC);
    patience.write(&stream, &hello).ok()?;
    rate(&answers(&stream)?)
}

/// Sends for a while. When each answer came, since the beginning; `None` where the connection broke before enough had come.
fn answers(stream: &TcpStream) -> Option<Vec<Duration>> {
    let block = vec![0; 4 * MARK_BYTES];
    let (begun, mut sent) = (Instant::now(), 0);
    let mut came = Vec::new();
    let enough = UNCOUNTED / MARK_BYTES + FEWEST_MARKS;
    let is_open = loop {
        let passed = begun.elapsed();
        if passed >= LONGEST_MEASUREMENT || came.len() >= MOST_BYTES / MARK_BYTES {
            break true;
        }
        if passed >= SHORTEST_MEASUREMENT
            && came.len() > enough
            && came[enough] > came[UNCOUNTED / MARK_BYTES]
        {
            break true;
        }
        let left = &block[..block.len().min(MOST_BYTES - sent)];
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let is_full = match send(stream, left, flags) {
            _ if left.is_empty() => true,
            Ok(bytes) => {
                sent += bytes;
                false
            }
            Err(Errno::AGAIN | Errno::INTR) => true,
            Err(_) => break false,
        };
        let mut marks = [0; MOST_BYTES / MARK_BYTES];
        match recv(stream, &mut marks, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => break false,
            Ok((_, more)) => came.resize(came.len() + more, begun.elapsed()),
            Err(Errno::AGAIN | Errno::INTR) if is_full => {
                let mut wanted = PollFlags::IN;
                wanted.set(PollFlags::OUT, !left.is_empty());
                let slice = timespec(LONGEST_MEASUREMENT.saturating_sub(passed));
                let _ = poll(&mut [PollFd::new(stream, wanted)], Some(&slice));
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => break false,
        }
    };
    (is_open || came.len() > enough).then_some(came)
}

/// Bytes a second by the answers that count; where they are few, by all.
fn rate(came: &[Duration]) -> Option<f64> {
    let counted = came.get(UNCOUNTED / MARK_BYTES..).unwrap_or(&[]);
    let last = came.last()?;
    let (marks, time) = match counted.first() {
        Some(first) if counted.len() > FEWEST_MARKS && last > first => {
            // Those that came together count from the last of them on.
            let later = counted.iter().filter(|at| *at > first).count();
            (later, *last - *first)
        }
        _ => (came.len(), *last),
    };
    let seconds = time.as_secs_f64();
    (seconds > 0.0).then(|| (marks * MARK_BYTES) as f64 / seconds)
}

/// The side that throws bytes away, and says how many have come.
pub(super) struct Sink {
    until: Instant,
    came: usize,
    answered: usize,
    room: Vec<u8>,
}

impl Sink {
    /// How often it reads before other connections have their turn.
    const READS: usize = 8;

    pub(super) fn new() -> Self {
        Self {
            // The sender has the time for which it may take to send the first bytes, too.
            until: Instant::now() + ACCEPT_TIMEOUT + LONGEST_MEASUREMENT,
            came: 0,
            answered: 0,
            room: vec![0; 4 * MARK_BYTES],
        }
    }

    /// When it ends at the latest.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Throws away what has come. Whether that is the end.
    pub(super) fn advance(&mut self, stream: impl AsFd) -> Result<bool, Cut> {
        for _ in 0..Self::READS {
            // The kernel need not copy what is thrown away.
            let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
            match recv(&stream, &mut self.room[..], flags) {
                Ok((_, 0)) => return Ok(true),
                Ok((_, bytes)) => self.came += bytes,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let marks = self.came / MARK_BYTES - self.answered;
            if marks > 0 {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                // All of them together are far fewer than a socket has room for.
                if send(&stream, &[0; MOST_BYTES / MARK_BYTES + 4][..marks], flags)? != marks {
                    return Err(Cut::Closed);
                }
                self.answered += marks;
            }
            if self.came >= MOST_BYTES {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rate: f64, marks: usize) -> Vec<Duration> {
        let when = |mark: usize| {
            // All that is let through at once comes at once.
            let bytes = (mark * MARK_BYTES).saturating_sub(512 << 10);
            Duration::from_secs_f64(1e-3 + bytes as f64 / rate)
        };
        (1..=marks).map(when).collect()
    }

    #[test]
    fn what_is_let_through_at_once_does_not_count() {
        for true_rate in [1e6, 125e6, 10e9] {
            let measured = rate(&at(true_rate, 40)).expect("enough answers");
            assert!((measured / true_rate - 1.0).abs() < 0.01, "{measured}");
        }
    }

    #[test]
    fn few_answers_say_how_fast_it_is_at_most() {
        let measured = rate(&at(1e6, 10)).expect("some answers");
        assert!(measured > 1e6 && measured < 1e8, "{measured}");
        assert_eq!(rate(&[]), None);
    }
}
