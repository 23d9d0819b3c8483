//! Data that a peer posts in shared memory.

use std::sync::OnceLock;

use super::loans::{RUN, Run};
use super::slots::ROOM;
use super::{Link, MESSAGE_HEADER, ShmLink};
use crate::error::Code;
use crate::transport::Interest;

/// How much is asked for at a time.
const PIECE: usize = 64 << 10;

/// Memory that a description may lead to.
fn target() -> &'static [u8] {
    static TARGET: OnceLock<Vec<u8>> = OnceLock::new();
    TARGET.get_or_init(|| vec![7; 1 << 20])
}

/// A description of lent memory, as a peer posts it: refused, or read as far as there is memory. The first byte says how it is
/// read, and whether addresses are meant as offsets into memory that is there.
pub fn description(bytes: &[u8]) {
    let Some((how, description)) = bytes.split_first() else {
        return;
    };
    let mut description = description[..description.len().min(ROOM - MESSAGE_HEADER)].to_vec();
    for run in description.as_chunks_mut::<RUN>().0 {
        if let Some(read) = Run::read(run) {
            let mut written = [0; RUN];
            read.write(&mut written);
            assert_eq!(written, *run);
        }
        if how & 1 != 0 {
            let (_, at) = run.split_at_mut(8);
            let at = at.first_chunk_mut().expect("two words follow");
            let offset = u64::from_le_bytes(*at) % (2 * target().len() as u64);
            *at = (target().as_ptr().expose_provenance() as u64 + offset).to_le_bytes();
        }
    }
    let (mut near, mut far) = ShmLink::pair(1 << 12, "fuzzed memory").expect("descriptors");
    let message = (&[1; MESSAGE_HEADER][..], &description[..]);
    assert!(
        near.poster
            .post((0, true), message, || {})
            .expect("it is empty")
    );
    let mut outcome = far.try_take(&mut |header| assert_eq!(header.len(), MESSAGE_HEADER));
    let mut into = vec![0; PIECE];
    for turn in 0..8 {
        if outcome.is_err() || !far.borrower.is_reading() {
            break;
        }
        let align = 1 << (how >> 2 & 3);
        let read = match how & 2 {
            0 => far.try_recv(&mut into[..16 << (4 * (turn % 4))]),
            _ => far.try_fold(PIECE, align, &mut |run| {
                assert!(run.len().is_multiple_of(align));
            }),
        };
        outcome = read.map(|_| true);
    }
    match outcome {
        Ok(taken) => assert!(taken),
        Err(error) => assert_eq!(error.code, Code::Untrusted, "{error}"),
    }
    far.arm(Interest {
        readable: true,
        writable: true,
    });
    far.disarm();
}

/// Descriptions of one run and of several, read in each way.
#[cfg(test)]
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    let run = |segment, at, bytes| Run {
        segment,
        at,
        bytes,
        shared: false,
    };
    let alone = [run(0, 16, 1000)];
    let several = [run(0, 0, 64), run(0, 4096, 300_000), run(0, 8, 8)];
    let heap = [run(1, 0, 4096), run(0, 0, 4096)];
    let mut seeds = Vec::new();
    for (name, runs) in [("one", &alone[..]), ("several", &several), ("heap", &heap)] {
        for how in [1_u8, 1 | 2 | 2 << 2] {
            let mut bytes = vec![how];
            for run in runs {
                let mut written = [0; RUN];
                run.write(&mut written);
                bytes.extend(written);
            }
            seeds.push((format!("{name}-{how}"), bytes));
        }
    }
    seeds
}
