//! The safe layer over the CUDA driver, on the emulated driver (`tests/cuda/emulator`).
//!
//! The loader decides which driver a process gets, when it starts. So each test is a process of its own, with the emulator
//! in its `LD_LIBRARY_PATH` and the settings that the test asks for, under a hard limit of time; and what it leaves
//! behind is read from the emulator's report. Without the emulator (`cargo build -p unisono-cuda-emulator`), which is
//! looked for beside this program, only those tests run that need none.

mod driver_calls;
mod flags;
mod harness;
mod kernels;
mod lent;
mod loading;
mod memory;
mod streams;
mod windows;

use harness::Test;

fn main() {
    let tests: Vec<Test> = [
        loading::tests(),
        streams::tests(),
        lent::tests(),
        memory::tests(),
        flags::tests(),
        windows::tests(),
        kernels::tests(),
    ]
    .into_iter()
    .flatten()
    .collect();
    std::process::exit(harness::run(&tests));
}
