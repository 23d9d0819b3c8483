//! A member that lies: it joins, proves itself over TCP, and then sends what no member would. The group ends with an error
//! that names it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use crate::buffer::Memory;
use crate::communicator::Communicator;
use crate::config::Config;
use crate::engine::collective::header::Fingerprint;
use crate::engine::message::frame::{Frame, HEADER, Kind};
use crate::engine::message::peer::CREDIT;
use crate::engine::work::PointToPoint;
use crate::error::{Code, Error, Result};
use crate::plan::cost::Costs;
use crate::rendezvous::memory::MemoryStore;
use crate::rendezvous::roster::{self, Introduction, Roster};
use crate::transport::cipher::Cipher;
use crate::transport::endpoint::{Address, Endpoint, EndpointOptions, Lane};
use crate::transport::handshake::{
    ANSWER_BYTES, Answer, CHALLENGE_BYTES, Hello, Initiator, Proven, Purpose,
};
use crate::types::{Collective, DataType, ReduceOp};

/// The rank that lies.
const LIAR: usize = 2;
const TAG: u64 = 3;
/// Longer than any of this takes, and shorter than the timeout of what the ranks wait in.
const SOON: Duration = Duration::from_secs(30);

fn config(encrypt: bool) -> Config {
    let mut config = Config::default();
    let encrypt = if encrypt { "on" } else { "off" };
    for (name, value) in [
        ("timeout", "120"),
        ("join_timeout", "60"),
        ("transport", "tcp"),
        ("interface", "lo"),
        ("encrypt", encrypt),
    ] {
        config.set(name, value).unwrap();
    }
    config
}

/// One connection of the liar, and what it seals with.
struct Connection {
    stream: TcpStream,
    cipher: Cipher,
}

impl Connection {
    fn open(roster: &Roster, hello: &Hello) -> Self {
        let address = Address::from_bytes(&roster.members[hello.to as usize].address).unwrap();
        let mut stream = TcpStream::connect(address.tcp()[0]).unwrap();
        let initiator = Initiator::new(&roster.key, hello).unwrap();
        stream.write_all(initiator.hello()).unwrap();
        let mut challenge = [0; 1 + CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).unwrap();
        let challenge = challenge.last_chunk().unwrap();
        let (proof, mut proven): (_, Proven) = initiator.prove(challenge).unwrap();
        stream.write_all(&proof).unwrap();
        let mut answer = [0; ANSWER_BYTES];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(proven.answer(&answer).unwrap(), Answer::Accept);
        Self {
            stream,
            cipher: proven.into_cipher(),
        }
    }

    /// The other side may hang up at any byte.
    fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// The next record.
    fn seal(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut record = Vec::new();
        self.cipher.seal(bytes, &mut record);
        record
    }

    fn hang_up(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// The liar's link to rank 0.
struct Liar {
    data: Connection,
    control: Connection,
}

impl Liar {
    fn link(roster: &Roster, lane: Lane) -> Self {
        let hello = |purpose| Hello {
            purpose,
            lane,
            from: LIAR as u32,
            to: 0,
            link: [lane as u8 + 1; 16],
        };
        Self {
            data: Connection::open(roster, &hello(Purpose::TcpData)),
            control: Connection::open(roster, &hello(Purpose::TcpControl)),
        }
    }
}

/// Joins as the rank that lies. The endpoint at the address that it publishes accepts no connection.
fn join(store: &MemoryStore, config: &Config) -> (Roster, Arc<Endpoint>) {
    let endpoint = Endpoint::start(EndpointOptions {
        interface: Some("lo".into()),
        ..EndpointOptions::default()
    })
    .unwrap();
    let address = endpoint.address().to_bytes();
    let me = Introduction::new(LIAR, 3, address, config).unwrap();
    let roster = roster::join(store, &me, Duration::from_secs(60), &|_| {
        Costs::TYPICAL.rounded(1)
    })
    .unwrap();
    (roster, endpoint)
}

/// The operation of the honest ranks when the liar begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Doing {
    /// An all_reduce of all ranks.
    Reducing,
    /// Rank 0 receives from the liar.
    Receiving,
}

impl Doing {
    fn lane(self) -> Lane {
        match self {
            Self::Reducing => Lane::Collective,
            Self::Receiving => Lane::PointToPoint,
        }
    }

    fn run(self, comm: &Communicator, rank: usize) -> Result<()> {
        let group = comm.group();
        let receive = |from: usize| {
            let mut into = [0_u8; 16];
            // SAFETY: the wait is over when the receive has ended.
            let (memory, place) = (unsafe { Memory::of_mut(&mut into) }, (Some(from), TAG));
            let options = PointToPoint::default();
            let work = group.receive(DataType::UInt8, memory, place, options)?;
            group.wait(&work, None)
        };
        match (self, rank) {
            (Self::Reducing, _) => comm.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum),
            (Self::Receiving, 0) => receive(LIAR),
            (Self::Receiving, _) => receive(0),
        }
    }
}

/// Two honest ranks and the liar, whose `attack` comes to rank 0. The errors with which the honest ones ended.
fn ends(encrypt: bool, doing: Doing, attack: impl FnOnce(&mut Liar)) -> [Error; 2] {
    let config = config(encrypt);
    let (store, greeted) = (MemoryStore::default(), Barrier::new(3));
    thread::scope(|scope| {
        let honest = [0, 1].map(|rank| {
            let (store, greeted, config) = (&store, &greeted, config.clone());
            scope.spawn(move || {
                let comm = Communicator::join(store, rank, 3, config).unwrap();
                // The two have a link of their own, by which one tells the other.
                let greet = || match rank {
                    0 => comm.send_slice(&[1_u8], 1, 0),
                    _ => comm.receive_slice(&mut [0_u8], Some(0), 0).map(drop),
                };
                greet().unwrap();
                greeted.wait();
                doing.run(&comm, rank).unwrap_err()
            })
        });
        let (roster, _endpoint) = join(&store, &config);
        let mut liar = Liar::link(&roster, doing.lane());
        greeted.wait();
        let since = Instant::now();
        attack(&mut liar);
        let errors = honest.map(|rank| rank.join().expect("no panic"));
        assert!(since.elapsed() < SOON, "took {:?}", since.elapsed());
        errors
    })
}

fn assert_named(what: &str, code: Code, errors: &[Error; 2]) {
    for error in errors {
        let found = (error.code, error.peer);
        assert_eq!(found, (code, Some(LIAR)), "{what}: {error}");
    }
}

fn frame(kind: Kind, tag: u64, bytes: u64) -> [u8; HEADER] {
    let (dtype, id) = (DataType::UInt8 as u8, 77);
    let frame = Frame {
        kind,
        dtype,
        is_note: false,
        tag,
        id,
        bytes,
    };
    frame.encode()
}

fn fingerprint(length: u64) -> [u8; HEADER] {
    Fingerprint {
        sequence: 1,
        collective: Collective::AllReduce as u8,
        dtype: DataType::Float32 as u8,
        op: ReduceOp::Sum.number(),
        count: 4,
        length,
        ..Fingerprint::default()
    }
    .encode()
}

/// Tries each lie, in clear and sealed: its bytes on the data connection instead of a message, and the code of the error.
fn check(doing: Doing, lies: &[(&str, &[u8], Code)]) {
    for (what, bytes, code) in lies {
        for encrypt in [false, true] {
            let errors = ends(encrypt, doing, |liar| {
                let bytes = match encrypt {
                    true => liar.data.seal(bytes),
                    false => bytes.to_vec(),
                };
                liar.data.send(&bytes);
            });
            assert_named(what, *code, &errors);
        }
    }
}

#[test]
fn what_is_no_part_of_a_collective_ends_the_group() {
    let long = fingerprint(u64::MAX);
    let other = frame(Kind::Eager, TAG, 16);
    check(
        Doing::Reducing,
        &[
            ("bytes that are no header", &[0xa5; 4096], Code::Untrusted),
            ("a length of 2^64", &long, Code::Mismatch),
            ("a frame of the other lane", &other, Code::Untrusted),
        ],
    );
}

#[test]
fn what_is_no_message_ends_the_group() {
    let mut unknown = frame(Kind::Eager, TAG, 16);
    unknown[4] = 9;
    let mut note = frame(Kind::Eager, TAG, 16);
    note[6] = 1;
    let mut neither = note;
    neither[6] = 2;
    let endless = frame(Kind::Eager, 4, u64::MAX);
    let longer = frame(Kind::Eager, TAG, 17);
    let unasked = frame(Kind::Data, TAG, 16);
    let answer = frame(Kind::Ready, TAG, 16);
    check(
        Doing::Receiving,
        &[
            ("bytes that are no frame", &[0xa5; 4096], Code::Untrusted),
            ("an unknown kind", &unknown, Code::Untrusted),
            ("a note in the place of bytes", &note, Code::Untrusted),
            ("neither a note nor bytes", &neither, Code::Untrusted),
            ("a length of 2^64", &endless, Code::Untrusted),
            ("another length", &longer, Code::Mismatch),
            ("a payload unasked for", &unasked, Code::Untrusted),
            ("an answer to nothing", &answer, Code::Untrusted),
        ],
    );
}

#[test]
fn what_no_receive_takes_is_kept_within_a_bound() {
    let flood = |header: [u8; HEADER], payload: usize, times: usize| {
        let errors = ends(false, Doing::Receiving, |liar| {
            let message = [&header[..], &vec![7; payload]].concat();
            let many = message.repeat((1 << 20) / message.len());
            for _ in 0..=times * message.len() / many.len() {
                liar.data.send(&many);
            }
        });
        assert_named("a flood", Code::Untrusted, &errors);
        errors
    };
    // Other than the receive asks for.
    let bytes = CREDIT / 64;
    let errors = flood(frame(Kind::Eager, 4, bytes as u64), bytes, 80);
    assert!(
        errors[0].message.contains("without asking"),
        "{}",
        errors[0]
    );
    for kind in [Kind::Request, Kind::Eager] {
        let errors = flood(frame(kind, 4, 0), 0, 2 << 20);
        assert!(
            errors[0].message.contains("no receive takes"),
            "{}",
            errors[0]
        );
    }
}

#[test]
fn what_is_no_control_frame_ends_the_group() {
    let lies: [(&str, &[u8]); 5] = [
        ("another protocol", b"GET / HTTP/1.1\r\n"),
        ("a length of 65535", &[2, 0xff, 0xff]),
        ("a notice that is cut short", &[2, 4, 0, 1, 2, 3, 4]),
        (
            "a segment over TCP",
            &[
                6, 20, 0, 1, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0,
            ],
        ),
        ("a farewell with bytes", &[3, 1, 0, 0]),
    ];
    for (what, bytes) in lies {
        for encrypt in [false, true] {
            for doing in [Doing::Reducing, Doing::Receiving] {
                let errors = ends(encrypt, doing, |liar| {
                    // Any number of questions has one answer, which is not read here.
                    let bytes = [&[4, 0, 0].repeat(10_000), bytes].concat();
                    let bytes = match encrypt {
                        true => liar.control.seal(&bytes),
                        false => bytes,
                    };
                    liar.control.send(&bytes);
                });
                assert_named(what, Code::Untrusted, &errors);
                assert!(
                    errors[0].message.contains("control channel"),
                    "{}",
                    errors[0]
                );
            }
        }
    }
}

/// How a sealed message comes that is right but for that.
#[derive(Clone, Copy, Debug)]
enum Tampering {
    Forged,
    Repeated,
    LeftOut,
    Empty,
    Clear,
    Truncated,
}

fn tamper(connection: &mut Connection, bytes: &[u8], tampering: Tampering) {
    let mut record = connection.seal(bytes);
    match tampering {
        Tampering::Forged => record[Cipher::HEAD] ^= 1,
        Tampering::Repeated => record.extend_from_within(..),
        Tampering::LeftOut => record = connection.seal(bytes),
        Tampering::Empty => record = vec![0; 64],
        Tampering::Clear => record = bytes.repeat(1000),
        Tampering::Truncated => record.truncate(record.len() / 2),
    }
    connection.send(&record);
}

#[test]
fn what_is_no_record_ends_the_group() {
    let all = [
        Tampering::Forged,
        Tampering::Repeated,
        Tampering::LeftOut,
        Tampering::Empty,
        Tampering::Clear,
        Tampering::Truncated,
    ];
    for tampering in all {
        // A message that is kept, and a question.
        let message = [&frame(Kind::Eager, 4, 16)[..], &[7; 16]].concat();
        for (on_control, bytes) in [(false, &message[..]), (true, &[4, 0, 0])] {
            let errors = ends(true, Doing::Receiving, |liar| {
                let target = match on_control {
                    true => &mut liar.control,
                    false => &mut liar.data,
                };
                tamper(target, bytes, tampering);
                if matches!(tampering, Tampering::Truncated) {
                    liar.data.hang_up();
                    liar.control.hang_up();
                }
            });
            let code = if matches!(tampering, Tampering::Truncated) {
                Code::PeerLost
            } else {
                Code::Untrusted
            };
            assert_named(&format!("{tampering:?}, {on_control}"), code, &errors);
        }
    }
}
