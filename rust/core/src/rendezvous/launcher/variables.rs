//! The variables of the environment, read as what they should be, and the error that says which are set, which are
//! missing, and how to start.

use super::launchers::LAUNCHERS;
use crate::config::LAUNCH_SECRET;
use crate::error::{Error, Result};
use crate::rendezvous::secret::Secret;

/// As many characters has a launch's secret at least.
const SHORTEST_SECRET: usize = 32;

/// The environment, or what a test puts in its place.
pub(super) struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Variables<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { lookup }
    }

    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name)
            .map(|value| value.trim().to_owned())
            .filter(|value| !value.is_empty())
    }

    /// The secret of `unisono launch`, unless torchrun runs inside it: torchrun's ranks may be on other hosts as well,
    /// which do not have it.
    pub(super) fn secret(&self) -> Result<Option<Secret>> {
        match self.text(LAUNCH_SECRET) {
            Some(_) if self.text("TORCHELASTIC_RUN_ID").is_some() => Ok(None),
            Some(text) if text.len() >= SHORTEST_SECRET => {
                Ok(Some(Secret::from_bytes(text.as_bytes())))
            }
            Some(_) => Err(Error::invalid(format!(
                "{LAUNCH_SECRET} was changed on its way: it is set by `unisono launch`, for its ranks"
            ))),
            None => Ok(None),
        }
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<usize>> {
        match self.text(name) {
            None => Ok(None),
            Some(text) => match text.parse() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(self.wrong(&format!("{name} is {text:?}, which is no number"))),
            },
        }
    }

    pub(super) fn first_number(&self, names: &[&str]) -> Result<Option<usize>> {
        for name in names {
            if let Some(number) = self.number(name)? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    pub(super) fn incomplete(&self, why: &str, missing: &[&str]) -> Error {
        self.wrong(&format!("{why}; missing: {}", missing.join(", ")))
    }

    /// The error that says `why`, what is set, and how to start.
    pub(super) fn wrong(&self, why: &str) -> Error {
        let mut names = vec!["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
        names.extend(["MASTER_ADDR", "MASTER_PORT"]);
        for launcher in &LAUNCHERS[1..] {
            let groups = [launcher.world, launcher.local_rank, launcher.local_world];
            names.push(launcher.rank);
            names.extend(groups.concat().iter().filter(|name| **name != "WORLD_SIZE"));
        }
        let set: Vec<String> = names
            .iter()
            .filter_map(|name| Some(format!("{name}={}", self.text(name)?)))
            .collect();
        let set = if set.is_empty() {
            "none".to_owned()
        } else {
            set.join(" ")
        };
        Error::invalid(format!(
            "cannot tell this process's rank and where the ranks meet: {why} (set: {set}); start with \
             `unisono launch -n 2 program`, torchrun, srun or mpirun (over several hosts the last, and Kubernetes \
             indexed jobs, with MASTER_ADDR and MASTER_PORT set), or call unisono.init(rank=..., world_size=..., \
             url=\"tcp://host:port\")"
        ))
    }
}
