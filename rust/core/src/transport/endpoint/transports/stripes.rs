//! Further connections of a link over TCP, for long messages in one direction: see [`stripes`](crate::transport::tcp::stripes).
//!
//! Their sender opens them, one after the other. Where the peer listens on several interfaces they are shared out among these,
//! so that a long message uses all of them. Neither side spends the last of its descriptors on them.

use std::net::{SocketAddr, TcpStream};

use super::super::attempt::Attempt;
use super::super::visit::{Reason, Visit};
use super::super::wire::Cut;
use super::tcp::open_one;
use crate::descriptors;
use crate::error::{Code, Error, Result};
use crate::fork;
use crate::transport::handshake::{Answer, Hello, Purpose};
use crate::transport::tcp::stripes::Stripe;

/// Opens stripe `number` for what this side sends, by one of `addresses`: those that do not answer are left out from then on.
pub(in crate::transport::endpoint) fn open(
    attempt: &Attempt<'_>,
    number: u8,
    addresses: &mut Vec<SocketAddr>,
) -> Result<Stripe> {
    let mut last = None;
    while !addresses.is_empty() {
        let at = usize::from(number) % addresses.len();
        match open_at(attempt, number, addresses[at]) {
            Ok(stripe) => return Ok(stripe),
            Err(error) if error.code == Code::Aborted => return Err(error),
            Err(error) => last = Some(error),
        }
        addresses.remove(at);
    }
    Err(last.unwrap_or_else(|| attempt.error(Code::System, "no TCP address".to_owned())))
}

fn open_at(attempt: &Attempt<'_>, number: u8, address: SocketAddr) -> Result<Stripe> {
    let (stream, proven) = open_one(attempt, address, Purpose::TcpStripe)?;
    if !descriptors::are_plenty(&stream) {
        let what = "half of this process's descriptors are in use".to_owned();
        return Err(Error::new(Code::Aborted, what));
    }
    let encrypts = attempt.request.key.encrypts();
    let cipher = encrypts.then(|| proven.into_cipher());
    Stripe::new(number, true, stream, cipher)
}

/// Takes a stripe for what the peer sends.
pub(super) fn accept(mut visit: Visit<'_>, stream: TcpStream) -> Result<(), Reason> {
    let Hello {
        from, lane, link, ..
    } = visit.hello;
    let number = link[0];
    if visit.membership.is_closed() {
        visit.answer(&stream, Answer::Left)?;
        return Ok(());
    }
    if !descriptors::are_plenty(&stream) || !visit.membership.takes_stripe(from, lane) {
        visit.answer(&stream, Answer::Failed)?;
        let what = format!("no room for stripe {number}, or no link that it belongs to");
        return Err(Reason::new(what));
    }
    let channel = fork::make_private(|| stream.try_clone()).map_err(Cut::from)?;
    let accept = visit.answers.frame(Answer::Accept)?;
    let (membership, patience) = (visit.membership, visit.patience);
    let cipher = membership.key.encrypts();
    let cipher = cipher.then(|| visit.answers.into_cipher());
    // Before the peer can use it, and say farewell.
    membership.deliver_stripe(from, lane, Stripe::new(number, false, stream, cipher)?);
    Ok(patience.write(&channel, &accept)?)
}
