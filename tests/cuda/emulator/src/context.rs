//! Devices and their primary contexts, and which context is current in a thread.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::abi::{Device, Handle};
use crate::handles::Handles;
use crate::memory;
use crate::point::Point;
use crate::settings::{Synchronize, settings};
use crate::status::{Outcome, Status};
use crate::stream::{Kind, Stream};

/// The context of a process on a device: the primary one, or one that it made for itself.
pub(crate) struct Context {
    pub(crate) handle: Handle,
    pub(crate) device: usize,
    is_primary: bool,
    /// Held while something is put into a stream, so that the legacy stream and the blocking ones agree on an order.
    pub(crate) submission: Mutex<()>,
    error: AtomicU32,
    destroyed: AtomicBool,
    legacy: OnceLock<Arc<Stream>>,
    streams: Mutex<Vec<Weak<Stream>>>,
    peers: Mutex<HashSet<usize>>,
    /// Streams that wait for a word.
    waiting: AtomicUsize,
}

#[derive(Default)]
struct Primary {
    retained: usize,
    context: Option<Arc<Context>>,
}

static CONTEXTS: Handles<Context> = Handles::new();
static PRIMARIES: Mutex<Vec<Primary>> = Mutex::new(Vec::new());
static RETAINED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static CURRENT: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

impl Context {
    fn new(handle: Handle, device: usize, is_primary: bool) -> Self {
        Self {
            handle,
            device,
            is_primary,
            submission: Mutex::new(()),
            error: AtomicU32::new(0),
            destroyed: AtomicBool::new(false),
            legacy: OnceLock::new(),
            streams: Mutex::new(Vec::new()),
            peers: Mutex::new(HashSet::new()),
            waiting: AtomicUsize::new(0),
        }
    }

    /// # Errors
    /// The error that has broken the context for good, or `CONTEXT_IS_DESTROYED`.
    pub(crate) fn check(&self) -> Outcome {
        match self.error.load(Ordering::Acquire) {
            0 if self.destroyed.load(Ordering::Acquire) => Err(Status::CONTEXT_IS_DESTROYED),
            0 => Ok(()),
            error => Err(Status(error)),
        }
    }

    /// Whether what is still in the streams is to be thrown away.
    pub(crate) fn is_broken(&self) -> bool {
        self.check().is_err()
    }

    /// Breaks the context: every later call gives `error`, and nothing more is executed.
    pub(crate) fn fail(&self, error: Status) {
        let _ = self
            .error
            .compare_exchange(0, error.0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The error that broke the context, 0 if none did.
    pub(crate) fn error(&self) -> u32 {
        self.error.load(Ordering::Acquire)
    }

    pub(crate) fn legacy(self: &Arc<Self>) -> Arc<Stream> {
        let make = || Arc::new(Stream::new(0, self.clone(), Kind::Legacy, 0));
        self.legacy.get_or_init(make).clone()
    }

    /// Counts a stream among those of the context.
    pub(crate) fn adopt(&self, stream: &Arc<Stream>) {
        let mut streams = self.streams.lock();
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    /// All streams but the legacy one, destroyed ones with work left among them.
    pub(crate) fn streams(&self) -> Vec<Arc<Stream>> {
        self.streams
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// Waits until everything in every stream is done.
    pub(crate) fn synchronize(self: &Arc<Self>) -> Outcome {
        let ends: Vec<Arc<Point>> = {
            let _order = self.submission.lock();
            let mut streams = self.streams();
            streams.push(self.legacy());
            streams.iter().map(|stream| stream.end()).collect()
        };
        ends.iter().for_each(|end| end.wait());
        self.check()
    }

    /// In a call that may wait for the device: does so, or not, or refuses it where that would be a wait for a word.
    ///
    /// # Errors
    /// `NOT_PERMITTED` when it is refused; what has broken the context.
    pub(crate) fn may_synchronize(self: &Arc<Self>) -> Outcome {
        match settings().synchronize {
            Synchronize::Usual => Ok(()),
            Synchronize::Always => self.synchronize(),
            Synchronize::Refuse if self.waiting.load(Ordering::Acquire) == 0 => Ok(()),
            Synchronize::Refuse => Err(Status::NOT_PERMITTED),
        }
    }

    /// Runs `wait`, in which a stream waits for a word.
    pub(crate) fn while_waiting(&self, wait: impl FnOnce()) {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        wait();
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether kernels and copies of this context may touch memory of that device.
    pub(crate) fn reaches(&self, device: usize) -> bool {
        device == self.device || self.peers.lock().contains(&device)
    }

    /// Lets this context touch memory of that device.
    ///
    /// # Errors
    /// `PEER_ACCESS_UNSUPPORTED` and `PEER_ACCESS_ALREADY_ENABLED`.
    pub(crate) fn enable_peer(&self, device: usize) -> Outcome {
        if device == self.device {
            return Err(Status::INVALID_DEVICE);
        }
        if !settings().peer_access.lets(self.device, device) {
            return Err(Status::PEER_ACCESS_UNSUPPORTED);
        }
        if self.peers.lock().insert(device) {
            Ok(())
        } else {
            Err(Status::PEER_ACCESS_ALREADY_ENABLED)
        }
    }

    pub(crate) fn disable_peer(&self, device: usize) -> Outcome {
        if self.peers.lock().remove(&device) {
            Ok(())
        } else {
            Err(Status::PEER_ACCESS_NOT_ENABLED)
        }
    }

    fn destroy(self: &Arc<Self>) {
        let _ = self.synchronize();
        self.destroyed.store(true, Ordering::Release);
        crate::stream::forget(self);
        crate::event::forget(self);
        crate::module::forget(self);
        memory::forget(self);
    }
}

/// The devices this process sees: `CUDA_VISIBLE_DEVICES` picks among those there are, as far as its first number that
/// is none.
pub(crate) fn visible_devices() -> &'static [usize] {
    static VISIBLE: OnceLock<Vec<usize>> = OnceLock::new();
    VISIBLE.get_or_init(|| {
        let there = settings().devices;
        match std::env::var("CUDA_VISIBLE_DEVICES") {
            Err(_) => (0..there).collect(),
            Ok(list) => list
                .split(',')
                .map_while(|item| item.trim().parse().ok().filter(|&device| device < there))
                .collect(),
        }
    })
}

/// The index of a device.
///
/// # Errors
/// `INVALID_DEVICE`.
pub(crate) fn index_of(device: Device) -> Outcome<usize> {
    usize::try_from(device)
        .ok()
        .filter(|&index| index < visible_devices().len())
        .ok_or(Status::INVALID_DEVICE)
}

fn primary<T>(device: usize, act: impl FnOnce(&mut Primary) -> T) -> T {
    let mut primaries = PRIMARIES.lock();
    if primaries.len() <= device {
        primaries.resize_with(device + 1, Primary::default);
    }
    act(&mut primaries[device])
}

/// Retains the primary context of a device, making it if need be.
pub(crate) fn retain(device: usize) -> Arc<Context> {
    RETAINED.fetch_add(1, Ordering::Relaxed);
    primary(device, |primary| {
        primary.retained += 1;
        primary
            .context
            .get_or_insert_with(|| CONTEXTS.insert(|handle| Context::new(handle, device, true)))
            .clone()
    })
}

/// Releases the primary context once; the last time it is destroyed.
///
/// # Errors
/// `INVALID_CONTEXT` when it was not retained.
pub(crate) fn release(device: usize) -> Outcome {
    let last = primary(device, |primary| {
        primary.retained = primary
            .retained
            .checked_sub(1)
            .ok_or(Status::INVALID_CONTEXT)?;
        RETAINED.fetch_sub(1, Ordering::Relaxed);
        let last = primary.retained == 0;
        Ok(last.then(|| primary.context.take()).flatten())
    })?;
    if let Some(context) = last {
        context.destroy();
        let _ = CONTEXTS.remove(context.handle);
    }
    Ok(())
}

/// Makes a context beside the primary one.
pub(crate) fn create(device: usize) -> Arc<Context> {
    CONTEXTS.insert(|handle| Context::new(handle, device, false))
}

/// Destroys a context that was made by [`create`], which is not current in this thread any more.
///
/// # Errors
/// `INVALID_CONTEXT` when it was not.
pub(crate) fn destroy(handle: Handle) -> Outcome {
    let context = get(handle)?;
    if context.is_primary {
        return Err(Status::INVALID_CONTEXT);
    }
    if top().is_some_and(|current| current.handle == handle) {
        pop()?;
    }
    context.destroy();
    let _ = CONTEXTS.remove(handle);
    Ok(())
}

/// Whether the primary context of a device exists.
pub(crate) fn is_active(device: usize) -> bool {
    primary(device, |primary| primary.context.is_some())
}

/// How often primary contexts are retained and not released, all devices together, and the others that there are.
pub(crate) fn kept() -> usize {
    let others = all().iter().filter(|context| !context.is_primary).count();
    RETAINED.load(Ordering::Relaxed) + others
}

/// The contexts there are.
pub(crate) fn all() -> Vec<Arc<Context>> {
    CONTEXTS.all()
}

/// The context with this handle.
///
/// # Errors
/// `INVALID_CONTEXT`.
pub(crate) fn get(handle: Handle) -> Outcome<Arc<Context>> {
    CONTEXTS.get(handle).map_err(|_| Status::INVALID_CONTEXT)
}

/// The context current in this thread.
///
/// # Errors
/// `INVALID_CONTEXT` when none is; what has broken the context.
pub(crate) fn current() -> Outcome<Arc<Context>> {
    let current = top().ok_or(Status::INVALID_CONTEXT)?;
    current.check()?;
    Ok(current)
}

/// The context current in this thread, broken or not.
pub(crate) fn top() -> Option<Arc<Context>> {
    CURRENT.with_borrow(|stack| stack.last().cloned())
}

pub(crate) fn push(context: Arc<Context>) {
    CURRENT.with_borrow_mut(|stack| stack.push(context));
}

/// # Errors
/// `INVALID_CONTEXT` when there is none.
pub(crate) fn pop() -> Outcome<Arc<Context>> {
    CURRENT
        .with_borrow_mut(Vec::pop)
        .ok_or(Status::INVALID_CONTEXT)
}

/// Replaces the current context; `None` leaves the one below current.
pub(crate) fn set(context: Option<Arc<Context>>) {
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        stack.extend(context);
    });
}
