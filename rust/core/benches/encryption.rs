//! The costs of encryption: `cargo bench -p unisono --bench encryption`.
//!
//! First one core alone: records are sealed and opened from memory to memory. Then a link over loopback with and without
//! encryption, in turn: a stream of 4 MiB pieces in one direction, with a thread at each end, and a ping-pong of 8 bytes.
//! Each figure is the median over the rounds. On a machine whose cores are taken by others the link's figures say little.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use unisono::transport::Link;
use unisono::transport::cipher::Cipher;
use unisono::transport::handshake::{Hello, Initiator, Lane, Purpose, Stranger};
use unisono::transport::keys::{GroupKey, KeyPair};
use unisono::transport::tcp::TcpLink;

const ROUNDS: usize = 9;
const RECORD: usize = 32 << 10;
const SEALED: usize = 256 << 20;
const PIECE: usize = 4 << 20;
const STREAMED: usize = 512 << 20;
const PINGS: usize = 2000;

fn main() {
    let (seal, open) = median(sealing);
    println!("one core, records of 32 KiB: seal {seal:.2} GB/s, open {open:.2} GB/s");
    let both = 1.0 / (1.0 / seal + 1.0 / open);
    println!("one core, seal and open the same bytes: {both:.2} GB/s\n");
    let mut plain = Vec::new();
    let mut encrypted = Vec::new();
    for _ in 0..ROUNDS {
        plain.push(over_loopback(false));
        encrypted.push(over_loopback(true));
    }
    let (plain, encrypted) = (middle(plain), middle(encrypted));
    println!("loopback            plain  encrypted  plain / encrypted");
    let line = |what: &str, plain: f64, encrypted: f64| {
        println!(
            "{what:16} {plain:8.2} {encrypted:10.2} {:18.2}",
            plain / encrypted
        );
    };
    line("stream, GB/s", plain.0, encrypted.0);
    line("8 bytes, us", plain.1, encrypted.1);
}

fn median(measure: impl Fn() -> (f64, f64)) -> (f64, f64) {
    middle((0..ROUNDS).map(|_| measure()).collect())
}

fn middle(figures: Vec<(f64, f64)>) -> (f64, f64) {
    let (mut first, mut second): (Vec<_>, Vec<_>) = figures.into_iter().unzip();
    first.sort_unstable_by(f64::total_cmp);
    second.sort_unstable_by(f64::total_cmp);
    (first[first.len() / 2], second[second.len() / 2])
}

/// Bytes per nanosecond.
fn rate(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_nanos() as f64
}

/// GB/s of sealing and of opening, on one core.
fn sealing() -> (f64, f64) {
    let (mut near, mut far) = conversation();
    let bytes = vec![7; RECORD];
    let mut opened = vec![0; RECORD + 16];
    let mut record = Vec::new();
    let (mut sealing, mut opening) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..SEALED / RECORD {
        record.clear();
        let begun = Instant::now();
        near.seal(&bytes, &mut record);
        let sealed = Instant::now();
        let length = far.open(&record[Cipher::HEAD..], &mut opened);
        opening += sealed.elapsed();
        sealing += sealed - begun;
        assert_eq!(length, Ok(RECORD));
    }
    (rate(SEALED, sealing), rate(SEALED, opening))
}

/// GB/s of a stream in one direction, and the microseconds that 8 bytes take there.
fn over_loopback(encrypt: bool) -> (f64, f64) {
    let (near, far) = links(encrypt);
    let answering = thread::spawn(move || answer(far));
    let rates = ask(near);
    answering.join().expect("no panic");
    rates
}

fn ask(mut link: TcpLink) -> (f64, f64) {
    let bytes = vec![3; PIECE];
    let begun = Instant::now();
    for _ in 0..STREAMED / PIECE {
        send(&mut link, &bytes);
    }
    receive(&mut link, &mut [0; 8]);
    let streamed = rate(STREAMED, begun.elapsed());
    let begun = Instant::now();
    for _ in 0..PINGS {
        send(&mut link, &[1; 8]);
        receive(&mut link, &mut [0; 8]);
    }
    let one_way = begun.elapsed() / (2 * PINGS as u32);
    (streamed, one_way.as_nanos() as f64 / 1e3)
}

fn answer(mut link: TcpLink) {
    let mut bytes = vec![0; PIECE];
    for _ in 0..STREAMED / PIECE {
        receive(&mut link, &mut bytes);
    }
    send(&mut link, &[1; 8]);
    for _ in 0..PINGS {
        receive(&mut link, &mut [0; 8]);
        send(&mut link, &[1; 8]);
    }
}

fn send(link: &mut TcpLink, bytes: &[u8]) {
    let mut sent = 0;
    while sent < bytes.len() {
        match link.try_send(&bytes[sent..]).expect("the peer is there") {
            0 => thread::yield_now(),
            count => sent += count,
        }
    }
}

fn receive(link: &mut TcpLink, bytes: &mut [u8]) {
    let mut received = 0;
    while received < bytes.len() {
        match link
            .try_recv(&mut bytes[received..])
            .expect("the peer is there")
        {
            0 => thread::yield_now(),
            count => received += count,
        }
    }
}

fn links(encrypt: bool) -> (TcpLink, TcpLink) {
    let (data, control) = (connection(), connection());
    let near = TcpLink::new(data.0, control.0, "near".to_owned(), true).expect("a link");
    let far = TcpLink::new(data.1, control.1, "far".to_owned(), false).expect("a link");
    if !encrypt {
        return (near, far);
    }
    let (data, control) = (conversation(), conversation());
    (
        near.encrypted(data.0, control.0),
        far.encrypted(data.1, control.1),
    )
}

fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("connect");
    (near, listener.accept().expect("a connection").0)
}

/// Both ends of a conversation after its handshake.
fn conversation() -> (Cipher, Cipher) {
    let pairs = [(); 2].map(|()| Arc::new(KeyPair::random().expect("random bytes")));
    let members: Vec<_> = pairs.iter().map(|pair| pair.public()).collect();
    let keys = pairs.map(|pair| GroupKey::new(pair, (members.clone(), b""), [0; 32], true));
    let hello = Hello {
        purpose: Purpose::TcpData,
        lane: Lane::Collective,
        from: 0,
        to: 1,
        link: [0; 16],
    };
    let initiator = Initiator::new(&keys[0], &hello).expect("a hello");
    let stranger = Stranger::new(*initiator.hello()).expect("ours");
    let challenged = stranger.challenge(&keys[1]).expect("a member");
    let challenge = challenged.frame().last_chunk().expect("longer");
    let (proof, proven) = initiator.prove(challenge).expect("a member");
    let (_, answers) = challenged.verify(&proof).expect("no recording");
    (proven.into_cipher(), answers.into_cipher())
}
