//! Calls of the driver that may wait until the device is idle, which it is not while a stream waits for a peer; and which
//! streams are the same one. Several ranks in one process share the device's context, so that one rank's call waits for
//! another rank's stream, and for ever where that waits for the first.

use std::ffi::CStr;
use std::time::{Duration, Instant};

use unisono::error::Code;
use unisono::transport::cuda::driver::{MemoryOperation, Pinned, Stream};
use unisono::types::{DataType, DeviceStream, ReduceOp};
use unisono::{Communicator, Request};

use crate::gpu::{Array, bytes_of, floats, stream};
use crate::graph::capture;
use crate::harness::{Ranks, Test};
use crate::{LARGE, all_reduce, array_of, assert_all, message};

/// Every call that may wait does.
const STRICT: &[(&str, &str)] = &[("SYNCHRONIZE", "always")];

const LEGACY: DeviceStream = DeviceStream {
    device: 0,
    stream: 0,
};
const PER_THREAD: DeviceStream = DeviceStream {
    device: 0,
    stream: 2,
};

/// A number of the emulated driver's report.
pub(crate) fn reported(name: &str) -> u64 {
    let mut text = vec![0_u8; 1 << 16];
    // SAFETY: the texts end with zeros; the emulator's function takes a place for a text and how long it is.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY);
        let symbol = libc::dlsym(library, c"cuEmulatorStatistics".as_ptr());
        let report = std::mem::transmute::<
            *mut libc::c_void,
            unsafe extern "C" fn(*mut u8, usize) -> usize,
        >(symbol);
        report(text.as_mut_ptr(), text.len());
    }
    let text = CStr::from_bytes_until_nul(&text).expect("an end");
    let text = text.to_str().expect("a text");
    let Some((_, rest)) = text.split_once(&format!("\"{name}\": ")) else {
        return 0;
    };
    let end = rest.find([',', '}']).expect("an end");
    rest[..end].parse().expect("a number")
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits for the other ranks: who leaves keeps its windows for a few seconds only, while others may still look at results.
pub(crate) fn together(comm: &Communicator) {
    comm.barrier().expect("barrier");
}

/// The threads on which groups give back what they had.
fn is_disposing() -> bool {
    let threads = std::fs::read_dir("/proc/self/task").expect("this process");
    threads.flatten().any(|thread| {
        let name = std::fs::read_to_string(thread.path().join("comm"));
        name.is_ok_and(|name| name.starts_with("unisono-dispo"))
    })
}

/// Each receives before it sends, on two streams, and neither has ever sent.
#[test]
fn a_first_send_waits_for_no_receive() {
    let test = Test {
        config: LARGE,
        driver: STRICT,
        ..Test::new(Ranks::Local, 2)
    };
    test.run(|comm| {
        let ((out, named_out), (back, named_back)) = (stream(), stream());
        let peer = 1 - comm.rank();
        let count = 100_000;
        let sent = array_of(&out, comm.rank() as f32, count);
        let got = array_of(&back, -1.0, count);
        comm.barrier().expect("barrier");
        let received = message(&comm, &got, (Some(peer), 1), named_back, false);
        let left = message(&comm, &sent, (Some(peer), 1), named_out, true);
        left.wait(Some(Duration::from_secs(30))).expect("sent");
        received
            .wait(Some(Duration::from_secs(30)))
            .expect("received");
        assert_all(&got, &back, peer as f32);
        comm.barrier().expect("barrier");
    });
}

/// A rank uses a type for the first time while another waits for it, with another type.
#[test]
fn kernels_are_there_before_a_stream_waits() {
    let test = Test {
        config: LARGE,
        driver: STRICT,
        ..Test::new(Ranks::Local, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 1.0, 64);
        let started = |dtype| {
            let request = Request::all_reduce(dtype, ReduceOp::Sum, None, array.memory());
            // SAFETY: the array outlives the stream's work.
            unsafe { comm.start(request.on(named), None) }
        };
        started(DataType::Float32)
            .expect("started")
            .wait(None)
            .expect("a sum");
        let started = if comm.rank() == 0 {
            let work = started(DataType::BFloat16);
            comm.send_slice(&[0_u8], 1, 0).expect("a signal");
            work
        } else {
            comm.receive_slice(&mut [0_u8], Some(0), 0)
                .expect("a signal");
            started(DataType::Float16)
        };
        let error = match started {
            Ok(work) => work.wait(Some(Duration::from_secs(30))).unwrap_err(),
            Err(error) => error,
        };
        assert_eq!(error.code, Code::Mismatch, "{error}");
        stream.synchronize().expect("the stream goes on");
    });
}

/// The memory of a group serves the next one, and none is given back to the driver while another group is there.
#[test]
fn later_groups_use_what_earlier_ones_had() {
    let test = Test {
        config: LARGE,
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 1.0, 64);
        all_reduce(&comm, &array, named).expect("started");
        let mut made = 0;
        let returned = reported("cuMemHostUnregister");
        for turn in 0_u8..3 {
            let group = comm.subgroup(&[0, 1], &[turn]).expect("a group");
            let group = group.expect("a member");
            all_reduce(&group, &array, named)
                .expect("started")
                .wait(None)
                .expect("a sum");
            match turn {
                0 => made = reported("cuMemAlloc_v2"),
                _ => assert_eq!(reported("cuMemAlloc_v2"), made),
            }
            group.close();
            drop(group);
            // The parent's own is left.
            until("the peer's window is unmapped", || reported("imports") == 1);
            until("the rest is given back", || !is_disposing());
            comm.barrier().expect("barrier");
        }
        assert_eq!(reported("cuMemHostUnregister"), returned);
        assert_eq!(reported("cuMemFree_v2"), 0);
        assert_all(&array, &stream, 16.0);
    });
}

/// Two names of the default stream are one stream.
#[test]
fn the_default_stream_has_two_names() {
    let test = Test {
        config: LARGE,
        ..Test::new(Ranks::Local, 2)
    };
    test.run(|comm| {
        let (own, named) = stream();
        let array = array_of(&own, 1.0, 64);
        all_reduce(&comm, &array, named)
            .expect("started")
            .wait(None)
            .expect("the ranks have met");
        if comm.rank() == 0 {
            let work = all_reduce(&comm, &array, LEGACY).expect("started");
            comm.send_slice(&[0_u8], 1, 0).expect("a signal");
            work.wait(Some(Duration::from_secs(30))).expect("a sum");
        } else {
            comm.receive_slice(&mut [0_u8], Some(0), 0)
                .expect("a signal");
            let other = DeviceStream {
                stream: 1,
                ..LEGACY
            };
            let error = all_reduce(&comm, &array, other).unwrap_err();
            assert!(error.message.contains("a stream of its own"), "{error}");
            all_reduce(&comm, &array, named).expect("started");
        }
        assert_all(&array, &own, 4.0);
    });
}

/// The per-thread default stream is another one on every thread.
#[test]
fn ranks_of_one_process_may_use_their_threads_streams() {
    let test = Test {
        config: LARGE,
        ..Test::new(Ranks::Local, 2)
    };
    test.run(|comm| {
        let (own, _) = stream();
        let array = array_of(&own, 1.0, 64);
        for _ in 0..3 {
            all_reduce(&comm, &array, PER_THREAD)
                .expect("started")
                .wait(None)
                .expect("a sum");
        }
        assert_all(&array, &own, 8.0);
    });
}

/// Operations on streams of one name and several threads come in the order of the calls.
#[test]
fn streams_of_several_threads_keep_the_order() {
    let test = Test {
        config: LARGE,
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (own, named) = stream();
        let a = array_of(&own, 1.0, 64);
        let b = array_of(&own, 3.0, 64);
        let gate = Pinned::private(own.device(), 4096).expect("a word");
        all_reduce(&comm, &a, named)
            .expect("started")
            .wait(None)
            .expect("the ranks have met");
        let first = Stream::of(PER_THREAD).expect("this thread's");
        first
            .operate(&[MemoryOperation::WaitAny {
                address: gate.address(),
                mask: 1,
            }])
            .expect("held");
        let held = all_reduce(&comm, &a, PER_THREAD).expect("started");
        std::thread::scope(|scope| {
            let others = scope.spawn(|| {
                let works: Vec<_> = (0..4)
                    .map(|_| all_reduce(&comm, &b, PER_THREAD).expect("started"))
                    .collect();
                std::thread::sleep(Duration::from_millis(20));
                assert!(works.iter().all(|work| !work.is_done()));
                gate.word(0).store(1, std::sync::atomic::Ordering::Release);
                for work in works {
                    work.wait(Some(Duration::from_secs(30))).expect("a sum");
                }
            });
            others.join().expect("no panic");
        });
        held.wait(Some(Duration::from_secs(30))).expect("a sum");
        assert_all(&a, &own, 4.0);
        assert_all(&b, &own, 48.0);
    });
}

/// Every word that a stream writes makes it wait for all that it did before, and every call of the driver takes the host's
/// time: there are as few as can be.
#[test]
fn a_call_takes_few_writes_and_few_calls_of_the_driver() {
    const TIMES: u64 = 8;
    for world in [2, 4] {
        let test = Test {
            config: LARGE,
            ..Test::new(Ranks::Processes, world)
        };
        test.run(|comm| {
            let (own, named) = stream();
            let array = array_of(&own, 1.0, 2);
            all_reduce(&comm, &array, named)
                .expect("started")
                .wait(None)
                .expect("the ranks have met");
            let peers = comm.world_size() as u64 - 1;
            let counted = |named, most| {
                let counts = || ["calls_made", "words_written", "words_awaited"].map(reported);
                let before = counts();
                let mut work = None;
                for _ in 0..TIMES {
                    work = Some(all_reduce(&comm, &array, named).expect("started"));
                }
                let calls = reported("calls_made") - before[0];
                work.expect("one").wait(None).expect("a sum");
                let [_, written, awaited] = counts();
                // Both ways: what the window holds can be read, and has been; each is told, and cleared. And the end.
                assert_eq!(written - before[1], TIMES * (4 * peers + 1));
                assert_eq!(awaited - before[2], TIMES * 2 * peers);
                assert_eq!(calls, TIMES * most);
            };
            // Two calls that make the context current and not; whether it is captured; what memory it is, at both ends;
            // three batches of words and two kernels. Of a stream that is not a default one, its context and its number,
            // too.
            counted(named, 12);
            // The first of them waits for the last on the other stream.
            all_reduce(&comm, &array, LEGACY)
                .expect("started")
                .wait(None)
                .expect("a sum");
            counted(LEGACY, 10);
        });
    }
}

/// A short call through host memory takes two copies and two batches of words.
#[test]
fn a_short_call_between_processes_takes_few_calls_of_the_driver() {
    const TIMES: u64 = 8;
    let test = Test::new(Ranks::Processes, 2);
    test.run(|comm| {
        let (own, named) = stream();
        for count in [1, 3, 1000] {
            let array = array_of(&own, 1.0, count);
            let sum = || {
                let work = all_reduce(&comm, &array, named).expect("started");
                work.wait(None).expect("a sum");
            };
            sum();
            let counts = || ["calls_made", "words_written", "words_awaited"].map(reported);
            let before = counts();
            for _ in 0..TIMES {
                sum();
            }
            let [calls, written, awaited] = counts();
            // That it has come to it, filled a slot, and ended.
            assert_eq!(written - before[1], TIMES * 3);
            assert_eq!(awaited - before[2], TIMES);
            assert_eq!(calls - before[0], TIMES * 11);
            assert_all(&array, &own, 512.0);
        }
    });
}

/// Between processes that share a device, windows become as long as calls need; work captured before stays in the old ones.
#[test]
fn windows_grow_where_processes_share_a_device() {
    // Of 8 GiB the windows of two ranks take 512 MiB at most, those from before included: halves of 64 MiB.
    let (initial, grown) = (32 << 20, (32 << 20) + (64 << 20) + (128 << 20));
    for (memory, mps, expected) in [
        ("8192", "no", grown),
        ("8192", "yes", grown),
        ("1024", "no", initial),
    ] {
        let driver = [("MEMORY", memory), ("MPS", mps)];
        let test = Test {
            driver: &driver,
            ..Test::new(Ranks::Processes, 2)
        };
        test.run(|comm| {
            let (stream, named) = stream();
            let sum = |array: &Array| {
                let work = all_reduce(&comm, array, named).expect("a call");
                work.wait(None).expect("a sum");
            };
            let small = array_of(&stream, 1.0, 1000);
            sum(&small);
            assert_eq!(window_bytes(&comm), initial);
            let graph = capture(&stream, || {
                all_reduce(&comm, &small, named).expect("captured");
            });
            // Of 20 MB, and of 80 MB.
            let long = [5_000_000, 20_000_000].map(|count| array_of(&stream, 1.0, count));
            for (array, value) in long.iter().chain(&long).zip([2.0, 2.0, 4.0, 4.0]) {
                sum(array);
                assert_all(array, &stream, value);
            }
            assert_eq!(window_bytes(&comm), expected);
            for value in [4.0, 8.0] {
                graph.launch(&stream);
                stream.synchronize().expect("a replay");
                assert_all(&small, &stream, value);
            }
            sum(&small);
            assert_all(&small, &stream, 16.0);
        });
    }
}

/// Short collectives, in which the host has a part, are under way when windows grow.
#[test]
fn windows_grow_behind_short_collectives() {
    let test = Test {
        driver: &[("RANDOM_DELAY", "200")],
        ..Test::new(Ranks::Processes, 3)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let short: Vec<Array> = (0..8).map(|_| array_of(&stream, 1.0, 1000)).collect();
        let long = [5_000_000, 9_000_000].map(|count| array_of(&stream, 1.0, count));
        for (round, long) in long.iter().enumerate() {
            for array in &short {
                all_reduce(&comm, array, named).expect("a call");
            }
            all_reduce(&comm, long, named).expect("a call");
            for array in &short {
                all_reduce(&comm, array, named).expect("a call");
            }
            assert_all(long, &stream, 3.0);
            for array in &short {
                assert_all(array, &stream, 9_f32.powi(round as i32 + 1));
            }
        }
        together(&comm);
    });
}

/// A rank that is in another operation when the others meet for longer windows is found out at once.
#[test]
fn a_mismatch_is_found_where_windows_would_grow() {
    let test = Test::new(Ranks::Processes, 2);
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 1.0, 6_000_000);
        let first = all_reduce(&comm, &array, named).expect("a call");
        first.wait(None).expect("a sum");
        let since = Instant::now();
        // Of 32 MB, for which windows grow again, and of 8 MB.
        let count = [9_000_000, 2_000_000][comm.rank()];
        let other = array_of(&stream, 1.0, count);
        let ended = all_reduce(&comm, &other, named).and_then(|work| work.wait(None));
        assert_eq!(ended.unwrap_err().code, Code::Mismatch);
        assert!(since.elapsed() < Duration::from_secs(20));
        stream.synchronize().expect("the stream goes on");
    });
}

/// Bytes of this rank's windows.
fn window_bytes(comm: &Communicator) -> u64 {
    let held = comm.memory();
    let of = held.iter().find(|(name, _)| *name == "device_bytes");
    of.expect("a count").1
}

/// Where there is too little memory for longer windows, the short ones stay.
#[test]
fn windows_stay_where_they_cannot_grow() {
    let test = Test {
        // After that of the first array, the windows and the second array.
        driver: &[("FAIL", "cuMemAlloc_v2:4=CUDA_ERROR_OUT_OF_MEMORY")],
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        for count in [1_000_000, 5_000_000, 6_000_000] {
            let array = array_of(&stream, 1.0, count);
            all_reduce(&comm, &array, named).expect("a call");
            assert_all(&array, &stream, 2.0);
            assert_eq!(window_bytes(&comm), 32 << 20);
        }
        together(&comm);
    });
}

/// A message that a stream awaits may be sent after the call for which windows would grow: they grow at a later one.
#[test]
fn windows_grow_when_no_message_is_awaited() {
    let test = Test::new(Ranks::Processes, 2);
    test.run(|comm| {
        let (stream, named) = stream();
        let (beside, beside_named) = crate::gpu::stream();
        let arrays = [1000, 5_000_000, 5_000_001].map(|count| array_of(&stream, 1.0, count));
        let passed = array_of(&beside, 7.0, 100);
        let sum = |array: &Array, expected| {
            all_reduce(&comm, array, named).expect("a call");
            assert_all(array, &stream, 2.0);
            assert_eq!(window_bytes(&comm), expected);
        };
        sum(&arrays[0], 32 << 20);
        let place = (Some(1 - comm.rank()), 0);
        let received =
            (comm.rank() == 0).then(|| message(&comm, &passed, place, beside_named, false));
        sum(&arrays[1], 32 << 20);
        let sent = (comm.rank() == 1).then(|| message(&comm, &passed, place, beside_named, true));
        for work in received.into_iter().chain(sent) {
            work.wait(None).expect("a message");
        }
        sum(&arrays[2], (32 << 20) + (64 << 20));
        together(&comm);
    });
}

/// Where processes share a device, one rank makes the sum of a large array.
#[test]
fn one_rank_makes_a_large_sum_for_all() {
    let test = Test::new(Ranks::Processes, 5);
    test.run(|comm| {
        let (stream, named) = stream();
        let own: Vec<f32> = (0..4_400_003)
            .map(|at| ((at * 7 + comm.rank() * 13) % 101) as f32)
            .collect();
        let sum = |at| (0..5).map(|rank| (at * 7 + rank * 13) % 101).sum();
        let expected: [usize; 101] = std::array::from_fn(sum);
        let array = Array::of(&stream, &bytes_of(&own));
        for _ in 0..2 {
            array.write(&stream, &bytes_of(&own));
            all_reduce(&comm, &array, named).expect("a call");
            let sums = floats(&array.read(&stream));
            for (at, sum) in sums.iter().enumerate() {
                assert_eq!(*sum, expected[at % 101] as f32, "element {at}");
            }
        }
        together(&comm);
    });
}

/// Whatever way short collectives go, and whatever the host would do by itself, they fold in rank order, as a kernel does.
#[test]
fn short_sums_fold_in_rank_order() {
    const ROOT: usize = 6;
    let test = Test {
        config: &[("algorithm", "tree")],
        ..Test::new(Ranks::Processes, 8)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let value = |rank: usize, at: usize| 1.0 / (1 + rank * 31 + at) as f32;
        for count in [1, 1003, 40_000] {
            let own: Vec<f32> = (0..count).map(|at| value(comm.rank(), at)).collect();
            let sum = |at: usize| (1..8).fold(value(0, at), |sum, rank| sum + value(rank, at));
            let expected: Vec<f32> = (0..count).map(sum).collect();
            let array = Array::of(&stream, &bytes_of(&own));
            all_reduce(&comm, &array, named).expect("a call");
            assert_eq!(floats(&array.read(&stream)), expected, "{count} elements");
            array.write(&stream, &bytes_of(&own));
            let is_root = comm.rank() == ROOT;
            let output = is_root.then(|| array.memory());
            let input = (!is_root).then(|| array.memory());
            let request = Request::reduce(DataType::Float32, ReduceOp::Sum, ROOT, input, output);
            // SAFETY: the array is read, below, when the operation has ended.
            let work = unsafe { comm.start(request.on(named), None) };
            work.expect("a call").wait(None).expect("a sum");
            let got = floats(&array.read(&stream));
            assert_eq!(
                got,
                if is_root { expected } else { own },
                "{count} elements"
            );
        }
    });
}
