//! A connection that has proved nothing yet, as a state machine: it does what can be done with the bytes that have come, and
//! never waits.
//!
//! ```text
//! Greeting ---> Awaiting (its group) ---> Challenged ---> proven
//!         \---> Measuring (a rate)
//! ```
//!
//! The cost of a guest for this process is bounded in each state: a hello of fixed length, one handshake, the bytes that a
//! measurement may have.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::membership::Membership;
use super::rate::Sink;
use super::shared::{Limits, Shared};
use super::visit::{Reason, Stream};
use super::wire::{Cut, has_ended};
use crate::transport::handshake::{
    Answers, Challenged, HELLO_BYTES, Hello, PROOF_BYTES, Reply, Stranger,
};
use crate::transport::keys::Hex;

/// A connection in the handshake.
pub(super) struct Guest {
    stream: Stream,
    since: Instant,
    stage: Stage,
}

enum Stage {
    /// Its hello has not come whole.
    Greeting(Frame<HELLO_BYTES>),
    /// This process is not (or not yet) in the group that its hello names; until then it waits for that.
    Awaiting(Box<Stranger>, Instant),
    /// Its hello was made with the key of a member: it is one, or it has a recording.
    Challenged(Box<Challenged>, Arc<Membership>, Frame<PROOF_BYTES>),
    /// It measures how fast the way here is.
    Measuring(Sink),
}

/// Where a guest has got to.
pub(super) enum Progress {
    Waits(Guest),
    Proven(Proof, Stream),
    /// The connection is to be closed.
    Over(Stream, Result<(), Reason>),
}

/// A proven member, its hello, and the means to answer it.
pub(super) struct Proof {
    pub(super) since: Instant,
    pub(super) membership: Arc<Membership>,
    pub(super) hello: Hello,
    pub(super) answers: Answers,
}

/// The state that follows a stage.
enum Next {
    /// The same one, when more has come.
    Waits(Stage),
    Stage(Stage),
    Proven(Arc<Membership>, Hello, Answers),
    Over,
}

/// Bytes of a fixed number that come in parts.
struct Frame<const N: usize> {
    bytes: [u8; N],
    filled: usize,
}

impl<const N: usize> Frame<N> {
    fn new() -> Self {
        Self {
            bytes: [0; N],
            filled: 0,
        }
    }

    /// Reads what has come. Whether that is all; what follows is left.
    fn fill(&mut self, stream: &Stream) -> Result<bool, Cut> {
        while self.filled < N {
            match recv(stream, &mut self.bytes[self.filled..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(Cut::Closed),
                Ok((_, count)) => self.filled += count,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

impl Guest {
    pub(super) fn new(stream: Stream) -> Self {
        Self {
            stream,
            since: Instant::now(),
            stage: Stage::Greeting(Frame::new()),
        }
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn peer(&self) -> String {
        self.stream.peer()
    }

    /// The events that it waits for. A guest that awaits its group has said all that it may say.
    pub(super) fn interest(&self) -> EventFlags {
        match self.stage {
            Stage::Awaiting(..) => EventFlags::RDHUP,
            _ => EventFlags::IN,
        }
    }

    pub(super) fn awaits_group(&self) -> bool {
        matches!(self.stage, Stage::Awaiting(..))
    }

    pub(super) fn is_measuring(&self) -> bool {
        matches!(self.stage, Stage::Measuring(_))
    }

    /// Whether its hello was made with the key of a member.
    pub(super) fn has_greeted(&self) -> bool {
        matches!(self.stage, Stage::Challenged(..))
    }

    /// How long it has had its place.
    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// When its stage must have ended.
    pub(super) fn deadline(&self, limits: &Limits) -> Instant {
        let all = self.since + limits.handshake;
        match &self.stage {
            Stage::Awaiting(_, until) => all.min(*until),
            Stage::Measuring(sink) => all.min(sink.until()),
            Stage::Greeting(_) | Stage::Challenged(..) => all,
        }
    }

    /// Does what can be done now.
    pub(super) fn advance(self, shared: &Shared, may_measure: bool) -> Progress {
        let Self {
            stream,
            since,
            mut stage,
        } = self;
        loop {
            let may_be_refused = stage.may_be_refused();
            stage = match stage.advance(&stream, shared, may_measure) {
                Ok(Next::Stage(next)) => next,
                Ok(Next::Waits(stage)) => {
                    return Progress::Waits(Self {
                        stream,
                        since,
                        stage,
                    });
                }
                Ok(Next::Proven(membership, hello, answers)) => {
                    let proof = Proof {
                        since,
                        membership,
                        hello,
                        answers,
                    };
                    return Progress::Proven(proof, stream);
                }
                Ok(Next::Over) => return Progress::Over(stream, Ok(())),
                Err(reason) => {
                    if may_be_refused {
                        say(&stream, Reply::Refused);
                    }
                    return Progress::Over(stream, Err(reason));
                }
            };
        }
    }

    /// Closes it: its time is over, or its place is needed. One that has only lost its place may come again.
    pub(super) fn dismiss(self, reason: &Reason) {
        if self.stage.may_be_refused() {
            let reply = match reason.is_usual {
                true => Reply::Busy,
                false => Reply::Refused,
            };
            say(&self.stream, reply);
        }
    }
}

impl Stage {
    /// Whether a byte tells the other side that nothing follows: the same one whatever was wrong.
    fn may_be_refused(&self) -> bool {
        matches!(self, Self::Greeting(_) | Self::Awaiting(..))
    }

    fn advance(self, stream: &Stream, shared: &Shared, may_measure: bool) -> Result<Next, Reason> {
        match self {
            Self::Greeting(mut hello) => {
                if !hello.fill(stream)? {
                    return Ok(Next::Waits(Self::Greeting(hello)));
                }
                let is_tcp = matches!(stream, Stream::Tcp(_));
                if is_tcp && super::rate::is_asked_for(&hello.bytes) {
                    return Ok(match may_measure {
                        true => Next::Stage(Self::Measuring(Sink::new())),
                        false => Next::Over,
                    });
                }
                let stranger = Stranger::new(hello.bytes)?;
                let until = Instant::now() + shared.limits.unknown_group;
                Ok(Next::Stage(Self::Awaiting(Box::new(stranger), until)))
            }
            Self::Awaiting(stranger, until) => {
                let (group, to) = (stranger.group(), stranger.to());
                match shared.group((group, to)) {
                    Some(membership) => challenge(*stranger, membership, stream),
                    None if Instant::now() < until && !has_ended(stream) => {
                        Ok(Next::Waits(Self::Awaiting(stranger, until)))
                    }
                    None => Err(Reason::new(format!(
                        "it asks for rank {to} of group {}, which this process is not (or not yet)",
                        Hex(&group)
                    ))),
                }
            }
            Self::Challenged(challenged, membership, mut proof) => {
                if !proof.fill(stream)? {
                    return Ok(Next::Waits(Self::Challenged(challenged, membership, proof)));
                }
                let (hello, answers) = challenged.verify(&proof.bytes)?;
                Ok(Next::Proven(membership, hello, answers))
            }
            Self::Measuring(mut sink) => Ok(match sink.advance(stream)? {
                true => Next::Over,
                false => Next::Waits(Self::Measuring(sink)),
            }),
        }
    }
}

/// Judges a hello, and answers it.
fn challenge(
    stranger: Stranger,
    membership: Arc<Membership>,
    stream: &Stream,
) -> Result<Next, Reason> {
    let challenged = stranger.challenge(&membership.key)?;
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    // The socket's buffer is empty and has room for this.
    match send(stream, challenged.frame(), flags) {
        Ok(count) if count == challenged.frame().len() => {}
        Ok(_) => return Err(Cut::Closed.into()),
        Err(error) => return Err(Cut::from(error).into()),
    }
    let (challenged, proof) = (Box::new(challenged), Frame::new());
    Ok(Next::Stage(Stage::Challenged(
        challenged, membership, proof,
    )))
}

fn say(stream: &Stream, reply: Reply) {
    // A peer that has gone does not need it.
    let _ = send(
        stream,
        &[reply as u8],
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    );
}
