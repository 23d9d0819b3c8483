//! The one error type. A code says what kind of failure it is and what it costs: the call alone, or the
//! communicator for good. The message names ranks, sizes and what to try.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::Arc;

use crate::types::{Meaningless, Rank};

/// `std::result::Result` with unisono's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
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
///
/// The error of the operating system, where it refused something, is the [source](std::error::Error::source): an [`io::Error`]
/// with its number.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Error {
    /// The kind of failure.
    pub code: Code,
    /// The description: lower case, no full stop, with ranks, sizes and a hint where there is one.
    pub message: String,
    /// The rank that caused the failure, when it is another one.
    pub peer: Option<Rank>,
    /// The operation that failed, such as `all_reduce #17`.
    pub operation: Option<String>,
    /// In a box of its own: few errors have any, and every result has room for an error.
    pub(crate) details: Option<Box<Details>>,
}

/// Data for programs that only some errors have.
#[derive(Clone, Debug, Default)]
pub(crate) struct Details {
    missing: Vec<Rank>,
    field: Option<Cow<'static, str>>,
    source: Option<Arc<io::Error>>,
    has_left: bool,
}

impl PartialEq for Details {
    fn eq(&self, other: &Self) -> bool {
        let source = |details: &Self| {
            let source = details.source.as_ref();
            source.map(|error| (error.kind(), error.raw_os_error()))
        };
        let plain = (&self.missing, &self.field, self.has_left);
        plain == (&other.missing, &other.field, other.has_left) && source(self) == source(other)
    }
}

impl Eq for Details {}

/// The reason why a system call failed.
pub trait Cause: fmt::Display {
    /// The same as an error of the operating system's, if it is one.
    fn as_io(&self) -> Option<io::Error> {
        None
    }
}

impl Cause for io::Error {
    fn as_io(&self) -> Option<io::Error> {
        Some(match self.raw_os_error() {
            Some(number) => Self::from_raw_os_error(number),
            None => Self::new(self.kind(), self.to_string()),
        })
    }
}

impl Cause for rustix::io::Errno {
    fn as_io(&self) -> Option<io::Error> {
        Some((*self).into())
    }
}

impl Cause for nix::errno::Errno {
    fn as_io(&self) -> Option<io::Error> {
        Some((*self).into())
    }
}

impl Cause for getrandom::Error {
    fn as_io(&self) -> Option<io::Error> {
        self.raw_os_error().map(io::Error::from_raw_os_error)
    }
}

impl Cause for str {}
impl Cause for String {}
impl Cause for fmt::Arguments<'_> {}

impl<T: Cause + ?Sized> Cause for &T {
    fn as_io(&self) -> Option<io::Error> {
        (**self).as_io()
    }
}

impl Error {
    /// An error of `code` with `message`.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            peer: None,
            operation: None,
            details: None,
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
    pub fn system(doing: impl fmt::Display, cause: impl Cause) -> Self {
        let mut error = Self::new(Code::System, format!("{doing}: {cause}"));
        if let Some(source) = cause.as_io() {
            error.details().source = Some(Arc::new(source));
        }
        error
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

    /// The same error, of ranks that did not come.
    #[must_use]
    pub(crate) fn with_missing(mut self, ranks: &[Rank]) -> Self {
        self.details().missing = ranks.to_vec();
        self
    }

    /// The same error, of a difference in `field`.
    #[must_use]
    pub(crate) fn with_field(mut self, field: impl Into<Cow<'static, str>>) -> Self {
        self.details().field = Some(field.into());
        self
    }

    /// The ranks that did not join in time, in order: of a `Timeout` of a join, on a rank that waited for them until then.
    /// Empty on ranks that heard of it through the store, and for all other errors.
    pub fn missing_ranks(&self) -> &[Rank] {
        self.details
            .as_ref()
            .map_or(&[], |details| details.missing.as_slice())
    }

    /// The field that differs between two ranks, of a `Mismatch`: `dtype`, `root`, `count`, or the name of a setting.
    pub fn differing_field(&self) -> Option<&str> {
        self.details.as_ref()?.field.as_deref()
    }

    /// This error, of a peer that has left its group in good order.
    #[must_use]
    pub(crate) fn of_one_that_left(mut self) -> Self {
        self.details().has_left = true;
        self
    }

    /// Whether the peer has left its group in good order.
    pub(crate) fn is_of_one_that_left(&self) -> bool {
        self.details
            .as_ref()
            .is_some_and(|details| details.has_left)
    }

    fn details(&mut self) -> &mut Details {
        self.details.get_or_insert_default()
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

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        let source = self.details.as_ref()?.source.as_ref()?;
        Some(source.as_ref())
    }
}

impl From<Meaningless> for Error {
    fn from(error: Meaningless) -> Self {
        Self::unsupported(error.to_string())
    }
}

/// Text that another process wrote: of a peer, or what anybody may have put into a store. It ends in errors and logs, and so
/// on terminals, which obey some characters. Each of those becomes a question mark here, so that the text is never longer than
/// its bytes were, and can be written again where they were allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForeignText(String);

impl ForeignText {
    /// The text that `bytes` are; `None` when they are none.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let shown = |letter| match is_obeyed(letter) {
            true => '?',
            false => letter,
        };
        Some(Self(text.chars().map(shown).collect()))
    }
}

impl From<ForeignText> for String {
    fn from(text: ForeignText) -> Self {
        text.0
    }
}

/// Whether a terminal does something else with a character than show it, where it belongs: controls, ends of lines, and marks
/// that change the direction of what is around them. A reader that goes by lines would take what follows for another line.
fn is_obeyed(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;
    use crate::types::{DataType, ReduceOp};

    #[test]
    fn what_the_system_refused_can_be_asked_for() {
        let refused = || io::Error::from_raw_os_error(libc::EACCES);
        for error in [
            Error::system("open a file", refused()),
            Error::system("open a file", rustix::io::Errno::ACCESS),
            Error::system("open a file", nix::errno::Errno::EACCES),
        ] {
            let source = error.clone().with_peer(1);
            let source = source.source().and_then(|source| source.downcast_ref());
            assert_eq!(source.and_then(io::Error::raw_os_error), Some(libc::EACCES));
            assert!(error.message.starts_with("open a file: "));
        }
        assert!(Error::system("open a file", "no").source().is_none());
        assert_ne!(
            Error::system("it", refused()),
            Error::system("it", refused().to_string())
        );
    }

    #[test]
    fn an_operator_without_meaning_is_unsupported() {
        let error = Error::from(ReduceOp::Avg.check(DataType::Bool).unwrap_err());
        assert_eq!(error.code, Code::Unsupported);
        assert_eq!(
            error.message,
            "operator avg has no meaning for bool; average the bytes as uint8"
        );
    }

    #[test]
    fn details_stay_with_the_error() {
        let error = Error::new(Code::Timeout, "late").with_missing(&[2, 5]);
        assert_eq!(error.clone().with_operation("a").missing_ranks(), [2, 5]);
        let error = Error::new(Code::Mismatch, "unlike").with_field("root");
        assert_eq!(error.differing_field(), Some("root"));
        assert!(error.missing_ranks().is_empty());
    }

    #[test]
    fn what_others_wrote_is_shown_and_not_obeyed() {
        let told = |bytes: &[u8]| ForeignText::read(bytes).map(String::from);
        let plain = "rank 3 (h\u{f6}st, pid 7) is gone: 100 % \u{4f60}";
        assert_eq!(told(plain.as_bytes()).as_deref(), Some(plain));
        let sly = "a\u{1b}]0;title\u{7}b\r\nWARN c\u{9b}2J\u{202e}d\u{2028}";
        let shown = told(sly.as_bytes()).expect("a text");
        assert!(!shown.contains(is_obeyed), "{shown:?}");
        assert_eq!(shown.chars().count(), sly.chars().count());
        assert_eq!(told(&[0xff]), None);
    }
}
