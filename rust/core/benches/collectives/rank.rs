//! One rank under commands, one line each:
//!
//! ```text
//! check COLLECTIVE BYTES             ok, or "wrong REASON", or "no REASON" where there is no such collective
//! time COLLECTIVE BYTES ITERATIONS   ok SECONDS, on this rank, for all iterations after a barrier
//! idle SECONDS                       ok CPU_SECONDS, spent in waiting for a last rank that is late by SECONDS
//! free                               ok; the buffers are gone
//! ```
//!
//! Every rank hears from the driver by itself (over a FIFO of its own, or standard input), so that a rank without a
//! command sleeps in `read` and leaves its core to whatever else is measured.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::time::{Duration, Instant};

use unisono::Communicator;
use unisono::config::Config;
use unisono::rendezvous;

use crate::Arguments;
use crate::cell::{Kind, Measured, Storage, prepare};

/// Joins the group and answers commands until there are no more.
pub(crate) fn serve(arguments: &Arguments) -> Result<(), String> {
    let rank = arguments.rank.unwrap_or_default();
    let (commands, mut replies) = channel(arguments, rank)?;
    let mut runner = Runner {
        comm: join(rank, arguments).map_err(|error| error.to_string())?,
        out_of_place: arguments.out_of_place,
        storage: arguments.storage,
        cell: None,
    };
    let broken = |error| format!("the driver is gone: {error}");
    writeln!(replies, "ok").map_err(broken)?;
    for line in commands.lines() {
        let line = line.map_err(broken)?;
        let reply = match runner.obey(&line) {
            Ok(reply) => reply,
            Err(Refusal::No(reason)) => format!("no {reason}"),
            Err(Refusal::Failed(error)) => return Err(format!("{line}: {error}")),
        };
        writeln!(replies, "{reply}").map_err(broken)?;
    }
    Ok(())
}

fn join(rank: usize, arguments: &Arguments) -> unisono::error::Result<Communicator> {
    let (world, config) = (arguments.world, Config::from_env()?);
    let meeting = rendezvous::open_url(&arguments.store, rank, world, &config)?;
    Communicator::join(meeting.store(), rank, world, config)
}

type Channel = (Box<dyn BufRead>, Box<dyn Write>);

fn channel(arguments: &Arguments, rank: usize) -> Result<Channel, String> {
    let Some(folder) = &arguments.channel else {
        return Ok((Box::new(stdin().lock()), Box::new(stdout())));
    };
    let path = folder.join(format!("replies-{rank}"));
    let replies = OpenOptions::new().write(true).open(&path);
    let replies = replies.map_err(|error| format!("{}: {error}", path.display()))?;
    let path = folder.join(format!("commands-{rank}"));
    let commands = File::open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok((Box::new(BufReader::new(commands)), Box::new(replies)))
}

/// Why a command was not carried out.
enum Refusal {
    /// It cannot be; the next one may.
    No(String),
    /// The group is of no use any more.
    Failed(unisono::error::Error),
}

impl From<unisono::error::Error> for Refusal {
    fn from(error: unisono::error::Error) -> Self {
        Self::Failed(error)
    }
}

struct Runner {
    comm: Communicator,
    out_of_place: bool,
    storage: Storage,
    cell: Option<(Kind, usize, Box<dyn Measured>)>,
}

impl Runner {
    fn obey(&mut self, line: &str) -> Result<String, Refusal> {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let parse = |text: &str| {
            text.parse::<usize>()
                .map_err(|_| Refusal::No(format!("{text} is no number")))
        };
        match words.as_slice() {
            ["check", name, bytes] => {
                let (kind, bytes) = (Kind::parse(name).map_err(Refusal::No)?, parse(bytes)?);
                self.prepare(kind, bytes)?;
                let (_, _, cell) = self.cell.as_mut().expect("prepared above");
                Ok(match cell.check(&self.comm)? {
                    0 => "ok".to_owned(),
                    wrong => format!("wrong {wrong} elements"),
                })
            }
            ["time", name, bytes, iterations] => {
                let (kind, bytes) = (Kind::parse(name).map_err(Refusal::No)?, parse(bytes)?);
                let seconds = self.time(kind, bytes, parse(iterations)?)?;
                Ok(format!("ok {seconds:.9}"))
            }
            ["idle", seconds] => {
                let seconds: f64 = seconds.parse().unwrap_or(0.0);
                let spent = self.idle(Duration::from_secs_f64(seconds))?;
                Ok(format!("ok {:.9}", spent.as_secs_f64()))
            }
            ["free"] => {
                self.cell = None;
                Ok("ok".to_owned())
            }
            _ => Err(Refusal::No(format!("{line:?} is no command"))),
        }
    }

    /// Makes the buffers, unless they are there.
    fn prepare(&mut self, kind: Kind, bytes: usize) -> Result<(), Refusal> {
        if !matches!(&self.cell, Some((of, size, _)) if (*of, *size) == (kind, bytes)) {
            // The old ones go first: there may not be room for both.
            self.cell = None;
            let cell = prepare(kind, bytes, &self.comm, self.storage, self.out_of_place);
            self.cell = Some((kind, bytes, cell.map_err(Refusal::No)?));
        }
        Ok(())
    }

    fn time(&mut self, kind: Kind, bytes: usize, iterations: usize) -> Result<f64, Refusal> {
        self.prepare(kind, bytes)?;
        let (_, _, cell) = self.cell.as_mut().expect("prepared above");
        self.comm.barrier()?;
        let started = Instant::now();
        cell.repeat(&self.comm, iterations)?;
        let seconds = started.elapsed().as_secs_f64();
        // One iteration is there and back.
        Ok(if kind == Kind::PingPong {
            seconds / 2.0
        } else {
            seconds
        })
    }

    /// All ranks wait for a message from the last one, which sends it `late`.
    fn idle(&mut self, late: Duration) -> Result<Duration, Refusal> {
        let (comm, mut byte) = (&self.comm, [0_u8]);
        let last = comm.world_size() - 1;
        comm.barrier()?;
        let before = cpu_time();
        if comm.rank() == last {
            std::thread::sleep(late);
            (0..last).try_for_each(|to| comm.send_slice(&byte, to, 1))?;
        } else {
            comm.receive_slice(&mut byte, Some(last), 1)?;
        }
        Ok(cpu_time() - before)
    }
}

/// The CPU time that all threads of this process have used.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
