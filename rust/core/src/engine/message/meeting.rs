//! Receives that no message has met, and messages that no receive has met.
//!
//! However many there are, each is found, and taken back, in a few steps: by what it asks for or says of itself, and by its
//! number. Which meets which is described in [`matching`](super::matching).

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::sync::Arc;

use super::frame::{Frame, corrupt};
use crate::buffer::Memory;
use crate::engine::members::Members;
use crate::engine::work::{Received, WorkState};
use crate::error::{Code, Error, Result};
use crate::types::{DataType, Rank};

/// A receive that waits for its message.
pub(crate) struct Posted {
    pub(crate) from: Option<Rank>,
    pub(crate) tag: u64,
    pub(crate) dtype: DataType,
    pub(crate) memory: Memory,
    /// How long the message is that a note in `memory` stands for.
    pub(crate) note_of: Option<usize>,
    /// A message may be shorter than `memory`.
    pub(crate) takes_shorter: bool,
    /// It looks for a message and leaves it to a receive.
    pub(crate) is_probe: bool,
    pub(crate) work: Arc<WorkState>,
}

/// A message that came before its receive.
pub(crate) struct Kept {
    pub(crate) from: Rank,
    pub(crate) frame: Frame,
    /// The payload of an eager message; `None` for an announced one.
    pub(crate) payload: Option<Vec<u8>>,
}

/// The receives and probes that no message has met.
#[derive(Default)]
pub(crate) struct Receives {
    /// By the numbers of their works, and so in the order in which they were posted.
    all: BTreeMap<u64, Posted>,
    /// Whether it is a probe, the sender, tag and number of each.
    wanted: BTreeSet<(bool, Option<Rank>, u64, u64)>,
}

impl Receives {
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Posted> {
        self.all.values()
    }

    pub(crate) fn push(&mut self, posted: Posted) {
        let number = posted.work.sequence;
        let Posted {
            is_probe,
            from,
            tag,
            ..
        } = posted;
        self.wanted.insert((is_probe, from, tag, number));
        let before = self.all.insert(number, posted);
        debug_assert!(before.is_none(), "two works have one number");
    }

    /// The first receive that a message from `from` with `tag` meets.
    pub(crate) fn first_for(&self, from: Rank, tag: u64) -> Option<&Posted> {
        self.first_of(false, (from, tag))
    }

    /// The first probe that such a message answers.
    pub(crate) fn first_probe_for(&self, from: Rank, tag: u64) -> Option<&Posted> {
        self.first_of(true, (from, tag))
    }

    fn first_of(&self, is_probe: bool, (from, tag): (Rank, u64)) -> Option<&Posted> {
        if self.all.is_empty() {
            return None;
        }
        let first = |from| {
            let all = (is_probe, from, tag, 0)..=(is_probe, from, tag, u64::MAX);
            let mut alike = self.wanted.range(all);
            alike.next().map(|(_, _, _, number)| *number)
        };
        let (named, any) = (first(Some(from)), first(None));
        let number = named.into_iter().chain(any).min()?;
        self.all.get(&number)
    }

    /// Takes the receive of this work out, if no message has met it.
    pub(crate) fn take(&mut self, work: &WorkState) -> Option<Posted> {
        let at = match self.all.entry(work.sequence) {
            Entry::Occupied(at) if std::ptr::eq(&*at.get().work, work) => at,
            _ => return None,
        };
        let posted = at.remove();
        let of_it = (posted.is_probe, posted.from, posted.tag, work.sequence);
        self.wanted.remove(&of_it);
        Some(posted)
    }

    /// Whether one asks for this rank, or, with `None`, for any.
    pub(crate) fn ask_for(&self, from: Option<Rank>) -> bool {
        [false, true].into_iter().any(|is_probe| {
            let all = (is_probe, from, 0, 0)..=(is_probe, from, u64::MAX, u64::MAX);
            self.wanted.range(all).next().is_some()
        })
    }
}

/// The messages that no receive has met.
#[derive(Default)]
pub(crate) struct Arrivals {
    /// By sender and tag, and of these in the order of arrival.
    all: BTreeMap<Arrival, Kept>,
    /// The number of the next.
    next: u64,
}

/// Sender, tag and number.
pub(crate) type Arrival = (Rank, u64, u64);

impl Arrivals {
    pub(crate) fn push(&mut self, kept: Kept) {
        self.all
            .insert((kept.from, kept.frame.tag, self.next), kept);
        self.next += 1;
    }

    /// The first message that a receive from `from` with `tag` meets, in a group of `world` ranks.
    pub(crate) fn first_for(
        &self,
        from: Option<Rank>,
        tag: u64,
        world: usize,
    ) -> Option<(Arrival, &Kept)> {
        if self.all.is_empty() {
            return None;
        }
        let first = |from| {
            let mut alike = self.all.range((from, tag, 0)..=(from, tag, u64::MAX));
            alike.next().map(|(at, kept)| (*at, kept))
        };
        match from {
            Some(from) => first(from),
            None => (0..world).filter_map(first).min_by_key(|(at, _)| at.2),
        }
    }

    pub(crate) fn take(&mut self, at: Arrival) -> Option<Kept> {
        self.all.remove(&at)
    }

    /// Whether one is from this rank.
    pub(crate) fn has_of(&self, from: Rank) -> bool {
        !self.all.is_empty() && {
            let mut alike = self.all.range((from, 0, 0)..=(from, u64::MAX, u64::MAX));
            alike.next().is_some()
        }
    }
}

impl Kept {
    /// Answers a probe.
    ///
    /// # Errors
    /// A message of a type that no rank has.
    pub(crate) fn answer(&self, probe: &WorkState) -> Result<()> {
        let dtype = DataType::from_number(self.frame.dtype);
        let dtype = dtype.ok_or_else(|| corrupt(self.from, "a message of an unknown type"))?;
        note_received(probe, self.from, (dtype, self.frame.bytes as usize));
        Ok(())
    }
}

impl Posted {
    /// The receive of exactly one message, from that rank, or any, with that tag.
    pub(crate) fn new(
        (from, tag): (Option<Rank>, u64),
        (dtype, memory): (DataType, Memory),
        work: &Arc<WorkState>,
    ) -> Self {
        Self {
            from,
            tag,
            dtype,
            memory,
            note_of: None,
            takes_shorter: false,
            is_probe: false,
            work: Arc::clone(work),
        }
    }

    /// Whether what a message says of itself is what this receive, of `rank`, asks for.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn check(
        &self,
        (members, rank): (&Members, Rank),
        from: Rank,
        frame: &Frame,
    ) -> Result<()> {
        let bytes = self.bytes();
        if self.fits(frame) {
            return match frame.is_note == self.note_of.is_some() {
                true => Ok(()),
                false => Err(corrupt(from, "a message in another form than it receives")),
            };
        }
        let rule = match self.takes_shorter {
            true => "a receive takes a message of its type that is not longer than it",
            false => "both sides of a message must have the same type and length",
        };
        let theirs = DataType::from_number(frame.dtype).map_or("an unknown type", DataType::name);
        let field = if frame.dtype == self.dtype as u8 {
            "length"
        } else {
            "dtype"
        };
        Err(Error::new(
            Code::Mismatch,
            format!(
                "the {field} differs: {} receives {bytes} bytes of {} but {} sends {} bytes of {theirs} (tag {}); {rule}",
                members.name(rank),
                self.dtype,
                members.name(from),
                frame.bytes,
                self.tag
            ),
        )
        .with_field(field)
        .with_peer(from)
        .with_operation(self.work.name()))
    }

    /// The same for a message of the rank that receives it, which is told of a difference as of a wrong argument.
    pub(crate) fn check_own(&self, frame: &Frame) -> Result<()> {
        let bytes = self.bytes();
        match self.fits(frame) && frame.is_note == self.note_of.is_some() {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "this rank sends itself {} bytes of {} (tag {}) but its receive of them expects {bytes} bytes of {}",
                frame.bytes,
                DataType::from_number(frame.dtype).map_or("an unknown type", DataType::name),
                self.tag,
                self.dtype
            ))),
        }
    }

    /// Bytes of the message.
    pub(crate) fn bytes(&self) -> usize {
        self.note_of.unwrap_or(self.memory.len())
    }

    /// Whether a message has the type of this receive, and a length that it takes.
    fn fits(&self, frame: &Frame) -> bool {
        let room = self.bytes() as u64;
        let is_shorter = || {
            self.takes_shorter
                && frame.bytes < room
                && !frame.is_note
                && frame.bytes.is_multiple_of(self.dtype.size() as u64)
        };
        frame.dtype == self.dtype as u8 && (frame.bytes == room || is_shorter())
    }

    /// The same receive, of exactly the message that it has met and that [`Posted::check`] lets pass.
    pub(crate) fn cut_to(self, frame: &Frame) -> Self {
        let bytes = frame.payload();
        if bytes == self.memory.len() {
            return self;
        }
        Self {
            memory: self.memory.part(&[(0, bytes)]),
            ..self
        }
    }

    /// Puts the whole payload in, and ends.
    pub(crate) fn complete(mut self, source: Rank, payload: &[u8]) -> Arc<WorkState> {
        self.memory.copy_from(0, payload);
        note_received(&self.work, source, (self.dtype, payload.len()));
        self.work
    }
}

/// Notes which message has come.
pub(crate) fn note_received(work: &WorkState, source: Rank, (dtype, bytes): (DataType, usize)) {
    work.set_received(Received {
        source,
        bytes,
        dtype,
    });
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::frame::Kind;
    use super::*;
    use crate::types::Collective;

    const WORLD: usize = 4;

    fn posted(number: u64, from: Option<Rank>, tag: u64) -> Posted {
        let work = WorkState::new(
            Collective::Recv,
            number,
            (Instant::now(), Duration::ZERO),
            None,
        );
        Posted::new(
            (from, tag),
            (DataType::UInt8, Memory::empty()),
            &Arc::new(work),
        )
    }

    fn kept(from: Rank, tag: u64, id: u64) -> Kept {
        let frame = Frame {
            kind: Kind::Request,
            dtype: DataType::UInt8 as u8,
            is_note: false,
            tag,
            id,
            bytes: 0,
        };
        Kept {
            from,
            frame,
            payload: None,
        }
    }

    /// Numbers that look like random ones.
    fn draw(state: &mut u64) -> impl FnMut(u64) -> u64 {
        move |below| {
            *state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (*state >> 33) % below
        }
    }

    /// Sender, or any, and tag: whether a message from `rank` with `tag` meets a receive that asks for these.
    fn meets((from, wanted): (Option<Rank>, u64), (rank, tag): (Rank, u64)) -> bool {
        wanted == tag && from.is_none_or(|from| from == rank)
    }

    /// As a list that is searched from its beginning would have it.
    #[test]
    fn messages_meet_the_first_receive() {
        let mut state = 7;
        let mut draw = draw(&mut state);
        let mut receives = Receives::default();
        let mut list = Vec::<(Arc<WorkState>, Option<Rank>, u64)>::new();
        for number in 0..20_000 {
            let (rank, tag) = (draw(WORLD as u64) as Rank, draw(3));
            let from = (draw(3) > 0).then_some(rank);
            match draw(4) {
                0 | 1 => {
                    let one = posted(number, from, tag);
                    list.push((Arc::clone(&one.work), from, tag));
                    receives.push(one);
                }
                2 => {
                    let mut asking = list.iter();
                    let at =
                        asking.position(|(_, from, wanted)| meets((*from, *wanted), (rank, tag)));
                    let first = receives.first_for(rank, tag);
                    let first = first.map(|it| Arc::clone(&it.work));
                    let expected = at.map(|at| list.remove(at).0);
                    assert_eq!(
                        first.as_ref().map(|it| it.sequence),
                        expected.map(|it| it.sequence)
                    );
                    if let Some(work) = first {
                        assert!(receives.take(&work).is_some() && receives.take(&work).is_none());
                    }
                }
                _ if !list.is_empty() => {
                    let at = draw(list.len() as u64) as usize;
                    assert!(receives.take(&list.remove(at).0).is_some());
                }
                _ => {}
            }
            let ask = |from| list.iter().any(|it| it.1 == from);
            assert_eq!(receives.ask_for(Some(rank)), ask(Some(rank)));
            assert_eq!(receives.ask_for(None), ask(None));
            assert_eq!(
                (receives.is_empty(), receives.iter().count()),
                (list.is_empty(), list.len())
            );
        }
    }

    #[test]
    fn receives_meet_the_first_message() {
        let mut state = 11;
        let mut draw = draw(&mut state);
        let (mut arrivals, mut list) = (Arrivals::default(), Vec::<(Rank, u64, u64)>::new());
        for number in 0..20_000 {
            let (rank, tag) = (draw(WORLD as u64) as Rank, draw(3));
            let from = (draw(3) > 0).then_some(rank);
            if draw(2) == 0 {
                arrivals.push(kept(rank, tag, number));
                list.push((rank, tag, number));
            } else {
                let mut queue = list.iter();
                let at = queue.position(|(sender, has, _)| meets((from, tag), (*sender, *has)));
                let first = arrivals.first_for(from, tag, WORLD);
                let first = first.map(|(at, kept)| (at, kept.frame.id));
                let expected = at.map(|at| list.remove(at).2);
                assert_eq!(first.map(|(_, id)| id), expected);
                if let Some((first, _)) = first {
                    assert!(arrivals.take(first).is_some());
                }
            }
            let has = |rank| list.iter().any(|it| it.0 == rank);
            assert_eq!(arrivals.has_of(rank), has(rank));
        }
    }
}
