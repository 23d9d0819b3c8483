//! Times the collectives between processes of this host, from Rust.
//!
//! ```text
//! cargo bench -p unisono --bench collectives -- --ranks 2,4 --collectives all_reduce,barrier --sizes 8,16K,64M
//! ```
//!
//! starts its own ranks and prints one JSON line for each cell: the median over the rounds of the slowest rank's time
//! of one call. With `--rank` it is one rank itself and takes commands (`rank.rs`), from `benchmarks/compare.py` for
//! example, so that peers can be measured in turn.

mod cell;
mod launch;
mod rank;

use std::path::PathBuf;
use std::process::ExitCode;

use cell::{Kind, Storage};

/// The arguments of the command line.
#[derive(Debug)]
pub(crate) struct Arguments {
    ranks: Vec<usize>,
    kinds: Vec<Kind>,
    sizes: Vec<usize>,
    rounds: usize,
    /// Seconds for the rounds of one cell.
    seconds: f64,
    out_of_place: bool,
    storage: Storage,
    /// Nothing is measured: print which algorithms serve which collective.
    only_list: bool,
    /// This process is a rank: its number, the world size and where the ranks meet.
    rank: Option<usize>,
    world: usize,
    store: String,
    /// The folder with the FIFOs; commands come from standard input otherwise.
    channel: Option<PathBuf>,
}

impl Default for Arguments {
    fn default() -> Self {
        Self {
            ranks: vec![2, 4],
            kinds: vec![Kind::AllReduce],
            sizes: (3..=26).step_by(3).map(|power| 1 << power).collect(),
            rounds: 11,
            seconds: 0.5,
            out_of_place: false,
            storage: Storage::Private,
            only_list: false,
            rank: None,
            world: 0,
            store: String::new(),
            channel: None,
        }
    }
}

const USAGE: &str = "\
--ranks 2,4              world sizes
--collectives A,B | all  all_reduce reduce broadcast all_gather reduce_scatter gather scatter all_to_all barrier
                         ping_pong (half a round trip between ranks 2k and 2k + 1, as osu_latency)
                         send_recv (every rank to the next and from the previous at once, as nccl-tests' sendrecv)
--sizes 8,16K,64M        bytes of the whole; float32, or uint8 where they are no multiple of 4
--rounds N               measurements of each cell, of which the median counts
--seconds S              for the rounds of one cell
--out-of-place           all_reduce from one buffer into another
--memory private|heap    where the buffers lie
--algorithms             measure nothing, print which algorithms serve which collective
As a rank, under commands: --rank R --world N --store URL [--channel FOLDER]";

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut parsed = Self::default();
        while let Some(flag) = words.next() {
            let mut value = || words.next().ok_or(format!("{flag} takes a value"));
            match flag.as_str() {
                // Cargo passes this to every bench.
                "--bench" => {}
                "--ranks" => parsed.ranks = list(&value()?, number)?,
                "--collectives" => {
                    let names = value()?;
                    parsed.kinds = match names.as_str() {
                        "all" => Kind::ALL.to_vec(),
                        _ => list(&names, Kind::parse)?,
                    };
                }
                "--sizes" => parsed.sizes = list(&value()?, size)?,
                "--rounds" => parsed.rounds = number(&value()?)?,
                "--seconds" => {
                    parsed.seconds = value()?.parse().map_err(|_| "--seconds: a number")?;
                }
                "--out-of-place" => parsed.out_of_place = true,
                "--algorithms" => parsed.only_list = true,
                "--memory" => parsed.storage = Storage::parse(&value()?)?,
                "--rank" => parsed.rank = Some(number(&value()?)?),
                "--world" => parsed.world = number(&value()?)?,
                "--store" => parsed.store = value()?,
                "--channel" => parsed.channel = Some(value()?.into()),
                _ => return Err(format!("{flag} is unknown\n\n{USAGE}")),
            }
        }
        Ok(parsed)
    }
}

fn list<T>(text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    text.split(',').map(|item| parse(item.trim())).collect()
}

fn number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("{text:?} is no number"))
}

/// 512, 16K, 64M or 1G.
fn size(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.chars().last() {
        Some('K') => (&text[..text.len() - 1], 10),
        Some('M') => (&text[..text.len() - 1], 20),
        Some('G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    Ok(number(digits)? << shift)
}

fn main() -> ExitCode {
    let done = Arguments::parse(std::env::args().skip(1)).and_then(|arguments| {
        if arguments.rank.is_some() {
            rank::serve(&arguments)
        } else if arguments.only_list {
            launch::list_algorithms(&arguments);
            Ok(())
        } else {
            launch::measure(&arguments)
        }
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("collectives: {message}");
            ExitCode::FAILURE
        }
    }
}
