//! Tests of a link's end: its state when the peer leaves, is lost or aborts, and the wake-up of a sleeper.

use std::thread;
use std::time::{Duration, Instant};

use super::tools::{Sleeper, expect_bytes, patient, pattern};
use super::{Pair, READABLE};
use crate::error::Code;
use crate::transport::{Hindrance, Interest, Link, Notice, POSITION_BYTES, PeerState};

/// Longer than bytes are on their way between two sockets of this host.
const SETTLED: Duration = Duration::from_millis(100);

pub(in crate::transport) fn a_farewell_leaves_earlier_bytes(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    assert_eq!(a.try_send(&pattern(3, 0, 1000)).unwrap(), 1000);
    a.send_farewell();
    drop(a);
    assert_eq!(end_of(b.as_mut()), PeerState::Left);
    expect_bytes(b.as_mut(), 3, 0, 1000);
    assert_eq!(b.try_recv(&mut [0; 10]).unwrap(), 0);
    assert_eq!(b.peer_state(), PeerState::Left);
}

pub(in crate::transport) fn a_loss_leaves_earlier_bytes(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    assert_eq!(a.try_send(&pattern(3, 0, 1000)).unwrap(), 1000);
    drop(a);
    let lost = PeerState::Lost("connection closed".to_owned());
    assert_eq!(end_of(b.as_mut()), lost);
    expect_bytes(b.as_mut(), 3, 0, 1000);
    assert_eq!(b.try_recv(&mut [0; 10]).unwrap(), 0);
    assert_eq!(b.peer_state(), lost);
    while b.try_send(&[0; 4096]).unwrap() > 0 {}
}

pub(in crate::transport) fn an_abort_outranks_all_and_leaves_earlier_bytes(
    make: impl Fn(usize) -> Pair,
) {
    let (mut a, mut b) = make(4096);
    assert_eq!(a.try_send(&pattern(3, 0, 1000)).unwrap(), 1000);
    let notice = Notice {
        code: Code::Mismatch,
        origin: 4,
        culprit: None,
        message: "ranks 4 and 5 called different operations — so".to_owned(),
    };
    a.send_farewell();
    a.send_abort(&notice);
    b.send_abort(&notice);
    assert_eq!(end_of(a.as_mut()), PeerState::Aborted(notice.clone()));
    drop(a);
    let start = Instant::now();
    while b.peer_state() != PeerState::Aborted(notice.clone()) {
        patient(start);
    }
    expect_bytes(b.as_mut(), 3, 0, 1000);
}

pub(in crate::transport) fn the_end_of_the_peer_wakes_a_sleeper(make: impl Fn(usize) -> Pair) {
    for farewell in [true, false] {
        let (mut a, mut b) = make(4096);
        let sleeper = Sleeper::new(b.as_ref());
        let ender = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            if farewell {
                a.send_farewell();
            }
        });
        let mut state = state_of(b.as_mut());
        while state == PeerState::Present {
            sleeper.sleep(b.as_mut(), READABLE);
            state = state_of(b.as_mut());
        }
        assert_eq!(state == PeerState::Left, farewell, "{state:?}");
        ender.join().unwrap();
    }
}

pub(in crate::transport) fn an_abort_wakes_a_sleeper(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    while b.try_send(&[0; 4096]).unwrap() > 0 {}
    let sleeper = Sleeper::new(b.as_ref());
    let notice = Notice {
        code: Code::Timeout,
        origin: 0,
        culprit: Some(1),
        message: String::new(),
    };
    let expected = PeerState::Aborted(notice.clone());
    let aborter = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        a.send_abort(&notice);
        a
    });
    while b.peer_state() == PeerState::Present {
        sleeper.sleep(
            b.as_mut(),
            Interest {
                readable: true,
                writable: true,
            },
        );
    }
    assert_eq!(b.peer_state(), expected);
    drop(aborter.join().unwrap());
}

pub(in crate::transport) fn a_position_wakes_a_sleeper_and_is_told_once(
    make: impl Fn(usize) -> Pair,
) {
    let (mut a, mut b) = make(4096);
    let sleeper = Sleeper::new(b.as_ref());
    assert_eq!(b.take_position(), None);
    let teller = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        a.send_position(&[7; POSITION_BYTES]);
        a
    });
    let mut position = None;
    while position.is_none() {
        sleeper.sleep(b.as_mut(), READABLE);
        assert_eq!(b.peer_state(), PeerState::Present);
        position = b.take_position();
    }
    assert_eq!(position, Some([7; POSITION_BYTES]));
    let a = teller.join().unwrap();
    assert_eq!(b.peer_state(), PeerState::Present);
    assert_eq!(b.take_position(), None);
    drop(a);
}

/// The state of `link` once its peer is no longer present.
pub(in crate::transport) fn end_of(link: &mut dyn Link) -> PeerState {
    let start = Instant::now();
    loop {
        match state_of(link) {
            PeerState::Present => patient(start),
            state => return state,
        }
    }
}

/// The state of `link`, with the test in the place of a group that finds out that the peer of a broken connection has ended.
fn state_of(link: &mut dyn Link) -> PeerState {
    let state = link.peer_state();
    if state != PeerState::Present || !link.is_mending() {
        return state;
    }
    // A farewell may be on its way.
    thread::sleep(SETTLED);
    if link.peer_state() == PeerState::Present {
        while let Some(breach) = link.wants_mending() {
            link.cannot_mend(breach.socket, &Hindrance::Ended);
        }
    }
    link.peer_state()
}
