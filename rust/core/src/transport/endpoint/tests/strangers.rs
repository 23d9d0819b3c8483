//! Those who are not members, and members that do not play by the rules.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use super::*;
use crate::rendezvous::handshake::{
    ANSWER_BYTES, Answer, CHALLENGE_BYTES, HELLO_BYTES, Hello, Initiator, MAGIC, Proven, Purpose,
};

#[test]
fn another_group_s_secret_opens_nothing() {
    let (zero, one) = pair();
    let stranger = Member::new(&GroupKey::random().unwrap(), 0);
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let error = stranger
            .connect_at(
                1,
                one.endpoint.address(),
                transport,
                Duration::from_millis(700),
            )
            .unwrap_err();
        assert_eq!(
            (error.code, error.peer),
            (Code::Untrusted, Some(1)),
            "{error}"
        );
        assert!(error.message.contains("secret"), "{error}");
    }
    // One who learned the id, which is public, gets no further.
    let forged = GroupKey {
        id: zero.key.id,
        secret: [0; 32],
    };
    let forger = Member::new(&forged, 0);
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let error = forger.connect(&one, transport).unwrap_err();
        assert_eq!(
            (error.code, error.peer),
            (Code::Untrusted, Some(1)),
            "{error}"
        );
    }
    assert!(one.arrivals.try_recv().is_err());
}

/// The other side hangs up without a word.
pub(super) fn assert_shown_out(mut stream: TcpStream) {
    let mut bytes = Vec::new();
    // A reset is as good as an end of file.
    let _ = stream.read_to_end(&mut bytes);
    assert!(
        bytes.is_empty(),
        "a stranger was told {} bytes",
        bytes.len()
    );
}

#[test]
fn garbage_truncation_and_silence_do_not_hurt_others() {
    let (zero, one) = pair();
    let mut garbage = tcp_to(&one);
    garbage.write_all(&[0xa5; 300]).unwrap();
    let mut version = tcp_to(&one);
    let mut hello = [0; HELLO_BYTES];
    hello[..8].copy_from_slice(&MAGIC);
    hello[8] = 0xff;
    version.write_all(&hello).unwrap();
    let mut cut = tcp_to(&one);
    cut.write_all(&hello[..20]).unwrap();
    cut.shutdown(std::net::Shutdown::Write).unwrap();
    // More than there are places.
    let silent: Vec<TcpStream> = (0..20).map(|_| tcp_to(&one)).collect();
    let mut near = link(zero.connect(&one, TransportChoice::Tcp));
    converse(&mut *near, &mut *one.arrival().2);
    let two = Member::new(&zero.key, 2);
    let mut near = link(two.connect(&one, TransportChoice::Shm));
    converse(&mut *near, &mut *one.arrival().2);
    for stranger in [garbage, version, cut] {
        assert_shown_out(stranger);
    }
    for stranger in silent {
        assert_shown_out(stranger);
    }
}

/// A hand-made member, for what an honest endpoint never does.
struct Puppet<S> {
    stream: S,
    proven: Proven,
}

impl<S: Read + Write> Puppet<S> {
    fn enter(mut stream: S, key: &GroupKey, hello: &Hello) -> (Self, Answer) {
        let initiator = Initiator::new(key, hello).unwrap();
        stream.write_all(initiator.hello()).unwrap();
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).unwrap();
        let (proof, proven) = initiator.prove(&challenge).unwrap();
        stream.write_all(&proof).unwrap();
        let mut puppet = Self { stream, proven };
        let answer = puppet.answer();
        (puppet, answer)
    }

    fn answer(&mut self) -> Answer {
        let mut frame = [0; ANSWER_BYTES];
        self.stream.read_exact(&mut frame).unwrap();
        self.proven.answer(&frame).unwrap()
    }
}

fn hello(purpose: Purpose) -> Hello {
    Hello {
        purpose,
        lane: Lane::Collective,
        from: 0,
        to: 1,
        link: [7; 16],
    }
}

#[test]
fn a_recorded_conversation_is_refused() {
    let (zero, one) = pair();
    let initiator = Initiator::new(&zero.key, &hello(Purpose::TcpData)).unwrap();
    let recorded_hello = *initiator.hello();
    let mut stream = tcp_to(&one);
    let mut challenge = [0; CHALLENGE_BYTES];
    stream.write_all(&recorded_hello).unwrap();
    stream.read_exact(&mut challenge).unwrap();
    let (recorded_proof, _) = initiator.prove(&challenge).unwrap();
    drop(stream);

    let mut replay = tcp_to(&one);
    replay.write_all(&recorded_hello).unwrap();
    replay.write_all(&recorded_proof).unwrap();
    replay.read_exact(&mut challenge).unwrap();
    assert_shown_out(replay);
}

#[test]
fn a_control_connection_needs_its_stream() {
    let (zero, one) = pair();
    let control = hello(Purpose::TcpControl);
    let (_, answer) = Puppet::enter(tcp_to(&one), &zero.key, &control);
    assert_eq!(answer, Answer::Failed);
    let (_data, answer) = Puppet::enter(tcp_to(&one), &zero.key, &hello(Purpose::TcpData));
    assert_eq!(answer, Answer::Accept);
    for other in [
        Hello {
            link: [8; 16],
            ..control
        },
        Hello { from: 2, ..control },
    ] {
        let (_, answer) = Puppet::enter(tcp_to(&one), &zero.key, &other);
        assert_eq!(answer, Answer::Failed);
    }
    let (_control, answer) = Puppet::enter(tcp_to(&one), &zero.key, &control);
    assert_eq!(answer, Answer::Accept);
    assert_eq!(one.arrival().0, 0);
}

#[test]
fn a_bad_segment_is_refused_and_tcp_still_works() {
    let (zero, one) = pair();
    let name = UnixAddr::from_abstract_name(&one.endpoint.address().unix_name).unwrap();
    let stream = UnixStream::connect_addr(&name).unwrap();
    let (mut puppet, answer) = Puppet::enter(stream, &zero.key, &hello(Purpose::SharedMemory));
    assert_eq!(answer, Answer::Accept);
    let patience = Patience {
        deadline: Instant::now() + Duration::from_secs(5),
        called_off: [&NEVER, &NEVER],
    };
    let file = std::fs::File::open("/dev/null").unwrap();
    patience.send_fd(&puppet.stream, file.as_fd()).unwrap();
    assert_eq!(puppet.answer(), Answer::Failed);
    let mut near = link(zero.connect(&one, TransportChoice::Tcp));
    converse(&mut *near, &mut *one.arrival().2);
}

#[test]
fn a_member_that_breaks_off_can_come_back() {
    let (zero, one) = pair();
    let name = UnixAddr::from_abstract_name(&one.endpoint.address().unix_name).unwrap();
    for _ in 0..10 {
        let stream = UnixStream::connect_addr(&name).unwrap();
        let (puppet, answer) = Puppet::enter(stream, &zero.key, &hello(Purpose::SharedMemory));
        assert_eq!(answer, Answer::Accept);
        drop(puppet);
    }
    let mut near = link(zero.connect(&one, TransportChoice::Tcp));
    converse(&mut *near, &mut *one.arrival().2);
}
