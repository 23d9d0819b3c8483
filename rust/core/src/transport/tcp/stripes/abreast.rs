//! Several threads at a long payload, each at one stripe.

use rustix::io::Errno;

use super::Connection;
use crate::reduce::Workers;

/// From so many bytes on it pays to wake other threads.
pub(super) const WORTH: usize = 256 << 10;

/// Each of the stripes sends as much as goes now of its parts, one after the other. Returns how many bytes that is, for each.
///
/// # Errors
/// When a stripe is broken.
pub(super) fn send(
    workers: &Workers,
    stripes: &mut [Connection],
    parts: Vec<Vec<&[u8]>>,
) -> Result<Vec<usize>, Errno> {
    let mut outcomes = vec![Ok(0); stripes.len()];
    let all = stripes.iter_mut().zip(parts).zip(&mut outcomes);
    let work = all.filter(|((_, parts), _)| !parts.is_empty()).collect();
    workers.share(work, |((stripe, parts), outcome)| {
        *outcome = send_parts(stripe, &parts);
    });
    outcomes.into_iter().collect()
}

fn send_parts(stripe: &mut Connection, parts: &[&[u8]]) -> Result<usize, Errno> {
    let mut all = 0;
    for part in parts {
        let sent = match stripe.send(part) {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(errno) => return Err(errno),
        };
        all += sent;
        if sent < part.len() {
            break;
        }
    }
    Ok(all)
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
