//! Whether a process that was met before is still there.

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use super::address::Address;
use super::shared::Shared;
use super::wire::{Cut, Patience};

/// How long an address may take to answer: long enough to send the first packet twice.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(1500);

/// How often an address that does not answer is tried.
const TRIES: usize = 3;

/// A process that listens is looked at again after each of these milliseconds: one that ends closes its descriptors one after
/// the other, which takes a while where it gets no core.
const LOOK_PAUSES: [u64; 5] = [10, 40, 150, 300, 500];

/// The state of a process as its host's kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It listens.
    There,
    /// Its host answers that nothing listens at any of its addresses: it has ended, or closed all of its groups.
    Gone,
    /// An address does not answer, or cannot be tried.
    Unknown,
}

/// Whether the process that published `address` is there, and stays so for a second.
pub(super) fn presence(shared: &Shared, address: &Address) -> Presence {
    let mut presence = look(shared, address);
    for (tries, pause) in (1..).zip(LOOK_PAUSES) {
        match presence {
            Presence::Gone => break,
            Presence::Unknown if tries >= TRIES => break,
            _ => thread::sleep(Duration::from_millis(pause)),
        }
        presence = look(shared, address);
    }
    presence
}

/// Connects to each address until one listens, and says nothing: the kernel of the other host answers by itself, also for a
/// process that is stopped.
pub(super) fn look(shared: &Shared, address: &Address) -> Presence {
    let never = AtomicBool::new(false);
    let patience = || Patience {
        deadline: Instant::now() + ANSWER_TIMEOUT,
        called_off: [&never, &shared.stopping],
        turn: None,
    };
    let mut presence = Presence::Gone;
    let mut note = |connected: Result<(), Cut>| match connected {
        Ok(()) => presence = Presence::There,
        Err(Cut::Refused) => {}
        Err(_) if presence == Presence::Gone => presence = Presence::Unknown,
        Err(_) => {}
    };
    let own = &shared.address;
    let is_near = own.host.is_same_machine(&address.host);
    if is_near && !address.unix_name.is_empty() {
        note(patience().connect_unix(&address.unix_name).map(drop));
    }
    for place in address.towards(own) {
        // One that this host has as well says nothing of another host.
        let is_ours = !is_near
            && (place.ip().is_loopback() || own.tcp.iter().any(|own| own.ip() == place.ip()));
        note(match is_ours {
            true => Err(Cut::Silent),
            false => patience().connect_tcp(place, (None, None)).map(drop),
        });
    }
    presence
}
