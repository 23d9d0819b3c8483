//! Several threads at a long payload, each at one stripe.

use rustix::io::Errno;

use super::Connection;
use crate::locks::Mutex;
use crate::reduce::Workers;

/// The number of bytes from which on it pays to wake other threads.
pub(super) const WAKES_THREADS_FROM: usize = 256 << 10;

/// A payload in blocks: each stripe takes the next block when it has sent the one before.
#[derive(Debug)]
pub(super) struct Deal<'a> {
    pub(super) bytes: &'a [u8],
    /// Bytes of a block.
    pub(super) block: usize,
    /// The stripes that take blocks, and how many bytes each takes at most.
    pub(super) takers: &'a [usize],
    pub(super) most: usize,
    pub(super) taken: Mutex<Taken>,
}

/// The blocks that the stripes have taken.
#[derive(Debug, Default)]
pub(super) struct Taken {
    bytes: usize,
    /// For each block, in the order of the payload: its stripe, its length, and the number of its bytes that are sent.
    pub(super) blocks: Vec<(usize, usize, usize)>,
}

impl Deal<'_> {
    /// The next block, for `stripe`, and its number; nothing of it is sent yet.
    fn take(&self, stripe: usize) -> Option<(usize, &[u8])> {
        let mut taken = self.taken.lock();
        let block = &self.bytes[taken.bytes..self.bytes.len().min(taken.bytes + self.block)];
        if block.is_empty() {
            return None;
        }
        taken.bytes += block.len();
        taken.blocks.push((stripe, block.len(), 0));
        Some((taken.blocks.len() - 1, block))
    }

    /// The stripe sends as much as goes now of `waiting`, and then of blocks that it takes. Returns the number of bytes of
    /// `waiting` that went.
    fn send(
        &self,
        (number, stripe): (usize, &mut Connection),
        waiting: &[u8],
    ) -> Result<usize, Errno> {
        let sent = send(stripe, waiting)?;
        let mut own = 0;
        while sent == waiting.len()
            && own < self.most
            && self.takers.contains(&number)
            && let Some((place, block)) = self.take(number)
        {
            let count = send(stripe, block)?;
            self.taken.lock().blocks[place].2 = count;
            own += block.len();
            if count < block.len() {
                break;
            }
        }
        Ok(sent)
    }
}

/// Sends as much of `bytes` as goes now, which may be nothing.
fn send(stripe: &mut Connection, bytes: &[u8]) -> Result<usize, Errno> {
    match bytes {
        [] => Ok(0),
        _ => match stripe.send(bytes) {
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            sent => sent,
        },
    }
}

/// Each stripe sends as much as goes now of its bytes in `waiting`, and then of blocks that it takes. Returns for each how many
/// of its bytes in `waiting` went.
///
/// # Errors
/// When a stripe is broken.
pub(super) fn send_all(
    workers: &Workers,
    stripes: &mut [Connection],
    waiting: Vec<&[u8]>,
    deal: &Deal,
) -> Result<Vec<usize>, Errno> {
    let mut outcomes = vec![Ok(0); stripes.len()];
    let all = stripes.iter_mut().enumerate().zip(waiting);
    let work = all.zip(&mut outcomes).collect();
    workers.share(work, |((stripe, waiting), outcome)| {
        *outcome = deal.send(stripe, waiting);
    });
    outcomes.into_iter().collect()
}

/// Each of the stripes receives its parts, one after the other. All that is asked of a stripe has arrived there.
///
/// # Errors
/// When a stripe is broken.
pub(super) fn receive(
    workers: &Workers,
    work: Vec<(&mut Connection, Vec<&mut [u8]>)>,
) -> Result<(), Errno> {
    let mut outcomes = vec![Ok(()); work.len()];
    let work = work.into_iter().zip(&mut outcomes).collect();
    workers.share(work, |((stripe, parts), outcome)| {
        *outcome = parts
            .into_iter()
            .try_for_each(|part| stripe.receive_all(part));
    });
    outcomes.into_iter().collect()
}
