//! What a rank says about itself when it joins a group, and where that comes from.

use std::fmt;
use std::path::Path;

use super::records::{Entry, MAX_ADDRESS, MAX_TEXT, Seal, Uuid};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::plan::cost::{Costs, Rounded};
use crate::types::Rank;

/// What a rank says about itself to join a group.
#[derive(Clone)]
pub struct Introduction {
    /// This rank.
    pub rank: Rank,
    /// How many ranks the group has.
    pub world: usize,
    /// What counts as one host: ranks with the same label try to share memory.
    pub host: String,
    /// The host's name, for messages.
    pub hostname: String,
    /// The process, for messages.
    pub pid: u32,
    /// Where the others reach this rank; opaque here, at most 4096 bytes.
    pub address: Vec<u8>,
    /// The settings that must be the same on every rank.
    pub settings: Vec<(String, String)>,
    /// What things cost on its machine; rank 0's hold for the group.
    pub costs: Rounded,
    /// The version of unisono.
    pub version: String,
    /// The user's secret, if there is one.
    pub secret: Option<Vec<u8>>,
}

impl Introduction {
    /// This process as rank `rank` of `world`, reachable at `address`, with the settings of `config`, on a machine of
    /// typical costs with one core.
    ///
    /// # Errors
    /// As [`read_secret`], when the configuration names a secret file.
    pub fn new(rank: Rank, world: usize, address: Vec<u8>, config: &Config) -> Result<Self> {
        let settings = config.agreed().into_iter();
        Ok(Self {
            rank,
            world,
            host: config.host.clone().unwrap_or_else(host_label),
            hostname: hostname(),
            pid: std::process::id(),
            address,
            settings: settings
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
            costs: Costs::TYPICAL.rounded(1),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            secret: config.secret_file.as_deref().map(read_secret).transpose()?,
        })
    }

    pub(super) fn seal(&self) -> Seal<'_> {
        Seal {
            version: &self.version,
            secret: self.secret.as_deref(),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let Self { rank, world, .. } = self;
        if rank >= world || u32::try_from(*world).is_err() {
            return Err(Error::invalid(format!(
                "rank {rank} is not below the world size {world}"
            )));
        }
        let texts = [&self.host, &self.hostname, &self.version];
        let settings = self.settings.iter().flat_map(|(name, value)| [name, value]);
        for text in texts.into_iter().chain(settings) {
            if text.len() > MAX_TEXT {
                return Err(Error::invalid(format!(
                    "{text:?} is longer than the {MAX_TEXT} bytes that a rank may say about itself at once"
                )));
            }
        }
        if self.address.len() > MAX_ADDRESS {
            return Err(Error::internal(format!(
                "the address of rank {rank} has {} bytes, more than {MAX_ADDRESS}",
                self.address.len()
            )));
        }
        Ok(())
    }

    pub(super) fn entry(&self) -> Result<Entry> {
        let mut uuid = Uuid::default();
        fill_random(&mut uuid)?;
        Ok(Entry {
            rank: self.rank as u32,
            world: self.world as u32,
            uuid,
            pid: self.pid,
            host: self.host.clone(),
            hostname: self.hostname.clone(),
            address: self.address.clone(),
            settings: self.settings.clone(),
        })
    }
}

impl fmt::Debug for Introduction {
    /// Everything but the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Introduction")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .field("host", &self.host)
            .field("hostname", &self.hostname)
            .field("pid", &self.pid)
            .field("settings", &self.settings)
            .field("costs", &self.costs)
            .field("version", &self.version)
            .field("has_secret", &self.secret.is_some())
            .finish_non_exhaustive()
    }
}

/// The user's secret in the file at `path`, without white space at its end.
///
/// # Errors
/// `System` when it cannot be read, `InvalidArgument` when it is shorter than 16 bytes.
pub fn read_secret(path: &Path) -> Result<Vec<u8>> {
    let bytes = std::fs::read(path)
        .map_err(|cause| Error::system(format!("read secret file {}", path.display()), cause))?;
    let secret = bytes.trim_ascii_end();
    if secret.len() < 16 {
        return Err(Error::invalid(format!(
            "secret file {} holds {} bytes, but 16 or more random ones are needed, such as those of \
             `openssl rand -hex 32`",
            path.display(),
            secret.len()
        )));
    }
    Ok(secret.to_vec())
}

/// The label of the host that this process runs on: the running kernel, told by its boot id. Containers of one
/// host have the same; whether their ranks can share memory they find out by trying.
pub fn host_label() -> String {
    match std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        Ok(id) if !id.trim().is_empty() => id.trim().to_owned(),
        _ => hostname(),
    }
}

/// The host's name.
pub fn hostname() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    name.chars().take(64).collect()
}

pub(super) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|cause| Error::system("read random bytes", cause))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn a_secret_file_is_read_and_a_short_one_refused() {
        let path = std::env::temp_dir().join(format!("unisono-secret-{}", std::process::id()));
        std::fs::write(&path, "0123456789abcdef\n").expect("write");
        assert_eq!(
            read_secret(&path).expect("long enough"),
            b"0123456789abcdef"
        );
        std::fs::write(&path, "short\n").expect("write");
        assert_eq!(
            read_secret(&path).expect_err("short").code,
            Code::InvalidArgument
        );
        std::fs::remove_file(&path).expect("remove");
        assert_eq!(read_secret(&path).expect_err("gone").code, Code::System);
    }
}
