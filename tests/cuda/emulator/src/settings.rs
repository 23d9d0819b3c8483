//! The emulator's settings, from the environment. The README lists the variables; an unknown one ends the process, since
//! a test with a misspelt fault would pass for the wrong reason.

use std::collections::HashMap;
use std::sync::OnceLock;

use crate::faults::Fault;
use crate::status::Status;

const PREFIX: &str = "CUDA_EMULATOR_";

/// Where IPC is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ipc {
    #[default]
    Works,
    RefuseExport,
    RefuseImport,
}

/// Which devices reach each other's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerAccess {
    Both,
    Neither,
    /// A device reaches those of a higher number.
    Upwards,
}

impl PeerAccess {
    /// Whether a device may reach another one.
    pub(crate) fn lets(self, device: usize, peer: usize) -> bool {
        match self {
            Self::Both => true,
            Self::Neither => false,
            Self::Upwards => device < peer,
        }
    }
}

/// The behaviour of calls that may wait for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Synchronize {
    /// They do not wait.
    Usual,
    /// They wait.
    Always,
    /// They fail beside a stream that waits for a word.
    Refuse,
}

const PEER_ACCESSES: [(&str, PeerAccess); 3] = [
    ("yes", PeerAccess::Both),
    ("no", PeerAccess::Neither),
    ("upwards", PeerAccess::Upwards),
];

const IPCS: [(&str, Ipc); 3] = [
    ("yes", Ipc::Works),
    ("refuse-export", Ipc::RefuseExport),
    ("refuse-import", Ipc::RefuseImport),
];

const SYNCHRONIZATIONS: [(&str, Synchronize); 3] = [
    ("usual", Synchronize::Usual),
    ("always", Synchronize::Always),
    ("refuse", Synchronize::Refuse),
];

/// The settings of this process, read once.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) devices: usize,
    pub(crate) peer_access: PeerAccess,
    /// Bytes of memory of one device.
    pub(crate) memory: usize,
    pub(crate) version: i32,
    pub(crate) stub: bool,
    /// Says that processes use a device at the same time.
    pub(crate) mps: bool,
    pub(crate) ipc: Ipc,
    pub(crate) memory_operations: bool,
    /// Whether registered host memory has a device address of its own.
    pub(crate) separate_host_pointers: bool,
    /// The behaviour of calls that may wait for the device.
    pub(crate) synchronize: Synchronize,
    /// Whether freed addresses are given out again at once.
    pub(crate) reuse: bool,
    /// The byte that new device memory holds.
    pub(crate) fill: Option<u8>,
    pub(crate) full_grid: bool,
    /// Hardware queues that the streams share; `None`: each stream its own.
    pub(crate) connections: Option<usize>,
    /// Operations that a queue holds; a call waits for room.
    pub(crate) depth: usize,
    /// Microseconds before each operation or call of a name.
    pub(crate) delays: HashMap<String, u64>,
    /// The most microseconds before an operation; half of the operations do not wait.
    pub(crate) random_delay: u64,
    pub(crate) seed: u64,
    pub(crate) faults: Vec<Fault>,
    pub(crate) report: Option<String>,
    pub(crate) trace: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            devices: 1,
            peer_access: PeerAccess::Both,
            memory: 16 << 30,
            version: 12080,
            stub: false,
            mps: false,
            ipc: Ipc::Works,
            memory_operations: true,
            separate_host_pointers: false,
            synchronize: Synchronize::Usual,
            reuse: false,
            fill: None,
            full_grid: false,
            connections: None,
            depth: 1000,
            delays: HashMap::new(),
            random_delay: 0,
            seed: 0,
            faults: Vec::new(),
            report: None,
            trace: false,
        }
    }
}

/// The settings of this process.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.to_str()?.strip_prefix(PREFIX)?.to_string();
            Some((name, value.to_string_lossy().into_owned()))
        });
        Settings::parse(variables).unwrap_or_else(|error| {
            eprintln!("cuda emulator: {error}");
            std::process::abort();
        })
    })
}

impl Settings {
    fn parse(variables: impl Iterator<Item = (String, String)>) -> Result<Self, String> {
        let mut settings = Self::default();
        for (name, value) in variables {
            settings
                .set(&name, &value)
                .map_err(|error| format!("{PREFIX}{name}={value}: {error}"))?;
        }
        Ok(settings)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "DEVICES" => self.devices = number(value)?,
            "PEER_ACCESS" => self.peer_access = choice(value, &PEER_ACCESSES)?,
            "MEMORY" => self.memory = number::<usize>(value)? << 20,
            "VERSION" => self.version = number(value)?,
            "STUB" => self.stub = choice(value, &[("yes", true), ("no", false)])?,
            "MPS" => self.mps = choice(value, &[("yes", true), ("no", false)])?,
            "IPC" => self.ipc = choice(value, &IPCS)?,
            "MEMORY_OPERATIONS" => {
                self.memory_operations = choice(value, &[("yes", true), ("no", false)])?;
            }
            "HOST_POINTERS" => {
                self.separate_host_pointers =
                    choice(value, &[("same", false), ("separate", true)])?;
            }
            "SYNCHRONIZE" => self.synchronize = choice(value, &SYNCHRONIZATIONS)?,
            "REUSE" => self.reuse = choice(value, &[("yes", true), ("no", false)])?,
            "FILL" => self.fill = Some(number(value)?),
            "GRID" => self.full_grid = choice(value, &[("small", false), ("full", true)])?,
            "CONNECTIONS" => self.connections = Some(number::<usize>(value)?.max(1)),
            "DEPTH" => self.depth = number::<usize>(value)?.max(1),
            "DELAY" => {
                for part in value.split(',').filter(|part| !part.is_empty()) {
                    let (name, time) = part.split_once(':').ok_or("want name:microseconds")?;
                    self.delays.insert(name.to_string(), number(time)?);
                }
            }
            "RANDOM_DELAY" => self.random_delay = number(value)?,
            "SEED" => self.seed = number(value)?,
            "FAIL" => {
                for part in value.split(',').filter(|part| !part.is_empty()) {
                    self.faults.push(fault(part)?);
                }
            }
            "REPORT" => self.report = Some(value.to_string()).filter(|path| !path.is_empty()),
            "TRACE" => self.trace = choice(value, &[("yes", true), ("no", false)])?,
            _ => return Err("there is no such setting".to_string()),
        }
        Ok(())
    }
}

fn number<T: std::str::FromStr>(value: &str) -> Result<T, String> {
    value
        .trim()
        .parse()
        .map_err(|_| "want a number".to_string())
}

fn choice<T: Copy>(value: &str, choices: &[(&str, T)]) -> Result<T, String> {
    match choices.iter().find(|(name, _)| *name == value) {
        Some((_, choice)) => Ok(*choice),
        None => {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            Err(format!("want one of {}", names.join(", ")))
        }
    }
}

/// `name:n=code` (the nth time) or `name:n+=code` (from the nth time on), counted from 1.
fn fault(text: &str) -> Result<Fault, String> {
    let shape = "want name:n=code or name:n+=code";
    let (name, rest) = text.split_once(':').ok_or(shape)?;
    let (count, code) = rest.split_once('=').ok_or(shape)?;
    let (count, onwards) = match count.strip_suffix('+') {
        Some(count) => (count, true),
        None => (count, false),
    };
    let status = match code.parse() {
        Ok(code) => Status(code),
        Err(_) => Status::named(code).ok_or_else(|| format!("{code} is no error's name"))?,
    };
    Ok(Fault::new(name, number(count)?, onwards, status))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str, value: &str) -> Result<Settings, String> {
        Settings::parse([(name.to_string(), value.to_string())].into_iter())
    }

    #[test]
    fn a_misspelt_setting_is_refused() {
        assert!(parse("DEVISES", "2").is_err());
        assert!(parse("IPC", "maybe").is_err());
        assert!(parse("FAIL", "cuMemAlloc_v2").is_err());
        assert!(parse("FAIL", "cuMemAlloc_v2:1=CUDA_ERROR_TYPO").is_err());
    }

    #[test]
    fn settings_are_read() {
        assert_eq!(parse("DEVICES", "3").unwrap().devices, 3);
        assert_eq!(
            parse("IPC", "refuse-import").unwrap().ipc,
            Ipc::RefuseImport
        );
        let faults = parse(
            "FAIL",
            "cuMemAlloc_v2:2=CUDA_ERROR_OUT_OF_MEMORY,copy:1+=700",
        )
        .unwrap()
        .faults;
        assert_eq!(faults.len(), 2);
        assert_eq!(
            parse("DELAY", "copy:5,kernel:7").unwrap().delays["kernel"],
            7
        );
    }
}
