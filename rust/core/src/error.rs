//! The one error type. A code says what kind of failure it is and what it costs: the call alone, or the
//! communicator for good. The message names ranks, sizes and what to try.

use std::fmt;

use crate::types::Rank;

/// `std::result::Result` with unisono's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Code {
    /// An argument is wrong; nothing was sent and the communicator still works.
    InvalidArgument = 1,
    /// The request is well formed but has no meaning or no implementation; nothing was sent.
    Unsupported = 2,
    /// Something did not happen within its time.
    Timeout = 3,
    /// Another rank's process ended, left, or cannot be reached.
    PeerLost = 4,
    /// Two ranks called different operations, or the same with different parameters.
    Mismatch = 5,
    /// The communicator was aborted, here or by another rank.
    Aborted = 6,
    /// The operating system or the network refused something.
    System = 7,
    /// A connection or a store entry was not what a member of the job would send.
    Untrusted = 8,
    /// A defect in unisono.
    Internal = 9,
}

impl Code {
    /// Every code, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::InvalidArgument,
        Self::Unsupported,
        Self::Timeout,
        Self::PeerLost,
        Self::Mismatch,
        Self::Aborted,
        Self::System,
        Self::Untrusted,
        Self::Internal,
    ];

    /// Whether the communicator is dead after a failure of this kind during an operation.
    pub const fn is_fatal(self) -> bool {
        !matches!(self, Self::InvalidArgument | Self::Unsupported)
    }

    /// The code's name (`PeerLost`).
    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "InvalidArgument",
            Self::Unsupported => "Unsupported",
            Self::Timeout => "Timeout",
            Self::PeerLost => "PeerLost",
            Self::Mismatch => "Mismatch",
            Self::Aborted => "Aborted",
            Self::System => "System",
            Self::Untrusted => "Untrusted",
            Self::Internal => "Internal",
        }
    }

    /// The code with this number, if there is one.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }
}

/// A failure: what kind, in words, and which rank caused it where one did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The kind of failure.
    pub code: Code,
    /// What happened, lower case, no full stop, with ranks, sizes and a hint where there is one.
    pub message: String,
    /// The rank that caused the failure, when it is another one.
    pub peer: Option<Rank>,
    /// The operation that failed, such as `all_reduce #17`.
    pub operation: Option<String>,
}

impl Error {
    /// An error of `code` with `message`.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            peer: None,
            operation: None,
        }
    }

    /// A wrong argument.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// A request without meaning or implementation.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(Code::Unsupported, message)
    }

    /// A system call that failed: `doing` says what was attempted (`connect to 10.0.0.7:4321`).
    pub fn system(doing: impl fmt::Display, cause: impl fmt::Display) -> Self {
        Self::new(Code::System, format!("{doing}: {cause}"))
    }

    /// A defect.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::Internal, message)
    }

    /// The same error, with the rank that caused it.
    #[must_use]
    pub fn with_peer(mut self, peer: Rank) -> Self {
        self.peer = Some(peer);
        self
    }

    /// The same error, with the operation it ended.
    #[must_use]
    pub fn with_operation(mut self, operation: impl Into<String>) -> Self {
        self.operation = Some(operation.into());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.operation {
            Some(operation) => write!(f, "{operation}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {}
