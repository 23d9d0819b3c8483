//! One-sided transfers between ports: in this process, and with another one that dies.

use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use unisono::config::Config;
use unisono::error::{Code, Error};
use unisono::heap::Buffer;
use unisono::one_sided::{Port, Region, RemoteRegion, Transfer};

const SOON: Duration = Duration::from_secs(30);

/// An end with memory of its own.
struct End {
    port: Port,
    /// Registered as a whole.
    region: Region,
    start: *mut u8,
    length: usize,
}

// SAFETY: the memory is the region's, and tests share it between threads in turns.
unsafe impl Send for End {}
// SAFETY: as above.
unsafe impl Sync for End {}

impl End {
    fn new(config: &Config, mut memory: Vec<u8>) -> Self {
        let port = Port::new(config.clone()).expect("a port");
        let (start, length) = (memory.as_mut_ptr(), memory.len());
        // SAFETY: the owner is the memory; tests touch it between transfers alone.
        let region = unsafe { port.register(start, length, Box::new(memory)) }.expect("registered");
        Self {
            port,
            region,
            start,
            length,
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the region owns `length` bytes; no transfer moves them when tests look.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    #[expect(
        clippy::mut_from_ref,
        reason = "the memory is the region's, and one test uses it"
    )]
    fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }

    fn remote(&self) -> RemoteRegion {
        let remote = self.port.remote(&self.region).expect("registered");
        RemoteRegion::from_bytes(&remote.to_bytes()).expect("as it was written")
    }

    fn write(&self, length: usize, to: &RemoteRegion) -> Result<Transfer, Error> {
        self.port.write(&self.region, 0..length, to, None)
    }

    fn read(&self, length: usize, from: &RemoteRegion) -> Result<Transfer, Error> {
        self.port.read(&self.region, 0..length, from, None)
    }
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|i| ((i * 31 + seed) % 251) as u8).collect()
}

fn config(transport: &str) -> Config {
    let mut config = Config::default();
    config.set("transport", transport).expect("a transport");
    config
}

/// Two ends, each connected to the other.
fn pair(config: &Config, length: usize) -> (End, End) {
    let left = End::new(config, pattern(length, 1));
    let right = End::new(config, pattern(length, 2));
    let (to_left, to_right) = (left.port.bind().unwrap(), right.port.bind().unwrap());
    assert_eq!(to_left, left.port.bind().unwrap(), "bound once");
    left.port.connect(&to_right, SOON).expect("connected");
    right.port.connect(&to_left, SOON).expect("connected");
    assert!(left.port.is_connected() && right.port.is_connected());
    (left, right)
}

fn transports() -> impl Iterator<Item = Config> {
    ["auto", "tcp"].into_iter().map(config)
}

#[test]
fn bytes_are_written_and_read() {
    for config in transports() {
        let (left, right) = pair(&config, 3 << 20);
        let whole = right.remote();
        for length in [0, 1, 1000, 70_000, 300_001, 3 << 20] {
            left.bytes_mut()[..length].copy_from_slice(&pattern(length, length));
            left.write(length, &whole)
                .unwrap()
                .wait(Some(SOON))
                .unwrap();
            assert!(
                right.bytes()[..length] == left.bytes()[..length],
                "{length}"
            );
            left.bytes_mut()[..length].fill(0);
            left.read(length, &whole).unwrap().wait(Some(SOON)).unwrap();
            assert!(
                right.bytes()[..length] == left.bytes()[..length],
                "{length}"
            );
        }
        // A part of it, from the middle of the local memory, and the other way.
        right.bytes_mut().fill(9);
        let part = whole.part(100, 50).unwrap();
        let transfer = left.port.write(&left.region, 1000..1050, &part, None);
        transfer.unwrap().wait(Some(SOON)).unwrap();
        assert!(right.bytes()[100..150] == left.bytes()[1000..1050]);
        assert!(right.bytes()[99] == 9 && right.bytes()[150] == 9);
        left.bytes_mut()[7] = 77;
        right
            .read(8, &left.remote())
            .unwrap()
            .wait(Some(SOON))
            .unwrap();
        assert_eq!(right.bytes()[7], 77);
    }
}

#[test]
fn what_is_long_goes_in_pieces() {
    let length = (150 << 20) + 3;
    let (left, right) = pair(&config("auto"), length);
    left.write(length, &right.remote())
        .unwrap()
        .wait(Some(SOON))
        .unwrap();
    assert!(left.bytes() == right.bytes());
    right.bytes_mut().reverse();
    left.read(length, &right.remote())
        .unwrap()
        .wait(Some(SOON))
        .unwrap();
    assert!(left.bytes() == right.bytes());
}

/// Many at once, from several threads, also where they have to wait for each other; each completion is called once.
#[test]
fn many_are_under_way_at_once() {
    for config in transports() {
        let (left, right) = pair(&config, 1 << 20);
        left.bytes_mut().copy_from_slice(&pattern(1 << 20, 5));
        let whole = right.remote();
        let (told, heard) = channel();
        let each = 16 << 10;
        thread::scope(|scope| {
            for part in 0..4 {
                let (told, left, whole) = (told.clone(), &left, &whole);
                scope.spawn(move || {
                    for at in (0..1 << 20).step_by(each).skip(part).step_by(4) {
                        let to = whole.part(at as u64, each as u64).unwrap();
                        let told = told.clone();
                        let completion = Box::new(move |result| told.send(result).unwrap());
                        let range = at..at + each;
                        left.port
                            .write(&left.region, range, &to, Some(completion))
                            .unwrap();
                    }
                });
            }
        });
        for _ in 0..(1 << 20) / each {
            heard.recv_timeout(SOON).expect("each ends").expect("well");
        }
        assert!(left.bytes() == right.bytes());
        assert!(heard.recv_timeout(Duration::from_millis(50)).is_err());
    }
}

/// As a callback of one future that waits for a second future does.
#[test]
fn a_completion_may_wait_for_that_of_a_later_transfer() {
    for config in transports() {
        let (left, right) = pair(&config, 1 << 20);
        let (whole, all) = (right.remote(), 0..1 << 20);
        let (second_told, second_heard) = channel();
        let (told, heard) = channel();
        let waits = Box::new(move |_| told.send(second_heard.recv_timeout(SOON)).unwrap());
        let first = left
            .port
            .write(&left.region, all.clone(), &whole, Some(waits))
            .unwrap();
        let tells = Box::new(move |result| second_told.send(result).unwrap());
        left.port
            .write(&left.region, all, &whole, Some(tells))
            .unwrap();
        heard.recv().unwrap().expect("told").expect("well");
        // After its end it is called at once, in this thread.
        first.wait(Some(SOON)).unwrap();
        let (told, heard) = channel();
        first.when_done(Box::new(move |result| told.send(result).unwrap()));
        heard.try_recv().expect("called at once").expect("well");
    }
}

#[test]
fn what_is_not_registered_is_refused_and_the_connection_lives() {
    for config in transports() {
        let (left, right) = pair(&config, 2 << 20);
        let (whole, long) = (right.remote(), 2 << 20);
        let refused = |result: Result<Transfer, Error>| {
            let error = result
                .and_then(|transfer| transfer.wait(Some(SOON)))
                .unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{error}");
            error.to_string()
        };
        // Before anything is sent.
        assert!(refused(left.write(long + 1, &whole)).contains("registered memory"));
        assert!(refused(left.write(100, &whole.part(0, 99).unwrap())).contains("do not fit"));
        assert!(refused(left.write(100, &left.remote())).contains("another port"));
        let elsewhere = left.port.write(&right.region, 0..1, &whole, None);
        assert!(refused(elsewhere).contains("another port"));
        // By the peer.
        right.port.unregister(&right.region, SOON).unwrap();
        right.port.unregister(&right.region, SOON).expect("again");
        for length in [8, 70_000, long] {
            for result in [left.write(length, &whole), left.read(length, &whole)] {
                let error = refused(result);
                assert!(
                    error.contains("no such memory") && error.contains("peer's memory"),
                    "{error}"
                );
            }
        }
        let mut other = pattern(long, 3);
        let start = other.as_mut_ptr();
        // SAFETY: the memory is its own owner; no code touches it before it is looked at below.
        let again = unsafe { right.port.register(start, long, Box::new(other)) }.unwrap();
        let again = right.port.remote(&again).unwrap();
        left.read(long, &again).unwrap().wait(Some(SOON)).unwrap();
        assert!(left.bytes() == pattern(long, 3));
        left.port.unregister(&left.region, SOON).unwrap();
        assert!(refused(left.write(1, &again)).contains("unregistered"));
        assert!(left.port.remote(&left.region).is_err());
    }
}

#[test]
fn a_port_has_one_peer_and_many_may_have_it() {
    let config = config("auto");
    let target = End::new(&config, pattern(64, 0));
    let address = target.port.bind().unwrap();
    let whole = target.remote();
    let ends: Vec<_> = (0..5)
        .map(|seed| End::new(&config, pattern(8, seed)))
        .collect();
    let error = ends[0].write(8, &whole).unwrap_err();
    assert!(error.to_string().contains("not connected"), "{error}");
    thread::scope(|scope| {
        for (number, end) in ends.iter().enumerate() {
            let (address, whole) = (&address, &whole);
            scope.spawn(move || {
                end.port.connect(address, SOON).expect("connected");
                let to = whole.part(8 * number as u64, 8).unwrap();
                end.write(8, &to).unwrap().wait(Some(SOON)).unwrap();
            });
        }
    });
    for (number, end) in ends.iter().enumerate() {
        assert!(target.bytes()[8 * number..8 * number + 8] == *end.bytes());
    }
    let again = ends[0].port.connect(&address, SOON).unwrap_err();
    assert!(again.to_string().contains("connected already"), "{again}");
    let nonsense = ends[0].port.connect(&address[1..], SOON).unwrap_err();
    assert_eq!(nonsense.code, Code::InvalidArgument);
}

#[test]
fn a_peer_that_has_closed_ends_transfers() {
    for config in transports() {
        let (left, right) = pair(&config, 1 << 20);
        let whole = right.remote();
        right.port.close(SOON).expect("nothing is in use");
        let begun = Instant::now();
        let error = loop {
            // Data that was on its way when the peer closed may still arrive.
            match left
                .write(1 << 20, &whole)
                .and_then(|write| write.wait(Some(SOON)))
            {
                Ok(()) => assert!(begun.elapsed() < SOON),
                Err(error) => break error,
            }
        };
        assert_eq!(error.code, Code::PeerLost, "{error}");
        println!("{error}");
        assert!(!left.port.is_connected() && !right.port.is_connected());
        for result in [
            right.port.bind().err(),
            right.port.connect(&[0; 128], SOON).err(),
        ] {
            assert!(result.is_some());
        }
        left.port.close(SOON).expect("it has let go of its memory");
        left.port.close(SOON).expect("again");
        let fresh = Port::new(config.clone()).unwrap();
        let address = fresh.bind().unwrap();
        drop(fresh);
        let late = Port::new(config).unwrap();
        let error = late
            .connect(&address, Duration::from_millis(300))
            .unwrap_err();
        // It was not there, or went meanwhile.
        assert!(
            [Code::Timeout, Code::System].contains(&error.code),
            "{error}"
        );
        assert!(error.message.contains("no process answers"), "{error}");
    }
}

/// Memory of the shared heap is like any other.
#[test]
fn heap_memory_is_registered_too() {
    let (left, right) = pair(&config("auto"), 1);
    let length = 4 << 20;
    let heap = |end: &End, values: &[u8]| {
        let mut buffer = Buffer::from_slice(values);
        let start = buffer.as_mut_ptr();
        // SAFETY: the buffer is its own owner; no code touches it meanwhile.
        unsafe { end.port.register(start, length, Box::new(buffer)) }.expect("registered")
    };
    let content = pattern(length, 8);
    let (from, to) = (heap(&left, &content), heap(&right, &vec![0; length]));
    let back = heap(&left, &vec![0; length]);
    let remote = right.port.remote(&to).unwrap();
    let write = left.port.write(&from, 0..length, &remote, None);
    write.unwrap().wait(Some(SOON)).unwrap();
    let read = left.port.read(&back, 0..length, &remote, None);
    read.unwrap().wait(Some(SOON)).unwrap();
    let private = End::new(&config("auto"), vec![0; length]);
    private
        .port
        .connect(&left.port.bind().unwrap(), SOON)
        .unwrap();
    let remote = left.port.remote(&back).unwrap();
    private
        .read(length, &remote)
        .unwrap()
        .wait(Some(SOON))
        .unwrap();
    assert!(private.bytes() == content);
}
