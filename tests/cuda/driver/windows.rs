//! Windows of ranks in this process and in others.

use std::io::{BufRead, BufReader, Read};

use unisono::error::Code;
use unisono::transport::cuda::driver::{Device, DeviceMemory, Imported, Stream};
use unisono::transport::cuda::window::{PeerWindow, RECORD, Record, Window, Windows};

use crate::driver_calls::{calls, device};
use crate::harness;

harness::tests! {
    EmulatedAndClean {
        another_process_reads_a_window { DEVICES: "2" }
        another_process_reads_exported_memory
        ranks_of_a_process_share_windows { DEVICES: "2" }
        a_window_of_this_process_that_is_gone_is_named
        windows_of_different_sizes_are_refused
        a_mapping_of_something_else_is_found_out
        a_process_that_exports_nothing_is_named { IPC: "refuse-export" }
        memory_of_windows_is_kept
    }
    Emulated {
        a_refused_mapping_is_named { IPC: "refuse-import" }
        devices_that_do_not_reach_each_other_share_no_window { DEVICES: "2", PEER_ACCESS: "no" }
    }
}

const HALF: usize = 3 << 20;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
        .collect()
}

/// The roles of other processes in a test here. They print one line, and end when their input does.
pub(crate) fn role(role: &str, argument: &str) {
    match role {
        // Opens the window, for each device, and says what its halves begin with.
        "reader" => {
            let record: [u8; RECORD] = unhex(argument).try_into().unwrap();
            let record = Record::decode(&record);
            let devices = [Device::of(0).unwrap(), Device::of(1).unwrap()];
            let windows = devices.map(|device| PeerWindow::open(device, &record).unwrap());
            let mut said = Vec::new();
            for (window, device) in windows.iter().zip(devices) {
                assert!(window.is_mapped());
                for half in 0..2 {
                    let mut seen = [0; 4];
                    let stream = Stream::create(device).unwrap();
                    stream
                        .read(window.half(half) + HALF as u64 - 4, &mut seen)
                        .unwrap();
                    said.extend(seen);
                }
            }
            println!("{}", hex(&said));
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
            drop(windows);
        }
        "importer" => {
            let handle: [u8; 64] = unhex(argument).try_into().unwrap();
            let a = Imported::open(device(), &handle, 4096).unwrap();
            let b = Imported::open(device(), &handle, 4096).unwrap();
            drop(a);
            let mut seen = [0; 5];
            b.read(100, &mut seen).unwrap();
            println!("{}", hex(&seen));
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        // Makes a window and says what others need.
        "owner" => {
            let window = Window::create(device(), HALF).unwrap();
            println!("{}", hex(&window.record().unwrap().encode()));
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        _ => panic!("no role {role}"),
    }
}

/// Calls `then` with the bytes that a process prints, while the process lives.
fn said<T>(name: &str, argument: &str, then: impl FnOnce(Vec<u8>) -> T) -> T {
    let mut child = harness::role(name, argument);
    let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line).unwrap();
    let result = then(unhex(line.trim()));
    drop(input);
    assert_eq!(harness::wait(child), "exit status: 0");
    result
}

fn another_process_reads_a_window() {
    let window = Window::create(device(), HALF).unwrap();
    assert!(window.half_bytes() >= HALF && window.refusal().is_none());
    let stream = Stream::create(device()).unwrap();
    for half in 0..2 {
        let at = window.half(half) + HALF as u64 - 4;
        stream.write(at, &[half as u8, 7, 8, 9]).unwrap();
    }
    let record = hex(&window.record().unwrap().encode());
    let seen = said("reader", &record, |seen| seen);
    assert_eq!(seen, [0, 7, 8, 9, 1, 7, 8, 9].repeat(2));
}

fn another_process_reads_exported_memory() {
    let memory = DeviceMemory::allocate(device(), 4096).unwrap();
    memory.write(100, b"hello").unwrap();
    let handle = memory.export().unwrap();
    assert_eq!(said("importer", &hex(&handle), |seen| seen), b"hello");
    // The driver maps nothing of its own process.
    assert!(Imported::open(device(), &handle, 4096).is_err());
}

fn ranks_of_a_process_share_windows() {
    let devices = [device(), Device::of(1).unwrap(), device()];
    let own = devices.map(|device| Window::create(device, HALF).unwrap());
    let records = [0, 1, 2].map(|rank| own[rank].record().unwrap());
    for (rank, window) in own.iter().enumerate() {
        let stream = Stream::create(devices[rank]).unwrap();
        stream.write(window.half(1), &[rank as u8]).unwrap();
    }
    let mut all = Vec::new();
    for (rank, window) in own.into_iter().enumerate() {
        all.push(Windows::open(window, rank, &records).unwrap());
    }
    for (rank, windows) in all.iter().enumerate() {
        assert_eq!((windows.rank(), windows.len()), (rank, 3));
        assert_eq!(windows.own().half(1), windows.half(rank, 1));
        let stream = Stream::create(devices[rank]).unwrap();
        for (peer, at) in windows.halves(1, 0).enumerate() {
            let mut seen = [9];
            stream.read(at, &mut seen).unwrap();
            assert_eq!(usize::from(seen[0]), peer);
            assert_eq!(at, windows.half(peer, 1));
        }
    }
    // Each keeps what it uses, in whichever order they go.
    let last = all.pop().unwrap();
    drop(all);
    let stream = Stream::create(devices[2]).unwrap();
    stream.read(last.half(0, 1), &mut [0]).unwrap();
    let own = last.close_peers();
    stream.read(own.half(1), &mut [0]).unwrap();
}

fn a_window_of_this_process_that_is_gone_is_named() {
    let record = Window::create(device(), HALF).unwrap().record().unwrap();
    let error = PeerWindow::open(device(), &record).unwrap_err();
    assert!(error.message.contains("is gone"), "{error}");
}

fn windows_of_different_sizes_are_refused() {
    let (a, b) = (
        Window::create(device(), HALF).unwrap(),
        Window::create(device(), 2 * HALF).unwrap(),
    );
    let records = [a.record().unwrap(), b.record().unwrap()];
    let error = Windows::open(a, 0, &records).unwrap_err();
    assert_eq!((error.code, error.peer), (Code::Mismatch, Some(1)));
}

fn a_mapping_of_something_else_is_found_out() {
    said("owner", "", |record| {
        let mut record: [u8; RECORD] = record.try_into().unwrap();
        PeerWindow::open(device(), &Record::decode(&record)).unwrap();
        // The bytes that the window begins with.
        record[16] ^= 1;
        let error = PeerWindow::open(device(), &Record::decode(&record)).unwrap_err();
        assert!(error.message.contains("other memory"), "{error}");
    });
}

fn a_process_that_exports_nothing_is_named() {
    let window = Window::create(device(), HALF).unwrap();
    assert!(window.refusal().is_some());
    // Inside the process it needs no export.
    PeerWindow::open(device(), &window.record().unwrap()).unwrap();
    said("owner", "", |record| {
        let record = Record::decode(&record.try_into().unwrap());
        let error = PeerWindow::open(device(), &record).unwrap_err();
        assert_eq!(error.code, Code::Unsupported, "{error}");
    });
}

fn memory_of_windows_is_kept() {
    let first = Window::create(device(), HALF).unwrap();
    let [clean, other] = [1, 2].map(|_| Window::create(device(), HALF).unwrap());
    let (record, of_other) = (clean.record().unwrap(), other.half(0));
    let (made, freed) = (calls("cuMemAlloc_v2"), calls("cuMemFree_v2"));
    clean.set_clean();
    drop((clean, other));
    // The memory of the window that no peer reads any more, under another name.
    let again = Window::create(device(), HALF).unwrap();
    assert_eq!(calls("cuMemAlloc_v2"), made);
    assert_ne!(again.record().unwrap(), record);
    assert_ne!(again.half(0), of_other);
    let error = PeerWindow::open(device(), &record).unwrap_err();
    assert!(error.message.contains("is gone"), "{error}");
    drop(Window::create(device(), 2 * HALF).unwrap());
    assert_eq!(calls("cuMemAlloc_v2"), made + 1);
    assert_eq!(calls("cuMemFree_v2"), freed);
    drop((first, again));
    assert_eq!(calls("cuMemFree_v2"), freed + 4);
}

fn a_refused_mapping_is_named() {
    said("owner", "", |record| {
        let record = Record::decode(&record.try_into().unwrap());
        let own = Window::create(device(), HALF).unwrap();
        let records = [own.record().unwrap(), record];
        let error = Windows::open(own, 0, &records).unwrap_err();
        assert_eq!(error.peer, Some(1));
        assert!(
            error.message.contains("of another process for device 0"),
            "{error}"
        );
    });
}

fn devices_that_do_not_reach_each_other_share_no_window() {
    let window = Window::create(device(), HALF).unwrap();
    let error = PeerWindow::open(Device::of(1).unwrap(), &window.record().unwrap()).unwrap_err();
    assert_eq!(error.code, Code::Unsupported, "{error}");
}
