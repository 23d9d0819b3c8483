//! Whatever is written is read again, and nothing else is.

use proptest::prelude::*;

use super::*;
use crate::error::ForeignText;
use crate::plan::cost::Costs;

const OPEN: Seal<'static> = Seal {
    version: "1.2.3",
    key: None,
};
const CLOSED: Seal<'static> = Seal {
    version: "1.2.3",
    key: Some([3; 32]),
};

/// Any, as one that is read is shown.
fn text() -> impl Strategy<Value = String> {
    ".{0,40}".prop_map(|text| ForeignText::read(text.as_bytes()).expect("a text").into())
}

/// A store may hold what anybody has put there, and errors show it.
#[test]
fn what_a_store_says_does_not_command_a_terminal() {
    let mut error = Error::new(Code::Mismatch, "\u{1b}[2J\r\nall is well");
    error.peer = Some(1);
    let bytes = OPEN.write_verdict(&Verdict::Failure(error));
    let Ok(Verdict::Failure(seen)) = OPEN.read_verdict(&bytes) else {
        panic!("it can be read");
    };
    assert!(!seen.message.contains(char::is_control), "{seen:?}");
    assert!(seen.message.ends_with("all is well"));
}

prop_compose! {
    fn row()(
        key in any::<PublicKey>(),
        attempt in any::<Uuid>(),
        pid in any::<u32>(),
        node in any::<Option<u16>>(),
        is_new in any::<bool>(),
        host in text(),
        hostname in text(),
        address in prop::collection::vec(any::<u8>(), 0..100),
    ) -> Row {
        let node = node.filter(|node| *node != NO_NODE);
        Row { key, attempt, pid, node, is_new, host, hostname, address }
    }
}

prop_compose! {
    fn entry()(
        rank in any::<u32>(),
        world in any::<u32>(),
        process in any::<Uuid>(),
        row in row(),
        settings in prop::collection::vec((text(), text()), 0..5),
    ) -> Entry {
        Entry { rank, world, process, row, settings }
    }
}

fn costs() -> impl Strategy<Value = Rounded> {
    (any::<[f64; 4]>(), any::<usize>()).prop_map(|([turn, copy, fold, far], cores)| {
        Costs {
            turn,
            copy,
            fold,
            remote_latency: far,
            ..Costs::TYPICAL
        }
        .rounded(cores)
    })
}

fn verdict() -> impl Strategy<Value = Verdict> {
    let failure = (0..Code::ALL.len(), prop::option::of(0..1000_usize), text());
    prop_oneof![
        (
            costs(),
            any::<u32>(),
            prop::collection::vec(any::<Digest>(), 0..6)
        )
            .prop_map(|(costs, world, pages)| Verdict::Table(Table {
                costs,
                world,
                pages
            })),
        failure.prop_map(|(code, peer, message)| {
            let mut error = Error::new(Code::ALL[code], message);
            error.peer = peer;
            Verdict::Failure(error)
        }),
    ]
}

proptest! {
    #[test]
    fn records_come_back(
        entry in entry(),
        verdict in verdict(),
        rows in prop::collection::vec(row(), 0..6),
        most in 0..1000_usize,
    ) {
        for seal in [OPEN, CLOSED] {
            prop_assert_eq!(&seal.read_entry(&seal.write_entry(&entry)), &Ok(entry.clone()));
            prop_assert_eq!(&seal.read_verdict(&seal.write_verdict(&verdict)), &Ok(verdict.clone()));
            let mut read = Vec::new();
            for (named, page) in seal.write_pages(&rows, most) {
                read.extend(seal.read_page(&page, &named).expect("it was written here"));
            }
            prop_assert_eq!(&read, &rows);
        }
    }

    #[test]
    fn what_is_cut_or_longer_is_refused(
        entry in entry(),
        verdict in verdict(),
        cut in any::<prop::sample::Index>(),
        more in any::<u8>(),
    ) {
        for seal in [OPEN, CLOSED] {
            let mut bytes = seal.write_entry(&entry);
            prop_assert!(seal.read_entry(&bytes[..cut.index(bytes.len())]).is_err());
            prop_assert!(seal.read_verdict(&bytes).is_err());
            bytes.push(more);
            prop_assert!(seal.read_entry(&bytes).is_err());
            let mut bytes = seal.write_verdict(&verdict);
            prop_assert!(seal.read_verdict(&bytes[..cut.index(bytes.len())]).is_err());
            bytes.push(more);
            prop_assert!(seal.read_verdict(&bytes).is_err());
        }
    }

    #[test]
    fn a_page_that_is_cut_or_longer_or_changed_is_refused(
        rows in prop::collection::vec(row(), 1..6),
        at in any::<prop::sample::Index>(),
        flip in 1..=255_u8,
    ) {
        for seal in [OPEN, CLOSED] {
            let (named, page) = seal.write_pages(&rows, usize::MAX).remove(0);
            let at = at.index(page.len());
            let mut changed = page.clone();
            changed[at] ^= flip;
            for strange in [&page[..at], &[&page[..], &[flip]].concat(), &changed] {
                prop_assert!(seal.read_page(strange, &named).is_err());
            }
            prop_assert!(seal.read_any_page(&page[..at]).is_err());
        }
    }

    #[test]
    fn with_a_secret_no_changed_byte_is_believed(
        entry in entry(),
        at in any::<prop::sample::Index>(),
        flip in 1..=255_u8,
    ) {
        let mut bytes = CLOSED.write_entry(&entry);
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        prop_assert!(CLOSED.read_entry(&bytes).is_err());
    }

    #[test]
    fn no_bytes_panic(content in prop::collection::vec(any::<u8>(), 0..300), begun in any::<bool>()) {
        for magic in [ENTRY, VERDICT, PAGE_MAGIC] {
            let mut bytes = if begun { OPEN.begin(magic) } else { Vec::new() };
            bytes.extend(&content);
            for seal in [OPEN, CLOSED] {
                let _ = seal.read_entry(&bytes);
                let _ = seal.read_verdict(&bytes);
                let _ = seal.read_any_page(&bytes);
            }
        }
    }
}

#[test]
fn differences_of_version_and_secret_are_told_apart() {
    let failure = Verdict::Failure(Error::invalid("why"));
    let newer = Seal {
        version: "1.3.0",
        ..OPEN
    };
    let other = Seal {
        key: Some([4; 32]),
        ..OPEN
    };
    let read = |by: Seal<'_>, from: Seal<'_>| by.read_verdict(&from.write_verdict(&failure));
    assert_eq!(read(OPEN, newer), Err(Refused::Version("1.3.0".to_owned())));
    assert_eq!(read(OPEN, CLOSED), Err(Refused::SecretUse(true)));
    assert_eq!(read(CLOSED, OPEN), Err(Refused::SecretUse(false)));
    assert_eq!(read(CLOSED, other), Err(Refused::SecretDiffers));
}

#[test]
fn impossible_costs_are_refused() {
    let table = |costs: [u8; Rounded::LENGTH]| {
        let mut bytes = OPEN.begin(VERDICT);
        bytes.push(0);
        bytes.extend(costs);
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(0_u16.to_le_bytes());
        OPEN.read_verdict(&bytes)
    };
    assert!(table([3, 4, 5, 6, 7, 8, 2, 0]).is_ok());
    assert!(table([3, 4, 5, 6, 7, 255, 2, 0]).is_ok());
    for hostile in [
        [200, 4, 5, 6, 7, 8, 2, 0],
        [3, 255, 5, 6, 7, 8, 2, 0],
        [3, 4, 99, 6, 7, 8, 2, 0],
        [3, 4, 5, 41, 7, 8, 2, 0],
        [3, 4, 5, 6, 65, 8, 2, 0],
        [3, 4, 5, 6, 7, 72, 2, 0],
        [3, 4, 5, 6, 7, 8, 0, 0],
    ] {
        assert_eq!(table(hostile), Err(Refused::Malformed));
    }
}

#[test]
fn hostile_counts_make_no_room() {
    let (most, one) = (u32::MAX.to_le_bytes(), 1_u32.to_le_bytes());
    let host: &[u8] = &[0; 4];
    for content in [&[&most[..]][..], &[&one, host, &most]] {
        let mut bytes = OPEN.begin(PAGE_MAGIC);
        bytes.extend(content.concat());
        assert_eq!(OPEN.read_any_page(&bytes), Err(Refused::Malformed));
    }
}

#[test]
fn a_page_has_its_hosts_once_and_is_the_one_that_was_named() {
    let row = |rank: u8| Row {
        key: [rank; 32],
        attempt: [rank; 16],
        pid: 7,
        node: None,
        is_new: true,
        host: format!("host {} with a long name", rank / 8),
        hostname: "node".to_owned(),
        address: vec![rank; 40],
    };
    let rows: Vec<_> = (0..64).map(row).collect();
    let pages = CLOSED.write_pages(&rows, 1 << 10);
    assert!(pages.len() > 1 && pages.iter().all(|(_, page)| page.len() < 1 << 11));
    let mut read = Vec::new();
    for (named, page) in &pages {
        read.extend(CLOSED.read_page(page, named).expect("a page"));
        assert_eq!(CLOSED.read_page(page, &[0; 32]), Err(Refused::Malformed));
    }
    assert_eq!(read, rows);
    let together = &OPEN.write_pages(&rows, usize::MAX)[0].1;
    // A key, an attempt, a pid, a node, a number, and the address with its length.
    let members = 64 * (32 + 16 + 4 + 2 + 4 + 2 + 40);
    assert!(together.len() < members + 8 * 40 + 40, "{}", together.len());
}
