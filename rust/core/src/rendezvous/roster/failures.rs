//! Why there is no group, in words: which ranks are concerned, in what they differ, and what to try.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::{Code, Error, Result};
use crate::rendezvous::introduction::Introduction;
use crate::rendezvous::records::{Entry, Refused, Row};
use crate::types::Rank;

/// The error for what the store holds as the entry or the verdict of `rank`.
pub(super) fn refusal(me: &Introduction, rank: Rank, why: Refused) -> Error {
    let own = me.rank;
    let (code, message) = match why {
        Refused::Malformed => (
            Code::Untrusted,
            format!("what the store holds for rank {rank} is not what a rank would write"),
        ),
        Refused::Version(version) => (
            Code::Mismatch,
            format!(
                "rank {rank} runs unisono {version}, but rank {own} runs {}: install the same on all hosts",
                me.version
            ),
        ),
        Refused::SecretUse(theirs) => {
            let (with, without) = if theirs { (rank, own) } else { (own, rank) };
            (
                Code::Mismatch,
                format!(
                    "rank {with} has a secret (of its secret_file or its launcher), but rank {without} has none: give all \
                     ranks the same secret_file, or start all of them by one launcher"
                ),
            )
        }
        Refused::SecretDiffers => (
            Code::Mismatch,
            format!(
                "the secret of rank {rank} differs from the one of rank {own}: give all ranks the same secret_file, \
                 and start all of them by one launcher"
            ),
        ),
    };
    Error::new(code, message).with_peer(rank)
}

/// Checks that the entry of another rank has the settings of `mine`, this rank's.
pub(super) fn compare_settings(me: &Introduction, mine: &Entry, other: &Entry) -> Result<()> {
    let settings =
        |entry: &Entry| -> BTreeMap<String, String> { entry.settings.iter().cloned().collect() };
    let rank = other.rank as Rank;
    let (mine, theirs) = (settings(mine), settings(other));
    for name in mine.keys().chain(theirs.keys()) {
        let (mine, theirs) = (mine.get(name), theirs.get(name));
        if mine != theirs {
            let shown = |value: Option<&String>| value.map_or("unset".to_owned(), String::clone);
            let message = format!(
                "setting {name} must be the same on all ranks, but is {} on rank {} and {} on rank {rank} ({})",
                shown(mine),
                me.rank,
                shown(theirs),
                other.row.hostname
            );
            let error = Error::new(Code::Mismatch, message).with_field(name.clone());
            return Err(error.with_peer(rank));
        }
    }
    Ok(())
}

pub(super) fn wrong_world(me: &Introduction, rank: Rank, world: usize) -> Error {
    let message = format!(
        "rank {rank} was started with world size {world}, but rank {} with {}",
        me.rank, me.world
    );
    Error::new(Code::Mismatch, message)
        .with_field("world size")
        .with_peer(rank)
}

pub(super) fn claimed_twice(me: &Introduction, other: &Row) -> Error {
    let Row { pid, hostname, .. } = other;
    let Introduction {
        rank,
        pid: my_pid,
        hostname: my_host,
        ..
    } = me;
    Error::invalid(format!(
        "two processes claim rank {rank}: process {my_pid} on {my_host} and process {pid} on {hostname}; \
         give each its own rank, and each job a rendezvous of its own"
    ))
}

/// `error`, which may be due to `relic`, in which an earlier job may have left what its ranks said.
pub(super) fn left_over(mut error: Error, relic: &str) -> Error {
    error.message.push_str(&format!(
        "; or {relic} is left over from an earlier job that was killed: then remove it, or give this job another"
    ));
    error
}

/// The error of a rank whose time is over while the ranks `missing` have not come.
pub(super) fn incomplete(me: &Introduction, timeout: Duration, missing: &[Rank]) -> Error {
    let world = me.world;
    let seconds = timeout.as_secs_f64();
    let came: Vec<Rank> = (0..world)
        .filter(|rank| missing.binary_search(rank).is_err())
        .collect();
    let (who, whose) = match missing {
        [0] => (
            format!("rank 0 of {world}, which the others wait for, has not come"),
            "its",
        ),
        [one] => (format!("rank {one} of {world} did not join"), "its"),
        _ => (
            format!("ranks {} of {world} did not join", list(missing)),
            "their",
        ),
    };
    let those = if came.len() == 1 { "rank" } else { "ranks" };
    let (is, process) = if whose == "its" {
        ("is", "process")
    } else {
        ("are", "processes")
    };
    let use_it = if whose == "its" { "does it" } else { "do they" };
    let message = format!(
        "{who} within {seconds} s; {those} {} did; {is} {whose} {process} running, and {use_it} use the same address?",
        list(&came)
    );
    Error::new(Code::Timeout, message)
        .with_missing(missing)
        .with_peer(missing.first().copied().unwrap_or_default())
}

/// Ranks in words: `0, 1, 4-9`; not more than a line of them.
pub(super) fn list(ranks: &[Rank]) -> String {
    let mut runs: Vec<(Rank, Rank)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let shown = runs
        .iter()
        .take(16)
        .map(|&(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first}-{last}"),
        });
    let mut text = shown.collect::<Vec<_>>().join(", ");
    let more: usize = runs
        .iter()
        .skip(16)
        .map(|(first, last)| last - first + 1)
        .sum();
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    text
}
