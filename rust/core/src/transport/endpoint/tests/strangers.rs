//! Processes that are not members, and members that do not play by the rules.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::sync::atomic::AtomicBool;

use rustix::process::{Resource, getrlimit};
use socket2::{Domain, Socket, Type};

use super::super::wire::{Files, Patience};
use super::*;
use crate::descriptors;
use crate::skips::skipped;
use crate::transport::handshake::{
    ANSWER_BYTES, Answer, CHALLENGE_BYTES, HELLO_BYTES, Hello, Initiator, MAGIC, Proven, Purpose,
    Reply,
};
use crate::transport::keys::KeyPair;

#[test]
fn a_process_that_is_no_member_is_refused() {
    let (zero, one) = pair();
    let stranger = Member::new(&group(), 0);
    // It has read all that the store holds: every public key, and so the group's id.
    let public = |rank| *zero.keys[0].member(rank).unwrap();
    let own = Arc::new(KeyPair::random().unwrap());
    let forged = GroupKey::new(own, ((0..4).map(public).collect(), b""), [0; 32], false);
    assert_eq!(forged.id(), zero.keys[0].id());
    let forger = Member::new(&vec![forged; 4], 0);
    for outsider in [stranger, forger] {
        for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
            let error = outsider.connect(&one, transport).unwrap_err();
            assert_eq!(
                (error.code, error.peer),
                (Code::Untrusted, Some(1)),
                "{error}"
            );
            assert!(error.message.contains("secret"), "{error}");
        }
    }
    assert!(one.arrivals.try_recv().is_err());
}

/// The other side says that it refuses, whatever was wrong, and hangs up.
pub(super) fn assert_shown_out(mut stream: TcpStream) {
    let mut bytes = Vec::new();
    // A reset is as good as an end of file.
    let _ = stream.read_to_end(&mut bytes);
    let refusals = [Reply::Refused as u8, Reply::Busy as u8];
    let is_refusal = bytes.is_empty() || (bytes.len() == 1 && refusals.contains(&bytes[0]));
    assert!(is_refusal, "a stranger heard {bytes:?}");
}

/// Whatever a hello is wrong in, the answer is the same.
#[test]
fn a_wrong_hello_is_answered_by_a_constant() {
    let (zero, one) = pair();
    let hello_of = |key: &GroupKey| {
        *Initiator::new(key, &hello(Purpose::TcpData))
            .unwrap()
            .hello()
    };
    let right = hello_of(&zero.keys[0]);
    let mut hellos = vec![hello_of(&group()[0]), hello_of(&zero.keys[2]), right, right];
    hellos[2][HELLO_BYTES - 1] ^= 1;
    hellos[3][8] ^= 1;
    for hello in hellos {
        let mut stream = tcp_to(&one);
        stream.write_all(&hello).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, [Reply::Refused as u8]);
    }
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
    let two = Member::new(&zero.keys, 2);
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
        let (proof, proven) = initiator.prove(&challenge(&mut stream)).unwrap();
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

fn challenge(stream: &mut impl Read) -> [u8; CHALLENGE_BYTES] {
    let mut bytes = [0; 1 + CHALLENGE_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[0], Reply::GoOn as u8);
    *bytes.last_chunk().unwrap()
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

/// The first connection of a link has broken when it was accepted, and its rank begins anew.
#[test]
fn a_rank_that_begins_anew_does_not_wait_for_its_last_attempt() {
    // That attempt lasts for longer than the rank has.
    let patient = Limits {
        handshake: Duration::from_secs(60),
        ..limits()
    };
    let keys = group();
    let zero = Member::new(&keys, 0);
    let one = Member::at(Endpoint::start_with(&options(), patient).unwrap(), &keys, 1);
    let (puppet, answer) = Puppet::enter(tcp_to(&one), &keys[0], &hello(Purpose::TcpData));
    assert_eq!(answer, Answer::Accept);
    drop(puppet);
    let mut near = link(zero.connect(&one, TransportChoice::Tcp));
    converse(&mut *near, &mut *one.arrival().2);
}

#[test]
fn a_recorded_conversation_is_refused() {
    let (zero, one) = pair();
    let initiator = Initiator::new(&zero.keys[0], &hello(Purpose::TcpData)).unwrap();
    let recorded_hello = *initiator.hello();
    let mut stream = tcp_to(&one);
    stream.write_all(&recorded_hello).unwrap();
    let (recorded_proof, _) = initiator.prove(&challenge(&mut stream)).unwrap();
    drop(stream);

    let mut replay = tcp_to(&one);
    replay.write_all(&recorded_hello).unwrap();
    replay.write_all(&recorded_proof).unwrap();
    challenge(&mut replay);
    assert_shown_out(replay);
    assert!(one.arrivals.try_recv().is_err());
}

/// A recording of a hello takes a place, but does not keep it.
#[test]
fn recorded_hellos_do_not_keep_members_out() {
    // So long that a member that waits for one to end does not get in.
    let patient = Limits {
        handshake: Duration::from_secs(60),
        ..limits()
    };
    let endpoint = Endpoint::start_with(&options(), patient).unwrap();
    let one = Member::at(endpoint, &group(), 1);
    let initiator = Initiator::new(&one.keys[0], &hello(Purpose::TcpData)).unwrap();
    let recorded: Vec<TcpStream> = (0..2 * limits().simultaneous)
        .map(|_| {
            let mut stream = tcp_to(&one);
            stream.write_all(initiator.hello()).unwrap();
            stream
        })
        .collect();
    let two = Member::new(&one.keys, 2);
    let mut near = link(two.connect(&one, TransportChoice::Tcp));
    converse(&mut *near, &mut *one.arrival().2);
    drop(recorded);
}

#[test]
fn a_control_connection_needs_its_stream() {
    let (zero, one) = pair();
    let control = hello(Purpose::TcpControl);
    let (_, answer) = Puppet::enter(tcp_to(&one), &zero.keys[0], &control);
    assert_eq!(answer, Answer::Failed);
    let (_data, answer) = Puppet::enter(tcp_to(&one), &zero.keys[0], &hello(Purpose::TcpData));
    assert_eq!(answer, Answer::Accept);
    for other in [
        Hello {
            link: [8; 16],
            ..control
        },
        Hello { from: 2, ..control },
    ] {
        let key = &zero.keys[other.from as usize];
        let (_, answer) = Puppet::enter(tcp_to(&one), key, &other);
        assert_eq!(answer, Answer::Failed);
    }
    let (_control, answer) = Puppet::enter(tcp_to(&one), &zero.keys[0], &control);
    assert_eq!(answer, Answer::Accept);
    assert_eq!(one.arrival().0, 0);
    // A rank that has not heard that asks again.
    let (_, answer) = Puppet::enter(tcp_to(&one), &zero.keys[0], &control);
    assert_eq!(answer, Answer::Made);
}

#[test]
fn a_bad_segment_is_refused_and_tcp_still_works() {
    let (zero, one) = pair();
    let name = UnixAddr::from_abstract_name(&one.endpoint.address().unix_name).unwrap();
    let stream = UnixStream::connect_addr(&name).unwrap();
    let (mut puppet, answer) = Puppet::enter(stream, &zero.keys[0], &hello(Purpose::SharedMemory));
    assert_eq!(answer, Answer::Accept);
    let patience = Patience {
        deadline: Instant::now() + Duration::from_secs(5),
        called_off: [&NEVER, &NEVER],
        turn: None,
    };
    let file = std::fs::File::open("/dev/null").unwrap();
    let files = Files {
        segment: Some(file.as_fd()),
        life: None,
        introduction: None,
    };
    patience.send_files(&puppet.stream, &files).unwrap();
    patience.receive_files(&puppet.stream).unwrap();
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
        let (puppet, answer) = Puppet::enter(stream, &zero.keys[0], &hello(Purpose::SharedMemory));
        assert_eq!(answer, Answer::Accept);
        drop(puppet);
    }
    let mut near = link(zero.connect(&one, TransportChoice::Tcp));
    converse(&mut *near, &mut *one.arrival().2);
}

/// Runs `act` on a thread of its own that has the effective user `nobody`; the rest of the process keeps its own.
fn as_another_user<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let nobody = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(None, nobody, None).unwrap();
            act()
        });
        thread.join().unwrap()
    })
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skipped("only root can act as another user");
    }
    is_root
}

#[test]
fn another_user_of_the_host_is_not_heard() {
    if !is_root() {
        return;
    }
    let (zero, one) = pair();
    let name = UnixAddr::from_abstract_name(&one.endpoint.address().unix_name).unwrap();
    let initiator = Initiator::new(&zero.keys[0], &hello(Purpose::SharedMemory)).unwrap();
    let heard = as_another_user(|| {
        let mut stream = UnixStream::connect_addr(&name).unwrap();
        // It is hung up at once: a failure to write is as good as the end of what can be read.
        let _ = stream.write_all(initiator.hello());
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        bytes
    });
    assert!(heard.is_empty(), "{heard:?}");
    assert!(one.arrivals.try_recv().is_err());
}

#[test]
fn a_member_of_another_user_is_as_one_on_another_host() {
    if !is_root() {
        return;
    }
    let (zero, one) = pair();
    let mut near = as_another_user(|| link(zero.connect(&one, TransportChoice::Auto)));
    assert!(near.describe().contains("tcp"), "{}", near.describe());
    converse(&mut *near, &mut *one.arrival().2);
    let (two, three) = (Member::new(&zero.keys, 2), Member::new(&zero.keys, 3));
    let error = as_another_user(|| two.connect(&three, TransportChoice::Shm).unwrap_err());
    assert_eq!((error.code, error.peer), (Code::System, Some(3)));
    assert!(error.message.contains("belongs to user 0"), "{error}");
}

/// More members than there are places at a time, beside connections that say nothing and take up the places.
#[test]
fn many_members_get_in_beside_silent_strangers() {
    const MEMBERS: usize = 66;
    const STRANGERS: usize = 200;
    let keys = GroupKey::of_ranks(MEMBERS + 1, [0; 32], false);
    let (gate, arrivals) = Arrivals::new(Verdict::Accept);
    let zero = Endpoint::start_with(&options(), Limits::default()).unwrap();
    let world = keys.len();
    zero.register(keys[0].clone(), 0, world, gate.clone())
        .unwrap();
    let address = zero.address().clone();
    let tcp = address.tcp()[0];
    let silent: Vec<_> = (0..STRANGERS)
        .map(|_| TcpStream::connect(tcp).unwrap())
        .collect();
    let others = Endpoint::start_with(&options(), Limits::default()).unwrap();
    let since = Instant::now();
    let near: Vec<_> = thread::scope(|scope| {
        let (keys, others, address, gate) = (&keys, &others, &address, &gate);
        let members: Vec<_> = (1..world)
            .map(|rank| {
                scope.spawn(move || {
                    let key = &keys[rank];
                    others
                        .register(key.clone(), rank, world, gate.clone())
                        .unwrap();
                    others.connect(&ConnectRequest {
                        key,
                        from: rank,
                        to: 0,
                        known_as: (rank, 0),
                        lane: Lane::Collective,
                        target: address,
                        deadline: Instant::now() + Duration::from_secs(60),
                        silence: None,
                        transport: TransportChoice::Tcp,
                        cancelled: &NEVER,
                        turn: None,
                    })
                })
            })
            .collect();
        members
            .into_iter()
            .map(|member| link(member.join().unwrap()))
            .collect()
    });
    assert_eq!(near.len(), MEMBERS);
    for _ in 0..MEMBERS {
        arrivals.recv_timeout(Duration::from_secs(10)).unwrap();
    }
    eprintln!(
        "{MEMBERS} members beside {STRANGERS} strangers: {:?}",
        since.elapsed()
    );
    drop(silent);
}

/// Strangers that say nothing come faster than they are shown out at leisure, and never stop.
#[test]
fn a_member_gets_in_while_strangers_keep_coming() {
    const OPEN: usize = 1500;
    descriptors::make_room(OPEN / 2);
    let allowed = getrlimit(Resource::Nofile).current;
    if allowed.is_some_and(|allowed| allowed < 3000) {
        return skipped("this process may have too few descriptors for a flood");
    }
    let keys = GroupKey::of_ranks(2, [0; 32], false);
    let (gate, arrivals) = Arrivals::new(Verdict::Accept);
    let zero = Endpoint::start_with(&options(), Limits::default()).unwrap();
    zero.register(keys[0].clone(), 0, 2, gate.clone()).unwrap();
    let address = zero.address().clone();
    let tcp = address.tcp()[0];
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let mut came = 0;
            let mut open = VecDeque::new();
            while !over.load(Ordering::Acquire) {
                let socket = Socket::new(Domain::for_address(tcp), Type::STREAM, None).unwrap();
                socket.set_nonblocking(true).unwrap();
                let _ = socket.connect(&tcp.into());
                open.push_back(socket);
                open.drain(..open.len().saturating_sub(OPEN));
                came += 1;
                thread::sleep(Duration::from_micros(500));
            }
            came
        });
        thread::sleep(Duration::from_secs(1));
        let one = Member::new(&keys, 1);
        let since = Instant::now();
        let opened = one.endpoint.connect(&ConnectRequest {
            key: &keys[1],
            from: 1,
            to: 0,
            known_as: (1, 0),
            lane: Lane::Collective,
            target: &address,
            deadline: Instant::now() + Duration::from_secs(30),
            silence: Some(10),
            transport: TransportChoice::Tcp,
            cancelled: &NEVER,
            turn: None,
        });
        let took = since.elapsed();
        over.store(true, Ordering::Release);
        let came = flood.join().unwrap();
        eprintln!("a member beside {came} strangers: {took:?}");
        let near = link(opened);
        arrivals.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(took < Duration::from_secs(15), "it took {took:?}");
        drop(near);
    });
}
