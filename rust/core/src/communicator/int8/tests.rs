//! Sums in 8 bits, on hosts that are threads with names.

use std::time::{Duration, Instant};

use super::*;
use crate::config::Config;
use crate::error::Code;
use crate::rendezvous::memory::MemoryStore;

#[test]
fn shares_are_whole_blocks_and_all_there_is() {
    for count in [0, 1, BLOCK, 3 * BLOCK + 5, 1000 * BLOCK - 1] {
        for ranks in [1, 2, 3, 7] {
            let shares = shares(count, ranks);
            assert_eq!(shares.iter().sum::<usize>(), count);
            let whole = shares.iter().filter(|share| **share % BLOCK == 0).count();
            assert!(whole >= ranks - 1, "{shares:?}");
        }
    }
}

/// Ranks on the hosts that `hosts` names, one for each.
fn on_hosts(hosts: &[&str], body: impl Fn(&Communicator) + Sync) {
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        for (rank, host) in hosts.iter().enumerate() {
            let (store, body) = (&store, &body);
            let mut config = Config::default();
            config.set("timeout", "60").unwrap();
            config.set("host", host).unwrap();
            scope.spawn(move || {
                body(&Communicator::join(store, rank, hosts.len(), config).unwrap());
            });
        }
    });
}

fn contribution(rank: usize, count: usize) -> Vec<f32> {
    (0..count)
        .map(|at| ((at * 37 + rank * 101) % 1009) as f32 / 100.0 - 5.0)
        .collect()
}

#[test]
fn sums_between_hosts_are_as_near_as_promised_and_the_same_everywhere() {
    for hosts in [
        &["a", "b"][..],
        &["a", "a", "b", "b"],
        &["a", "b", "c", "a", "b", "c"],
        &["a", "a", "a", "b"],
        &["a", "a"],
    ] {
        let results = Mutex::new(Vec::new());
        on_hosts(hosts, |comm| {
            let counts = [1, 1000, 4 * BLOCK, 0, 3 * PIECE + 77];
            for (at, count) in counts.into_iter().enumerate() {
                let average = at % 2 == 1;
                let mut values = contribution(comm.rank(), count);
                comm.all_reduce_int8(&mut values, average).unwrap();
                results.lock().push((count, average, values));
            }
        });
        let results = results.into_inner();
        assert_eq!(results.len(), 5 * hosts.len());
        for (count, average, values) in &results {
            let (_, _, first) = results.iter().find(|one| one.0 == *count).unwrap();
            assert!(
                first
                    .iter()
                    .zip(values)
                    .all(|(a, b)| a.to_bits() == b.to_bits())
            );
            let ranks = hosts.len();
            let all: Vec<_> = (0..ranks).map(|rank| contribution(rank, *count)).collect();
            // No magnitude is above 5.1 for each rank: in the contributions of all hosts but one, and in the sum.
            let bound = 2.0 * ranks as f32 * 5.1 / 254.0 + 1e-4;
            for (at, value) in values.iter().enumerate() {
                let sum: f32 = all.iter().map(|one| one[at]).sum();
                let divisor = if *average { ranks as f32 } else { 1.0 };
                let off = (value * divisor - sum).abs();
                assert!(off <= bound, "{hosts:?}: {value} is off by {off} at {at}");
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    on_hosts(&["a", "b"], |comm| {
        let mut values = vec![1.0; 3 * BLOCK];
        if comm.rank() == 1 {
            values[BLOCK] = f32::INFINITY;
        }
        comm.all_reduce_int8(&mut values, false).unwrap();
        assert!(values[..BLOCK].iter().all(|value| *value == 2.0));
        assert!(values[BLOCK..2 * BLOCK].iter().all(|value| value.is_nan()));
        assert!(values[2 * BLOCK..].iter().all(|value| *value == 2.0));
    });
}

/// However a call fails on one rank, it does on all, soon.
#[test]
fn all_ranks_hear_of_a_failure() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum How {
        Abort,
        Leave,
        Count,
        Operator,
        Nothing,
    }
    for how in [
        How::Abort,
        How::Leave,
        How::Count,
        How::Operator,
        How::Nothing,
    ] {
        for hosts in [&["a", "a", "b", "b"][..], &["a", "b", "b"], &["a", "a"]] {
            on_hosts(hosts, |comm| {
                let count = PIECE + 5;
                comm.all_reduce_int8(&mut vec![1.0; count], false).unwrap();
                let since = Instant::now();
                let failed = match (comm.rank(), how) {
                    (0, How::Abort) => {
                        comm.abort("enough");
                        return;
                    }
                    (0, How::Leave) => return,
                    (0, How::Count) => comm.all_reduce_int8(&mut vec![1.0; PIECE], false),
                    (0, How::Nothing) => comm.all_reduce_int8(&mut [], false),
                    (0, How::Operator) => comm.all_reduce_int8(&mut vec![1.0; count], true),
                    _ => comm.all_reduce_int8(&mut vec![1.0; count], false),
                };
                let error = failed.expect_err("another rank is in none, or in another call");
                let expected: &[Code] = match how {
                    How::Abort => &[Code::Aborted],
                    How::Leave => &[Code::PeerLost, Code::Aborted],
                    _ => &[Code::Mismatch],
                };
                assert!(expected.contains(&error.code), "{how:?} {hosts:?}: {error}");
                assert!(since.elapsed() < Duration::from_secs(10), "{how:?}: late");
                assert!(comm.error().is_some(), "{how:?}: the communicator lives on");
                comm.all_reduce_int8(&mut [1.0], false).unwrap_err();
            });
        }
    }
}

/// Contributions that cancel show what is rounded.
#[test]
fn what_cancels_is_off_by_the_contributions_that_were_rounded() {
    for (hosts, rounded) in [(&["a", "a", "b", "b"][..], 0), (&["a", "a", "a", "b"], 3)] {
        on_hosts(hosts, |comm| {
            let sign = [1.0, -1.0, 0.0, 0.0][comm.rank()];
            let values = contribution(7, 1000).into_iter();
            let mut values: Vec<f32> = values.map(|value| sign * value).collect();
            comm.all_reduce_int8(&mut values, false).unwrap();
            let bound = rounded as f32 * 5.1 / 254.0 + 1e-6;
            let off = values
                .iter()
                .fold(0.0_f32, |most, value| most.max(value.abs()));
            assert!(off <= bound, "{hosts:?}: {off} > {bound}");
        });
    }
}
