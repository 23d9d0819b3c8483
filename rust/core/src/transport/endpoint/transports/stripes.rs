//! Further connections of a link over TCP, for long messages in one direction: see [`stripes`](crate::transport::tcp::stripes).
//!
//! Their sender opens them, one after the other. Where the peer listens on several interfaces they are shared out among these,
//! so that a long message uses all of them.

use std::net::TcpStream;

use super::super::attempt::{Attempt, Setback};
use super::super::visit::{Reason, Visit};
use super::tcp::dial;
use crate::error::{Code, Result};
use crate::transport::handshake::{Answer, Hello, Purpose};
use crate::transport::tcp::stripes::{MOST, Stripe};

/// Opens stripe `number` for what this side sends.
pub(in crate::transport::endpoint) fn open(attempt: &Attempt<'_>, number: u8) -> Result<Stripe> {
    let mut addresses = attempt.request.target.towards(&attempt.shared.address);
    let first = usize::from(number) % addresses.len().max(1);
    addresses.rotate_left(first);
    let mut last = None;
    for address in addresses {
        let place = address.to_string();
        let dial = || dial(attempt, address, attempt.patience.deadline);
        match attempt.introduce(&place, Purpose::TcpStripe, dial) {
            Ok((stream, proven, Answer::Accept)) => {
                let encrypts = attempt.request.key.encrypts();
                let cipher = encrypts.then(|| proven.into_cipher());
                return Stripe::new(number, true, stream, cipher);
            }
            Ok((_, _, answer)) => last = Some(attempt.refusal(answer)),
            Err(Setback::Fatal(error)) => return Err(error),
            Err(Setback::Refused(what) | Setback::Unusable(what)) => {
                last = Some(attempt.error(Code::System, format!("{place}: {what}")));
            }
        }
    }
    Err(last.unwrap_or_else(|| attempt.error(Code::System, "no TCP address".to_owned())))
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
    if number >= MOST {
        visit.answer(&stream, Answer::Failed)?;
        let what = format!("a further connection with the number {number}, of {MOST}");
        return Err(Reason::new(what));
    }
    visit.answer(&stream, Answer::Accept)?;
    let cipher = visit.membership.key.encrypts();
    let cipher = cipher.then(|| visit.answers.into_cipher());
    let stripe = Stripe::new(number, false, stream, cipher)?;
    visit.membership.deliver_stripe(from, lane, stripe);
    Ok(())
}
