//! The two directions of a link's bytes: plain at first and, where there are stripes, in frames from some byte on.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;

use super::connection::Connection;
use super::kernel::{traffic, unacknowledged};
use super::stripes::{Gather, MOST_STRIPES, Pace, Spread};
use crate::reduce::Workers;
use crate::transport::cipher::Failure;

/// Bytes that still go as they are when frames are announced: enough for a peer that runs to hear of the frames before these
/// bytes are through.
const LEAD: u64 = 4 << 20;

/// Payloads that are shorter are not measured: to ask for what is on its way would cost them a system call.
const MEASURED_FROM: usize = 32 << 10;

/// The outgoing direction of a link's bytes.
#[derive(Debug)]
pub(super) struct Outgoing {
    form: Form,
    /// Bytes that still go as they are when frames are announced.
    lead: u64,
    /// Bytes that went as they are.
    sent: u64,
    pace: Pace,
    /// Since when bytes have been on their way without a pause, while that is measured.
    busy_since: Option<Instant>,
    /// Stripes that have been asked for.
    asked: usize,
    spread: Box<Spread>,
}

/// How the next byte goes.
#[derive(Clone, Copy, Debug)]
enum Form {
    Plain,
    /// As it is up to byte `until`, and in a frame then, when the peer has heard of it.
    Announced {
        until: u64,
        is_heard: bool,
    },
    Framed,
}

impl Outgoing {
    /// To a peer that `is_near` one connection is enough.
    pub(super) fn new(is_near: bool) -> Self {
        Self {
            form: Form::Plain,
            lead: LEAD,
            sent: 0,
            pace: if is_near {
                Pace::settled()
            } else {
                Pace::new()
            },
            busy_since: None,
            asked: 0,
            spread: Box::default(),
        }
    }

    /// As [`Outgoing::new`], with `number` stripes from the first byte on.
    #[cfg(test)]
    pub(super) fn striped(number: usize) -> Self {
        let mut outgoing = Self::new(false);
        outgoing.lead = 0;
        outgoing.want(number);
        outgoing
    }

    /// Sets the number of stripes that are needed.
    #[cfg(test)]
    pub(super) fn want(&mut self, number: usize) {
        self.pace.want(number);
    }

    /// These threads send long payloads together.
    pub(super) fn share(&mut self, workers: Arc<Workers>) {
        self.spread.share(workers);
    }

    /// Sends as much as goes now of `first` and then `rest`, a payload or part of one.
    ///
    /// # Errors
    /// `AGAIN` when nothing went.
    pub(super) fn send(
        &mut self,
        main: &mut Connection,
        first: &[u8],
        rest: &[u8],
    ) -> Result<usize, Errno> {
        let is_long = rest.len() >= MEASURED_FROM;
        let measures = is_long && self.pace.is_measuring();
        if measures && self.is_idle(main) {
            self.busy_since = None;
        }
        let sent = match self.form {
            Form::Plain => plain(main, first, rest)?,
            Form::Announced { until, .. } if self.sent < until => {
                let room = usize::try_from(until - self.sent).unwrap_or(usize::MAX);
                let first = &first[..first.len().min(room)];
                let rest = &rest[..rest.len().min(room - first.len())];
                plain(main, first, rest)?
            }
            Form::Announced {
                is_heard: false, ..
            } => return Err(Errno::AGAIN),
            Form::Announced { is_heard: true, .. } => {
                self.form = Form::Framed;
                self.use_all();
                self.spread.send(main, first, rest)?
            }
            Form::Framed => self.spread.send(main, first, rest)?,
        };
        self.sent += sent as u64;
        if !measures {
            if is_long && self.pace.rested(sent) {
                self.busy_since = None;
            }
            return Ok(sent);
        }
        let without_pause = self.busy_since.get_or_insert_with(Instant::now).elapsed();
        let spread = &mut self.spread;
        let measure = || match spread.in_use() {
            [] => vec![traffic(main)],
            stripes => stripes.iter().map(traffic).collect(),
        };
        if let Some(number) = self.pace.sent(sent, without_pause, measure) {
            self.use_only(number);
        }
        Ok(sent)
    }

    /// Uses the first `number` stripes, and closes the others.
    pub(super) fn use_only(&mut self, number: usize) {
        self.spread.use_only(number);
        self.asked = self.asked.min(number);
    }

    /// Whether the peer's system has all that was sent.
    fn is_idle(&self, main: &Connection) -> bool {
        let stripes = self.spread.in_use().iter();
        stripes
            .chain([main])
            .all(|connection| unacknowledged(connection) == 0)
    }

    /// Uses all stripes there are, which is to be measured.
    fn use_all(&mut self) {
        self.spread.use_only(usize::MAX);
        self.pace.began_to_use(self.spread.in_use().len());
    }

    /// Further stripes that this side should open, told once.
    pub(super) fn wants(&mut self) -> Option<Range<u8>> {
        let wanted = self.pace.wants().filter(|wanted| *wanted > self.asked)?;
        let before = std::mem::replace(&mut self.asked, wanted);
        let first = MOST_STRIPES.saturating_mul(self.pace.failures());
        let number = |place| first.saturating_add(place as u8);
        Some(number(before)..number(wanted))
    }

    /// Adds a stripe. Returns from which byte on the peer is to be told that frames follow, where that is now known.
    pub(super) fn add(&mut self, number: u8, stripe: Connection) -> Option<u64> {
        let is_next = usize::from(number % MOST_STRIPES) == self.spread.stripes().len();
        if !is_next || number / MOST_STRIPES != self.pace.failures() {
            return None;
        }
        self.spread.add(number, stripe);
        if self.pace.wants() != Some(self.spread.stripes().len()) {
            return None;
        }
        match self.form {
            Form::Plain => {
                let until = self.sent + self.lead;
                let is_heard = false;
                self.form = Form::Announced { until, is_heard };
                Some(until)
            }
            Form::Framed => {
                self.use_all();
                None
            }
            Form::Announced { .. } => None,
        }
    }

    /// The stripes that were asked for do not all come: uses as many as before.
    pub(super) fn give_up(&mut self) {
        let used = self.spread.in_use().len();
        match used {
            0 => self.pace.rest(),
            _ => self.pace = Pace::settled(),
        }
        self.use_only(used);
    }

    /// The stripes that are there, by their numbers.
    pub(super) fn numbered(&mut self) -> impl Iterator<Item = (u8, &mut Connection)> {
        self.spread.numbered()
    }

    /// Whether a stripe that is used no more has broken: what was on its way there may be lost.
    pub(super) fn is_broken(&self) -> bool {
        self.spread.is_broken()
    }

    /// Lets go of stripes that are used no more.
    pub(super) fn drop_delivered(&mut self) {
        self.spread.close_delivered();
    }

    /// The peer knows from which byte on frames follow.
    pub(super) fn is_heard(&mut self) {
        if let Form::Announced { is_heard, .. } = &mut self.form {
            *is_heard = true;
        }
    }

    /// Whether what is sent next goes in a frame.
    #[cfg(test)]
    pub(super) fn is_framed(&self) -> bool {
        match self.form {
            Form::Plain => false,
            Form::Announced { until, is_heard } => is_heard && self.sent >= until,
            Form::Framed => true,
        }
    }

    /// Whether what waits can be sent now.
    pub(super) fn may_send(&self, main: &Connection) -> bool {
        match self.form {
            Form::Announced {
                until,
                is_heard: false,
            } if self.sent >= until => false,
            Form::Framed => self.spread.may_send(main),
            _ => main.may_send(),
        }
    }

    /// This side sends no more.
    pub(super) fn finish(&mut self) {
        self.spread.finish();
    }

    /// Whether the peer's system has all that went over stripes. The end of each counts as one byte, and is acknowledged late.
    pub(super) fn is_acknowledged(&self) -> bool {
        let mut stripes = self.spread.all();
        stripes.all(Connection::is_acknowledged)
    }

    pub(super) fn stripes(&self) -> &[Connection] {
        self.spread.stripes()
    }

    pub(super) fn memory(&self) -> usize {
        self.spread.memory()
    }
}

fn plain(main: &mut Connection, first: &[u8], rest: &[u8]) -> Result<usize, Errno> {
    match first {
        [] => main.send(rest),
        _ => main.send_pieces(&[first, rest]),
    }
}

/// The incoming direction of a link's bytes.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// Bytes that came as they are, and how many do.
    received: u64,
    until: Option<u64>,
    gather: Option<Box<Gather>>,
    workers: Option<Arc<Workers>>,
}

impl Incoming {
    /// These threads receive long payloads together.
    pub(super) fn share(&mut self, workers: Arc<Workers>) {
        if let Some(gather) = &mut self.gather {
            gather.share(Arc::clone(&workers));
        }
        self.workers = Some(workers);
    }

    /// Receives into `bytes`.
    ///
    /// # Errors
    /// `AGAIN` when nothing is there; `PROTO` when it is not what a peer sends.
    pub(super) fn receive(
        &mut self,
        main: &mut Connection,
        bytes: &mut [u8],
    ) -> Result<usize, Failure> {
        let room = match self.until {
            None => bytes.len(),
            Some(until) if until > self.received => {
                let left = usize::try_from(until - self.received).unwrap_or(usize::MAX);
                bytes.len().min(left)
            }
            Some(_) => return self.gather().receive(main, bytes),
        };
        let received = main.receive(&mut bytes[..room])?;
        self.received += received as u64;
        Ok(received)
    }

    fn gather(&mut self) -> &mut Gather {
        self.gather.get_or_insert_with(|| {
            let mut gather = Box::<Gather>::default();
            if let Some(workers) = &self.workers {
                gather.share(Arc::clone(workers));
            }
            gather
        })
    }

    /// The peer sends frames from byte `until` on. False where it cannot be so.
    #[must_use]
    pub(super) fn announce(&mut self, until: u64) -> bool {
        // It is said again after a break.
        let is_again = self.until == Some(until);
        let may_be = self.until.is_none() && until >= self.received;
        if may_be {
            self.until = Some(until);
        }
        may_be || is_again
    }

    /// Adds a stripe.
    pub(super) fn add(&mut self, number: u8, stripe: Connection) {
        self.gather().add(number, stripe);
    }

    /// Adds a stripe in the place of one that is not here.
    pub(super) fn add_again(&mut self, number: u8, stripe: Connection) {
        self.gather().add_again(number, stripe);
    }

    /// Lets go of stripes that the peer uses no more.
    pub(super) fn drop_ended(&mut self) {
        if let Some(gather) = &mut self.gather {
            gather.drop_ended();
        }
    }

    /// Whether [`Incoming::receive`] has something, or may have.
    pub(super) fn may_receive(&self, main: &Connection) -> bool {
        match (&self.gather, self.until) {
            (Some(gather), Some(until)) if until <= self.received => gather.may_receive(main),
            _ => main.may_receive(),
        }
    }

    /// Whether nothing more will arrive than what the kernel has.
    pub(super) fn has_ended(&self, main: &Connection) -> bool {
        main.has_ended() && self.gather.as_ref().is_none_or(|gather| gather.has_ended())
    }

    /// The stripes by their numbers.
    pub(super) fn numbered(&mut self) -> impl Iterator<Item = (u8, &mut Connection)> {
        self.gather.iter_mut().flat_map(|gather| gather.numbered())
    }

    pub(super) fn stripes(&self) -> impl Iterator<Item = &Connection> {
        self.gather.iter().flat_map(|gather| gather.stripes())
    }

    pub(super) fn memory(&self) -> usize {
        self.gather.as_ref().map_or(0, |gather| gather.memory())
    }
}
