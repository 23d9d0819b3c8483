//! Endpoints of one process talking through real sockets.

mod outside;
mod strangers;

use std::net::TcpStream;
use std::sync::Barrier;
use std::thread;

use crossbeam_channel::{Receiver, Sender, unbounded};
use socket2::{Domain, Socket, Type};

use super::*;
use crate::error::Code;
use crate::transport::PeerState;

static NEVER: AtomicBool = AtomicBool::new(false);

/// A group's gate that hands out what arrives.
struct Arrivals {
    verdict: Verdict,
    links: Sender<(Rank, Lane, Box<dyn Link>)>,
}

impl Gate for Arrivals {
    fn admit(&self, _: Rank, _: Lane) -> Verdict {
        self.verdict
    }

    fn established(&self, from: Rank, lane: Lane, link: Box<dyn Link>) {
        // The test that no longer listens does not want it.
        let _ = self.links.send((from, lane, link));
    }
}

/// A rank: an endpoint of its own, and what arrives there.
struct Member {
    endpoint: Arc<Endpoint>,
    /// Those of all ranks of its group.
    keys: Vec<GroupKey>,
    rank: Rank,
    arrivals: Receiver<(Rank, Lane, Box<dyn Link>)>,
}

fn options() -> EndpointOptions {
    EndpointOptions {
        interface: Some("lo".into()),
        ring_bytes: 1 << 16,
        ..EndpointOptions::default()
    }
}

fn limits() -> Limits {
    Limits {
        handshake: Duration::from_secs(5),
        unknown_group: Duration::from_millis(200),
        refusals: Duration::from_millis(500),
        simultaneous: 8,
        grace: Duration::from_millis(100),
    }
}

/// The keys of a group of four ranks.
fn group() -> Vec<GroupKey> {
    GroupKey::of_ranks(4, [0; 32], false)
}

fn start() -> Arc<Endpoint> {
    Endpoint::start_with(&options(), limits()).unwrap()
}

impl Member {
    fn new(keys: &[GroupKey], rank: Rank) -> Self {
        Self::at(start(), keys, rank)
    }

    fn at(endpoint: Arc<Endpoint>, keys: &[GroupKey], rank: Rank) -> Self {
        Self::with_verdict(endpoint, keys, rank, Verdict::Accept)
    }

    fn with_verdict(
        endpoint: Arc<Endpoint>,
        keys: &[GroupKey],
        rank: Rank,
        verdict: Verdict,
    ) -> Self {
        let (links, arrivals) = unbounded();
        let gate = Arc::new(Arrivals { verdict, links });
        endpoint
            .register(keys[rank].clone(), rank, 4, gate)
            .unwrap();
        Self {
            endpoint,
            keys: keys.to_vec(),
            rank,
            arrivals,
        }
    }

    fn connect(&self, to: &Self, transport: TransportChoice) -> Result<Outcome> {
        self.connect_at(
            to.rank,
            to.endpoint.address(),
            transport,
            Duration::from_secs(10),
        )
    }

    fn connect_at(
        &self,
        to: Rank,
        target: &Address,
        transport: TransportChoice,
        within: Duration,
    ) -> Result<Outcome> {
        self.endpoint.connect(&ConnectRequest {
            deadline: Instant::now() + within,
            ..self.request(to, target, transport)
        })
    }

    fn request<'a>(
        &'a self,
        to: Rank,
        target: &'a Address,
        transport: TransportChoice,
    ) -> ConnectRequest<'a> {
        ConnectRequest {
            key: &self.keys[self.rank],
            from: self.rank,
            to,
            lane: Lane::Collective,
            target,
            deadline: Instant::now() + Duration::from_secs(60),
            silence: None,
            transport,
            cancelled: &NEVER,
        }
    }

    fn arrival(&self) -> (Rank, Lane, Box<dyn Link>) {
        self.arrivals.recv_timeout(Duration::from_secs(10)).unwrap()
    }
}

fn pair() -> (Member, Member) {
    let keys = group();
    (Member::new(&keys, 0), Member::new(&keys, 1))
}

fn link(outcome: Result<Outcome>) -> Box<dyn Link> {
    match outcome.unwrap() {
        Outcome::Link(link) => link,
        Outcome::Crossing => panic!("a crossing, though only one side connects"),
    }
}

fn send_all(link: &mut dyn Link, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let sent = link.try_send(bytes).unwrap();
        bytes = &bytes[sent..];
        thread::yield_now();
    }
}

fn receive(link: &mut dyn Link, count: usize) -> Vec<u8> {
    let until = Instant::now() + Duration::from_secs(10);
    let mut bytes = vec![0; count];
    let mut filled = 0;
    while filled < count {
        assert!(
            Instant::now() < until,
            "only {filled} of {count} bytes arrived"
        );
        filled += link.try_recv(&mut bytes[filled..]).unwrap();
        thread::yield_now();
    }
    bytes
}

/// The two ends belong together.
fn converse(one: &mut dyn Link, other: &mut dyn Link) {
    send_all(one, b"ping");
    assert_eq!(receive(other, 4), b"ping");
    send_all(other, b"pong!");
    assert_eq!(receive(one, 5), b"pong!");
}

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
    let (zero, _) = pair();
    let elsewhere = start();
    let within = Duration::from_millis(300);
    let error = zero
        .connect_at(1, elsewhere.address(), TransportChoice::Tcp, within)
        .unwrap_err();
    assert_eq!((error.code, error.peer), (Code::Timeout, Some(1)));
    assert!(error.message.contains("or not yet"), "{error}");
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
    let zero = Member::new(&keys, 0);
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

fn tcp_to(member: &Member) -> TcpStream {
    let stream = TcpStream::connect(member.endpoint.address().tcp()[0]).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    stream
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
        assert!(error.message.contains("probably ended"), "{error}");
    }
    assert!(
        since.elapsed() < Duration::from_secs(20),
        "took {:?}",
        since.elapsed()
    );
}

/// A listener whose queue is full takes no further connection, and says nothing: what a host does that is dark.
#[test]
fn a_host_that_answers_nothing_is_lost_within_its_limit() {
    let (zero, one) = pair();
    let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    full.bind(&any.into()).unwrap();
    full.listen(0).unwrap();
    let address = full.local_addr().unwrap().as_socket().unwrap();
    let fill = || TcpStream::connect_timeout(&address, Duration::from_millis(500));
    let queued: Vec<_> = std::iter::from_fn(|| fill().ok()).take(100).collect();
    assert!((1..100).contains(&queued.len()), "{} fit", queued.len());

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
    assert!(since.elapsed() >= Duration::from_secs(5));
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
    let within = Duration::from_millis(700);
    let error = zero
        .connect_at(1, one.endpoint.address(), TransportChoice::Auto, within)
        .unwrap_err();
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

#[test]
fn registering_is_checked() {
    let (zero, _one) = pair();
    let gate = || {
        let (links, _) = unbounded();
        Arc::new(Arrivals {
            verdict: Verdict::Accept,
            links,
        })
    };
    let twice = zero.endpoint.register(zero.keys[0].clone(), 0, 4, gate());
    assert_eq!(twice.unwrap_err().code, Code::InvalidArgument);
    let key = group().remove(3);
    let outside = zero.endpoint.register(key, 4, 4, gate());
    assert_eq!(outside.unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn starting_with_an_unknown_interface_is_refused() {
    let options = EndpointOptions {
        interface: Some("nosuch0".into()),
        ..EndpointOptions::default()
    };
    let error = Endpoint::start(options).err().unwrap();
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(
        error.message.contains("nosuch0") && error.message.contains("lo"),
        "{error}"
    );
}

#[test]
fn dropping_ends_the_accepting_thread_promptly() {
    let keys = group();
    let member = Member::new(&keys, 0);
    let silent: Vec<TcpStream> = (0..3).map(|_| tcp_to(&member)).collect();
    let since = Instant::now();
    drop(member);
    assert!(
        since.elapsed() < Duration::from_secs(2),
        "took {:?}",
        since.elapsed()
    );
    silent.into_iter().for_each(strangers::assert_shown_out);
}

#[test]
fn the_global_endpoint_is_shared_while_held() {
    let options = EndpointOptions {
        host: Some("global-test".into()),
        ..options()
    };
    let first = Endpoint::global(&options).unwrap();
    let second = Endpoint::global(&options).unwrap();
    assert_eq!(first.address(), second.address());
    let published = first.address().to_bytes();
    drop((first, second));
    let third = Endpoint::global(&options).unwrap();
    assert_ne!(third.address().to_bytes(), published);
}
