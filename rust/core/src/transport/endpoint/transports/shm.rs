//! Shared memory between processes of one host: a connection over the Unix socket, which becomes the link's control
//! channel, and the segment, which the initiator makes and passes over it. Each side passes the sign of its life besides.

use std::os::fd::AsFd;

use super::super::attempt::{Attempt, Reached, Setback};
use super::super::visit::{Reason, Stream, Visit};
use super::super::wire::{Cut, Files, foreign_user};
use crate::fork;
use crate::transport::handshake::{ANSWER_BYTES, Answer, Purpose};
use crate::transport::shm::{Life, Lives, Program, ShmLink};

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
    let (mut link, segment) = ShmLink::create(control, attempt.shared.ring_bytes)
        .map_err(|error| unusable("a segment cannot be made", error.message))?;
    let acquaintances = &attempt.shared.acquaintances;
    let pair = attempt.request.key.pair(attempt.hello.to);
    let introduction = pair.and_then(|pair| Some((acquaintances.introduction(&pair)?, pair)));
    let life = Life::of_this_process();
    let files = Files {
        segment: Some(segment.as_fd()),
        life: life.as_ref().map(|life| life.sign()),
        introduction: introduction.as_ref().map(|((_, theirs), _)| theirs.as_fd()),
    };
    let hand_over = || {
        attempt.patience.send_files(&channel, &files)?;
        let theirs = attempt.patience.receive_files(&channel)?;
        let mut frame = [0; ANSWER_BYTES];
        attempt.patience.read(&channel, &mut frame)?;
        Ok((theirs.life, frame))
    };
    let (theirs, frame) = hand_over().map_err(|cut| not_handed_over(attempt, cut))?;
    match proven
        .answer(&frame)
        .map_err(|error| attempt.untrusted(&error.message))?
    {
        Answer::Accept => {
            let lives = Lives::new(life, theirs);
            if let Some(((ours, _), pair)) = introduction {
                let process = Program::behind(&channel).with(lives.clone());
                acquaintances.add(attempt.shared, pair, ours, process);
            }
            link.watch(lives);
            Ok(Reached::Link(Box::new(link)))
        }
        Answer::Failed => Err(Setback::Unusable("it could not map the segment".to_owned())),
        answer => Ok(Reached::Answer(answer)),
    }
}

/// Why the peer does not have the segment.
fn not_handed_over(attempt: &Attempt<'_>, cut: Cut) -> Setback {
    match cut {
        Cut::TimedOut | Cut::CalledOff => attempt.setback(cut, PLACE),
        Cut::Closed | Cut::Refused | Cut::Silent => {
            Setback::Unusable("it hung up when it was handed a segment".to_owned())
        }
        Cut::System(error) => {
            Setback::Unusable(format!("a segment cannot be handed over: {error}"))
        }
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
    let files = visit.patience.receive_files(&stream)?;
    let segment = files.segment.ok_or(Cut::Closed)?;
    let channel = fork::make_private(|| stream.try_clone()).map_err(Cut::from)?;
    let life = Life::of_this_process();
    let own = Files {
        segment: None,
        life: life.as_ref().map(|life| life.sign()),
        introduction: None,
    };
    visit.patience.send_files(&channel, &own)?;
    let process = Program::behind(&channel).with(Lives::new(life, files.life));
    match ShmLink::open_with(stream, process.clone(), segment) {
        Ok(link) => {
            visit.answer(&channel, Answer::Accept)?;
            let pair = visit.membership.key.pair(visit.hello.from);
            if let (Some(socket), Some(pair)) = (files.introduction, pair) {
                let acquaintances = &visit.shared.acquaintances;
                acquaintances.add(visit.shared, pair, socket.into(), process);
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
