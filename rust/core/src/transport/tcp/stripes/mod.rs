//! Long messages over several connections.
//!
//! One connection carries less than a fast link can: clouds cap the rate of each, and the packets of each go through one core
//! of a host's network stack. So a sender that has much to send opens more connections to the peer, its *stripes*, and deals
//! long payloads out to them in blocks. Whether that pays is measured (`pace.rs`). Each direction of a link has its own
//! stripes, which only its sender uses.
//!
//! # The first connection
//!
//! The link's own connection keeps all bytes in order. It begins as a plain stream. Once the stripes are there the sender
//! announces on the control channel from which byte on it consists of frames, and sends frames from there once the peer has
//! heard that. Each frame has a head of four bytes, little-endian:
//!
//! ```text
//! bits 24 to 31: 255, and the bytes follow here         bits 0 to 23: number of bytes, not 0
//!                N < 255, and the bytes follow on stripe N
//! ```
//!
//! The receiver reads frame after frame, each from the connection that its head names. So it needs no memory for bytes that
//! come out of order: they stay in the kernel's buffers of the other stripes, which fill meanwhile.
//!
//! The sender closes stripes that do not pay, and may try others later. Those of the first trial have the numbers from 0 on,
//! those of the next one from 8 on, and so forth.
//!
//! The sender deals each block to the stripe with the fewest bytes on their way, so a slow connection gets fewer. Bytes count
//! as sent in the order of the stream: bytes of later blocks that were sent ahead of an unfinished block are remembered, and
//! the caller's next call begins with the first byte that does not count.
//!
//! # Several threads
//!
//! Where a rank has several threads (`UNISONO_THREADS`), they share a long payload, each at one stripe (`abreast.rs`). A sender
//! deals blocks out to all stripes that can take some, and the threads send them. A receiver asks the kernel how much each
//! stripe has, and the threads receive the frames that are there, up to the first one that is not complete. So the received
//! bytes are always the next ones of the stream. Encrypted stripes are received by one thread: how many bytes arrived shows
//! when they are opened.

mod abreast;
mod gather;
mod pace;
mod spread;

use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

pub(super) use self::gather::Gather;
pub(super) use self::pace::Pace;
pub(super) use self::spread::Spread;
use super::connection::Connection;
use crate::error::{Error, Result};
use crate::transport::cipher::Cipher;

/// Stripes of one direction at a time, at most.
pub(in crate::transport::tcp) const MOST_STRIPES: u8 = 8;

/// In the head of a frame: its bytes follow here.
const HERE: u8 = u8::MAX;

/// Bytes of a frame, at most.
const LONGEST_FRAME: usize = (1 << 24) - 1;

/// Bytes of a frame's head.
const HEAD: usize = 4;

/// The head of a frame.
fn head(place: u8, bytes: usize) -> [u8; HEAD] {
    (u32::from(place) << 24 | bytes as u32).to_le_bytes()
}

/// A further connection of a link, for one direction.
#[derive(Debug)]
pub struct Stripe {
    number: u8,
    is_ours: bool,
    connection: Connection,
}

impl Stripe {
    /// Stripe `number` of its direction, higher than those of earlier trials. It carries the bytes that this side sends if
    /// `is_ours`, else those that the peer sends.
    ///
    /// # Errors
    /// `System` when the socket does not take its options.
    pub fn new(
        number: u8,
        is_ours: bool,
        socket: TcpStream,
        cipher: Option<Cipher>,
    ) -> Result<Self> {
        let connection = Connection::new(socket, cipher)
            .map_err(|cause| Error::system("set up a further connection", cause))?;
        Ok(Self {
            number,
            is_ours,
            connection,
        })
    }

    /// Its number, whether it is for what this side sends, and the connection.
    pub(super) fn into_parts(self) -> (u8, bool, Connection) {
        (self.number, self.is_ours, self.connection)
    }
}

impl AsFd for Stripe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}
