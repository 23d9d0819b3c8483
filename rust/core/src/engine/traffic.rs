//! The operations that a rank has called, with their bytes and the time that they moved data, by kind and length: for `stats`
//! and metrics. Counted when they begin, in a few instructions; the time when one ends that others could drive, since no clock
//! is read for shorter ones.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::types::Collective;

/// Each class of lengths ends at four times the bytes of the one before.
const CLASSES: usize = 20;

/// The longest messages of the first class, in bytes.
const FIRST: u64 = 256;

/// The counts of a rank in its group, by the places of operations.
#[derive(Debug)]
pub(crate) struct Traffic {
    counts: [Count; CLASSES * Collective::ALL.len()],
    times: [Time; CLASSES * Collective::ALL.len()],
    /// The time up to then belongs to operations that have ended.
    counted_to: Option<Instant>,
}

/// Where an operation counts: its kind, and the class of its length.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TrafficClass {
    at: usize,
    bytes: u64,
}

impl TrafficClass {
    /// Of an operation whose longer buffer has this length.
    pub(crate) fn of(collective: Collective, bytes: usize) -> Self {
        let bytes = bytes as u64;
        let at = (collective as usize - 1) * CLASSES + class(bytes);
        Self { at, bytes }
    }

    /// The kind and the class, without the length.
    pub(crate) fn row(self) -> Row {
        Row(self.at)
    }
}

/// A kind of operations and a class of lengths; the classes of one kind follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Row(usize);

impl Row {
    /// The name of the operations.
    pub(crate) fn name(self) -> &'static str {
        Collective::ALL[self.0 / CLASSES].name()
    }

    /// The longest of the class, in bytes; `None` of the last one.
    pub(crate) fn up_to(self) -> Option<u64> {
        let class = self.0 % CLASSES;
        (class + 1 < CLASSES).then(|| FIRST << (2 * class))
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    operations: u64,
    bytes: u64,
}

/// The time of collectives that have ended well, and were not carried out at once.
#[derive(Clone, Copy, Debug, Default)]
struct Time {
    operations: u64,
    moved: Duration,
}

impl Default for Traffic {
    fn default() -> Self {
        Self {
            counts: [Count::default(); CLASSES * Collective::ALL.len()],
            times: [Time::default(); CLASSES * Collective::ALL.len()],
            counted_to: None,
        }
    }
}

impl Traffic {
    /// An operation begins.
    #[inline]
    pub(crate) fn count(&mut self, place: TrafficClass) {
        let count = &mut self.counts[place.at];
        count.operations += 1;
        count.bytes += place.bytes;
    }

    /// A collective ends that began at `started` and was not carried out at once. It moved data while it did not wait for other
    /// ranks: `waited`. Of several under way the one that ends has the time since another one ended, so that no time counts
    /// twice.
    pub(crate) fn time(
        &mut self,
        place: TrafficClass,
        (started, now): (Instant, Instant),
        waited: Duration,
    ) {
        let from = self
            .counted_to
            .replace(now)
            .map_or(started, |to| to.max(started));
        let time = &mut self.times[place.at];
        time.operations += 1;
        time.moved += now.saturating_duration_since(from).saturating_sub(waited);
    }

    /// By the name of each operation: how many there were, their bytes, how many of them were timed and for how long these
    /// moved data, and all of it by the longest of each class (`None`: longer than all).
    pub(crate) fn record(&self) -> Value {
        let mut record = Map::new();
        let rows = self.counts.iter().zip(&self.times).enumerate();
        let rows: Vec<_> = rows
            .map(|(at, (count, time))| (Row(at), *count, *time))
            .collect();
        for classes in rows.chunks_exact(CLASSES) {
            let used = classes.iter().filter(|(_, count, _)| count.operations > 0);
            let by_size: Vec<_> = used
                .map(|(row, count, time)| {
                    let mut record = described(*count, *time);
                    record["up_to"] = row.up_to().into();
                    record
                })
                .collect();
            if !by_size.is_empty() {
                let mut all = (Count::default(), Time::default());
                for (_, count, time) in classes {
                    all.0.operations += count.operations;
                    all.0.bytes += count.bytes;
                    all.1.operations += time.operations;
                    all.1.moved += time.moved;
                }
                let mut all = described(all.0, all.1);
                all["by_size"] = by_size.into();
                record.insert(classes[0].0.name().to_owned(), all);
            }
        }
        Value::Object(record)
    }
}

fn described(count: Count, time: Time) -> Value {
    json!({
        "operations": count.operations,
        "bytes": count.bytes,
        "timed": time.operations,
        "moving_seconds": time.moved.as_secs_f64(),
    })
}

/// The class of a length.
fn class(bytes: u64) -> usize {
    let beyond = bytes.saturating_sub(1) / FIRST;
    let class = (u64::BITS - beyond.leading_zeros()).div_ceil(2) as usize;
    class.min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_length_has_a_class() {
        for (bytes, expected) in [(0, 0), (256, 0), (257, 1), (1024, 1), (1025, 2), (4096, 2)] {
            assert_eq!(class(bytes), expected, "{bytes}");
        }
        assert_eq!(class(u64::MAX), CLASSES - 1);
        let longest = FIRST << (2 * (CLASSES - 2));
        assert_eq!(
            (class(longest), class(longest + 1)),
            (CLASSES - 2, CLASSES - 1)
        );
    }

    #[test]
    fn counts_are_by_kind_and_length() {
        let mut traffic = Traffic::default();
        assert_eq!(traffic.record(), json!({}));
        for bytes in [8, 8, 1000, usize::MAX >> 1] {
            traffic.count(TrafficClass::of(Collective::AllReduce, bytes));
        }
        traffic.count(TrafficClass::of(Collective::Recv, 0));
        let record = traffic.record();
        assert_eq!(record["all_reduce"]["operations"], 4);
        assert_eq!(
            record["all_reduce"]["by_size"][0],
            json!({"up_to": 256, "operations": 2, "bytes": 16, "timed": 0, "moving_seconds": 0.0})
        );
        assert_eq!(record["all_reduce"]["by_size"][1]["up_to"], 1024);
        assert_eq!(record["all_reduce"]["by_size"][2]["up_to"], Value::Null);
        assert_eq!(record["recv"]["bytes"], 0);
    }

    /// Two operations are under way from the start on, and a third one begins when the others have ended.
    #[test]
    fn no_time_counts_twice() {
        let (start, mut traffic) = (Instant::now(), Traffic::default());
        let ms = Duration::from_millis;
        let (short, long) = (
            TrafficClass::of(Collective::AllReduce, 8),
            TrafficClass::of(Collective::AllReduce, 4096),
        );
        for place in [short, long, long] {
            traffic.count(place);
        }
        traffic.time(short, (start, start + ms(10)), ms(8));
        traffic.time(long, (start, start + ms(15)), ms(0));
        // It has waited for longer than it is known to be under way: the wait began before.
        traffic.time(long, (start + ms(20), start + ms(21)), ms(2));
        let record = &traffic.record()["all_reduce"];
        let moved = |record: &Value| (record["moving_seconds"].as_f64().unwrap() * 1e3).round();
        assert_eq!((&record["timed"], moved(record)), (&json!(3), 7.0));
        assert_eq!(record["by_size"][0]["timed"], 1);
        assert_eq!(
            (moved(&record["by_size"][0]), moved(&record["by_size"][1])),
            (2.0, 5.0)
        );
    }
}
