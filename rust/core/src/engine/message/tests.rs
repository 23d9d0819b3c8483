//! Offers that come before their receive.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::frame::{Frame, Kind};
use super::matching::{Finished, Matching};
use crate::buffer::Memory;
use crate::engine::links::LinkTable;
use crate::engine::members::Members;
use crate::engine::work::WorkState;
use crate::transport::Link;
use crate::transport::endpoint::Lane;
use crate::transport::local;
use crate::types::{Collective, DataType};

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

/// A work of its own number.
fn work() -> Arc<WorkState> {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    Arc::new(WorkState::new(
        Collective::Recv,
        number,
        Duration::ZERO,
        None,
    ))
}

impl<L: Link> Side<L> {
    /// Rank 1 sends the header of a message of `LENGTH` bytes.
    fn hear(&mut self, kind: Kind) {
        let frame = Frame {
            kind,
            dtype: DataType::UInt8 as u8,
            is_note: false,
            tag: TAG,
            id: 0,
            bytes: LENGTH as u64,
        };
        let header = frame.encode();
        assert_eq!(self.theirs.try_send(&header).unwrap(), header.len());
    }

    fn advance(&mut self) -> bool {
        let (links, finished) = (&mut self.links, &mut self.finished);
        self.matching.advance(links, finished).unwrap()
    }

    fn receive(&mut self, memory: Memory, tag: u64) {
        let place = (Some(1), tag);
        let finished = &mut self.finished;
        self.matching
            .receive(DataType::UInt8, (memory, None), place, &work(), finished)
            .unwrap();
    }

    /// What this side has answered.
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
    // SAFETY: the buffer outlives all receives, of which one at most is filled.
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
    // SAFETY: the buffer outlives all receives, of which one at most is filled.
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
    // SAFETY: the buffer outlives all receives, of which one at most is filled.
    let mut memory = || unsafe { Memory::of_mut(&mut into) };
    // Another message of that peer; of a peer unknown; a payload that was asked for; the answer to an announcement.
    for wanted in 0..4 {
        let mut side = side();
        match wanted {
            0 => side.receive(memory(), TAG + 1),
            1 => {
                let place = (None, TAG + 1);
                side.matching
                    .receive(
                        DataType::UInt8,
                        (memory(), None),
                        place,
                        &work(),
                        &mut Vec::new(),
                    )
                    .unwrap();
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
