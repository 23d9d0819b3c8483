//! The operations of a group as the trace of the process has them.
//!
//! There is none unless the setting `trace` asks for it, and then a group pays one look at that for each operation. With it,
//! an operation is noted when it begins and put into the trace when it has ended: in `settle`, or at once where it was
//! carried out at once.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::config::Config;
use crate::error::Result;
use crate::fork::Own;
use crate::trace::{Event, Member, Track};
use crate::types::{Algorithm, Collective, Rank};

use crate::engine::clock::Clock;
use crate::engine::collective::header::Fingerprint;
use crate::engine::work::WorkState;

/// A group's part of the trace, and the beginnings of what is under way.
pub(crate) struct Timeline {
    track: Own<Track>,
    /// By whether it is a message, and its number.
    begun: FxHashMap<(bool, u64), Begun>,
    /// When the last call of a collective began that is carried out in its thread.
    called: Option<Instant>,
    /// When the last message began to be sent, or looked for, in the calling thread.
    looked: Option<Instant>,
}

/// The beginning of an operation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Begun {
    pub(crate) bytes: usize,
    pub(crate) algorithm: Option<Algorithm>,
    /// The root of a collective that has one; the other rank of a message, if it is known.
    pub(crate) peer: Option<Rank>,
    pub(crate) tag: Option<u64>,
    /// When it was called, if that was before it was started.
    pub(crate) since: Option<Instant>,
}

impl Begun {
    /// A collective, and the bytes of its longer buffer.
    pub(crate) fn of(print: &Fingerprint, bytes: usize, algorithm: Option<Algorithm>) -> Self {
        Self {
            bytes,
            algorithm,
            peer: print.root_of_one(),
            ..Self::default()
        }
    }
}

impl Timeline {
    /// That of a rank of a group of this name, if the settings ask for one.
    ///
    /// # Errors
    /// `System` where the trace cannot be written.
    pub(crate) fn open(
        config: &Config,
        group: String,
        (rank, numbers): (Rank, Vec<Rank>),
    ) -> Result<Option<Box<Self>>> {
        let Some(folder) = &config.trace else {
            return Ok(None);
        };
        let member = Member {
            group,
            rank,
            numbers,
        };
        Ok(Some(Box::new(Self {
            track: Own::new(Track::open(folder, &member)?),
            begun: FxHashMap::default(),
            called: None,
            looked: None,
        })))
    }

    /// A call of a collective begins, which may be carried out at once.
    #[cold]
    #[inline(never)]
    pub(crate) fn call(&mut self, clock: &Clock) {
        self.called = Some(clock.now());
    }

    /// A message is looked for, or tried to be sent, which may be carried out at once.
    #[cold]
    #[inline(never)]
    pub(crate) fn look(&mut self, clock: &Clock) {
        self.looked = Some(clock.now());
    }

    pub(crate) fn note_clock(&self, offset: i64, error: u64) {
        self.track.note_clock(offset, error);
    }

    /// An operation is under way.
    pub(crate) fn begin(&mut self, work: &WorkState, begun: Begun) {
        let place = place(work);
        let since = if place.0 { self.looked.take() } else { None };
        self.begun.insert(place, Begun { since, ..begun });
    }

    /// The collective that was called last is under way: this one.
    #[cold]
    pub(crate) fn goes_on(&mut self, sequence: u64) {
        if let Some(begun) = self.begun.get_mut(&(false, sequence)) {
            begun.since = self.called;
        }
    }

    /// A collective under way goes by that algorithm.
    pub(crate) fn choose(&mut self, sequence: u64, algorithm: Option<Algorithm>) {
        if let Some(begun) = self.begun.get_mut(&(false, sequence)) {
            begun.algorithm = algorithm;
        }
    }

    /// An operation has ended, and has waited for those ranks.
    pub(crate) fn end(
        &mut self,
        work: &WorkState,
        (result, now): (&Result<()>, Instant),
        waited: Vec<(Rank, Duration)>,
    ) {
        // A probe is not noted.
        let Some(begun) = self.begun.remove(&place(work)) else {
            return;
        };
        let received = work.received();
        self.track.record(Event {
            collective: work.collective,
            sequence: work.sequence,
            bytes: received.map_or(begun.bytes, |it| it.bytes),
            algorithm: begun.algorithm,
            peer: received.map(|it| it.source).or(begun.peer),
            tag: begun.tag,
            begin: begun.since.unwrap_or(work.started),
            end: now,
            waited,
            failure: result.as_ref().err().map(|error| error.message.clone()),
        });
    }

    /// An operation was carried out at once, or failed.
    pub(crate) fn at_once(
        &mut self,
        (collective, sequence): (Collective, u64),
        begun: Begun,
        end: Instant,
        failure: Option<String>,
    ) {
        let begin = match collective {
            Collective::Send | Collective::Recv => self.looked.take(),
            _ => self.called,
        };
        self.track.record(Event {
            collective,
            sequence,
            bytes: begun.bytes,
            algorithm: begun.algorithm,
            peer: begun.peer,
            tag: begun.tag,
            begin: begin.unwrap_or(end),
            end,
            waited: Vec::new(),
            failure,
        });
    }
}

fn place(work: &WorkState) -> (bool, u64) {
    let is_message = matches!(work.collective, Collective::Send | Collective::Recv);
    (is_message, work.sequence)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::thread;

    use crate::communicator::Communicator;
    use crate::config::Config;
    use crate::temporary::Temporary;
    use crate::types::ReduceOp;

    /// At once and not, with a message from any rank, and one that fails.
    fn play(comm: &Communicator) {
        let (mut short, mut long) = ([1.0_f32; 4], vec![1.0_f32; 1 << 18]);
        comm.all_reduce(&mut short, ReduceOp::Sum).unwrap();
        comm.all_reduce(&mut long, ReduceOp::Sum).unwrap();
        comm.broadcast(&mut short, 1).unwrap();
        let peer = 1 - comm.rank();
        let from = (comm.rank() == 0).then_some(peer);
        comm.send_receive_slices((&long, peer), (&mut vec![0.0; 1 << 18], from), 7)
            .unwrap();
        match comm.rank() {
            0 => comm.abort("enough"),
            _ => drop(comm.all_reduce(&mut long, ReduceOp::Sum).unwrap_err()),
        }
    }

    #[test]
    fn every_operation_is_in_the_trace_with_what_is_known_of_it() {
        let folder = Temporary::new();
        let mut config = Config::default();
        config.set("trace", folder.0.to_str().unwrap()).unwrap();
        let ranks = Communicator::local(2, &config).unwrap();
        thread::scope(|scope| {
            for comm in &ranks {
                scope.spawn(move || play(comm));
            }
        });
        drop(ranks);
        let files: Vec<_> = fs::read_dir(&folder.0).unwrap().collect();
        // One process.
        assert_eq!(files.len(), 1);
        let bytes = fs::read(files[0].as_ref().unwrap().path()).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        let count = |word: &str| text.matches(word).count();
        assert_eq!(count("all_reduce"), 5);
        assert_eq!(count("broadcast"), 2);
        // Each operation that a message is, by its name and its annotations.
        assert_eq!((count("send"), count("recv")), (2, 2));
        assert_eq!((count("tag"), count("peer")), (4, 4));
        assert_eq!(count("root"), 2);
        assert_eq!(count("algorithm"), 7);
        assert_eq!(count("failure"), 1);
        assert!(text.contains("enough"));
    }
}
