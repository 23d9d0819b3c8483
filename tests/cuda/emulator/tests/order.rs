//! Streams, events and memory operations: what comes after what.

mod common;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::gpu::*;
use common::{alone, together};

#[test]
fn a_stream_is_in_order_and_others_are_not_held_up() {
    alone(
        "a_stream_is_in_order_and_others_are_not_held_up",
        &[],
        || {
            start(0);
            let (held, free) = (stream(), stream());
            let words = pinned(3);
            hold(held, &words[0]);
            ok!(cuStreamWriteValue32_v2(held, seen(&words[1]), 1, 0));
            ok!(cuStreamWriteValue32_v2(free, seen(&words[2]), 1, 0));
            ok!(cuStreamSynchronize(free));
            assert_eq!(words[1].load(Ordering::SeqCst), 0);
            assert_eq!(words[2].load(Ordering::SeqCst), 1);
            fails!(CUDA_ERROR_NOT_READY, cuStreamQuery(held));
            release(&words[0]);
            ok!(cuStreamSynchronize(held));
            assert_eq!(words[1].load(Ordering::SeqCst), 1);
        },
    );
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_and_they_for_it() {
    alone(
        "the_legacy_stream_waits_for_blocking_streams_and_they_for_it",
        &[],
        || {
            start(0);
            let (blocking, other, free) = (blocking_stream(), blocking_stream(), stream());
            let words = pinned(5);
            hold(blocking, &words[0]);
            ok!(cuStreamWriteValue32_v2(LEGACY, seen(&words[1]), 1, 0));
            // The other blocking stream waits for the legacy one, and so for the first.
            ok!(cuStreamWriteValue32_v2(other, seen(&words[2]), 1, 0));
            ok!(cuStreamWriteValue32_v2(free, seen(&words[3]), 1, 0));
            ok!(cuStreamSynchronize(free));
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(words[1].load(Ordering::SeqCst), 0);
            assert_eq!(words[2].load(Ordering::SeqCst), 0);
            release(&words[0]);
            ok!(cuStreamSynchronize(other));
            assert_eq!(words[1].load(Ordering::SeqCst), 1);
            assert_eq!(words[2].load(Ordering::SeqCst), 1);
        },
    );
}

#[test]
fn events_order_streams() {
    alone("events_order_streams", &[], || {
        start(0);
        let (first, second) = (stream(), stream());
        let (event, words) = (event(), pinned(2));
        ok!(cuEventQuery(event));
        ok!(cuStreamWaitEvent(second, event, 0));
        ok!(cuStreamSynchronize(second));
        hold(first, &words[0]);
        ok!(cuEventRecord(event, first));
        ok!(cuStreamWaitEvent(second, event, 0));
        ok!(cuStreamWriteValue32_v2(second, seen(&words[1]), 1, 0));
        // Destroying the event changes nothing for the stream that waits.
        fails!(CUDA_ERROR_NOT_READY, cuEventQuery(event));
        ok!(cuEventDestroy_v2(event));
        fails!(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(event));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(words[1].load(Ordering::SeqCst), 0);
        release(&words[0]);
        ok!(cuStreamSynchronize(second));
    });
}

#[test]
fn a_wait_means_the_record_before_it() {
    alone("a_wait_means_the_record_before_it", &[], || {
        start(0);
        let (first, second) = (stream(), stream());
        let (event, words) = (event(), pinned(1));
        ok!(cuEventRecord(event, first));
        ok!(cuStreamWaitEvent(second, event, 0));
        hold(first, &words[0]);
        ok!(cuEventRecord(event, first));
        // The second record does not hold up the wait for the first.
        ok!(cuStreamSynchronize(second));
        release(&words[0]);
        ok!(cuEventSynchronize(event));
    });
}

#[test]
fn events_measure_time() {
    alone("events_measure_time", &[("DELAY", "copy:20000")], || {
        start(0);
        let (stream, a, b) = (stream(), allocate(4), allocate(4));
        let mut events: [Event; 2] = [null_mut(); 2];
        for event in &mut events {
            ok!(cuEventCreate(event, 0));
        }
        let mut time = 0.0;
        fails!(
            CUDA_ERROR_INVALID_HANDLE,
            cuEventElapsedTime(&mut time, events[0], events[1])
        );
        ok!(cuEventRecord(events[0], stream));
        ok!(cuMemcpyDtoDAsync_v2(b, a, 4, stream));
        ok!(cuEventRecord(events[1], stream));
        ok!(cuEventSynchronize(events[1]));
        ok!(cuEventElapsedTime(&mut time, events[0], events[1]));
        assert!(time >= 20.0, "{time}");
    });
}

#[test]
fn waits_compare_as_they_say() {
    alone("waits_compare_as_they_say", &[], || {
        start(0);
        // (what is there, what is waited for, how, whether that is enough)
        let cases = [
            (5, 5, 0, true),
            (6, 5, 0, true),
            (4, 5, 0, false),
            // Greater or equal goes round.
            (3, u32::MAX, 0, true),
            (5, 5, 1, true),
            (6, 5, 1, false),
            (0b100, 0b110, 2, true),
            (0b001, 0b110, 2, false),
            (u32::MAX - 1, 0, 3, true),
            (u32::MAX - 1, 1, 3, false),
        ];
        let words = pinned(cases.len());
        for (word, (there, value, flags, enough)) in words.iter().zip(cases) {
            let stream = stream();
            word.store(there, Ordering::SeqCst);
            ok!(cuStreamWaitValue32_v2(stream, seen(word), value, flags));
            if enough {
                ok!(cuStreamSynchronize(stream));
            } else {
                std::thread::sleep(Duration::from_millis(5));
                fails!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
            }
        }
        let stream = stream();
        let word = seen(&words[0]);
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuStreamWaitValue32_v2(stream, word + 2, 0, 0)
        );
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuStreamWaitValue32_v2(stream, word, 0, 4)
        );
        fails!(
            CUDA_ERROR_NOT_SUPPORTED,
            cuStreamWaitValue32_v2(stream, word, 0, 1 << 30)
        );
        let own = 0_u32;
        let own = &raw const own as u64;
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuStreamWaitValue32_v2(stream, own, 0, 0)
        );
    });
}

#[test]
fn batches_do_all_in_order() {
    alone("batches_do_all_in_order", &[], || {
        start(0);
        let (stream, words) = (stream(), pinned(3));
        // SAFETY: all members are numbers, for which zero bytes are values.
        let mut batch: [sys::CUstreamBatchMemOpParams; 3] = unsafe { std::mem::zeroed() };
        for (index, parameters) in batch.iter_mut().enumerate() {
            let write = index != 1;
            parameters.waitValue.operation = if write {
                sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32
            } else {
                sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32
            };
            // SAFETY: the members of both operations lie at the same places.
            let wait = unsafe { &mut parameters.waitValue };
            wait.address = seen(&words[index]);
            wait.__bindgen_anon_1.value = 9;
            wait.flags = if write { 0 } else { 1 };
        }
        ok!(cuStreamBatchMemOp_v2(stream, 3, batch.as_mut_ptr(), 0));
        while words[0].load(Ordering::SeqCst) != 9 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(words[2].load(Ordering::SeqCst), 0);
        words[1].store(9, Ordering::SeqCst);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(words[2].load(Ordering::SeqCst), 9);
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuStreamBatchMemOp_v2(stream, 0, batch.as_mut_ptr(), 0)
        );
    });
}

#[test]
fn a_wait_does_not_burn_a_core() {
    alone("a_wait_does_not_burn_a_core", &[], || {
        start(0);
        let (stream, words) = (stream(), pinned(1));
        hold(stream, &words[0]);
        let before = processor_time();
        std::thread::sleep(Duration::from_millis(400));
        let burnt = processor_time() - before;
        assert!(burnt < Duration::from_millis(200), "{burnt:?} of 400 ms");
        release(&words[0]);
        ok!(cuStreamSynchronize(stream));
    });
}

fn processor_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a live variable of the type the call writes.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

extern "C" fn count(argument: *mut c_void) {
    // SAFETY: the tests pass a word of pinned memory.
    let word = unsafe { std::sync::atomic::AtomicU32::from_ptr(argument.cast()) };
    let refused = cu!(cuCtxSynchronize()) == CUresult::CUDA_ERROR_NOT_PERMITTED;
    word.fetch_add(if refused { 1 } else { 100 }, Ordering::SeqCst);
}

#[test]
fn host_functions_come_in_order_and_may_not_call_the_driver() {
    alone(
        "host_functions_come_in_order_and_may_not_call_the_driver",
        &[],
        || {
            start(0);
            let (stream, words) = (stream(), pinned(2));
            hold(stream, &words[0]);
            for _ in 0..3 {
                ok!(cuLaunchHostFunc(
                    stream,
                    Some(count),
                    words[1].as_ptr().cast()
                ));
            }
            assert_eq!(words[1].load(Ordering::SeqCst), 0);
            release(&words[0]);
            ok!(cuStreamSynchronize(stream));
            assert_eq!(words[1].load(Ordering::SeqCst), 3);
        },
    );
}

#[test]
fn destroyed_streams_finish_and_freeing_waits_for_them() {
    alone(
        "destroyed_streams_finish_and_freeing_waits_for_them",
        &[],
        || {
            start(0);
            let (stream, words, memory) = (stream(), pinned(2), allocate(64));
            hold(stream, &words[0]);
            ok!(cuStreamWriteValue32_v2(stream, seen(&words[1]), 1, 0));
            ok!(cuStreamDestroy_v2(stream));
            fails!(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(stream));
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                release(&words[0]);
            });
            ok!(cuMemFree_v2(memory));
            assert_eq!(words[1].load(Ordering::SeqCst), 1);
        },
    );
}

#[test]
fn streams_of_another_context_are_refused() {
    alone(
        "streams_of_another_context_are_refused",
        &[("DEVICES", "2")],
        || {
            let first = start(0);
            let (stream, event) = (stream(), event());
            start(1);
            let other_event = common::gpu::event();
            fails!(
                CUDA_ERROR_INVALID_HANDLE,
                cuEventRecord(other_event, stream)
            );
            ok!(cuEventRecord(event, stream));
            let mut context = null_mut();
            ok!(cuStreamGetCtx(stream, &mut context));
            assert_eq!(context, first);
            ok!(cuCtxSetCurrent(null_mut()));
            fails!(CUDA_ERROR_INVALID_CONTEXT, cuStreamSynchronize(stream));
            fails!(CUDA_ERROR_INVALID_CONTEXT, cuStreamSynchronize(LEGACY));
        },
    );
}

#[test]
fn few_connections_make_streams_wait_for_each_other() {
    alone(
        "few_connections_make_streams_wait_for_each_other",
        &[("CONNECTIONS", "1")],
        || {
            start(0);
            let (held, other, words) = (stream(), stream(), pinned(2));
            hold(held, &words[0]);
            ok!(cuStreamWriteValue32_v2(other, seen(&words[1]), 1, 0));
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(words[1].load(Ordering::SeqCst), 0);
            release(&words[0]);
            ok!(cuStreamSynchronize(other));
        },
    );
}

#[test]
fn random_delays_change_the_order_of_streams_but_not_of_one() {
    let settings = [("RANDOM_DELAY", "300"), ("SEED", "7")];
    let name = "random_delays_change_the_order_of_streams_but_not_of_one";
    alone(name, &settings, || {
        start(0);
        let (first, second, words) = (stream(), stream(), pinned(2));
        let (mut ahead, mut behind) = (0, 0);
        for round in 1..=40 {
            ok!(cuStreamWriteValue32_v2(first, seen(&words[0]), round, 0));
            ok!(cuStreamWriteValue32_v2(second, seen(&words[1]), round, 0));
            while words[0].load(Ordering::SeqCst) != round
                && words[1].load(Ordering::SeqCst) != round
            {
                std::thread::yield_now();
            }
            if words[1].load(Ordering::SeqCst) == round {
                ahead += 1;
            } else {
                behind += 1;
            }
            ok!(cuCtxSynchronize());
            assert_eq!(words[0].load(Ordering::SeqCst), round);
        }
        assert!(ahead > 0 && behind > 0, "{ahead} {behind}");
    });
}

#[test]
fn processes_meet_by_flags_in_shared_memory() {
    let name = "processes_meet_by_flags_in_shared_memory";
    together(name, 2, &[], |rank| {
        start(0);
        let path = if rank.number == 0 {
            // SAFETY: the name is a C string.
            let file = unsafe { libc::memfd_create(c"flags".as_ptr(), 0) };
            // SAFETY: the call takes no pointers.
            assert_eq!(unsafe { libc::ftruncate(file, 4096) }, 0);
            let path = format!("/proc/{}/fd/{file}", std::process::id());
            rank.publish("flags", path.as_bytes());
            path
        } else {
            String::from_utf8(rank.expect("flags")).unwrap()
        };
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .unwrap();
        // SAFETY: the kernel chooses where nothing is mapped.
        let page = unsafe {
            let file = std::os::fd::AsRawFd::as_raw_fd(&file);
            libc::mmap(null_mut(), 4096, 3, libc::MAP_SHARED, file, 0)
        };
        ok!(cuMemHostRegister_v2(page, 4096, 2));
        let mut words = 0;
        ok!(cuMemHostGetDevicePointer_v2(&mut words, page, 0));
        let stream = stream();
        let (own, peers) = (
            words + 4 * rank.number as u64,
            words + 4 * (1 - rank.number as u64),
        );
        let began = Instant::now();
        for _ in 0..200 {
            ok!(cuStreamWriteValue32_v2(stream, own, 1, 0));
            ok!(cuStreamWaitValue32_v2(stream, peers, 1, 1));
            ok!(cuStreamWriteValue32_v2(stream, peers, 0, 0));
            ok!(cuStreamWaitValue32_v2(stream, own, 0, 1));
        }
        ok!(cuStreamSynchronize(stream));
        println!(
            "rank {}: 200 meetings in {:?}",
            rank.number,
            began.elapsed()
        );
        rank.publish(&format!("done-{}", rank.number), b"");
        rank.expect(&format!("done-{}", 1 - rank.number));
    });
}
