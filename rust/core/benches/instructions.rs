//! The operations that callgrind counts: small ones between two ranks, which are threads of this process.
//!
//! ```text
//! cargo bench -p unisono --bench instructions -- OPERATION CALLS
//! ```
//!
//! carries out `OPERATION` `CALLS` times and nothing else; `benchmarks/instructions.py` runs it under valgrind with two
//! numbers of calls and takes the difference. The ranks are joined over a store as two processes would be, so that
//! their links are the ones between processes. Joining takes a number of instructions that varies by more than a call
//! takes, so callgrind counts inside [`counted`] alone.

use std::process::ExitCode;

use unisono::Communicator;
use unisono::config::Config;
use unisono::error::Result;
use unisono::rendezvous;
use unisono::types::ReduceOp;

fn call(operation: &str, comm: &Communicator, data: &mut [f32; 2]) -> Result<()> {
    let peer = 1 - comm.rank();
    match operation {
        "all_reduce" => comm.all_reduce(data, ReduceOp::Sum),
        "barrier" => comm.barrier(),
        "broadcast" => comm.broadcast(data, 0),
        // There and back.
        "ping_pong" if peer == 1 => {
            comm.send_slice(data, peer, 0)?;
            comm.receive_slice(data, Some(peer), 0).map(drop)
        }
        "ping_pong" => {
            comm.receive_slice(data, Some(peer), 0)?;
            comm.send_slice(data, peer, 0)
        }
        _ => panic!("there is no {operation} here"),
    }
}

fn rank(rank: usize, url: &str, operation: &str, calls: usize) -> Result<()> {
    let config = Config::from_env()?;
    let meeting = rendezvous::open_url(url, rank, 2, &config)?;
    let comm = Communicator::join(meeting.store(), rank, 2, config)?;
    // Connections are made when they are first needed: this is still joining.
    let mut data = [0.0; 2];
    call(operation, &comm, &mut data)?;
    comm.barrier()?;
    counted(operation, calls, &comm, &mut data)?;
    comm.barrier()
}

/// The code that is counted: `benchmarks/instructions.py` knows this function by its name.
#[inline(never)]
fn counted(operation: &str, calls: usize, comm: &Communicator, data: &mut [f32; 2]) -> Result<()> {
    (0..calls).try_for_each(|_| call(operation, comm, data))
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().filter(|word| word != "--bench").collect();
    let [_, operation, calls] = words.as_slice() else {
        // `cargo bench` without arguments runs every bench of the crate.
        eprintln!("instructions: takes OPERATION and CALLS; see benchmarks/instructions.py");
        return ExitCode::SUCCESS;
    };
    let calls = calls.parse().expect("CALLS is a number");
    let path = std::env::temp_dir().join(format!("unisono-instructions-{}", std::process::id()));
    let url = format!("file://{}", path.display());
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|number| {
            let url = &url;
            scope.spawn(move || rank(number, url, operation, calls))
        });
        ranks.map(|rank| rank.join().expect("no panic")).into()
    });
    let _ = std::fs::remove_file(&path);
    for result in results {
        if let Err(error) = result {
            eprintln!("instructions: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
