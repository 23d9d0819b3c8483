//! Links over real sockets, with stripes and without.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::time::Instant;

use socket2::{Domain, Socket, Type};

use super::*;
use crate::transport::handshake;
use crate::transport::suite;
use crate::transport::tcp::kernel::unacknowledged;
use crate::transport::tcp::mending::Part;

fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (ours, listener.accept().unwrap().0)
}

/// A connection whose sockets hold `bytes` bytes in each direction, as far as the system allows.
fn connection_with_room(bytes: usize) -> (TcpStream, TcpStream) {
    let socket = || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_send_buffer_size(bytes).unwrap();
        socket.set_recv_buffer_size(bytes).unwrap();
        socket
    };
    // An accepted socket has the buffer sizes of the listener.
    let (ours, listener) = (socket(), socket());
    listener
        .bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
        .unwrap();
    listener.listen(1).unwrap();
    ours.connect(&listener.local_addr().unwrap()).unwrap();
    (ours.into(), listener.accept().unwrap().0.into())
}

fn links() -> (TcpLink, TcpLink) {
    let (data, control) = (connection(), connection());
    (
        TcpLink::new(data.0, control.0, "a".to_owned(), true).unwrap(),
        TcpLink::new(data.1, control.1, "b".to_owned(), false).unwrap(),
    )
}

/// Smaller socket buffers than this make loopback wait for delayed acknowledgements.
const LEAST: usize = 64 << 10;

pub(in crate::transport) fn make(capacity: usize) -> suite::Pair {
    let (a, b) = links();
    let capacity = capacity.max(LEAST);
    for link in [&a, &b] {
        let socket = socket2::SockRef::from(link.data.socket());
        socket.set_send_buffer_size(capacity).unwrap();
        socket.set_recv_buffer_size(capacity).unwrap();
    }
    (Box::new(a), Box::new(b))
}

pub(in crate::transport) fn make_sealed(_: usize) -> suite::Pair {
    let (a, b) = links();
    let (data, control) = (
        handshake::tests::conversation(),
        handshake::tests::conversation(),
    );
    let (a, b) = (
        a.encrypted(data.0, control.0),
        b.encrypted(data.1, control.1),
    );
    (Box::new(a), Box::new(b))
}

pub(in crate::transport) fn make_striped(_: usize) -> suite::Pair {
    let (a, b) = striped(2, false);
    (Box::new(a), Box::new(b))
}

suite::conformance!(make);

/// Links with stripes in both directions, from the first byte on.
fn striped(number: u8, is_sealed: bool) -> (TcpLink, TcpLink) {
    striped_with_room(number, is_sealed, LEAST)
}

/// The same, with at most `room` bytes on their way over each stripe.
fn striped_with_room(number: u8, is_sealed: bool, room: usize) -> (TcpLink, TcpLink) {
    let (mut a, mut b) = links();
    let ciphers = || match is_sealed {
        true => {
            let (near, far) = handshake::tests::conversation();
            (Some(near), Some(far))
        }
        false => (None, None),
    };
    if is_sealed {
        let (data, control) = (
            handshake::tests::conversation(),
            handshake::tests::conversation(),
        );
        a = a.encrypted(data.0, control.0);
        b = b.encrypted(data.1, control.1);
    }
    add_stripes(&mut a, &mut b, (number, room), ciphers);
    add_stripes(&mut b, &mut a, (number, room), ciphers);
    while !(a.outgoing.is_framed() && b.outgoing.is_framed()) {
        assert_eq!(a.peer_state(), PeerState::Present);
        assert_eq!(b.peer_state(), PeerState::Present);
    }
    (a, b)
}

fn add_stripes(
    from: &mut TcpLink,
    to: &mut TcpLink,
    (number, room): (u8, usize),
    ciphers: impl Fn() -> (Option<Cipher>, Option<Cipher>),
) {
    from.outgoing = Outgoing::striped(number.into());
    assert_eq!(from.wants_stripes(), Some(0..number));
    assert_eq!(from.wants_stripes(), None);
    for number in 0..number {
        let ((near, far), (ours, theirs)) = (connection_with_room(room), ciphers());
        from.add_stripe(Stripe::new(number, true, near, ours).unwrap());
        to.add_stripe(Stripe::new(number, false, far, theirs).unwrap());
    }
}

mod striped {
    use super::*;

    fn make(_: usize) -> (Box<dyn Link>, Box<dyn Link>) {
        let (a, b) = striped(3, false);
        (Box::new(a), Box::new(b))
    }

    suite::conformance!(make);
}

mod striped_and_sealed {
    use super::*;

    fn make(_: usize) -> (Box<dyn Link>, Box<dyn Link>) {
        let (a, b) = striped(3, true);
        (Box::new(a), Box::new(b))
    }

    suite::conformance!(make);
}

mod striped_among_threads {
    use super::*;

    fn make(_: usize) -> (Box<dyn Link>, Box<dyn Link>) {
        let (a, b) = among_threads(3, false);
        (Box::new(a), Box::new(b))
    }

    suite::conformance!(make);
}

/// Links with stripes on which whole blocks have room, and three threads at each end.
fn among_threads(number: u8, is_sealed: bool) -> (TcpLink, TcpLink) {
    let (mut a, mut b) = striped_with_room(number, is_sealed, 1 << 20);
    for link in [&mut a, &mut b] {
        link.share(&Arc::new(Workers::new(3)));
    }
    (a, b)
}

/// One call takes what has come over several stripes; one thread takes a block of one.
#[test]
fn threads_take_what_is_on_several_stripes_at_once() {
    const BLOCK: usize = 128 << 10;
    let bytes: Vec<u8> = (0..8 << 20).map(|i: u32| (i % 251) as u8).collect();
    for has_threads in [false, true] {
        let (mut a, mut b) = match has_threads {
            true => among_threads(4, false),
            false => striped_with_room(4, false, 1 << 20),
        };
        let (mut sent, mut received, mut most) = (0, 0, 0);
        let mut arrived = vec![0; bytes.len()];
        while received < bytes.len() {
            while sent < bytes.len()
                && let count @ 1.. = a.try_send(&bytes[sent..]).unwrap()
            {
                sent += count;
            }
            std::thread::sleep(Duration::from_millis(1));
            let count = b.try_recv(&mut arrived[received..]).unwrap();
            received += count;
            most = most.max(count);
        }
        assert!(arrived == bytes);
        assert_eq!(most > BLOCK, has_threads, "{most}");
    }
}

/// Payloads that are dealt out, with short messages between them, sent and received in pieces of any length.
#[test]
fn what_is_dealt_out_arrives_in_order() {
    for (is_sealed, has_threads) in [(false, false), (true, false), (false, true), (true, true)] {
        let (mut a, mut b) = match has_threads {
            true => among_threads(4, is_sealed),
            false => striped(4, is_sealed),
        };
        let total = 40_000_000;
        let bytes: Vec<u8> = (0..total as u32).map(|i| (i % 251) as u8).collect();
        let (mut sent, mut received, mut seed) = (0, 0, 1_usize);
        let mut arrived = vec![0; total];
        let mut below = |most: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % most + 1
        };
        while received < total {
            let length = [40, 300_000, 5_000_000][below(3) - 1];
            let end = total.min(sent + below(length));
            if sent < end {
                let header = &bytes[sent..end.min(sent + below(40))];
                sent += match below(2) {
                    1 => a.try_send(&bytes[sent..end]).unwrap(),
                    _ => a
                        .try_send_message(header, &bytes[sent + header.len()..end])
                        .unwrap(),
                };
            }
            let end = total.min(received + below(length));
            if below(2) == 1 {
                received += b.try_recv(&mut arrived[received..end]).unwrap();
            } else {
                let mut at = received;
                let most = (end - received) / 4 * 4;
                received += b
                    .try_fold(most, 4, &mut |run| {
                        arrived[at..at + run.len()].copy_from_slice(run);
                        at += run.len();
                    })
                    .unwrap();
            }
        }
        assert!(arrived == bytes);
        assert!(b.incoming.stripes().count() == 4 && b.memory() > 0);
    }
}

/// The stripes take part: what goes over the first connection alone are heads.
#[test]
fn a_long_payload_leaves_the_first_connection_free() {
    let (mut a, mut b) = striped(4, false);
    let payload = vec![7; 8 << 20];
    let (mut sent, mut received) = (0, vec![0; 8 << 20]);
    let mut done = 0;
    while done < payload.len() {
        sent += a.try_send(&payload[sent..]).unwrap();
        done += b.try_recv(&mut received[done..]).unwrap();
    }
    assert!(received == payload);
    let carried = |connection: &Connection| {
        while unacknowledged(connection) > 0 {
            std::thread::yield_now();
        }
        crate::transport::tcp::kernel::traffic(connection).acknowledged
    };
    assert!(carried(&a.data) < 1000);
    let all = a.outgoing.stripes().iter().map(carried);
    assert!(all.clone().sum::<u64>() >= 8 << 20 && all.min() > Some(100_000));
}

#[test]
fn stripes_that_are_given_up_are_closed_at_both_ends() {
    let (mut a, mut b) = striped(3, false);
    let (payload, mut received) = (vec![5; 1 << 20], vec![0; 1 << 20]);
    for _ in 0..2 {
        let (mut sent, mut done) = (0, 0);
        while done < payload.len() {
            sent += a.try_send(&payload[sent..]).unwrap();
            done += b.try_recv(&mut received[done..]).unwrap();
        }
        assert!(received == payload);
        received.fill(0);
        a.give_up_stripes();
        a.outgoing.use_only(0);
        assert_eq!(a.outgoing.stripes().len(), 0);
    }
    let until = Instant::now() + Duration::from_secs(10);
    while b.incoming.stripes().count() > 0 {
        assert!(Instant::now() < until, "they stay");
        assert_eq!(b.peer_state(), PeerState::Present);
    }
    assert_eq!(a.peer_state(), PeerState::Present);
}

/// Gives up the stripes of `a` for others, whose other ends it returns.
fn change_stripes(a: &mut TcpLink, numbers: Range<u8>, is_sealed: bool) -> Vec<Stripe> {
    a.outgoing.use_only(0);
    a.give_up_stripes();
    assert_eq!(a.outgoing.stripes().len(), 0, "something was not sent");
    a.outgoing.want(numbers.len());
    assert_eq!(a.wants_stripes(), Some(numbers.clone()));
    let mut theirs = Vec::new();
    for number in numbers {
        let (near, far) = connection_with_room(1 << 20);
        let (ours, cipher) = is_sealed.then(handshake::tests::conversation).unzip();
        a.add_stripe(Stripe::new(number, true, near, ours).unwrap());
        theirs.push(Stripe::new(number, false, far, cipher).unwrap());
    }
    assert_eq!(a.outgoing.stripes().len(), theirs.len());
    theirs
}

fn assert_receives(b: &mut TcpLink, bytes: &[u8]) {
    let (mut received, mut done) = (vec![0; bytes.len()], 0);
    let until = Instant::now() + Duration::from_secs(10);
    while done < received.len() {
        assert!(
            Instant::now() < until,
            "{done} of {} bytes came",
            bytes.len()
        );
        done += b.try_recv(&mut received[done..]).unwrap();
    }
    assert!(received == bytes);
}

/// Bytes sent over old stripes are received after the new ones have come; before these come, no other bytes are received.
#[test]
fn stripes_come_after_others_that_were_given_up() {
    let payload: Vec<u8> = (0..400_000_u32).map(|at| (at % 251) as u8).collect();
    for (is_sealed, looks) in [(false, false), (true, false), (false, true), (true, true)] {
        let (mut a, mut b) = striped_with_room(3, is_sealed, 1 << 20);
        let mut sent = a.try_send(&payload).unwrap();
        assert!(sent > 0);
        for numbers in [8..10, 16..18] {
            let theirs = change_stripes(&mut a, numbers, is_sealed);
            theirs.into_iter().for_each(|stripe| b.add_stripe(stripe));
            assert_receives(&mut b, &payload[..sent]);
            if looks {
                assert_eq!(b.peer_state(), PeerState::Present);
            }
            sent = a.try_send(&payload).unwrap();
            assert!(sent > 0);
        }
        // The old ones are at their end, those of a further trial never came, and the new ones are not there yet.
        a.outgoing.use_only(0);
        a.give_up_stripes();
        let theirs = change_stripes(&mut a, 32..33, is_sealed);
        assert_receives(&mut b, &payload[..sent]);
        sent = a.try_send(&payload).unwrap();
        assert!(sent > 0);
        let mut nothing = [0; 1000];
        for _ in 0..100 {
            assert_eq!(b.try_recv(&mut nothing).unwrap(), 0);
            assert_eq!(b.peer_state(), PeerState::Present);
        }
        theirs.into_iter().for_each(|stripe| b.add_stripe(stripe));
        assert_receives(&mut b, &payload[..sent]);
        assert!(b.incoming.stripes().count() == 1);
    }
}

/// A closed socket whose peer does not read loses what it has to send in the end.
#[test]
fn stripes_that_are_given_up_are_kept_until_all_has_arrived() {
    let (mut a, mut b) = striped(3, false);
    let payload: Vec<u8> = (0..2_000_000_u32).map(|at| (at % 251) as u8).collect();
    let (mut sent, mut done, mut received) = (0, 0, vec![0; payload.len()]);
    for _ in 0..100 {
        sent += a.try_send(&payload[sent..]).unwrap();
    }
    a.outgoing.use_only(0);
    let until = Instant::now() + Duration::from_secs(10);
    while !a.outgoing.stripes().is_empty() {
        assert!(Instant::now() < until, "blocks stay");
        let end = received.len().min(done + 1000);
        done += b.try_recv(&mut received[done..end]).unwrap();
        sent += a.try_send(&payload[sent..]).unwrap();
    }
    assert!(!a.outgoing.is_acknowledged(), "nothing was on its way");
    while done < payload.len() {
        assert!(Instant::now() < until, "{done} bytes came");
        done += b.try_recv(&mut received[done..]).unwrap();
        sent += a.try_send(&payload[sent..]).unwrap();
    }
    assert!(received == payload);
    while !a.outgoing.is_acknowledged() {
        assert!(Instant::now() < until, "something is still on its way");
    }
}

#[test]
fn a_stripe_in_use_that_cannot_be_made_again_ends_the_link() {
    let (mut a, mut b) = striped(2, false);
    assert!(a.try_send(&vec![1; 100_000]).unwrap() > 0);
    // A socket that is closed with unread bytes resets its connection.
    while !b.incoming.stripes().all(Connection::may_receive) {}
    b.incoming = Incoming::default();
    assert!(matches!(suite::end_of(&mut a), PeerState::Lost(_)));
}

#[test]
fn bytes_before_frames_go_as_they_are() {
    let (mut a, mut b) = links();
    a.outgoing = Outgoing::striped(1);
    let mut bytes = [0; 10];
    assert_eq!(a.try_send(b"plain").unwrap(), 5);
    let (near, far) = connection();
    a.add_stripe(Stripe::new(0, true, near, None).unwrap());
    // The peer has not heard of it.
    assert_eq!(a.try_send(b"framed").unwrap(), 0);
    assert!(!a.arm(suite::WRITABLE));
    a.disarm();
    while !a.outgoing.is_framed() {
        assert_eq!(b.peer_state(), PeerState::Present);
        assert_eq!(a.peer_state(), PeerState::Present);
    }
    assert!(a.arm(suite::WRITABLE));
    a.disarm();
    assert_eq!(a.try_send(b"framed").unwrap(), 6);
    while b.try_recv(&mut bytes[..5]).unwrap() == 0 {}
    assert_eq!(&bytes[..5], b"plain");
    // A stripe may come later than what is announced to be on it.
    let long = vec![3; 400_000];
    let sent = a.try_send(&long).unwrap();
    assert!(sent > 0);
    let mut some = vec![0; 1000];
    while b.try_recv(&mut some[..6]).unwrap() == 0 {}
    assert_eq!(&some[..6], b"framed");
    assert_eq!(b.try_recv(&mut some).unwrap(), 0);
    assert!(!b.arm(suite::READABLE));
    b.disarm();
    b.add_stripe(Stripe::new(0, false, far, None).unwrap());
    while b.try_recv(&mut some).unwrap() == 0 {}
    assert_eq!(some[0], 3);
}

#[test]
fn what_is_no_frame_blames_the_peer() {
    for bytes in [[0, 0, 0, 255], [0, 0, 0, 3]] {
        let (data, control) = (connection(), connection());
        let mut link = TcpLink::new(data.0, control.0, "peer".to_owned(), true).unwrap();
        let mut frame = Vec::new();
        Frame::Framing(0).write(&mut frame);
        (&control.1).write_all(&frame).unwrap();
        let mut answer = [0; 3];
        control.1.set_nonblocking(true).unwrap();
        while (&control.1).read_exact(&mut answer).is_err() {
            assert_eq!(link.peer_state(), PeerState::Present);
        }
        (&data.1).write_all(&bytes).unwrap();
        let error = loop {
            match link.try_recv(&mut [0; 10]) {
                Ok(count) => assert_eq!(count, 0),
                Err(error) => break error,
            }
        };
        assert_eq!(error.code, Code::Untrusted);
    }
}

#[test]
fn frames_that_begin_in_the_past_end_the_link() {
    let (mut a, mut b) = links();
    assert_eq!(a.try_send(&[1; 100]).unwrap(), 100);
    let mut bytes = [0; 100];
    while b.try_recv(&mut bytes).unwrap() == 0 {}
    a.control.send(&Frame::Framing(50));
    let PeerState::Broken(what) = suite::end_of(&mut b) else {
        panic!("it goes on");
    };
    assert!(what.contains("frames"), "{what}");
}

/// Both the bytes before a farewell and the farewell count, whichever connection is late.
#[test]
fn a_farewell_waits_for_what_is_on_stripes() {
    farewell_overtakes(striped(2, false));
}

/// Fills the link, says farewell, and receives late.
fn farewell_overtakes((mut a, mut b): (TcpLink, TcpLink)) {
    let (mut sent, payload) = (0, vec![9; 4 << 20]);
    loop {
        match a.try_send(&payload).unwrap() {
            0 => break,
            count => sent += count,
        }
    }
    a.send_farewell();
    for _ in 0..20 {
        assert_eq!(b.peer_state(), PeerState::Present);
        std::thread::sleep(Duration::from_millis(10));
    }
    let (mut received, mut bytes) = (0, vec![0; 100_000]);
    // Further bytes may have gone that do not count.
    while received < sent || b.peer_state() == PeerState::Present {
        received += b.try_recv(&mut bytes).unwrap();
    }
    assert_eq!(suite::end_of(&mut b), PeerState::Left);
}

#[test]
fn garbage_on_the_control_connection_is_told() {
    let (data, control) = (connection(), connection());
    let mut link = TcpLink::new(data.0, control.0, "peer".to_owned(), true).unwrap();
    (&control.1).write_all(b"GET / HTTP/1.1\r\n").unwrap();
    drop(data.1);
    let what = "unknown frame kind 0x47 on the control channel".to_owned();
    assert_eq!(suite::end_of(&mut link), PeerState::Broken(what));
}

#[test]
fn a_lone_end_is_a_breach_that_is_told_once() {
    let (data, control) = (connection(), connection());
    let mut link = TcpLink::new(data.0, control.0, "peer".to_owned(), true).unwrap();
    drop(data.1);
    let breach = loop {
        assert_eq!(link.peer_state(), PeerState::Present);
        if let Some(breach) = link.wants_mending() {
            break breach;
        }
    };
    assert_eq!(link.wants_mending(), None);
    let (part, number) = (Part::Data, 0);
    assert_eq!(breach.socket, SocketId { part, number });
    assert!(breach.is_ours && link.is_mending());
    let why = Hindrance::NotSoFar("it is off".to_owned());
    link.cannot_mend(breach.socket, &why);
    let why = "connection closed, and it could not be opened again: it is off".to_owned();
    assert_eq!(link.peer_state(), PeerState::Lost(why));
    assert!(!link.is_mending());
    drop(control.1);
}

#[test]
fn a_farewell_that_overtakes_many_bytes_does_not_end_the_link() {
    farewell_overtakes(links());
}

#[test]
fn farewells_are_seen_while_both_keep_the_link() {
    let (mut a, mut b) = links();
    assert_eq!(a.try_send(b"last words").unwrap(), 10);
    a.send_farewell();
    assert_eq!(suite::end_of(&mut b), PeerState::Left);
    assert_eq!(a.peer_state(), PeerState::Present);
    assert_eq!(b.try_send(b"answer").unwrap(), 6);
    b.send_farewell();
    assert_eq!(b.try_send(b"more").unwrap(), 0);
    assert_eq!(suite::end_of(&mut a), PeerState::Left);
    let mut bytes = [0; 100];
    assert_eq!(a.try_recv(&mut bytes).unwrap(), 6);
    assert_eq!(b.try_recv(&mut bytes).unwrap(), 10);
    assert_eq!(&bytes[..10], b"last words");
}

#[test]
fn sending_into_a_closed_connection_leaves_received_bytes() {
    let (mut a, mut b) = links();
    assert_eq!(b.try_send(b"last words").unwrap(), 10);
    drop(b);
    while !a.data.is_broken() {
        a.try_send(&[0; 1000]).unwrap();
    }
    assert!(matches!(suite::end_of(&mut a), PeerState::Lost(_)));
    let mut bytes = [0; 100];
    assert_eq!(a.try_recv(&mut bytes).unwrap(), 10);
    assert_eq!(&bytes[..10], b"last words");
    assert_eq!(a.try_recv(&mut bytes).unwrap(), 0);
    assert!(!a.arm(Interest {
        readable: true,
        writable: true
    }));
}

mod mending;
