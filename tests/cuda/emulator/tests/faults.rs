//! Errors on request, other drivers than the usual one, and the report of what is left.

mod common;

use std::ffi::{CStr, c_char};
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::Instant;

use common::gpu::*;
use common::{alone, number, together};

#[test]
fn the_nth_call_fails_as_asked() {
    let settings = [(
        "FAIL",
        "cuMemAlloc_v2:2=CUDA_ERROR_OUT_OF_MEMORY,cuStreamCreate:3+=999",
    )];
    alone("the_nth_call_fails_as_asked", &settings, || {
        start(0);
        let mut address = 0;
        ok!(cuMemAlloc_v2(&mut address, 4));
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&mut address, 4));
        ok!(cuMemAlloc_v2(&mut address, 4));
        stream();
        stream();
        let mut none = null_mut();
        for _ in 0..2 {
            fails!(CUDA_ERROR_UNKNOWN, cuStreamCreate(&mut none, 0));
        }
    });
}

#[test]
fn the_nth_operation_breaks_the_context_as_asked() {
    let settings = [("FAIL", "write:2=CUDA_ERROR_LAUNCH_FAILED")];
    alone(
        "the_nth_operation_breaks_the_context_as_asked",
        &settings,
        || {
            start(0);
            let (stream, words) = (stream(), pinned(2));
            ok!(cuStreamWriteValue32_v2(stream, seen(&words[0]), 1, 0));
            ok!(cuStreamSynchronize(stream));
            ok!(cuStreamWriteValue32_v2(stream, seen(&words[1]), 1, 0));
            fails!(CUDA_ERROR_LAUNCH_FAILED, cuStreamSynchronize(stream));
            assert_eq!(words[0].load(Ordering::SeqCst), 1);
            assert_eq!(words[1].load(Ordering::SeqCst), 0);
            fails!(CUDA_ERROR_LAUNCH_FAILED, cuStreamSynchronize(stream));
        },
    );
}

#[test]
fn operations_take_longer_as_asked() {
    alone(
        "operations_take_longer_as_asked",
        &[("DELAY", "write:300000")],
        || {
            start(0);
            let (stream, words) = (stream(), pinned(1));
            let before = Instant::now();
            ok!(cuStreamWriteValue32_v2(stream, seen(&words[0]), 1, 0));
            fails!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
            ok!(cuStreamSynchronize(stream));
            assert!(before.elapsed().as_millis() >= 300);
        },
    );
}

#[test]
fn a_stub_library_says_so() {
    alone("a_stub_library_says_so", &[("STUB", "yes")], || {
        fails!(CUDA_ERROR_STUB_LIBRARY, cuInit(0));
    });
}

#[test]
fn there_may_be_no_device_or_an_old_driver() {
    alone(
        "there_may_be_no_device_or_an_old_driver",
        &[("DEVICES", "0"), ("VERSION", "11040")],
        || {
            let mut version = 0;
            ok!(cuDriverGetVersion(&mut version));
            assert_eq!(version, 11040);
            fails!(CUDA_ERROR_NO_DEVICE, cuInit(0));
            let mut count = 0;
            fails!(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&mut count));
        },
    );
}

#[test]
fn there_may_be_no_memory_operations() {
    alone(
        "there_may_be_no_memory_operations",
        &[("MEMORY_OPERATIONS", "no")],
        || {
            start(0);
            let (stream, words) = (stream(), pinned(1));
            let word = seen(&words[0]);
            fails!(
                CUDA_ERROR_NOT_SUPPORTED,
                cuStreamWriteValue32_v2(stream, word, 1, 0)
            );
            fails!(
                CUDA_ERROR_NOT_SUPPORTED,
                cuStreamWaitValue32_v2(stream, word, 1, 0)
            );
        },
    );
}

#[test]
fn devices_differ_and_misfits_are_refused() {
    alone(
        "devices_differ_and_misfits_are_refused",
        &[("DEVICES", "2")],
        || {
            start(0);
            let mut count = 0;
            ok!(cuDeviceGetCount(&mut count));
            assert_eq!(count, 2);
            let mut uuids = [sys::CUuuid { bytes: [0; 16] }; 2];
            ok!(cuDeviceGetUuid_v2(&mut uuids[0], 0));
            ok!(cuDeviceGetUuid_v2(&mut uuids[1], 1));
            assert_ne!(uuids[0].bytes, uuids[1].bytes);
            let mut device = 0;
            fails!(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&mut device, 2));
            let nothing = std::ptr::without_provenance_mut(0x1234);
            fails!(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(nothing));
            let mut name: *const c_char = null_mut();
            ok!(cuGetErrorName(
                CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
                &mut name
            ));
            // SAFETY: the driver's names are constants.
            let name = unsafe { CStr::from_ptr(name) };
            assert_eq!(name, c"CUDA_ERROR_ILLEGAL_ADDRESS");
        },
    );
}

#[test]
fn what_may_wait_for_the_device_does_so_when_asked() {
    alone(
        "what_may_wait_for_the_device_does_so_when_asked",
        &[("SYNCHRONIZE", "always")],
        || {
            start(0);
            let (stream, words) = (stream(), pinned(2));
            hold(stream, &words[0]);
            ok!(cuStreamWriteValue32_v2(stream, seen(&words[1]), 1, 0));
            std::thread::spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(30));
                release(&words[0]);
            });
            allocate(4);
            assert_eq!(words[1].load(Ordering::SeqCst), 1);
        },
    );
}

/// Loading is lazy, so the first launch is one of the calls that may wait, unless the function was asked for more than
/// its handle before.
#[test]
fn a_function_is_loaded_when_first_needed() {
    alone(
        "a_function_is_loaded_when_first_needed",
        &[("SYNCHRONIZE", "always")],
        || {
            start(0);
            let (held, free, words) = (stream(), stream(), pinned(2));
            let name = "unisono_reduce_sum";
            let sums = ["int32", "uint32"].map(|dtype| function(module(dtype, &[name]), name));
            let at = upload(&[1]);
            let mut threads = 0;
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
            ok!(cuFuncGetAttribute(&mut threads, attribute, sums[0]));
            hold(held, &words[0]);
            ok!(cuStreamWriteValue32_v2(held, seen(&words[1]), 1, 0));
            let launched = launch_sum(sums[0], free, at, &[at], 1);
            assert_eq!(launched, CUresult::CUDA_SUCCESS);
            assert_eq!(words[1].load(Ordering::SeqCst), 0);
            std::thread::spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(30));
                release(&words[0]);
            });
            let launched = launch_sum(sums[1], free, at, &[at], 1);
            assert_eq!(launched, CUresult::CUDA_SUCCESS);
            assert_eq!(words[1].load(Ordering::SeqCst), 1);
        },
    );
}

#[test]
fn functions_are_found_by_name() {
    alone("functions_are_found_by_name", &[], || {
        let mut address = null_mut();
        let mut found = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
        ok!(cuGetProcAddress_v2(
            c"cuMemAlloc".as_ptr(),
            &mut address,
            12000,
            0,
            &mut found
        ));
        assert!(!address.is_null());
        fails!(
            CUDA_ERROR_NOT_FOUND,
            cuGetProcAddress_v2(c"cuNothing".as_ptr(), &mut address, 12000, 0, &mut found)
        );
        assert_eq!(found as u32, 1);
    });
}

#[test]
fn what_leaks_is_in_the_report() {
    let reports = together("what_leaks_is_in_the_report", 1, &[], |_| {
        start(0);
        let kept = allocate(1000);
        ok!(cuMemFree_v2(allocate(500)));
        stream();
        blocking_stream();
        event();
        let page = Box::leak(Box::new([0_u8; 64]));
        ok!(cuMemHostRegister_v2(page.as_mut_ptr().cast(), 64, 0));
        let words = pinned(1);
        module("float32", &[]);
        hold(stream(), &words[0]);
        assert_ne!(kept, 0);
    });
    let expected = [
        ("allocations", 1),
        ("allocated_bytes", 1000),
        ("peak_bytes", 1500),
        ("pinned", 1),
        ("registrations", 1),
        ("imports", 0),
        ("streams", 3),
        ("events", 1),
        ("modules", 1),
        ("contexts", 1),
        ("unfinished_operations", 1),
        ("graphs", 0),
        ("cuMemAlloc_v2", 2),
    ];
    for (name, count) in expected {
        assert_eq!(number(&reports[0], name), count, "{name}");
    }
}
