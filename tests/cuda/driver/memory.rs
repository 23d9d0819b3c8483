//! The kind of memory, its registrations, and the errors when there is too little.

use std::sync::atomic::Ordering::AcqRel;

use unisono::error::Code;
use unisono::transport::cuda::driver::{
    Device, DeviceMemory, Kind, Pinned, Registered, Stream, check_buffer, place,
};
use unisono::transport::{Neighbour, local};

use crate::driver_calls::{calls, device};
use crate::harness;

harness::tests! {
    EmulatedAndClean {
        memory_is_told_apart { DEVICES: "2" }
        a_freed_buffer_is_refused
        both_ends_register_their_page
        both_ends_register_their_page_elsewhere { HOST_POINTERS: "separate" }
        registered_memory_is_had_in_advance { HOST_POINTERS: "separate" }
        what_may_still_be_written_is_not_handed_out
        registrations_stay_while_any_is_used
    }
    Emulated {
        too_little_memory_says_how_much { MEMORY: "4" }
        pages_that_other_code_registered_are_named {
            FAIL: "cuMemHostRegister_v2:1=CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        }
        a_failed_registration_leaves_nothing { FAIL: "cuMemHostGetDevicePointer_v2:1=801" }
    }
}

fn memory_is_told_apart() {
    let other = Device::of(1).unwrap();
    let here = DeviceMemory::allocate(device(), 100).unwrap();
    let there = DeviceMemory::allocate(other, 100).unwrap();
    let pinned = Pinned::private(device(), 100).unwrap();
    let ordinary = [0_u8; 64];
    let kind = |address| {
        let place = place(device(), address).unwrap();
        (place.kind, place.device)
    };
    assert_eq!(kind(here.address() + 50), (Kind::Device, Some(0)));
    assert_eq!(kind(there.address()), (Kind::Device, Some(1)));
    assert_eq!(kind(pinned.address()).0, Kind::Host);
    let ordinary = ordinary.as_ptr().expose_provenance() as u64;
    assert_eq!(kind(ordinary), (Kind::Unknown, None));

    check_buffer(device(), here.address(), here.bytes(), "input").unwrap();
    check_buffer(device(), 0, 0, "input").unwrap();
    for (address, bytes, words) in [
        (there.address(), 4, "input begins in memory of device 1"),
        (pinned.address(), 4, "input begins in memory of the host"),
        (ordinary, 4, "does not know"),
        (0, 4, "does not know"),
        (u64::MAX, 4, "beyond the address space"),
    ] {
        let error = check_buffer(device(), address, bytes, "input").unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.message.contains(words), "{error}");
    }
}

fn a_freed_buffer_is_refused() {
    let memory = DeviceMemory::allocate(device(), 100).unwrap();
    let (address, bytes) = (memory.address(), memory.bytes());
    check_buffer(device(), address, bytes, "output").unwrap();
    let error = check_buffer(device(), address, bytes + (1 << 40), "output").unwrap_err();
    assert!(error.message.contains("output ends in"), "{error}");
    drop(memory);
    let error = check_buffer(device(), address, bytes, "output").unwrap_err();
    assert!(error.message.contains("it was freed"), "{error}");
}

fn both_ends_register_their_page() {
    let (a, b) = local::pair(4096).unwrap();
    let (a, b) = (a.page(), b.page());
    for _ in 0..2 {
        let mine = Registered::page(device(), &a).unwrap();
        let theirs = Registered::page(device(), &b).unwrap();
        assert_eq!(mine.address(), theirs.address());
        assert_eq!(mine.bytes(), 4096);
        drop(mine);
        // The other's share keeps it.
        let memory = DeviceMemory::allocate(device(), 4).unwrap();
        memory.write(0, &7_u32.to_le_bytes()).unwrap();
        let stream = Stream::create(device()).unwrap();
        stream
            .copy(theirs.address() + 16, memory.address(), 4)
            .unwrap();
        stream.synchronize().unwrap();
        assert_eq!(a.words()[4].load(std::sync::atomic::Ordering::Acquire), 7);
    }
}

fn both_ends_register_their_page_elsewhere() {
    both_ends_register_their_page();
}

fn registered_memory_is_had_in_advance() {
    let own = Pinned::private(device(), 100).unwrap();
    Pinned::stock(device()).unwrap();
    let (registered, unregistered) = (calls("cuMemHostRegister_v2"), calls("cuMemHostUnregister"));
    for _ in 0..100 {
        let words = Pinned::private(device(), 4096).unwrap();
        let buffer = Pinned::shared(device(), 1 << 20).unwrap();
        assert_ne!(words.address(), own.address());
        // Words that were used are zero again.
        assert_eq!(words.word(8).swap(5, AcqRel), 0);
        words.give_back();
        buffer.give_back();
    }
    let many: Vec<_> = (0..50)
        .map(|_| Pinned::private(device(), 4096).unwrap())
        .collect();
    assert_eq!(calls("cuMemHostRegister_v2"), registered);
    // More than there is.
    let large = Pinned::shared(device(), 9 << 20).unwrap();
    assert_eq!(calls("cuMemHostRegister_v2"), registered + 1);
    let memory = DeviceMemory::allocate(device(), large.bytes()).unwrap();
    let stream = Stream::create(device()).unwrap();
    stream
        .copy(large.address(), memory.address(), large.bytes())
        .unwrap();
    stream.synchronize().unwrap();
    drop((many, large));
    assert_eq!(calls("cuMemHostUnregister"), unregistered);
    // The last takes all with it.
    drop(own);
    assert_eq!(calls("cuMemHostUnregister"), registered + 1);
}

fn what_may_still_be_written_is_not_handed_out() {
    let own = Pinned::private(device(), 100).unwrap();
    let [a, b] = [1, 2].map(|_| Pinned::private(device(), 100).unwrap());
    let (of_a, of_b) = (a.address(), b.address());
    drop(a);
    b.give_back();
    let next = [1, 2].map(|_| Pinned::private(device(), 100).unwrap());
    assert_eq!(next[0].address(), of_b);
    assert!(![of_a, of_b, own.address()].contains(&next[1].address()));
}

fn registrations_stay_while_any_is_used() {
    let pages = [1, 2].map(|_| local::pair(4096).unwrap().0.page());
    let [first, second] = [0, 1].map(|at| Registered::page(device(), &pages[at]).unwrap());
    let before = calls("cuMemHostUnregister");
    let address = first.address();
    drop(first);
    // It can be taken again.
    let again = Registered::page(device(), &pages[0]).unwrap();
    assert_eq!(again.address(), address);
    assert_eq!(calls("cuMemHostRegister_v2"), 2);
    drop(again);
    assert_eq!(calls("cuMemHostUnregister"), before);
    drop(second);
    assert_eq!(calls("cuMemHostUnregister"), before + 2);
}

fn too_little_memory_says_how_much() {
    let error = DeviceMemory::allocate(device(), 100 << 20).unwrap_err();
    assert_eq!(error.code, Code::System);
    assert!(
        error
            .message
            .contains("allocate 104857600 bytes on device 0"),
        "{error}"
    );
    assert!(
        error.message.contains("CUDA_ERROR_OUT_OF_MEMORY (2)"),
        "{error}"
    );
}

fn pages_that_other_code_registered_are_named() {
    let error = Pinned::private(device(), 1 << 20).unwrap_err();
    assert!(
        error.message.contains("something else in this process"),
        "{error}"
    );
    Pinned::private(device(), 1 << 20).unwrap();
}

fn a_failed_registration_leaves_nothing() {
    let (a, _b) = local::pair(4096).unwrap();
    let page = a.page();
    let error = Registered::page(device(), &page).unwrap_err();
    assert_eq!(error.code, Code::Unsupported, "{error}");
    // It was given back: the driver takes it again.
    Registered::page(device(), &page).unwrap();
}
