//! A peer that sends anything: the headers of messages, and a group that they come to.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};

use crate::buffer::Memory;
use crate::communicator::Communicator;
use crate::config::Config;
use crate::engine::work::PointToPoint;
use crate::error::{Code, Result};
use crate::locks::Mutex;
use crate::plan::cost::Costs;
use crate::transport::endpoint::Lane;
use crate::transport::{
    ControlChannel, Interest, Link, Notice, POSITION_BYTES, PeerState, Position,
};
use crate::types::{DataType, ReduceOp};

use crate::engine::collective::header::{Fingerprint, HEADER, Told};
use crate::engine::collective::request::{Request, Sizes};
use crate::engine::members::Members;
use crate::engine::message::frame::Frame;
use crate::engine::state::Group;

/// The operations that the rank can be in meanwhile: the first byte chooses one.
const OPERATIONS: u8 = 7;

/// Bytes of a message that is announced before it is sent.
const ANNOUNCED_BYTES: usize = 100_000;

/// The tag of all messages.
const TAG: u64 = 3;

/// The headers of messages are read as what writes the same, and a group to which `bytes` come from a proven member
/// goes on, or fails with the member's fault. The first byte is the operation that the rank is in, the second how many
/// bytes come at a time; the rest is what comes.
pub fn message(bytes: &[u8]) {
    bytes.as_chunks::<HEADER>().0.iter().for_each(header);
    let (operation, piece, stream) = match bytes {
        [operation, piece, stream @ ..] => (operation % OPERATIONS, *piece, stream),
        _ => return,
    };
    let (ranks, _) = ranks(0, (stream, usize::from(piece).max(1)));
    let group = ranks[0].group();
    let mut place = Storage::new();
    place.start(group, operation);
    let mut core = group.core.lock();
    let mut turns = 0;
    while core.is_busy() && group.step(&mut core) {
        turns += 1;
        assert!(turns < 10_000 + stream.len(), "it moves for ever");
    }
    drop(core);
    if let Some(error) = ranks[0].error() {
        assert_ne!(error.code, Code::Internal, "{error}");
    }
    // Ends what is under way, while its memory is there.
    group.abort("over");
}

/// The positions that a peer tells while this rank waits. Each is passed over, or contradicts this rank's operation, or does
/// neither. The first byte is the operation that the rank is in.
pub fn position(bytes: &[u8]) {
    let Some((operation, positions)) = bytes.split_first() else {
        return;
    };
    let (ranks, _) = ranks(0, (&[], 1));
    let group = ranks[0].group();
    let mut place = Storage::new();
    place.start(group, operation % OPERATIONS);
    let mut core = group.core.lock();
    group.step(&mut core);
    for position in positions.as_chunks::<POSITION_BYTES>().0 {
        let Some(told) = Told::decode(position) else {
            continue;
        };
        assert_eq!(told.encode(), *position);
        if let Some(open) = core.links.open(Lane::Collective, 1) {
            open.told = Some(told);
        }
        if let Some(error) = group.contradiction_told(&mut core) {
            assert_eq!(
                (error.code, error.peer),
                (Code::Mismatch, Some(1)),
                "{error}"
            );
        }
    }
    drop(core);
    group.abort("over");
}

fn header(bytes: &[u8; HEADER]) {
    if let Some(print) = Fingerprint::decode(bytes) {
        assert_eq!(print.encode(), *bytes);
        assert!(Fingerprint::is_same(&print.encode(), bytes));
        let members = Members::numbered(0..2);
        let error = Fingerprint::default().mismatch(&print, (0, 1), &members);
        assert_eq!(error.code, Code::Mismatch);
        let _ = print.name();
    }
    if let Ok(frame) = Frame::decode(bytes, 1) {
        let again = Frame::decode(&frame.encode(), 1).expect("a frame");
        assert_eq!(again.encode(), frame.encode());
    }
}

/// The memory of the operations.
struct Storage {
    short: [u8; 16],
    other: [u8; 16],
    long: Vec<u8>,
    more: Vec<u8>,
}

impl Storage {
    fn new() -> Self {
        Self {
            short: [1; 16],
            other: [0; 16],
            long: vec![1; ANNOUNCED_BYTES],
            more: vec![0; ANNOUNCED_BYTES],
        }
    }

    fn start(&mut self, group: &Group, operation: u8) {
        let peer = 1 - group.rank();
        let submit = |request| {
            let _ = group.submit(request, None, false);
        };
        // SAFETY: the place outlives the group.
        let (short, other, long, more) = unsafe {
            (
                Memory::of(&self.short),
                Memory::of_mut(&mut self.other),
                Memory::of(&self.long),
                Memory::of_mut(&mut self.more),
            )
        };
        match operation {
            0 => submit(Request::barrier()),
            1 => submit(Request::all_reduce(
                DataType::Float32,
                ReduceOp::Sum,
                Some(short),
                other,
            )),
            2 => submit(Request::broadcast(DataType::UInt8, 1, other)),
            3 => {
                let sizes = Sizes::PerPair {
                    send: vec![2, 2],
                    recv: vec![2, 2],
                };
                submit(Request::all_to_all(DataType::Int32, short, other, sizes));
            }
            4 => {
                submit(Request::all_reduce(
                    DataType::BFloat16,
                    ReduceOp::Max,
                    Some(long),
                    more,
                ));
            }
            _ => {
                let (out, into) = match operation {
                    5 => (short, other),
                    _ => (long, more),
                };
                let from = (operation == 5).then_some(peer);
                // The one that takes anything takes shorter messages, too, beside a probe.
                let options = PointToPoint {
                    takes_shorter: from.is_none(),
                    ..blocking()
                };
                if from.is_none() {
                    let _ = group.probe(from, TAG);
                }
                let _ = group.receive(DataType::UInt8, into, (from, TAG), options);
                let _ = group.send(DataType::UInt8, out, (peer, TAG), blocking());
            }
        }
    }
}

fn blocking() -> PointToPoint {
    PointToPoint {
        blocking: true,
        ..PointToPoint::default()
    }
}

/// Two ranks: `rank` receives `stream` from the other, `piece` bytes at a time. Returns them, and the bytes that `rank` sends.
fn ranks(rank: usize, (stream, piece): (&[u8], usize)) -> (Vec<Communicator>, Arc<Mutex<Vec<u8>>>) {
    // Keeps the threads of the process, which go with the last group.
    static KEPT: OnceLock<Vec<Communicator>> = OnceLock::new();
    // The algorithm of an operation, and so what is sent for it, must not depend on how fast this machine is.
    let costs = Costs::TYPICAL.rounded(2);
    let make = || Communicator::local_at(2, &Config::default(), costs).expect("descriptors");
    KEPT.get_or_init(make);
    let ranks = make();
    let group = ranks[rank].group();
    let sent = Arc::default();
    let mut core = group.core.lock();
    group.read_mail(&mut core);
    for lane in [Lane::Collective, Lane::PointToPoint] {
        let tape = Tape {
            stream: stream.to_vec(),
            at: 0,
            piece,
            sent: Arc::clone(&sent),
        };
        core.links
            .establish(lane, 1 - rank, Box::new(tape), "a tape".into());
    }
    drop(core);
    (ranks, sent)
}

/// A link from which a fixed stream comes, and that takes everything.
struct Tape {
    stream: Vec<u8>,
    at: usize,
    /// Bytes that come at a time.
    piece: usize,
    sent: Arc<Mutex<Vec<u8>>>,
}

impl Link for Tape {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize> {
        self.sent.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn try_post(&mut self, header: &[u8; HEADER], payload: &[u8]) -> Result<bool> {
        self.sent.lock().extend([&header[..], payload].concat());
        Ok(true)
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> Result<usize> {
        let left = &self.stream[self.at..];
        let count = left.len().min(bytes.len()).min(self.piece);
        bytes[..count].copy_from_slice(&left[..count]);
        self.at += count;
        Ok(count)
    }

    fn try_fold(&mut self, max: usize, align: usize, fold: &mut dyn FnMut(&[u8])) -> Result<usize> {
        let left = &self.stream[self.at..];
        let count = left.len().min(max).min(self.piece.max(align)) / align * align;
        if count > 0 {
            fold(&left[..count]);
        }
        self.at += count;
        Ok(count)
    }

    fn is_streaming(&mut self) -> Result<bool> {
        Ok(self.at < self.stream.len())
    }

    fn arm(&mut self, _: Interest) -> bool {
        true
    }

    fn disarm(&mut self) {}

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn memory(&self) -> usize {
        0
    }

    fn describe(&self) -> String {
        "a tape".into()
    }
}

impl ControlChannel for Tape {
    fn peer_state(&mut self) -> PeerState {
        PeerState::Present
    }

    fn send_abort(&mut self, _: &Notice) {}

    fn send_farewell(&mut self) {}

    fn send_position(&mut self, _: &Position) {}

    fn take_position(&mut self) -> Option<Position> {
        None
    }
}

/// For each operation, what the other rank tells when it is in the same one, and in the one after.
#[cfg(test)]
pub(crate) fn positions() -> Vec<(String, Vec<u8>)> {
    let told = |(name, bytes): (String, Vec<u8>)| {
        let sent = bytes[2..].first_chunk::<HEADER>();
        let fingerprint = sent.and_then(Fingerprint::decode).unwrap_or_default();
        let mut out = vec![bytes[0]];
        for (later, expects, sends) in [(0, 0, 0), (0, 16, 0), (1, 0, 8)] {
            let fingerprint = Fingerprint {
                sequence: fingerprint.sequence + later,
                ..fingerprint
            };
            let told = Told {
                fingerprint,
                expects,
                sends,
            };
            out.extend(told.encode());
        }
        (name, out)
    };
    seeds().into_iter().map(told).collect()
}

/// For each operation, what the other rank sends when it is in the same one, as far as it goes without an answer.
#[cfg(test)]
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    let seed = |operation: u8| {
        let (ranks, sent) = ranks(1, (&[], 1));
        let group = ranks[1].group();
        let mut place = Storage::new();
        place.start(group, operation);
        group.step(&mut group.core.lock());
        group.abort("over");
        let mut bytes = vec![operation, 64];
        // A payload of any length will do.
        let sent = sent.lock();
        bytes.extend(&sent[..sent.len().min(512)]);
        (format!("operation-{operation}"), bytes)
    };
    (0..OPERATIONS).map(seed).collect()
}
