//! The listeners that are open to other hosts, and for how long.

use super::*;
use crate::skips::skipped;

/// An endpoint that no other test has, open to the network as far as this host has one.
fn open(ring_bytes: usize) -> Option<Seat> {
    let options = EndpointOptions {
        ring_bytes,
        ..EndpointOptions::default()
    };
    let seat = Endpoint::global(&options).unwrap();
    let has_both = seat.address().has_both();
    if !has_both {
        skipped("this host has no interface but loopback");
    }
    has_both.then_some(seat)
}

/// An address on the network and that on loopback.
fn sides(seat: &Seat) -> (SocketAddr, SocketAddr) {
    match *seat.address().tcp() {
        [outside, .., inside] => (outside, inside),
        ref other => panic!("{other:?}"),
    }
}

fn assert_closes(address: SocketAddr) {
    let until = Instant::now() + Duration::from_secs(10);
    while TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < until, "{address} is still open");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_last_group_that_reaches_out_closes_the_listeners_on_the_network() {
    let Some(mut first) = open(1 << 12) else {
        return;
    };
    let second = open(1 << 12).unwrap();
    let own = first.address().clone();
    assert_eq!(second.address(), &own);
    let (outside, inside) = sides(&first);
    first.met([&own, &own].into_iter());
    thread::sleep(Duration::from_millis(100));
    TcpStream::connect(outside).expect("the second group may need it");
    drop(second);
    assert_closes(outside);
    TcpStream::connect(inside).expect("it is for the ranks of this host");
    // Its ports are published, so it stays as it is.
    let third = open(1 << 12).unwrap();
    assert_ne!(third.address(), &own);
    TcpStream::connect(sides(&third).0).unwrap();
}

#[test]
fn ranks_of_one_host_link_by_loopback() {
    let Some(mut seat) = open(1 << 13) else {
        return;
    };
    let own = seat.address().clone();
    seat.met([&own].into_iter());
    assert_closes(sides(&seat).0);
    let keys = group();
    let one = Member::at(Arc::clone(&seat.endpoint), &keys, 1);
    let zero_seat = open(1 << 13).unwrap();
    let zero = Member::at(Arc::clone(&zero_seat.endpoint), &keys, 0);
    let mut near = link(zero.connect(&one, TransportChoice::Tcp));
    converse(&mut *near, &mut *one.arrival().2);
}

#[test]
fn a_rank_elsewhere_keeps_them_open() {
    let Some(mut seat) = open(1 << 14) else {
        return;
    };
    let own = seat.address().clone();
    let mut labelled = own.clone();
    labelled.host = HostId::this(Some("a-part")).unwrap();
    let mut copied = own.clone();
    copied.tcp[0].set_ip("192.0.2.7".parse().unwrap());
    let mut lone = own.clone();
    lone.tcp.pop();
    let [foreign, ..] = &Address::samples()[..] else {
        unreachable!()
    };
    for other in [&labelled, &copied, &lone, foreign] {
        seat.met([&own, other].into_iter());
    }
    thread::sleep(Duration::from_millis(100));
    TcpStream::connect(sides(&seat).0).unwrap();
    // Nor is loopback tried, where it leads elsewhere.
    for other in [&labelled, &copied] {
        let (_, outside) = other.tcp().split_last().unwrap();
        assert_eq!(other.towards(&own), outside);
    }
    let mut inside_first = own.tcp().to_vec();
    inside_first.rotate_right(1);
    assert_eq!(own.towards(&own), inside_first);
}
