//! Peers that cannot be reached, do not answer, have left, or are not who they should be.

use std::io::Read;
use std::net::TcpListener;

use socket2::{Domain, Socket, Type};

use super::*;

/// An address that leads to another rank than the table says: what is there does not hold that rank's key.
#[test]
fn another_rank_in_the_place_of_one_is_not_believed() {
    let (zero, one) = pair();
    let target = one.endpoint.address();
    let within = Duration::from_secs(5);
    let error = zero
        .connect_at(2, target, TransportChoice::Auto, within)
        .unwrap_err();
    assert_eq!((error.code, error.peer), (Code::Untrusted, Some(2)));
    for to in [0, 4, usize::MAX] {
        let error = zero
            .connect_at(to, target, TransportChoice::Auto, within)
            .unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
    }
}

/// A rank that is refused until its time is over cannot know that it never will be let in.
#[test]
fn a_deadline_before_the_end_of_refusals_is_a_timeout() {
    let zero = Member::at(start_patient(), &group(), 0);
    let elsewhere = start();
    let within = Duration::from_millis(1500);
    let error = zero
        .connect_at(1, elsewhere.address(), TransportChoice::Tcp, within)
        .unwrap_err();
    assert_eq!((error.code, error.peer), (Code::Timeout, Some(1)));
    assert!(error.message.contains("or not yet"), "{error}");
}

#[test]
fn an_ended_peer_is_lost_at_once() {
    let (zero, one) = pair();
    let target = one.endpoint.address().clone();
    drop(one);
    let since = Instant::now();
    for transport in [
        TransportChoice::Auto,
        TransportChoice::Shm,
        TransportChoice::Tcp,
    ] {
        let error = zero
            .connect_at(1, &target, transport, Duration::from_secs(60))
            .unwrap_err();
        assert_eq!(
            (error.code, error.peer),
            (Code::PeerLost, Some(1)),
            "{error}"
        );
        let process = format!("rank 1 ({target})");
        assert!(error.message.contains(&process), "{error}");
        // This process runs, and so does its own.
        for part in ["has closed its group", "nothing listens any more at"] {
            assert!(error.message.contains(part), "{error}");
        }
        assert!(!error.message.contains("INTERFACE"), "{error}");
    }
    assert!(
        since.elapsed() < Duration::from_secs(20),
        "took {:?}",
        since.elapsed()
    );
}

/// A listener whose queue is full takes no further connection, and says nothing: what a host does that is dark. Returns it,
/// what fills its queue, and its address.
fn dark_host() -> (Socket, Vec<TcpStream>, SocketAddr) {
    let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    full.bind(&any.into()).unwrap();
    full.listen(0).unwrap();
    let address = full.local_addr().unwrap().as_socket().unwrap();
    let fill = || TcpStream::connect_timeout(&address, Duration::from_millis(500));
    let queued: Vec<_> = std::iter::from_fn(|| fill().ok()).take(100).collect();
    assert!((1..100).contains(&queued.len()), "{} fit", queued.len());
    (full, queued, address)
}

/// Whether a connection to this address has been begun and is not answered.
fn is_on_its_way(address: SocketAddr) -> bool {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let port = format!(":{:04X}", address.port());
    table.lines().any(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        // The other end, and a state: the system waits for an answer.
        fields[2].ends_with(&port) && fields[3] == "02"
    })
}

/// The rank that cannot reach its peer is the lower one, whose attempt goes first in other cases.
#[test]
fn the_attempt_of_the_peer_goes_first_while_this_side_reaches_nothing() {
    let (zero, one) = pair();
    let (full, queued, address) = dark_host();
    let mut target = one.endpoint.address().clone();
    target.tcp = vec![address];
    thread::scope(|scope| {
        let attempt = scope.spawn(|| {
            zero.endpoint.connect(&ConnectRequest {
                silence: Some(20),
                ..zero.request(1, &target, TransportChoice::Tcp)
            })
        });
        let until = Instant::now() + Duration::from_secs(10);
        while !is_on_its_way(address) {
            assert!(Instant::now() < until, "it does not begin");
            thread::yield_now();
        }
        let mut near = link(one.connect(&zero, TransportChoice::Tcp));
        converse(&mut *near, &mut *zero.arrival().2);
        // Its own attempt reaches the host at last, and ends without a word.
        for _ in &queued {
            drop(full.accept().unwrap());
        }
        let (mut late, _) = full.accept().unwrap();
        assert!(matches!(attempt.join().unwrap(), Ok(Outcome::Crossing)));
        assert_eq!(late.read_to_end(&mut Vec::new()).unwrap(), 0);
    });
}

#[test]
fn a_host_that_answers_nothing_is_lost_within_its_limit() {
    let (zero, one) = pair();
    let (_full, _queued, address) = dark_host();
    let mut target = one.endpoint.address().clone();
    target.tcp = vec![address];
    let since = Instant::now();
    let connect = || {
        zero.endpoint.connect(&ConnectRequest {
            silence: Some(2),
            ..zero.request(1, &target, TransportChoice::Tcp)
        })
    };
    // The peer may still be able to connect to this side, for a while.
    let error = loop {
        match connect() {
            Ok(Outcome::Crossing) => std::thread::sleep(Duration::from_millis(100)),
            Ok(other) => panic!("{other:?}"),
            Err(error) => break error,
        }
    };
    assert!(since.elapsed() >= Duration::from_secs(4));
    assert_eq!(
        (error.code, error.peer),
        (Code::PeerLost, Some(1)),
        "{error}"
    );
    for part in [
        &format!("rank 1 ({target})"),
        "its host has not answered for 2 s",
    ] {
        assert!(error.message.contains(part), "{error}");
    }
    let took = since.elapsed().as_secs();
    assert!((2..20).contains(&took), "took {took} s");
}

#[test]
fn a_listener_that_does_not_answer_runs_into_the_deadline_or_is_called_off() {
    let (zero, one) = pair();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut target = one.endpoint.address().clone();
    target.tcp = vec![silent.local_addr().unwrap()];
    let within = Duration::from_millis(200);
    let error = zero
        .connect_at(1, &target, TransportChoice::Tcp, within)
        .unwrap_err();
    assert_eq!(
        (error.code, error.peer),
        (Code::Timeout, Some(1)),
        "{error}"
    );

    let cancelled = AtomicBool::new(false);
    thread::scope(|scope| {
        let attempt = scope.spawn(|| {
            let request = zero.request(1, &target, TransportChoice::Tcp);
            zero.endpoint.connect(&ConnectRequest {
                cancelled: &cancelled,
                ..request
            })
        });
        thread::sleep(Duration::from_millis(100));
        cancelled.store(true, Ordering::Release);
        let error = attempt.join().unwrap().unwrap_err();
        assert_eq!(
            (error.code, error.peer),
            (Code::Aborted, Some(1)),
            "{error}"
        );
    });
}

#[test]
fn who_left_a_group_says_so() {
    let (zero, one) = pair();
    one.endpoint.unregister(&one.keys[1].id(), 1);
    let error = zero.connect(&one, TransportChoice::Auto).unwrap_err();
    assert_eq!(
        (error.code, error.peer),
        (Code::PeerLost, Some(1)),
        "{error}"
    );
    assert!(error.message.contains("has left"), "{error}");
    zero.endpoint.unregister(&zero.keys[0].id(), 0);
    let error = zero.connect(&one, TransportChoice::Auto).unwrap_err();
    assert_eq!(error.code, Code::Internal);
}
