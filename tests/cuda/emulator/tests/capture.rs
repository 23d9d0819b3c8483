//! Stream capture and graphs.

mod common;

use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::gpu::sys::CUstreamCaptureMode_enum::{self as Mode, *};
use common::gpu::*;
use common::{alone, number, together};

fn begin(stream: Stream, mode: Mode) {
    ok!(cuStreamBeginCapture_v2(stream, mode));
}

fn end(stream: Stream) -> sys::CUgraph {
    let mut graph = null_mut();
    ok!(cuStreamEndCapture(stream, &mut graph));
    graph
}

/// Ends a capture that was spoilt.
fn end_spoilt(stream: Stream) {
    let mut graph = null_mut();
    fails!(
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        cuStreamEndCapture(stream, &mut graph)
    );
    assert_eq!(status(stream), 0);
}

fn executable(graph: sys::CUgraph) -> sys::CUgraphExec {
    let mut executable = null_mut();
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    executable
}

fn status(stream: Stream) -> u32 {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    ok!(cuStreamIsCapturing(stream, &mut status));
    status as u32
}

#[test]
fn a_graph_does_again_what_was_captured() {
    let name = "a_graph_does_again_what_was_captured";
    let reports = together(name, 1, &[], |_| {
        start(0);
        let (stream, words) = (stream(), pinned(3));
        let sum = function(
            module("int32", &["unisono_reduce_sum"]),
            "unisono_reduce_sum",
        );
        let (a, total) = (upload(&[0]), upload(&[0]));
        begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
        assert_eq!(status(stream), 1);
        ok!(cuStreamWaitValue32_v2(stream, seen(&words[0]), 1, 1));
        ok!(cuStreamWriteValue32_v2(stream, seen(&words[0]), 0, 0));
        ok!(cuMemcpyHtoDAsync_v2(a, words[1].as_ptr().cast(), 4, stream));
        assert_eq!(
            launch_sum(sum, stream, total, &[total, a], 1),
            CUresult::CUDA_SUCCESS
        );
        ok!(cuMemcpyDtoHAsync_v2(
            words[2].as_ptr().cast(),
            total,
            4,
            stream
        ));
        let graph = end(stream);
        assert_eq!(status(stream), 0);
        let mut nodes = 0;
        ok!(cuGraphGetNodes(graph, null_mut(), &mut nodes));
        assert_eq!(nodes, 5);
        let executable = executable(graph);
        ok!(cuGraphDestroy(graph));
        // Nothing has happened yet.
        ok!(cuStreamSynchronize(stream));
        assert_eq!(words[2].load(Ordering::SeqCst), 0);
        for round in 1..=3_u32 {
            words[1].store(10 * round, Ordering::SeqCst);
            ok!(cuGraphLaunch(executable, stream));
            fails!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
            words[0].store(1, Ordering::SeqCst);
            ok!(cuStreamSynchronize(stream));
            assert_eq!(words[0].load(Ordering::SeqCst), 0);
        }
        assert_eq!(words[2].load(Ordering::SeqCst), 60);
        ok!(cuGraphExecDestroy(executable));
        fails!(CUDA_ERROR_INVALID_HANDLE, cuGraphLaunch(executable, stream));
    });
    assert_eq!(number(&reports[0], "graphs"), 0);
    assert_eq!(number(&reports[0], "graph_executables"), 0);
}

#[test]
fn streams_join_a_capture_by_events() {
    alone("streams_join_a_capture_by_events", &[], || {
        start(0);
        let (main, side, words) = (stream(), stream(), pinned(4));
        let (fork, join) = (event(), event());
        begin(main, CU_STREAM_CAPTURE_MODE_GLOBAL);
        ok!(cuEventRecord(fork, main));
        ok!(cuStreamWaitEvent(side, fork, 0));
        assert_eq!(status(side), 1);
        // The branches run at the same time: this one waits for what the other writes.
        hold(main, &words[0]);
        ok!(cuStreamWriteValue32_v2(side, seen(&words[0]), 1, 0));
        ok!(cuStreamWriteValue32_v2(side, seen(&words[1]), 1, 0));
        ok!(cuEventRecord(join, side));
        ok!(cuStreamWaitEvent(main, join, 0));
        ok!(cuStreamWriteValue32_v2(main, seen(&words[2]), 1, 0));
        let executable = executable(end(main));
        assert_eq!(status(side), 0);
        ok!(cuGraphLaunch(executable, main));
        ok!(cuStreamSynchronize(main));
        assert!(
            words[..3]
                .iter()
                .all(|word| word.load(Ordering::SeqCst) == 1)
        );
        // The events belong to the capture that is over.
        fails!(CUDA_ERROR_CAPTURED_EVENT, cuEventSynchronize(join));
        fails!(CUDA_ERROR_CAPTURED_EVENT, cuStreamWaitEvent(side, fork, 0));
        ok!(cuEventRecord(join, side));
        ok!(cuEventSynchronize(join));
    });
}

#[test]
fn a_branch_that_is_not_joined_is_an_error() {
    alone("a_branch_that_is_not_joined_is_an_error", &[], || {
        start(0);
        let (main, side, words, fork) = (stream(), stream(), pinned(1), event());
        begin(main, CU_STREAM_CAPTURE_MODE_GLOBAL);
        ok!(cuEventRecord(fork, main));
        ok!(cuStreamWaitEvent(side, fork, 0));
        ok!(cuStreamWriteValue32_v2(side, seen(&words[0]), 1, 0));
        let mut graph = null_mut();
        fails!(
            CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
            cuStreamEndCapture(main, &mut graph)
        );
        assert_eq!(status(main), 0);
        assert_eq!(status(side), 0);
    });
}

#[test]
fn work_outside_may_not_be_waited_for() {
    alone("work_outside_may_not_be_waited_for", &[], || {
        start(0);
        let (main, other, outside) = (stream(), stream(), event());
        ok!(cuEventRecord(outside, other));
        begin(main, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        fails!(
            CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
            cuStreamWaitEvent(main, outside, 0)
        );
        assert_eq!(status(main), 2);
        fails!(
            CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            cuEventRecord(outside, main)
        );
        end_spoilt(main);
        // Two captures do not mix.
        let inside = event();
        begin(main, CU_STREAM_CAPTURE_MODE_RELAXED);
        begin(other, CU_STREAM_CAPTURE_MODE_RELAXED);
        ok!(cuEventRecord(inside, main));
        fails!(
            CUDA_ERROR_STREAM_CAPTURE_MERGE,
            cuStreamWaitEvent(other, inside, 0)
        );
        end_spoilt(main);
        end_spoilt(other);
    });
}

#[test]
fn forbidden_calls_spoil_a_global_capture() {
    alone("forbidden_calls_spoil_a_global_capture", &[], || {
        start(0);
        let context = start(0);
        let (main, recorded, memory) = (stream(), event(), allocate(64));
        ok!(cuEventRecord(recorded, stream()));
        ok!(cuEventSynchronize(recorded));
        let forbidden: [&dyn Fn() -> CUresult; 6] = [
            &|| cu!(cuEventQuery(recorded)),
            &|| cu!(cuMemAlloc_v2(&mut 0, 64)),
            &|| cu!(cuMemFree_v2(memory)),
            &|| cu!(cuCtxSynchronize()),
            &|| cu!(cuStreamSynchronize(main)),
            &|| cu!(cuMemcpyDtoD_v2(memory, memory, 4)),
        ];
        for call in forbidden {
            begin(main, CU_STREAM_CAPTURE_MODE_GLOBAL);
            assert_eq!(call(), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            end_spoilt(main);
        }
        // From another thread, too, unless it looks away.
        begin(main, CU_STREAM_CAPTURE_MODE_GLOBAL);
        let (context, event) = (context as usize, recorded as usize);
        let query = move |relaxed: bool| {
            std::thread::spawn(move || {
                ok!(cuCtxSetCurrent(context as sys::CUcontext));
                if relaxed {
                    let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
                    ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
                    assert_eq!(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
                }
                cu!(cuEventQuery(event as Event))
            })
            .join()
            .unwrap()
        };
        assert_eq!(query(true), CUresult::CUDA_SUCCESS);
        assert_eq!(status(main), 1);
        assert_eq!(
            query(false),
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        );
        end_spoilt(main);
        // A capture in thread-local mode is no other thread's business.
        begin(main, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        assert_eq!(query(false), CUresult::CUDA_SUCCESS);
        end(main);
        ok!(cuMemFree_v2(memory));
    });
}

#[test]
fn pageable_copies_and_the_legacy_stream_are_refused() {
    alone(
        "pageable_copies_and_the_legacy_stream_are_refused",
        &[],
        || {
            start(0);
            let (main, memory, own) = (blocking_stream(), allocate(64), 1_u32);
            begin(main, CU_STREAM_CAPTURE_MODE_RELAXED);
            fails!(
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                cuMemcpyHtoDAsync_v2(memory, (&raw const own).cast(), 4, main)
            );
            end_spoilt(main);
            begin(main, CU_STREAM_CAPTURE_MODE_RELAXED);
            fails!(
                CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                cuMemsetD8Async(memory, 0, 4, LEGACY)
            );
            end_spoilt(main);
            // A stream that has nothing to do with the legacy one does not mind.
            let free = stream();
            begin(free, CU_STREAM_CAPTURE_MODE_RELAXED);
            ok!(cuMemsetD8Async(memory, 0, 4, LEGACY));
            end(free);
            fails!(
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                cuStreamBeginCapture_v2(LEGACY, CU_STREAM_CAPTURE_MODE_RELAXED)
            );
        },
    );
}

#[test]
fn a_capture_ends_where_it_began() {
    alone("a_capture_ends_where_it_began", &[], || {
        let context = start(0) as usize;
        let (main, side, fork) = (stream(), stream(), event());
        let mut graph = null_mut();
        fails!(
            CUDA_ERROR_ILLEGAL_STATE,
            cuStreamEndCapture(main, &mut graph)
        );
        begin(main, CU_STREAM_CAPTURE_MODE_GLOBAL);
        fails!(
            CUDA_ERROR_ILLEGAL_STATE,
            cuStreamBeginCapture_v2(main, CU_STREAM_CAPTURE_MODE_GLOBAL)
        );
        let elsewhere = {
            let main = main as usize;
            std::thread::spawn(move || {
                ok!(cuCtxSetCurrent(context as sys::CUcontext));
                cu!(cuStreamEndCapture(main as Stream, &mut null_mut()))
            })
        };
        let refused = CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
        assert_eq!(elsewhere.join().unwrap(), refused);
        ok!(cuEventRecord(fork, main));
        ok!(cuStreamWaitEvent(side, fork, 0));
        fails!(
            CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
            cuStreamEndCapture(side, &mut graph)
        );
        end_spoilt(main);
    });
}

#[test]
fn a_graph_does_not_overtake_itself() {
    alone("a_graph_does_not_overtake_itself", &[], || {
        start(0);
        let (first, second, words) = (stream(), stream(), pinned(2));
        let (gate, begun) = (&words[0], &words[1]);
        begin(first, CU_STREAM_CAPTURE_MODE_GLOBAL);
        ok!(cuStreamWriteValue32_v2(first, seen(begun), 1, 0));
        hold(first, gate);
        ok!(cuStreamWriteValue32_v2(first, seen(gate), 0, 0));
        let executable = executable(end(first));
        ok!(cuGraphLaunch(executable, first));
        while begun.swap(0, Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        ok!(cuGraphLaunch(executable, second));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(begun.load(Ordering::SeqCst), 0);
        release(gate);
        while begun.swap(0, Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        ok!(cuStreamSynchronize(first));
        release(gate);
        ok!(cuCtxSynchronize());
    });
}

/// To ask the driver for the context or the number of a stream that is captured is an error.
#[test]
fn a_captured_stream_is_not_asked_what_it_is() {
    alone("a_captured_stream_is_not_asked_what_it_is", &[], || {
        start(0);
        let (stream, other) = (stream(), stream());
        let (mut context, mut number, mut another) = (null_mut(), 0, 0);
        for question in 0..2 {
            ok!(cuStreamGetId(stream, &mut number));
            begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
            ok!(cuStreamGetId(other, &mut another));
            assert_ne!(number, another);
            let refused = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
            let answer = match question {
                0 => cu!(cuStreamGetCtx(stream, &mut context)),
                _ => cu!(cuStreamGetId(stream, &mut number)),
            };
            assert_eq!(answer, refused);
            end_spoilt(stream);
        }
        let mut still = 0;
        ok!(cuStreamGetId(stream, &mut still));
        assert_eq!(still, number);
    });
}
