//! The types that settings have: how each is written, what it takes, and the one form in which it is shown.

use std::path::PathBuf;
use std::time::Duration;

use crate::types::Algorithm;

/// A type that a setting may have. `parse` and `show` are inverse up to the choice of words.
pub(super) trait Value: Sized {
    fn parse(text: &str) -> Option<Self>;
    fn show(&self) -> String;
}

/// A time limit; `None` waits for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeout(pub Option<Duration>);

impl Timeout {
    /// The limit as a duration; no limit is a hundred years, which every clock can still add.
    pub fn duration(self) -> Duration {
        self.0.unwrap_or(Duration::from_secs(100 * 365 * 86_400))
    }
}

impl Value for Timeout {
    fn parse(text: &str) -> Option<Self> {
        if text == "none" {
            return Some(Self(None));
        }
        let seconds: f64 = text.parse().ok()?;
        // The lower end keeps the value from rounding to zero, the upper one keeps instants representable.
        (1e-6..=3.2e9)
            .contains(&seconds)
            .then(|| Self(Some(Duration::from_secs_f64(seconds))))
    }

    fn show(&self) -> String {
        match self.0 {
            Some(limit) => limit.as_secs_f64().to_string(),
            None => "none".to_owned(),
        }
    }
}

/// How long a host may be silent: whole seconds, 2 to 3600, since the kernel counts in such. `None` for any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerTimeout(Option<u32>);

impl PeerTimeout {
    /// The limit, if there is one.
    pub fn seconds(self) -> Option<u32> {
        self.0
    }
}

impl Value for PeerTimeout {
    fn parse(text: &str) -> Option<Self> {
        if text == "none" {
            return Some(Self(None));
        }
        let seconds = text.parse().ok()?;
        (2..=3600).contains(&seconds).then_some(Self(Some(seconds)))
    }

    fn show(&self) -> String {
        self.0
            .map_or_else(|| "none".to_owned(), |seconds| seconds.to_string())
    }
}

/// A size in bytes, written as a number or with a suffix K, M or G (powers of 1024).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub usize);

impl Value for Bytes {
    fn parse(text: &str) -> Option<Self> {
        let (digits, unit) = match text.chars().last()? {
            'k' | 'K' => (&text[..text.len() - 1], 1_usize << 10),
            'm' | 'M' => (&text[..text.len() - 1], 1 << 20),
            'g' | 'G' => (&text[..text.len() - 1], 1 << 30),
            _ => (text, 1),
        };
        digits.parse::<usize>().ok()?.checked_mul(unit).map(Self)
    }

    fn show(&self) -> String {
        self.0.to_string()
    }
}

/// From which size on private memory is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LendBytes {
    /// The size that is fastest on most machines.
    Auto,
    /// Never.
    None,
    /// From this size on.
    From(usize),
}

impl Value for LendBytes {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "none" => Some(Self::None),
            bytes => Bytes::parse(bytes).map(|bytes| Self::From(bytes.0)),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Auto => "auto".to_owned(),
            Self::None => "none".to_owned(),
            Self::From(bytes) => bytes.to_string(),
        }
    }
}

/// Whether something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch(pub bool);

impl Value for Switch {
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "on" | "true" | "yes" | "1" => Some(Self(true)),
            "off" | "false" | "no" | "0" => Some(Self(false)),
            _ => None,
        }
    }

    fn show(&self) -> String {
        if self.0 { "on" } else { "off" }.to_owned()
    }
}

/// A number of threads, 1 to 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads(pub usize);

impl Value for Threads {
    fn parse(text: &str) -> Option<Self> {
        let threads = text.parse().ok()?;
        (1..=64).contains(&threads).then_some(Self(threads))
    }

    fn show(&self) -> String {
        self.0.to_string()
    }
}

/// The size of a ring: a power of two from 4 KiB to 64 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingBytes(usize);

impl RingBytes {
    /// The size in bytes.
    pub const fn bytes(self) -> usize {
        self.0
    }
}

impl Value for RingBytes {
    fn parse(text: &str) -> Option<Self> {
        let Bytes(bytes) = Bytes::parse(text)?;
        (bytes.is_power_of_two() && (4 << 10..=64 << 20).contains(&bytes)).then_some(Self(bytes))
    }

    fn show(&self) -> String {
        self.0.to_string()
    }
}

/// A setting that is one of some words.
macro_rules! choice {
    (
        $(#[doc = $about:literal])+ $choice:ident
        $($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $choice {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Value for $choice {
            fn parse(text: &str) -> Option<Self> {
                match text {
                    $($text => Some(Self::$name),)+
                    _ => None,
                }
            }

            fn show(&self) -> String {
                match self {
                    $(Self::$name => $text.to_owned(),)+
                }
            }
        }
    };
}

choice! {
    /// Which transports may be used.
    TransportChoice
    /// Shared memory inside a host, TCP between hosts.
    Auto = "auto",
    /// Shared memory alone: all ranks must be on one host.
    Shm = "shm",
    /// TCP alone, also inside a host.
    Tcp = "tcp",
}

choice! {
    /// The reaction of a torch process to a failure of its group on a device.
    DeviceFailure
    /// It ends, unless the error has been raised in it soon.
    End = "end",
    /// It goes on, until something raises the error.
    Raise = "raise",
}

choice! {
    /// The events that are written to standard error.
    LogLevel
    /// Nothing.
    Off = "off",
    /// A service of this process that can no longer do its part.
    Error = "error",
    /// And what a user would want to know but did not ask for: shared memory that cannot be used, a stranger that was
    /// refused.
    Warn = "warn",
    /// And choices: the interface, the store.
    Info = "info",
    /// And every link.
    Debug = "debug",
}

impl Value for Algorithm {
    fn parse(text: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == text)
    }

    fn show(&self) -> String {
        self.name().to_owned()
    }
}

impl Value for usize {
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for u64 {
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for String {
    fn parse(text: &str) -> Option<Self> {
        (!text.is_empty() && text.len() <= 200).then(|| text.to_owned())
    }

    fn show(&self) -> String {
        self.clone()
    }
}

impl Value for PathBuf {
    fn parse(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| Self::from(text))
    }

    fn show(&self) -> String {
        self.display().to_string()
    }
}

/// An optional value is written `auto` when it is left to unisono.
impl<T: Value> Value for Option<T> {
    fn parse(text: &str) -> Option<Self> {
        if text == "auto" {
            return Some(None);
        }
        T::parse(text).map(Some)
    }

    fn show(&self) -> String {
        self.as_ref().map_or_else(|| "auto".to_owned(), T::show)
    }
}
