//! A communicator that takes in processes: those that take the places of ranks that are gone, and further ones.
//!
//! All ranks of it and those that come meet once more, as at the start, each by its number in the whole job. Those that come
//! call nothing but the function by which a job begins. The ranks that were there vote on the result over their own group, so
//! all of them go on with the new one or none does. The votes are awaited from the beginning: a rank that is lost while they
//! meet, or cannot meet, ends the meeting of the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::bytes::Bytes;
use crate::config::Timeout;
use crate::engine::bootstrap::Comer;
use crate::engine::{Group, PointToPoint, WorkState};
use crate::error::{Code, Error, Result};
use crate::locks::Mutex;
use crate::rendezvous::store::Store;
use crate::rendezvous::{Meeting, MeetingPlace};
use crate::types::{DataType, Rank};

/// The tag of the word that the place is open; those of the votes come below it, one after the other. Users' tags are below
/// 2^63.
const OPEN: u64 = u64::MAX - 1;
/// How long a rank in a store's wait does not look whether its group has failed.
const STORE_WAIT: Duration = Duration::from_millis(200);
/// How much later than another one a rank may call it.
const GRACE: Duration = Duration::from_secs(2);
/// How long it takes at most until all ranks know of a verdict that they wait for.
const VERDICT_WITHIN: Duration = Duration::from_secs(15);
/// No meeting takes longer.
const LONGEST_MEETING: Duration = Duration::from_secs(365 * 24 * 3600);
/// In the word that the place is open: it is not.
const CLOSED: u64 = 1 << 63;
/// How long a message takes to be delivered that is here.
const MOMENT: Duration = Duration::from_millis(1);
/// The vote of a rank that has joined; of one that has not it is its number.
const JOINED: u64 = u64::MAX;

/// The group that takes in others.
#[derive(Clone, Copy)]
pub(super) struct Growing<'a> {
    pub(super) group: &'a Arc<Group>,
    /// How often its leader has called for a vote.
    pub(super) votes: &'a AtomicU64,
    /// The meeting before.
    pub(super) meeting: &'a Mutex<Option<Meeting>>,
}

/// The group of `world` ranks among which those of this one are, and meet the others at `place`.
pub(super) fn grow(
    growing: Growing<'_>,
    place: &MeetingPlace,
    world: usize,
    patience: Duration,
) -> Result<(Arc<Group>, Meeting)> {
    let group = growing.group;
    group.check_open()?;
    let numbers: Vec<Rank> = group.membership.members.numbers().collect();
    if let Some(number) = numbers.iter().find(|number| **number >= world) {
        return Err(Error::invalid(format!(
            "grow: the group has the rank with number {number} in the whole job, which is out of range for a world size of {world}"
        )));
    }
    if world <= numbers.len() {
        return Err(Error::invalid(format!(
            "grow: the group has {} ranks already, and is to have {world}",
            numbers.len()
        )));
    }
    let patience = patience.min(LONGEST_MEETING);
    let mut vote = Vote::begin(growing, numbers)?;
    let joined = meet(growing, place, (world, patience), &mut vote);
    let error = match (vote.count(joined.is_ok(), patience), joined) {
        (Ok(()), joined) => return joined,
        (Err(error), Ok((grown, _))) => {
            // Those that came need not wait for operations of this rank.
            grown.abort("grow was in vain on another rank");
            grown.close();
            error
        }
        (Err(_), Err(cause)) => cause,
    };
    Err(group.error().unwrap_or(error))
}

/// Meets the ranks that come, which takes as long as `patience`.
fn meet(
    Growing { group, meeting, .. }: Growing<'_>,
    place: &MeetingPlace,
    (world, patience): (usize, Duration),
    vote: &mut Vote<'_>,
) -> Result<(Arc<Group>, Meeting)> {
    let rank = vote.numbers[group.rank()];
    let mut config = group.config.clone();
    config.join_timeout = Timeout(Some(patience));
    let open = |vote: &Vote<'_>| place.open_while(rank, world, &config, &|| vote.check());
    let meeting = if vote.leads() {
        let before = meeting.lock().take();
        if let Some(before) = before {
            before.end();
        }
        let meeting = open(vote);
        vote.open(meeting.is_ok())?;
        meeting?
    } else {
        vote.await_open(patience + GRACE)?;
        open(vote)?
    };
    let comer = Comer {
        is_new: false,
        ..Comer::new((rank, world))
    };
    let store = Watched {
        store: meeting.store(),
        vote,
    };
    let settings = (group.config.clone(), patience);
    let grown = Group::join(&store, &comer, settings)?;
    grown.set_timeout(group.timeout());
    Ok((grown, meeting))
}

/// The store of a meeting, whose waits end when this one is in vain.
struct Watched<'a> {
    store: &'a dyn Store,
    vote: &'a Vote<'a>,
}

impl Store for Watched<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, value)
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let begun = Instant::now();
        loop {
            self.vote.check()?;
            let left = timeout.saturating_sub(begun.elapsed());
            match self.store.wait(key, left.min(STORE_WAIT)) {
                Err(error) if error.code == Code::Timeout && left > STORE_WAIT => {}
                result => return result,
            }
        }
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.vote.check()?;
        self.store.get(key)
    }

    fn underlying(&self) -> Option<&dyn Store> {
        Some(self.store)
    }
}

/// The vote of the ranks of a group on whether they all have joined another one. One of them leads: the one that will serve
/// the store, if it is among them. It says that the place is open at which they join, and which vote this is, since another
/// rank may have missed one, or called for it too early. In the end it counts.
struct Vote<'a> {
    group: &'a Arc<Group>,
    /// Those of the ranks in the whole job.
    numbers: Vec<Rank>,
    leader: Rank,
    /// From 1. The others hear it from the leader.
    number: Option<u64>,
    /// Of the leader the votes of the others; of another rank that the place is open, and then the result.
    awaited: Vec<Awaited>,
}

/// A message that is to come from a rank.
struct Awaited {
    from: Rank,
    work: Arc<WorkState>,
    bytes: Arc<Bytes>,
}

impl<'a> Vote<'a> {
    fn begin(growing: Growing<'a>, numbers: Vec<Rank>) -> Result<Self> {
        let leader = numbers.iter().position(|number| *number == 0);
        let mut vote = Self {
            group: growing.group,
            leader: leader.unwrap_or(0),
            numbers,
            number: None,
            awaited: Vec::new(),
        };
        if !vote.leads() {
            vote.expect(vote.leader, OPEN)?;
            return Ok(vote);
        }
        let number = growing.votes.fetch_add(1, Ordering::Relaxed) + 1;
        vote.number = Some(number);
        for from in vote.others() {
            vote.expect(from, tag(number))?;
        }
        Ok(vote)
    }

    fn leads(&self) -> bool {
        self.group.rank() == self.leader
    }

    fn others(&self) -> Vec<Rank> {
        let ranks = 0..self.group.world();
        ranks.filter(|rank| *rank != self.leader).collect()
    }

    fn expect(&mut self, from: Rank, tag: u64) -> Result<()> {
        let (bytes, memory) = Bytes::lend(vec![0; size_of::<u64>()]);
        let work = self.group.receive(
            DataType::UInt8,
            memory,
            (Some(from), tag),
            options(Arc::clone(&bytes)),
        )?;
        self.awaited.push(Awaited { from, work, bytes });
        Ok(())
    }

    /// The leader has opened the place, or has not.
    fn open(&self, is_open: bool) -> Result<()> {
        let number = self.number.unwrap_or(0);
        let word = if is_open { number } else { number | CLOSED };
        self.tell(&self.others(), OPEN, word)
    }

    /// Another rank waits until the leader has. A vote that is over is one that this rank has missed.
    fn await_open(&mut self, patience: Duration) -> Result<()> {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let word = self.hear(&self.awaited[0], left)?;
            self.awaited.clear();
            let number = word & !CLOSED;
            self.expect(self.leader, tag(number))?;
            if self.group.wait(&self.awaited[0].work, Some(MOMENT)).is_ok() {
                self.awaited.clear();
                self.expect(self.leader, OPEN)?;
                continue;
            }
            self.number = Some(number);
            self.check()?;
            return match word == number {
                true => Ok(()),
                false => Err(self.in_vain(self.leader)),
            };
        }
    }

    /// Whether this rank may still join: its group has not failed, and no other rank has given up.
    fn check(&self) -> Result<()> {
        if let Some(error) = self.group.error() {
            // The ranks that come have other numbers than those by which it names a rank.
            let what = format!("the group that grows has failed: {}", error.message);
            return Err(Error::new(Code::Aborted, what));
        }
        if self.number.is_none() {
            return Ok(());
        }
        for awaited in &self.awaited {
            if awaited.work.result().is_some() {
                let said = self.hear(awaited, MOMENT)?;
                if said != JOINED {
                    return Err(self.in_vain(said as usize));
                }
            }
        }
        Ok(())
    }

    /// Whether all ranks have joined, as this one has or has not.
    fn count(&self, has_joined: bool, patience: Duration) -> Result<()> {
        let Some(number) = self.number else {
            // It was not called for.
            return Err(self.in_vain(self.leader));
        };
        let mine = match has_joined {
            true => JOINED,
            false => self.group.rank() as u64,
        };
        let verdict = if self.leads() {
            let counted = match has_joined {
                // They have joined as well, and say so soon.
                true => self.count_votes(),
                false => Ok(mine),
            };
            let verdict = match &counted {
                Ok(verdict) => *verdict,
                Err(_) => self.group.rank() as u64,
            };
            let told = self.tell(&self.others(), tag(number), verdict);
            told.and(counted)?
        } else {
            self.tell(&[self.leader], tag(number), mine)?;
            match self.awaited.first() {
                // The leader has no more time to join than this rank had.
                Some(verdict) => self.hear(verdict, patience + VERDICT_WITHIN)?,
                None => 0,
            }
        };
        match verdict {
            JOINED => Ok(()),
            rank => Err(self.in_vain(rank as usize)),
        }
    }

    fn count_votes(&self) -> Result<u64> {
        let until = Instant::now() + VERDICT_WITHIN;
        let mut verdict = JOINED;
        for vote in &self.awaited {
            let left = until.saturating_duration_since(Instant::now());
            verdict = verdict.min(self.hear(vote, left)?);
        }
        Ok(verdict)
    }

    /// This rank has not met those that come.
    fn in_vain(&self, rank: Rank) -> Error {
        let rank = rank.min(self.group.world() - 1);
        let name = self.group.name_of(rank);
        let what = format!(
            "grow: {name} has not met the processes that come, or not in time; its own error says why"
        );
        Error::new(Code::Aborted, what).with_peer(self.numbers[rank])
    }

    fn hear(&self, Awaited { from, work, bytes }: &Awaited, within: Duration) -> Result<u64> {
        self.group.wait(work, Some(within)).map_err(|error| {
            if error.code != Code::Timeout || self.group.error().is_some() {
                return error;
            }
            let what = format!("grow: {} has not called it", self.group.name_of(*from));
            Error::new(Code::Timeout, what).with_peer(self.numbers[*from])
        })?;
        // SAFETY: the operation has ended.
        let bytes = unsafe { bytes.read() };
        Ok(u64::from_le_bytes(bytes.try_into().unwrap_or_default()))
    }

    /// Sends these ranks a number.
    fn tell(&self, to: &[Rank], tag: u64, number: u64) -> Result<()> {
        for to in to {
            let (bytes, memory) = Bytes::lend(number.to_le_bytes().to_vec());
            self.group
                .send(DataType::UInt8, memory, (*to, tag), options(bytes))?;
        }
        Ok(())
    }
}

impl Drop for Vote<'_> {
    fn drop(&mut self) {
        for awaited in &self.awaited {
            self.group.cancel_receive(&awaited.work);
        }
    }
}

/// The tag of the messages of one vote.
fn tag(number: u64) -> u64 {
    OPEN.wrapping_sub(number)
}

/// Of a message whose bytes are kept until it has ended, however long that takes.
fn options(bytes: Arc<Bytes>) -> PointToPoint {
    PointToPoint {
        timeout: Some(Duration::ZERO),
        completion: Some(Box::new(move |_| drop(bytes))),
        ..PointToPoint::default()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use crate::communicator::Communicator;
    use crate::config::Config;
    use crate::types::ReduceOp;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn free_place() -> MeetingPlace {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        MeetingPlace::Url(format!("tcp://{address}"))
    }

    fn sum(comm: &Communicator) -> f32 {
        let mut sum = [comm.rank() as f32 + 1.0];
        let all = comm.all_reduce(&mut sum, ReduceOp::Sum);
        all.expect("a sum");
        sum[0]
    }

    #[test]
    fn a_rank_that_has_gone_is_replaced() {
        let place = &free_place();
        let new = |rank| {
            let comm = Communicator::meet(place.clone(), (rank, 3), Config::default());
            comm.expect("they meet")
        };
        let rank = |rank: Rank| {
            let comm = new(rank);
            assert_eq!((sum(&comm), comm.newcomers()), (6.0, &[0, 1, 2][..]));
            if rank == 1 {
                return;
            }
            let left = comm.shrink(&[1], PATIENCE).expect("two are left");
            assert!(left.newcomers().is_empty());
            let refused = left.grow(None, Some(2), PATIENCE).expect_err("too few");
            assert_eq!(refused.code, Code::InvalidArgument);
            let grown = left.grow(None, None, PATIENCE).expect("one comes");
            assert_eq!((grown.rank(), grown.newcomers()), (rank, &[1][..]));
            assert_eq!((sum(&grown), sum(&left)), (6.0, 3.0));
        };
        thread::scope(|scope| {
            let gone = scope.spawn(|| rank(1));
            scope.spawn(|| rank(0));
            scope.spawn(|| rank(2));
            gone.join().expect("it goes");
            let grown = new(1);
            assert_eq!((sum(&grown), grown.newcomers()), (6.0, &[1][..]));
        });
    }

    #[test]
    fn in_vain_all_stay_where_they_are() {
        let place = &free_place();
        let rank = |rank: Rank| {
            let config = Config::default();
            let comm = Communicator::meet(place.clone(), (rank, 2), config).expect("they meet");
            // Rank 1 does not reach the place of the others.
            let elsewhere = (rank == 1).then(|| MeetingPlace::Url("nowhere".into()));
            let soon = Duration::from_millis(300);
            let error = comm.grow(elsewhere, Some(3), soon).expect_err("in vain");
            let is_named = match rank {
                // It may hear of rank 1 before its time is over.
                0 => [Code::Timeout, Code::Aborted].contains(&error.code),
                _ => error.code == Code::InvalidArgument,
            };
            assert!(is_named, "{error}");
            assert_eq!(sum(&comm), 3.0);
        };
        thread::scope(|scope| {
            scope.spawn(|| rank(0));
            scope.spawn(|| rank(1));
        });
    }
}
