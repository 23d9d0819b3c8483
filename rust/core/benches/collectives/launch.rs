//! Starts the ranks of one world after the other and measures every cell asked for.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use unisono::plan::topology::Topology;
use unisono::plan::{Algorithm, Counts, Shape, applicable, shared};

use crate::Arguments;
use crate::cell::Kind;

/// In one round.
const MOST_CALLS: f64 = 20_000.0;

/// Prints one JSON line for each cell.
pub(crate) fn measure(arguments: &Arguments) -> Result<(), String> {
    for &world in &arguments.ranks {
        let mut ranks = Ranks::start(world, arguments)?;
        for &kind in &arguments.kinds {
            let barrier = [0];
            let sizes = if kind == Kind::Barrier {
                &barrier[..]
            } else {
                &arguments.sizes
            };
            for &bytes in sizes {
                let mut rounds = ranks.measure(kind, bytes, arguments)?;
                rounds.sort_by(f64::total_cmp);
                println!(
                    "{{\"peer\": \"unisono\", \"ranks\": {world}, \"collective\": \"{}\", \"bytes\": {bytes}, \
                     \"memory\": \"{}\", \"in_place\": {}, \"microseconds\": {:.3}, \"lowest\": {:.3}, \
                     \"highest\": {:.3}, \"rounds\": {}}}",
                    kind.name(),
                    arguments.storage.name(),
                    !arguments.out_of_place,
                    rounds[rounds.len() / 2] * 1e6,
                    rounds[0] * 1e6,
                    rounds[rounds.len() - 1] * 1e6,
                    rounds.len(),
                );
            }
        }
        ranks.finish()?;
    }
    Ok(())
}

/// Prints one JSON line for each collective and world size that names the algorithms which serve it.
pub(crate) fn list_algorithms(arguments: &Arguments) {
    for &world in &arguments.ranks {
        for &kind in &arguments.kinds {
            let Some(collective) = kind.collective() else {
                continue;
            };
            let shape = Shape {
                collective,
                rank: 0,
                world,
                counts: Counts::Even(1),
                root: 0,
                in_place: false,
                widen: false,
            };
            // The buffers of this benchmark are private: none is reduced in place.
            let host = Topology::one_host(world, 1);
            let large = Shape {
                counts: Counts::Even(1 << 20),
                ..shape
            };
            let serves = |algorithm: &Algorithm| {
                applicable(*algorithm, &shape)
                    || (*algorithm == Algorithm::Windows
                        && shared::serves(*algorithm, &large, 1, &host))
            };
            let serving: Vec<String> = Algorithm::ALL
                .into_iter()
                .filter(serves)
                .map(|algorithm| format!("\"{algorithm}\""))
                .collect();
            println!(
                "{{\"ranks\": {world}, \"collective\": \"{}\", \"algorithms\": [{}]}}",
                kind.name(),
                serving.join(", ")
            );
        }
    }
}

/// The ranks of one world, each at the other end of a pair of pipes.
struct Ranks {
    ranks: Vec<(Child, ChildStdin, BufReader<ChildStdout>)>,
    store: std::path::PathBuf,
}

impl Ranks {
    fn start(world: usize, arguments: &Arguments) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let name = format!("unisono-bench-{}-{world}", std::process::id());
        let store = std::env::temp_dir().join(name);
        let mut started = Self {
            ranks: Vec::new(),
            store,
        };
        for rank in 0..world {
            let mut command = Command::new(&program);
            command.args(["--rank", &rank.to_string(), "--world", &world.to_string()]);
            command.args(["--store", &format!("file://{}", started.store.display())]);
            command.args(["--memory", arguments.storage.name()]);
            if arguments.out_of_place {
                command.arg("--out-of-place");
            }
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command
                .spawn()
                .map_err(|error| format!("rank {rank}: {error}"))?;
            let pipes = (child.stdin.take(), child.stdout.take());
            let (Some(commands), Some(replies)) = pipes else {
                return Err(format!("rank {rank} has no pipes"));
            };
            started
                .ranks
                .push((child, commands, BufReader::new(replies)));
        }
        started.replies()?;
        Ok(started)
    }

    /// Every rank's answer to one command. The longest time counts.
    fn command(&mut self, line: &str) -> Result<f64, String> {
        for (rank, (_, commands, _)) in self.ranks.iter_mut().enumerate() {
            writeln!(commands, "{line}").map_err(|error| format!("rank {rank}: {error}"))?;
        }
        self.replies().map_err(|error| format!("{line}: {error}"))
    }

    fn replies(&mut self) -> Result<f64, String> {
        let mut slowest = 0.0_f64;
        for (rank, (_, _, replies)) in self.ranks.iter_mut().enumerate() {
            let mut reply = String::new();
            let read = replies.read_line(&mut reply);
            read.map_err(|error| format!("rank {rank}: {error}"))?;
            let Some(result) = reply.trim_end().strip_prefix("ok") else {
                return Err(format!("rank {rank} answered {reply:?}"));
            };
            slowest = slowest.max(result.trim().parse().unwrap_or(0.0));
        }
        Ok(slowest)
    }

    /// Seconds of one call, on the slowest rank, one for each round.
    fn measure(
        &mut self,
        kind: Kind,
        bytes: usize,
        arguments: &Arguments,
    ) -> Result<Vec<f64>, String> {
        let name = kind.name();
        self.command(&format!("check {name} {bytes}"))?;
        // The root moves on with every call, and what a root does once is no part of the time.
        let mut calls = self.ranks.len() as f64;
        let mut time = |calls: f64| -> Result<f64, String> {
            Ok(self.command(&format!("time {name} {bytes} {calls}"))? / calls)
        };
        let per_round = arguments.seconds / arguments.rounds as f64;
        loop {
            let seconds = time(calls)?;
            let fitting = (per_round / seconds.max(1e-9))
                .clamp(1.0, MOST_CALLS)
                .floor();
            if fitting <= 2.0 * calls {
                calls = fitting;
                break;
            }
            calls = fitting.min(10.0 * calls);
        }
        (0..arguments.rounds).map(|_| time(calls)).collect()
    }

    /// Lets the ranks end, and waits for them.
    fn finish(mut self) -> Result<(), String> {
        for (rank, (mut child, commands, _)) in self.ranks.drain(..).enumerate() {
            drop(commands);
            let status = child.wait().map_err(|error| error.to_string())?;
            if !status.success() {
                return Err(format!("rank {rank} failed: {status}"));
            }
        }
        Ok(())
    }
}

impl Drop for Ranks {
    /// Without the driver they see the end of their commands; a rank that is stuck is ended.
    fn drop(&mut self) {
        for (child, _, _) in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_file(&self.store);
    }
}
