//! Memory lent to the peer and shared with it: the place of a payload goes through a slot, and the account of loans
//! (`loans.rs`) says when it is back.

use std::sync::Arc;
use std::time::Instant;

use super::ShmLink;
use super::loans::{self, Run};
use super::page::Page;
use super::peer::Peer;
use super::shared::SharedSpan;
use crate::error::Result;
use crate::heap;
use crate::plan::links::LENT_IN_PLACE_FROM;
use crate::transport::{
    Lending, Loan, MESSAGE_HEADER, Neighbour, PeerState, Shareable, Terms, Ticket,
};

impl Neighbour for ShmLink {
    fn lends_from(&self) -> usize {
        self.lender.private_from.min(LENT_IN_PLACE_FROM)
    }

    fn most_lent_runs(&self) -> usize {
        loans::MOST_RUNS
    }

    fn lend_private_from(&mut self, bytes: usize) {
        self.lender.lend_private_from(bytes);
    }

    fn expect_a_crowd(&mut self) {
        self.producer.publish_for_a_crowd();
    }

    fn try_lend(
        &mut self,
        header: &[u8; MESSAGE_HEADER],
        runs: &[(usize, usize)],
        terms: Terms,
    ) -> Result<Lending> {
        let is_one = |run: &(usize, usize)| run.1 > 0;
        if runs.is_empty() || runs.len() > self.most_lent_runs() || !runs.iter().all(is_one) {
            return Ok(Lending::Unfit);
        }
        if !self.has_slot()? {
            return Ok(Lending::NotNow);
        }
        let mut description = [0; loans::DESCRIPTION];
        let (mut length, mut bytes, mut private) = (0, 0, 0);
        for &(address, run_bytes) in runs {
            let place = self.in_the_heap(address, run_bytes);
            private += usize::from(place.is_none());
            let run = Run {
                segment: place.map_or(0, |place| place.segment),
                at: place.map_or(address as u64, |place| place.offset),
                bytes: run_bytes as u64,
                shared: false,
            };
            length += run.write(&mut description[length..]);
            bytes += run_bytes;
        }
        let crossing = self.borrower.paces(bytes);
        if private > 0
            && !((terms == Terms::Loan || self.lender.is_proven())
                && self
                    .lender
                    .lends_private(bytes, private == runs.len(), crossing))
        {
            return Ok(Lending::Unfit);
        }
        let lending = self.post_loan(header, &description[..length], private > 0)?;
        if let Lending::Lent(ticket) = lending
            && private > 0
        {
            let back = self.lender.returned() >> 1;
            while self.lent.front().is_some_and(|(number, _)| *number <= back) {
                self.lent.pop_front();
            }
            self.lent
                .extend(runs.iter().map(|run| (ticket.number, *run)));
        }
        Ok(lending)
    }

    fn loan(&mut self, ticket: Ticket) -> Result<Loan> {
        let before = self.lender.returned();
        let loan = self.lender.look(ticket)?;
        if let Some(number) = self.lender.reported() {
            self.move_loan(number)?;
        }
        if loan == Loan::Out {
            // Of several loans, one that was looked at before may have come back meanwhile.
            self.lacks.loan.get_or_insert(before);
        } else {
            self.shared.retain(|(number, _)| *number != ticket.number);
        }
        Ok(loan)
    }

    fn decline(&mut self) {
        if self.borrower.is_reading() && self.borrower.decline().wake {
            self.control.ring_doorbell();
        }
    }

    fn can_share(&mut self, what: Shareable<'_>) -> Option<bool> {
        let segment = match what {
            Shareable::Window(window) => window.segment(),
            Shareable::Span((address, bytes)) => {
                match heap::locate(std::ptr::without_provenance(address), bytes) {
                    Some(place) => place.segment,
                    None => return Some(false),
                }
            }
        };
        self.control.reaches(segment)
    }

    fn try_share(&mut self, header: &[u8; MESSAGE_HEADER], what: Shareable<'_>) -> Result<Lending> {
        let (segment, at, bytes) = match what {
            Shareable::Window(window) => (window.segment(), 0, window.bytes()),
            Shareable::Span((address, bytes)) => match self.in_the_heap(address, bytes) {
                Some(place) if bytes > 0 => (place.segment, place.offset, bytes),
                _ => return Ok(Lending::Unfit),
            },
        };
        if !self.has_slot()? {
            return Ok(Lending::NotNow);
        }
        let run = Run {
            segment,
            at,
            bytes: bytes as u64,
            shared: true,
        };
        let mut description = [0; loans::DESCRIPTION];
        let length = run.write(&mut description);
        let lending = self.post_loan(header, &description[..length], false)?;
        if let (Lending::Lent(ticket), Shareable::Span(place)) = (lending, what) {
            self.shared.push((ticket.number, place));
        }
        Ok(lending)
    }

    fn shared(&mut self) -> Result<Option<SharedSpan>> {
        let Some((run, heap)) = self.borrower.shared().zip(self.control.peer_heap()) else {
            return Ok(None);
        };
        let bytes = usize::try_from(run.bytes).unwrap_or(usize::MAX);
        let held = heap.hold(run.segment, run.at, bytes)?;
        Ok(held.map(|held| SharedSpan::new(held, self.borrower.writer())))
    }

    fn give_back(&mut self) {
        if self.borrower.end_sharing().wake {
            self.control.ring_doorbell();
        }
    }

    fn await_writer(&mut self, until: Instant) {
        if self.shared.is_empty() {
            return;
        }
        let is_over = self.end_of_writing();
        // Where its process cannot be named, the end of the control channel stands for that of the process.
        let is_nameless = self.borrower.peer.is_none();
        while !is_over() {
            if is_nameless
                && matches!(
                    self.control.peer_state(),
                    PeerState::Lost(_) | PeerState::Broken(_)
                )
            {
                break;
            }
            if Instant::now() > until {
                for (_, (address, bytes)) in self.shared.drain(..) {
                    heap::detach(address, bytes, Arc::clone(&is_over));
                }
                return;
            }
            std::thread::yield_now();
        }
        self.shared.clear();
    }

    fn wake(&mut self) {
        self.control.ring_doorbell();
    }

    fn page(&self) -> Page {
        self.page.clone()
    }

    fn reach(&self, place: heap::Place, bytes: usize) -> Result<Option<heap::Held>> {
        match self.control.peer_heap() {
            Some(heap) => heap.hold(place.segment, place.offset, bytes),
            None => Ok(None),
        }
    }

    fn end_of_program(&self) -> heap::IsOver {
        let peer = self.borrower.peer.clone();
        Arc::new(move || peer.as_ref().is_some_and(Peer::is_gone))
    }
}

impl ShmLink {
    /// Whether the peer writes to what was shared with it no more, and never again once that is revoked. The answer needs
    /// nothing of this link. A process that has ended writes no more, whatever the flag says, nor does one that has executed
    /// another program.
    fn end_of_writing(&self) -> heap::IsOver {
        let flag = self.lender.flag_of_writer();
        let peer = self.borrower.peer.clone();
        Arc::new(move || !flag.is_raised() || peer.as_ref().is_some_and(Peer::is_gone))
    }

    /// Whether a message can be posted now; what waits is woken when it can.
    fn has_slot(&mut self) -> Result<bool> {
        let has_room = self.poster.has_room()?;
        self.lacks.slot |= !has_room;
        Ok(has_room)
    }

    /// Where this memory lies in the heap that the peer has mapped or may map, if it does.
    fn in_the_heap(&mut self, address: usize, bytes: usize) -> Option<heap::Place> {
        heap::locate(std::ptr::without_provenance(address), bytes)
            .filter(|place| self.control.lends(place.segment))
    }

    /// Posts the message of a loan, for which there is room.
    pub(super) fn post_loan(
        &mut self,
        header: &[u8; MESSAGE_HEADER],
        description: &[u8],
        private: bool,
    ) -> Result<Lending> {
        let place = (self.producer.published(), true);
        let posted = self.poster.post(place, (header, description), || {
            self.control.ring_doorbell();
        })?;
        Ok(if posted {
            Lending::Lent(self.lender.lend(private))
        } else {
            Lending::NotNow
        })
    }
}
