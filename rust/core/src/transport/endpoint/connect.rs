//! Opening a link: shared memory first between processes of one host, then TCP, with an error that says what was
//! tried and what that means.

use std::cell::Cell;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::membership::{Membership, PEER_MAY_COME, Way};
use super::wire::{Cut, Patience, foreign_user};
use super::{Address, Shared};
use crate::config::TransportChoice;
use crate::error::{Code, Error, Result};
use crate::fork;
use crate::transport::Link;
use crate::transport::handshake::{
    ANSWER_BYTES, Answer, CHALLENGE_BYTES, Hello, Initiator, Lane, Proven, Purpose, Reply,
};
use crate::transport::keys::{GroupKey, random_bytes};
use crate::transport::shm::ShmLink;
use crate::transport::tcp::TcpLink;
use crate::types::Rank;

/// How long a refused TCP connection is tried again: the listener may be about to come back.
const REFUSED_GRACE: Duration = Duration::from_millis(200);

/// How long an address may take to answer before the next one of the same peer is tried.
const ANOTHER_AFTER: Duration = Duration::from_secs(3);

/// Which link to open, to whom, and for how long to try.
#[derive(Debug)]
pub struct ConnectRequest<'a> {
    /// The group, which must be registered.
    pub key: &'a GroupKey,
    /// This process's rank in it.
    pub from: Rank,
    /// The peer's rank in it.
    pub to: Rank,
    /// Which link of the two.
    pub lane: Lane,
    /// What the peer published.
    pub target: &'a Address,
    /// When to give up.
    pub deadline: Instant,
    /// After how many seconds a host that does not answer over TCP is given up; never, if `None`.
    pub silence: Option<u32>,
    /// What may carry the link.
    pub transport: TransportChoice,
    /// Set from elsewhere to give up at once (within a twentieth of a second).
    pub cancelled: &'a AtomicBool,
}

/// How an attempt to open a link ended.
pub enum Outcome {
    /// The link.
    Link(Box<dyn Link>),
    /// The peer is opening this link at this moment, or has opened it: wait for it at the gate. Its attempt may
    /// still fail for a reason that only the peer learns; connecting again after a while is harmless and finds
    /// that out.
    Crossing,
}

impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Link(link) => write!(f, "Link({})", link.describe()),
            Self::Crossing => f.write_str("Crossing"),
        }
    }
}

pub(super) fn connect(
    shared: &Shared,
    membership: &Arc<Membership>,
    request: &ConnectRequest<'_>,
) -> Result<Outcome> {
    let to = u32::try_from(request.to).unwrap_or(u32::MAX);
    if request.from != membership.rank as Rank || !membership.has_peer(to) {
        return Err(Error::invalid(format!(
            "no link from rank {} to rank {}: this is rank {} of {}",
            request.from, request.to, membership.rank, membership.world_size
        )));
    }
    let claim = match membership.claim_connecting(to, request.lane) {
        Way::Open(claim) => claim,
        Way::Awaited => return Ok(Outcome::Crossing),
        Way::Closed(error) => return Err(error),
    };
    let attempt = Attempt {
        shared,
        request,
        hello: Hello {
            purpose: Purpose::TcpData,
            lane: request.lane,
            from: membership.rank,
            to,
            link: random_bytes()?,
        },
        patience: Patience {
            deadline: request.deadline,
            called_off: [request.cancelled, &shared.stopping],
        },
        is_out_of_reach: Cell::new(false),
    };
    match attempt.run() {
        Ok(Reached::Link(link)) => {
            claim.linked();
            tracing::debug!(peer = request.to, lane = %request.lane, by = %link.describe(), "linked");
            Ok(Outcome::Link(link))
        }
        Ok(Reached::Answer(Answer::Crossing)) => Ok(Outcome::Crossing),
        // The peer's own attempt was quicker, and it may have sent what it had to and left since: its link is in our
        // hands, though perhaps not yet in the group's.
        Ok(Reached::Answer(Answer::Duplicate | Answer::Left)) | Err(_)
            if membership.expects(to, request.lane) =>
        {
            Ok(Outcome::Crossing)
        }
        Ok(Reached::Answer(answer)) => Err(attempt.refusal(answer)),
        Err(error) if error.code == Code::PeerLost && attempt.is_out_of_reach.get() => {
            tracing::info!(%error, "waiting for the peer to connect from its side");
            membership.cannot_reach(to, request.lane, error);
            Ok(Outcome::Crossing)
        }
        Err(error) => Err(error),
    }
}

/// Where an attempt got to.
enum Reached {
    Link(Box<dyn Link>),
    Answer(Answer),
}

/// Why one way of connecting did not work.
enum Setback {
    /// Nobody listens there.
    Refused,
    /// This way is closed; another may be open.
    Unusable(String),
    /// No other way would help.
    Fatal(Error),
}

/// Why a handshake came to nothing that may succeed when it is tried again.
enum Rebuff {
    Busy,
    Refused,
    Cut(Cut),
}

impl From<Cut> for Rebuff {
    fn from(cut: Cut) -> Self {
        Self::Cut(cut)
    }
}

struct Attempt<'a> {
    shared: &'a Shared,
    request: &'a ConnectRequest<'a>,
    hello: Hello,
    patience: Patience<'a>,
    /// Whether no packet goes from here to the address tried last, though the peer may live and reach this side.
    is_out_of_reach: Cell<bool>,
}

impl Attempt<'_> {
    fn run(&self) -> Result<Reached> {
        let here = &self.shared.address;
        let target = self.request.target;
        let same_host = here.host == target.host;
        match self.request.transport {
            TransportChoice::Tcp => return self.tcp(REFUSED_GRACE),
            TransportChoice::Auto if !same_host => return self.tcp(REFUSED_GRACE),
            TransportChoice::Shm if !same_host => {
                return Err(self.error(
                    Code::Unsupported,
                    format!(
                        "shared memory was demanded, but this is {here}, not the same host and user"
                    ),
                ));
            }
            TransportChoice::Auto | TransportChoice::Shm => {}
        }
        let (reason, grace) = match self.shared_memory() {
            Ok(reached) => return Ok(reached),
            Err(Setback::Fatal(error)) => return Err(error),
            Err(Setback::Refused) if self.request.transport == TransportChoice::Shm => {
                let what = "its Unix socket is gone; its process has probably ended";
                return Err(self.error(Code::PeerLost, what.to_owned()));
            }
            // Dead, or in another network namespace. If TCP is refused as well it is dead: no need to ask twice.
            Err(Setback::Refused) => (
                "its Unix socket cannot be reached from here (another container?)".to_owned(),
                Duration::ZERO,
            ),
            Err(Setback::Unusable(reason)) => (reason, REFUSED_GRACE),
        };
        if self.request.transport == TransportChoice::Shm {
            return Err(self.error(
                Code::System,
                format!("shared memory was demanded, but {reason}"),
            ));
        }
        let reached = self.tcp(grace)?;
        if matches!(reached, Reached::Link(_))
            && self.shared.told.lock().insert(target.host.clone())
        {
            tracing::info!(peer = %self.who(), %reason, "no shared memory inside this host: using TCP");
        }
        Ok(reached)
    }

    fn shared_memory(&self) -> Result<Reached, Setback> {
        let name = &self.request.target.unix_name;
        if name.is_empty() {
            return Err(Setback::Unusable("it has no Unix socket".to_owned()));
        }
        let dial = || match self.patience.connect_unix(name) {
            Ok(stream) => match foreign_user(&stream) {
                None => Ok(stream),
                Some(user) => Err(Setback::Unusable(format!(
                    "its Unix socket belongs to {user}"
                ))),
            },
            Err(Cut::Refused) => Err(Setback::Refused),
            Err(Cut::System(error)) => Err(Setback::Unusable(format!(
                "its Unix socket cannot be reached: {error}"
            ))),
            Err(cut) => Err(self.setback(cut, "its Unix socket")),
        };
        let (control, mut proven, answer) =
            self.introduce("its Unix socket", Purpose::SharedMemory, dial)?;
        if answer != Answer::Accept {
            return Ok(Reached::Answer(answer));
        }
        let unusable = |what: &str, cause: String| Setback::Unusable(format!("{what}: {cause}"));
        let channel = fork::make_private(|| control.try_clone())
            .map_err(|error| unusable("a descriptor cannot be duplicated", error.to_string()))?;
        let (link, segment) = ShmLink::create(control, self.shared.ring_bytes)
            .map_err(|error| unusable("a segment cannot be made", error.message))?;
        let hand_over = || {
            self.patience.send_fd(&channel, segment.as_fd())?;
            let mut frame = [0; ANSWER_BYTES];
            self.patience.read(&channel, &mut frame)?;
            Ok(frame)
        };
        let frame = hand_over().map_err(|cut| match cut {
            Cut::TimedOut | Cut::CalledOff => self.setback(cut, "its Unix socket"),
            Cut::Closed | Cut::Refused | Cut::Silent => {
                Setback::Unusable("it hung up when it was handed a segment".to_owned())
            }
            Cut::System(error) => unusable("a segment cannot be handed over", error.to_string()),
        })?;
        match proven
            .answer(&frame)
            .map_err(|error| self.untrusted(&error.message))?
        {
            Answer::Accept => Ok(Reached::Link(Box::new(link))),
            Answer::Failed => Err(Setback::Unusable("it could not map the segment".to_owned())),
            answer => Ok(Reached::Answer(answer)),
        }
    }

    fn tcp(&self, grace: Duration) -> Result<Reached> {
        let addresses = self.request.target.towards(&self.shared.address);
        let mut tried = Vec::new();
        for (at, address) in addresses.iter().enumerate() {
            let left = self
                .patience
                .left()
                .map_err(|cut| self.ended(cut, "any address"))?;
            let last = at + 1 == addresses.len();
            // An address that swallows packets leaves time for the others.
            let share = left / u32::try_from(addresses.len() - at).unwrap_or(u32::MAX);
            let share = if last { left } else { share.min(ANOTHER_AFTER) };
            match self.tcp_to(*address, Instant::now() + share, grace) {
                Ok(reached) => return Ok(reached),
                Err(Setback::Fatal(error)) if error.code != Code::Timeout => return Err(error),
                Err(Setback::Fatal(error)) if last && tried.is_empty() => return Err(error),
                Err(Setback::Fatal(_)) => tried.push(format!("{address}: no answer")),
                Err(Setback::Refused) => tried.push(self.refused(*address)),
                Err(Setback::Unusable(reason)) => tried.push(format!("{address}: {reason}")),
            }
        }
        let what = match tried.is_empty() {
            true => "it published no TCP address".to_owned(),
            false => format!(
                "cannot be reached from rank {} ({}) at {}; UNISONO_INTERFACE decides by which addresses a rank is reached",
                self.request.from,
                self.here(),
                tried.join(", nor at ")
            ),
        };
        Err(Error::new(Code::PeerLost, format!("{} {what}", self.who())).with_peer(self.request.to))
    }

    /// This rank's own addresses.
    fn here(&self) -> String {
        let own = &self.shared.address.tcp;
        let own: Vec<String> = own.iter().map(|address| address.ip().to_string()).collect();
        own.join(", ")
    }

    /// What a refused connection probably means.
    fn refused(&self, address: SocketAddr) -> String {
        let here = self.shared.address.host == self.request.target.host;
        let hint = match address.ip().is_loopback() && !here {
            true => {
                ", or it is on another host: there it listens on loopback only, as it does when it is told \
                 that the master is localhost"
            }
            false => "",
        };
        format!("{address}: connection refused; its process has probably ended{hint}")
    }

    fn tcp_to(
        &self,
        address: SocketAddr,
        deadline: Instant,
        grace: Duration,
    ) -> Result<Reached, Setback> {
        let place = address.to_string();
        let dial = || self.dial_tcp(address, deadline, grace);
        let (data, proven, answer) = self.introduce(&place, Purpose::TcpData, dial)?;
        if answer != Answer::Accept {
            return Ok(Reached::Answer(answer));
        }
        let (control, proven_again, answer) = self.introduce(&place, Purpose::TcpControl, dial)?;
        if answer == Answer::Left {
            return Ok(Reached::Answer(answer));
        }
        if answer != Answer::Accept {
            return Err(Setback::Fatal(self.error(
                Code::System,
                format!(
                    "it accepted a stream at {place} but not its control connection ({answer:?})"
                ),
            )));
        }
        let link = TcpLink::new(data, control, place)
            .map_err(|error| Setback::Fatal(error.with_peer(self.request.to)))?;
        let link = match self.request.key.encrypts() {
            true => link.encrypted(proven.into_cipher(), proven_again.into_cipher()),
            false => link,
        };
        Ok(Reached::Link(Box::new(link)))
    }

    fn dial_tcp(
        &self,
        address: SocketAddr,
        deadline: Instant,
        grace: Duration,
    ) -> Result<TcpStream, Setback> {
        let patience = Patience {
            deadline,
            called_off: self.patience.called_off,
        };
        let since = Instant::now();
        loop {
            let silence = (self.silence_to_connect(), self.request.silence);
            match patience.connect_tcp(address, silence) {
                Ok(stream) => return Ok(stream),
                Err(Cut::Refused) if since.elapsed() < grace => patience
                    .sleep(Duration::from_millis(20))
                    .map_err(|cut| self.setback(cut, &address.to_string()))?,
                Err(cut) => {
                    let no_way = matches!(cut, Cut::Silent | Cut::System(_));
                    self.is_out_of_reach.set(no_way);
                    return Err(self.setback(cut, &address.to_string()));
                }
            }
        }
    }

    /// Dials and passes the handshake. A listener that refuses is dialled again for a while, since it may not know the
    /// group yet, and one that is busy until the deadline.
    fn introduce<S: AsFd>(
        &self,
        place: &str,
        purpose: Purpose,
        dial: impl Fn() -> Result<S, Setback>,
    ) -> Result<(S, Proven, Answer), Setback> {
        let mut pause = Duration::from_millis(10);
        let mut last = None;
        let mut refused_since: Option<Instant> = None;
        loop {
            let stream = dial()?;
            let rebuff = match self.shake_hands(&stream, purpose)? {
                Ok((proven, answer)) => return Ok((stream, proven, answer)),
                Err(Rebuff::Cut(cut @ (Cut::TimedOut | Cut::CalledOff))) => {
                    return Err(self.gave_up(cut, place, last.as_ref()));
                }
                Err(Rebuff::Cut(Cut::Silent)) => return Err(self.setback(Cut::Silent, place)),
                Err(rebuff) => rebuff,
            };
            drop(stream);
            refused_since = match rebuff {
                Rebuff::Busy => None,
                _ => refused_since.or_else(|| Some(Instant::now())),
            };
            let limit = self.shared.limits.refusals;
            if refused_since.is_some_and(|since| since.elapsed() >= limit) {
                return Err(self.untrusted(&self.refuses(place)));
            }
            self.patience
                .sleep(pause)
                .map_err(|cut| self.gave_up(cut, place, Some(&rebuff)))?;
            pause = (pause * 2).min(Duration::from_secs(1));
            last = Some(rebuff);
        }
    }

    /// The end of an attempt whose time is over, or that was called off, after `last`.
    fn gave_up(&self, cut: Cut, place: &str, last: Option<&Rebuff>) -> Setback {
        let what = match (&cut, last) {
            (Cut::TimedOut, Some(Rebuff::Busy)) => {
                format!("{place} is busy with more connections than it takes at a time")
            }
            (Cut::TimedOut, Some(_)) => self.refuses(place),
            _ => return self.setback(cut, place),
        };
        Setback::Fatal(self.error(Code::Timeout, what))
    }

    /// What it means when a listener turns this rank away.
    fn refuses(&self, place: &str) -> String {
        format!(
            "what listens at {place} refuses this rank: it is not (or not yet) in this group, or is no rank of this job; \
             do all ranks have the same secret and version of unisono, and make the same groups in the same order?"
        )
    }

    /// The handshake up to the first answer. The inner error may pass, the outer one is final.
    fn shake_hands(
        &self,
        stream: &impl AsFd,
        purpose: Purpose,
    ) -> Result<Result<(Proven, Answer), Rebuff>, Setback> {
        let hello = Hello {
            purpose,
            ..self.hello
        };
        let initiator = Initiator::new(self.request.key, &hello).map_err(Setback::Fatal)?;
        let challenge = match self.await_challenge(stream, initiator.hello()) {
            Ok(challenge) => challenge,
            Err(rebuff) => return Ok(Err(rebuff)),
        };
        let (proof, mut proven) = initiator
            .prove(&challenge)
            .map_err(|error| self.untrusted(&error.message))?;
        let mut frame = [0; ANSWER_BYTES];
        let heard = self
            .patience
            .write(stream, &proof)
            .and_then(|()| self.patience.read(stream, &mut frame));
        if let Err(cut) = heard {
            // The member at the other end closes a connection that it has challenged when others wait for its place.
            return Ok(Err(match cut {
                Cut::Closed | Cut::Refused => Rebuff::Busy,
                cut => cut.into(),
            }));
        }
        let answer = proven
            .answer(&frame)
            .map_err(|error| self.untrusted(&error.message))?;
        Ok(Ok((proven, answer)))
    }

    fn await_challenge(
        &self,
        stream: &impl AsFd,
        hello: &[u8],
    ) -> Result<[u8; CHALLENGE_BYTES], Rebuff> {
        let mut reply = [0];
        self.patience.write(stream, hello)?;
        self.patience.read(stream, &mut reply)?;
        match Reply::from_number(reply[0]) {
            Some(Reply::GoOn) => {}
            Some(Reply::Busy) => return Err(Rebuff::Busy),
            _ => return Err(Rebuff::Refused),
        }
        let mut challenge = [0; CHALLENGE_BYTES];
        self.patience.read(stream, &mut challenge)?;
        Ok(challenge)
    }

    fn who(&self) -> String {
        format!("rank {} ({})", self.request.to, self.request.target)
    }

    fn error(&self, code: Code, what: String) -> Error {
        Error::new(code, format!("cannot connect to {}: {what}", self.who()))
            .with_peer(self.request.to)
    }

    fn untrusted(&self, what: &str) -> Setback {
        Setback::Fatal(self.error(Code::Untrusted, what.to_owned()))
    }

    fn setback(&self, cut: Cut, place: &str) -> Setback {
        match cut {
            Cut::Refused => Setback::Refused,
            Cut::Closed => Setback::Unusable("connection reset".to_owned()),
            Cut::Silent => Setback::Unusable(self.silent()),
            Cut::System(error) => Setback::Unusable(error.to_string()),
            Cut::TimedOut | Cut::CalledOff => Setback::Fatal(self.ended(cut, place)),
        }
    }

    /// After how many seconds a host that does not answer the first packet is given up: what is left of the time until
    /// it is lost when the peer has had its chance to connect from its side.
    fn silence_to_connect(&self) -> Option<u32> {
        let others = u32::try_from(PEER_MAY_COME.as_secs()).unwrap_or(0);
        let left = |seconds: u32| seconds.saturating_sub(others).max(2);
        self.request.silence.map(left)
    }

    /// What a host means that says nothing at all.
    fn silent(&self) -> String {
        let since = match self.silence_to_connect() {
            Some(seconds) => format!(" for {seconds} s"),
            None => String::new(),
        };
        format!(
            "its host has not answered{since}: it is off or cut off from the network, or packets to it are dropped \
             (another network interface may lead there)"
        )
    }

    /// The error of a wait that ran out or was called off.
    fn ended(&self, cut: Cut, place: &str) -> Error {
        match cut {
            Cut::CalledOff => self.error(Code::Aborted, "called off".to_owned()),
            _ => self.error(
                Code::Timeout,
                format!(
                    "no answer from {place} in time: it is stopped or overloaded, does not know this group, or \
                     packets to it are dropped (another network interface may lead there)"
                ),
            ),
        }
    }

    /// The error for a member's answer that ends the attempt.
    fn refusal(&self, answer: Answer) -> Error {
        let (from, lane) = (self.request.from, self.request.lane);
        match answer {
            Answer::Duplicate => self.error(
                Code::Mismatch,
                format!(
                    "it has a {lane} link with a rank {from} already: do two processes claim rank {from}?"
                ),
            ),
            Answer::Left => Error::new(
                Code::PeerLost,
                format!(
                    "{} has left the group while this rank still needs it; does every rank call the same \
                     operations before it closes its communicator?",
                    self.who()
                ),
            )
            .with_peer(self.request.to),
            answer => self.error(
                Code::System,
                format!("it answered {answer:?} to a request for a {lane} link"),
            ),
        }
    }
}
