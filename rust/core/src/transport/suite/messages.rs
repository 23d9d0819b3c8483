//! Messages as the engine sends them: posted, lent from private memory and from the heap, or streamed, whichever
//! their lengths and the link suggest, in random order.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::thread;
use std::time::Instant;

use super::tools::{Random, Sleeper, both, pattern};
use super::{PATIENCE, Pair};
use crate::heap::Buffer;
use crate::transport::{Interest, Lending, Link, Loan, MESSAGE_HEADER, Terms, Ticket};

pub(in crate::transport) fn messages_of_every_kind_arrive_in_order(make: impl Fn(usize) -> Pair) {
    for (capacity, count) in [(64, 300), (4096, 600), (1 << 18, 600)] {
        both(make(capacity), |link, seed| {
            talk(link, seed, count, &mut |_, _| thread::yield_now());
        });
    }
}

pub(in crate::transport) fn sleepers_are_woken_by_messages_of_every_kind(
    make: impl Fn(usize) -> Pair,
) {
    for (capacity, count) in [(64, 300), (4096, 600), (1 << 18, 600)] {
        both(make(capacity), |link, seed| {
            let sleeper = Sleeper::new(link);
            talk(link, seed, count, &mut |link, interest| {
                sleeper.sleep(link, interest);
            });
        });
    }
}

/// How the messages of one direction went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::transport) struct Ways {
    pub(in crate::transport) posted: usize,
    pub(in crate::transport) streamed: usize,
    pub(in crate::transport) lent: usize,
    pub(in crate::transport) refused: usize,
}

/// Sends `count` messages of the series `seed` and receives as many of the other's; `wait`s when nothing moves.
pub(in crate::transport) fn talk(
    link: &mut dyn Link,
    seed: u64,
    count: usize,
    wait: &mut dyn FnMut(&mut dyn Link, Interest),
) -> Ways {
    if let Some(neighbour) = link.neighbour() {
        neighbour.lend_private_from(1);
    }
    let mut sender = Sender::new(seed, count);
    let mut receiver = Receiver::new(1 - seed, count);
    let start = Instant::now();
    loop {
        let mut moved = sender.advance(link);
        moved |= receiver.advance(link);
        let interest = Interest {
            readable: !receiver.is_done(),
            writable: !sender.is_done(),
        };
        if interest == Interest::default() {
            assert!(
                receiver.peeked > 0,
                "no message was seen before it was taken"
            );
            return sender.ways;
        }
        if !moved {
            wait(link, interest);
        }
        // Also of a side that believes to move: the other one may have panicked.
        let (sent, received) = (sender.next, receiver.next);
        assert!(
            start.elapsed() < PATIENCE,
            "sent {sent}, received {received} of {count}"
        );
    }
}

/// The payload of message `index` of a series.
fn payload(seed: u64, index: usize) -> Vec<u8> {
    let mut random = Random(seed << 32 | index as u64);
    let length = match random.below(10) {
        0..5 => random.below(521),
        5..7 => random.below(9000),
        7..9 => 4096 + 16 * random.size(1 << 12),
        _ => 16 * random.size(1 << 16),
    };
    pattern(seed, index * 31, length)
}

fn header(seed: u64, index: usize, length: usize) -> [u8; MESSAGE_HEADER] {
    let mut header = [0xa5; MESSAGE_HEADER];
    header[..8].copy_from_slice(&seed.to_le_bytes());
    header[8..16].copy_from_slice(&(index as u64).to_le_bytes());
    header[16..24].copy_from_slice(&(length as u64).to_le_bytes());
    header
}

/// A payload where the sender keeps it.
enum Kept {
    Private(Vec<u8>),
    Shared(Buffer<u8>),
}

impl Kept {
    fn new(bytes: Vec<u8>, shared: bool) -> Self {
        if shared {
            Self::Shared(Buffer::from_slice(&bytes))
        } else {
            Self::Private(bytes)
        }
    }

    /// Its address and length in `pieces` parts of whole elements.
    fn runs(&self, pieces: usize) -> Vec<(usize, usize)> {
        let size = (self.len() / pieces).next_multiple_of(16);
        self.chunks(size.max(16))
            .map(|part| (part.as_ptr().expose_provenance(), part.len()))
            .collect()
    }
}

impl Deref for Kept {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Private(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl DerefMut for Kept {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Private(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

struct Sender {
    seed: u64,
    next: usize,
    count: usize,
    streaming: Option<(Kept, usize)>,
    loans: VecDeque<(Ticket, Kept)>,
    ways: Ways,
}

impl Sender {
    fn new(seed: u64, count: usize) -> Self {
        Self {
            seed,
            next: 0,
            count,
            streaming: None,
            loans: VecDeque::new(),
            ways: Ways::default(),
        }
    }

    fn is_done(&self) -> bool {
        self.next == self.count && self.streaming.is_none() && self.loans.is_empty()
    }

    fn advance(&mut self, link: &mut dyn Link) -> bool {
        let mut moved = false;
        // As the engine does, every loan is looked at, not only the one that comes back first.
        for index in (0..self.loans.len()).rev() {
            let neighbour = link.neighbour().expect("what has lent");
            match neighbour.loan(self.loans[index].0).unwrap() {
                Loan::Out => {}
                Loan::Returned => {
                    let (_, mut kept) = self.loans.remove(index).unwrap();
                    // A reader that still looks gets something else.
                    kept.fill(0xff);
                    moved = true;
                }
                Loan::Declined => panic!("nothing is offered here"),
                Loan::Refused => {
                    self.ways.refused += 1;
                    assert!(self.streaming.is_none());
                    let (_, kept) = self.loans.remove(index).unwrap();
                    self.streaming = Some((kept, MESSAGE_HEADER));
                    moved = true;
                }
            }
        }
        if self.loans.iter().any(|(ticket, _)| !ticket.proven) {
            return moved;
        }
        loop {
            if let Some((kept, sent)) = &mut self.streaming {
                let header = header(self.seed, self.next - 1, kept.len());
                while *sent < MESSAGE_HEADER + kept.len() {
                    let rest = match header.get(*sent..) {
                        Some(rest) if !rest.is_empty() => rest,
                        _ => &kept[*sent - MESSAGE_HEADER..],
                    };
                    match link.try_send(rest).unwrap() {
                        0 => return moved,
                        count => *sent += count,
                    }
                    moved = true;
                }
                self.streaming = None;
            }
            if self.next == self.count || !self.begin(link) {
                return moved;
            }
            moved = true;
        }
    }

    /// Begins the next message. False: not now.
    fn begin(&mut self, link: &mut dyn Link) -> bool {
        let bytes = payload(self.seed, self.next);
        let header = header(self.seed, self.next, bytes.len());
        let mut random = Random(self.seed << 48 | self.next as u64);
        if MESSAGE_HEADER + bytes.len() <= link.post_limit() {
            if !link.try_post(&header, &bytes).unwrap() {
                return false;
            }
            self.ways.posted += 1;
        } else {
            let lend = bytes.len().is_multiple_of(16) && bytes.len() >= 16;
            let kept = Kept::new(bytes, random.below(2) == 0);
            let runs = kept.runs(random.below(5) + 1);
            let lending = match link.neighbour().filter(|_| lend) {
                Some(neighbour) => neighbour.try_lend(&header, &runs, Terms::Loan).unwrap(),
                None => Lending::Unfit,
            };
            match lending {
                Lending::NotNow => return false,
                Lending::Lent(ticket) => {
                    self.ways.lent += 1;
                    self.loans.push_back((ticket, kept));
                    self.next += 1;
                    return ticket.proven;
                }
                Lending::Unfit => {
                    self.ways.streamed += 1;
                    let whole = random.below(2) == 0 && link.try_stream(&header, &kept).unwrap();
                    self.streaming = (!whole).then_some((kept, 0));
                }
            }
        }
        self.next += 1;
        true
    }
}

struct Receiver {
    seed: u64,
    next: usize,
    count: usize,
    header: [u8; MESSAGE_HEADER],
    header_bytes: usize,
    /// The payload that is awaited, and what has come of it.
    arriving: Option<(Vec<u8>, Vec<u8>)>,
    /// How often a header was seen before its message was taken.
    peeked: usize,
}

impl Receiver {
    fn new(seed: u64, count: usize) -> Self {
        Self {
            seed,
            next: 0,
            count,
            header: [0; MESSAGE_HEADER],
            header_bytes: 0,
            arriving: None,
            peeked: 0,
        }
    }

    fn is_done(&self) -> bool {
        self.next == self.count
    }

    fn advance(&mut self, link: &mut dyn Link) -> bool {
        let mut moved = false;
        while !self.is_done() {
            if self.arriving.is_none() && !self.begin(link) {
                return moved;
            }
            moved = true;
            let Some((expected, arrived)) = &mut self.arriving else {
                continue;
            };
            let mut random = Random(self.next as u64);
            while arrived.len() < expected.len() {
                let left = expected.len() - arrived.len();
                let align = 1 << random.below(5);
                let count = if left >= align
                    && expected.len().is_multiple_of(16)
                    && arrived.len().is_multiple_of(16)
                {
                    let before = arrived.len();
                    let mut take = |run: &[u8]| arrived.extend_from_slice(run);
                    let max = if align == 16 { left } else { left.min(1600) };
                    let count = link.try_fold(max / align * align, align, &mut take);
                    arrived.truncate(before + count.as_ref().unwrap());
                    count.unwrap()
                } else {
                    let mut bytes = vec![0; left.min(100_000)];
                    let count = link.try_recv(&mut bytes).unwrap();
                    arrived.extend_from_slice(&bytes[..count]);
                    count
                };
                if count == 0 {
                    return moved;
                }
            }
            let index = self.next;
            assert!(arrived == expected, "message {index} differs");
            self.arriving = None;
            self.next += 1;
        }
        moved
    }

    /// Takes the next message, or its header.
    fn begin(&mut self, link: &mut dyn Link) -> bool {
        let expected = payload(self.seed, self.next);
        let expected_header = header(self.seed, self.next, expected.len());
        if self.header_bytes == 0
            && let Some(header) = link.peek().unwrap()
        {
            assert_eq!(header, expected_header, "of message {}", self.next);
            self.peeked += 1;
        }
        let mut arrived = Vec::new();
        let header = &mut self.header;
        let taken = self.header_bytes == 0
            && link
                .try_take(&mut |message| {
                    let (theirs, payload) = message.split_at(MESSAGE_HEADER);
                    header.copy_from_slice(theirs);
                    arrived.extend_from_slice(payload);
                })
                .unwrap();
        if !taken {
            if self.header_bytes == 0 && !link.is_streaming().unwrap() {
                return false;
            }
            while self.header_bytes < MESSAGE_HEADER {
                match link.try_recv(&mut header[self.header_bytes..]).unwrap() {
                    0 => return false,
                    count => self.header_bytes += count,
                }
            }
        }
        self.header_bytes = 0;
        assert_eq!(*header, expected_header, "message {} is next", self.next);
        self.arriving = Some((expected, arrived));
        true
    }
}
