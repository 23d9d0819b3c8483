//! The connections of a link that are broken, or over which nothing comes back, and the time for which that has been so.

use std::time::Instant;

use super::mending::{Breach, Hindrance, Outage, SocketId};

/// The cause of a breach where a connection has not broken, but nothing comes back over it.
const DARK: &str = "no answer from its host";

/// A connection as the link finds it at one look.
#[derive(Debug)]
pub(super) struct FoundConnection {
    pub(super) socket: SocketId,
    pub(super) is_ours: bool,
    pub(super) fault: Fault,
}

/// Why a connection carries nothing.
#[derive(Debug)]
pub(super) enum Fault {
    /// It has broken, in words.
    Broken(String),
    /// It has broken, since the system has asked the peer's host in vain for as long as that may be silent.
    Silent(String),
    /// Nothing comes back.
    Dark,
}

/// The breaches of a link.
#[derive(Debug, Default)]
pub(super) struct Breaches {
    /// Each, and whether the caller knows.
    list: Vec<(Breach, bool)>,
    /// Since when not all connections carry bytes; and the last such time, once it is over.
    outage: Option<Outage>,
    healed: Option<Outage>,
}

impl Breaches {
    /// Takes in the faults that one look has found. `sockets`: those of all connections, and whether this side has opened each.
    /// Faults that were known and are not found any more have been made good. Returns the new ones. An error is the end of the
    /// link: the system has given up a connection that was being made again all the while.
    pub(super) fn look(
        &mut self,
        mut found: Vec<FoundConnection>,
        sockets: &[(SocketId, bool)],
    ) -> Result<Vec<SocketId>, String> {
        let mut given_up = None;
        self.list.retain_mut(|(breach, _)| {
            let is_it = |found: &FoundConnection| {
                (found.socket, found.is_ours) == (breach.socket, breach.is_ours)
            };
            let Some(at) = found.iter().position(is_it) else {
                // A thread is about to replace one that was dark, whatever has become of it.
                let has_its_socket = sockets.contains(&(breach.socket, breach.is_ours));
                return breach.is_dark && has_its_socket;
            };
            match found.swap_remove(at).fault {
                Fault::Silent(cause) if breach.is_dark => given_up = Some(cause),
                Fault::Broken(cause) if breach.is_dark => {
                    (breach.cause, breach.is_dark) = (cause, false);
                }
                _ => {}
            }
            true
        });
        if let Some(cause) = given_up {
            return Err(cause);
        }
        let new = found.into_iter().map(|found| self.add(found)).collect();
        Ok(new)
    }

    fn add(
        &mut self,
        FoundConnection {
            socket,
            is_ours,
            fault,
        }: FoundConnection,
    ) -> SocketId {
        let is_dark = matches!(fault, Fault::Dark);
        let was_silent = matches!(fault, Fault::Silent(_));
        let cause = match fault {
            Fault::Broken(cause) | Fault::Silent(cause) => cause,
            Fault::Dark => DARK.to_owned(),
        };
        self.outage.get_or_insert_with(|| Outage {
            since: Instant::now(),
            cause: cause.clone(),
        });
        let breach = Breach {
            socket,
            is_ours,
            cause,
            is_dark,
            was_silent,
        };
        self.list.push((breach, false));
        socket
    }

    /// All connections carry bytes, unless some are still broken.
    pub(super) fn settle(&mut self) {
        if self.list.is_empty() {
            self.healed = self.outage.take().or_else(|| self.healed.take());
        }
    }

    /// One that the caller does not know; from now on it does.
    pub(super) fn next_untold(&mut self) -> Option<Breach> {
        let (breach, is_told) = self.list.iter_mut().find(|(_, is_told)| !is_told)?;
        *is_told = true;
        Some(breach.clone())
    }

    /// The connection that had this socket is not made again. Returns the reason for the end of the link, if that is one: not
    /// where the connection has been made again, or the system still tries it.
    pub(super) fn end(&mut self, socket: SocketId, why: &Hindrance) -> Option<String> {
        let at = self
            .list
            .iter()
            .rposition(|(breach, _)| breach.socket == socket)?;
        let (breach, _) = &self.list[at];
        let cause = &breach.cause;
        match why {
            Hindrance::NotSoFar(_) if breach.is_dark => {
                self.list.remove(at);
                None
            }
            Hindrance::Ended => Some(cause.clone()),
            Hindrance::Left => Some(format!("{cause}, and it has left the group")),
            Hindrance::NotSoFar(why) => {
                Some(format!("{cause}, and it could not be opened again: {why}"))
            }
        }
    }

    /// Whether the connection that had this socket is still to be made again.
    pub(super) fn has(&self, socket: SocketId) -> bool {
        self.list.iter().any(|(breach, _)| breach.socket == socket)
    }

    /// Those that are dark.
    pub(super) fn dark(&self) -> impl Iterator<Item = SocketId> {
        let dark = self.list.iter().filter(|(breach, _)| breach.is_dark);
        dark.map(|(breach, _)| breach.socket)
    }

    /// Those that the peer is to open.
    pub(super) fn theirs(&self) -> impl Iterator<Item = SocketId> {
        let theirs = self.list.iter().filter(|(breach, _)| !breach.is_ours);
        theirs.map(|(breach, _)| breach.socket)
    }

    /// Since when not all connections carry bytes.
    pub(super) fn outage(&self) -> Option<&Outage> {
        self.outage.as_ref()
    }

    pub(super) fn take_healed(&mut self) -> Option<Outage> {
        self.healed.take()
    }
}

#[cfg(test)]
mod tests {
    use super::super::mending::Part;
    use super::*;

    const SOCKET: SocketId = SocketId {
        part: Part::Data,
        number: 3,
    };

    const HERE: [(SocketId, bool); 1] = [(SOCKET, true)];

    fn found(fault: Fault) -> Vec<FoundConnection> {
        let (socket, is_ours) = (SOCKET, true);
        vec![FoundConnection {
            socket,
            is_ours,
            fault,
        }]
    }

    #[test]
    fn an_outage_is_told_once_when_it_is_over() {
        let mut breaches = Breaches::default();
        let broken = || found(Fault::Broken("reset".to_owned()));
        assert_eq!(breaches.look(broken(), &HERE), Ok(vec![SOCKET]));
        assert_eq!(breaches.look(broken(), &HERE), Ok(vec![]));
        assert_eq!(
            breaches.next_untold().map(|breach| breach.cause),
            Some("reset".to_owned())
        );
        assert_eq!(breaches.next_untold(), None);
        breaches.settle();
        assert!(breaches.outage().is_some() && breaches.take_healed().is_none());
        assert_eq!(breaches.look(vec![], &[]), Ok(vec![]));
        breaches.settle();
        assert_eq!(
            breaches.take_healed().map(|outage| outage.cause),
            Some("reset".to_owned())
        );
        assert!(breaches.outage().is_none() && breaches.take_healed().is_none());
        assert_eq!(breaches.end(SOCKET, &Hindrance::Ended), None);
    }

    #[test]
    fn the_system_decides_when_a_dark_host_is_lost() {
        let mut breaches = Breaches::default();
        assert_eq!(breaches.look(found(Fault::Dark), &HERE), Ok(vec![SOCKET]));
        let no_way = Hindrance::NotSoFar("no way".to_owned());
        // It is replaced all the same when something has come back.
        assert_eq!(breaches.look(vec![], &HERE), Ok(vec![]));
        assert!(breaches.has(SOCKET));
        assert_eq!(breaches.end(SOCKET, &no_way), None);
        assert_eq!(breaches.look(found(Fault::Dark), &HERE), Ok(vec![SOCKET]));
        let silent = || found(Fault::Silent("timed out".to_owned()));
        assert_eq!(breaches.look(silent(), &HERE), Err("timed out".to_owned()));
        // Without a suspicion before, another way may lead there.
        let mut breaches = Breaches::default();
        assert_eq!(breaches.look(silent(), &HERE), Ok(vec![SOCKET]));
        assert!(
            breaches
                .next_untold()
                .is_some_and(|breach| breach.was_silent)
        );
        let end = breaches.end(SOCKET, &no_way).expect("the end");
        assert_eq!(end, "timed out, and it could not be opened again: no way");
        // A peer that has adopted another socket closes this one.
        let mut breaches = Breaches::default();
        assert_eq!(breaches.look(found(Fault::Dark), &HERE), Ok(vec![SOCKET]));
        let closed = found(Fault::Broken("closed".to_owned()));
        assert_eq!(breaches.look(closed, &HERE), Ok(vec![]));
        let ended = Hindrance::Ended;
        assert_eq!(breaches.end(SOCKET, &ended), Some("closed".to_owned()));
    }
}
