//! The clocks of a traced group's hosts, compared over the group's own connections when it forms.
//!
//! The first rank of each host asks rank 0 for the time, again and again. Rank 0 read its clock between the question and the
//! answer, so half of the fastest round bounds the error. The clocks of two hosts drift apart afterwards, by a few
//! microseconds in a second where neither is disciplined; `unisono trace` tells when an arrow points back in time.

use super::Communicator;
use crate::error::Result;
use crate::trace::monotonic;
use crate::types::Rank;

const LABEL: &[u8] = b"clocks of a trace";

/// How often a host asks.
const ROUNDS: usize = 30;

impl Communicator {
    /// Notes in the trace, if there is one, how this host's clock stands to that of rank 0's. All ranks of the group call it.
    ///
    /// # Errors
    /// As of any operation between these ranks.
    pub(super) fn compare_clocks(&self) -> Result<()> {
        if self.group.config.trace.is_none() {
            return Ok(());
        }
        let hosts = self.group.host_of();
        let is_first = |rank: &Rank| !hosts[..*rank].contains(&hosts[*rank]);
        let firsts: Vec<Rank> = (0..hosts.len()).filter(is_first).collect();
        if firsts.len() < 2 {
            return Ok(());
        }
        let Some(part) = self.group.part_without_trace(&firsts, LABEL)? else {
            return Ok(());
        };
        let part = Self::new(part);
        if part.rank() > 0 {
            let (offset, error) = part.ask()?;
            self.group.note_clock(offset, error);
            return Ok(());
        }
        for peer in 1..firsts.len() {
            for _ in 0..ROUNDS {
                part.receive_slice(&mut [0_u64], Some(peer), 0)?;
                part.send_slice(&[monotonic()], peer, 0)?;
            }
        }
        Ok(())
    }

    /// How much rank 0's clock stands before this one, in nanoseconds, and the error of that.
    fn ask(&self) -> Result<(i64, u64)> {
        let mut best = (0, u64::MAX);
        for _ in 0..ROUNDS {
            let (begin, mut there) = (monotonic(), [0_u64]);
            self.send_slice(&[begin], 0, 0)?;
            self.receive_slice(&mut there, Some(0), 0)?;
            let error = (monotonic() - begin).div_ceil(2);
            if error < best.1 {
                best = (there[0] as i64 - (begin + error) as i64, error);
            }
        }
        Ok(best)
    }
}
