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
    /// Of a collective, and of a message that was carried out at once.
    fingerprint: Option<Fingerprint>,
    /// `None` for one that ended as soon as it had begun.
    work: Option<Arc<WorkState>>,
}

impl Recorder {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            operations: Vec::with_capacity(capacity),
            capacity,
            oldest: 0,
        }
    }

    pub(crate) fn record(&mut self, work: &Arc<WorkState>, fingerprint: Option<Fingerprint>) {
        self.push(Record {
            fingerprint,
            work: Some(Arc::clone(work)),
        });
    }

    /// Records an operation that has been carried out at once.
    pub(crate) fn note(&mut self, fingerprint: Fingerprint) {
        self.push(Record {
            fingerprint: Some(fingerprint),
            work: None,
        });
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
        self.in_order()
            .rev()
            .filter_map(|record| record.fingerprint)
            .find(|fingerprint| fingerprint.sequence == sequence && fingerprint.is_collective())
    }

    /// The fingerprints of those that have one.
    #[cfg(test)]
    pub(crate) fn fingerprints(&self) -> impl Iterator<Item = Fingerprint> {
        self.in_order().filter_map(|record| record.fingerprint)
    }

    /// The collectives, oldest first, for flight records.
    pub(crate) fn collectives(&self) -> Vec<Value> {
        let records = self.in_order().filter_map(|record| {
            let print = record.fingerprint.filter(Fingerprint::is_collective)?;
            let result = record.work.as_ref().map(|work| work.result());
            let state = match result {
                None | Some(Some(Ok(()))) => "completed",
                Some(Some(Err(_))) => "failed",
                Some(None) => "started",
            };
            Some(json!({
                "number": print.sequence,
                "name": Collective::from_number(print.collective)?.name(),
                "dtype": DataType::from_number(print.dtype).map(DataType::name),
                "count": print.count,
                "uneven": print.counts != 0,
                "state": state,
            }))
        });
        records.collect()
    }

    /// One line per operation, oldest first, at the time `now`.
    pub(crate) fn lines(&self, now: Instant) -> Vec<String> {
        self.in_order()
            .map(|Record { fingerprint, work }| {
                let Some(work) = work else {
                    let name = fingerprint.map_or_else(String::new, |print| print.name());
                    return format!("{name} completed at once");
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
    use crate::types::Collective;

    #[test]
    fn the_last_operations_are_kept_in_order() {
        for capacity in [0, 1, 3] {
            let mut recorder = Recorder::new(capacity);
            for sequence in 1..=7 {
                recorder.note(Fingerprint {
                    sequence,
                    collective: Collective::Barrier as u8,
                    ..Fingerprint::default()
                });
                let kept = (sequence + 1).saturating_sub(capacity as u64).max(1)..=sequence;
                let expected: Vec<_> = kept
                    .map(|number| format!("barrier #{number} completed at once"))
                    .collect();
                assert_eq!(recorder.lines(Instant::now()), expected, "of {capacity}");
            }
        }
    }
}
