//! TCP, between hosts and wherever nothing else leads: two connections that carry the same link id, the stream and its
//! control channel.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::super::attempt::{Attempt, Reached, Setback, silent};
use super::super::shared::Parked;
use super::super::visit::{Reason, Stream, Visit, peer_of};
use super::super::wire::{Cut, Patience};
use super::{again, stripes};
use crate::error::{Code, Error, Result};
use crate::fork;
use crate::transport::handshake::{Answer, Hello, Proven, Purpose};
use crate::transport::tcp::TcpLink;

/// How long an address may take to answer before the next one of the same peer is tried. With many addresses it is less,
/// but long enough to send the first packet twice.
const ANOTHER_AFTER: Duration = Duration::from_secs(3);
const LEAST_SILENCE: Duration = Duration::from_millis(1500);

/// How often both connections of a link are opened anew.
const TRIES: u32 = 5;

/// Tries the peer's TCP addresses one after the other. A failure is final: if none leads there, no other transport does.
pub(super) fn connect(attempt: &Attempt<'_>) -> Result<Reached, Setback> {
    try_addresses(attempt).map_err(Setback::Fatal)
}

fn try_addresses(attempt: &Attempt<'_>) -> Result<Reached> {
    let addresses = attempt.request.target.towards(&attempt.shared.address);
    let (mut tried, mut refusals) = (Vec::new(), 0);
    let since = Instant::now();
    for (at, address) in addresses.iter().enumerate() {
        let left = attempt
            .patience
            .left()
            .map_err(|cut| attempt.ended(cut, "any address"))?;
        let last = at + 1 == addresses.len();
        // An address that swallows packets leaves time for the others.
        let others = u32::try_from(addresses.len() - at).unwrap_or(u32::MAX);
        let silence = attempt.silence_to_connect();
        let silence = silence.map(|all| all.saturating_sub(since.elapsed()).max(LEAST_SILENCE));
        let share = (left / others).min(silence.map_or(ANOTHER_AFTER, |all| all / others));
        let share = share.clamp(LEAST_SILENCE.min(left), ANOTHER_AFTER);
        let (silence, share) = match last {
            true => (silence, left),
            false => (Some(share), share),
        };
        match open(attempt, *address, silence, Instant::now() + share) {
            Ok(reached) => return Ok(reached),
            Err(Setback::Fatal(error)) if error.code != Code::Timeout => return Err(error),
            Err(Setback::Fatal(error)) if last && tried.is_empty() => return Err(error),
            Err(Setback::Fatal(_)) => tried.push(format!("{address}: no answer")),
            Err(Setback::Refused(_)) => {
                refusals += usize::from(elsewhere(attempt, *address).is_none());
                tried.push(refused(attempt, *address));
            }
            Err(Setback::Unusable(reason)) => tried.push(format!("{address}: {reason}")),
        }
    }
    let what = match tried.len() {
        0 => "it published no TCP address".to_owned(),
        all if all == refusals => {
            let places = addresses.iter().map(SocketAddr::to_string);
            return Err(attempt.lost(&places.collect::<Vec<_>>().join(", nor at ")));
        }
        _ => format!(
            "cannot be reached from rank {} ({}) at {}; UNISONO_INTERFACE decides by which addresses a rank is reached",
            attempt.request.known_as.0,
            here(attempt),
            tried.join(", nor at ")
        ),
    };
    Err(
        Error::new(Code::PeerLost, format!("{} {what}", attempt.who()))
            .with_peer(attempt.request.to),
    )
}

/// This rank's own addresses.
fn here(attempt: &Attempt<'_>) -> String {
    let own = &attempt.shared.address.tcp;
    let own: Vec<String> = own.iter().map(|address| address.ip().to_string()).collect();
    own.join(", ")
}

/// The message about a refused connection, with its likely cause.
fn refused(attempt: &Attempt<'_>, address: SocketAddr) -> String {
    let hint = elsewhere(attempt, address).unwrap_or("it listens there no more");
    format!("{address}: connection refused; {hint}")
}

/// Why an address may lead from here to another host than the peer's, if it may.
pub(super) fn elsewhere(attempt: &Attempt<'_>, address: SocketAddr) -> Option<&'static str> {
    let own = &attempt.shared.address;
    if own.host.is_same_machine(&attempt.request.target.host) {
        return None;
    }
    if address.ip().is_loopback() {
        return Some(
            "its process has probably ended, or it is on another host: there it listens on loopback only, as it does \
             when it is told that the master is localhost",
        );
    }
    let is_ours = own.tcp.iter().any(|own| own.ip() == address.ip());
    is_ours.then_some("this host has that address too, for a network of its own")
}

/// Opens both connections of a link to one address. The peer may find one broken when the other comes: then both are opened
/// anew. Or it has made the link, and its word of that was lost with the control connection: the link is there then, and has
/// that connection made again.
fn open(
    attempt: &Attempt<'_>,
    address: SocketAddr,
    silence: Option<Duration>,
    deadline: Instant,
) -> Result<Reached, Setback> {
    let place = address.to_string();
    let dial = || dial(attempt, address, silence, deadline);
    let introduce = |purpose| attempt.introduce(&place, purpose, dial);
    let mut tries = 0..TRIES;
    let (data, proven, control, proven_again) = loop {
        let (data, proven, answer) = introduce(Purpose::TcpData)?;
        if answer != Answer::Accept {
            return Ok(Reached::Answer(answer));
        }
        match introduce(Purpose::TcpControl)? {
            (control, proven_again, Answer::Accept | Answer::Made) => {
                break (data, proven, control, proven_again);
            }
            (_, _, Answer::Left) => return Ok(Reached::Answer(Answer::Left)),
            (_, _, answer) if tries.next().is_none() => {
                let what = format!(
                    "it accepted a stream at {place} but not its control connection ({answer:?})"
                );
                return Err(Setback::Fatal(attempt.error(Code::System, what)));
            }
            _ => {}
        }
    };
    let link = TcpLink::new(data, control, place, true)
        .map_err(|error| Setback::Fatal(error.with_peer(attempt.request.to)))?;
    let link = match attempt.request.key.encrypts() {
        true => link.encrypted(proven.into_cipher(), proven_again.into_cipher()),
        false => link,
    };
    Ok(Reached::Link(Box::new(link)))
}

/// Opens a further connection to one address; the other side has accepted its purpose.
pub(in crate::transport::endpoint) fn open_one(
    attempt: &Attempt<'_>,
    address: SocketAddr,
    purpose: Purpose,
) -> Result<(TcpStream, Proven)> {
    match introduce(attempt, address, purpose) {
        Ok((stream, proven, Answer::Accept)) => Ok((stream, proven)),
        Ok((_, _, answer)) => Err(attempt.refusal(answer)),
        Err(Setback::Fatal(error)) => Err(error),
        Err(Setback::Refused(what) | Setback::Unusable(what)) => {
            Err(attempt.error(Code::System, format!("{address}: {what}")))
        }
    }
}

/// Connects to that address and says hello, for that purpose.
pub(in crate::transport::endpoint) fn introduce(
    attempt: &Attempt<'_>,
    address: SocketAddr,
    purpose: Purpose,
) -> Result<(TcpStream, Proven, Answer), Setback> {
    let latest = Instant::now() + ANOTHER_AFTER;
    let deadline = attempt.patience.deadline.min(latest);
    let dial = || dial(attempt, address, attempt.silence_to_connect(), deadline);
    attempt.introduce(&address.to_string(), purpose, dial)
}

pub(super) fn dial(
    attempt: &Attempt<'_>,
    address: SocketAddr,
    silence: Option<Duration>,
    deadline: Instant,
) -> Result<TcpStream, Setback> {
    let patience = Patience {
        deadline,
        ..attempt.patience
    };
    let since = Instant::now();
    loop {
        match patience.connect_tcp(address, (silence, attempt.request.silence)) {
            Ok(stream) => return Ok(stream),
            Err(Cut::Refused | Cut::Closed) if since.elapsed() < attempt.grace => patience
                .sleep(Duration::from_millis(20))
                .map_err(|cut| attempt.setback(cut, &address.to_string()))?,
            Err(cut) => {
                let no_way = matches!(cut, Cut::Silent | Cut::System(_));
                attempt.is_out_of_reach.set(no_way);
                return Err(match cut {
                    Cut::Silent => Setback::Unusable(silent(silence)),
                    cut => attempt.setback(cut, &address.to_string()),
                });
            }
        }
    }
}

/// Keeps a stream, or joins a control connection with the stream that it belongs to.
pub(super) fn accept(visit: Visit<'_>, stream: Stream) -> Result<(), Reason> {
    match (visit.hello.purpose, stream) {
        (Purpose::TcpData, Stream::Tcp(stream)) => park(visit, stream),
        (Purpose::TcpControl, Stream::Tcp(stream)) => pair(visit, stream),
        (Purpose::TcpStripe, Stream::Tcp(stream)) => stripes::accept(visit, stream),
        (Purpose::TcpAgain, Stream::Tcp(stream)) => again::accept(visit, stream),
        (_, stream) => visit.turn_away(&stream),
    }
}

/// Keeps the stream of a link until its control connection comes. No thread waits for that: if every place were taken by
/// streams, their control connections could not come in.
fn park(mut visit: Visit<'_>, stream: TcpStream) -> Result<(), Reason> {
    // A rank makes one attempt at a time: it has given up that of a stream which is here.
    drop(unpark(&visit, |_| true));
    let Some(claim) = visit.claim(&stream)? else {
        return Ok(());
    };
    claim.identify(visit.hello.link);
    let channel = fork::make_private(|| stream.try_clone()).map_err(Cut::from)?;
    let accept = visit.answers.frame(Answer::Accept)?;
    let (shared, patience, link) = (visit.shared, visit.patience, visit.hello.link);
    let cipher = visit.membership.key.encrypts();
    let cipher = cipher.then(|| visit.answers.into_cipher());
    shared.parked.lock().push(Parked {
        link,
        claim,
        data: stream,
        cipher,
        expires: Instant::now() + shared.limits.handshake,
    });
    shared.wake_acceptor();
    // A peer that has gone does not come for it: it expires.
    Ok(patience.write(&channel, &accept)?)
}

/// The stream of the visitor that is parked, if `is_it`.
fn unpark(visit: &Visit<'_>, is_it: impl Fn(&Parked) -> bool) -> Option<Parked> {
    let Hello { from, lane, .. } = visit.hello;
    let mut all = visit.shared.parked.lock();
    let at = all
        .iter()
        .position(|parked| parked.claim.is_for(&visit.membership, from, lane) && is_it(parked))?;
    Some(all.swap_remove(at))
}

/// Joins the control connection with its stream.
fn pair(mut visit: Visit<'_>, control: TcpStream) -> Result<(), Reason> {
    let link = visit.hello.link;
    let Some(Parked {
        claim,
        data,
        cipher,
        ..
    }) = unpark(&visit, |parked| parked.link == link)
    else {
        let place = (visit.hello.from, visit.hello.lane);
        let group = &visit.membership;
        let answer = if group.is_closed() {
            Answer::Left
        } else if group.was_made_by(&link, place, &visit.patience)? {
            Answer::Made
        } else {
            Answer::Failed
        };
        visit.answer(&control, answer)?;
        return match answer {
            Answer::Failed => Err(Reason::new(
                "a control connection without its stream".to_owned(),
            )),
            _ => Ok(()),
        };
    };
    let channel = fork::make_private(|| control.try_clone()).map_err(Cut::from)?;
    let peer = peer_of(&data);
    match TcpLink::new(data, control, peer, false) {
        Ok(link) => {
            visit.answer(&channel, Answer::Accept)?;
            let link = match cipher {
                Some(data) => link.encrypted(data, visit.answers.into_cipher()),
                None => link,
            };
            claim.deliver(Box::new(link));
            Ok(())
        }
        Err(error) => {
            drop(claim);
            visit.answer(&channel, Answer::Failed)?;
            Err(error.into())
        }
    }
}
