//! Failures in words: abort notices, reports of waits, the record of recent operations.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use crate::engine::collective::header::Fingerprint;
use crate::engine::work::WorkState;
use crate::error::Error;
use crate::transport::Notice;
use crate::types::{Collective, DataType, Rank};

/// The last operations of a group on this rank, for reports.
#[derive(Debug)]
pub(crate) struct Recorder {
    operations: Vec<Record>,
    capacity: usize,
    /// Where the oldest is, once there are as many as are kept.
    oldest: usize,
}

#[derive(Debug)]
struct Record {
    print: Print,
    /// `None` for one that ended as soon as it had begun.
    work: Option<Arc<WorkState>>,
}

/// The description of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Print {
    Collective(Fingerprint),
    Message(MessagePrint),
    /// It is another part's of this library, and known by its name alone.
    Named,
}

/// The description of a send or a receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MessagePrint {
    pub(crate) sequence: u64,
    pub(crate) collective: Collective,
    pub(crate) dtype: DataType,
    /// The other rank; `None`: any.
    pub(crate) peer: Option<u32>,
    pub(crate) tag: u64,
    /// Of the buffer.
    pub(crate) bytes: usize,
}

impl Print {
    fn collective(&self) -> Option<&Fingerprint> {
        match self {
            Self::Collective(print) => Some(print),
            _ => None,
        }
    }

    /// In words for a program. A receive from any rank has its peer once a message has come.
    fn describe(&self, work: Option<&WorkState>) -> Option<Value> {
        Some(match self {
            Self::Collective(print) => json!({
                "number": print.sequence,
                "name": Collective::from_number(print.collective)?.name(),
                "dtype": DataType::from_number(print.dtype).map(DataType::name),
                "count": print.count,
                "uneven": print.counts != 0,
            }),
            Self::Message(print) => {
                let received = work.and_then(WorkState::received);
                let bytes = received.map_or(print.bytes, |it| it.bytes);
                let known = print.peer.map(|peer| peer as Rank);
                json!({
                    "number": print.sequence,
                    "name": print.collective.name(),
                    "dtype": print.dtype.name(),
                    "count": bytes / print.dtype.size(),
                    "peer": received.map(|it| it.source).or(known),
                    "tag": print.tag,
                })
            }
            Self::Named => return None,
        })
    }

    fn name(&self) -> String {
        match self {
            Self::Collective(print) => print.name(),
            Self::Message(print) => format!("{} #{}", print.collective, print.sequence),
            Self::Named => String::new(),
        }
    }
}

impl Recorder {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            operations: Vec::with_capacity(capacity),
            capacity,
            oldest: 0,
        }
    }

    pub(crate) fn record(&mut self, work: &Arc<WorkState>, print: Print) {
        self.push(Record {
            print,
            work: Some(Arc::clone(work)),
        });
    }

    /// Records an operation that has been carried out at once.
    pub(crate) fn note(&mut self, print: Print) {
        self.push(Record { print, work: None });
    }

    fn push(&mut self, record: Record) {
        if self.operations.len() < self.capacity {
            self.fill(record);
        } else if let Some(oldest) = self.operations.get_mut(self.oldest) {
            *oldest = record;
            self.oldest += 1;
            if self.oldest == self.capacity {
                self.oldest = 0;
            }
        }
    }

    /// Apart, so that the registers which growth needs are not saved in every call.
    #[cold]
    #[inline(never)]
    fn fill(&mut self, record: Record) {
        self.operations.push(record);
    }

    /// Every record, the oldest first.
    fn in_order(&self) -> impl DoubleEndedIterator<Item = &Record> {
        let (newer, older) = self.operations.split_at(self.oldest);
        older.iter().chain(newer)
    }

    /// The fingerprint of the collective with this number, if it is still kept.
    pub(crate) fn fingerprint(&self, sequence: u64) -> Option<Fingerprint> {
        let prints = self.in_order().rev();
        let mut prints = prints.filter_map(|record| record.print.collective().copied());
        prints.find(|print| print.sequence == sequence)
    }

    /// The fingerprints of collectives.
    #[cfg(any(test, feature = "simulate"))]
    pub(crate) fn fingerprints(&self) -> impl Iterator<Item = Fingerprint> {
        let prints = self.in_order();
        prints.filter_map(|record| record.print.collective().copied())
    }

    /// The collectives and the messages, oldest first, at the time `now`, for flight records. No clock was read for those
    /// that were carried out at once, so they have no times.
    pub(crate) fn recent(&self, now: Instant) -> Vec<Value> {
        let records = self.in_order().filter_map(|record| {
            let mut told = record.print.describe(record.work.as_deref())?;
            let work = record.work.as_ref();
            told["state"] = match work.map(|work| work.result()) {
                None | Some(Some(Ok(()))) => "completed",
                Some(Some(Err(_))) => "failed",
                Some(None) => "started",
            }
            .into();
            let age = work.map(|work| now.saturating_duration_since(work.started));
            told["seconds"] = age.map(|age| age.as_secs_f64()).into();
            let took = work.and_then(|work| work.duration());
            told["took"] = took.map(|took| took.as_secs_f64()).into();
            Some(told)
        });
        records.collect()
    }

    /// One line per operation, oldest first, at the time `now`.
    pub(crate) fn lines(&self, now: Instant) -> Vec<String> {
        self.in_order()
            .map(|Record { print, work }| {
                let Some(work) = work else {
                    return format!("{} completed at once", print.name());
                };
                let age = now.saturating_duration_since(work.started).as_secs_f64();
                let state = match (work.result(), work.duration()) {
                    (Some(Ok(())), Some(took)) => {
                        format!("completed in {:.3} ms", took.as_secs_f64() * 1e3)
                    }
                    (Some(Err(error)), _) => format!("failed: {}", error.message),
                    _ => "under way".to_owned(),
                };
                format!("{} started {age:.3} s ago, {state}", work.name())
            })
            .collect()
    }
}

/// The notice that tells the other ranks of `error`, noticed first by `origin`, which `number` names.
pub(crate) fn notice(error: &Error, (origin, number): (Rank, &str)) -> Notice {
    let message = match &error.operation {
        Some(operation) => format!("{operation} on {number}: {}", error.message),
        None => error.message.clone(),
    };
    Notice {
        code: error.code,
        origin: origin as u32,
        culprit: error.peer.map(|rank| rank as u32),
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::work::Received;
    use crate::types::Collective;

    #[test]
    fn the_last_operations_are_kept_in_order() {
        for capacity in [0, 1, 3] {
            let mut recorder = Recorder::new(capacity);
            for sequence in 1..=7 {
                recorder.note(Print::Collective(Fingerprint {
                    sequence,
                    collective: Collective::Barrier as u8,
                    ..Fingerprint::default()
                }));
                let kept = (sequence + 1).saturating_sub(capacity as u64).max(1)..=sequence;
                let expected: Vec<_> = kept
                    .map(|number| format!("barrier #{number} completed at once"))
                    .collect();
                assert_eq!(recorder.lines(Instant::now()), expected, "of {capacity}");
            }
        }
    }

    #[test]
    fn messages_are_kept_with_their_peers_tags_and_times() {
        let mut recorder = Recorder::new(8);
        let print = MessagePrint {
            sequence: 1,
            collective: Collective::Send,
            dtype: DataType::Float32,
            peer: Some(3),
            tag: 7,
            bytes: 40,
        };
        recorder.note(Print::Message(print));
        let start = Instant::now();
        let later = |ms| start + std::time::Duration::from_millis(ms);
        let limit = std::time::Duration::ZERO;
        let work = Arc::new(WorkState::new(Collective::Recv, 2, (start, limit), None));
        let any = MessagePrint {
            sequence: 2,
            collective: Collective::Recv,
            peer: None,
            ..print
        };
        recorder.record(&work, Print::Message(any));
        recorder.record(&work, Print::Named);
        let told = recorder.recent(later(3000));
        assert_eq!(told.len(), 2);
        let [sent, received] = &told[..] else {
            panic!("{told:?}");
        };
        let expected = json!({
            "number": 1, "name": "send", "dtype": "float32", "count": 10, "peer": 3, "tag": 7,
            "state": "completed", "seconds": null, "took": null
        });
        assert_eq!(*sent, expected);
        assert_eq!(
            (&received["peer"], &received["state"]),
            (&Value::Null, &json!("started"))
        );
        assert_eq!(
            (&received["seconds"], &received["took"]),
            (&json!(3.0), &Value::Null)
        );
        work.set_received(Received {
            source: 5,
            bytes: 8,
            dtype: DataType::Float32,
        });
        work.finish(Ok(()), later(1000));
        let received = &recorder.recent(later(4000))[1];
        assert_eq!(
            (&received["peer"], &received["count"]),
            (&json!(5), &json!(2))
        );
        assert_eq!(
            (&received["seconds"], &received["took"]),
            (&json!(4.0), &json!(1.0))
        );
    }
}
