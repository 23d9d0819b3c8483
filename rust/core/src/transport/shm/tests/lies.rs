//! Peers whose slots and loans no member would write: an error that says so, and no panic.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const HEADER: [u8; MESSAGE_HEADER] = [1; MESSAGE_HEADER];
const TAKEN: usize = 4 * 128;
const RETURNED: usize = 5 * 128;

fn stamp(number: u64, lent: bool, length: u64) -> u64 {
    number << 14 | u64::from(lent) << 13 | length
}

fn untrusted<T>(result: Result<T>) {
    let error = result.err().expect("a lie was believed");
    assert_eq!(error.code, Code::Untrusted, "{error}");
}

#[test]
fn impossible_stamps_are_errors() {
    let lies = [
        (stamp(2, false, 40), 0),
        (stamp(17, false, 40), 0),
        (u64::MAX, 0),
        (stamp(1, false, slots::ROOM as u64 + 1), 0),
        (stamp(1, true, 8191), 0),
        // After bytes that are not there.
        (stamp(1, false, 40), 1),
        (stamp(1, false, 40), u64::MAX),
    ];
    for (stamp, after) in lies {
        let (mut link, segment, _theirs) = exposed(4096);
        let at = Segment::slot_at(1, 0);
        segment.scribble(at + 8, after);
        segment.scribble(at, stamp);
        assert!(link.arm(Interest {
            readable: true,
            writable: false
        }));
        link.disarm();
        untrusted(link.try_take(&mut |_| panic!("took {stamp:#x} after {after}")));
    }
}

#[test]
fn a_message_before_bytes_that_were_read_is_an_error() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    assert_eq!(a.try_send(&[0; 10]).unwrap(), 10);
    assert_eq!(b.try_recv(&mut [0; 10]).unwrap(), 10);
    a.poster.post((9, false), (&HEADER, &[]), || {}).unwrap();
    untrusted(b.try_take(&mut |_| panic!("taken")));
}

#[test]
fn impossible_counts_are_errors() {
    for taken in [17, u64::MAX, 1 << 40] {
        let (mut link, segment, _theirs) = exposed(4096);
        for _ in 0..16 {
            assert!(link.try_post(&HEADER, &[]).unwrap());
        }
        assert!(!link.try_post(&HEADER, &[]).unwrap());
        segment.scribble(Segment::words_at(0).start + TAKEN, taken);
        untrusted(link.try_post(&HEADER, &[]));
        untrusted(link.try_lend(&HEADER, &[(4096, 1 << 20)], Terms::Loan));
    }
    // The second is out of reach, one is that was not lent, more are back than were.
    let memory = vec![0_u8; 1 << 20];
    let run = (memory.as_ptr().expose_provenance(), memory.len());
    for returned in [3, 5, 6, u64::MAX] {
        let (mut link, segment, _theirs) = exposed(4096);
        link.lend_private_from(1);
        let mut tickets = Vec::new();
        for word in [2, 4] {
            let Lending::Lent(ticket) = link.try_lend(&HEADER, &[run], Terms::Loan).unwrap() else {
                panic!("not lent");
            };
            tickets.push(ticket);
            assert_eq!(link.loan(ticket).unwrap(), Loan::Out);
            segment.scribble(Segment::words_at(0).start + RETURNED, word);
            assert_eq!(link.loan(ticket).unwrap(), Loan::Returned);
        }
        assert!(!tickets[0].proven && tickets[1].proven);
        segment.scribble(Segment::words_at(0).start + RETURNED, returned);
        let told: Vec<_> = tickets.iter().map(|&ticket| link.loan(ticket)).collect();
        match returned {
            // It is copied to where the peer can read it, if it asks for that segment.
            3 => assert_eq!(told[1].as_ref().unwrap(), &Loan::Out),
            _ => told.into_iter().for_each(untrusted),
        }
    }
}

#[test]
fn what_lies_in_the_heap_is_not_out_of_reach() {
    let (mut link, segment, _theirs) = exposed(4096);
    let Lending::Lent(ticket) = link.post_loan(&HEADER, &[], false).unwrap() else {
        panic!("not lent");
    };
    segment.scribble(Segment::words_at(0).start + RETURNED, 1);
    untrusted(link.loan(ticket));
}

#[test]
fn messages_in_the_middle_of_a_loan_are_errors() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    a.lend_private_from(1);
    let payload = [7_u8; 100];
    let run = (payload.as_ptr().expose_provenance(), 100);
    assert!(matches!(
        a.try_lend(&HEADER, &[run], Terms::Loan).unwrap(),
        Lending::Lent(_)
    ));
    assert!(b.try_take(&mut |_| {}).unwrap());
    assert_eq!(b.try_recv(&mut [0; 60]).unwrap(), 60);
    assert!(a.try_post(&HEADER, &[]).unwrap());
    untrusted(b.try_take(&mut |_| panic!("taken")));
}

/// The ends of a link; a loan with that description has been announced to the second.
fn announce(description: &[u8]) -> Result<(ShmLink, ShmLink)> {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    a.poster
        .post((0, true), (&HEADER, description), || {})
        .unwrap();
    let mut heads = 0;
    b.try_take(&mut |header| {
        assert_eq!(header, HEADER);
        heads += 1;
    })?;
    assert_eq!(heads, 1);
    Ok((a, b))
}

/// Reads such a loan as far as it goes.
fn read_loan(description: &[u8], align: usize) -> Result<usize> {
    let (_a, mut b) = announce(description)?;
    let mut total = 0;
    for _ in 0..4 {
        let mut lent = 0;
        let count = b.try_fold(48 * align, align, &mut |run| lent += run.len())?;
        assert_eq!(lent, count);
        total += count;
        total += b.try_recv(&mut [0; 100])?;
    }
    Ok(total)
}

fn words(runs: &[[u64; 3]]) -> Vec<u8> {
    let words = runs.iter().flatten();
    words.flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn descriptions_that_no_member_writes_are_errors() {
    let memory = [5_u8; 64];
    let at = memory.as_ptr().expose_provenance() as u64;
    assert_eq!(read_loan(&words(&[[0, at, 64]]), 4).unwrap(), 64);
    let lies = [
        vec![],
        vec![0; 23],
        [words(&[[0, at, 64]]), vec![0]].concat(),
        words(&[[0, at, 0]]),
        words(&[[0, at, 64], [0, at, 0]]),
        words(&[[0, u64::MAX, 1]]),
        words(&[[0, 1, u64::MAX]]),
        // Shared memory is the heap's; beyond that bit there is nothing.
        words(&[[1 << 32, at, 64]]),
        words(&[[2 << 32 | 1, 0, 64]]),
    ];
    for lie in lies {
        untrusted(announce(&lie));
    }
    // A segment that was not announced, and half an element.
    for lie in [words(&[[1, 0, 64]]), words(&[[0, at, 6], [0, at, 2]])] {
        untrusted(read_loan(&lie, 4));
    }
    let (_a, mut b) = announce(&words(&[[1 << 32 | 1, 0, 64]])).unwrap();
    untrusted(b.shared());
    // Memory that cannot be read is refused.
    assert_eq!(read_loan(&words(&[[0, 4096, 64]]), 4).unwrap(), 0);
    assert_eq!(read_loan(&words(&[[0, u64::MAX - 64, 64]]), 4).unwrap(), 0);
}

/// Words near the limits, and any.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        0_u64..40,
        (0_u64..40).prop_map(|word| word << 13 | 40),
        (0_u64..40).prop_map(|word| word << 13 | 1 << 12 | 64),
        (0_u64..40).prop_map(|word| u64::MAX - word),
        any::<u64>(),
    ]
}

proptest! {
    #[test]
    fn any_description_is_read_or_refused(
        runs in vec((prop_oneof![Just(0), word()], word(), word()), 0..22),
        align in prop_oneof![Just(1_usize), Just(4), Just(16)],
        cut in 0_usize..24,
    ) {
        let runs: Vec<_> = runs.into_iter().map(|(segment, at, bytes)| [segment, at, bytes]).collect();
        let mut description = words(&runs);
        description.truncate(description.len().saturating_sub(cut.saturating_sub(20)));
        if let Err(error) = read_loan(&description, align) {
            prop_assert_eq!(error.code, Code::Untrusted);
        }
    }

    /// A peer that writes anywhere in what is shared, at any time.
    #[test]
    fn whatever_the_words_say_nothing_panics(
        scribbles in vec((0_usize..4, 0_usize..112, word(), 0_u8..8), 1..60)
    ) {
        let (mut link, segment, _theirs) = exposed(4096);
        link.lend_private_from(1);
        let payload = vec![3_u8; 4096];
        let run = (payload.as_ptr().expose_provenance(), payload.len());
        let mut tickets = Vec::new();
        for (place, offset, word, call) in scribbles {
            let at = match place {
                0 | 1 => Segment::words_at(place).start + offset / 16 * 128,
                _ => Segment::slot_at(place - 2, offset % 4) + offset / 16 * 8,
            };
            segment.scribble(at, word);
            let result = match call {
                0 => link.try_post(&HEADER, &[1; 20]).map(drop),
                1 => link.try_lend(&HEADER, &[run], Terms::Loan).map(|lending| {
                    if let Lending::Lent(ticket) = lending {
                        tickets.push(ticket);
                    }
                }),
                2 => link.try_take(&mut |_| {}).map(drop),
                3 => link.is_streaming().map(drop),
                4 => link.try_recv(&mut [0; 300]).map(drop),
                5 => link.try_fold(320, 16, &mut |_| {}).map(drop),
                6 => tickets.iter().try_for_each(|&ticket| link.loan(ticket).map(drop)),
                _ => {
                    let both = Interest { readable: true, writable: true };
                    link.arm(both);
                    link.disarm();
                    link.try_send(&[0; 100]).map(drop)
                }
            };
            if let Err(error) = result {
                prop_assert_eq!(error.code, Code::Untrusted);
                break;
            }
            // A sender waits for the end of a trial.
            if tickets.last().is_some_and(|ticket| !ticket.proven)
                && link.loan(tickets[tickets.len() - 1]).map_or(true, |loan| loan == Loan::Out)
            {
                break;
            }
        }
    }
}
