//! Offers that come before their receive, messages to oneself, and many at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::frame::{Frame, Kind};
use super::matching::{Dependence, Finished, Matching};
use super::meeting::Posted;
use crate::buffer::Memory;
use crate::engine::links::LinkTable;
use crate::engine::members::Members;
use crate::engine::work::WorkState;
use crate::transport::Link;
use crate::transport::endpoint::Lane;
use crate::transport::local;
use crate::types::{Collective, DataType, Rank};

const LENGTH: usize = 100_000;
const TAG: u64 = 3;

/// Rank 0's traffic with rank 1, and rank 1's end of the link between them.
struct Side<L> {
    matching: Matching,
    links: LinkTable,
    theirs: L,
    finished: Finished,
}

fn side() -> Side<impl Link> {
    let (ours, theirs) = local::pair(1 << 18).unwrap();
    let mut links = LinkTable::new(2);
    links.establish(Lane::PointToPoint, 1, Box::new(ours), "rank 1".to_owned());
    Side {
        matching: Matching::new(0, Members::numbered(0..2), 64 << 10),
        links,
        theirs,
        finished: Vec::new(),
    }
}

/// A receive of exactly one message of bytes.
fn receive_of(place: (Option<Rank>, u64), memory: Memory, work: &Arc<WorkState>) -> Posted {
    Posted::new(place, (DataType::UInt8, memory), work)
}

/// A work of its own number.
fn work() -> Arc<WorkState> {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    Arc::new(WorkState::new(
        Collective::Recv,
        number,
        (Instant::now(), Duration::ZERO),
        None,
    ))
}

impl<L: Link> Side<L> {
    /// Rank 1 sends the header of a message of `LENGTH` bytes.
    fn hear(&mut self, kind: Kind) {
        self.hear_header(kind, (TAG, 0), LENGTH);
    }

    /// The same of a message without any.
    fn hear_of(&mut self, kind: Kind, tag: u64, id: u64) {
        self.hear_header(kind, (tag, id), 0);
    }

    fn hear_header(&mut self, kind: Kind, (tag, id): (u64, u64), bytes: usize) {
        let frame = Frame {
            kind,
            dtype: DataType::UInt8 as u8,
            is_note: false,
            tag,
            id,
            bytes: bytes as u64,
        };
        let header = frame.encode();
        assert_eq!(self.theirs.try_send(&header).unwrap(), header.len());
    }

    fn advance(&mut self) -> bool {
        let (links, finished) = (&mut self.links, &mut self.finished);
        self.matching.advance(links, finished).unwrap()
    }

    fn receive(&mut self, memory: Memory, tag: u64) {
        let posted = receive_of((Some(1), tag), memory, &work());
        self.matching.receive(posted, &mut self.finished).unwrap();
    }

    /// The kind of this side's next answer.
    fn answer(&mut self) -> Option<Kind> {
        let mut kind = None;
        let mut take = |message: &[u8]| {
            let header = message.first_chunk().expect("a frame");
            kind = Some(Frame::decode(header, 0).unwrap().kind);
        };
        self.theirs.try_take(&mut take).unwrap();
        kind
    }
}

#[test]
fn an_offer_waits_for_a_receive_while_the_caller_is_awake() {
    let (message, mut into) = (vec![7_u8; LENGTH], vec![0_u8; LENGTH]);
    // SAFETY: the buffer outlives all receives, and one of them at most is filled.
    let mut memory = || unsafe { Memory::of_mut(&mut into) };
    let mut side = side();
    side.matching.hold_offers(true);
    side.hear(Kind::Offer);
    assert!(side.advance(), "its header has been read");
    assert!(!side.advance());
    assert!(!side.matching.may_look(1), "it is the next message");
    side.receive(memory(), TAG);
    assert!(side.advance());
    assert_eq!(side.theirs.try_send(&message).unwrap(), LENGTH);
    assert!(side.advance());
    assert_eq!((side.finished.len(), side.answer()), (1, None));
    assert_eq!(into, message);
}

#[test]
fn an_offer_is_declined_before_the_caller_sleeps() {
    let mut into = vec![0_u8; LENGTH];
    // SAFETY: the buffer outlives all receives, and one of them at most is filled.
    let mut memory = || unsafe { Memory::of_mut(&mut into) };
    let mut side = side();
    side.matching.hold_offers(true);
    assert!(!side.matching.release_offers(), "there is none");
    side.matching.hold_offers(true);
    side.hear(Kind::Offer);
    side.advance();
    assert!(!side.advance());
    assert!(side.matching.release_offers());
    assert!(side.advance() && !side.matching.release_offers());
    side.receive(memory(), TAG);
    assert!(side.advance());
    assert_eq!(side.answer(), Some(Kind::Ready));
}

#[test]
fn an_offer_does_not_wait_before_what_is_wanted() {
    let mut into = vec![0_u8; LENGTH];
    // SAFETY: the buffer outlives all receives, and one of them at most is filled.
    let mut memory = || unsafe { Memory::of_mut(&mut into) };
    // Another message of that peer; of a peer unknown; a payload that was asked for; the answer to an announcement.
    for wanted in 0..4 {
        let mut side = side();
        match wanted {
            0 => side.receive(memory(), TAG + 1),
            1 => {
                let posted = receive_of((None, TAG + 1), memory(), &work());
                side.matching.receive(posted, &mut Vec::new()).unwrap();
            }
            2 => {
                side.receive(memory(), TAG);
                side.hear(Kind::Request);
                assert!(side.advance());
                assert_eq!(side.answer(), Some(Kind::Ready));
            }
            _ => {
                // The second is announced.
                for _ in 0..2 {
                    let finished = &mut side.finished;
                    side.matching
                        .send(
                            DataType::UInt8,
                            (memory(), None),
                            (1, TAG),
                            &work(),
                            finished,
                        )
                        .unwrap();
                }
            }
        }
        side.matching.hold_offers(true);
        side.hear(Kind::Offer);
        assert!(side.advance(), "{wanted}");
        assert!(!side.matching.release_offers(), "{wanted}");
        assert!(side.matching.kept.has_of(1), "{wanted}");
    }
}

/// However many messages are under way, each costs the same, whichever ends first. The bound is far above the cost of caches,
/// and far below that of a search.
#[test]
fn many_messages_under_way_cost_no_more_each() {
    const FEW: u64 = 2_000;
    const MANY: u64 = 40_000;
    type Act = fn(u64) -> Duration;
    let acts: [(&str, Act); 4] = [
        ("sends that are answered", answers),
        ("receives that are taken back", withdrawals),
        ("receives that are met, the last first", meetings),
        ("messages that are kept", arrivals),
    ];
    for (what, act) in acts {
        let mut few = Duration::MAX;
        let mut many = Duration::MAX;
        // Caches that are shared with others make some measurements longer, and none shorter.
        let told = (0..20).any(|_| {
            few = few.min(act(FEW) / FEW as u32);
            many = many.min(act(MANY) / MANY as u32);
            many < 8 * few
        });
        assert!(
            told,
            "{what}: {few:?} each of {FEW}, {many:?} each of {MANY}"
        );
    }
}

/// The time for which this thread has computed: that of others on its core does not count.
fn computed() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.try_into().expect("a time")
}

/// All are announced, and answered in their order.
fn answers(count: u64) -> Duration {
    let mut side = side();
    let message = [0; 8];
    // SAFETY: the buffer outlives the sends.
    let memory = || unsafe { Memory::of(&message) };
    side.matching.eager_bytes = 0;
    for _ in 0..count {
        let (links, finished) = (&mut side.links, &mut side.finished);
        let matching = &mut side.matching;
        let place = (1, TAG);
        matching
            .send(DataType::UInt8, (memory(), None), place, &work(), finished)
            .unwrap();
        matching.advance(links, finished).unwrap();
        while side.answer().is_some() {}
    }
    let since = computed();
    let mut ended = 0;
    for id in 0..count {
        side.hear_of(Kind::Ready, TAG, id);
        side.advance();
        while side.answer().is_some() {}
        // As long as one waits to be told, nothing more is read.
        ended += side.finished.drain(..).count() as u64;
    }
    let took = computed() - since;
    assert_eq!(ended, count);
    took
}

fn posted(side: &mut Side<impl Link>, count: u64) -> Vec<Arc<WorkState>> {
    let works: Vec<_> = (0..count).map(|_| work()).collect();
    for (tag, work) in works.iter().enumerate() {
        let posted = receive_of((Some(1), tag as u64), Memory::empty(), work);
        let has_met = side.matching.receive(posted, &mut side.finished);
        assert!(!has_met.unwrap());
    }
    works
}

fn withdrawals(count: u64) -> Duration {
    let mut side = side();
    let works = posted(&mut side, count);
    let since = computed();
    for work in works.iter().rev() {
        assert!(side.matching.withdraw(work));
    }
    computed() - since
}

fn meetings(count: u64) -> Duration {
    let mut side = side();
    posted(&mut side, count);
    let since = computed();
    for tag in (0..count).rev() {
        side.hear_of(Kind::Eager, tag, 0);
        side.advance();
    }
    let took = computed() - since;
    assert_eq!(side.finished.len() as u64, count);
    took
}

fn arrivals(count: u64) -> Duration {
    let mut side = side();
    for tag in 0..count {
        side.hear_of(Kind::Eager, tag, 0);
        side.advance();
    }
    let since = computed();
    for tag in (0..count).rev() {
        side.receive(Memory::empty(), tag);
    }
    let took = computed() - since;
    assert_eq!(side.finished.len() as u64, count);
    took
}

#[test]
fn a_message_to_oneself_waits_for_its_receive() {
    let (message, mut into) = (vec![7_u8; LENGTH], vec![0_u8; LENGTH]);
    let mut side = side();
    let Side {
        matching, finished, ..
    } = &mut side;
    // SAFETY: the buffers outlive the messages.
    let (sent, got) = unsafe { (Memory::of(&message), Memory::of_mut(&mut into)) };
    let (send, receive) = (work(), work());
    let place = (0, TAG);
    matching
        .send(DataType::UInt8, (sent, None), place, &send, finished)
        .unwrap();
    assert!(
        send.result().is_none() && finished.len() == 1,
        "it has ended"
    );
    assert!(!matching.is_busy());
    // One that differs is refused, and the message stays.
    let place = (None, TAG);
    let wrong = receive_of(place, Memory::empty(), &work());
    let error = matching.receive(wrong, finished).unwrap_err();
    assert!(!error.code.is_fatal(), "{error}");
    let right = receive_of(place, got, &receive);
    assert!(matching.receive(right, finished).unwrap());
    let source = receive.received().map(|it| it.source);
    assert_eq!((finished.len(), source), (2, Some(0)));
    assert!(!matching.is_busy() && !matching.kept.has_of(0));
    assert_eq!(into, message);
}

#[test]
fn a_difference_names_both_ranks_with_host_and_process() {
    let mut side = side();
    side.matching.members = Members::numbered([0, 4]);
    side.hear(Kind::Request);
    side.advance();
    let wrong = receive_of((Some(1), TAG), Memory::empty(), &work());
    let error = side.matching.receive(wrong, &mut side.finished);
    let error = error.unwrap_err();
    for part in [
        "rank 0 (host h0, pid 100) receives 0 bytes",
        "rank 1 (global rank 4, host h4, pid 104) sends 100000 bytes",
    ] {
        assert!(error.message.contains(part), "{error}");
    }
}

#[test]
fn a_probe_finds_a_message_that_no_receive_takes() {
    let mut into = vec![0_u8; LENGTH];
    let mut side = side();
    let probe_for = |tag| {
        let work = work();
        let probe = Posted {
            is_probe: true,
            ..receive_of((None, tag), Memory::empty(), &work)
        };
        (probe, work)
    };
    // One that came before, and one that comes while it looks.
    side.hear_of(Kind::Request, TAG, 1);
    side.advance();
    let (probe, early) = probe_for(TAG);
    assert!(side.matching.receive(probe, &mut side.finished).unwrap());
    assert_eq!(
        early.received().map(|it| (it.source, it.bytes)),
        Some((1, 0))
    );
    let (probe, late) = probe_for(TAG + 1);
    assert!(!side.matching.receive(probe, &mut side.finished).unwrap());
    assert!(side.matching.is_busy());
    assert_eq!(side.matching.dependence(1), Dependence::Any);
    // SAFETY: the buffer outlives the receive.
    side.receive(unsafe { Memory::of_mut(&mut into) }, TAG + 1);
    side.hear_header(Kind::Request, (TAG + 1, 2), LENGTH);
    side.advance();
    assert_eq!(late.received(), None, "a receive has taken that message");
    side.hear_header(Kind::Request, (TAG + 1, 3), 8);
    side.advance();
    assert_eq!(late.received().map(|it| it.bytes), Some(8));
    let (probe, given_up) = probe_for(TAG + 2);
    side.matching.receive(probe, &mut side.finished).unwrap();
    assert!(side.matching.withdraw(&given_up) && !side.matching.withdraw(&given_up));
}

#[test]
fn a_receive_with_room_takes_a_shorter_message() {
    for (kind, is_early) in [
        (Kind::Request, true),
        (Kind::Request, false),
        (Kind::Offer, true),
    ] {
        let mut into = vec![0_u8; 2 * LENGTH];
        let mut side = side();
        let receive = work();
        let posted = Posted {
            takes_shorter: true,
            // SAFETY: the buffer outlives the receive.
            ..receive_of((None, TAG), unsafe { Memory::of_mut(&mut into) }, &receive)
        };
        if is_early {
            side.matching.receive(posted, &mut side.finished).unwrap();
            side.hear(kind);
            side.advance();
        } else {
            side.hear(kind);
            side.advance();
            side.matching.receive(posted, &mut side.finished).unwrap();
        }
        if kind == Kind::Request {
            side.hear(Kind::Data);
        }
        let (message, mut sent) = (vec![7; LENGTH], 0);
        while sent < LENGTH {
            sent += side.theirs.try_send(&message[sent..]).unwrap();
            side.advance();
        }
        assert_eq!(side.finished.len(), 1);
        assert_eq!(receive.received().map(|it| it.bytes), Some(LENGTH));
        assert_eq!(into, [vec![7; LENGTH], vec![0; LENGTH]].concat());
    }
}

/// A liar announces one message twice.
#[test]
fn two_messages_with_one_number_are_refused() {
    let mut into = vec![0_u8; LENGTH];
    // SAFETY: the buffer outlives the receives.
    let mut memory = || unsafe { Memory::of_mut(&mut into) };
    let mut side = side();
    side.receive(memory(), TAG);
    side.receive(memory(), TAG);
    for _ in 0..2 {
        side.hear(Kind::Request);
    }
    let (links, finished) = (&mut side.links, &mut side.finished);
    let error = side.matching.advance(links, finished).unwrap_err();
    assert!(
        error.message.contains("two messages with one number"),
        "{error}"
    );
    // Both receives are there to be failed.
    assert_eq!(side.matching.clear().len(), 2);
}
