//! Opening a link: the transports of the table are tried in their order, until one leads to the peer.

use std::cell::Cell;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::attempt::{Attempt, ConnectRequest, Reached, Setback};
use super::conversation::Conversation;
use super::membership::{Membership, Permission};
use super::shared::Shared;
use super::transports::{
    Again, TRANSPORTS, Transport, introduce, open_again, open_one, open_stripe,
};
use super::wire::Patience;
use crate::config::TransportChoice;
use crate::error::{Code, Error, Result};
use crate::transport::handshake::{Answer, Hello, Purpose};
use crate::transport::keys::random_bytes;
use crate::transport::{Link, SocketId, Stripe};
use crate::types::Rank;

/// How long a refused TCP connection is tried again: the listener may be about to come back.
const REFUSED_GRACE: Duration = Duration::from_millis(200);

/// How an attempt to open a link ended.
pub enum Outcome {
    /// The link.
    Link(Box<dyn Link>),
    /// The peer is opening this link at this moment, or has opened it: wait for it at the gate. Its attempt may
    /// still fail for a reason that only the peer learns; connecting again after a while is harmless and finds
    /// that out.
    Crossing,
}

impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Link(link) => write!(f, "Link({})", link.describe()),
            Self::Crossing => f.write_str("Crossing"),
        }
    }
}

pub(super) fn connect(
    shared: &Shared,
    membership: &Arc<Membership>,
    request: &ConnectRequest<'_>,
) -> Result<Outcome> {
    let to = u32::try_from(request.to).unwrap_or(u32::MAX);
    if request.from != membership.rank as Rank || !membership.has_peer(to) {
        return Err(Error::invalid(format!(
            "no link from rank {} to rank {}: this is rank {} of {}",
            request.from, request.to, membership.rank, membership.world_size
        )));
    }
    let claim = match membership.claim_connecting(to, request.lane) {
        Permission::Open(claim) => claim,
        Permission::Awaited => return Ok(Outcome::Crossing),
        Permission::Closed(error) => return Err(error),
    };
    let mut attempt = begin(shared, request, random_bytes()?);
    attempt.claim = Some(&claim);
    match walk(&mut attempt) {
        Ok(Reached::Link(link)) => {
            claim.linked();
            tracing::debug!(peer = request.to, lane = %request.lane, by = %link.describe(), "linked");
            Ok(Outcome::Link(link))
        }
        Ok(Reached::Answer(Answer::Crossing)) => Ok(Outcome::Crossing),
        Err(_) if attempt.has_given_way.get() => Ok(Outcome::Crossing),
        // The peer's own attempt was quicker, and it may have sent what it had to and left since: its link is in our
        // hands, though perhaps not yet in the group's.
        Ok(Reached::Answer(Answer::Duplicate | Answer::Left)) | Err(_)
            if membership.expects(to, request.lane) =>
        {
            Ok(Outcome::Crossing)
        }
        Ok(Reached::Answer(answer)) => Err(attempt.refusal(answer)),
        Err(error) if error.code == Code::PeerLost && attempt.is_out_of_reach.get() => {
            tracing::info!(%error, "waiting for the peer to connect from its side");
            membership.cannot_reach(to, request.lane, error);
            Ok(Outcome::Crossing)
        }
        Err(error) => Err(error),
    }
}

/// Opens stripes `numbers` of a link, and gives each to `take`.
pub(super) fn open_stripes(
    shared: &Shared,
    request: &ConnectRequest<'_>,
    numbers: Range<u8>,
    mut take: impl FnMut(Stripe),
) -> Result<()> {
    let mut addresses = request.target.towards(&shared.address);
    for number in numbers {
        let mut link = [0; 16];
        link[0] = number;
        let attempt = begin(shared, request, link);
        take(open_stripe(&attempt, number, &mut addresses)?);
    }
    Ok(())
}

/// Opens a connection of a link again, which had broken: try number `tries` of it.
pub(super) fn open_connection_again(
    shared: &Shared,
    request: &ConnectRequest<'_>,
    socket: SocketId,
    tries: usize,
) -> Again {
    let mut link = [0; 16];
    link[..SocketId::BYTES].copy_from_slice(&socket.write());
    let mut attempt = begin(shared, request, link);
    // A process that ends closes what it listens at, and is to be missed soon.
    attempt.grace = Duration::ZERO;
    open_again(&attempt, socket, tries)
}

/// Begins a conversation.
pub(super) fn converse(shared: &Shared, request: &ConnectRequest<'_>) -> Result<Conversation> {
    let attempt = begin(shared, request, [0; 16]);
    let mut last = None;
    for address in request.target.towards(&shared.address) {
        match open_one(&attempt, address, Purpose::Conversation) {
            Ok((stream, proven)) => return Ok(Conversation::new(stream, proven.into_cipher())),
            Err(error) if error.code == Code::Aborted => return Err(error),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| attempt.error(Code::System, "no TCP address".to_owned())))
}

/// Whether the peer of `request` says that it has left the group, within the time of the request, which its addresses share.
/// One that has not left drops the conversation.
pub(super) fn has_left(shared: &Shared, request: &ConnectRequest<'_>) -> bool {
    let mut attempt = begin(shared, request, [0; 16]);
    attempt.grace = Duration::ZERO;
    let addresses = request.target.towards(&shared.address);
    for (at, address) in addresses.iter().enumerate() {
        let left = request.deadline.saturating_duration_since(Instant::now());
        let share = left / (addresses.len() - at) as u32;
        attempt.patience.deadline = Instant::now() + share;
        if let Ok((_, _, answer)) = introduce(&attempt, *address, Purpose::Conversation) {
            return answer == Answer::Left;
        }
    }
    false
}

/// An attempt to open a connection of the link with that id.
pub(super) fn begin<'a>(
    shared: &'a Shared,
    request: &'a ConnectRequest<'_>,
    link: [u8; 16],
) -> Attempt<'a> {
    Attempt {
        shared,
        request,
        hello: Hello {
            purpose: Purpose::TcpData,
            lane: request.lane,
            from: u32::try_from(request.from).unwrap_or(u32::MAX),
            to: u32::try_from(request.to).unwrap_or(u32::MAX),
            link,
        },
        patience: Patience {
            deadline: request.deadline,
            called_off: [request.cancelled, &shared.stopping],
            turn: request.turn,
        },
        claim: None,
        has_given_way: Cell::new(false),
        is_out_of_reach: Cell::new(false),
        grace: REFUSED_GRACE,
    }
}

/// Walks through the table until a transport leads to the peer.
fn walk(attempt: &mut Attempt<'_>) -> Result<Reached> {
    let demanded = attempt.request.transport;
    let mut set_back = Vec::new();
    for transport in TRANSPORTS {
        let is_demanded = demanded == transport.choice;
        if !is_demanded && demanded != TransportChoice::Auto {
            continue;
        }
        let (own, target) = (&attempt.shared.address, attempt.request.target);
        if let Some(hindrance) = (transport.hindrance)(own, target) {
            if is_demanded {
                let what = format!("{} was demanded, but {hindrance}", transport.name);
                return Err(attempt.error(Code::Unsupported, what));
            }
            continue;
        }
        match (transport.connect)(attempt) {
            Ok(reached) => {
                if matches!(reached, Reached::Link(_)) {
                    tell(attempt, transport, &set_back);
                }
                return Ok(reached);
            }
            Err(setback) if is_demanded => return Err(final_error(attempt, transport, setback)),
            Err(setback) => set_back.push((transport.name, pass_on(attempt, setback)?)),
        }
    }
    Err(attempt.error(Code::Unsupported, "no transport leads to it".to_owned()))
}

/// The error of a setback where the user demanded this transport alone.
fn final_error(attempt: &Attempt<'_>, transport: &Transport, setback: Setback) -> Error {
    match setback {
        Setback::Fatal(error) => error,
        Setback::Refused(place) => attempt.lost(&place),
        Setback::Unusable(reason) => {
            let what = format!("{} was demanded, but {reason}", transport.name);
            attempt.error(Code::System, what)
        }
    }
}

/// Prepares `attempt` for the next transport. Returns why this one was of no use.
fn pass_on(attempt: &mut Attempt<'_>, setback: Setback) -> Result<String> {
    match setback {
        Setback::Fatal(error) => Err(error),
        Setback::Refused(place) => {
            // Dead, or in another network namespace. If the next one is refused as well it is dead: no need to ask
            // twice.
            attempt.grace = Duration::ZERO;
            Ok(format!(
                "{place} cannot be reached from here (another container?)"
            ))
        }
        Setback::Unusable(reason) => Ok(reason),
    }
}

/// Tells, once for each host, which transports could not be used before this one was.
fn tell(attempt: &Attempt<'_>, used: &Transport, set_back: &[(&str, String)]) {
    if set_back.is_empty() {
        return;
    }
    let host = attempt.request.target.host().clone();
    if let Entry::Vacant(place) = attempt.shared.set_back.lock().entry(host) {
        let (peer, name) = (attempt.who(), used.name);
        for (other, reason) in set_back {
            tracing::info!(%peer, %reason, "no {other} inside this host: using {name}");
        }
        let told = |(other, reason): &(&str, String)| format!("no {other}: {reason}");
        place.insert(set_back.iter().map(told).collect());
    }
}
