//! A process that takes part in groups that form, again and again, of handles: without a store, and with other processes each
//! time.

use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use super::Communicator;
use crate::config::Config;
use crate::engine::{Group, bootstrap, pricing};
use crate::error::{Error, Result};
use crate::fork::Own;
use crate::heap;
use crate::locks::Mutex;
use crate::rendezvous::roster::{self, Introduction};
use crate::rendezvous::secret::Secret;
use crate::transport::endpoint::{Endpoint, Seat};

/// A process that may become a member of groups. It listens, for as long as it lives, for those of its groups.
pub struct Candidate {
    /// Holds the endpoint open to other hosts.
    endpoint: Own<Seat>,
    me: Introduction,
    handle: String,
    config: Config,
    numbers: Mutex<HashSet<i64>>,
}

impl fmt::Debug for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Candidate({:?})", self.me)
    }
}

impl Candidate {
    /// This process, with the settings of `config` in all of its groups. `secret`: the one of its launcher, if that gave one;
    /// the setting `secret_file` is mixed into it.
    ///
    /// # Errors
    /// `System` where the system gives no sockets; `InvalidArgument` for settings that do not fit this host.
    pub fn new(config: Config, secret: Option<Secret>) -> Result<Self> {
        heap::configure(&config);
        let endpoint = Endpoint::global(&bootstrap::endpoint_options(&config))?;
        let secret = bootstrap::secret(secret, &config)?;
        let me = bootstrap::introduction((0, 1), endpoint.address(), secret, &config)?;
        let handle = roster::handle(&me, pricing::costs_here())?;
        Ok(Self {
            endpoint: Own::new(endpoint),
            me,
            handle,
            config,
            numbers: Mutex::default(),
        })
    }

    /// The text by which the other members of a group get to know this process. It tells no secret, and one that is passed
    /// around stays valid for as long as the candidate lives.
    pub fn handle(&self) -> &str {
        &self.handle
    }

    /// The group of the processes with these handles, in the order of their ranks. All of them call it, with the same handles
    /// and the same `number`, which none of them has used before. Nothing is sent before the first operation.
    ///
    /// # Errors
    /// `InvalidArgument` where the number was used, a handle is none or is there twice, or this process's is missing;
    /// `Mismatch` where a process has another version of unisono, other settings or another secret.
    pub fn form(&self, handles: &[String], number: i64) -> Result<Communicator> {
        self.endpoint.check()?;
        if self.numbers.lock().contains(&number) {
            return Err(Error::invalid(format!(
                "the number {number} was used for an earlier group: each forms one"
            )));
        }
        let own = (&self.me, self.handle.as_str());
        let (rank, roster) = roster::of_handles(own, handles, number)?;
        let members = bootstrap::introduced(&roster, None)?;
        let seat = Seat::clone(&self.endpoint);
        let group = Group::of_roster(seat, roster, members, (rank, self.config.clone()))?;
        self.numbers.lock().insert(number);
        Ok(Communicator::new(group))
    }

    /// As [`form`](Self::form), and waits until all have come: as long as `patience`, or as joining may take.
    ///
    /// # Errors
    /// As [`form`](Self::form); `Timeout`, on rank 0 with the ranks that did not come; `PeerLost` where a process has ended.
    pub fn gather(
        &self,
        handles: &[String],
        number: i64,
        patience: Option<Duration>,
    ) -> Result<Communicator> {
        let patience = patience.unwrap_or_else(|| self.config.join_timeout.duration());
        let comm = self.form(handles, number)?;
        comm.monitored_barrier(patience, true)?;
        Ok(comm)
    }
}
