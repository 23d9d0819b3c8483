//! Links between processes that have shaken hands before.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::super::requests::{Message, Opening};
use super::*;
use crate::transport::handshake::Answer;
use crate::transport::shm::{Program, ShmLink};

/// Another group of the same processes.
fn further(keys: &[GroupKey]) -> Vec<GroupKey> {
    let subset = |key: &GroupKey| key.subset(b"further", &[0, 1, 2, 3]);
    keys.iter().map(subset).collect()
}

/// Asks for a link by a message; `None` where it takes a handshake.
fn ask(member: &Member, to: Rank, lane: Lane) -> Option<Receiver<Heard>> {
    let (tell, heard) = unbounded();
    let hear = move |what| {
        let _ = tell.send(what);
    };
    let key = &member.keys[member.rank];
    let is_asked = member
        .endpoint
        .ask(key, (member.rank, to), lane, Box::new(hear));
    is_asked.then_some(heard)
}

fn heard(asked: Option<Receiver<Heard>>) -> Heard {
    let asked = asked.expect("they know each other");
    asked.recv_timeout(Duration::from_secs(10)).unwrap()
}

fn linked(asked: Option<Receiver<Heard>>) -> Box<dyn Link> {
    match heard(asked) {
        Heard::Link(link) => link,
        Heard::Crossing => panic!("a crossing"),
        Heard::NotThisWay => panic!("a handshake is needed"),
    }
}

/// Two members that have opened a link by a handshake, and their further group. The second is patient.
fn acquainted() -> ([Member; 2], [Member; 2]) {
    let keys = group();
    let zero = Member::new(&keys, 0);
    let one = Member::at(start_patient(), &keys, 1);
    assert!(ask(&zero, 1, Lane::Collective).is_none(), "not yet");
    let _link = link(zero.connect(&one, TransportChoice::Shm));
    let _other = one.arrival();
    let keys = further(&zero.keys);
    let again = [
        Member::at(zero.endpoint.clone(), &keys, 0),
        Member::at(one.endpoint.clone(), &keys, 1),
    ];
    ([zero, one], again)
}

#[test]
fn links_of_further_groups_are_opened_by_messages_from_either_side() {
    let ([zero, one], again) = acquainted();
    let mut ours = linked(ask(&again[0], 1, Lane::Collective));
    let (from, lane, mut theirs) = again[1].arrival();
    assert_eq!((from, lane), (0, Lane::Collective));
    converse(&mut *ours, &mut *theirs);
    let mut ours = linked(ask(&again[1], 0, Lane::PointToPoint));
    let (from, lane, mut theirs) = again[0].arrival();
    assert_eq!((from, lane), (1, Lane::PointToPoint));
    converse(&mut *ours, &mut *theirs);
    theirs.send_farewell();
    assert!(matches!(ours.peer_state(), PeerState::Left));
    // The other link of the first group, too; and none twice.
    linked(ask(&one, 0, Lane::PointToPoint));
    assert!(ask(&zero, 1, Lane::PointToPoint).is_none());
}

#[test]
fn of_two_that_ask_at_once_one_gets_the_link() {
    for _ in 0..20 {
        let (_first, again) = acquainted();
        let (zero, one) = (&again[0], &again[1]);
        let asked = [
            ask(zero, 1, Lane::Collective),
            ask(one, 0, Lane::Collective),
        ];
        let mut links = Vec::new();
        for asked in asked.into_iter().flatten() {
            match asked.recv_timeout(Duration::from_secs(10)).unwrap() {
                Heard::Link(link) => links.push(link),
                Heard::Crossing | Heard::NotThisWay => {}
            }
        }
        let [mut ours] = <[_; 1]>::try_from(links).ok().expect("one link");
        let until = Instant::now() + Duration::from_secs(10);
        let (_, _, mut theirs) = loop {
            let mut arrivals = [zero, one].into_iter().map(|member| &member.arrivals);
            if let Some(arrived) = arrivals.find_map(|arriving| arriving.try_recv().ok()) {
                break arrived;
            }
            assert!(Instant::now() < until, "its other end");
            thread::yield_now();
        };
        converse(&mut *ours, &mut *theirs);
    }
}

#[test]
fn a_group_that_is_not_there_yet_is_waited_for_a_little() {
    let ([zero, one], _) = acquainted();
    let keys: Vec<_> = zero
        .keys
        .iter()
        .map(|key| key.subset(b"late", &[0, 1, 2, 3]))
        .collect();
    let early = Member::at(zero.endpoint.clone(), &keys, 0);
    let asked = ask(&early, 1, Lane::Collective);
    thread::sleep(Duration::from_millis(30));
    let late = Member::at(one.endpoint.clone(), &keys, 1);
    let mut ours = linked(asked);
    converse(&mut *ours, &mut *late.arrival().2);
    let never: Vec<_> = zero
        .keys
        .iter()
        .map(|key| key.subset(b"never", &[0, 1, 2, 3]))
        .collect();
    let early = Member::at(one.endpoint.clone(), &never, 1);
    assert!(matches!(
        heard(ask(&early, 0, Lane::Collective)),
        Heard::NotThisWay
    ));
}

/// The process has proved only that it holds the key of rank 0.
#[test]
fn a_process_that_is_known_as_one_rank_gets_no_link_of_another() {
    let ([_zero, one], [zero, other]) = acquainted();
    let key = &zero.keys[0];
    let pair = key.pair(1).unwrap();
    let known = zero.endpoint.shared.acquaintances.of(&pair).unwrap();
    let opening = Opening {
        number: 77,
        lane: Lane::Collective,
        group: key.id(),
        from: 2,
        to: 1,
    };
    let files = || {
        let (a, b) = UnixStream::pair().unwrap();
        [a.into(), b.into()]
    };
    Message::Open(opening)
        .send(known.socket(), &files())
        .ok()
        .expect("room");
    // Nor of itself, and nothing that is no segment.
    Message::Open(Opening { from: 1, ..opening })
        .send(known.socket(), &files())
        .ok()
        .expect("room");
    Message::Open(Opening { from: 0, ..opening })
        .send(known.socket(), &files())
        .ok()
        .expect("room");
    // In its turn: all before has been read.
    linked(ask(&zero, 1, Lane::PointToPoint));
    let (from, lane, _) = other.arrival();
    assert_eq!((from, lane), (0, Lane::PointToPoint));
    assert!(other.arrivals.is_empty() && one.arrivals.is_empty());
}

#[test]
fn a_process_that_sends_what_is_no_message_is_known_no_longer() {
    let (_first, [zero, one]) = acquainted();
    let pair = zero.keys[0].pair(1).unwrap();
    let known = zero.endpoint.shared.acquaintances.of(&pair).unwrap();
    let waits = {
        let keys: Vec<_> = zero
            .keys
            .iter()
            .map(|key| key.subset(b"no", &[0, 1, 2, 3]))
            .collect();
        let early = Member::at(zero.endpoint.clone(), &keys, 0);
        (ask(&early, 1, Lane::Collective), early)
    };
    rustix::net::send(known.socket(), b"nonsense", rustix::net::SendFlags::empty()).unwrap();
    assert!(matches!(heard(waits.0), Heard::NotThisWay));
    let until = Instant::now() + Duration::from_secs(10);
    while let Some(asked) = ask(&zero, 1, Lane::Collective) {
        assert!(matches!(heard(Some(asked)), Heard::NotThisWay));
        assert!(Instant::now() < until);
    }
    // By a handshake all goes on.
    let mut ours = link(zero.connect(&one, TransportChoice::Shm));
    converse(&mut *ours, &mut *one.arrival().2);
}

#[test]
fn the_end_of_a_process_is_heard_and_a_group_that_is_left_says_farewell() {
    let ([zero, one], [again, other]) = acquainted();
    let keys: Vec<_> = zero
        .keys
        .iter()
        .map(|key| key.subset(b"left", &[0, 1, 2, 3]))
        .collect();
    let early = Member::at(zero.endpoint.clone(), &keys, 0);
    let asked = ask(&early, 1, Lane::Collective).expect("they know each other");
    zero.endpoint.unregister(&keys[0].id(), 0);
    let late = Member::at(one.endpoint.clone(), &keys, 1);
    let (_, _, mut theirs) = late.arrival();
    assert!(matches!(theirs.peer_state(), PeerState::Left));
    assert!(asked.recv().is_err(), "it is not told any more");
    drop(((late, other), one));
    let until = Instant::now() + Duration::from_secs(10);
    while let Some(asked) = ask(&again, 1, Lane::Collective) {
        assert!(matches!(heard(Some(asked)), Heard::NotThisWay));
        assert!(Instant::now() < until);
    }
}

/// A request that cannot be answered is no reason to leave the messages behind it unread.
#[test]
fn an_answer_is_heard_from_a_process_that_reads_no_more() {
    let zero = Member::new(&group(), 0);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (pair, process) = (zero.keys[0].pair(1).unwrap(), Program::behind(&theirs));
    let shared = &zero.endpoint.shared;
    shared.acquaintances.add(shared, pair, ours, process);
    let asked = ask(&zero, 1, Lane::Collective);
    let (request, files) = Message::receive(&theirs).ok().flatten().expect("a request");
    let Message::Open(opening) = request else {
        panic!("{request:?}");
    };
    // So no answer can be sent to it any more, as after its end, while the order of the messages stays certain.
    theirs.shutdown(Shutdown::Read).unwrap();
    let own = Opening {
        from: 1,
        to: 0,
        lane: Lane::PointToPoint,
        ..opening
    };
    for message in [
        Message::Open(own),
        Message::Answer(opening.number, Answer::Accept),
    ] {
        message.send(&theirs, &[]).ok().expect("room");
    }
    let mut ours = linked(asked);
    let [segment, control] = <[_; 2]>::try_from(files).unwrap();
    let process = Program::behind(&theirs);
    let mut other = ShmLink::open_with(control.into(), process, segment).unwrap();
    converse(&mut *ours, &mut other);
}
