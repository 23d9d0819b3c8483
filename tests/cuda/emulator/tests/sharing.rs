//! Device memory between processes, and between devices.

mod common;

use std::time::Duration;

use common::gpu::*;
use common::{Rank, alone, number, together};

fn export(rank: &Rank, name: &str, address: Address) {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    ok!(cuIpcGetMemHandle(&mut handle, address));
    rank.publish(name, &handle.reserved.map(|byte| byte as u8));
}

fn handle(bytes: &[u8]) -> sys::CUipcMemHandle {
    let bytes: [u8; 64] = bytes.try_into().unwrap();
    sys::CUipcMemHandle {
        reserved: bytes.map(|byte| byte as i8),
    }
}

#[test]
fn memory_is_the_same_in_both_processes() {
    let name = "memory_is_the_same_in_both_processes";
    let reports = together(name, 2, &[], |rank| {
        start(0);
        if rank.number == 0 {
            // A small allocation in the middle of others.
            upload(&[9, 9]);
            let memory = upload(&[1, 2, 3]);
            upload(&[9, 9]);
            export(&rank, "handle", memory);
            rank.expect("written");
            assert_eq!(download(memory, 3), [1, 7, 3]);
            ok!(cuMemFree_v2(memory));
        } else {
            let handle = handle(&rank.expect("handle"));
            let (mut memory, mut again) = (0, 0);
            ok!(cuIpcOpenMemHandle_v2(&mut memory, handle, 1));
            ok!(cuIpcOpenMemHandle_v2(&mut again, handle, 1));
            assert_eq!(memory, again);
            assert_eq!(download(memory, 3), [1, 2, 3]);
            let mut there = [0_u32; 4];
            fails!(
                CUDA_ERROR_INVALID_VALUE,
                cuMemcpyDtoH_v2(there.as_mut_ptr().cast(), memory, 16)
            );
            ok!(cuMemsetD32Async(memory + 4, 7, 1, LEGACY));
            fails!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(memory));
            ok!(cuIpcCloseMemHandle(memory));
            assert_eq!(download(memory, 3), [1, 7, 3]);
            ok!(cuIpcCloseMemHandle(memory));
            fails!(CUDA_ERROR_INVALID_VALUE, cuIpcCloseMemHandle(memory));
            rank.publish("written", b"");
        }
    });
    assert_eq!(number(&reports[0], "freed_while_imported"), 0);
    assert_eq!(number(&reports[1], "imports"), 0);
}

#[test]
fn stale_and_strange_handles_are_refused() {
    let name = "stale_and_strange_handles_are_refused";
    let reports = together(name, 2, &[], |rank| {
        start(0);
        let mut address = 0;
        if rank.number == 0 {
            let (stale, used) = (allocate(64), allocate(64));
            export(&rank, "stale", stale);
            ok!(cuMemFree_v2(stale));
            rank.publish("freed", b"");
            export(&rank, "used", used);
            let own = handle(&rank.expect("used"));
            fails!(
                CUDA_ERROR_INVALID_CONTEXT,
                cuIpcOpenMemHandle_v2(&mut address, own, 1)
            );
            let mut inside = sys::CUipcMemHandle { reserved: [0; 64] };
            fails!(
                CUDA_ERROR_INVALID_VALUE,
                cuIpcGetMemHandle(&mut inside, used + 8)
            );
            rank.expect("imported");
            ok!(cuMemFree_v2(used));
        } else {
            rank.expect("freed");
            let stale = handle(&rank.expect("stale"));
            fails!(
                CUDA_ERROR_INVALID_HANDLE,
                cuIpcOpenMemHandle_v2(&mut address, stale, 1)
            );
            let noise = sys::CUipcMemHandle { reserved: [5; 64] };
            fails!(
                CUDA_ERROR_INVALID_HANDLE,
                cuIpcOpenMemHandle_v2(&mut address, noise, 1)
            );
            let used = handle(&rank.expect("used"));
            fails!(
                CUDA_ERROR_INVALID_VALUE,
                cuIpcOpenMemHandle_v2(&mut address, used, 0)
            );
            ok!(cuIpcOpenMemHandle_v2(&mut address, used, 1));
            rank.publish("imported", b"");
        }
    });
    // Left behind, and found.
    assert_eq!(number(&reports[0], "freed_while_imported"), 1);
    assert_eq!(number(&reports[1], "imports"), 1);
}

#[test]
fn sharing_can_be_refused() {
    let name = "sharing_can_be_refused";
    alone(name, &[("IPC", "refuse-export")], || {
        start(0);
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        let memory = allocate(64);
        fails!(
            CUDA_ERROR_NOT_SUPPORTED,
            cuIpcGetMemHandle(&mut handle, memory)
        );
    });
}

#[test]
fn importing_can_be_refused() {
    together(
        "importing_can_be_refused",
        2,
        &[("IPC", "refuse-import")],
        |rank| {
            start(0);
            if rank.number == 0 {
                export(&rank, "handle", allocate(64));
                rank.expect("done");
            } else {
                let handle = handle(&rank.expect("handle"));
                let mut address = 0;
                fails!(
                    CUDA_ERROR_INVALID_HANDLE,
                    cuIpcOpenMemHandle_v2(&mut address, handle, 1)
                );
                rank.publish("done", b"");
            }
        },
    );
}

#[test]
fn devices_reach_each_other_with_peer_access_alone() {
    let name = "devices_reach_each_other_with_peer_access_alone";
    for access in ["yes", "no"] {
        alone(name, &[("DEVICES", "2"), ("PEER_ACCESS", access)], || {
            let access = std::env::var("CUDA_EMULATOR_PEER_ACCESS").unwrap() == "yes";
            let other = start(1);
            let there = upload(&[1, 2]);
            start(0);
            let mut can = 0;
            ok!(cuDeviceCanAccessPeer(&mut can, 0, 1));
            assert_eq!(can == 1, access);
            // A kernel of device 0 that reads memory of device 1.
            let sum = function(
                module("int32", &["unisono_reduce_sum"]),
                "unisono_reduce_sum",
            );
            let here = upload(&[10, 20]);
            let stream = stream();
            if access {
                ok!(cuCtxEnablePeerAccess(other, 0));
                fails!(
                    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
                    cuCtxEnablePeerAccess(other, 0)
                );
                assert_eq!(
                    launch_sum(sum, stream, here, &[here, there], 2),
                    CUresult::CUDA_SUCCESS
                );
                ok!(cuStreamSynchronize(stream));
                assert_eq!(download(here, 2), [11, 22]);
            } else {
                fails!(
                    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
                    cuCtxEnablePeerAccess(other, 0)
                );
                assert_eq!(
                    launch_sum(sum, stream, here, &[here, there], 2),
                    CUresult::CUDA_SUCCESS
                );
                fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
            }
        });
    }
}

#[test]
fn importing_across_devices_needs_peer_access() {
    let name = "importing_across_devices_needs_peer_access";
    for access in ["yes", "no"] {
        together(
            name,
            2,
            &[("DEVICES", "2"), ("PEER_ACCESS", access)],
            |rank| {
                start(rank.number as i32);
                if rank.number == 0 {
                    export(&rank, "handle", upload(&[5]));
                    rank.expect("done");
                    return;
                }
                let handle = handle(&rank.expect("handle"));
                let mut address = 0;
                if std::env::var("CUDA_EMULATOR_PEER_ACCESS").unwrap() == "yes" {
                    ok!(cuIpcOpenMemHandle_v2(&mut address, handle, 1));
                    let mut device = -1_i32;
                    let attribute =
                        sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
                    ok!(cuPointerGetAttribute(
                        (&raw mut device).cast(),
                        attribute,
                        address
                    ));
                    assert_eq!(device, 0);
                    assert_eq!(download(address, 1), [5]);
                } else {
                    fails!(
                        CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
                        cuIpcOpenMemHandle_v2(&mut address, handle, 1)
                    );
                }
                rank.publish("done", b"");
            },
        );
    }
}

#[test]
fn memory_outlives_the_process_that_exported_it() {
    together(
        "memory_outlives_the_process_that_exported_it",
        2,
        &[],
        |rank| {
            start(0);
            if rank.number == 0 {
                export(&rank, "handle", upload(&[5]));
                rank.publish("pid", &std::process::id().to_le_bytes());
                rank.expect("opened");
            } else {
                let handle = handle(&rank.expect("handle"));
                let mut address = 0;
                ok!(cuIpcOpenMemHandle_v2(&mut address, handle, 1));
                let pid = u32::from_le_bytes(rank.expect("pid").try_into().unwrap());
                rank.publish("opened", b"");
                let there = format!("/proc/{pid}/fd");
                while std::fs::read_dir(&there).is_ok_and(|mut files| files.next().is_some()) {
                    std::thread::sleep(Duration::from_millis(2));
                }
                assert_eq!(download(address, 1), [5]);
                let mut late = 0;
                ok!(cuIpcCloseMemHandle(address));
                fails!(
                    CUDA_ERROR_INVALID_HANDLE,
                    cuIpcOpenMemHandle_v2(&mut late, handle, 1)
                );
            }
        },
    );
}
