//! Device memory, host memory, and what the driver refuses.

mod common;

use std::ffi::c_void;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use common::gpu::*;
use common::{alone, failure_of, together};

#[test]
fn copies_go_there_and_back() {
    alone("copies_go_there_and_back", &[], || {
        start(0);
        let values: Vec<u32> = (0..100_000).collect();
        let (a, b) = (upload(&values), allocate(400_000));
        ok!(cuMemcpyDtoD_v2(b, a, 400_000));
        assert_eq!(download(b, 100_000), values);
        ok!(cuMemsetD32Async(b + 4, 7, 2, LEGACY));
        assert_eq!(download(b, 4), [0, 7, 7, 3]);
        ok!(cuMemsetD8Async(b, 0xff, 2, LEGACY));
        assert_eq!(download(b, 1), [0xffff]);
        ok!(cuMemFree_v2(a));
        ok!(cuMemFree_v2(b));
    });
}

#[test]
fn new_memory_is_not_zero() {
    alone("new_memory_is_not_zero", &[], || {
        start(0);
        assert_ne!(download(allocate(64), 16), [0; 16]);
    });
}

#[test]
fn misuse_is_refused_at_the_call() {
    alone("misuse_is_refused_at_the_call", &[], || {
        start(0);
        let a = upload(&[1, 2, 3, 4]);
        let mut there = [0_u32; 8];
        let host = there.as_mut_ptr().cast::<c_void>();
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(host, a, 17));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(host, a + 8, 16));
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemcpyDtoD_v2(a, a + (1 << 30), 4)
        );
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(a + 4));
        let mut none = 0;
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(&mut none, 0));
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&mut none, 1 << 39));
        ok!(cuMemFree_v2(a));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(a));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(host, a, 4));
        // Nothing of this has broken the context.
        ok!(cuCtxSynchronize());
    });
}

#[test]
fn a_host_that_follows_a_device_address_crashes() {
    let name = "a_host_that_follows_a_device_address_crashes";
    let message = failure_of(|| {
        alone(name, &[], || {
            start(0);
            let address = upload(&[1]);
            // SAFETY: none: this is the mistake.
            std::hint::black_box(unsafe { (address as *const u32).read_volatile() });
        });
    });
    let crashed = ExitStatus::from_raw(11).to_string();
    assert!(message.contains(&crashed), "{message}");
}

#[test]
fn registered_memory_is_reached_by_streams() {
    for pointers in ["same", "separate"] {
        let settings = [("HOST_POINTERS", pointers)];
        alone("registered_memory_is_reached_by_streams", &settings, || {
            start(0);
            let mut own = vec![0_u32; 4096];
            let host = own.as_mut_ptr().cast::<c_void>();
            let bytes = 4096 * 4;
            ok!(cuMemHostRegister_v2(host, bytes, 3));
            fails!(
                CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                cuMemHostRegister_v2(host.wrapping_add(64), 64, 3)
            );
            let mut address = 0;
            ok!(cuMemHostGetDevicePointer_v2(&mut address, host, 0));
            assert_eq!(address == host as u64, same_pointers());
            let mut direct = 0;
            ok!(cuDeviceGetAttribute(
                &mut direct,
                sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
                0
            ));
            assert_eq!(direct == 1, same_pointers());
            let stream = stream();
            ok!(cuStreamWriteValue32_v2(stream, address + 8, 42, 0));
            ok!(cuStreamSynchronize(stream));
            // SAFETY: the vector is alive and nothing writes it now.
            assert_eq!(unsafe { own.as_ptr().add(2).read_volatile() }, 42);
            ok!(cuMemHostUnregister(host));
            fails!(
                CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
                cuMemHostUnregister(host)
            );
            fails!(
                CUDA_ERROR_INVALID_VALUE,
                cuStreamWriteValue32_v2(stream, address + 8, 42, 0)
            );
            let nowhere = std::ptr::without_provenance_mut::<c_void>(1 << 12);
            fails!(
                CUDA_ERROR_INVALID_VALUE,
                cuMemHostRegister_v2(nowhere, 4096, 0)
            );
        });
    }
}

fn same_pointers() -> bool {
    std::env::var("CUDA_EMULATOR_HOST_POINTERS").unwrap() == "same"
}

#[test]
fn asynchronous_copies_happen_when_the_stream_gets_there() {
    alone(
        "asynchronous_copies_happen_when_the_stream_gets_there",
        &[],
        || {
            start(0);
            let (stream, gate, data) = (stream(), pinned(1), pinned(2));
            let device = upload(&[0]);
            hold(stream, &gate[0]);
            // Pinned: read late. The value of the time of the call must not be what arrives.
            ok!(cuMemcpyHtoDAsync_v2(
                device,
                data[0].as_ptr().cast(),
                4,
                stream
            ));
            ok!(cuMemcpyDtoHAsync_v2(
                data[1].as_ptr().cast(),
                device,
                4,
                stream
            ));
            data[0].store(5, Ordering::SeqCst);
            fails!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
            assert_eq!(data[1].load(Ordering::SeqCst), 0);
            release(&gate[0]);
            ok!(cuStreamSynchronize(stream));
            assert_eq!(data[1].load(Ordering::SeqCst), 5);
        },
    );
}

#[test]
fn pageable_memory_is_read_at_the_call() {
    alone("pageable_memory_is_read_at_the_call", &[], || {
        start(0);
        let (stream, gate) = (stream(), pinned(1));
        let device = upload(&[0]);
        let mut own = Box::new(3_u32);
        hold(stream, &gate[0]);
        ok!(cuMemcpyHtoDAsync_v2(
            device,
            (&raw const *own).cast(),
            4,
            stream
        ));
        *own = 4;
        release(&gate[0]);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(download(device, 1), [3]);
        // And a copy back is done when the call returns.
        ok!(cuMemcpyDtoHAsync_v2(
            (&raw mut *own).cast(),
            device,
            4,
            stream
        ));
        assert_eq!(*own, 3);
    });
}

#[test]
fn a_copy_within_the_host_is_done_when_the_call_returns() {
    alone(
        "a_copy_within_the_host_is_done_when_the_call_returns",
        &[("DELAY", "copy:20000")],
        || {
            start(0);
            let (stream, words) = (stream(), pinned(2));
            words[0].store(5, Ordering::SeqCst);
            ok!(cuMemcpyAsync(seen(&words[1]), seen(&words[0]), 4, stream));
            assert_eq!(words[1].load(Ordering::SeqCst), 5);
        },
    );
}

#[test]
fn pointers_tell_what_they_are() {
    alone("pointers_tell_what_they_are", &[("DEVICES", "2")], || {
        use sys::CUpointer_attribute_enum::*;
        start(0);
        let context = start(1);
        let address = allocate(1000);
        let mut ordinal = -1_i32;
        let data = (&raw mut ordinal).cast::<c_void>();
        ok!(cuPointerGetAttribute(
            data,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            address + 10
        ));
        assert_eq!(ordinal, 1);
        let (mut start, mut bytes) = (0, 0);
        ok!(cuMemGetAddressRange_v2(
            &mut start,
            &mut bytes,
            address + 999
        ));
        assert_eq!((start, bytes), (address, 1000));
        fails!(
            CUDA_ERROR_NOT_FOUND,
            cuMemGetAddressRange_v2(&mut start, &mut bytes, address + 1000)
        );
        let mut owner: sys::CUcontext = null_mut();
        let mut kind = 0_u32;
        let mut attributes = [
            CU_POINTER_ATTRIBUTE_CONTEXT,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        ];
        let mut places = [(&raw mut owner).cast::<c_void>(), (&raw mut kind).cast()];
        ok!(cuPointerGetAttributes(
            2,
            attributes.as_mut_ptr(),
            places.as_mut_ptr(),
            address
        ));
        assert_eq!((owner, kind), (context, 2));
        let unknown = &raw const kind as u64;
        ok!(cuPointerGetAttributes(
            2,
            attributes.as_mut_ptr(),
            places.as_mut_ptr(),
            unknown
        ));
        assert_eq!((owner, kind), (null_mut(), 0));
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuPointerGetAttribute(data, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, unknown)
        );
    });
}

#[test]
fn addresses_come_back_only_when_asked() {
    for reuse in ["no", "yes"] {
        let name = "addresses_come_back_only_when_asked";
        alone(name, &[("REUSE", reuse)], || {
            start(0);
            let first = allocate(1 << 20);
            ok!(cuMemFree_v2(first));
            let asked = std::env::var("CUDA_EMULATOR_REUSE").unwrap() == "yes";
            assert_eq!(allocate(1 << 20) == first, asked);
        });
    }
}

#[test]
fn contexts_end_with_their_last_release() {
    let name = "contexts_end_with_their_last_release";
    let reports = together(name, 1, &[], |_| {
        let context = start(0);
        let mut same = null_mut();
        ok!(cuDevicePrimaryCtxRetain(&mut same, 0));
        assert_eq!(context, same);
        let (stream, address) = (stream(), allocate(64));
        ok!(cuDevicePrimaryCtxRelease_v2(0));
        ok!(cuStreamSynchronize(stream));
        ok!(cuDevicePrimaryCtxRelease_v2(0));
        fails!(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuMemFree_v2(address));
        fails!(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease_v2(0));
        ok!(cuCtxSetCurrent(null_mut()));
        fails!(CUDA_ERROR_INVALID_CONTEXT, cuCtxSynchronize());
    });
    for report in reports {
        for left in ["contexts", "allocations", "streams"] {
            assert_eq!(common::number(&report, left), 0, "{left}");
        }
    }
}

#[test]
fn contexts_of_ones_own_are_beside_the_primary_one() {
    let name = "contexts_of_ones_own_are_beside_the_primary_one";
    let reports = together(name, 1, &[], |_| {
        let primary = start(0);
        let (kept, memory) = (stream(), allocate(64));
        let (mut own, mut current) = (null_mut(), null_mut());
        ok!(cuCtxCreate_v2(&mut own, 0, 0));
        ok!(cuCtxGetCurrent(&mut current));
        assert!(own != primary && current == own);
        let mut of = null_mut();
        ok!(cuStreamGetCtx(stream(), &mut of));
        assert_eq!(of, own);
        ok!(cuStreamGetCtx(kept, &mut of));
        assert_eq!(of, primary);
        allocate(64);
        fails!(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy_v2(primary));
        ok!(cuCtxDestroy_v2(own));
        fails!(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy_v2(own));
        // The content of the primary context stays, and that context is current again.
        ok!(cuCtxGetCurrent(&mut current));
        assert_eq!(current, primary);
        ok!(cuStreamSynchronize(kept));
        ok!(cuMemFree_v2(memory));
        ok!(cuStreamDestroy_v2(kept));
        ok!(cuDevicePrimaryCtxRelease_v2(0));
    });
    for report in reports {
        for left in ["contexts", "allocations", "streams"] {
            assert_eq!(common::number(&report, left), 0, "{left}");
        }
    }
}

#[test]
fn a_forked_child_has_no_driver() {
    alone("a_forked_child_has_no_driver", &[], || {
        start(0);
        // SAFETY: the child calls the driver, which refuses without taking a lock, and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = cu!(cuCtxSynchronize()) == CUresult::CUDA_ERROR_NOT_INITIALIZED;
            // SAFETY: it takes no pointers and does not return.
            unsafe { libc::_exit(if refused { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: the child is ours and `status` is a live variable.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(status, 0);
        ok!(cuCtxSynchronize());
    });
}

#[test]
fn a_misspelt_setting_ends_the_process() {
    let name = "a_misspelt_setting_ends_the_process";
    let message = failure_of(|| {
        alone(name, &[("DEVISES", "2")], || {
            start(0);
        });
    });
    let aborted = ExitStatus::from_raw(6).to_string();
    assert!(message.contains(&aborted), "{message}");
}
