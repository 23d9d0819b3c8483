//! Settings: one table, from which come the struct, the environment reader, the setter, the rows for the
//! documentation and for Python, and the digest that ranks compare when they meet.
//!
//! A row names a setting by its consequence. A setting that must be the same on every rank says so; the ranks
//! exchange those values when a group forms, and a difference ends the join with the setting's name and both
//! values. A value that was parsed is shown again in one canonical form, so `64K` and `65536` agree.

mod environment;
#[cfg(test)]
mod tests;
mod values;

use std::path::PathBuf;

use sha2::{Digest, Sha256};

pub(crate) use self::environment::LAUNCH_SECRET;
use self::values::Value;
pub use self::values::{
    Bytes, DeviceFailure, LendBytes, LogLevel, PeerTimeout, RingBytes, Switch, Threads, Timeout,
    TransportChoice,
};
use crate::error::{Error, Result};
use crate::types::Algorithm;

/// One row of the table of settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The name, as in `config.set(name, value)` and in the field of [`Config`].
    pub name: &'static str,
    /// The environment variable.
    pub variable: &'static str,
    /// The values that it takes, in words.
    pub accepts: &'static str,
    /// The default, as it would be written.
    pub default: &'static str,
    /// Whether every rank must have the same value.
    pub must_agree: bool,
    /// Its consequence, in one line.
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
        "Other ranks reach this one over TCP by these network interfaces, or after ^ by any but these, instead of by the one that leads to MASTER_ADDR.";
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
    window_bytes: Option<Bytes>, "UNISONO_WINDOW_BYTES", "auto", "auto, or bytes, such as 16M; 0 for none", true,
        "Collectives on a GPU go through twice this much of its memory per rank, with 0 through the host's; auto is 16M, and on a GPU that processes share what calls need, up to 256M.";
    device_failure: DeviceFailure, "UNISONO_DEVICE_FAILURE", "end", "end or raise", false,
        "A torch process whose group has failed on a GPU ends if 5 seconds later no call has raised the error; with raise it goes on.";
    spin_us: Option<u64>, "UNISONO_SPIN_US", "auto", "auto, or microseconds", false,
        "A wait spins this long before it sleeps: more lowers latency, and burns a core that others may need.";
    threads: Option<Threads>, "UNISONO_THREADS", "auto", "auto, or 1 to 64", true,
        "So many threads of each rank share large reductions, copies and long messages between hosts; auto is 1, or more where a link carries at least 2 GB/s: up to 4 on a host together, on no more than half of its cores.";
    secret_file: Option<PathBuf>, "UNISONO_SECRET_FILE", "auto", "auto, or the path of a file", false,
        "Only processes with the same file can join. auto: only those with the secret of unisono launch or of a unique id; where there is none, all that can write to the store.";
    encrypt: Switch, "UNISONO_ENCRYPT", "off", "on or off", true,
        "on: what goes over TCP between ranks is encrypted and authenticated, at the cost of a core's work. Without a secret, a process that can write to the store can still join.";
    flight_records: usize, "UNISONO_FLIGHT_RECORDS", "256", "a count", false,
        "So many of the last operations are kept to be reported when one fails.";
    trace: Option<PathBuf>, "UNISONO_TRACE", "auto", "auto, or the path of a folder", true,
        "Each process writes its operations and when they began and ended into a file in this folder, for unisono trace; auto writes none.";
    log: LogLevel, "UNISONO_LOG", "warn", "off, error, warn, info or debug", false,
        "Standard error tells what unisono chose and met with, from this level on; errors are raised besides.";
}

impl Config {
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
