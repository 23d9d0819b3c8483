//! Shared memory between processes of one host: a connection over the Unix socket, which becomes the link's control
//! channel, and the segment, which the initiator makes and passes over it.

use std::os::fd::AsFd;

use super::super::attempt::{Attempt, Reached, Setback};
use super::super::visit::{Reason, Stream, Visit};
use super::super::wire::{Cut, foreign_user};
use crate::fork;
use crate::transport::handshake::{ANSWER_BYTES, Answer, Purpose};
use crate::transport::shm::{Program, ShmLink};

/// Where the connection goes, in errors.
const PLACE: &str = "its Unix socket";

/// Connects to the peer's Unix socket and passes a new segment over it.
pub(super) fn connect(attempt: &Attempt<'_>) -> Result<Reached, Setback> {
    let name = &attempt.request.target.unix_name;
    if name.is_empty() {
        return Err(Setback::Unusable("it has no Unix socket".to_owned()));
    }
    let dial = || match attempt.patience.connect_unix(name) {
        Ok(stream) => match foreign_user(&stream) {
            None => Ok(stream),
            Some(user) => Err(Setback::Unusable(format!(
                "its Unix socket belongs to {user}"
            ))),
        },
        Err(Cut::System(error)) => Err(Setback::Unusable(format!(
            "its Unix socket cannot be reached: {error}"
        ))),
        Err(cut) => Err(attempt.setback(cut, PLACE)),
    };
    let (control, mut proven, answer) = attempt.introduce(PLACE, Purpose::SharedMemory, dial)?;
    if answer != Answer::Accept {
        return Ok(Reached::Answer(answer));
    }
    let unusable = |what: &str, cause: String| Setback::Unusable(format!("{what}: {cause}"));
    let channel = fork::make_private(|| control.try_clone())
        .map_err(|error| unusable("a descriptor cannot be duplicated", error.to_string()))?;
    let (link, segment) = ShmLink::create(control, attempt.shared.ring_bytes)
        .map_err(|error| unusable("a segment cannot be made", error.message))?;
    let acquaintances = &attempt.shared.acquaintances;
    let pair = attempt.request.key.pair(attempt.hello.to);
    let introduction = pair.and_then(|pair| Some((acquaintances.introduction(&pair)?, pair)));
    let mut files = vec![segment.as_fd()];
    files.extend(introduction.iter().map(|((_, theirs), _)| theirs.as_fd()));
    let hand_over = || {
        attempt.patience.send_fds(&channel, &files)?;
        let mut frame = [0; ANSWER_BYTES];
        attempt.patience.read(&channel, &mut frame)?;
        Ok(frame)
    };
    let frame = hand_over().map_err(|cut| match cut {
        Cut::TimedOut | Cut::CalledOff => attempt.setback(cut, PLACE),
        Cut::Closed | Cut::Refused | Cut::Silent => {
            Setback::Unusable("it hung up when it was handed a segment".to_owned())
        }
        Cut::System(error) => unusable("a segment cannot be handed over", error.to_string()),
    })?;
    match proven
        .answer(&frame)
        .map_err(|error| attempt.untrusted(&error.message))?
    {
        Answer::Accept => {
            if let Some(((ours, _), pair)) = introduction {
                acquaintances.add(attempt.shared, pair, ours, Program::behind(&channel));
            }
            Ok(Reached::Link(Box::new(link)))
        }
        Answer::Failed => Err(Setback::Unusable("it could not map the segment".to_owned())),
        answer => Ok(Reached::Answer(answer)),
    }
}

/// Receives the segment and opens it.
pub(super) fn accept(mut visit: Visit<'_>, stream: Stream) -> Result<(), Reason> {
    let stream = match stream {
        Stream::Unix(stream) => stream,
        other => return visit.turn_away(&other),
    };
    let Some(claim) = visit.claim(&stream)? else {
        return Ok(());
    };
    visit.answer(&stream, Answer::Accept)?;
    let (segment, introduction) = visit.patience.receive_fds(&stream)?;
    let channel = fork::make_private(|| stream.try_clone()).map_err(Cut::from)?;
    match ShmLink::open(stream, segment) {
        Ok(link) => {
            visit.answer(&channel, Answer::Accept)?;
            let pair = visit.membership.key.pair(visit.hello.from);
            if let (Some(socket), Some(pair)) = (introduction, pair) {
                let (shared, process) = (visit.shared, Program::behind(&channel));
                let acquaintances = &shared.acquaintances;
                acquaintances.add(shared, pair, socket.into(), process);
            }
            claim.deliver(Box::new(link));
            Ok(())
        }
        Err(error) => {
            // The peer will try TCP at once, and needs the claim for that.
            drop(claim);
            visit.answer(&channel, Answer::Failed)?;
            Err(error.into())
        }
    }
}
