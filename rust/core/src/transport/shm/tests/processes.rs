//! Messages of every kind between two processes, and the death of the one whose memory is read.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::Child;
use std::time::Duration;

use super::*;
use crate::heap::Buffer;

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
        .stdout(Stdio::null())
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
    assert_eq!(peer.number(), child.id() as i32);
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
#[ignore = "started by the other tests of this module"]
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

/// The number of a dead peer is another process's, whose memory can be read: here this one's.
#[test]
fn a_successor_to_the_number_delivers_nothing() {
    let payload = suite::pattern(3, 0, LENT);
    let run = (payload.as_ptr().expose_provenance(), LENT);
    for part in [64 << 10, LENT / 2, LENT] {
        let (mut near, mut far) = links(1 << 16);
        near.lend_private_from(1);
        let Lending::Lent(ticket) = near.try_lend(&HEADER, &[run], Terms::Loan).unwrap() else {
            panic!("not lent");
        };
        assert!(far.try_take(&mut |_| ()).unwrap());
        let mut bytes = vec![0; LENT];
        let mut received = far.try_recv(&mut bytes[..part / 2]).unwrap();
        assert!(received > 0);
        let mut child = Command::new("true").spawn().unwrap();
        let process = Process::succeeded_by(std::process::id() as i32, &child);
        child.wait().unwrap();
        far.borrower.peer = Some(Arc::new(process));
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
        assert_eq!(folded, 0, "read from another process");
        assert_eq!(near.loan(ticket).unwrap(), Loan::Out);
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
