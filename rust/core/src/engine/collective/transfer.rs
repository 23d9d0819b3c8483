//! One step of a plan: how its bytes move.
//!
//! A step moves as far as that goes now, and notes in a [`Progress`] how far; which step may move when is the business of
//! [`run`](super::run).

use crate::error::{Code, Error, Result};
use crate::plan::{Buffer, Span, Step, Wire};
use crate::reduce::Streaming;
use crate::transport::endpoint::Lane;
use crate::transport::{Lending, Loan, Terms, Ticket};
use crate::types::Rank;

use crate::engine::collective::bounce::RepeatedSends;
use crate::engine::collective::buffers::NO_WINDOWS;
use crate::engine::collective::elements::Convert;
use crate::engine::collective::header::{Fingerprint, HEADER};
use crate::engine::collective::operands::Operands;
use crate::engine::links::{LinkTable, OpenLink, Runs};
use crate::engine::message::frame::declined;

/// Bytes of a message, a window or a slice that are worked on before it is the turn of another step or operation: a rank
/// that reads without end sends nothing.
pub(crate) const BYTES_PER_TURN: usize = 256 << 10;

/// How far a step has come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    pub(crate) done: bool,
    /// Bytes of header and payload sent, or of payload received.
    pub(crate) bytes: usize,
    /// The header of the message being received has been read and compared.
    header_read: bool,
    /// The message being sent is lent.
    loan: Option<Ticket>,
}

impl Progress {
    /// Whether the step uses its link direction no more, though it may not have ended.
    pub(crate) fn leaves_link(&self) -> bool {
        self.done || self.loan.is_some_and(|ticket| ticket.proven)
    }
}

/// Further properties of a step.
#[derive(Clone, Copy, Default)]
pub(crate) struct StepTerms<'a> {
    /// The number of the span that it sends, if others send it too.
    pub(crate) staged: Option<(&'a RepeatedSends, usize)>,
    /// It receives data that no later step reads.
    pub(crate) is_last: bool,
}

impl Operands {
    /// Moves `step` as far as that goes now. Returns whether anything moved.
    pub(crate) fn advance(
        &mut self,
        step: &Step,
        way: StepTerms<'_>,
        progress: &mut Progress,
        links: &mut LinkTable,
    ) -> Result<bool> {
        match *step {
            Step::Send { to, src } => {
                let Some(open) = links.open(Lane::Collective, to) else {
                    return Ok(false);
                };
                let before = (progress.bytes, progress.leaves_link());
                self.send(open, src, way.staged, progress)?;
                Ok((progress.bytes, progress.leaves_link()) != before)
            }
            Step::Recv { from, dst, wire } | Step::Fold { from, dst, wire } => {
                let Some(open) = links.open(Lane::Collective, from) else {
                    return Ok(false);
                };
                let before = (progress.bytes, progress.header_read);
                let fold = matches!(step, Step::Fold { .. });
                let incoming = Incoming {
                    dst,
                    wire,
                    fold,
                    streaming: if way.is_last {
                        self.streaming
                    } else {
                        Streaming::No
                    },
                };
                self.receive(open, from, &incoming, progress)?;
                Ok((progress.bytes, progress.header_read) != before || progress.done)
            }
            Step::Copy { .. } | Step::Reduce { .. } | Step::Finish { .. } => {
                self.work(step);
                progress.done = true;
                Ok(true)
            }
            Step::ReduceAll { .. } | Step::Signal { .. } | Step::Wait { .. } => {
                unreachable!("{NO_WINDOWS}")
            }
        }
    }

    /// As [`Operands::advance`], for a step whose message is short. One that is to come whole is looked for nowhere else.
    #[inline]
    pub(crate) fn advance_short(
        &mut self,
        step: &Step,
        progress: &mut Progress,
        links: &mut LinkTable,
    ) -> Result<bool> {
        let (from, dst, wire) = match *step {
            Step::Recv { from, dst, wire } | Step::Fold { from, dst, wire } => (from, dst, wire),
            Step::Send { to, src } => {
                let Some(open) = links.open(Lane::Collective, to) else {
                    return Ok(false);
                };
                let size = self.elements.size_in(src.buffer);
                let (offset, length) = (src.offset * size, src.len * size);
                if HEADER + length > open.post_limit {
                    return self.advance(step, StepTerms::default(), progress, links);
                }
                progress.done = self.post(open, src.buffer, (offset, length))?;
                return Ok(progress.done);
            }
            _ => return self.advance(step, StepTerms::default(), progress, links),
        };
        let Some(open) = links.open(Lane::Collective, from) else {
            return Ok(false);
        };
        let incoming = Incoming {
            dst,
            wire,
            fold: matches!(step, Step::Fold { .. }),
            streaming: Streaming::No,
        };
        let length = dst.len * self.elements.wire_type(wire).size();
        if HEADER + length > open.post_limit || progress.header_read {
            return self.advance(step, StepTerms::default(), progress, links);
        }
        match self.take_whole(open, from, &incoming)? {
            Some(Begun::Whole) => progress.done = true,
            Some(Begun::Header) => progress.header_read = true,
            Some(Begun::Nothing) | None => return Ok(false),
        }
        Ok(true)
    }

    /// Bytes of the message of a step that sends or receives.
    pub(crate) fn message_bytes(&self, step: &Step) -> usize {
        match *step {
            Step::Send { src, .. } => src.len * self.elements.size_in(src.buffer),
            Step::Recv { dst, wire, .. } | Step::Fold { dst, wire, .. } => {
                dst.len * self.elements.wire_type(wire).size()
            }
            _ => 0,
        }
    }

    fn send(
        &mut self,
        open: &mut OpenLink,
        src: Span,
        staged: Option<(&RepeatedSends, usize)>,
        progress: &mut Progress,
    ) -> Result<()> {
        let size = self.elements.size_in(src.buffer);
        let (offset, length) = (src.offset * size, src.len * size);
        if let Some(ticket) = progress.loan {
            match open.link.loan(ticket)? {
                Loan::Out => return Ok(()),
                Loan::Returned => {
                    progress.bytes = HEADER + length;
                    progress.done = true;
                    return Ok(());
                }
                Loan::Declined => return Err(open.link.blame(declined())),
                Loan::Refused => {
                    // The header has come with the loan; the payload is streamed.
                    progress.bytes = HEADER;
                    progress.loan = None;
                }
            }
        } else if progress.bytes == 0 {
            let place = (offset, length);
            let sent = self.send_whole(open, (src.buffer, staged), place, progress)?;
            if sent {
                return Ok(());
            }
        }
        let memory = self.buffers.get(src.buffer);
        while progress.bytes < HEADER {
            let header = self.header(length);
            let (rest, payload) = (&header[progress.bytes..], memory.read(offset, length));
            match open.link.try_send_message(rest, payload)? {
                0 => return Ok(()),
                n => progress.bytes += n,
            }
        }
        while progress.bytes < HEADER + length {
            let sent = progress.bytes - HEADER;
            let payload = memory.read(offset + sent, length - sent);
            match open.link.try_send(payload)? {
                0 => return Ok(()),
                n => progress.bytes += n,
            }
        }
        progress.done = true;
        Ok(())
    }

    /// Posts or lends the message, where the link does that. Returns false when it is to be streamed.
    fn send_whole(
        &mut self,
        open: &mut OpenLink,
        (buffer, staged): (Buffer, Option<(&RepeatedSends, usize)>),
        (offset, length): (usize, usize),
        progress: &mut Progress,
    ) -> Result<bool> {
        if HEADER + length <= open.post_limit {
            if self.post(open, buffer, (offset, length))? {
                progress.bytes = HEADER + length;
                progress.done = true;
            }
            return Ok(true);
        }
        let Some((_, most_runs)) = open.link.lends().filter(|(least, _)| length >= *least) else {
            return Ok(false);
        };
        let memory = self.buffers.get(buffer);
        let copy = self.bounce.as_mut().zip(staged);
        let copy = copy.and_then(|(bounce, (repeated_sends, number))| {
            bounce.put(repeated_sends, number, memory, (offset, length))
        });
        let (memory, offset) = copy.unwrap_or((memory, offset));
        let mut runs = Runs::default();
        if !runs.fill(memory, offset, length, most_runs) {
            return Ok(false);
        }
        match open
            .link
            .try_lend(&self.print.of_length(length), runs.as_slice(), Terms::Loan)?
        {
            Lending::Lent(ticket) => progress.loan = Some(ticket),
            Lending::NotNow => {}
            Lending::Unfit => return Ok(false),
        }
        Ok(true)
    }

    /// Posts the message, which the link carries whole. Returns false when that has to wait.
    #[inline]
    fn post(
        &self,
        open: &mut OpenLink,
        buffer: Buffer,
        (offset, length): (usize, usize),
    ) -> Result<bool> {
        let (header, memory) = (self.header(length), self.buffers.get(buffer));
        let payload = memory.read(offset, length);
        if payload.len() == length {
            return open.link.try_post(&header, payload);
        }
        open.link.try_post(&header, &memory.gather(offset, length))
    }

    fn receive(
        &mut self,
        open: &mut OpenLink,
        from: Rank,
        incoming: &Incoming,
        progress: &mut Progress,
    ) -> Result<()> {
        let Incoming {
            dst,
            wire,
            fold,
            streaming,
        } = *incoming;
        let wire_size = self.elements.wire_type(wire).size();
        let length = dst.len * wire_size;
        if !progress.header_read {
            match self.begin_message(open, from, incoming)? {
                Begun::Nothing => return Ok(()),
                Begun::Header => progress.header_read = true,
                Begun::Whole => {
                    progress.header_read = true;
                    progress.bytes = length;
                }
            }
        }
        let Self {
            buffers, elements, ..
        } = self;
        let size = elements.size_in(dst.buffer);
        let convert = elements.conversion(dst, wire);
        let turn = progress.bytes.saturating_add(BYTES_PER_TURN);
        while progress.bytes < length {
            if progress.bytes >= turn {
                return Ok(());
            }
            let count = progress.bytes / wire_size;
            let offset = (dst.offset + count) * size;
            let target = buffers.write(dst.buffer, offset, (dst.len - count) * size);
            let received = if fold || convert != Convert::Keep {
                let max = target.len() / size * wire_size;
                let mut at = 0;
                open.link.try_fold(max, wire_size, &mut |run| {
                    let target = &mut target[at..at + run.len() / wire_size * size];
                    at += target.len();
                    elements.absorb(target, run, fold, convert, streaming);
                })?
            } else {
                // A plain receive may stop inside an element.
                let within = progress.bytes % wire_size;
                let target = &mut target[within..];
                match streaming == Streaming::No && elements.workers.is_none() {
                    true => open.link.try_recv(target)?,
                    false => {
                        let absorb = |target: &mut [u8], run: &[u8]| {
                            elements.absorb(target, run, fold, convert, streaming);
                        };
                        open.link.try_recv_by(&absorb, target)?
                    }
                }
            };
            if received == 0 {
                return Ok(());
            }
            progress.bytes += received;
        }
        progress.done = true;
        Ok(())
    }

    /// Takes the header of the next message and compares it; with a message that was posted, the payload as well.
    fn begin_message(
        &mut self,
        open: &mut OpenLink,
        from: Rank,
        incoming: &Incoming,
    ) -> Result<Begun> {
        if let Some(begun) = self.take_whole(open, from, incoming)? {
            return Ok(begun);
        }
        if !open.read_header()? {
            return Ok(Begun::Nothing);
        }
        let expected =
            self.header(incoming.dst.len * self.elements.wire_type(incoming.wire).size());
        if open.header != expected {
            return Err(difference(&expected, &open.header, self, from));
        }
        open.header_bytes = 0;
        Ok(Begun::Header)
    }

    /// The same for a message that was posted or lent; `None` while there is none.
    #[inline(always)]
    fn take_whole(
        &mut self,
        open: &mut OpenLink,
        from: Rank,
        incoming: &Incoming,
    ) -> Result<Option<Begun>> {
        if open.header_bytes > 0 {
            return Ok(None);
        }
        let mut begun = Ok(Begun::Nothing);
        let OpenLink { link, header, .. } = open;
        let taken = link.try_take(&mut |message| {
            let length = incoming.dst.len * self.elements.wire_type(incoming.wire).size();
            let expected = self.header(length);
            begun = match message.split_first_chunk::<HEADER>() {
                Some((theirs, payload)) if Fingerprint::is_same(theirs, &expected) => {
                    match payload.len() {
                        found if found == length => {
                            self.deliver(incoming, payload);
                            Ok(Begun::Whole)
                        }
                        0 => Ok(Begun::Header),
                        _ => Err(no_message(from)),
                    }
                }
                Some((theirs, _)) => {
                    *header = *theirs;
                    Err(difference(&expected, theirs, self, from))
                }
                None => Err(no_message(from)),
            };
        })?;
        match taken {
            true => begun.map(Some),
            false => Ok(None),
        }
    }

    /// Takes in a whole payload.
    #[inline]
    fn deliver(&mut self, incoming: &Incoming, payload: &[u8]) {
        if payload.is_empty() {
            return;
        }
        let Incoming {
            dst,
            wire,
            fold,
            streaming,
        } = *incoming;
        let Self {
            buffers, elements, ..
        } = self;
        let size = elements.size_in(dst.buffer);
        let wire_size = elements.wire_type(wire).size();
        let convert = elements.conversion(dst, wire);
        let mut done = 0;
        while done < payload.len() {
            let offset = dst.offset * size + done / wire_size * size;
            let rest = (payload.len() - done) / wire_size * size;
            let target = buffers.write(dst.buffer, offset, rest);
            let run = &payload[done..done + target.len() / size * wire_size];
            elements.absorb(target, run, fold, convert, streaming);
            done += run.len();
        }
    }
}

/// The handling of the message that a step receives.
struct Incoming {
    dst: Span,
    wire: Wire,
    fold: bool,
    /// How a plain copy of it is stored.
    streaming: Streaming,
}

/// The part of a message that has come.
enum Begun {
    Nothing,
    Header,
    Whole,
}

/// The error for a header that is not the one that must come next, to the rank with these operands.
#[cold]
pub(crate) fn difference(
    expected: &[u8; HEADER],
    theirs: &[u8; HEADER],
    operands: &Operands,
    peer: Rank,
) -> Error {
    match (Fingerprint::decode(expected), Fingerprint::decode(theirs)) {
        (Some(expected), Some(theirs)) if expected != theirs => {
            expected.mismatch(&theirs, (operands.rank, peer), &operands.members)
        }
        _ => no_message(peer),
    }
}

#[cold]
pub(crate) fn no_message(peer: Rank) -> Error {
    Error::new(
        Code::Untrusted,
        format!("rank {peer} sent bytes that do not begin a message; its stream is corrupt"),
    )
    .with_peer(peer)
}
