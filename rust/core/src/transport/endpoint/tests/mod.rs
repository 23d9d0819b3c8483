//! Endpoints of one process talking through real sockets.

mod acquaintances;
mod distance;
mod inquiries;
mod lifecycle;
mod links;
mod losses;
mod outside;
mod strangers;

use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::*;
use crate::error::Code;
use crate::transport::{Link, PeerState};

static NEVER: AtomicBool = AtomicBool::new(false);

/// A group's gate that hands out what arrives.
struct Arrivals {
    verdict: Verdict,
    links: Sender<(Rank, Lane, Box<dyn Link>)>,
    stripes: Mutex<Vec<(Rank, Lane, Stripe)>>,
}

type Arriving = Receiver<(Rank, Lane, Box<dyn Link>)>;

impl Arrivals {
    fn new(verdict: Verdict) -> (Arc<Self>, Arriving) {
        let (links, arrivals) = unbounded();
        let stripes = Mutex::default();
        let gate = Self {
            verdict,
            links,
            stripes,
        };
        (Arc::new(gate), arrivals)
    }
}

impl Gate for Arrivals {
    fn admit(&self, _: Rank, _: Lane) -> Verdict {
        self.verdict
    }

    fn established(&self, from: Rank, lane: Lane, link: Box<dyn Link>) {
        // The test that no longer listens does not want it.
        let _ = self.links.send((from, lane, link));
    }

    fn striped(&self, from: Rank, lane: Lane, stripe: Stripe) {
        self.stripes.lock().push((from, lane, stripe));
    }
}

/// A rank: an endpoint of its own, and what arrives there.
struct Member {
    endpoint: Arc<Endpoint>,
    /// Those of all ranks of its group.
    keys: Vec<GroupKey>,
    rank: Rank,
    gate: Arc<Arrivals>,
    arrivals: Arriving,
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

/// An endpoint that waits for a group that it does not know, and comes again where it is refused, longer than any test takes.
fn start_patient() -> Arc<Endpoint> {
    let patient = Limits {
        unknown_group: Duration::from_secs(60),
        refusals: Duration::from_secs(60),
        ..limits()
    };
    Endpoint::start_with(&options(), patient).unwrap()
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
        let (gate, arrivals) = Arrivals::new(verdict);
        endpoint
            .register(keys[rank].clone(), rank, 4, gate.clone())
            .unwrap();
        Self {
            endpoint,
            keys: keys.to_vec(),
            rank,
            gate,
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
            known_as: (self.rank, to),
            lane: Lane::Collective,
            target,
            deadline: Instant::now() + Duration::from_secs(60),
            silence: None,
            transport,
            cancelled: &NEVER,
            turn: None,
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

fn tcp_to(member: &Member) -> TcpStream {
    let stream = TcpStream::connect(member.endpoint.address().tcp()[0]).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    stream
}
