//! Hundreds of ranks as threads of one process, for the test and the benchmark of large groups.

use std::net::TcpListener;
use std::thread;

use unisono::buffer::Memory;
use unisono::config::Config;
use unisono::types::{DataType, ReduceOp};
use unisono::{Communicator, Request};

/// Settings with this limit, in seconds, for what may take long.
pub(crate) fn config(limit: &str) -> Config {
    let mut config = Config::default();
    for name in ["timeout", "join_timeout"] {
        config.set(name, limit).expect("seconds");
    }
    config
}

/// Where a store may be served.
pub(crate) fn free_url() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    format!("tcp://{}", listener.local_addr().expect("address"))
}

/// Runs `body` as every rank, on a thread with a small stack.
pub(crate) fn as_ranks(world: usize, body: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        for rank in 0..world {
            let body = &body;
            let thread = thread::Builder::new().stack_size(512 << 10);
            let run = move || body(rank);
            thread.spawn_scoped(scope, run).expect("a thread");
        }
    });
}

/// Every rank contributes one; the sum is their number.
pub(crate) fn count_ranks(comm: &Communicator) -> i64 {
    let mut one = [1_i64];
    // SAFETY: the array is there until the call returns, and nothing else uses it.
    unsafe {
        let memory = Memory::from_raw_parts(one.as_mut_ptr().cast(), size_of_val(&one));
        let sum = Request::all_reduce(DataType::Int64, ReduceOp::Sum, None, memory);
        comm.run(sum).expect("a sum");
    }
    one[0]
}

/// The descriptors of this process.
pub(crate) fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .expect("a folder")
        .count()
}
