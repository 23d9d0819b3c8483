//! How a group is closed: in good order for the other ranks, which may still read this rank's window, and without
//! blocking the caller.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::RwLockReadGuard;

use crate::error::{Code, Error, Result};
use crate::plan::signals::Peers;
use crate::transport::cuda::driver::Device;
use crate::transport::cuda::flags::{Mark, Signal, Spot};
use crate::transport::cuda::heap;
use crate::transport::cuda::window::Window;
use crate::types::Rank;

use super::attendant::{self, Found};
use super::disposal::{LONGEST_READING, LONGEST_UNMAPPING, dispose};
use super::pause::pause;
use super::staged::Staged;
use super::state::{DeviceGroup, GRACE, HERE, Way};
use super::stillness;

/// A call that puts something into a stream.
pub(super) struct Call<'a> {
    group: &'a DeviceGroup,
    _entered: RwLockReadGuard<'static, ()>,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.group.board.lock().calls -= 1;
    }
}

impl DeviceGroup {
    /// Leaves in good order; operations that are still under way fail. Resources of the driver are given back soon after.
    pub(super) fn close(&self) {
        if std::mem::replace(&mut self.board.lock().is_closing, true) {
            return;
        }
        self.settle();
        let unfinished = {
            let board = self.board.lock();
            !board.pending.is_empty() || board.calls > 0
        } || !self.messages.works().is_empty();
        if unfinished && self.failure.get().is_none() {
            let waits = self.describe();
            self.fail(Error::new(
                Code::Aborted,
                format!(
                    "{} closed its communicator while operations were under way: {waits}",
                    self.parent.own_number()
                ),
            ));
        }
        // Others may have more chunks of an operation that this rank's stream has got past.
        let since = Instant::now();
        let mut looks = 0;
        while self.has_duty() && self.failure.get().is_none() && since.elapsed() < GRACE {
            pause(&mut looks);
        }
        self.cpu.close();
        let _ = self.closed.set(Instant::now());
        attendant::hurry();
    }

    /// Whether the host has something to do for others.
    pub(super) fn has_duty(&self) -> bool {
        let way = self.way.read();
        let staged = way.as_deref().and_then(Way::staged);
        staged.is_some_and(Staged::is_busy)
    }

    /// Begins a call that puts something into a stream. The group is not taken down before the guard goes.
    ///
    /// # Errors
    /// `InvalidArgument` when it has been closed.
    pub(super) fn come_in(&self) -> Result<Call<'_>> {
        let entered = stillness::enter();
        let mut board = self.board.lock();
        if board.is_closing {
            drop(board);
            self.check_alive()?;
            return Err(Error::invalid("this communicator has been closed"));
        }
        board.calls += 1;
        Ok(Call {
            group: self,
            _entered: entered,
        })
    }

    /// Takes down what is closed, once no stream of this rank uses it.
    pub(super) fn take_down(self: &Arc<Self>, since: Instant, found: Found) -> Found {
        let is_busy = found > Found::Graphs && since.elapsed() < 2 * GRACE;
        if is_busy || self.board.lock().calls > 0 {
            return found.max(Found::Streams);
        }
        if !self.has_come_to_rest() {
            return found.max(Found::Graphs);
        }
        // Not where there are graphs: if one is replayed all the same, it must not reach memory that has another owner
        // by then.
        let is_clean = found == Found::Nothing && !self.board.lock().is_torn && !self.is_lost();
        if is_clean {
            self.words.set_clean();
        }
        let lanes = self.messages.lanes.take();
        let has_failed = self.failure.get().is_some();
        self.messages
            .depots
            .close(self.is_lost(), has_failed, lanes);
        let way = self.way.write().take();
        if let Some(way) = way {
            match Arc::try_unwrap(way) {
                Ok(way) => {
                    let has_failed = self.failure.get().is_some();
                    dispose(move || take_apart(way, has_failed, is_clean));
                }
                Err(way) => {
                    // A call that has just found it closed.
                    *self.way.write() = Some(way);
                    return Found::Streams;
                }
            }
        }
        HERE.lock()
            .retain(|(_, group)| !std::ptr::eq(group.as_ptr(), Arc::as_ptr(self)));
        Found::Gone
    }

    /// Whether no graph that was launched before can still use what the group holds. A word says when a stream is in a
    /// captured collective, but not whether it will come to one: the device must have come to the end of all that was
    /// enqueued.
    fn has_come_to_rest(&self) -> bool {
        if !self.is_captured() {
            return true;
        }
        if !self.rest.is_awaited.swap(true, Ordering::AcqRel) {
            let (device, has_come) = (self.device, Arc::clone(&self.rest.has_come));
            dispose(move || {
                await_rest(device);
                has_come.store(true, Ordering::Release);
                attendant::hurry();
            });
        }
        self.rest.has_come.load(Ordering::Acquire)
    }
}

/// Waits until a device has done all that was enqueued when this was called.
fn await_rest(device: &'static Device) {
    let since = Instant::now();
    while let Err(error) = heap::await_rest(device) {
        // Nothing is carried out any more.
        if device.lost().is_some() {
            return;
        }
        if since.elapsed() > LONGEST_READING {
            tracing::warn!("whether device {} is idle: {error}", device.number());
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Gives back what a way holds. The others may still read this rank's window, and have it mapped. `is_clean`: no stream of
/// this rank will touch anything of it.
fn take_apart(way: Way, has_failed: bool, is_clean: bool) {
    let direct = match way {
        Way::Direct(direct) => direct,
        Way::Staged(staged) if is_clean => return staged.give_back(),
        Way::Staged(_) => return,
    };
    if let Some(brief) = direct.brief.and_then(Arc::into_inner)
        && is_clean
    {
        brief.give_back();
    }
    let Some(windows) = direct.windows else {
        return;
    };
    let others = Peers::others(windows.rank(), windows.len());
    // No call has them any more.
    let all = direct.older.into_iter().chain([windows]);
    let own: Vec<Arc<Window>> = all
        .filter_map(|windows| Some(Arc::into_inner(windows)?.close_peers()))
        .collect();
    let places = direct.places.and_then(Arc::into_inner);
    let shared = places.map(|places| places.close_peers(is_clean));
    direct.flags.mark(Mark::Unmapped);
    let since = Instant::now();
    loop {
        let gone: Peers = direct.flags.marked(Mark::Unmapped).collect();
        let still: Vec<Rank> = others.iter().filter(|peer| !gone.contains(*peer)).collect();
        let is_read = (0..2).all(|half| {
            let spot = Spot { half, meeting: 0 };
            let readers = still.iter().copied();
            direct
                .flags
                .missing(Signal::Empty, spot, readers)
                .is_empty()
        });
        let limit = match is_read || has_failed {
            true => LONGEST_UNMAPPING,
            false => LONGEST_READING,
        };
        if still.is_empty() {
            let is_whole = !has_failed && direct.flags.marked(Mark::Failed).next().is_none();
            if is_clean && is_whole {
                own.iter().for_each(|window| window.set_clean());
            }
            break;
        }
        if since.elapsed() > limit {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    drop((own, shared));
}
