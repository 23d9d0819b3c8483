//! Where this process may run: its cores, whether they are in use, and how memory and caches are shared out among them, as
//! `/sys` says.
//!
//! A machine with several sockets, or a processor that is divided in its firmware, has several *memory nodes* (NUMA): a core
//! reaches the memory of its own node sooner, and all cores of a node share one way to the others. A process that is bound to
//! the cores of one node (`numactl`, `mpirun --bind-to numa`, Slurm, a Kubernetes policy) has its memory there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity};

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Whether `threads` threads have a core each, of `cores`, beside all others that run on the machine now. `ours`: the running
/// ones that do not count as others. In a container the others include those of its host.
pub(crate) fn are_free(cores: usize, threads: usize, ours: usize) -> bool {
    let average = fs::read_to_string("/proc/loadavg").ok();
    let running = average.as_deref().and_then(running_in);
    running.is_some_and(|running| running.saturating_sub(ours) + threads <= cores)
}

/// How many threads run or are ready to, in a text as `0.20 0.18 0.12 2/310 11206`; `None` where the system does not tell.
fn running_in(average: &str) -> Option<usize> {
    let (running, _) = average.split(' ').nth(3)?.split_once('/')?;
    // The reader at least.
    running.parse().ok().filter(|running| *running > 0)
}

/// Where this process may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    /// The memory node that all of its cores belong to, on a machine that has several; `None` where they belong to more, or
    /// the system does not tell.
    pub(crate) node: Option<u16>,
    /// How many memory nodes the machine has, and cores in all of them.
    pub(crate) nodes: usize,
    pub(crate) cores: usize,
    /// How many caches of the last level its cores have between them; 0 where the system does not tell. Cores that share none
    /// take three times as long to pass a line on.
    pub(crate) caches: usize,
}

/// This process's place. Its threads may be bound later, which is not seen.
pub(crate) fn place() -> Placement {
    let allowed = sched_getaffinity(None).map_or_else(|_| BTreeSet::new(), |set| numbers(&set));
    place_in(Path::new("/sys/devices/system"), &allowed)
}

fn numbers(set: &CpuSet) -> BTreeSet<usize> {
    (0..CpuSet::MAX_CPU)
        .filter(|core| set.is_set(*core))
        .collect()
}

/// The place of a process that may use the cores `allowed`, on the machine that `sys` describes.
fn place_in(sys: &Path, allowed: &BTreeSet<usize>) -> Placement {
    let nodes: Vec<(u16, BTreeSet<usize>)> = entries(&sys.join("node"), "node")
        .filter_map(|(number, path)| {
            let cores = list(&fs::read_to_string(path.join("cpulist")).ok()?)?;
            Some((u16::try_from(number).ok()?, cores))
        })
        // A node of memory alone has no cores.
        .filter(|(_, cores)| !cores.is_empty())
        .collect();
    let around = nodes.iter().find(|(_, cores)| allowed.is_subset(cores));
    let node = around.filter(|_| nodes.len() > 1 && !allowed.is_empty());
    let caches: BTreeSet<String> = allowed
        .iter()
        .filter_map(|core| last_cache(&sys.join(format!("cpu/cpu{core}/cache"))))
        .collect();
    Placement {
        node: node.map(|(number, _)| *number),
        nodes: nodes.len(),
        cores: nodes.iter().map(|(_, cores)| cores.len()).sum(),
        caches: caches.len(),
    }
}

/// Which cores share the last cache of a core, as the system writes it.
fn last_cache(folder: &Path) -> Option<String> {
    let caches = entries(folder, "index").filter_map(|(_, path)| {
        let level: u32 = fs::read_to_string(path.join("level"))
            .ok()?
            .trim()
            .parse()
            .ok()?;
        let shared = fs::read_to_string(path.join("shared_cpu_list")).ok()?;
        Some((level, shared))
    });
    caches
        .max_by_key(|(level, _)| *level)
        .map(|(_, shared)| shared)
}

/// The folders `name` with a number after it, and that number.
fn entries(folder: &Path, name: &str) -> impl Iterator<Item = (usize, std::path::PathBuf)> {
    let inside = fs::read_dir(folder).into_iter().flatten().flatten();
    inside.filter_map(move |entry| {
        let number = entry
            .file_name()
            .to_str()?
            .strip_prefix(name)?
            .parse()
            .ok()?;
        Some((number, entry.path()))
    })
}

/// The numbers of a list as `0-3,8`.
fn list(text: &str) -> Option<BTreeSet<usize>> {
    let mut all = BTreeSet::new();
    for range in text.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        all.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temporary::Temporary;

    #[test]
    fn the_running_threads_are_those_that_the_system_tells() {
        assert_eq!(running_in("0.20 0.18 0.12 2/310 11206\n"), Some(2));
        for untold in [
            "",
            "0.20 0.18 0.12",
            "0.00 0.00 0.00 0/0 0",
            "0.1 0.1 0.1 x/2 3",
        ] {
            assert_eq!(running_in(untold), None, "{untold}");
        }
        // This thread runs, whatever else does.
        assert!(!are_free(2, 2, 0) && !are_free(1, 2, 1) && are_free(usize::MAX, 2, 1));
    }

    /// A machine of two sockets with four cores each, which share caches in pairs, and a node of memory alone.
    fn machine() -> Temporary {
        let sys = Temporary::new();
        let write = |path: String, text: &str| {
            let path = sys.0.join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        for (node, cores) in [(0, "0-3\n"), (1, "4-5,6,7\n"), (2, "\n")] {
            write(format!("node/node{node}/cpulist"), cores);
        }
        write("node/has_cpu".to_owned(), "0-1\n");
        for core in 0..8 {
            let first = core / 2 * 2;
            for (index, level, shared) in [
                (0, 1, format!("{core}\n")),
                (3, 3, format!("{first}-{}\n", first + 1)),
            ] {
                write(
                    format!("cpu/cpu{core}/cache/index{index}/level"),
                    &format!("{level}\n"),
                );
                write(
                    format!("cpu/cpu{core}/cache/index{index}/shared_cpu_list"),
                    &shared,
                );
            }
        }
        sys
    }

    #[test]
    fn a_process_bound_to_a_node_is_there() {
        let sys = machine();
        let place = |cores: &[usize]| place_in(&sys.0, &cores.iter().copied().collect());
        let expected = |node, caches| Placement {
            node,
            nodes: 2,
            cores: 8,
            caches,
        };
        assert_eq!(place(&[0, 1]), expected(Some(0), 1));
        assert_eq!(place(&[4, 6, 7]), expected(Some(1), 2));
        assert_eq!(place(&[0, 4]), expected(None, 2));
        assert_eq!(place(&[]), expected(None, 0));
        let unknown = place_in(&sys.0.join("nowhere"), &BTreeSet::from([0]));
        assert_eq!(
            unknown,
            Placement {
                node: None,
                nodes: 0,
                cores: 0,
                caches: 0
            }
        );
    }

    #[test]
    fn one_node_is_no_news() {
        let sys = Temporary::new();
        fs::create_dir_all(sys.0.join("node/node0")).expect("a folder");
        fs::write(sys.0.join("node/node0/cpulist"), "0-1").expect("a file");
        let place = place_in(&sys.0, &BTreeSet::from([0, 1]));
        assert_eq!((place.node, place.nodes), (None, 1));
    }

    #[test]
    fn lists_are_read() {
        assert_eq!(list("0-2,5"), Some(BTreeSet::from([0, 1, 2, 5])));
        assert_eq!(list("\n"), Some(BTreeSet::new()));
        assert_eq!(list("a"), None);
    }

    #[test]
    fn this_process_runs_somewhere() {
        let place = place();
        assert!(cores() > 0 && place.caches <= CpuSet::MAX_CPU, "{place:?}");
    }
}
