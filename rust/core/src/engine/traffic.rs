//! The operations that a rank has called, with their bytes, by kind and length: for `stats` and metrics. Counted when they
//! begin, in a few instructions.

use serde_json::{Map, Value, json};

use crate::types::Collective;

/// Each class of lengths ends at four times the bytes of the one before.
const CLASSES: usize = 20;

/// The longest messages of the first class, in bytes.
const FIRST: u64 = 256;

/// The counts of a rank in its group, by the places of operations.
#[derive(Debug)]
pub(crate) struct Traffic([Count; CLASSES * Collective::ALL.len()]);

/// Where an operation counts: its kind, and the class of its length.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    at: usize,
    bytes: u64,
}

impl Place {
    /// Of an operation whose longer buffer has this length.
    pub(crate) fn of(collective: Collective, bytes: usize) -> Self {
        let bytes = bytes as u64;
        let at = (collective as usize - 1) * CLASSES + class(bytes);
        Self { at, bytes }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    operations: u64,
    bytes: u64,
}

impl Default for Traffic {
    fn default() -> Self {
        Self([Count::default(); CLASSES * Collective::ALL.len()])
    }
}

impl Traffic {
    /// An operation begins.
    #[inline]
    pub(crate) fn count(&mut self, place: Place) {
        let count = &mut self.0[place.at];
        count.operations += 1;
        count.bytes += place.bytes;
    }

    /// By the name of each operation: how many there were, their bytes, and both by the longest of each class (`None`: longer
    /// than all).
    pub(crate) fn record(&self) -> Value {
        let mut record = Map::new();
        let rows = self.0.chunks_exact(CLASSES);
        for (collective, classes) in Collective::ALL.into_iter().zip(rows) {
            let used = classes.iter().enumerate();
            let used = used.filter(|(_, count)| count.operations > 0);
            let by_size: Vec<_> = used
                .map(|(class, count)| {
                    let up_to = (class + 1 < CLASSES).then(|| FIRST << (2 * class));
                    json!({"up_to": up_to, "operations": count.operations, "bytes": count.bytes})
                })
                .collect();
            if !by_size.is_empty() {
                let total = |of: fn(&Count) -> u64| classes.iter().map(of).sum::<u64>();
                let operations = total(|count| count.operations);
                let bytes = total(|count| count.bytes);
                let all = json!({"operations": operations, "bytes": bytes, "by_size": by_size});
                record.insert(collective.name().to_owned(), all);
            }
        }
        Value::Object(record)
    }
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
            traffic.count(Place::of(Collective::AllReduce, bytes));
        }
        traffic.count(Place::of(Collective::Recv, 0));
        let record = traffic.record();
        assert_eq!(record["all_reduce"]["operations"], 4);
        assert_eq!(
            record["all_reduce"]["by_size"][0],
            json!({"up_to": 256, "operations": 2, "bytes": 16})
        );
        assert_eq!(record["all_reduce"]["by_size"][1]["up_to"], 1024);
        assert_eq!(record["all_reduce"]["by_size"][2]["up_to"], Value::Null);
        assert_eq!(record["recv"]["bytes"], 0);
    }
}
