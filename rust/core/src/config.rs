//! Settings: one table, from which come the struct, the environment reader, the setter, the rows for the
//! documentation and for Python, and the digest that ranks compare when they meet.
//!
//! A row names a setting by its consequence. A setting that must be the same on every rank says so; the ranks
//! exchange those values when a group forms, and a difference ends the join with the setting's name and both
//! values. A value that was parsed is shown again in one canonical form, so `64K` and `65536` agree.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::types::Algorithm;

/// The beginning of every environment variable that unisono reads.
const PREFIX: &str = "UNISONO_";

/// The variable by which `unisono launch` gives its ranks a secret. It is no setting, and is never shown.
pub(crate) const LAUNCH_SECRET: &str = "UNISONO_LAUNCH_SECRET";

/// Environment variables with our prefix that are not settings: the launcher's, the torch door's, the build's, and the
/// test suite's.
fn is_foreign(variable: &str) -> bool {
    matches!(
        variable,
        LAUNCH_SECRET | "UNISONO_AS_GLOO" | "UNISONO_TORCH_DIR"
    ) || variable.starts_with("UNISONO_TEST_")
}

/// Whether Kubernetes made this variable of the name of a service, as it does for every container that does not ask it not
/// to.
fn is_service_link(variable: &str) -> bool {
    let is_of_port = |rest: &str| {
        let (number, rest) = rest.split_once('_').unwrap_or((rest, ""));
        let mut protocols = ["TCP", "UDP", "SCTP"].iter();
        number.parse::<u16>().is_ok() && protocols.any(|protocol| rest.starts_with(protocol))
    };
    variable.ends_with("_PORT")
        || ["_SERVICE_HOST", "_SERVICE_PORT"]
            .iter()
            .any(|part| variable.contains(part))
        || variable
            .rmatch_indices("_PORT_")
            .any(|(at, part)| is_of_port(&variable[at + part.len()..]))
}

/// One row of the table of settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The name, as in `config.set(name, value)` and in the field of [`Config`].
    pub name: &'static str,
    /// The environment variable.
    pub variable: &'static str,
    /// What values it takes, in words.
    pub accepts: &'static str,
    /// The default, as it would be written.
    pub default: &'static str,
    /// Whether every rank must have the same value.
    pub must_agree: bool,
    /// What follows from it, in one line.
    pub consequence: &'static str,
}

/// Makes [`Config`] and its table from rows of
/// `field: Type, VARIABLE, default, accepts, must_agree, consequence`.
macro_rules! settings {
    ($($field:ident: $type:ty, $variable:literal, $default:literal, $accepts:expr,
       $must_agree:literal, $consequence:literal;)+) => {
        /// The settings of a process, each with its default until it is set.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            $(#[doc = $consequence] pub $field: $type,)+
        }

        const TABLE: &[Setting] = &[$(Setting {
            name: stringify!($field),
            variable: $variable,
            accepts: $accepts,
            default: $default,
            must_agree: $must_agree,
            consequence: $consequence,
        },)+];

        impl Default for Config {
            fn default() -> Self {
                Self {
                    $($field: <$type as Value>::parse($default).expect("a default is a valid value"),)+
                }
            }
        }

        impl Config {
            /// Parses `text` into the field called `name`. `None`: there is no such field; `Some(false)`: the
            /// text is not a value of it.
            fn assign(&mut self, name: &str, text: &str) -> Option<bool> {
                match name {
                    $(stringify!($field) => Some(match <$type as Value>::parse(text) {
                        Some(value) => {
                            self.$field = value;
                            true
                        }
                        None => false,
                    }),)+
                    _ => None,
                }
            }

            /// The value of the setting called `name`, as it would be written.
            pub fn value(&self, name: &str) -> Option<String> {
                match name {
                    $(stringify!($field) => Some(Value::show(&self.$field)),)+
                    _ => None,
                }
            }
        }
    };
}

settings! {
    timeout: Timeout, "UNISONO_TIMEOUT", "1800", "seconds > 0, or none", false,
        "An operation that is not complete after this many seconds fails and names the rank it waited for.";
    join_timeout: Timeout, "UNISONO_JOIN_TIMEOUT", "300", "seconds > 0, or none", false,
        "A group that is not complete after this many seconds fails and names the ranks that did not come.";
    peer_timeout: PeerTimeout, "UNISONO_PEER_TIMEOUT", "10", "whole seconds, 2 to 3600, or none", false,
        "A rank whose host has not answered for this long over TCP is lost; one that is only slow or stopped is not.";
    transport: TransportChoice, "UNISONO_TRANSPORT", "auto", "auto, shm or tcp", true,
        "auto uses shared memory inside a host and TCP between hosts; shm or tcp uses that one alone.";
    interface: Option<String>, "UNISONO_INTERFACE", "auto", "auto, or names of interfaces and addresses (eth0 or eth0,eth1 or ^docker)", false,
        "TCP connections use these network interfaces, or after ^ none of these, instead of the one that leads to the peer.";
    host: Option<String>, "UNISONO_HOST", "auto", "auto, or any label", false,
        "Ranks with the same label count as one host and try shared memory; auto tells by kernel, user and network namespace.";
    ring_bytes: RingBytes, "UNISONO_RING_BYTES", "256K", "a power of two, 4K to 64M", true,
        "Shared memory per direction and peer: more lets large messages stream, less fits the cache.";
    algorithm: Option<Algorithm>, "UNISONO_ALGORITHM", "auto",
        Algorithm::ACCEPTS, true,
        "Forces this algorithm wherever it applies. All but windows and in_place send messages, and switch these two off.";
    lend_bytes: LendBytes, "UNISONO_LEND_BYTES", "auto", "auto, none, or bytes, such as 256K", false,
        "Payloads from this size on are read out of this process's memory by their receivers, not copied through a ring.";
    heap_bytes: Option<Bytes>, "UNISONO_HEAP_BYTES", "auto", "auto, or bytes, such as 2G; 0 for none", false,
        "Memory that peers work on in place grows to this much per process; auto is half of the machine's or container's.";
    eager_bytes: Bytes, "UNISONO_EAGER_BYTES", "64K", "bytes, such as 65536 or 64K", true,
        "A send up to this size leaves at once; a larger one waits until its receive is posted.";
    window_bytes: Bytes, "UNISONO_WINDOW_BYTES", "16M", "bytes, such as 16M; 0 for none", true,
        "Collectives on a GPU go through twice this much of its memory per rank; with 0 they go through the host's.";
    spin_us: Option<u64>, "UNISONO_SPIN_US", "auto", "auto, or microseconds", false,
        "A wait spins this long before it sleeps: more lowers latency, and burns a core that others may need.";
    threads: Threads, "UNISONO_THREADS", "1", "1 to 64", true,
        "So many threads of each rank share large reductions and copies: more than one pays with cores to spare.";
    secret_file: Option<PathBuf>, "UNISONO_SECRET_FILE", "auto", "auto, or the path of a file", false,
        "Only processes with the same file can join; auto trusts what can write to the rendezvous's store.";
    encrypt: Switch, "UNISONO_ENCRYPT", "off", "on or off", true,
        "on: what goes over TCP between ranks can be neither read nor altered on the way, at the cost of a core's work.";
    flight_records: usize, "UNISONO_FLIGHT_RECORDS", "256", "a count", false,
        "So many of the last operations are kept to be reported when one fails.";
    log: LogLevel, "UNISONO_LOG", "warn", "off, error, warn, info or debug", false,
        "Standard error tells what unisono chose and met with, from this level on; errors are raised besides.";
}

impl Config {
    /// The defaults, changed by the `UNISONO_*` variables of the environment.
    ///
    /// # Errors
    /// `InvalidArgument` for a variable that is no setting (naming the nearest one) or a value it does not take.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(std::env::vars_os())
    }

    /// As [`Config::from_env`], from the given variables.
    ///
    /// # Errors
    /// As [`Config::from_env`].
    pub fn from_variables(
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self> {
        let mut config = Self::default();
        let variables: Vec<_> = variables.into_iter().collect();
        let in_a_pod = variables
            .iter()
            .any(|(name, _)| name == "KUBERNETES_SERVICE_HOST");
        for (variable, value) in variables {
            let Some(variable) = variable.to_str().filter(|v| v.starts_with(PREFIX)) else {
                continue;
            };
            if is_foreign(variable) {
                continue;
            }
            let Some(row) = TABLE.iter().find(|row| row.variable == variable) else {
                if in_a_pod && is_service_link(variable) {
                    continue;
                }
                let known = TABLE.iter().map(|row| row.variable);
                return Err(unknown("environment variable", variable, known));
            };
            let value = value.to_str().ok_or_else(|| {
                Error::invalid(format!("the value of {variable} is not valid UTF-8"))
            })?;
            config.set_row(row, row.variable, value)?;
        }
        Ok(config)
    }

    /// Sets the setting called `name`.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that is no setting (naming the nearest one) or a value it does not take.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        match TABLE.iter().find(|row| row.name == name) {
            Some(row) => self.set_row(row, row.name, value),
            None => Err(unknown("setting", name, TABLE.iter().map(|row| row.name))),
        }
    }

    /// The table of settings, in the order in which it is documented.
    pub fn table() -> &'static [Setting] {
        TABLE
    }

    /// The settings that must be the same on every rank, with their values in canonical form.
    pub fn agreed(&self) -> Vec<(&'static str, String)> {
        TABLE
            .iter()
            .filter(|row| row.must_agree)
            .filter_map(|row| Some((row.name, self.value(row.name)?)))
            .collect()
    }

    /// A digest of [`Config::agreed`]: the same on two ranks if and only if these settings are.
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for (name, value) in self.agreed() {
            hash.update(format!("{name}={value}\n"));
        }
        hash.finalize().into()
    }

    /// Sets `row`, which the user knows as `called`.
    fn set_row(&mut self, row: &Setting, called: &str, value: &str) -> Result<()> {
        match self.assign(row.name, value.trim()) {
            Some(true) => Ok(()),
            Some(false) => Err(Error::invalid(format!(
                "{called} is {value:?}, but takes {}",
                row.accepts
            ))),
            None => Err(Error::internal(format!(
                "setting {} has no field",
                row.name
            ))),
        }
    }
}

/// The error for a name that is not in `known`, with the nearest one that is.
fn unknown(what: &str, name: &str, known: impl Iterator<Item = &'static str> + Clone) -> Error {
    let nearest = known
        .clone()
        .map(|candidate| (strsim::jaro_winkler(name, candidate), candidate))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| format!("; did you mean {candidate}?"));
    Error::invalid(format!(
        "there is no {what} {name}{} (there are: {})",
        nearest.unwrap_or_default(),
        known.collect::<Vec<_>>().join(", ")
    ))
}

/// A type that a setting may have. `parse` and `show` are inverse up to the choice of words.
trait Value: Sized {
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
    /// What is fastest on most machines.
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

/// Which transports may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportChoice {
    /// Shared memory inside a host, TCP between hosts.
    Auto,
    /// Shared memory alone: all ranks must be on one host.
    Shm,
    /// TCP alone, also inside a host.
    Tcp,
}

impl Value for TransportChoice {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "auto" => Self::Auto,
            "shm" => Self::Shm,
            "tcp" => Self::Tcp,
            _ => return None,
        })
    }

    fn show(&self) -> String {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
        .to_owned()
    }
}

/// What is written to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// A service of this process that can no longer do its part.
    Error,
    /// And what a user would want to know but did not ask for: shared memory that cannot be used, a stranger that was
    /// refused.
    Warn,
    /// And choices: the interface, the store.
    Info,
    /// And every link.
    Debug,
}

impl Value for LogLevel {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "off" => Self::Off,
            "error" => Self::Error,
            "warn" => Self::Warn,
            "info" => Self::Info,
            "debug" => Self::Debug,
            _ => return None,
        })
    }

    fn show(&self) -> String {
        match self {
            Self::Off => "off",
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
        }
        .to_owned()
    }
}

impl Value for Algorithm {
    fn parse(text: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|algorithm| algorithm.name() == text)
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::Code;

    fn from(variables: &[(&str, &str)]) -> Result<Config> {
        Config::from_variables(
            variables
                .iter()
                .map(|(name, value)| (OsString::from(name), OsString::from(value))),
        )
    }

    #[test]
    fn the_table_is_small_and_consistent() {
        assert!(TABLE.len() <= 18);
        let config = Config::default();
        for row in Config::table() {
            assert_eq!(row.variable, format!("{PREFIX}{}", row.name.to_uppercase()));
            assert!(!row.consequence.contains('\n'));
            // What is shown can be set again, and the default is what the row says.
            let shown = config.value(row.name).expect("every row has a field");
            let mut again = Config::default();
            again.set(row.name, &shown).expect("a shown value parses");
            again
                .set(row.name, row.default)
                .expect("the default parses");
            assert_eq!(again, config, "{}", row.name);
        }
    }

    #[test]
    fn every_algorithm_is_offered() {
        let row = TABLE
            .iter()
            .find(|row| row.name == "algorithm")
            .expect("a row");
        for algorithm in Algorithm::ALL {
            assert!(row.accepts.contains(algorithm.name()), "{algorithm:?}");
            let config = from(&[("UNISONO_ALGORITHM", algorithm.name())]).expect("parses");
            assert_eq!(config.algorithm, Some(algorithm));
        }
    }

    #[test]
    fn the_environment_is_read() {
        let config = from(&[
            ("UNISONO_TIMEOUT", "2.5"),
            ("UNISONO_JOIN_TIMEOUT", "none"),
            ("UNISONO_RING_BYTES", "1M"),
            ("UNISONO_HOST", "left"),
            ("UNISONO_TRANSPORT", "tcp"),
            ("UNISONO_TORCH_DIR", "/somewhere"),
            ("UNISONO_TEST_ANYTHING", "1"),
            ("PATH", "/bin"),
        ])
        .expect("valid");
        assert_eq!(config.timeout.duration(), Duration::from_millis(2500));
        assert_eq!(config.join_timeout, Timeout(None));
        assert_eq!(config.ring_bytes.bytes(), 1 << 20);
        assert_eq!(config.host.as_deref(), Some("left"));
        assert_eq!(config.transport, TransportChoice::Tcp);
    }

    #[test]
    fn unknown_names_are_answered_with_the_nearest() {
        let error = from(&[("UNISONO_TIMOUT", "3")]).expect_err("unknown");
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(
            error.message.contains("did you mean UNISONO_TIMEOUT?"),
            "{error}"
        );
        let error = Config::default()
            .set("ring_byte", "4096")
            .expect_err("unknown");
        assert!(
            error.message.contains("did you mean ring_bytes?"),
            "{error}"
        );
    }

    #[test]
    fn what_kubernetes_makes_of_a_service_is_no_setting() {
        let links = [
            "UNISONO_PORT",
            "UNISONO_SERVICE_HOST",
            "UNISONO_JOB_SERVICE_PORT",
            "UNISONO_JOB_SERVICE_PORT_STORE",
            "UNISONO_JOB_PORT_29500_TCP",
            "UNISONO_JOB_PORT_29500_TCP_ADDR",
        ];
        for link in links {
            let set = [(link, "10.0.0.1"), ("KUBERNETES_SERVICE_HOST", "10.0.0.2")];
            from(&set).expect("in a pod");
            from(&set[..1]).expect_err("elsewhere");
        }
        for slip in ["UNISONO_TIMOUT", "UNISONO_PORT_TCP", "UNISONO_IMPORTANT"] {
            let set = [(slip, "1"), ("KUBERNETES_SERVICE_HOST", "10.0.0.2")];
            from(&set).expect_err("a slip");
        }
    }

    #[test]
    fn values_out_of_range_are_refused_and_change_nothing() {
        let mut config = Config::default();
        for (name, value) in [
            ("timeout", "0"),
            ("timeout", "-1"),
            ("timeout", "nan"),
            ("timeout", "inf"),
            ("timeout", "soon"),
            ("peer_timeout", "1"),
            ("peer_timeout", "3601"),
            ("peer_timeout", "2.5"),
            ("ring_bytes", "5000"),
            ("ring_bytes", "2048"),
            ("ring_bytes", "128M"),
            ("eager_bytes", "99999999999999999999G"),
            ("transport", "udp"),
            ("algorithm", "magic"),
            ("flight_records", "-1"),
            ("host", ""),
        ] {
            let error = config.set(name, value).expect_err("out of range");
            assert!(
                error.message.contains(name) && error.message.contains("takes"),
                "{error}"
            );
        }
        assert_eq!(config, Config::default());
    }

    #[test]
    fn the_digest_covers_what_must_agree_and_nothing_else() {
        let base = Config::default();
        for row in TABLE {
            let mut other = base.clone();
            let value = match row.name {
                "transport" => "tcp",
                "algorithm" => "ring",
                "ring_bytes" => "4K",
                "log" => "off",
                "threads" => "3",
                "encrypt" => "on",
                _ => "77",
            };
            other.set(row.name, value).expect("valid");
            assert_eq!(
                other.digest() != base.digest(),
                row.must_agree,
                "{}",
                row.name
            );
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(index in 0..TABLE.len(), text in ".{0,40}") {
            let _ = Config::default().set(TABLE[index].name, &text);
        }

        #[test]
        fn sizes_keep_their_value(bytes in any::<u32>()) {
            prop_assert_eq!(Bytes::parse(&Bytes(bytes as usize).show()), Some(Bytes(bytes as usize)));
        }
    }
}
