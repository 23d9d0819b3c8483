//! Whether an endpoint listens on the network.
//!
//! An endpoint that may have to be reached from other hosts listens on loopback too. Once a group has formed and all of its
//! ranks turn out to be on this host, it needs loopback alone. Several groups share an endpoint, so each that forms or
//! reaches other hosts holds an [`Outside`], and with the last of them the listeners on the network are closed. They are not
//! opened again, since their ports have been published: a group that forms later gets another endpoint.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Endpoint;
use super::address::Address;
use super::shared::Shared;
use crate::fork::Home;

/// A group's hold on an endpoint.
#[derive(Clone)]
pub struct Seat {
    pub(super) endpoint: Arc<Endpoint>,
    outside: Option<Arc<Outside>>,
}

impl Seat {
    /// A hold on `endpoint` that keeps it open to other hosts; `None` where it is closed to them already.
    pub(super) fn new(endpoint: &Arc<Endpoint>) -> Option<Self> {
        let mut given = endpoint.outside.lock();
        let outside = match &*given {
            Some(outside) => outside.upgrade()?,
            None => {
                let outside = Arc::new(Outside {
                    shared: Arc::clone(&endpoint.shared),
                    home: Home::here(),
                });
                *given = Some(Arc::downgrade(&outside));
                outside
            }
        };
        Some(Self {
            endpoint: Arc::clone(endpoint),
            outside: Some(outside),
        })
    }

    /// The ranks at these addresses are all that the group has: where loopback leads to each of them, the group needs
    /// nothing else.
    pub fn met<'a>(&mut self, mut ranks: impl Iterator<Item = &'a Address>) {
        let own = self.endpoint.address();
        if own.has_both() && ranks.all(|rank| own.shares_loopback_with(rank)) {
            self.outside = None;
        }
    }
}

impl Deref for Seat {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}

/// Keeps an endpoint's listeners on the network open.
pub(super) struct Outside {
    shared: Arc<Shared>,
    home: Home,
}

impl Drop for Outside {
    fn drop(&mut self) {
        // The listeners of a forked child's copy are its parent's.
        if self.home.is_here() {
            self.shared.inside_only.store(true, Ordering::Release);
            self.shared.wake_acceptor();
        }
    }
}
