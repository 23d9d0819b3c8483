//! Tests that every transport passes: functions over a constructor of two connected ends, and a macro that makes tests of them.
//! The constructor takes the capacity that the link should have in each direction; a transport whose capacity is the kernel's
//! business comes as near as it can.

mod ends;
mod messages;
mod streams;
mod tools;

use std::ptr;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use super::{Interest, Link, Page, PeerState, local, tcp};

pub(super) use self::ends::{
    a_farewell_leaves_earlier_bytes, a_loss_leaves_earlier_bytes,
    a_position_wakes_a_sleeper_and_is_told_once, an_abort_outranks_all_and_leaves_earlier_bytes,
    an_abort_wakes_a_sleeper, end_of, the_end_of_the_peer_wakes_a_sleeper,
};
pub(super) use self::messages::{
    messages_of_every_kind_arrive_in_order, sleepers_are_woken_by_messages_of_every_kind, talk,
};
pub(super) use self::streams::{
    a_full_link_takes_nothing_and_resumes, a_hundred_megabytes_arrive, a_part_of_an_element_waits,
    folds_lend_whole_elements_in_order, headers_and_payloads_go_together,
    random_sizes_cross_both_ways_at_once, sleepers_are_woken_for_every_message,
    sleepers_cross_both_ways_at_once,
};
pub(super) use self::tools::{Random, Sleeper, drop_in_child, pattern};
use self::tools::{both, exchange};

/// Two connected ends.
pub(crate) type Pair = (Box<dyn Link>, Box<dyn Link>);

/// Makes two connected ends.
pub(crate) type Make = fn(usize) -> Pair;

/// The constructors of all transports, for tests of what stands above them.
pub(crate) const PAIRS: [(&str, Make); 4] = [
    ("shared memory", |capacity| {
        let (a, b) = local::pair(capacity).unwrap();
        (Box::new(a), Box::new(b))
    }),
    ("TCP", tcp::link::tests::make),
    ("encrypted TCP", tcp::link::tests::make_sealed),
    ("TCP with stripes", tcp::link::tests::make_striped),
];

/// After this a test has failed, not merely been slow.
const PATIENCE: Duration = Duration::from_secs(600);

/// One test for every function of the suite, over `$make: fn(usize) -> Pair`.
macro_rules! conformance {
    ($make:path) => {
        $crate::transport::suite::conformance!($make:
            empty_calls_do_nothing
            random_sizes_cross_both_ways_at_once
            sleepers_cross_both_ways_at_once
            headers_and_payloads_go_together
            a_full_link_takes_nothing_and_resumes
            folds_lend_whole_elements_in_order
            a_part_of_an_element_waits
            sleepers_are_woken_for_every_message
            a_farewell_leaves_earlier_bytes
            a_loss_leaves_earlier_bytes
            an_abort_outranks_all_and_leaves_earlier_bytes
            the_end_of_the_peer_wakes_a_sleeper
            an_abort_wakes_a_sleeper
            a_position_wakes_a_sleeper_and_is_told_once
            a_hundred_megabytes_arrive
            messages_of_every_kind_arrive_in_order
            sleepers_are_woken_by_messages_of_every_kind
            a_page_is_shared_and_left_alone
        );
    };
    ($make:path: $($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                $crate::transport::suite::$name($make);
            }
        )*
    };
}
pub(super) use conformance;

pub(super) const READABLE: Interest = Interest {
    readable: true,
    writable: false,
};
pub(super) const WRITABLE: Interest = Interest {
    readable: false,
    writable: true,
};

pub(super) fn empty_calls_do_nothing(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    assert_eq!(a.try_send(&[]).unwrap(), 0);
    assert_eq!(b.try_recv(&mut []).unwrap(), 0);
    assert_eq!(b.try_recv(&mut [0; 10]).unwrap(), 0);
    let mut lent = |_: &[u8]| panic!("nothing was sent");
    assert_eq!(b.try_fold(0, 4, &mut lent).unwrap(), 0);
    assert_eq!(b.try_fold(64, 4, &mut lent).unwrap(), 0);
    for link in [&mut a, &mut b] {
        assert!(!link.arm(Interest::default()));
        link.disarm();
        assert!(!link.arm(READABLE));
        link.disarm();
        assert!(link.arm(WRITABLE));
        link.disarm();
        assert_eq!(link.peer_state(), PeerState::Present);
        assert!(!link.describe().is_empty());
    }
}

/// Of a transport that has one.
pub(super) fn a_page_is_shared_and_left_alone(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    let pages = (a.neighbour(), b.neighbour());
    let (Some(near), Some(far)) = pages else {
        assert!(
            pages.0.is_none() && pages.1.is_none(),
            "one side alone is on this host"
        );
        return;
    };
    let (mine, theirs) = (near.page(), far.page());
    assert!(ptr::eq(near.page().words(), mine.words()));
    for page in [&mine, &theirs] {
        assert!(page.words().as_ptr().addr().is_multiple_of(Page::BYTES));
        assert!(
            page.words()
                .iter()
                .all(|word| word.load(Ordering::Relaxed) == 0)
        );
    }
    let value = |at: usize| 0x5eed_0000 + at as u32;
    for (at, word) in mine.words().iter().enumerate() {
        word.store(value(at), Ordering::Relaxed);
    }
    // Traffic that fills every part of the link does not touch it, and it outlives the link.
    both((a, b), |link, seed| {
        exchange(link, seed, 100_000, &mut |_, _| thread::yield_now());
        talk(link, seed, 40, &mut |_, _| thread::yield_now());
    });
    drop(mine);
    for (at, word) in theirs.words().iter().enumerate() {
        assert_eq!(word.load(Ordering::Relaxed), value(at), "word {at}");
    }
}
