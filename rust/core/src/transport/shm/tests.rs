//! The suite over sealed segments, a peer in another process, and peers that lie.

use std::io::{IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::*;
use crate::error::Code;
use crate::heap;
use crate::transport::{Lending, Loan, Shareable, Terms, Ticket, suite};

mod lies;
mod messages;
mod processes;

fn links(capacity: usize) -> (ShmLink, ShmLink) {
    let (a, b) = UnixStream::pair().unwrap();
    let (link, segment) = ShmLink::create(a, capacity).unwrap();
    (link, ShmLink::open(b, segment).unwrap())
}

fn make(capacity: usize) -> (Box<dyn Link>, Box<dyn Link>) {
    let (a, b) = links(capacity);
    (Box::new(a), Box::new(b))
}

suite::conformance!(make);

#[test]
fn there_is_a_page() {
    let (a, b) = links(4096);
    let (mine, theirs) = (a.page(), b.page());
    // Two mappings of one page: each side's is registered on its own.
    assert_ne!(mine.words().as_ptr(), theirs.words().as_ptr());
}

/// A link whose segment the test can also reach.
fn exposed(capacity: usize) -> (ShmLink, Arc<Segment>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let segment = Segment::anonymous(capacity).unwrap();
    (
        ShmLink::new(&segment, Side::Maker, with_peer(ours), NAME),
        segment,
        theirs,
    )
}

#[test]
fn what_a_forked_child_drops_takes_nothing_back() {
    let (mut a, mut b) = links(1 << 16);
    let payload = suite::pattern(1, 0, 100_000);
    a.lend_private_from(1);
    let run = (payload.as_ptr().expose_provenance(), payload.len());
    let Lending::Lent(ticket) = a
        .try_lend(&[7; MESSAGE_HEADER], &[run], Terms::Loan)
        .unwrap()
    else {
        panic!("not lent");
    };
    (a, b) = suite::drop_in_child((a, b));
    assert!(b.try_take(&mut |_| ()).unwrap());
    let mut bytes = vec![0; payload.len()];
    assert_eq!(b.try_recv(&mut bytes).unwrap(), payload.len());
    assert!(bytes == payload);
    assert_eq!(a.loan(ticket).unwrap(), Loan::Returned);
    assert_eq!(
        (a.peer_state(), b.peer_state()),
        (PeerState::Present, PeerState::Present)
    );
}

#[test]
fn impossible_indices_are_errors() {
    for tail in [4097, u64::MAX, u64::MAX - 4096, 1 << 63] {
        let (mut link, segment, _theirs) = exposed(4096);
        segment.corrupt_ring(1, Some(tail), None);
        assert!(link.arm(Interest {
            readable: true,
            writable: false
        }));
        link.disarm();
        assert_eq!(
            link.try_recv(&mut [0; 10]).unwrap_err().code,
            Code::Untrusted
        );
        let error = link.try_fold(16, 4, &mut |_| panic!("lent from a corrupt ring"));
        assert_eq!(error.unwrap_err().code, Code::Untrusted);
    }
    for head in [65, u64::MAX, 1 << 40] {
        let (mut link, segment, _theirs) = exposed(64);
        assert_eq!(link.try_send(&[0; 65]).unwrap(), 64);
        segment.corrupt_ring(0, None, Some(head));
        assert!(link.arm(Interest {
            readable: false,
            writable: true
        }));
        link.disarm();
        let error = link.try_send(&[0]).unwrap_err();
        assert_eq!(error.code, Code::Untrusted);
        assert!(error.message.contains(&head.to_string()), "{error}");
    }
}

#[test]
fn an_index_that_goes_back_is_an_error() {
    let (mut link, segment, _theirs) = exposed(64);
    segment.corrupt_ring(1, Some(40), None);
    assert_eq!(link.try_recv(&mut [0; 40]).unwrap(), 40);
    segment.corrupt_ring(1, Some(39), None);
    assert_eq!(
        link.try_recv(&mut [0; 40]).unwrap_err().code,
        Code::Untrusted
    );
}

#[test]
fn garbage_on_the_control_socket_is_told() {
    let (mut link, _segment, mut theirs) = exposed(64);
    theirs.write_all(&[1, 1, 1, 0xee]).unwrap();
    let what = "unknown frame kind 0xee on the control channel".to_owned();
    assert_eq!(link.peer_state(), PeerState::Broken(what));
}

#[test]
fn capacities_are_powers_of_two_within_bounds() {
    for capacity in [0, 1, 32, 100, 4097, 1 << 31, usize::MAX] {
        let (a, _b) = UnixStream::pair().unwrap();
        let error = ShmLink::create(a, capacity).err().unwrap();
        assert_eq!(error.code, Code::InvalidArgument, "{error}");
    }
}

/// Opens `file` as a peer's segment and returns the refusal.
fn refusal(file: OwnedFd) -> String {
    let error = Segment::open(&file)
        .err()
        .expect("the segment was believed");
    assert_eq!(error.code, Code::Untrusted, "{error}");
    error.message
}

fn memfd(size: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("test", flags).unwrap();
    rustix::fs::ftruncate(&file, size).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

#[test]
fn segments_that_no_member_makes_are_refused() {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let good = segment::length_of(4096) as u64;
    assert!(refusal(memfd(good, SealFlags::GROW)).contains("can still be changed"));
    assert!(refusal(memfd(good, SealFlags::empty())).contains("can still be changed"));
    for size in [0, 1, 4096, good - 1, good + 1, good + 4096] {
        assert!(refusal(memfd(size, seals)).contains(&format!("{size} bytes")));
    }
    assert!(refusal(memfd(good, seals)).contains("begins with"));
    let (socket, _) = UnixStream::pair().unwrap();
    assert!(refusal(socket.into()).contains("cannot be sealed"));

    let (segment, file) = Segment::create(4096).unwrap();
    segment.corrupt_header(None, Some(8192));
    assert!(refusal(file.try_clone().unwrap()).contains("states rings of 8192 bytes"));
    segment.corrupt_header(Some(1), Some(4096));
    assert!(refusal(file).contains("begins with"));
}

#[test]
fn a_segment_cannot_change_its_size() {
    let (_link, file) = ShmLink::create(UnixStream::pair().unwrap().0, 4096).unwrap();
    for size in [0, 4096, 1 << 20] {
        assert!(rustix::fs::ftruncate(&file, size).is_err());
    }
    assert!(rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE).is_err());
}

/// Passes a descriptor with one byte, as the endpoint does.
fn pass(socket: &UnixStream, file: &OwnedFd) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [file.as_fd()];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(
        socket,
        &[IoSlice::new(&[0])],
        &mut ancillary,
        SendFlags::empty(),
    )
    .unwrap();
}

fn receive_passed(socket: &UnixStream) -> OwnedFd {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut files) = message {
            return files.next().unwrap();
        }
    }
    panic!("no descriptor came");
}

#[test]
fn a_process_answers_and_its_death_is_seen() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "transport::shm::tests::the_other_process",
            "--ignored",
        ])
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (mut link, file) = ShmLink::create(ours.try_clone().unwrap(), 4096).unwrap();
    pass(&ours, &file);
    drop(ours);
    let sleeper = suite::Sleeper::new(&link);
    let total = 100_000;
    let mut echoed = Vec::new();
    let mut sent = 0;
    while echoed.len() < total {
        let out = link
            .try_send(&suite::pattern(1, sent, total - sent))
            .unwrap();
        sent += out;
        let mut bytes = [0; 1000];
        let count = link.try_recv(&mut bytes).unwrap();
        echoed.extend_from_slice(&bytes[..count]);
        if out == 0 && count == 0 {
            assert_eq!(link.peer_state(), PeerState::Present);
            sleeper.sleep(
                &mut link,
                Interest {
                    readable: true,
                    writable: sent < total,
                },
            );
        }
    }
    assert_eq!(echoed, suite::pattern(1, 0, total));
    child.kill().unwrap();
    while link.peer_state() == PeerState::Present {
        sleeper.sleep(
            &mut link,
            Interest {
                readable: true,
                writable: false,
            },
        );
    }
    assert_eq!(
        link.peer_state(),
        PeerState::Lost("connection closed".to_owned())
    );
    child.wait().unwrap();
}

#[test]
#[ignore = "started by a_process_answers_and_its_death_is_seen with a link's socket as its input"]
fn the_other_process() {
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let file = receive_passed(&socket);
    let mut link = ShmLink::open(socket, file).unwrap();
    let sleeper = suite::Sleeper::new(&link);
    let mut waiting = Vec::new();
    while link.peer_state() == PeerState::Present {
        let mut bytes = [0; 700];
        let count = link.try_recv(&mut bytes).unwrap();
        waiting.extend_from_slice(&bytes[..count]);
        let out = link.try_send(&waiting).unwrap();
        waiting.drain(..out);
        if count == 0 && out == 0 {
            let writable = !waiting.is_empty();
            sleeper.sleep(
                &mut link,
                Interest {
                    readable: true,
                    writable,
                },
            );
        }
    }
}
