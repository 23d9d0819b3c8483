//! Opening links on a limited number of threads. A rank that talks to hundreds of others for the first time needs as many links
//! at once; as many threads would get in each other's way, and may be more than the system allows.
//!
//! A job that waits for long, as for a host that does not answer, gives its turn to the next. So however many peers cannot be
//! reached, the others can. The links that others open here are made on such threads as well, but do not give their turns away:
//! the number of threads stays limited however many links come.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::fence::contained;
use crate::locks::Mutex;
use crate::threads;

/// How many links are being opened at a time. A handshake takes half a millisecond of a core, and two or three round trips.
pub(super) const MOST_WORKING: usize = 32;

/// Longer than any handshake of two processes that both have a core.
const LONGEST_HANDSHAKE: Duration = Duration::from_millis(500);

type Job = Box<dyn FnOnce(&Turn) + Send>;

/// The jobs that have a turn, and those that wait for one.
pub(super) struct Turns {
    /// The name of its threads.
    name: &'static str,
    queue: Mutex<Queue>,
    /// Held while a job is put into the queue, until it is known whether there is a thread for it.
    beginning: Mutex<()>,
}

#[derive(Default)]
struct Queue {
    /// How many have a turn.
    working: usize,
    /// The jobs that go before others, and the others.
    first: VecDeque<Job>,
    then: VecDeque<Job>,
}

impl Queue {
    fn of(&mut self, goes_first: bool) -> &mut VecDeque<Job> {
        match goes_first {
            true => &mut self.first,
            false => &mut self.then,
        }
    }

    fn next(&mut self) -> Option<Job> {
        self.first.pop_front().or_else(|| self.then.pop_front())
    }

    fn is_empty(&self) -> bool {
        self.first.is_empty() && self.then.is_empty()
    }
}

/// The right to open links on one thread. It goes to the next job when it is dropped or given away.
pub struct Turn {
    turns: Arc<Turns>,
    since: Cell<Instant>,
    is_given_away: Cell<bool>,
}

impl Turns {
    pub(super) fn new(name: &'static str) -> Self {
        Self {
            name,
            queue: Mutex::default(),
            beginning: Mutex::default(),
        }
    }

    /// Runs `job` on another thread, at once or when its turn has come.
    ///
    /// # Errors
    /// When the system refuses a thread, and there is none that could do it later.
    pub(super) fn begin(
        self: &Arc<Self>,
        goes_first: bool,
        job: impl FnOnce(&Turn) + Send + 'static,
    ) -> io::Result<()> {
        let _beginning = self.beginning.lock();
        let mut queue = self.queue.lock();
        queue.of(goes_first).push_back(Box::new(job));
        if queue.working >= MOST_WORKING {
            return Ok(());
        }
        queue.working += 1;
        drop(queue);
        let Err(refused) = Turn::new(self).take() else {
            return Ok(());
        };
        let mut queue = self.queue.lock();
        if queue.working > 0 {
            return Ok(());
        }
        // No thread has taken it and no other job has come since.
        let job = queue.of(goes_first).pop_back();
        drop(queue);
        job.map_or(Ok(()), |_| Err(refused))
    }
}

impl std::fmt::Debug for Turn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turn")
            .field("since", &self.since)
            .field("is_given_away", &self.is_given_away)
            .finish_non_exhaustive()
    }
}

impl Turn {
    /// One that has been counted.
    fn new(turns: &Arc<Turns>) -> Self {
        Self {
            turns: Arc::clone(turns),
            since: Cell::new(Instant::now()),
            is_given_away: Cell::new(false),
        }
    }

    /// Starts a thread that works, one job after the other, for as long as it has this turn.
    fn take(self) -> io::Result<()> {
        threads::spawn(self.turns.name, move || {
            while let Some(job) = self.next() {
                // A panic has been reported, and is the end of one job.
                let _ = contained(|| job(&self));
            }
        })
    }

    /// The next job of a thread that has a turn. `None` ends both.
    fn next(&self) -> Option<Job> {
        if self.is_given_away.get() {
            return None;
        }
        let mut queue = self.turns.queue.lock();
        let job = queue.next();
        if job.is_none() {
            queue.working -= 1;
            self.is_given_away.set(true);
        }
        self.since.set(Instant::now());
        job
    }

    /// The thread is about to wait, again: if it has had its turn for long, that goes to the next job.
    pub fn waits(&self) {
        if self.is_given_away.get()
            || self.since.get().elapsed() < LONGEST_HANDSHAKE
            || self.turns.queue.lock().is_empty()
        {
            return;
        }
        self.is_given_away.set(true);
        if Self::new(&self.turns).take().is_err() {
            // It was dropped, and no longer counts.
            self.turns.queue.lock().working += 1;
            self.is_given_away.set(false);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // There was no thread for it.
        if !self.is_given_away.get() {
            self.turns.queue.lock().working -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn working(turns: &Turns) -> (usize, usize) {
        let queue = turns.queue.lock();
        (queue.working, queue.first.len() + queue.then.len())
    }

    /// Waits for the end of the threads.
    fn is_quiet(turns: &Turns) -> bool {
        let begun = Instant::now();
        while working(turns) != (0, 0) && begun.elapsed() < SOON {
            thread::yield_now();
        }
        working(turns) == (0, 0)
    }

    #[test]
    fn so_many_work_at_a_time_and_all_get_their_turn() {
        let turns = Arc::new(Turns::new("unisono-test"));
        let most = Arc::new(Mutex::new((0_usize, 0_usize)));
        let (done, all) = channel();
        for number in 0..10 * MOST_WORKING {
            let (most, done) = (Arc::clone(&most), done.clone());
            let job = move |_: &Turn| {
                {
                    let mut most = most.lock();
                    most.0 += 1;
                    most.1 = most.0.max(most.1);
                }
                thread::yield_now();
                most.lock().0 -= 1;
                done.send(number).unwrap();
            };
            turns.begin(number % 2 == 0, job).unwrap();
        }
        drop(done);
        assert_eq!(all.iter().count(), 10 * MOST_WORKING);
        assert!(is_quiet(&turns));
        assert!(most.lock().1 <= MOST_WORKING, "{:?}", most.lock());
    }

    #[test]
    fn those_that_win_come_first() {
        let turns = Arc::new(Turns::new("unisono-test"));
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock();
        for _ in 0..MOST_WORKING {
            let gate = Arc::clone(&gate);
            turns.begin(true, move |_| drop(gate.lock())).unwrap();
        }
        let order = Arc::new(Mutex::new(Vec::new()));
        for number in 0..4 * MOST_WORKING {
            let order = Arc::clone(&order);
            let wins = number % 2 == 1;
            // Taken in this order, so all but the jobs at hand are in it.
            let job = move |_: &Turn| order.lock().push(wins);
            turns.begin(wins, job).unwrap();
        }
        drop(closed);
        assert!(is_quiet(&turns));
        let order = order.lock();
        let late = order
            .iter()
            .take(MOST_WORKING)
            .filter(|wins| !**wins)
            .count();
        assert_eq!(order.len(), 4 * MOST_WORKING);
        assert!(late == 0, "{late} of the first {MOST_WORKING}");
    }

    #[test]
    fn what_waits_for_long_does_not_keep_others_from_their_turn() {
        let turns = Arc::new(Turns::new("unisono-test"));
        let (done, ended) = channel();
        let is_over = Arc::new(Mutex::new(false));
        for _ in 0..2 * MOST_WORKING {
            let is_over = Arc::clone(&is_over);
            let stuck = move |turn: &Turn| {
                while !*is_over.lock() {
                    turn.waits();
                    thread::sleep(Duration::from_millis(10));
                }
            };
            turns.begin(true, stuck).unwrap();
        }
        turns.begin(false, move |_| done.send(()).unwrap()).unwrap();
        ended.recv_timeout(SOON).expect("its turn");
        *is_over.lock() = true;
        assert!(is_quiet(&turns));
    }

    #[test]
    fn a_panic_is_the_end_of_one_job() {
        let turns = Arc::new(Turns::new("unisono-test"));
        let (done, ended) = channel();
        for number in 0..3 * MOST_WORKING {
            let done = done.clone();
            let job = move |_: &Turn| {
                done.send(()).unwrap();
                assert!(number >= 2 * MOST_WORKING, "a panic of a test");
            };
            turns.begin(number % 2 == 0, job).unwrap();
        }
        drop(done);
        assert_eq!(ended.iter().count(), 3 * MOST_WORKING);
        assert!(is_quiet(&turns));
    }
}
