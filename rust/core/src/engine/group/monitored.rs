//! A barrier at which rank 0 learns who is missing.

use std::time::{Duration, Instant};

use crate::buffer::Memory;
use crate::engine::state::Group;
use crate::engine::work::PointToPoint;
use crate::error::{Code, Error, Result};
use crate::types::DataType;

/// The tag of monitored barriers, out of the range of users' tags.
const BARRIER_TAG: u64 = u64::MAX;

impl Group {
    /// A barrier at which rank 0 learns who is missing.
    pub(crate) fn monitored_barrier(&self, timeout: Duration, report_all: bool) -> Result<()> {
        let started = Instant::now();
        let left = || timeout.saturating_sub(started.elapsed());
        // The operations outlive the deadline by a little, so that rank 0's report comes first.
        let options = || PointToPoint {
            timeout: Some(
                timeout
                    .saturating_mul(2)
                    .saturating_add(Duration::from_secs(1)),
            ),
            ..PointToPoint::default()
        };
        let signal = |to| {
            self.send(
                DataType::UInt8,
                Memory::empty(),
                (to, BARRIER_TAG),
                options(),
            )
        };
        let await_signal = |from| {
            let place = (Some(from), BARRIER_TAG);
            self.receive(DataType::UInt8, Memory::empty(), place, options())
        };
        if self.rank != 0 {
            signal(0)?;
            return self.wait(&*await_signal(0)?, None);
        }
        let waits = (1..self.world)
            .map(|rank| Ok((rank, await_signal(rank)?)))
            .collect::<Result<Vec<_>>>()?;
        let mut missing = Vec::new();
        for (rank, work) in waits {
            match self.wait(&work, Some(left())) {
                Ok(()) => {}
                Err(error) if error.code == Code::Timeout && self.error().is_none() => {
                    missing.push(rank);
                    if !report_all {
                        break;
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if missing.is_empty() {
            for rank in 1..self.world {
                signal(rank)?;
            }
            return Ok(());
        }
        let names: Vec<String> = missing.iter().map(|rank| self.name_of(*rank)).collect();
        let error = Error::new(
            Code::Timeout,
            format!(
                "monitored_barrier: not every rank came within {} ms; missing: {}",
                timeout.as_millis(),
                names.join(", ")
            ),
        )
        .with_peer(missing[0]);
        self.fail(&mut self.core.lock(), error.clone());
        Err(error)
    }
}
