//! Sends and receives that block, in the calling thread.
//!
//! As with collectives, a call first tries a few times, under the group's lock: it puts a short message into the link
//! if there is room for all of it, and a receive takes the next message if that is the one it asks for. Everything else
//! becomes an operation that other threads can drive; so does a message that has come only in part.

use std::sync::Arc;
use std::time::Duration;

use crate::buffer::Memory;
use crate::engine::work::PointToPoint;
use crate::error::{Code, Error, Result};
use crate::types::{Collective, DataType, Rank};

use crate::engine::drive::blocking::Turn;
use crate::engine::group::submit::{Message, Role, check_elements};
use crate::engine::message::look::{Look, Wanted};
use crate::engine::reports::{MessagePrint, Print};
use crate::engine::state::{Core, Group};
use crate::engine::timeline::Begun;
use crate::engine::traffic::TrafficClass;
use crate::engine::work::{Received, WorkState};
use crate::fence::contained;

impl Group {
    /// Sends in this thread.
    pub(crate) fn send_now(&self, outgoing: Outbound, timeout: Option<Duration>) -> Result<()> {
        self.check_outgoing(&outgoing)?;
        if self.send_first(&outgoing)? {
            return Ok(());
        }
        let Outbound {
            dtype,
            memory,
            to,
            tag,
        } = outgoing;
        let work = self.send(dtype, memory, (to, tag), blocking(timeout))?;
        self.wait(&work, None)
    }

    /// Receives in this thread a message that is not longer than the memory.
    pub(crate) fn receive_now(
        &self,
        mut incoming: Inbound,
        timeout: Option<Duration>,
    ) -> Result<Received> {
        self.check_incoming(&incoming)?;
        let (dtype, bytes) = (incoming.dtype, incoming.memory.len());
        let received = match self.look_for(&mut incoming, timeout)? {
            Found::Whole(source) => {
                return Ok(Received {
                    source,
                    bytes,
                    dtype,
                });
            }
            Found::Beginning(work) => work,
            Found::Nothing => self.start_receive(incoming, timeout)?,
        };
        self.wait_for_message(&received)
    }

    /// Looks until a message has come, or for that long; which, if one has.
    pub(crate) fn probe_now(
        &self,
        (from, tag): (Option<Rank>, u64),
        timeout: Option<Duration>,
    ) -> Result<Option<Received>> {
        let probe = self.probe(from, tag)?;
        match self.wait(&probe, timeout) {
            Err(error) if probe.result().is_none() && error.code == Code::Timeout => {}
            ended => {
                ended?;
                return Ok(probe.received());
            }
        }
        if self.cancel_receive(&probe) {
            return Ok(None);
        }
        self.wait(&probe, None)?;
        Ok(probe.received())
    }

    /// Sends and receives in this thread, at the same time, as [`Group::receive_now`].
    pub(crate) fn exchange_now(
        &self,
        outgoing: Outbound,
        incoming: Inbound,
        timeout: Option<Duration>,
    ) -> Result<Received> {
        self.check_outgoing(&outgoing)?;
        self.check_incoming(&incoming)?;
        // A message that comes unasked for may be looked for once this one has been sent; one that is offered is
        // declined unless its receive has been started.
        let eager = self.config.eager_bytes.0;
        if incoming.memory.len() <= eager && self.send_first(&outgoing)? {
            return self.receive_now(incoming, timeout);
        }
        let received = self.start_receive(incoming, timeout)?;
        let Outbound {
            dtype,
            memory,
            to,
            tag,
        } = outgoing;
        let sent = self
            .send(dtype, memory, (to, tag), blocking(timeout))
            .and_then(|work| self.wait(&work, None));
        if let Err(error) = sent {
            // The receive's memory is in use until it has ended.
            if !self.core.lock().matching.withdraw(&received) {
                let _ = self.wait(&received, None);
            }
            return Err(error);
        }
        self.wait_for_message(&received)
    }

    /// Ends a receive that no message has met. Returns whether it did; one that has met its message goes on.
    pub(crate) fn cancel_receive(&self, work: &Arc<WorkState>) -> bool {
        let mut core = self.core.lock();
        let was_posted = core.matching.withdraw(work);
        if was_posted {
            let error = Error::new(Code::Aborted, "the receive was taken back");
            core.finished.push((Arc::clone(work), Err(error)));
            self.settle(&mut core);
            // The thread that waits for it may be the one that sleeps for all.
            if core.sleeping {
                self.parker().unpark();
            }
        }
        was_posted
    }

    fn check_outgoing(&self, outgoing: &Outbound) -> Result<()> {
        self.check_alive()?;
        self.check_rank(outgoing.to, "send to")?;
        check_elements(outgoing.dtype, &outgoing.memory, "send")
    }

    fn check_incoming(&self, incoming: &Inbound) -> Result<()> {
        self.check_alive()?;
        check_elements(incoming.dtype, &incoming.memory, "recv")?;
        match incoming.from {
            Some(from) => self.check_rank(from, "receive from"),
            None => Ok(()),
        }
    }

    fn start_receive(
        &self,
        incoming: Inbound,
        timeout: Option<Duration>,
    ) -> Result<Arc<WorkState>> {
        let Inbound {
            dtype,
            memory,
            from,
            tag,
        } = incoming;
        let options = PointToPoint {
            takes_shorter: true,
            ..blocking(timeout)
        };
        self.receive(dtype, memory, (from, tag), options)
    }

    fn wait_for_message(&self, receive: &WorkState) -> Result<Received> {
        self.wait(receive, None)?;
        receive
            .received()
            .ok_or_else(|| Error::internal("a message without a source"))
    }

    /// Sends a short message if there is room for all of it. Returns whether it has been sent.
    fn send_first(&self, outgoing: &Outbound) -> Result<bool> {
        let mut core = self.core.lock();
        self.check_alive()?;
        if core.leader {
            return Ok(false);
        }
        if let Some(timeline) = &mut core.timeline {
            timeline.look(&self.clock);
        }
        let Core {
            matching, links, ..
        } = &mut *core;
        let place = (outgoing.to, outgoing.tag);
        let sent =
            contained(|| matching.send_at_once(links, outgoing.dtype, &outgoing.memory, place));
        match sent.flatten() {
            Ok(sent) => {
                if sent {
                    let bytes = outgoing.memory.len();
                    let what = (Collective::Send, outgoing.dtype);
                    note_message(&mut core, what, bytes, place);
                    if core.timeline.is_some() {
                        self.trace_message(&mut core, (Collective::Send, bytes), place);
                    }
                }
                Ok(sent)
            }
            Err(error) => {
                self.fail(&mut core, error.clone());
                Err(error)
            }
        }
    }

    /// Looks for a message as long as that takes no sleep.
    fn look_for(&self, incoming: &mut Inbound, timeout: Option<Duration>) -> Result<Found> {
        let Some(from) = incoming.from else {
            return Ok(Found::Nothing);
        };
        let mut core = self.core.lock();
        self.check_alive()?;
        if core.leader || core.is_busy() || !core.matching.may_look(from) {
            return Ok(Found::Nothing);
        }
        if let Some(timeline) = &mut core.timeline {
            timeline.look(&self.clock);
        }
        let (bytes, tag) = (incoming.memory.len(), incoming.tag);
        let mut wanted = Wanted {
            from,
            tag: incoming.tag,
            dtype: incoming.dtype,
            memory: &mut incoming.memory,
            arrived: None,
        };
        if self.look(&mut core, &mut wanted)? {
            let what = (Collective::Recv, incoming.dtype);
            note_message(&mut core, what, bytes, (from, tag));
            if core.timeline.is_some() {
                self.trace_message(&mut core, (Collective::Recv, bytes), (from, tag));
            }
            return Ok(Found::Whole(from));
        }
        if wanted.arrived.is_none() {
            return Ok(Found::Nothing);
        }
        let what = Message {
            collective: Collective::Recv,
            peer: Some(from),
            bytes,
            role: Role::Tagged(tag, incoming.dtype),
        };
        let work = self.start_message(&mut core, what, blocking(timeout), |core, work| {
            core.matching.receive_rest(wanted, work);
            Ok(true)
        })?;
        Ok(Found::Beginning(work))
    }

    /// Whether the message has come.
    fn look(&self, core: &mut Core, wanted: &mut Wanted<'_>) -> Result<bool> {
        let found = self.patiently(core, |core| {
            let Core {
                matching,
                links,
                finished,
                ..
            } = core;
            Ok(match matching.look(links, wanted, finished)? {
                Look::Received => Turn::Over(true),
                Look::Some => Turn::Moved,
                Look::Nothing => Turn::Idle,
                Look::Otherwise => Turn::Over(false),
            })
        });
        if !core.finished.is_empty() {
            self.settle(core);
        }
        found.map_err(|error| {
            let error = self.explained(core, error);
            self.fail(core, error.clone());
            error
        })
    }

    /// Puts a message that was carried out at once into the trace: the last one.
    #[cold]
    #[inline(never)]
    fn trace_message(
        &self,
        core: &mut Core,
        (collective, bytes): (Collective, usize),
        (peer, tag): (Rank, u64),
    ) {
        if let Some(timeline) = &mut core.timeline {
            let begun = Begun {
                bytes,
                peer: Some(peer),
                tag: Some(tag),
                ..Begun::default()
            };
            let end = self.clock.now();
            timeline.at_once((collective, core.messages), begun, end, None);
        }
    }
}

fn note_message(
    core: &mut Core,
    (collective, dtype): (Collective, DataType),
    bytes: usize,
    (peer, tag): (Rank, u64),
) {
    core.messages += 1;
    core.traffic.count(TrafficClass::of(collective, bytes));
    core.recorder.note(Print::Message(MessagePrint {
        sequence: core.messages,
        collective,
        dtype,
        peer: Some(peer as u32),
        tag,
        bytes,
    }));
}

/// The options of an operation whose caller waits for it.
fn blocking(timeout: Option<Duration>) -> PointToPoint {
    PointToPoint {
        timeout,
        blocking: true,
        ..PointToPoint::default()
    }
}

/// A message to send.
pub(crate) struct Outbound {
    pub(crate) dtype: DataType,
    pub(crate) memory: Memory,
    pub(crate) to: Rank,
    pub(crate) tag: u64,
}

/// A message to receive.
pub(crate) struct Inbound {
    pub(crate) dtype: DataType,
    pub(crate) memory: Memory,
    /// The sender; `None`: any rank.
    pub(crate) from: Option<Rank>,
    pub(crate) tag: u64,
}

/// The result of looking for a message.
enum Found {
    /// All of it, from that rank.
    Whole(Rank),
    /// Its beginning: this is the receive of the rest.
    Beginning(Arc<WorkState>),
    /// Nothing, or something else that came before it.
    Nothing,
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::engine::links::LinkTable;
    use crate::engine::members::Members;
    use crate::engine::message::frame::{Frame, Kind};
    use crate::engine::message::matching::Matching;
    use crate::engine::message::meeting::Posted;
    use crate::transport::endpoint::Lane;
    use crate::transport::{Link, local};

    const EAGER: usize = 64 << 10;
    const TAG: u64 = 3;

    fn wanted(memory: &mut Memory) -> Wanted<'_> {
        Wanted {
            from: 1,
            tag: TAG,
            dtype: DataType::UInt8,
            memory,
            arrived: None,
        }
    }

    /// Rank 0's state of its traffic with rank 1, and rank 1's end of the link between them.
    fn sides() -> (Matching, LinkTable, impl Link) {
        let (ours, theirs) = local::pair(1 << 18).unwrap();
        let mut links = LinkTable::new(2);
        links.establish(Lane::PointToPoint, 1, Box::new(ours), "rank 1".to_owned());
        (
            Matching::new(0, Members::numbered(0..2), EAGER),
            links,
            theirs,
        )
    }

    fn stream(link: &mut impl Link, bytes: &[u8]) {
        assert_eq!(link.try_send(bytes).unwrap(), bytes.len());
    }

    fn header(bytes: usize, tag: u64) -> Vec<u8> {
        let frame = Frame {
            kind: Kind::Eager,
            dtype: DataType::UInt8 as u8,
            is_note: false,
            tag,
            id: 0,
            bytes: bytes as u64,
        };
        frame.encode().to_vec()
    }

    /// A sender may lose its core between two pieces of a message.
    #[test]
    fn a_message_that_stops_in_the_middle_becomes_an_operation() {
        let message: Vec<u8> = (0..20_000).map(|index| index as u8).collect();
        let (header, mut into) = (header(message.len(), TAG), vec![0; message.len()]);
        // SAFETY: the buffer outlives the receive.
        let mut memory = unsafe { Memory::of_mut(&mut into) };
        let (mut matching, mut links, mut theirs) = sides();
        let (mut wanted, mut finished) = (wanted(&mut memory), Vec::new());
        let mut look =
            |wanted: &mut Wanted<'_>| matching.look(&mut links, wanted, &mut finished).unwrap();
        assert!(matches!(look(&mut wanted), Look::Nothing));
        stream(&mut theirs, &header[..5]);
        assert!(matches!(look(&mut wanted), Look::Nothing));
        stream(&mut theirs, &header[5..]);
        assert!(matches!(look(&mut wanted), Look::Nothing));
        assert_eq!(wanted.arrived, Some(0));
        stream(&mut theirs, &message[..9_000]);
        assert!(matches!(look(&mut wanted), Look::Some));
        assert!(matches!(look(&mut wanted), Look::Nothing));
        assert_eq!(wanted.arrived, Some(9_000));

        let work = Arc::new(WorkState::new(
            Collective::Recv,
            1,
            (Instant::now(), Duration::ZERO),
            None,
        ));
        matching.receive_rest(wanted, &work);
        assert!(matching.is_busy() && !matching.may_look(1));
        stream(&mut theirs, &message[9_000..]);
        matching.advance(&mut links, &mut finished).unwrap();
        assert_eq!(finished.len(), 1);
        assert_eq!(work.received().map(|it| it.source), Some(1));
        assert!(!matching.is_busy());
        assert_eq!(into, message);
    }

    #[test]
    fn another_message_than_the_wanted_one_is_kept_for_its_receive() {
        let message = vec![7; 20_000];
        let (mut into, mut other) = (vec![0; 100], vec![0; message.len()]);
        // SAFETY: the buffers outlive the receives.
        let (mut memory, others) =
            unsafe { (Memory::of_mut(&mut into), Memory::of_mut(&mut other)) };
        let (mut matching, mut links, mut theirs) = sides();
        let (mut wanted, mut finished) = (wanted(&mut memory), Vec::new());
        stream(&mut theirs, &header(message.len(), TAG + 1));
        stream(&mut theirs, &message);
        let look = matching.look(&mut links, &mut wanted, &mut finished);
        assert!(matches!(look, Ok(Look::Otherwise)));
        assert_eq!(wanted.arrived, None);
        matching.advance(&mut links, &mut finished).unwrap();
        let work = Arc::new(WorkState::new(
            Collective::Recv,
            1,
            (Instant::now(), Duration::ZERO),
            None,
        ));
        let place = (Some(1), TAG + 1);
        matching
            .receive(
                Posted::new(place, (DataType::UInt8, others), &work),
                &mut finished,
            )
            .unwrap();
        assert_eq!(finished.len(), 1);
        assert_eq!(other, message);
    }
}
