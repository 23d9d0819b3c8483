//! Links whose connections break at any time, as a seed has it: nothing is lost, doubled or reordered.

use socket2::SockFilter;

use super::*;
use crate::transport::suite::{Random, pattern};

/// Both ends of a link, and the test in the place of the threads that make its connections again.
struct Rig {
    ends: [TcpLink; 2],
    is_sealed: bool,
    random: Random,
    /// Connections that one end has in place of a broken one and the other has not: the end that has yet to get it.
    late: Vec<(usize, Mend)>,
    /// For each connection, the number of its last socket.
    numbers: Vec<(Part, usize, u32)>,
    breaks: usize,
}

impl Rig {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let is_sealed = random.below(2) == 1;
        let (a, b) = match random.below(3) {
            0 => striped(2, is_sealed),
            _ if is_sealed => {
                let (a, b) = links();
                let [data, control] = [(); 2].map(|()| handshake::tests::conversation());
                (
                    a.encrypted(data.0, control.0),
                    b.encrypted(data.1, control.1),
                )
            }
            _ => links(),
        };
        for link in [&a, &b] {
            let socket = SockRef::from(link.data.socket());
            socket.set_send_buffer_size(LEAST).unwrap();
            socket.set_recv_buffer_size(LEAST).unwrap();
        }
        Self {
            ends: [a, b],
            is_sealed,
            random,
            late: Vec::new(),
            numbers: Vec::new(),
            breaks: 0,
        }
    }

    /// A further socket for a connection that end `opener` has opened, for each end.
    fn replacement(&mut self, part: Part, opener: usize) -> [Mend; 2] {
        let is_it = |(other, by, _): &&mut (Part, usize, u32)| (*other, *by) == (part, opener);
        let number = match self.numbers.iter_mut().find(is_it) {
            Some((.., number)) => {
                *number += 1;
                *number
            }
            None => {
                self.numbers.push((part, opener, 1));
                1
            }
        };
        let (ours, theirs) = connection_with_room(LEAST);
        let ciphers = self.is_sealed.then(handshake::tests::conversation);
        let (near, far) = match ciphers {
            Some((near, far)) => (Some(near), Some(far)),
            None => (None, None),
        };
        let socket = SocketId { part, number };
        let ours = Mend::new(socket, true, ours, near);
        let theirs = Mend::new(socket, false, theirs, far);
        match opener {
            0 => [ours, theirs],
            _ => [theirs, ours],
        }
    }

    /// Breaks a connection, sometimes where only one end sees it, and makes it again, sometimes late at one end.
    fn break_one(&mut self) {
        let mut parts = vec![(Part::Data, 0), (Part::Control, 0)];
        for (opener, end) in self.ends.iter_mut().enumerate() {
            let stripes = end.outgoing.numbered();
            parts.extend(stripes.map(|(number, _)| (Part::Stripe(number), opener)));
        }
        let (part, opener) = parts[self.random.below(parts.len())];
        for at in 0..2 {
            if self.random.below(2) == 1 {
                self.ends[at].each(|(other, is_ours), connection| {
                    if other == part && (part == Part::Data || is_ours == (opener == at)) {
                        connection.stop("the test");
                    }
                });
            }
        }
        let mends = self.replacement(part, opener);
        for (at, mend) in mends.into_iter().enumerate() {
            match self.random.below(8) {
                0..4 => self.ends[at].mend(mend),
                4..7 => self.late.push((at, mend)),
                // It breaks before this end hears of it, and the next one takes its place.
                _ => drop(mend),
            }
        }
        self.breaks += 1;
    }

    /// Makes again all that is broken, as the group would.
    fn heal(&mut self) {
        for (at, mend) in std::mem::take(&mut self.late) {
            self.ends[at].mend(mend);
        }
        for at in 0..2 {
            assert_eq!(self.ends[at].peer_state(), PeerState::Present);
            while let Some(breach) = self.ends[at].wants_mending() {
                let opener = if breach.is_ours { at } else { 1 - at };
                let [zero, one] = self.replacement(breach.socket.part, opener);
                self.ends[0].mend(zero);
                self.ends[1].mend(one);
            }
        }
    }
}

fn carry(seed: u64, total: usize) -> usize {
    let mut rig = Rig::new(seed);
    let (mut sent, mut received) = ([0; 2], [0; 2]);
    let mut scratch = vec![0; 1 << 17];
    let start = Instant::now();
    while received != [total; 2] {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "seed {seed}: {sent:?}, {received:?}"
        );
        for at in 0..2 {
            let piece = rig.random.size(scratch.len()).min(total - sent[at]);
            let bytes = pattern(at as u64, sent[at], piece);
            sent[at] += rig.ends[at].try_send(&bytes).unwrap();
            if rig.random.below(3) > 0 {
                let piece = rig.random.size(scratch.len()).min(total - received[at]);
                let count = rig.ends[at].try_recv(&mut scratch[..piece]).unwrap();
                let expected = pattern(1 - at as u64, received[at], count);
                assert!(
                    expected == scratch[..count],
                    "seed {seed}, at {}",
                    received[at]
                );
                received[at] += count;
            }
        }
        match rig.random.below(40) {
            0 => rig.break_one(),
            1..6 => rig.heal(),
            _ => {}
        }
    }
    for end in &mut rig.ends {
        end.send_farewell();
    }
    rig.breaks
}

#[test]
fn nothing_is_lost_whatever_breaks_when() {
    let seeds = std::env::var("LINK_SEEDS").ok();
    let seeds = seeds.map_or(60, |seeds| seeds.parse().expect("a number"));
    let breaks: usize = (0..seeds).map(|seed| carry(seed, 1 << 20)).sum();
    assert!(breaks > seeds as usize, "{breaks} breaks");
}

/// Both ends get a further socket for a connection that the first has opened.
fn make_again(a: &mut TcpLink, b: &mut TcpLink, part: Part) {
    let (ours, theirs) = connection();
    let socket = SocketId { part, number: 1 };
    a.mend(Mend::new(socket, true, ours, None));
    b.mend(Mend::new(socket, false, theirs, None));
}

#[test]
fn a_peer_that_lacks_what_is_not_kept_ends_the_link() {
    let (mut a, mut b) = links();
    // Acknowledged by the system, and never read.
    while a.try_send(&[7; 100_000]).unwrap() > 0 {}
    b.data = Connection::new(connection().0, None).unwrap();
    make_again(&mut a, &mut b, Part::Data);
    let PeerState::Lost(what) = suite::end_of(&mut a) else {
        panic!("the link goes on");
    };
    assert!(
        what.contains("0 of") && what.contains("bytes have arrived"),
        "{what}"
    );
}

/// Its last bytes are acknowledged before or after its end is seen, as the system has it.
#[test]
fn a_peer_that_has_left_is_owed_nothing() {
    let (mut a, mut b) = links();
    // None of them counts as acknowledged.
    a.data.freeze(true);
    assert_eq!(a.try_send(&[1; 100]).unwrap(), 100);
    while b.try_recv(&mut [0; 100]).unwrap() == 0 {}
    b.send_farewell();
    while a.data.is_flowing() {
        assert_eq!(a.try_recv(&mut [0; 100]).unwrap(), 0);
    }
    assert!(a.data.is_owing());
    assert_eq!(suite::end_of(&mut a), PeerState::Left);
    assert!(!a.is_owing());
}

#[test]
fn a_link_is_settled_once_the_peers_system_has_all() {
    let (mut a, mut b) = links();
    assert!(a.is_settled() && !a.is_owing());
    for end in [&a, &b] {
        let socket = SockRef::from(end.data.socket());
        socket.set_send_buffer_size(LEAST).unwrap();
        socket.set_recv_buffer_size(LEAST).unwrap();
    }
    while a.try_send(&[1; 4096]).unwrap() > 0 {}
    assert!(!a.is_settled() && !a.is_owing());
    let mut bytes = vec![0; 4096];
    while !a.is_settled() {
        b.try_recv(&mut bytes).unwrap();
    }
    // The connection breaks on the way, and neither end has seen that yet.
    let (mut a, mut b) = links();
    deafen(b.data.socket());
    assert_eq!(a.try_send(&[2; 100]).unwrap(), 100);
    assert!(!a.is_settled());
    let begun = Instant::now();
    while !a.is_owing() {
        let waited = begun.elapsed();
        assert!(waited < Duration::from_secs(20), "sent again in vain");
        std::thread::sleep(Duration::from_millis(5));
    }
    make_again(&mut a, &mut b, Part::Data);
    while b.try_recv(&mut bytes).unwrap() < 100 {
        assert_eq!(a.peer_state(), PeerState::Present);
    }
    assert_eq!(bytes[..100], [2; 100]);
    assert!(!a.is_owing());
}

#[test]
fn an_abort_is_said_again() {
    let (mut a, mut b) = links();
    let notice = Notice {
        code: Code::Mismatch,
        origin: 1,
        culprit: None,
        message: "they differ".to_owned(),
    };
    // No byte that the first socket carries is ever read.
    b.control = Control::new(connection().0);
    a.send_abort(&notice);
    make_again(&mut a, &mut b, Part::Control);
    assert_eq!(suite::end_of(&mut b), PeerState::Aborted(notice));
}

/// Lets a socket hear nothing any more, as behind a firewall that has forgotten its connection.
fn deafen(socket: &impl AsFd) {
    let takes_nothing = SockFilter::new(0x06, 0, 0, 0);
    let socket = SockRef::from(socket);
    socket.attach_filter(&[takes_nothing]).unwrap();
}

#[test]
fn bytes_into_a_connection_that_hears_nothing_are_noticed_when_their_receiver_asks() {
    // The one that waits opens the connections, or the other one does.
    for waits in 0..2 {
        let (a, b) = links();
        let mut ends = [a, b];
        deafen(ends[waits].data.socket());
        assert_eq!(ends[1 - waits].try_send(&[7; 100]).unwrap(), 100);
        let begun = Instant::now();
        let mut broken = Vec::new();
        while !broken.contains(&Part::Data) {
            let waited = begun.elapsed();
            assert!(waited < Duration::from_secs(20), "end {waits} waits");
            ends[waits].ask();
            for end in &mut ends {
                assert_eq!(end.peer_state(), PeerState::Present);
                let breach = end.wants_mending();
                broken.extend(
                    breach
                        .filter(|breach| breach.is_ours)
                        .map(|breach| breach.socket.part),
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let [a, b] = &mut ends;
        make_again(a, b, Part::Data);
        let mut received = [0; 100];
        let mut count = 0;
        while count < 100 {
            count += ends[waits].try_recv(&mut received[count..]).unwrap();
            assert_eq!(ends[1 - waits].peer_state(), PeerState::Present);
            assert_eq!(ends[waits].peer_state(), PeerState::Present);
        }
        assert_eq!(received, [7; 100]);
    }
}
