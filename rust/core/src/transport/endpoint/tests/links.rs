//! Which link two ranks get, however they begin.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener};
use std::sync::Barrier;

use super::*;
use crate::transport::Part;
use crate::transport::handshake::{ANSWER_BYTES, CHALLENGE_BYTES};

#[test]
fn shared_memory_inside_a_host() {
    let (zero, one) = pair();
    let mut near = link(zero.connect(&one, TransportChoice::Auto));
    let (from, lane, mut far) = one.arrival();
    assert_eq!((from, lane), (0, Lane::Collective));
    assert!(
        near.describe().contains("shared memory"),
        "{}",
        near.describe()
    );
    converse(&mut *near, &mut *far);
}

#[test]
fn tcp_when_asked_for_and_between_hosts() {
    let (zero, one) = pair();
    let mut near = link(zero.connect(&one, TransportChoice::Tcp));
    let (_, _, mut far) = one.arrival();
    assert!(near.describe().contains("tcp"), "{}", near.describe());
    converse(&mut *near, &mut *far);

    let apart = EndpointOptions {
        host: Some("elsewhere".into()),
        ..options()
    };
    let apart = Endpoint::start_with(&apart, limits()).unwrap();
    let two = Member::at(apart, &zero.keys, 2);
    let mut near = link(two.connect(&zero, TransportChoice::Auto));
    let (from, _, mut far) = zero.arrival();
    assert_eq!(from, 2);
    assert!(far.describe().contains("tcp"), "{}", far.describe());
    converse(&mut *near, &mut *far);
    let error = two.connect(&one, TransportChoice::Shm).unwrap_err();
    assert_eq!((error.code, error.peer), (Code::Unsupported, Some(1)));
}

/// Further connections of a link, once it is there and as many as there may be, encrypted or not.
#[test]
fn stripes_come_one_after_the_other() {
    for encrypts in [false, true] {
        let keys = GroupKey::of_ranks(4, [0; 32], encrypts);
        let [zero, one] = [0, 1].map(|rank| Member::new(&keys, rank));
        let request = zero.request(1, one.endpoint.address(), TransportChoice::Tcp);
        let mut ours = 0;
        let open = |numbers, take: &mut dyn FnMut(Stripe)| {
            zero.endpoint.open_stripes(&request, numbers, take)
        };
        let error = open(0..1, &mut |_| panic!("no link yet")).unwrap_err();
        assert_eq!((error.code, error.peer), (Code::System, Some(1)));
        drop(link(zero.connect(&one, TransportChoice::Tcp)));
        drop(one.arrival());
        open(0..3, &mut |_| ours += 1).unwrap();
        assert_eq!(ours, 3);
        let until = Instant::now() + Duration::from_secs(10);
        while one.gate.stripes.lock().len() < 3 {
            assert!(Instant::now() < until, "they do not arrive");
            thread::yield_now();
        }
        for (from, lane, _) in one.gate.stripes.lock().iter() {
            assert_eq!((*from, *lane), (0, Lane::Collective));
        }
        // Some are opened again, when an answer was lost, and others later.
        for number in 3..u8::MAX {
            let number = number / 2;
            open(number..number + 1, &mut |_| ours += 1).unwrap();
        }
        let error = open(0..1, &mut |_| panic!("one too many")).unwrap_err();
        assert_eq!((error.code, error.peer), (Code::System, Some(1)));
        assert_eq!(ours, u8::MAX);
        one.endpoint.unregister(&keys[1].id(), 1);
        let error = open(3..4, &mut |_| panic!("it has left")).unwrap_err();
        assert_eq!((error.code, error.peer), (Code::PeerLost, Some(1)));
    }
}

#[test]
fn lanes_and_groups_have_links_of_their_own() {
    let (zero, one) = pair();
    let part = |key: &GroupKey| key.subset(b"split", &[1, 0, 2, 3]);
    let other = [1, 0, 2, 3].map(|rank| part(&zero.keys[rank]));
    let other_zero = Member::at(Arc::clone(&zero.endpoint), &other, 1);
    let other_one = Member::at(Arc::clone(&one.endpoint), &other, 0);
    let mut first = link(zero.connect(&one, TransportChoice::Auto));
    let mut second = link(other_zero.connect(&other_one, TransportChoice::Auto));
    converse(&mut *first, &mut *one.arrival().2);
    converse(&mut *second, &mut *other_one.arrival().2);
}

#[test]
fn crossing_attempts_make_one_link() {
    for round in 0..60 {
        let transport = [TransportChoice::Auto, TransportChoice::Tcp][round % 2];
        let (zero, one) = pair();
        let start = Barrier::new(2);
        let run = |me: &Member, to: &Member| {
            start.wait();
            me.connect(to, transport).unwrap()
        };
        let (at_zero, at_one) = thread::scope(|scope| {
            let at_one = scope.spawn(|| run(&one, &zero));
            (run(&zero, &one), at_one.join().unwrap())
        });
        let (mut near, mut far) = match (at_zero, at_one) {
            (Outcome::Link(near), Outcome::Crossing) => (near, one.arrival().2),
            (Outcome::Crossing, Outcome::Link(far)) => (zero.arrival().2, far),
            (at_zero, at_one) => panic!("round {round}: {at_zero:?} and {at_one:?}"),
        };
        converse(&mut *near, &mut *far);
        assert!(zero.arrivals.try_recv().is_err() && one.arrivals.try_recv().is_err());
    }
}

/// Every rank opens every link at once, through acceptors with few places.
#[test]
fn everybody_connects_to_everybody_at_once() {
    for transport in [TransportChoice::Auto, TransportChoice::Tcp] {
        let keys = group();
        let members: Vec<Member> = (0..4).map(|rank| Member::new(&keys, rank)).collect();
        let attempts = || {
            let pairs = (0..16).map(|pair| (pair / 4, pair % 4));
            let pairs = pairs.filter(|(from, to)| from != to);
            pairs.flat_map(|(from, to)| {
                [Lane::Collective, Lane::PointToPoint].map(|lane| (from, to, lane))
            })
        };
        let opened: Vec<_> = thread::scope(|scope| {
            let members = &members;
            let threads: Vec<_> = attempts()
                .map(|(from, to, lane)| {
                    scope.spawn(move || {
                        let target = members[to].endpoint.address();
                        let request = members[from].request(to, target, transport);
                        let request = ConnectRequest { lane, ..request };
                        members[from].endpoint.connect(&request).unwrap()
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let mut ends = HashMap::new();
        for ((from, to, lane), outcome) in attempts().zip(opened) {
            if let Outcome::Link(link) = outcome {
                assert!(ends.insert((from, to, lane), link).is_none());
            }
        }
        assert_eq!(ends.len(), 12, "one link per pair of ranks and lane");
        for member in &members {
            while ends.len() < 24
                && attempts().any(|(at, from, lane)| {
                    at == member.rank && !ends.contains_key(&(at, from, lane))
                })
            {
                let (from, lane, link) = member.arrival();
                assert!(ends.insert((member.rank, from, lane), link).is_none());
            }
        }
        for (from, to, lane) in attempts().filter(|(from, to, _)| from < to) {
            let mut near = ends.remove(&(from, to, lane)).unwrap();
            let mut far = ends.remove(&(to, from, lane)).unwrap();
            converse(&mut *near, &mut *far);
        }
    }
}

#[test]
fn a_link_that_exists_is_not_opened_again() {
    let (zero, one) = pair();
    let _near = link(zero.connect(&one, TransportChoice::Auto));
    let _far = one.arrival();
    for (from, to) in [(&zero, &one), (&one, &zero)] {
        let again = from.connect(to, TransportChoice::Auto).unwrap();
        assert!(matches!(again, Outcome::Crossing));
    }
}

#[test]
fn two_processes_that_claim_one_rank_are_told() {
    let (zero, one) = pair();
    let _near = link(zero.connect(&one, TransportChoice::Auto));
    let impostor = Member::new(&zero.keys, 0);
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let error = impostor.connect(&one, transport).unwrap_err();
        assert_eq!((error.code, error.peer), (Code::Mismatch, Some(1)));
        assert!(
            error.message.contains("two processes claim rank 0"),
            "{error}"
        );
    }
}

/// A way to `target` that swallows the last answer of the second connection's handshake, and breaks that.
fn way_that_loses_an_answer(target: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for (number, near) in listener.incoming().take(3).enumerate() {
            let near = near.unwrap();
            let far = TcpStream::connect(target).unwrap();
            let (mut near_too, mut far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            thread::spawn(move || io::copy(&mut near_too, &mut far_too));
            thread::spawn(move || {
                let (mut near, mut far) = (near, far);
                if number == 1 {
                    let mut challenge = [0; 1 + CHALLENGE_BYTES];
                    far.read_exact(&mut challenge).unwrap();
                    near.write_all(&challenge).unwrap();
                    far.read_exact(&mut [0; ANSWER_BYTES]).unwrap();
                } else {
                    let _ = io::copy(&mut far, &mut near);
                }
                for ended in [near, far] {
                    let _ = ended.shutdown(Shutdown::Both);
                }
            });
        }
    });
    address
}

/// The peer has made the link then, and this side hears of that when it asks again.
#[test]
fn the_last_answer_of_a_handshake_may_be_lost() {
    for encrypts in [false, true] {
        let keys = GroupKey::of_ranks(4, [5; 32], encrypts);
        let (zero, one) = (Member::new(&keys, 0), Member::new(&keys, 1));
        let mut target = one.endpoint.address().clone();
        target.tcp = vec![way_that_loses_an_answer(target.tcp[0])];
        let outcome = zero.connect_at(1, &target, TransportChoice::Tcp, Duration::from_secs(10));
        let (mut near, (_, _, mut far)) = (link(outcome), one.arrival());
        converse(&mut *near, &mut *far);
        // The control connection is to be made again, by the side that had opened it.
        for (end, is_ours) in [(&mut near, true), (&mut far, false)] {
            let until = Instant::now() + Duration::from_secs(10);
            let breach = loop {
                assert_eq!(end.peer_state(), PeerState::Present);
                if let Some(breach) = end.wants_mending() {
                    break breach;
                }
                assert!(Instant::now() < until);
            };
            assert_eq!(
                (breach.socket.part, breach.is_ours),
                (Part::Control, is_ours)
            );
        }
    }
}

#[test]
fn a_gate_can_refuse() {
    let keys = group();
    let zero = Member::new(&keys, 0);
    let one = Member::with_verdict(start(), &keys, 1, Verdict::Crossing);
    let two = Member::with_verdict(start(), &keys, 2, Verdict::Duplicate);
    let crossing = zero.connect(&one, TransportChoice::Auto).unwrap();
    assert!(matches!(crossing, Outcome::Crossing));
    let error = zero.connect(&two, TransportChoice::Auto).unwrap_err();
    assert_eq!(error.code, Code::Mismatch);
}

#[test]
fn an_encrypted_group_converses() {
    let keys = GroupKey::of_ranks(4, [5; 32], true);
    let (zero, one) = (Member::new(&keys, 0), Member::new(&keys, 1));
    let mut near = link(zero.connect(&one, TransportChoice::Tcp));
    let (_, _, mut far) = one.arrival();
    for end in [&near, &far] {
        assert!(end.describe().contains("encrypted"), "{}", end.describe());
    }
    converse(&mut *near, &mut *far);
    near.send_farewell();
    let until = Instant::now() + Duration::from_secs(10);
    while far.peer_state() != PeerState::Left {
        assert!(Instant::now() < until, "the farewell did not arrive");
        thread::yield_now();
    }
}

#[test]
fn a_group_registered_late_is_waited_for() {
    let keys = group();
    let zero = Member::at(start_patient(), &keys, 0);
    let endpoint = start();
    let address = endpoint.address().clone();
    thread::scope(|scope| {
        let near = scope.spawn(|| {
            let within = Duration::from_secs(10);
            link(zero.connect_at(1, &address, TransportChoice::Auto, within))
        });
        // Longer than the acceptor waits for an unknown group: the initiator has to come back.
        thread::sleep(Duration::from_millis(500));
        let one = Member::at(endpoint, &keys, 1);
        converse(&mut *near.join().unwrap(), &mut *one.arrival().2);
    });
}

#[test]
fn an_unreachable_unix_name_leads_to_tcp() {
    let (zero, one) = pair();
    let mut target = one.endpoint.address().clone();
    target.unix_name = b"unisono-of-another-namespace".to_vec();
    let mut near =
        link(zero.connect_at(1, &target, TransportChoice::Auto, Duration::from_secs(10)));
    assert!(near.describe().contains("tcp"), "{}", near.describe());
    converse(&mut *near, &mut *one.arrival().2);
}

#[test]
fn a_segment_that_cannot_be_made_leads_to_tcp() {
    let keys = group();
    let huge = EndpointOptions {
        ring_bytes: 1 << 62,
        ..options()
    };
    let zero = Member::at(Endpoint::start_with(&huge, limits()).unwrap(), &keys, 0);
    let one = Member::new(&keys, 1);
    let mut near = link(zero.connect(&one, TransportChoice::Auto));
    assert!(near.describe().contains("tcp"), "{}", near.describe());
    converse(&mut *near, &mut *one.arrival().2);
}
