//! The initiator's side: a transfer is a few messages, which are all started at once.
//!
//! Where both memories lie on devices of one host, the target is asked to copy between them, and told where the initiator's
//! lies. Where it cannot, the bytes travel after all.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::Peer;
use super::regions::{Moving, Region, Use};
use super::remote::RemoteRegion;
use super::request::{ANSWER, Answer, Kind, LENGTH, REQUESTS, Request, TARGET};
use super::serve::Location;
use crate::buffer::Memory;
use crate::communicator::Work;
use crate::engine::{Completion, PointToPoint};
use crate::error::{Code, Error, Result};
use crate::locks::Mutex;
use crate::types::DataType;

/// How long the data of a transfer may take after the answer, which comes after it.
const STRAGGLERS: Duration = Duration::from_secs(5);

/// A read or a write under way, or ended. Dropping it does not end the transfer.
#[derive(Clone)]
pub struct Transfer(Arc<Shared>);

struct Shared {
    request: Request,
    peer: Arc<Peer>,
    /// Until the transfer has ended.
    local: Mutex<Option<Local>>,
    /// Where the target is asked to map the bytes.
    mapped: Option<Attempt>,
    /// In which they travel.
    sent: Attempt,
    result: OnceLock<Result<()>>,
    /// Locked while the transfer is being ended.
    ending: Mutex<()>,
    /// To be called with the result; `None` from then on.
    completions: Mutex<Option<Vec<Completion>>>,
}

/// The bytes of this process, in use.
struct Local {
    used: Use,
    offset: usize,
    /// While they travel.
    moving: Option<Moving>,
}

/// One way of a transfer.
struct Attempt {
    /// The request as it travels.
    header: [u8; LENGTH],
    /// Where the initiator's bytes lie, for a target that maps them.
    location: Vec<u8>,
    /// Written by the engine, until the work that receives it has ended.
    answer: UnsafeCell<[u8; ANSWER]>,
    works: OnceLock<Works>,
}

/// The messages of one attempt.
struct Works {
    /// The request, and the pieces of the data.
    messages: Vec<Work>,
    answer: Work,
}

// SAFETY: `answer` is written by the engine alone, and read only after the work that receives it has ended, which orders
// the two; all else is `Sync` by itself.
unsafe impl Sync for Attempt {}

impl Attempt {
    fn new(request: Request, location: Vec<u8>) -> Self {
        Self {
            header: request.to_bytes(),
            location,
            answer: UnsafeCell::new([0; ANSWER]),
            works: OnceLock::new(),
        }
    }

    /// The bytes of the answer, once the message with it has ended.
    ///
    /// # Errors
    /// That message's.
    fn answer(&self, works: &Works) -> Result<[u8; ANSWER]> {
        works.answer.result().expect("it has ended")?;
        // SAFETY: the work that writes it has ended.
        Ok(unsafe { *self.answer.get() })
    }
}

impl Transfer {
    /// Starts a transfer between `range` of `local` and as many bytes of `remote`. `completion` is called when it ends.
    ///
    /// # Errors
    /// `InvalidArgument` for ranges that do not fit, the first cause of a pair that is dead. The completion is then not
    /// called.
    pub(super) fn start(
        kind: Kind,
        peer: &Arc<Peer>,
        (local, range): (&Region, Range<usize>),
        remote: &RemoteRegion,
        completion: Option<Completion>,
    ) -> Result<Self> {
        let length = range.len();
        if range.start > range.end || range.end > local.len() {
            return Err(Error::invalid(format!(
                "bytes {} to {} do not lie in the registered memory, which has {}",
                range.start,
                range.end,
                local.len()
            )));
        }
        if length as u64 > remote.length {
            return Err(Error::invalid(format!(
                "{length} bytes do not fit in the {} of the peer's memory",
                remote.length
            )));
        }
        let Some(used) = local.begin_use() else {
            return Err(Error::invalid("the memory has been unregistered"));
        };
        let request = Request {
            kind,
            is_mapped: false,
            number: peer.count(),
            region: remote.region,
            offset: remote.offset,
            length: length as u64,
        };
        let span = used.span().filter(|_| remote.is_on_device);
        let location = span
            .filter(|_| peer.maps(length))
            .map(|span| Location::write(span, range.start));
        let asks_to_map = Request {
            is_mapped: true,
            ..request
        };
        let transfer = Self(Arc::new(Shared {
            mapped: location.map(|location| Attempt::new(asks_to_map, location)),
            sent: Attempt::new(request, Vec::new()),
            request,
            peer: Arc::clone(peer),
            local: Mutex::new(Some(Local {
                used,
                offset: range.start,
                moving: None,
            })),
            result: OnceLock::new(),
            ending: Mutex::new(()),
            completions: Mutex::new(Some(completion.into_iter().collect())),
        }));
        match length {
            0 => {
                let _ = transfer.0.result.set(Ok(()));
                drop(transfer.0.local.lock().take());
                transfer.tell();
            }
            _ => transfer.post(transfer.0.mapped.as_ref().unwrap_or(&transfer.0.sent))?,
        }
        Ok(transfer)
    }

    /// Starts the messages: the request, the data, and the answer.
    fn post(&self, attempt: &Attempt) -> Result<()> {
        let shared = &*self.0;
        let mut messages = Vec::new();
        let posted = self.post_each(attempt, &mut messages);
        let answer = match posted {
            Ok(answer) => answer,
            Err(error) => {
                // The target would wait for the rest. The started messages end, and are the last to use the memory.
                if !messages.is_empty() {
                    shared.peer.comm.abort(&error.message);
                }
                messages.iter().for_each(|work| drop(work.wait(None)));
                if !attempt.location.is_empty() && !messages.is_empty() {
                    let local = shared.local.lock().take();
                    shared.peer.take_back();
                    shared.peer.keep(local);
                }
                return Err(self.describe(error));
            }
        };
        if attempt.works.set(Works { messages, answer }).is_err() {
            unreachable!("an attempt is started once");
        }
        Ok(())
    }

    fn post_each(&self, attempt: &Attempt, messages: &mut Vec<Work>) -> Result<Work> {
        let shared = &*self.0;
        let (request, comm) = (&shared.request, &shared.peer.comm);
        let is_mapped = !attempt.location.is_empty();
        let mut local = shared.local.lock();
        let local = local.as_mut().expect("in use since the transfer was made");
        if !is_mapped {
            let is_sent = request.kind == Kind::Write;
            let length = request.length as usize;
            local.moving = Some(local.used.moving(local.offset, length, is_sent)?);
        }
        let bytes = DataType::UInt8;
        // SAFETY: of each message here: the header, the location and the place of the answer live as long as `shared`, which
        // the completion of the answer keeps, and so does the use of the region. The transfer ends when all its messages have.
        let header = unsafe {
            let header = Memory::of(&attempt.header);
            comm.send(bytes, header, TARGET, REQUESTS, PointToPoint::default())?
        };
        messages.push(header);
        let tag = request.data_tag();
        if is_mapped {
            // SAFETY: as above.
            messages.push(unsafe {
                let location = Memory::of(&attempt.location);
                comm.send(bytes, location, TARGET, tag, PointToPoint::default())?
            });
        }
        let moving = local.moving.as_ref();
        for (moving, (offset, length)) in moving.into_iter().flat_map(|moving| {
            let pieces = request.pieces();
            pieces.map(move |piece| (moving, piece))
        }) {
            let memory = moving.memory(offset, length);
            let options = PointToPoint::default();
            // SAFETY: as above.
            messages.push(unsafe {
                match request.kind {
                    Kind::Write => comm.send(bytes, memory, TARGET, tag, options)?,
                    Kind::Read => comm.receive(bytes, memory, Some(TARGET), tag, options)?,
                }
            });
        }
        let same = self.clone();
        let options = PointToPoint {
            completion: Some(Box::new(move |_| {
                // `post` is about to set them: the answer is the last message that it starts.
                same.attempt(is_mapped).works.wait();
                same.settle();
                if same.is_done() {
                    same.tell();
                }
            })),
            ..PointToPoint::default()
        };
        let tag = request.answer_tag();
        // SAFETY: as above; nothing else touches the place of the answer before this has ended.
        unsafe {
            let answer = Memory::from_raw_parts(attempt.answer.get().cast(), ANSWER);
            comm.receive(bytes, answer, Some(TARGET), tag, options)
        }
    }

    fn attempt(&self, is_mapped: bool) -> &Attempt {
        let mapped = self.0.mapped.as_ref().filter(|_| is_mapped);
        mapped.unwrap_or(&self.0.sent)
    }

    /// The attempt that is under way.
    fn current(&self) -> &Attempt {
        self.attempt(self.0.sent.works.get().is_none())
    }

    /// Whether it has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.0.result.get().is_some()
    }

    /// The result, if it has ended.
    pub fn result(&self) -> Option<Result<()>> {
        self.0.result.get().cloned()
    }

    /// Since when it is under way, if it is, and whether it writes.
    pub(crate) fn under_way(&self) -> Option<(Instant, bool)> {
        let works = self.current().works.get().filter(|_| !self.is_done())?;
        let writes = self.0.request.kind == Kind::Write;
        Some((works.answer.started(), writes))
    }

    /// Whether both are one transfer.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Waits for the end, driving the transfer from this thread meanwhile. Where a read between devices of one host fails, the
    /// target may still write to the bytes of this side, until the region is [unregistered](super::Port::unregister).
    ///
    /// # Errors
    /// The transfer's own; or `Timeout` when `timeout` runs out first, after which the transfer goes on.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        if let Some(result) = self.result() {
            return result;
        }
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let attempt = self.current();
            let works = attempt.works.get().expect("it has messages");
            for work in [&works.answer].into_iter().chain(&works.messages) {
                let left = until.map(|until| until.saturating_duration_since(Instant::now()));
                let waited = work.wait(left);
                if !work.is_done() {
                    return waited.map_err(|error| self.describe(error));
                }
                // Of a read that is refused, the data will not come.
                self.cancel_if_refused(attempt, works);
            }
            self.settle();
            // Else the bytes travel after all.
            if let Some(result) = self.result() {
                return result;
            }
        }
    }

    fn cancel_if_refused(&self, attempt: &Attempt, works: &Works) {
        if self.0.request.kind == Kind::Read && self.answer(attempt, works).is_err() {
            let comm = &self.0.peer.comm;
            let data = works.messages.iter().filter(|work| !work.is_done());
            for work in data {
                // One that has met its message goes on, and ends.
                let _ = comm.cancel_receive(work);
            }
        }
    }

    /// The answer of the target, once the message with it has ended.
    fn answer(&self, attempt: &Attempt, works: &Works) -> Result<()> {
        Answer::result(attempt.answer(works)?, &self.0.request)
    }

    /// Has `completion` called with the result: at once if the transfer has ended, else when it does, on a thread made for
    /// that. It may wait for other transfers and for their completions.
    pub fn when_done(&self, completion: Completion) {
        let mut waiting = self.0.completions.lock();
        if !self.is_done()
            && let Some(waiting) = &mut *waiting
        {
            waiting.push(completion);
            return;
        }
        drop(waiting);
        completion(self.result().expect("it has ended"));
    }

    /// The answer's message has ended, and so does the transfer, or the bytes are to travel.
    fn settle(&self) {
        let ending = self.0.ending.lock();
        let attempt = self.current();
        let works = attempt.works.get().expect("it has messages");
        if self.is_done() || !works.answer.is_done() {
            return;
        }
        let result = match self.sends_after_all(attempt, works) {
            Some(Ok(())) => return,
            Some(Err(error)) => self.end_messages().and(Err(error)),
            None => self.outcome(attempt, works),
        };
        let result = result.map_err(|error| self.describe(error));
        let local = self.0.local.lock().take();
        // The target may be copying.
        let is_mapped = !attempt.location.is_empty() && attempt.answer(works).is_err();
        if is_mapped {
            self.0.peer.take_back();
        }
        // Set under the lock, and so only once.
        let _ = self.0.result.set(result);
        // Dropped without the locks: it is foreign code.
        drop(ending);
        match is_mapped {
            true => self.0.peer.keep(local),
            false => drop(local),
        }
    }

    /// Calls what waits for the end, which has come.
    fn tell(&self) {
        let waiting = self.0.completions.lock().take();
        for completion in waiting.into_iter().flatten() {
            completion(self.result().expect("it has ended"));
        }
    }

    /// Where the target has not mapped the bytes, starts to send them.
    fn sends_after_all(&self, attempt: &Attempt, works: &Works) -> Option<Result<()>> {
        let may_map_later = Answer::is_unmapped(attempt.answer(works).ok()?)?;
        if attempt.location.is_empty() {
            return None;
        }
        if !may_map_later {
            self.0.peer.map_no_more();
        }
        Some(self.post(&self.0.sent))
    }

    fn outcome(&self, attempt: &Attempt, works: &Works) -> Result<()> {
        self.cancel_if_refused(attempt, works);
        let result = self.answer(attempt, works).and(self.end_messages());
        let local = self.0.local.lock();
        let moving = local
            .as_ref()
            .and_then(|of| Some((&of.used, of.moving.as_ref()?)));
        match (&result, self.0.request.kind, moving) {
            (Ok(()), Kind::Read, Some((used, moving))) => used.put_back(moving),
            _ => result,
        }
    }

    /// Waits for the messages of all attempts, after the answer.
    fn end_messages(&self) -> Result<()> {
        let attempts = self.0.mapped.iter().chain([&self.0.sent]);
        let messages = || {
            let works = attempts.clone().filter_map(|attempt| attempt.works.get());
            works.flat_map(|works| &works.messages)
        };
        let late = |work: &&Work| work.wait(Some(STRAGGLERS)).is_err() && !work.is_done();
        if messages().any(|work| late(&work)) {
            // Else this thread would wait for a target that has nothing more to do.
            let comm = &self.0.peer.comm;
            comm.abort("the target of a transfer answered before it had moved the data");
        }
        let mut result = Ok(());
        for work in messages() {
            result = result.and(work.wait(None));
        }
        result
    }

    fn describe(&self, error: Error) -> Error {
        let Request { kind, length, .. } = self.0.request;
        let what = match kind {
            Kind::Write => "write to",
            Kind::Read => "read of",
        };
        let mut error = error.with_operation(format!("{what} a peer's memory, {length} bytes"));
        if error.code == Code::PeerLost {
            let cause = std::mem::take(&mut error.message);
            error.message = format!(
                "the peer has closed its port or has ended, and the connection is of no further use ({cause})"
            );
        }
        error
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer")
            .field("request", &self.0.request)
            .field("result", &self.result())
            .finish()
    }
}
