//! One attempt to open a link: what every transport needs to connect, and the errors that say what was tried and what
//! that means.

use std::cell::Cell;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use super::address::Address;
use super::membership::{Claim, PEER_MAY_COME};
use super::shared::Shared;
use super::turns::Turn;
use super::wire::{Cut, Patience};
use crate::config::TransportChoice;
use crate::error::{Code, Error, Result};
use crate::transport::Link;
use crate::transport::handshake::{
    ANSWER_BYTES, Answer, CHALLENGE_BYTES, Hello, Initiator, Lane, Proven, Purpose, Reply,
};
use crate::transport::keys::GroupKey;
use crate::types::Rank;

/// Which link to open, to whom, and for how long to try.
#[derive(Debug)]
pub struct ConnectRequest<'a> {
    /// The group, which must be registered.
    pub key: &'a GroupKey,
    /// This process's rank in it.
    pub from: Rank,
    /// The peer's rank in it.
    pub to: Rank,
    /// The numbers by which users know the two, where they are others in the group.
    pub known_as: (Rank, Rank),
    /// Which link of the two.
    pub lane: Lane,
    /// The address that the peer published.
    pub target: &'a Address,
    /// When to give up.
    pub deadline: Instant,
    /// After how many seconds a host that does not answer over TCP is given up; never, if `None`.
    pub silence: Option<u32>,
    /// The transports that may carry the link.
    pub transport: TransportChoice,
    /// Set from elsewhere to give up at once (within a twentieth of a second).
    pub cancelled: &'a AtomicBool,
    /// The turn of this attempt, given to others if it takes long.
    pub turn: Option<&'a Turn>,
}

/// Where an attempt got to.
pub(super) enum Reached {
    Link(Box<dyn Link>),
    Answer(Answer),
}

/// Why one way of connecting did not work.
pub(super) enum Setback {
    /// No process listens at this place.
    Refused(String),
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

/// An attempt of this side to open the link of `request`, by whichever transport leads to the peer.
pub(super) struct Attempt<'a> {
    pub(super) shared: &'a Shared,
    pub(super) request: &'a ConnectRequest<'a>,
    pub(super) hello: Hello,
    pub(super) patience: Patience<'a>,
    /// The right to open the link; `None` where that exists.
    pub(super) claim: Option<&'a Claim>,
    /// Whether this attempt has ended because the peer's was quicker.
    pub(super) has_given_way: Cell<bool>,
    /// Whether no packet goes from here to the address tried last, though the peer may live and reach this side.
    pub(super) is_out_of_reach: Cell<bool>,
    /// How long a refused connection is tried again: the listener may be about to come back.
    pub(super) grace: Duration,
}

impl Attempt<'_> {
    /// Dials and passes the handshake. A listener that refuses is dialled again for a while, since it may not know the
    /// group yet, and one that is busy until the deadline.
    pub(super) fn introduce<S: AsFd>(
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
            if self.claim.is_some_and(|claim| !claim.goes_on()) {
                self.has_given_way.set(true);
                let what = "the peer's own attempt was quicker".to_owned();
                return Err(Setback::Fatal(self.error(Code::Aborted, what)));
            }
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

    /// The message about a listener that turns this rank away.
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

    /// The error of a peer at whose `places` nothing listens any more, as it did when the group formed.
    pub(super) fn lost(&self, places: &str) -> Error {
        let what = format!(
            "{} {}: nothing listens any more at {places}; does every rank call the same operations before it closes its \
             communicator?",
            self.who(),
            self.departure()
        );
        Error::new(Code::PeerLost, what).with_peer(self.request.to)
    }

    /// The state of a peer that listens no more, in words.
    fn departure(&self) -> &'static str {
        let (own, target) = (&self.shared.address, self.request.target);
        if !own.host.is_same_machine(&target.host) {
            return "has closed its group, or its process has ended";
        }
        let pid = i32::try_from(target.pid).ok().and_then(Pid::from_raw);
        // One of another user exists, too; and a zombie, whose parent has not waited for it.
        let runs = |pid: Pid| test_kill_process(pid) != Err(Errno::SRCH) && !has_ended(pid);
        match pid.is_some_and(runs) {
            true => "has closed its group, though its process runs",
            false => "is gone: its process has probably ended",
        }
    }

    pub(super) fn who(&self) -> String {
        format!("rank {} ({})", self.request.known_as.1, self.request.target)
    }

    pub(super) fn error(&self, code: Code, what: String) -> Error {
        Error::new(code, format!("cannot connect to {}: {what}", self.who()))
            .with_peer(self.request.to)
    }

    pub(super) fn untrusted(&self, what: &str) -> Setback {
        Setback::Fatal(self.error(Code::Untrusted, what.to_owned()))
    }

    pub(super) fn setback(&self, cut: Cut, place: &str) -> Setback {
        match cut {
            Cut::Refused => Setback::Refused(place.to_owned()),
            Cut::Closed => Setback::Unusable("connection reset".to_owned()),
            Cut::Silent => {
                let limit = |seconds: u32| Duration::from_secs(seconds.into());
                Setback::Unusable(silent(self.request.silence.map(limit)))
            }
            Cut::System(error) if is_own_want(&error) => Setback::Fatal(Error::system(
                format!("open a connection to {}", self.who()),
                format!(
                    "{error}: this process has no more (see `ulimit -n`), and nothing is known of the peer"
                ),
            )),
            Cut::System(error) => Setback::Unusable(error.to_string()),
            Cut::TimedOut | Cut::CalledOff => Setback::Fatal(self.ended(cut, place)),
        }
    }

    /// For how long a host may leave the first packets to all of its addresses without an answer: for what is left of the
    /// time until it is lost when the peer has had its chance to connect from its side, and that has been noticed.
    pub(super) fn silence_to_connect(&self) -> Option<Duration> {
        const NOTICED: Duration = Duration::from_secs(1);
        let others = PEER_MAY_COME + NOTICED;
        let limit = |seconds: u32| Duration::from_secs(seconds.into());
        let left = |seconds| limit(seconds).saturating_sub(others);
        let silence = self.request.silence.map(left)?;
        Some(silence.max(Duration::from_secs(2)))
    }

    /// The error of a wait that ran out or was called off.
    pub(super) fn ended(&self, cut: Cut, place: &str) -> Error {
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
    pub(super) fn refusal(&self, answer: Answer) -> Error {
        let (from, lane) = (self.request.known_as.0, self.request.lane);
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
            .with_peer(self.request.to)
            .of_one_that_left(),
            answer => self.error(
                Code::System,
                format!("it answered {answer:?} to a request for a {lane} link"),
            ),
        }
    }
}

/// Whether the process has ended, and its parent has not waited for it.
fn has_ended(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    // After the name, in parentheses, which may have some of its own.
    let state = stat.as_ref().ok().and_then(|stat| stat.rsplit_once(')'));
    state.is_some_and(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
}

/// Whether this process lacks what it takes to open a connection, whatever the peer does.
fn is_own_want(error: &io::Error) -> bool {
    let own = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS];
    error
        .raw_os_error()
        .is_some_and(|number| own.contains(&number))
}

/// The message about a host that has not answered at all for the time `limit`.
pub(super) fn silent(limit: Option<Duration>) -> String {
    let since = match limit {
        Some(limit) => format!(" for {:.0} s", limit.as_secs_f64()),
        None => String::new(),
    };
    format!(
        "its host has not answered{since}: it is off or cut off from the network, or packets to it are dropped \
         (another network interface may lead there)"
    )
}
