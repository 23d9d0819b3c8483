//! This process's rank, world size and master, from the environment that its launcher has set: torchrun (or `unisono
//! launch`, or the same variables set by hand), Open MPI, MPICH and its kin, Slurm, Kubernetes indexed jobs.
//!
//! The launchers are asked in the order of their table (`launchers.rs`); the first that gives a rank wins. Everything
//! here is a function of a lookup (`variables.rs`), so it is tested without touching the environment.

mod launchers;
#[cfg(test)]
mod tests;
mod variables;

use std::env;

use self::launchers::LAUNCHERS;
use self::variables::Variables;
use super::secret::Secret;
use crate::error::Result;
use crate::types::Rank;

/// How many ports may be tried for the store, beginning with the master's.
const CANDIDATES: u16 = 16;

/// This process, as the launcher describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This process's rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: usize,
    /// This process's number on its host.
    pub local_rank: Option<usize>,
    /// How many ranks this host has.
    pub local_world: Option<usize>,
    /// Where the ranks meet. A world of one may have none.
    pub master: Option<Master>,
    /// The name that distinguishes this job from others that meet at neighbouring ports.
    pub job: String,
    /// The secret that the launcher told its ranks alone, if it did.
    pub secret: Option<Secret>,
    /// The launcher, in words.
    pub source: &'static str,
}

/// Where the ranks of a job meet: the host of rank 0, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// A name or an address of rank 0's host.
    pub host: String,
    /// The port that the launcher names, or that was derived from the job's name.
    pub port: u16,
    /// Whether the launcher itself serves at that port, so that ours must be another one.
    pub is_taken: bool,
}

impl Launch {
    /// The same job with this process as `rank` of `world`. Further ranks than before may be on other hosts.
    pub(super) fn of(&self, rank: Rank, world: usize) -> Self {
        let are_here = world <= self.world && self.is_one_host(self.world);
        Self {
            rank,
            world,
            local_world: are_here.then_some(world),
            ..self.clone()
        }
    }

    /// Whether all ranks are on this host, and a group of `world` ranks is not more than those.
    pub(super) fn is_one_host(&self, world: usize) -> bool {
        world <= self.world && self.local_world == Some(self.world)
    }
}

impl Master {
    /// The ports at which rank 0 may serve the store, in the order in which it tries them. Clients probe the same
    /// ones until one answers as the store of their job.
    pub fn candidates(&self) -> Vec<u16> {
        let first = u16::from(self.is_taken);
        (first..=CANDIDATES)
            .map(|step| {
                // Ports below 1024 are not ours to take: wrap around above them.
                match self.port.checked_add(step) {
                    Some(port) => port,
                    None => 1024 + (u32::from(self.port) + u32::from(step) - 65536) as u16,
                }
            })
            .collect()
    }
}

/// Reads from the environment how the launcher describes this process.
///
/// # Errors
/// `InvalidArgument` when no launcher started it, or the variables are incomplete or contradict each other; the
/// message says which are set, which are missing, and how to start.
pub fn detect() -> Result<Launch> {
    detect_from(
        &|name| env::var(name).ok(),
        std::os::unix::process::parent_id(),
    )
}

/// Whether the launcher says that all its ranks are on this host, and a group of `world` ranks is not more than those.
pub fn is_one_host(world: usize) -> bool {
    detect().is_ok_and(|launch| launch.is_one_host(world))
}

/// The secret that the launcher gave to its ranks, for a group of `world` ranks that meets through a store of other
/// making: `None` where the launcher gave none, or the group has more ranks than it started.
pub fn secret(world: usize) -> Option<Secret> {
    let launch = detect().ok()?;
    launch.secret.filter(|_| world <= launch.world)
}

/// As [`detect`], from the variables that `lookup` gives and the id of the parent process.
///
/// # Errors
/// As [`detect`].
pub fn detect_from(lookup: &dyn Fn(&str) -> Option<String>, parent: u32) -> Result<Launch> {
    let variables = Variables::new(lookup);
    for launcher in LAUNCHERS {
        if variables.text(launcher.rank).is_some() && !launcher.is_slurm_in_disguise(&variables) {
            return launcher.launch(&variables, parent);
        }
    }
    Err(variables.incomplete(
        "no launcher's rank variable is set",
        &["RANK", "WORLD_SIZE"],
    ))
}
