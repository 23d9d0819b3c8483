//! A frame on its way out: posted whole, lent or streamed, as far as that goes now.

use std::sync::Arc;

use super::frame::{Frame, HEADER, Kind, declined};
use crate::buffer::Memory;
use crate::engine::links::{PeerLink, Runs};
use crate::engine::work::WorkState;
use crate::error::Result;
use crate::transport::{Lending, Loan, Terms, Ticket};

/// A frame on its way out.
pub(crate) struct Outgoing {
    pub(crate) header: [u8; HEADER],
    pub(crate) payload: Memory,
    /// Bytes of header and payload already sent.
    pub(crate) sent: usize,
    /// The payload may be lent: it is not complete before the receiver has read it.
    pub(crate) lendable: bool,
    /// It is an offer: lent, or else announced.
    pub(crate) offered: bool,
    /// It is lent.
    pub(crate) loan: Option<Ticket>,
    /// Completed when the whole frame has been sent.
    pub(crate) work: Option<Arc<WorkState>>,
}

/// How far a frame has come in one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Not to its end.
    NotNow,
    Whole,
    /// Its payload will be read where it lies; other frames may follow.
    Lent(Ticket),
    /// It cannot be offered.
    Unfit,
}

impl Outgoing {
    /// A frame with a payload that is sent at once, whole or in the stream.
    pub(crate) fn eager(frame: Frame, payload: Memory, work: Arc<WorkState>) -> Self {
        Self {
            work: Some(work),
            ..Self::new(frame, payload)
        }
    }

    /// A frame with a payload that is lent as an offer, or else announced.
    pub(crate) fn offer_of(frame: Frame, payload: Memory, work: Arc<WorkState>) -> Self {
        Self {
            offered: true,
            work: Some(work),
            ..Self::new(frame, payload)
        }
    }

    /// The payload that the receiver has asked for.
    pub(crate) fn data(frame: Frame, payload: Memory, work: Arc<WorkState>) -> Self {
        Self {
            lendable: true,
            work: Some(work),
            ..Self::new(frame, payload)
        }
    }

    /// A frame alone.
    pub(crate) fn control(frame: Frame) -> Self {
        Self::new(frame, Memory::empty())
    }

    /// Whether it gives back room for unasked-for messages.
    pub(crate) fn is_credit(&self) -> bool {
        self.work.is_none()
            && Frame::decode(&self.header, 0).is_ok_and(|frame| frame.kind == Kind::Credit)
    }

    fn new(frame: Frame, payload: Memory) -> Self {
        Self {
            header: frame.encode(),
            payload,
            sent: 0,
            lendable: false,
            offered: false,
            loan: None,
            work: None,
        }
    }

    /// Sends as much as goes now.
    pub(crate) fn advance(&mut self, link: &mut PeerLink) -> Result<Sent> {
        if self.offered {
            return self.offer(link);
        }
        if let Some(ticket) = self.loan {
            match link.loan(ticket)? {
                Loan::Out => return Ok(Sent::NotNow),
                Loan::Returned => return Ok(Sent::Whole),
                Loan::Declined => return Err(link.blame(declined())),
                Loan::Refused => {
                    (self.loan, self.lendable) = (None, false);
                    self.sent = HEADER;
                }
            }
        }
        let length = self.payload.len();
        if self.sent == 0 && HEADER + length <= link.post_limit() {
            let run = self.payload.read(0, length);
            let posted = if run.len() == length {
                link.try_post(&self.header, run)?
            } else {
                link.try_post(&self.header, &self.payload.gather(0, length))?
            };
            return Ok(if posted { Sent::Whole } else { Sent::NotNow });
        }
        if self.sent == 0 && self.lendable {
            match self.lend(link, Terms::Loan)? {
                Lending::NotNow => return Ok(Sent::NotNow),
                Lending::Unfit => {}
                Lending::Lent(ticket) if ticket.proven => return Ok(Sent::Lent(ticket)),
                Lending::Lent(ticket) => {
                    self.loan = Some(ticket);
                    return Ok(Sent::NotNow);
                }
            }
        }
        self.stream(link)
    }

    /// Lends the frame, if it is long enough and of few enough pieces.
    fn lend(&self, link: &mut PeerLink, terms: Terms) -> Result<Lending> {
        let length = self.payload.len();
        let Some((_, most_runs)) = link.lends().filter(|(least, _)| length >= *least) else {
            return Ok(Lending::Unfit);
        };
        let mut runs = Runs::default();
        if !runs.fill(&self.payload, 0, length, most_runs) {
            return Ok(Lending::Unfit);
        }
        link.try_lend(&self.header, runs.as_slice(), terms)
    }

    fn offer(&self, link: &mut PeerLink) -> Result<Sent> {
        Ok(match self.lend(link, Terms::Offer)? {
            Lending::NotNow => Sent::NotNow,
            Lending::Unfit => Sent::Unfit,
            Lending::Lent(ticket) => Sent::Lent(ticket),
        })
    }

    fn stream(&mut self, link: &mut PeerLink) -> Result<Sent> {
        let total = HEADER + self.payload.len();
        while self.sent < total {
            let sent = if self.sent < HEADER {
                let payload = self.payload.read(0, self.payload.len());
                link.try_send_message(&self.header[self.sent..], payload)?
            } else {
                let at = self.sent - HEADER;
                link.try_send(self.payload.read(at, self.payload.len() - at))?
            };
            if sent == 0 {
                return Ok(Sent::NotNow);
            }
            self.sent += sent;
        }
        Ok(Sent::Whole)
    }
}
