//! Messages of every kind between two processes, and the death of the one whose memory is read.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::process::Child;
use std::time::Duration;

use rustix::mm::{self, MapFlags, ProtFlags};

use super::*;
use crate::heap::Buffer;
use crate::skips::skipped;

const NAMED: &str = "UNISONO_TEST_SOCKET";
const DOING: &str = "UNISONO_TEST_DOING";
const HEADER: [u8; MESSAGE_HEADER] = [1; MESSAGE_HEADER];
const COUNT: usize = 400;
const LENT: usize = 8 << 20;

/// A process of its own that does as told, and the link to it. Each side's socket knows the process of the other.
fn start(doing: &str) -> (Child, ShmLink) {
    let name = format!("unisono test {} {doing}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "transport::shm::tests::processes::the_process",
            "--ignored",
        ])
        .env(NAMED, name)
        .env(DOING, doing)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (socket, _) = listener.accept().unwrap();
    let (link, file) = ShmLink::create(socket.try_clone().unwrap(), 1 << 16).unwrap();
    pass(&socket, &file);
    let peer = link
        .borrower
        .peer
        .as_ref()
        .expect("a process with a number");
    assert_eq!(peer.process().number(), child.id() as i32);
    assert!(link.peer_pidfd().is_some());
    (child, link)
}

fn sleep_until_readable(link: &mut ShmLink, sleeper: &suite::Sleeper) {
    sleeper.sleep(
        link,
        Interest {
            readable: true,
            writable: false,
        },
    );
}

#[test]
#[ignore = "the process at the other end in the tests above, not a test"]
fn the_process() {
    let (Ok(name), Ok(doing)) = (std::env::var(NAMED), std::env::var(DOING)) else {
        return;
    };
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let socket = UnixStream::connect_addr(&address).unwrap();
    let file = receive_passed(&socket);
    let mut link = ShmLink::open(socket, file).unwrap();
    let sleeper = suite::Sleeper::new(&link);
    if doing == "talk" {
        suite::talk(&mut link, 1, COUNT, &mut |link, interest| {
            sleeper.sleep(link, interest);
        });
        link.send_farewell();
        return;
    }
    if doing == "executes" {
        execute_another_program(&mut link);
    }
    if doing == "holds" {
        return hold_much_memory(&link);
    }
    let shared = Buffer::from_slice(&suite::pattern(3, 0, LENT));
    let private = shared.to_vec();
    let lent = if doing == "shared" {
        let place = heap::locate(shared.as_ptr(), LENT).expect("memory of the heap");
        while !link.control.lends(place.segment) {
            sleep_until_readable(&mut link, &sleeper);
        }
        &shared[..]
    } else {
        &private
    };
    let run = (lent.as_ptr().expose_provenance(), lent.len());
    link.lend_private_from(1);
    let Lending::Lent(_) = link.try_lend(&HEADER, &[run], Terms::Loan).unwrap() else {
        panic!("not lent");
    };
    // Until it is killed.
    std::thread::sleep(Duration::from_secs(60));
}

/// Shows that it lives, and has much to give back when it is killed.
fn hold_much_memory(link: &ShmLink) {
    let life = Life::of_this_process();
    if let Some(life) = &life {
        let channel = UnixStream::from(link.control.fd().try_clone_to_owned().unwrap());
        pass(&channel, &life.sign().try_clone_to_owned().unwrap());
    }
    let memory = vec![1_u8; 256 << 20];
    let mut stderr = std::io::stderr();
    stderr
        .write_all(if life.is_some() { b"life" } else { b"none" })
        .unwrap();
    std::thread::sleep(Duration::from_secs(60));
    drop(memory);
}

/// Memory at an address that nothing else has, in any program.
fn memory_at_a_fixed_place() -> &'static mut [u8] {
    let place = std::ptr::without_provenance_mut(0x1234_0000_0000);
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let flags = flags | MapFlags::FIXED_NOREPLACE;
    // SAFETY: a fresh mapping, or none; never unmapped.
    unsafe {
        let start = mm::mmap_anonymous(place, LENT, access, flags).unwrap();
        std::slice::from_raw_parts_mut(start.cast(), LENT)
    }
}

/// Lends what its successor has other bytes in the place of.
fn execute_another_program(link: &mut ShmLink) {
    let lent = memory_at_a_fixed_place();
    lent.copy_from_slice(&suite::pattern(3, 0, LENT));
    let run = (lent.as_ptr().expose_provenance(), lent.len());
    link.lend_private_from(1);
    link.try_lend(&HEADER, &[run], Terms::Loan).unwrap();
    assert_eq!(std::io::stdin().read(&mut [0]).unwrap(), 0);
    let mut next = Command::new(std::env::current_exe().unwrap());
    let name = "transport::shm::tests::processes::the_next_program";
    let error = next
        .args(["--exact", name, "--ignored", "--nocapture"])
        .exec();
    panic!("{error}");
}

#[test]
#[ignore = "the program that a process of the tests executes, not a test"]
fn the_next_program() {
    if std::env::var_os(NAMED).is_none() {
        return;
    }
    memory_at_a_fixed_place().fill(66);
    std::io::stderr().write_all(b"next").unwrap();
    // Until it is killed.
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn processes_talk_with_messages_of_every_kind() {
    let (mut child, mut link) = start("talk");
    let sleeper = suite::Sleeper::new(&link);
    let ways = suite::talk(&mut link, 0, COUNT, &mut |link, interest| {
        sleeper.sleep(link, interest);
    });
    assert!(ways.posted > 100 && ways.streamed > 10 && ways.lent > 50);
    assert_eq!(ways.refused, 0, "{ways:?}");
    assert!(child.wait().unwrap().success());
}

/// From some point on the number is another process's, or another program's, whose memory can be read at the same
/// addresses.
#[test]
fn a_successor_delivers_nothing() {
    let payload = suite::pattern(3, 0, LENT);
    let run = (payload.as_ptr().expose_provenance(), LENT);
    for part in [64 << 10, LENT / 2, LENT] {
        let segment = Segment::anonymous(1 << 16).unwrap();
        let (a, b) = UnixStream::pair().unwrap();
        let mut near = ShmLink::new(&segment, Side::Maker, with_peer(a), NAME);
        let mut far = ShmLink::new(&segment, Side::Opener, with_peer(b), NAME);
        near.lend_private_from(1);
        let Lending::Lent(ticket) = near.try_lend(&HEADER, &[run], Terms::Loan).unwrap() else {
            panic!("not lent");
        };
        assert!(far.try_take(&mut |_| ()).unwrap());
        let mut bytes = vec![0; LENT];
        let mut received = far.try_recv(&mut bytes[..part / 2]).unwrap();
        assert!(received > 0);
        let mut other = segment.board(0).mark();
        other.bytes[1] ^= 1;
        segment.board(0).tell_mark(other);
        while let count @ 1.. = far.try_recv(&mut bytes[received..part]).unwrap() {
            received += count;
        }
        assert!(received <= part / 2, "{received} of {part} bytes");
        let mut folded = 0;
        while let count @ 1.. = far
            .try_fold(LENT - received, 4, &mut |run| folded += run.len())
            .unwrap()
        {
            received += count;
        }
        assert_eq!(folded, 0, "read from another program");
        assert_eq!(near.loan(ticket).unwrap(), Loan::Out);
        assert!(matches!(far.peer_state(), PeerState::Lost(_)));
    }
}

/// A process executes another program, which has the number, the pidfd and other bytes at the same address.
#[test]
fn who_executes_another_program_is_lost() {
    let (mut child, mut link) = start("executes");
    let sleeper = suite::Sleeper::new(&link);
    while !link.try_take(&mut |_| ()).unwrap() {
        sleep_until_readable(&mut link, &sleeper);
    }
    let mut bytes = vec![0; LENT];
    let first = link.try_recv(&mut bytes).unwrap();
    assert!(first > 0 && first < LENT);
    // It goes on when its standard input ends, and says when its successor is there.
    drop(child.stdin.take());
    let mut word = [0; 4];
    child
        .stderr
        .as_mut()
        .unwrap()
        .read_exact(&mut word)
        .unwrap();
    assert_eq!(word, *b"next");
    assert_eq!(link.try_recv(&mut bytes[first..]).unwrap(), 0);
    assert!(bytes[..first] == suite::pattern(3, 0, first));
    assert!(bytes[first..].iter().all(|byte| *byte == 0));
    assert!(matches!(link.peer_state(), PeerState::Lost(_)));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn the_end_of_a_process_shows_before_its_memory_has_gone() {
    // Another program may have the core between both on a busy machine.
    for attempt in 1.. {
        let (mut child, mut link) = start("holds");
        let mut word = [0; 4];
        let stderr = child.stderr.as_mut().unwrap();
        stderr.read_exact(&mut word).unwrap();
        if word == *b"none" {
            child.kill().unwrap();
            child.wait().unwrap();
            return skipped("no thread has a table of descriptors of its own here");
        }
        let channel = UnixStream::from(link.control.fd().try_clone_to_owned().unwrap());
        let sign = receive_passed(&channel);
        link.watch(Lives::new(None, Some(sign)));
        assert_eq!(link.peer_state(), PeerState::Present);
        child.kill().unwrap();
        let is_lost = |state| matches!(state, PeerState::Lost(_));
        while !is_lost(link.peer_state()) {
            std::thread::yield_now();
        }
        let peer = link.borrower.peer.as_ref().unwrap();
        let has_ended = peer.process().has_ended();
        child.wait().unwrap();
        if !has_ended {
            return;
        }
        assert!(attempt < 20, "its pidfd told as soon");
    }
}

#[test]
fn who_dies_while_its_memory_is_read_is_lost() {
    for doing in ["private", "shared"] {
        let (mut child, mut link) = start(doing);
        let sleeper = suite::Sleeper::new(&link);
        while !link
            .try_take(&mut |header| assert_eq!(header, HEADER))
            .unwrap()
        {
            assert_eq!(link.peer_state(), PeerState::Present);
            sleep_until_readable(&mut link, &sleeper);
        }
        let mut bytes = vec![0; LENT];
        let first = link.try_recv(&mut bytes).unwrap();
        assert!(first > 0 && first < LENT);
        child.kill().unwrap();
        child.wait().unwrap();
        let mut received = first;
        loop {
            match link.try_recv(&mut bytes[received..]).unwrap() {
                0 => break,
                count => received += count,
            }
        }
        // A mapping outlives the process.
        assert_eq!(received, if doing == "shared" { LENT } else { first });
        assert!(bytes[..received] == suite::pattern(3, 0, received));
        while link.peer_state() == PeerState::Present {
            sleep_until_readable(&mut link, &sleeper);
        }
        let lost = PeerState::Lost("connection closed".to_owned());
        assert_eq!(link.peer_state(), lost);
    }
}
