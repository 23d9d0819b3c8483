//! The messages of the two sides: the request to open a connection, and the answers to it.

use std::fmt;

use super::noise::Suite;
use super::{CLEAR, MAGIC, REQUEST, VERSION};

/// The first byte that an acceptor sends, not authenticated: what follows it, or why nothing does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reply {
    /// The challenge follows.
    GoOn = 1,
    /// Too many connections are in their handshake: come again.
    Busy = 2,
    /// The hello is not one of a member of a group that is here.
    Refused = 3,
}

impl Reply {
    /// The reply that travels as `number`.
    pub fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::GoOn),
            2 => Some(Self::Busy),
            3 => Some(Self::Refused),
            _ => None,
        }
    }
}

/// Which of the streams between two ranks a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Lane {
    /// Carries collectives, in the order in which they were called.
    Collective = 0,
    /// Carries send and recv.
    PointToPoint = 1,
}

impl Lane {
    pub(in crate::transport) fn from_number(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Collective),
            1 => Some(Self::PointToPoint),
            _ => None,
        }
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Collective => "collective",
            Self::PointToPoint => "point-to-point",
        })
    }
}

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    /// The control channel of a shared memory link; the segment follows the answer.
    SharedMemory = 1,
    /// The stream of a TCP link; its control channel is a second connection with the same link id.
    TcpData = 2,
    /// The control channel of a TCP link.
    TcpControl = 3,
    /// A further connection of a TCP link, for what the initiator sends; the link id begins with its number.
    TcpStripe = 4,
    /// No link: a process that has no group in common with the acceptor says how one is to be made.
    Conversation = 5,
    /// A further socket for a connection of a TCP link that broke; the link id begins with which it is.
    TcpAgain = 6,
    /// No link: a member asks for the state of this process. The link id begins with 1 if records of operations belong to that.
    Status = 7,
}

impl Purpose {
    /// All there are, in the order of their numbers.
    pub(crate) const ALL: [Self; 7] = [
        Self::SharedMemory,
        Self::TcpData,
        Self::TcpControl,
        Self::TcpStripe,
        Self::Conversation,
        Self::TcpAgain,
        Self::Status,
    ];

    pub(in crate::transport) fn from_number(number: u8) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|purpose| *purpose as u8 == number)
    }
}

/// The acceptor's answer to a proven member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Answer {
    /// Go on.
    Accept = 1,
    /// The acceptor is connecting to the initiator, and its attempt wins.
    Crossing = 2,
    /// The acceptor has this link already.
    Duplicate = 3,
    /// The acceptor could not make its end of the link from what it was given.
    Failed = 4,
    /// The acceptor was in the group and has left it.
    Left = 5,
    /// The acceptor has made the link by an earlier connection of this attempt, and keeps none of this one.
    Made = 6,
}

impl Answer {
    pub(in crate::transport) fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Accept),
            2 => Some(Self::Crossing),
            3 => Some(Self::Duplicate),
            4 => Some(Self::Failed),
            5 => Some(Self::Left),
            6 => Some(Self::Made),
            _ => None,
        }
    }
}

/// The initiator's request to open a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The purpose of the connection.
    pub purpose: Purpose,
    /// Which link of the two ranks.
    pub lane: Lane,
    /// The initiator's rank.
    pub from: u32,
    /// The acceptor's rank.
    pub to: u32,
    /// Random; the two connections that make a link have the same.
    pub link: [u8; 16],
}

impl Hello {
    pub(super) fn clear(&self, group: &[u8; 16], suite: Suite) -> [u8; CLEAR] {
        let mut clear = [0; CLEAR];
        clear[..8].copy_from_slice(&MAGIC);
        clear[8..10].copy_from_slice(&VERSION.to_le_bytes());
        clear[10] = suite as u8;
        clear[12..28].copy_from_slice(group);
        clear[28..32].copy_from_slice(&self.from.to_le_bytes());
        clear[32..36].copy_from_slice(&self.to.to_le_bytes());
        clear
    }

    pub(in crate::transport) fn request(&self) -> [u8; REQUEST] {
        let mut request = [0; REQUEST];
        request[0] = self.purpose as u8;
        request[1] = self.lane as u8;
        request[2..].copy_from_slice(&self.link);
        request
    }

    pub(super) fn from_request(request: &[u8; REQUEST], from: u32, to: u32) -> Option<Self> {
        Some(Self {
            purpose: Purpose::from_number(request[0])?,
            lane: Lane::from_number(request[1])?,
            from,
            to,
            link: array(&request[2..]),
        })
    }
}

pub(super) fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}
