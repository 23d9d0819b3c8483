//! The states of processes elsewhere, for `unisono status`: a process that is asked on its Unix socket asks others in its turn.
//!
//! The question goes over a connection of its own to the address at which the other process listens for links, with the
//! handshake of a group that both are in, and always sealed. Links carry no questions: one to that rank need not be there, and
//! it belongs to the thread that drives the group. The acceptor answers a member of any of its groups as it answers its user on
//! the Unix socket, on a thread of those that make links, so a rank whose program computes or waits answers too.
//!
//! ```text
//! asker                                           rank elsewhere
//!     | handshake, purpose Status, link id {records}   |
//!     | ---------------------------------------------> |
//!     |   Accept, parts of the state, an empty part    |
//!     | <--------------------------------------------- |
//! ```

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::attempt::{ConnectRequest, Setback};
use super::conversation::Conversation;
use super::membership::Membership;
use super::shared::Shared;
use super::transports::introduce;
use super::turns::{MOST_WORKING, Turn};
use super::visit::{Reason, Stream, Visit};
use super::{connect, status};
use crate::config::TransportChoice;
use crate::error::Code;
use crate::transport::handshake::{Answer, Lane, Purpose};
use crate::types::Rank;

/// The most bytes of a question.
pub(super) const LONGEST_QUESTION: usize = 64 << 10;
/// The most ranks that are asked for one question.
const MOST_RANKS: usize = 4096;
/// The longest time for which others may be waited for, in seconds.
const LONGEST_WAIT: f64 = 30.0;
/// The most bytes of a state.
const LONGEST_STATE: usize = 8 << 20;
/// The bytes of a part of it.
const PART: usize = 32 << 10;
/// How long one that has asked may take to read the answer.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// A question for ranks that are elsewhere.
#[derive(Debug, PartialEq)]
pub(super) struct Question {
    /// The group in which they are asked, and the rank of this process in it.
    group: [u8; 16],
    rank: Rank,
    ranks: Vec<Rank>,
    /// How long each may take. [`MOST_WORKING`] are asked at a time.
    patience: Duration,
    /// Whether they send the records of their operations too.
    records: bool,
}

impl Question {
    /// `None`: these bytes are none.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > LONGEST_QUESTION {
            return None;
        }
        let written: Value = serde_json::from_slice(bytes).ok()?;
        let group = written["group"].as_str().filter(|id| id.len() == 32)?;
        let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
        let ranks = written["ranks"].as_array();
        let ranks = ranks.filter(|ranks| ranks.len() <= MOST_RANKS)?;
        let seconds = written["seconds"].as_f64();
        let seconds = seconds.filter(|seconds| (0.0..=LONGEST_WAIT).contains(seconds))?;
        Some(Self {
            group: u128::from_str_radix(group, 16).ok()?.to_be_bytes(),
            rank: number(&written["rank"])?,
            ranks: ranks.iter().map(number).collect::<Option<_>>()?,
            patience: Duration::from_secs_f64(seconds),
            records: written["records"].as_bool()?,
        })
    }
}

/// Asks the ranks of the question: for each its state, or the reason why there is none.
pub(super) fn ask(shared: &Arc<Shared>, question: &Question) -> Value {
    // One that is asked late has as long as the first ones.
    let rounds = question.ranks.len().div_ceil(MOST_WORKING) as u32;
    let time = question.patience * rounds;
    let end = Instant::now() + time.min(Duration::from_secs_f64(LONGEST_WAIT));
    // The rest of the time is for the reason that one does not answer.
    let patience = question.patience * 7 / 8;
    let own = (question.group, question.rank);
    let Some(membership) = shared.groups.lock().get(&own).cloned() else {
        return json!({"form": status::FORM, "elsewhere": []});
    };
    let (told, answers) = channel();
    for rank in question.ranks.iter().copied() {
        let (asker, told, records) = (Arc::clone(shared), told.clone(), question.records);
        let membership = membership.clone();
        let job = move |_: &Turn| {
            let deadline = (Instant::now() + patience).min(end);
            let answer = ask_one(&asker, (&membership, rank), deadline, records);
            // The one that has asked may have gone.
            let _ = told.send((rank, answer));
        };
        if let Err(cause) = shared.inquiries.begin(false, job) {
            tracing::debug!(%cause, "no thread to ask a rank elsewhere");
        }
    }
    drop(told);
    let mut missing = question.ranks.clone();
    let mut found = Vec::new();
    while let Ok((rank, answer)) =
        answers.recv_timeout(end.saturating_duration_since(Instant::now()))
    {
        missing.retain(|other| *other != rank);
        found.push(match answer {
            Ok(state) => json!({"rank": rank, "answer": state}),
            Err(trouble) => json!({"rank": rank, "trouble": trouble}),
        });
    }
    let late = "it was not asked in time, after others that do not answer";
    found.extend(
        missing
            .iter()
            .map(|rank| json!({"rank": rank, "trouble": late})),
    );
    json!({"form": status::FORM, "elsewhere": found})
}

/// Asks a member at its addresses, which share the time. An error is the reason in words.
fn ask_one(
    shared: &Shared,
    (membership, rank): (&Membership, Rank),
    deadline: Instant,
    records: bool,
) -> Result<Value, String> {
    let target = membership.address_of(rank);
    let own = membership.rank as Rank;
    let request = ConnectRequest {
        key: &membership.key,
        from: own,
        to: rank,
        known_as: (own, rank),
        lane: Lane::Collective,
        target: &target.ok_or("there is no way to it")?,
        deadline,
        silence: None,
        transport: TransportChoice::Tcp,
        cancelled: &shared.stopping,
        // It keeps its turn, so that questions take no more threads than that.
        turn: None,
    };
    let mut link = [0; 16];
    link[0] = u8::from(records);
    let mut attempt = connect::begin(shared, &request, link);
    attempt.grace = Duration::ZERO;
    let addresses = request.target.towards(&shared.address);
    let mut trouble = "it has no address".to_owned();
    for (at, address) in addresses.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        attempt.patience.deadline = Instant::now() + left / (addresses.len() - at) as u32;
        trouble = match introduce(&attempt, *address, Purpose::Status) {
            Ok((stream, proven, Answer::Accept)) => {
                let conversation = Conversation::new(stream, proven.into_cipher());
                return read_state(conversation, deadline, LONGEST_STATE);
            }
            Ok((_, _, answer)) => format!("it answers {answer:?}"),
            Err(Setback::Refused(place)) => {
                format!("nothing listens at {place} any more: its process has probably ended")
            }
            Err(Setback::Unusable(reason)) => reason,
            Err(Setback::Fatal(error)) if error.code == Code::Timeout => {
                format!("no answer from {address} in time: it is stopped, or cut off")
            }
            Err(Setback::Fatal(error)) => error.message,
        };
    }
    Err(trouble)
}

/// Reads a state, which comes from another process: JSON of `most` bytes at most.
fn read_state(
    mut conversation: Conversation,
    deadline: Instant,
    most: usize,
) -> Result<Value, String> {
    let mut text = Vec::new();
    loop {
        let part = conversation.receive(deadline);
        let part = part.map_err(|error| error.message)?;
        let part = part.ok_or("it has not sent its answer in time")?;
        if part.is_empty() {
            return serde_json::from_slice(&text).map_err(|_| "its answer is none".to_owned());
        }
        if text.len() + part.len() > most {
            return Err("its answer is too long".to_owned());
        }
        text.extend(part);
    }
}

/// Tells a member that asks the state of this process. It is answered also where this process has left the group.
pub(super) fn tell(mut visit: Visit<'_>, stream: Stream) -> Result<(), Reason> {
    let stream = match stream {
        Stream::Tcp(stream) => stream,
        other => return visit.turn_away(&other),
    };
    visit.answer(&stream, Answer::Accept)?;
    let mut state = status::state(visit.shared);
    state["program"] = status::program();
    if visit.hello.link[0] == 0 {
        status::leave_records_out(&mut state);
    }
    let mut conversation = Conversation::new(stream, visit.answers.into_cipher());
    let deadline = Instant::now() + READ_TIMEOUT;
    let text = state.to_string().into_bytes();
    for part in text.chunks(PART).chain([&[][..]]) {
        conversation.send(part, deadline)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::transport::handshake;

    #[test]
    fn a_question_is_read_or_refused() {
        let group = format!("{:032x}", 7);
        let written = |group: &str, seconds: f64, ranks: usize| {
            let ranks: Vec<_> = (0..ranks).collect();
            let text = json!({
                "group": group, "rank": 1, "ranks": ranks, "seconds": seconds, "records": true
            });
            Question::read(text.to_string().as_bytes())
        };
        let question = written(&group, 0.5, 3).expect("a question");
        assert_eq!(question.group, 7_u128.to_be_bytes());
        assert_eq!((question.rank, &question.ranks[..]), (1, &[0, 1, 2][..]));
        assert_eq!(question.patience, Duration::from_millis(500));
        assert!(question.records);
        for refused in [
            written(&group[1..], 0.5, 3),
            written("no number of sixteen bytes at all", 0.5, 3),
            written(&group, -0.5, 3),
            written(&group, 1e9, 3),
            written(&group, 0.5, MOST_RANKS + 1),
            Question::read(b""),
            Question::read(b"{}"),
            Question::read(&vec![b'['; LONGEST_QUESTION]),
            Question::read(&vec![b' '; LONGEST_QUESTION + 1]),
        ] {
            assert_eq!(refused, None);
        }
    }

    /// Reads the answer of a process that sends these parts and may send 64 bytes.
    fn read(parts: &[&[u8]]) -> Result<Value, String> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let (ours, theirs) = handshake::tests::conversation();
        let mut other = Conversation::new(far, theirs);
        let deadline = Instant::now() + Duration::from_secs(10);
        for part in parts {
            other.send(part, deadline).unwrap();
        }
        drop(other);
        read_state(Conversation::new(near, ours), deadline, 64)
    }

    #[test]
    fn an_answer_from_elsewhere_is_bounded_and_whole() {
        assert_eq!(read(&[b"{\"a\"", b":1}", b""]).unwrap()["a"], 1);
        for (parts, trouble) in [
            (
                &[&[b' '; 40][..], &[b' '; 40], b""][..],
                "its answer is too long",
            ),
            (&[b"{\"a\":", b""], "its answer is none"),
            (&[&[b'['; 60], b""], "its answer is none"),
            (&[b"{}"], "the other process has closed the connection"),
        ] {
            assert_eq!(read(parts).unwrap_err(), trouble);
        }
    }
}
