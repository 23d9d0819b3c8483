//! For whom this rank has waited, and how long: kept from the first operation on, for `stats`, `unisono status`, the log
//! and the errors of timeouts.
//!
//! A wait counts once a thread that drives an operation has looked in vain for a while (64 yields: tens of microseconds where
//! there are cores for all). An operation that ends within that costs nothing here. A collective waits for the peer of its
//! next step, or for all that are missing where ranks meet. The peer may itself wait for another, as in a ring; so a rank is
//! late for which others wait and which waits for none, and `unisono status` compares them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::engine::traffic::Row;
use crate::types::Rank;

/// Octaves of microseconds in a histogram, and its bars in each.
const OCTAVES: usize = 32;
const BARS: usize = 4;

/// The yields of a thread before it is looked for whom it waits: a message between ranks that share cores takes some.
const FIRST_LOOK: u32 = 16;

/// The shortest sum of waits that the log tells of.
const WORTH_TELLING: Duration = Duration::from_secs(1);

/// The ranks that are named of operations of one kind and length.
const RANKS_NAMED: usize = 4;

/// How often a rank has been the last before an error says so.
const NAMED_FROM: u64 = 10;

/// A window that stands on a group: it knows of what this rank does there and is no operation of the group.
pub(crate) trait OnGroup: Send + Sync {
    /// Its waits for signals, and its transfers under way.
    fn under_way(&self) -> Vec<OfWindow>;
}

/// A wait for a signal, or a transfer of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct OfWindow {
    pub(crate) name: &'static str,
    pub(crate) peer: Rank,
    pub(crate) since: Instant,
}

/// The waits of a rank in its group.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    peers: BTreeMap<Rank, Awaited>,
    /// By the kind and the length of the operation.
    operations: BTreeMap<Row, Waiting>,
    total: Duration,
    /// Since when the thread waits, and for which ranks; and its yields since something has moved.
    since: Option<Instant>,
    yields: u32,
    awaited: Vec<Rank>,
    /// How long the operations that have not ended have waited.
    spell: Duration,
}

/// The waits of operations of one kind and length.
#[derive(Debug, Default)]
struct Waiting {
    /// How many have waited, and how long.
    times: u64,
    time: Duration,
    /// By rank: those that have waited longest for it, and how long all have waited for it.
    peers: BTreeMap<Rank, (u64, Duration)>,
}

impl Waiting {
    /// The ranks that these have waited for, those that have cost most time first.
    fn record(&self, number: impl Fn(Rank) -> Value) -> Value {
        let mut ranked: Vec<_> = self.peers.iter().collect();
        ranked.sort_by_key(|(rank, (_, time))| (std::cmp::Reverse(*time), **rank));
        let ranks = ranked.into_iter().take(RANKS_NAMED);
        let ranks = ranks.map(|(rank, (last, time))| {
            json!({"rank": number(*rank), "seconds": time.as_secs_f64(), "last": last})
        });
        json!({
            "operations": self.times,
            "seconds": self.time.as_secs_f64(),
            "by_rank": ranks.collect::<Vec<_>>(),
        })
    }
}

/// The waits for one rank.
#[derive(Debug)]
struct Awaited {
    /// Operations that have waited for it, and those of them that have waited longest for it.
    times: u64,
    last: u64,
    time: Duration,
    longest: Duration,
    /// How many operations have waited for it, by how long.
    bars: [u32; OCTAVES * BARS],
    /// In the operations that have not ended.
    spell: Duration,
}

impl Default for Awaited {
    fn default() -> Self {
        Self {
            times: 0,
            last: 0,
            time: Duration::ZERO,
            longest: Duration::ZERO,
            bars: [0; OCTAVES * BARS],
            spell: Duration::ZERO,
        }
    }
}

impl Waits {
    /// Whether it is time to see for whom the thread waits: at its 16th yield, the 32nd and so on. A rank that comes between
    /// two looks counts until the next: for twice as long as it was missing at most.
    pub(crate) fn is_time_to_look(&mut self) -> bool {
        self.yields = self.yields.wrapping_add(1);
        self.yields >= FIRST_LOOK && self.yields.is_power_of_two()
    }

    /// Room for the ranks that the thread will wait for.
    pub(crate) fn room(&mut self) -> Vec<Rank> {
        self.awaited.clear();
        std::mem::take(&mut self.awaited)
    }

    /// The thread begins to wait for these ranks.
    pub(crate) fn begin(&mut self, now: Instant, mut awaited: Vec<Rank>) {
        awaited.sort_unstable();
        awaited.dedup();
        self.since = (!awaited.is_empty()).then_some(now);
        self.awaited = awaited;
    }

    /// Something has moved.
    #[inline]
    pub(crate) fn moved(&mut self, now: impl FnOnce() -> Instant) {
        self.yields = 0;
        self.pause(now);
    }

    /// The thread looks up.
    #[inline]
    pub(crate) fn pause(&mut self, now: impl FnOnce() -> Instant) {
        if let Some(since) = self.since.take() {
            self.count(now().saturating_duration_since(since));
        }
    }

    #[cold]
    fn count(&mut self, waited: Duration) {
        self.spell += waited;
        for peer in &self.awaited {
            self.peers.entry(*peer).or_default().spell += waited;
        }
    }

    /// For which ranks the operations that have not ended have waited, and how long, before [`Waits::end`] counts that.
    pub(crate) fn spells(&self) -> Vec<(Rank, Duration)> {
        let peers = self.peers.iter().map(|(rank, it)| (*rank, it.spell));
        peers.filter(|(_, spell)| !spell.is_zero()).collect()
    }

    /// An operation has ended. Returns how long it has waited.
    #[inline]
    pub(crate) fn end(&mut self, row: Row) -> Duration {
        match self.spell.is_zero() {
            true => Duration::ZERO,
            false => self.end_spell(row),
        }
    }

    #[cold]
    fn end_spell(&mut self, row: Row) -> Duration {
        let whole = std::mem::take(&mut self.spell);
        self.total += whole;
        let waiting = self.operations.entry(row).or_default();
        waiting.times += 1;
        waiting.time += whole;
        let longest = self.peers.values().map(|peer| peer.spell).max();
        for (rank, peer) in &mut self.peers {
            let spell = std::mem::take(&mut peer.spell);
            if spell.is_zero() {
                continue;
            }
            let is_last = u64::from(Some(spell) == longest);
            let (last, time) = waiting.peers.entry(*rank).or_default();
            (*last, *time) = (*last + is_last, *time + spell);
            peer.times += 1;
            peer.last += is_last;
            peer.time += spell;
            peer.longest = peer.longest.max(spell);
            let bar = &mut peer.bars[bar(spell)];
            *bar = bar.saturating_add(1);
        }
        whole
    }

    /// The operations that have waited.
    fn times(&self) -> u64 {
        self.operations.values().map(|waiting| waiting.times).sum()
    }

    /// The ranks that it has waited for, the one that has cost most time first.
    fn ranked(&self) -> Vec<(Rank, &Awaited)> {
        let mut ranked: Vec<_> = self.peers.iter().map(|(rank, it)| (*rank, it)).collect();
        ranked.sort_by_key(|(rank, it)| (std::cmp::Reverse(it.time), *rank));
        ranked
    }

    /// In words for a program; `describe` names a rank.
    pub(crate) fn record(&self, describe: impl Fn(Rank) -> Value) -> Value {
        let ranks = self.ranked().into_iter().map(|(rank, it)| {
            let mut record = describe(rank);
            record["seconds"] = it.time.as_secs_f64().into();
            record["operations"] = it.times.into();
            record["last"] = it.last.into();
            record["median_seconds"] = it.median().as_secs_f64().into();
            record["longest_seconds"] = it.longest.as_secs_f64().into();
            record
        });
        let ranks: Vec<_> = ranks.collect();
        json!({
            "seconds": self.total.as_secs_f64(),
            "operations": self.times(),
            "by_rank": ranks,
            "by_operation": self.by_operation(|rank| describe(rank)["rank"].take()),
        })
    }

    /// By the name of the operation, and by its length: how many have waited, how long, and for which ranks.
    fn by_operation(&self, number: impl Fn(Rank) -> Value) -> Value {
        let mut kinds: BTreeMap<&str, (u64, Duration, Vec<Value>)> = BTreeMap::new();
        for (row, waiting) in &self.operations {
            let (times, time, by_size) = kinds.entry(row.name()).or_default();
            (*times, *time) = (*times + waiting.times, *time + waiting.time);
            let mut record = waiting.record(&number);
            record["up_to"] = row.up_to().into();
            by_size.push(record);
        }
        let kinds = kinds.into_iter().map(|(name, (times, time, by_size))| {
            let seconds = time.as_secs_f64();
            let record = json!({"operations": times, "seconds": seconds, "by_size": by_size});
            (name.to_owned(), record)
        });
        Value::Object(kinds.collect())
    }

    /// The sentence about the rank that has cost most time, of `all` operations, if it is worth one.
    pub(crate) fn sentence(&self, all: u64, name: impl Fn(Rank) -> String) -> Option<String> {
        let ranked = self.ranked();
        let (rank, worst) = ranked.first().filter(|(_, it)| it.time >= WORTH_TELLING)?;
        Some(format!(
            "{} was waited for longest in {} of {all} operations, {:.1} ms in the median; in all this rank waited {:.1} s for \
             it, of {:.1} s",
            name(*rank),
            worst.last,
            worst.median().as_secs_f64() * 1e3,
            worst.time.as_secs_f64(),
            self.total.as_secs_f64(),
        ))
    }

    /// The history of a rank that an operation has waited for too long, if there is one to tell.
    pub(crate) fn history(&self, rank: Rank) -> Option<String> {
        let it = self
            .peers
            .get(&rank)
            .filter(|it| it.last >= NAMED_FROM && 2 * it.last > self.times())?;
        Some(format!(
            "was also waited for longest in {} of the {} operations before that waited, {:.1} ms in the median",
            it.last,
            self.times(),
            it.median().as_secs_f64() * 1e3
        ))
    }
}

impl Awaited {
    /// The median of the waits for it, to a fifth or so.
    fn median(&self) -> Duration {
        let mut left = self.times.div_ceil(2);
        for (at, count) in self.bars.iter().enumerate() {
            left = left.saturating_sub(u64::from(*count));
            if left == 0 {
                return middle(at).min(self.longest);
            }
        }
        self.longest
    }
}

/// The bar of a wait.
fn bar(wait: Duration) -> usize {
    let microseconds = wait.as_micros().max(1);
    let octave = microseconds.ilog2() as usize;
    let within = ((microseconds * BARS as u128) >> octave) as usize - BARS;
    (octave * BARS + within).min(OCTAVES * BARS - 1)
}

/// The middle of the waits of a bar.
fn middle(bar: usize) -> Duration {
    let within = (BARS + bar % BARS) as f64 + 0.5;
    let octave = (bar / BARS) as f64;
    Duration::from_secs_f64(within / BARS as f64 * octave.exp2() * 1e-6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::traffic::TrafficClass;
    use crate::types::Collective;

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn medians_are_near() {
        for wait in [1, 3, 10, 100, 4_000, 70_000, 3_000_000_u64] {
            let wait = Duration::from_micros(wait);
            let near = middle(bar(wait)).as_secs_f64() / wait.as_secs_f64();
            assert!((0.8..1.25).contains(&near), "{wait:?}: {near}");
        }
        assert_eq!(bar(Duration::from_secs(1 << 40)), OCTAVES * BARS - 1);
    }

    /// Of two ranks one comes after a millisecond, and the other after five.
    #[test]
    fn the_rank_that_comes_last_is_named() {
        let (start, mut waits) = (Instant::now(), Waits::default());
        let name = |rank: Rank| format!("rank {rank}");
        let row = |collective, bytes| TrafficClass::of(collective, bytes).row();
        for round in 0..300 {
            waits.begin(start, vec![2, 1, 2]);
            waits.pause(|| start + ms(1));
            waits.begin(start + ms(1), vec![2]);
            waits.pause(|| start + ms(5));
            let bytes = if round < 100 { 8 } else { 4096 };
            assert_eq!(waits.end(row(Collective::AllReduce, bytes)), ms(5));
            // It did not wait.
            waits.begin(start, Vec::new());
            waits.pause(|| start + ms(9));
            assert_eq!(waits.end(row(Collective::Barrier, 0)), ms(0));
        }
        let record = waits.record(|rank| json!({"rank": rank}));
        assert_eq!(record["operations"], 300);
        assert!((record["seconds"].as_f64().unwrap() - 1.5).abs() < 1e-6);
        assert_eq!(record["by_operation"]["all_reduce"]["operations"], 300);
        assert!(record["by_operation"]["barrier"].is_null());
        let [short, long] = &record["by_operation"]["all_reduce"]["by_size"]
            .as_array()
            .unwrap()[..]
        else {
            panic!("{record}");
        };
        assert_eq!(
            (&short["up_to"], &short["operations"]),
            (&json!(256), &json!(100))
        );
        assert_eq!(
            (&long["up_to"], &long["operations"]),
            (&json!(4096), &json!(200))
        );
        assert!((long["seconds"].as_f64().unwrap() - 1.0).abs() < 1e-6);
        assert_eq!(long["by_rank"][0]["rank"], 2);
        assert_eq!(long["by_rank"][0]["last"], 200);
        assert!((long["by_rank"][1]["seconds"].as_f64().unwrap() - 0.2).abs() < 1e-6);
        let [first, second] = &record["by_rank"].as_array().unwrap()[..] else {
            panic!("{record}");
        };
        assert_eq!((&first["rank"], &first["last"]), (&json!(2), &json!(300)));
        assert_eq!((&second["rank"], &second["last"]), (&json!(1), &json!(0)));
        let median = first["median_seconds"].as_f64().unwrap();
        assert!((0.004..0.006).contains(&median), "{median}");
        let sentence = waits.sentence(600, name).unwrap();
        assert!(
            sentence.starts_with("rank 2 was waited for longest in 300 of 600 operations, "),
            "{sentence}"
        );
        assert!(
            waits
                .history(2)
                .unwrap()
                .contains("300 of the 300 operations")
        );
        assert_eq!(waits.history(1), None);
        assert_eq!(Waits::default().sentence(9, name), None);
    }
}
