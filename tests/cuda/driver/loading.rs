//! Finding the driver and its devices, and what is said when there is none.

use std::sync::Mutex;

use unisono::error::Code;
use unisono::transport::cuda::driver::{Device, DeviceMemory, Driver};

use crate::harness;

harness::tests! {
    Emulated {
        a_stub_is_named { STUB: "yes" }
        an_old_driver_is_named { VERSION: "11080" }
        no_device_is_named { DEVICES: "0" }
        devices_are_told_apart { DEVICES: "2" }
        devices_that_do_not_reach_each_other_say_so { DEVICES: "2", PEER_ACCESS: "no" }
        a_forked_child_gets_an_error_and_leaves_everything_alone
        what_outlives_the_driver_is_dropped_in_silence
        a_failed_start_says_the_code { FAIL: "cuInit:1=CUDA_ERROR_UNKNOWN" }
    }
    None {
        without_a_driver_the_error_says_what_to_do
    }
}

#[track_caller]
fn refused(code: Code, words: &str) {
    let error = Driver::load().err().expect("it was loaded");
    assert_eq!(error.code, code, "{error}");
    assert!(error.message.contains(words), "{error}");
    // The failure is kept.
    assert_eq!(Driver::load().err(), Some(error));
}

fn without_a_driver_the_error_says_what_to_do() {
    match Driver::load() {
        // A machine with a GPU.
        Ok(_) => println!("there is a driver here"),
        Err(_) => refused(
            Code::Unsupported,
            "there is no CUDA driver here (libcuda.so.1",
        ),
    }
}

fn a_stub_is_named() {
    refused(Code::Unsupported, "stubs folder");
}

fn an_old_driver_is_named() {
    refused(Code::Unsupported, "supports CUDA 11.8 and 12.0 is needed");
}

fn no_device_is_named() {
    refused(Code::Unsupported, "CUDA_VISIBLE_DEVICES");
}

fn a_failed_start_says_the_code() {
    refused(Code::System, "CUDA_ERROR_UNKNOWN (999)");
}

fn devices_are_told_apart() {
    let driver = Driver::load().unwrap();
    assert_eq!(driver.devices(), 2);
    assert!(driver.version() >= 12_000);
    let (a, b) = (driver.device(0).unwrap(), Device::of(1).unwrap());
    assert_eq!((a.number(), b.number()), (0, 1));
    assert_ne!(a.uuid(), b.uuid());
    assert!(a.multiprocessors() > 0 && a.capability().0 > 0 && !a.name().is_empty());
    assert!(std::ptr::eq(a, Device::of(0).unwrap()));
    let error = driver.device(2).unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(a.reaches(b).unwrap() && a.reaches(a).unwrap());
    a.enable_peer(b).unwrap();
    a.enable_peer(b).unwrap();
    a.enable_peer(a).unwrap();
    a.memory_operations().unwrap();
}

fn devices_that_do_not_reach_each_other_say_so() {
    let (a, b) = (Device::of(0).unwrap(), Device::of(1).unwrap());
    assert!(!a.reaches(b).unwrap());
    assert_eq!(a.enable_peer(b).unwrap_err().code, Code::Unsupported);
}

fn a_forked_child_gets_an_error_and_leaves_everything_alone() {
    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(status: i32) -> !;
    }
    let memory = DeviceMemory::allocate(Device::of(0).unwrap(), 1).unwrap();
    // SAFETY: the child has this thread alone, and ends without running what is registered for the end.
    let child = unsafe { fork() };
    if child == 0 {
        let told =
            matches!(Driver::load(), Err(error) if error.message.contains("spawn or forkserver"));
        drop(memory);
        // SAFETY: as above.
        unsafe { _exit(if told { 0 } else { 7 }) };
    }
    let mut status = -1;
    // SAFETY: it stores a number.
    assert_eq!(unsafe { waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    // The parent's is as it was.
    memory.write(0, &[1, 2, 3]).unwrap();
}

fn what_outlives_the_driver_is_dropped_in_silence() {
    static LEFT: Mutex<Option<DeviceMemory>> = Mutex::new(None);
    extern "C" fn last() {
        drop(LEFT.lock().unwrap().take());
    }
    unsafe extern "C" {
        fn atexit(call: extern "C" fn()) -> i32;
    }
    // Before the driver registers its own, so after it.
    // SAFETY: the function lives as long as the process.
    unsafe { atexit(last) };
    let memory = DeviceMemory::allocate(Device::of(0).unwrap(), 1).unwrap();
    *LEFT.lock().unwrap() = Some(memory);
}
