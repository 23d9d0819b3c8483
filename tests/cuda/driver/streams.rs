//! Copies, words, events and captures.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread;
use std::time::Duration;

use unisono::error::Code;
use unisono::transport::cuda::driver::{
    Device, DeviceMemory, Event, MemoryOperation, Pinned, Stream, device_of_stream,
};
use unisono::types::DeviceStream;

use crate::driver_calls::{capture, device, with_device, with_stream_of_its_own_context};
use crate::harness;

harness::tests! {
    EmulatedAndClean {
        bytes_go_there_and_back
        pinned_memory_is_copied { HOST_POINTERS: "separate" }
        the_callers_stream_is_recognised { DEVICES: "2" }
        a_stream_of_another_context_is_refused { DEVICES: "2" }
        a_stream_waits_for_a_word { HOST_POINTERS: "separate" }
        waits_are_cyclic
        more_operations_than_one_call_takes
        one_stream_waits_for_another
        setting_up_is_possible_while_a_graph_is_captured
        a_captured_copy_is_replayed
        a_threads_context_is_left_as_it_was { DEVICES: "2" }
        streams_are_known_by_more_than_their_handles { DEVICES: "2" }
        a_captured_stream_is_left_alone { DEVICES: "2" }
    }
    Emulated {
        without_memory_operations_the_device_says_so { MEMORY_OPERATIONS: "no" }
        a_lost_context_is_named { FAIL: "copy:1=700" }
    }
}

fn bytes_go_there_and_back() {
    let memory = DeviceMemory::allocate(device(), 5000).unwrap();
    assert!(memory.bytes() >= 5000 && memory.address().is_multiple_of(256));
    let sent: Vec<u8> = (0..3000_u32).map(|at| at as u8).collect();
    memory.write(1000, &sent).unwrap();
    let stream = Stream::create(device()).unwrap();
    let at = memory.address();
    stream.copy(at + 1, at + 1000, 3).unwrap();
    stream.copy(at, at, 100).unwrap();
    stream.copy(at, 0, 0).unwrap();
    let mut seen = vec![0; 3];
    stream.read(at + 1, &mut seen).unwrap();
    assert_eq!(seen, [0, 1, 2]);
    let mut seen = vec![0; 3000];
    memory.read(1000, &mut seen).unwrap();
    assert_eq!(seen, sent);
    assert!(stream.is_idle().unwrap());
}

fn pinned_memory_is_copied() {
    let memory = DeviceMemory::allocate(device(), 8192).unwrap();
    let stream = Stream::create(device()).unwrap();
    for pinned in [
        Pinned::private(device(), 5000).unwrap(),
        Pinned::shared(device(), 5000).unwrap(),
        Pinned::shared(device(), 100_000).unwrap(),
    ] {
        assert!(pinned.bytes() >= 5000 && pinned.bytes().is_multiple_of(4096));
        assert_eq!(pinned.word(4096).load(Acquire), 0);
        pinned.word(4).store(17, Release);
        stream
            .copy(memory.address(), pinned.address() + 4, 4)
            .unwrap();
        stream
            .copy(pinned.address() + 4096, memory.address(), 4)
            .unwrap();
        stream.synchronize().unwrap();
        assert_eq!(pinned.word(4096).load(Acquire), 17);
        // SAFETY: only its length is looked at.
        assert_eq!(unsafe { pinned.view(0, 5000) }.len(), 5000);
    }
}

fn the_callers_stream_is_recognised() {
    let (a, b) = (
        Stream::create(device()).unwrap(),
        Stream::create(Device::of(1).unwrap()).unwrap(),
    );
    for handle in [0, 1, 2, a.handle().stream] {
        let stream = Stream::of(DeviceStream {
            device: 0,
            stream: handle,
        })
        .unwrap();
        assert!(!stream.is_capturing().unwrap());
        stream.synchronize().unwrap();
    }
    // Dropping the caller's does not end it.
    a.synchronize().unwrap();
    let wrong = DeviceStream {
        device: 0,
        stream: b.handle().stream,
    };
    let error = Stream::of(wrong).unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(error.message.contains("belongs to device 1"), "{error}");
    let error = Stream::of(DeviceStream {
        device: 5,
        stream: 0,
    })
    .unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
}

fn a_stream_of_another_context_is_refused() {
    for (its_device, told) in [(0, "a context of its own"), (1, "belongs to device 1")] {
        with_stream_of_its_own_context(Device::of(its_device).unwrap(), |stream| {
            let error = Stream::of(DeviceStream { device: 0, stream }).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument);
            assert!(error.message.contains(told), "{error}");
        });
    }
}

fn a_stream_waits_for_a_word() {
    let words = Pinned::private(device(), 4096).unwrap();
    let stream = Stream::create(device()).unwrap();
    let done = Event::new(device()).unwrap();
    assert!(done.is_done().unwrap());
    stream
        .operate(&[
            MemoryOperation::WaitAny {
                address: words.address(),
                mask: 6,
            },
            MemoryOperation::Write {
                address: words.address() + 64,
                value: 5,
            },
        ])
        .unwrap();
    stream.record(&done).unwrap();
    words.word(0).store(1, Release);
    thread::sleep(Duration::from_millis(5));
    assert!(!done.is_done().unwrap() && !stream.is_idle().unwrap());
    assert_eq!(words.word(64).load(Acquire), 0);
    words.word(0).store(4, Release);
    done.synchronize().unwrap();
    assert!(done.is_done().unwrap());
    assert_eq!(words.word(64).load(Acquire), 5);
}

fn waits_are_cyclic() {
    let words = Pinned::private(device(), 4096).unwrap();
    let stream = Stream::create(device()).unwrap();
    words.word(0).store(2, Release);
    let wait = |value| {
        let address = words.address();
        stream
            .operate(&[MemoryOperation::WaitAtLeast { address, value }])
            .unwrap();
    };
    wait(2);
    wait(u32::MAX);
    stream.synchronize().unwrap();
    wait(3);
    thread::sleep(Duration::from_millis(2));
    assert!(!stream.is_idle().unwrap());
    words.word(0).store(3, Release);
    stream.synchronize().unwrap();
}

fn more_operations_than_one_call_takes() {
    let words = Pinned::private(device(), 4096).unwrap();
    let stream = Stream::create(device()).unwrap();
    let operations: Vec<_> = (0..1000)
        .map(|at| MemoryOperation::Write {
            address: words.address() + 4 * at,
            value: at as u32 + 1,
        })
        .collect();
    stream.operate(&operations).unwrap();
    stream.operate(&[]).unwrap();
    stream.synchronize().unwrap();
    for at in 0..1000 {
        assert_eq!(words.word(4 * at).load(Acquire), at as u32 + 1);
    }
}

fn one_stream_waits_for_another() {
    let words = Pinned::private(device(), 4096).unwrap();
    let (a, b) = (
        Stream::create(device()).unwrap(),
        Stream::create(device()).unwrap(),
    );
    let memory = DeviceMemory::allocate(device(), 4).unwrap();
    let event = Event::new(device()).unwrap();
    b.wait(&event).unwrap();
    a.operate(&[
        MemoryOperation::WaitAny {
            address: words.address(),
            mask: 1,
        },
        MemoryOperation::Write {
            address: words.address() + 4,
            value: 9,
        },
    ])
    .unwrap();
    a.record(&event).unwrap();
    b.wait(&event).unwrap();
    b.copy(memory.address(), words.address() + 4, 4).unwrap();
    b.copy(words.address() + 8, memory.address(), 4).unwrap();
    thread::sleep(Duration::from_millis(2));
    assert!(!b.is_idle().unwrap());
    words.word(0).store(1, Release);
    b.synchronize().unwrap();
    assert_eq!(words.word(8).load(Acquire), 9);
}

fn setting_up_is_possible_while_a_graph_is_captured() {
    let stream = Stream::create(device()).unwrap();
    let other = Event::new(device()).unwrap();
    let graph = capture(&stream, || {
        assert!(stream.is_capturing().unwrap());
        let memory = DeviceMemory::allocate(device(), 1 << 20).unwrap();
        memory.write(0, &[1, 2, 3]).unwrap();
        memory.export().unwrap();
        drop(Pinned::private(device(), 4096).unwrap());
        assert!(other.is_done().unwrap());
        device().memory_operations().unwrap();
    });
    assert!(!stream.is_capturing().unwrap());
    graph.launch(&stream);
    stream.synchronize().unwrap();
}

fn a_captured_copy_is_replayed() {
    let words = Pinned::private(device(), 4096).unwrap();
    let stream = Stream::create(device()).unwrap();
    let memory = DeviceMemory::allocate(device(), 4).unwrap();
    let graph = capture(&stream, || {
        stream
            .operate(&[
                MemoryOperation::WaitAny {
                    address: words.address(),
                    mask: 1,
                },
                MemoryOperation::Write {
                    address: words.address(),
                    value: 0,
                },
            ])
            .unwrap();
        stream
            .copy(memory.address(), words.address() + 4, 4)
            .unwrap();
        stream
            .copy(words.address() + 8, memory.address(), 4)
            .unwrap();
    });
    assert!(stream.is_idle().unwrap());
    for round in 1..5 {
        graph.launch(&stream);
        words.word(4).store(round, Release);
        words.word(0).store(1, Release);
        stream.synchronize().unwrap();
        assert_eq!(words.word(8).load(Acquire), round);
        assert_eq!(words.word(0).load(Acquire), 0);
    }
}

fn a_threads_context_is_left_as_it_was() {
    with_device(Device::of(1).unwrap(), || {
        bytes_go_there_and_back();
        a_stream_waits_for_a_word();
        device().memory_operations().unwrap();
    });
}

fn streams_are_known_by_more_than_their_handles() {
    let of = |device, stream| {
        let stream = Stream::of(DeviceStream { device, stream }).unwrap();
        stream.identity()
    };
    assert_eq!(of(0, 0), of(0, 1));
    assert_ne!(of(0, 0), of(1, 0));
    assert!(of(0, 0).is_some());
    // A thread's own.
    assert_eq!(of(0, 2), of(0, 2));
    assert_ne!(of(0, 2), of(0, 0));
    let elsewhere = thread::spawn(move || of(0, 2)).join().unwrap();
    assert!(elsewhere.is_some() && elsewhere != of(0, 2));
    let mut seen = Vec::new();
    for _ in 0..3 {
        let stream = Stream::create(device()).unwrap();
        let identity = stream.identity();
        assert_eq!(of(0, stream.handle().stream), identity);
        assert!(identity.is_some() && !seen.contains(&identity));
        seen.push(identity);
    }
}

fn a_captured_stream_is_left_alone() {
    let stream = Stream::create(Device::of(1).unwrap()).unwrap();
    let handle = stream.handle();
    with_device(stream.device(), || {
        assert_eq!(device_of_stream(handle.stream).unwrap(), 1);
    });
    let graph = capture(&stream, || {
        assert_eq!(stream.identity(), None);
        Stream::of(handle).unwrap();
        assert_eq!(device_of_stream(handle.stream).unwrap(), 1);
        // A thread without a context.
        let other = move || device_of_stream(handle.stream).is_err();
        assert!(thread::spawn(other).join().unwrap());
        let own = Stream::create(device()).unwrap();
        assert!(own.identity().is_some());
    });
    graph.launch(&stream);
    stream.synchronize().unwrap();
    assert!(stream.identity().is_some());
}

fn without_memory_operations_the_device_says_so() {
    let error = device().memory_operations().unwrap_err();
    assert_eq!(error.code, Code::Unsupported, "{error}");
    // Everything else works.
    DeviceMemory::allocate(device(), 1)
        .unwrap()
        .write(0, &[1])
        .unwrap();
}

fn a_lost_context_is_named() {
    let memory = DeviceMemory::allocate(device(), 4096).unwrap();
    let stream = Stream::create(device()).unwrap();
    let at = memory.address();
    let _ = stream.copy(at, at + 64, 64);
    let error = stream.synchronize().unwrap_err();
    assert_eq!(error.code, Code::System);
    assert!(error.message.contains("context is lost"), "{error}");
    assert!(error.message.contains("(700)"), "{error}");
}
