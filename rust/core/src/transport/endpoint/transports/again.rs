//! A broken connection of a link over TCP is opened again, by the side that had opened it: see
//! [`mending`](crate::transport::tcp::mending).

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::super::attempt::{Attempt, Setback};
use super::super::visit::{Reason, Visit};
use super::tcp::{dial, elsewhere};
use crate::error::Code;
use crate::transport::handshake::{Answer, Hello, Purpose};
use crate::transport::tcp::mending::{Mend, SocketId};

/// Milliseconds that an address has to answer at most tries, and at the longest ones.
const SHORTEST_TRY: u64 = 50;
const LONGEST_TRY: u64 = 800;

/// The end of one walk over the addresses of a peer.
#[derive(Debug)]
pub enum Again {
    /// The connection.
    Made(Mend),
    /// The peer has left the group.
    Left,
    /// Nothing listens at any of its addresses.
    Gone,
    /// Not now, for that reason.
    NotNow(String),
}

/// Opens `socket` at one of the peer's addresses; this is try number `tries` of it, from 0 on.
pub(in crate::transport::endpoint) fn open(
    attempt: &Attempt<'_>,
    socket: SocketId,
    tries: usize,
) -> Again {
    let addresses = attempt.request.target.towards(&attempt.shared.address);
    // Every second try is twice as long, every second of these again: a network that is there again is noticed soon, and one
    // whose answers take long is given time.
    let share = SHORTEST_TRY << (tries + 1).trailing_zeros().min(8);
    let share = Duration::from_millis(share.min(LONGEST_TRY));
    let (mut refusals, mut last) = (0, "it published no TCP address".to_owned());
    for address in &addresses {
        match open_at(attempt, *address, share) {
            Ok((stream, proven, Answer::Accept)) => {
                let encrypts = attempt.request.key.encrypts();
                let cipher = encrypts.then(|| proven.into_cipher());
                return Again::Made(Mend::new(socket, true, stream, cipher));
            }
            Ok((_, _, Answer::Left)) => return Again::Left,
            Ok((_, _, answer)) => last = format!("{address} answered {answer:?}"),
            Err(Setback::Refused(place)) => {
                refusals += usize::from(elsewhere(attempt, *address).is_none());
                last = format!("nothing listens at {place}");
            }
            Err(Setback::Unusable(what)) => last = format!("{address}: {what}"),
            Err(Setback::Fatal(error)) if error.code == Code::Timeout => {
                last = format!("{address} does not answer");
            }
            Err(Setback::Fatal(error)) => last = error.message,
        }
    }
    match !addresses.is_empty() && refusals == addresses.len() {
        true => Again::Gone,
        false => Again::NotNow(last),
    }
}

fn open_at(
    attempt: &Attempt<'_>,
    address: SocketAddr,
    share: Duration,
) -> Result<(TcpStream, crate::transport::handshake::Proven, Answer), Setback> {
    let deadline = attempt.patience.deadline.min(Instant::now() + share);
    let dial = || dial(attempt, address, Some(share), deadline);
    attempt.introduce(&address.to_string(), Purpose::TcpAgain, dial)
}

/// Takes a further socket for a connection that the peer has opened.
pub(super) fn accept(mut visit: Visit<'_>, stream: TcpStream) -> Result<(), Reason> {
    let Hello {
        from, lane, link, ..
    } = visit.hello;
    if visit.membership.is_closed() {
        visit.answer(&stream, Answer::Left)?;
        return Ok(());
    }
    let socket = link.first_chunk().and_then(SocketId::read);
    let Some(socket) = socket.filter(|_| visit.membership.is_linked(from, lane)) else {
        visit.answer(&stream, Answer::Failed)?;
        return Err(Reason::new("a connection of no link".to_owned()));
    };
    let accept = visit.answers.frame(Answer::Accept)?;
    let membership = visit.membership;
    let cipher = membership.key.encrypts();
    let cipher = cipher.then(|| visit.answers.into_cipher());
    let mend = Mend::new(socket, false, stream, cipher).answering(&accept);
    membership.deliver_mend(from, lane, mend);
    Ok(())
}
