use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use proptest::prelude::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::frame::{
    ABORT, ANSWER, DOORBELL, FAREWELL, QUESTION, SEGMENT, SEGMENT_ANSWER, SEGMENT_GONE,
};
use super::*;
use crate::error::{Code, ForeignText};
use crate::heap::{self, Buffer, Identity};
use crate::transport::{Notice, POSITION_BYTES, Part};

fn notice(message: &str) -> Notice {
    Notice {
        code: Code::PeerLost,
        origin: 7,
        culprit: Some(3),
        message: message.to_owned(),
    }
}

fn identity() -> Identity {
    Identity {
        segment: 1 << 20,
        bytes: 1 << 40,
        inode: u64::MAX,
    }
}

fn pair() -> (Control, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Control::new(ours), theirs)
}

#[test]
fn frames_survive_the_trip_byte_by_byte() {
    let frames = [
        Frame::Doorbell,
        Frame::Question,
        Frame::Answer,
        Frame::Framing(u64::MAX),
        Frame::FramingHeard,
        Frame::Broken(SocketId {
            part: Part::Stripe(7),
            number: 3,
        }),
        Frame::Position([9; POSITION_BYTES]),
        Frame::Abort(notice("rank 3 died")),
        Frame::Abort(Notice {
            culprit: None,
            ..notice("")
        }),
        Frame::Farewell,
        Frame::Segment(identity()),
        Frame::SegmentAnswer {
            segment: 7,
            mapped: true,
        },
        Frame::SegmentGone(u32::MAX),
    ];
    for frame in frames {
        let mut bytes = Vec::new();
        frame.write(&mut bytes);
        for cut in 0..bytes.len() {
            assert_eq!(Frame::parse(&bytes[..cut]), Ok(None));
        }
        let length = bytes.len();
        bytes.push(DOORBELL);
        assert_eq!(Frame::parse(&bytes), Ok(Some((frame, length))));
    }
}

#[test]
fn a_long_message_is_cut_between_characters() {
    let mut bytes = Vec::new();
    Frame::Abort(notice(&"x€".repeat(4000))).write(&mut bytes);
    let Ok(Some((Frame::Abort(seen), _))) = Frame::parse(&bytes) else {
        panic!("the notice did not parse");
    };
    assert!(seen.message.len() <= MAX_MESSAGE && seen.message.len() > MAX_MESSAGE - 4);
    assert!("x€".repeat(4000).starts_with(&seen.message));
}

#[test]
fn an_abort_outranks_a_farewell_and_both_outrank_the_end() {
    let (mut control, mut peer) = pair();
    assert_eq!(control.peer_state(), PeerState::Present);
    peer.write_all(&[DOORBELL, ANSWER, 0, 0]).unwrap();
    assert_eq!(control.peer_state(), PeerState::Present);
    peer.write_all(&[FAREWELL, 0, 0]).unwrap();
    assert_eq!(control.peer_state(), PeerState::Left);
    let mut bytes = Vec::new();
    Frame::Abort(notice("why")).write(&mut bytes);
    peer.write_all(&bytes).unwrap();
    drop(peer);
    assert_eq!(control.peer_state(), PeerState::Aborted(notice("why")));
    assert_eq!(control.peer_state(), PeerState::Aborted(notice("why")));
}

#[test]
fn an_end_without_farewell_is_a_loss_told_once_as_news() {
    let (mut control, peer) = pair();
    // A process that another test is starting may have the socket for a moment, so that dropping it would not end it.
    peer.shutdown(Shutdown::Both).unwrap();
    assert!(!control.has_news());
    control.drain();
    assert!(control.has_news());
    assert_eq!(
        control.peer_state(),
        PeerState::Lost("connection closed".to_owned())
    );
    assert!(!control.has_news());
}

#[test]
fn garbage_ends_the_channel_and_is_described() {
    let cases: [(&[u8], &str); 8] = [
        (&[0x7f], "unknown frame kind 0x7f on the control channel"),
        (
            &[ABORT, 0xff, 0xff],
            "frame kind 0x02 of 65535 bytes on the control channel",
        ),
        (
            &[FAREWELL, 1, 0, 0],
            "frame kind 0x03 of 1 bytes on the control channel",
        ),
        (
            &[ABORT, 1, 0, 4],
            "abort notice of 1 bytes on the control channel",
        ),
        (
            &[ABORT, 10, 0, 99, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            "abort notice with unknown code 99 on the control channel",
        ),
        (
            &[
                SEGMENT, 19, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            ],
            "frame kind 0x06 of 19 bytes on the control channel",
        ),
        (
            &[SEGMENT_ANSWER, 5, 0, 1, 0, 0, 0, 2],
            "frame kind 0x07 of 5 bytes on the control channel",
        ),
        (
            &[SEGMENT_GONE, 0, 0],
            "frame kind 0x08 of 0 bytes on the control channel",
        ),
    ];
    for (bytes, what) in cases {
        let (mut control, mut peer) = pair();
        peer.write_all(bytes).unwrap();
        peer.write_all(&[FAREWELL, 0, 0]).unwrap();
        assert_eq!(control.peer_state(), PeerState::Broken(what.to_owned()));
    }
}

#[test]
fn a_full_socket_delays_frames_and_drops_doorbells() {
    let (mut control, mut peer) = pair();
    rustix::net::sockopt::set_socket_send_buffer_size(&control.socket, 4096).unwrap();
    let sent = Frame::Abort(notice(&"m".repeat(MAX_MESSAGE)));
    while control.outbound.len() == 0 {
        control.send(&sent);
    }
    let waiting = control.outbound.len();
    control.ring_doorbell();
    assert_eq!(control.outbound.len(), waiting);
    let mut received = Vec::new();
    let reader = std::thread::spawn(move || {
        peer.read_to_end(&mut received).unwrap();
        received
    });
    while !control.flush() {
        std::thread::yield_now();
    }
    drop(control);
    let received = reader.join().unwrap();
    let mut at = 0;
    while let Some((frame, length)) = Frame::parse(&received[at..]).unwrap() {
        assert_eq!(frame, sent);
        at += length;
    }
    assert_eq!(at, received.len());
}

/// Two ends of a channel between processes of a host.
#[test]
fn what_waits_in_a_forked_childs_copy_is_not_sent() {
    let (mut ours, mut theirs) = pair();
    let filler = vec![DOORBELL; 4096];
    while send(&ours.socket, &filler, SendFlags::DONTWAIT).is_ok() {}
    ours.send(&Frame::Farewell);
    assert!(ours.outbound.len() > 0);
    theirs.set_nonblocking(true).unwrap();
    let mut seen = Vec::new();
    let _ = theirs.read_to_end(&mut seen);
    let mut ours = crate::transport::suite::drop_in_child(ours);
    let _ = theirs.read_to_end(&mut seen);
    assert!(seen.iter().all(|&byte| byte == DOORBELL));
    ours.peer_state();
    seen.clear();
    let _ = theirs.read_to_end(&mut seen);
    assert_eq!(seen.first(), Some(&FAREWELL));
}

fn pair_of_a_host() -> (Control, Control) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Control::with_segments(ours), Control::with_segments(theirs))
}

/// Sends `bytes` with these descriptors, as a broken peer would.
fn send_with(socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut messages = SendAncillaryBuffer::new(&mut space);
    assert!(files.is_empty() || messages.push(SendAncillaryMessage::ScmRights(files)));
    let parts = [std::io::IoSlice::new(bytes)];
    sendmsg(socket, &parts, &mut messages, SendFlags::empty()).unwrap();
}

fn written(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.write(&mut bytes);
    bytes
}

#[test]
fn a_segment_is_lent_once_the_peer_has_mapped_it() {
    let (mut owner, mut reader) = pair_of_a_host();
    let buffer = Buffer::from_slice(&[1_u8, 2, 3, 4]);
    let place = heap::locate(buffer.as_ptr(), 4).unwrap();
    assert!(!owner.lends(place.segment));
    assert!(!owner.lends(place.segment));
    assert!(reader.peer_heap().unwrap().is_empty());
    reader.send(&Frame::Answer);
    reader.drain();
    assert!(owner.lends(place.segment) && owner.lends(place.segment));
    let peer = reader.peer_heap().unwrap();
    // SAFETY: no other code writes to the buffer.
    let seen = unsafe { peer.slice(place.segment, place.offset, 4) };
    assert_eq!(seen.unwrap().unwrap(), [1, 2, 3, 4]);
    assert_eq!(peer.len(), 1);
    assert!(!owner.lends(u32::MAX));
    assert_eq!(owner.peer_state(), PeerState::Present);
}

#[test]
fn the_peer_lets_go_of_a_segment_that_was_given_back() {
    let (mut owner, mut reader) = pair_of_a_host();
    // In a segment of its own: other blocks of this process find room in older ones.
    let buffer = Buffer::<u8>::zeroed(200 << 20);
    let segment = heap::locate(buffer.as_ptr(), 1).unwrap().segment;
    assert!(!owner.lends(segment));
    reader.drain();
    assert!(owner.lends(segment));
    drop(buffer);
    // Another test's block may lie there for a while.
    let until = Instant::now() + Duration::from_secs(60);
    while heap::is_live(segment) {
        assert!(Instant::now() < until, "it is not given back");
        heap::trim();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(owner.peer_state(), PeerState::Present);
    assert_eq!(reader.peer_state(), PeerState::Present);
    assert!(reader.peer_heap().unwrap().is_empty());
    assert!(!owner.lends(segment));
}

#[test]
fn segments_wait_with_the_frames_around_them_while_the_socket_is_full() {
    let (mut owner, mut reader) = pair_of_a_host();
    rustix::net::sockopt::set_socket_send_buffer_size(&owner.socket, 4096).unwrap();
    let text = Frame::Abort(notice(&"m".repeat(MAX_MESSAGE)));
    while owner.outbound.len() == 0 {
        owner.send(&text);
    }
    let buffer = Buffer::from_slice(&[5_u8]);
    let place = heap::locate(buffer.as_ptr(), 1).unwrap();
    for segment in 1..=20 {
        owner.announce(segment, heap::segment_file(place.segment).unwrap());
        owner.send(&text);
    }
    assert!(owner.outbound.len() > 0);
    for _ in 0..1000 {
        reader.drain();
        owner.drain();
        owner.flush();
    }
    assert_eq!(owner.outbound.len(), 0);
    let peer = reader.peer_heap().unwrap();
    assert_eq!(peer.len(), 20);
    for segment in 1..=20 {
        assert!(peer.span(segment, place.offset, 1).unwrap().is_some());
        assert!(owner.lends(segment));
    }
    assert!(matches!(reader.peer_state(), PeerState::Aborted(_)));
}

#[test]
fn an_announcement_whose_descriptor_was_lost_is_answered_with_no() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut owner = Control::with_segments(ours);
    let buffer = Buffer::from_slice(&[5_u8]);
    let segment = heap::locate(buffer.as_ptr(), 1).unwrap().segment;
    let file = heap::segment_file(segment).unwrap();
    owner.announce(7, file);
    // The frame without its descriptor.
    let mut bytes = [0; 64];
    let count = (&theirs).read(&mut bytes).unwrap();
    let (relay, end) = UnixStream::pair().unwrap();
    let mut reader = Control::with_segments(end);
    (&relay).write_all(&bytes[..count]).unwrap();
    assert_eq!(reader.peer_state(), PeerState::Present);
    let count = (&relay).read(&mut bytes).unwrap();
    (&theirs).write_all(&bytes[..count]).unwrap();
    assert!(!owner.lends(7) && !owner.lends(7));
    assert_eq!(reader.peer_heap().unwrap().span(7, 0, 1), Ok(None));
    assert_eq!(owner.peer_state(), PeerState::Present);
}

#[test]
fn what_no_member_announces_ends_the_channel() {
    let buffer = Buffer::from_slice(&[5_u8]);
    let segment = heap::locate(buffer.as_ptr(), 1).unwrap().segment;
    let file = heap::segment_file(segment).unwrap();
    let good = Identity::of(segment, &file).unwrap();
    let announced = written(&Frame::Segment(good));
    let longer = written(&Frame::Segment(Identity {
        bytes: good.bytes + 4096,
        ..good
    }));
    let fd = file.as_fd();
    let cases: [(Vec<u8>, &[BorrowedFd<'_>], &str); 5] = [
        (vec![DOORBELL], &[fd], "a descriptor without a frame"),
        (announced.clone(), &[fd, fd], "a descriptor without a frame"),
        (
            announced.clone(),
            &[fd, fd, fd, fd, fd],
            "a descriptor without a frame",
        ),
        (longer, &[fd], "the peer's heap is refused"),
        (
            [announced.clone(), announced.clone()].concat(),
            &[fd],
            "again",
        ),
    ];
    for (bytes, files, what) in cases {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut control = Control::with_segments(ours);
        send_with(&theirs, &bytes, files);
        let PeerState::Broken(seen) = control.peer_state() else {
            panic!("{what}: the channel goes on");
        };
        assert!(seen.contains(what), "{seen}");
    }
    let (mut control, peer) = pair();
    send_with(&peer, &announced, &[fd]);
    let what = "a segment on a control channel that passes none";
    assert_eq!(control.peer_state(), PeerState::Broken(what.to_owned()));
}

#[test]
fn a_peer_that_announces_and_does_not_read_is_left() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut control = Control::with_segments(ours);
    rustix::net::sockopt::set_socket_send_buffer_size(&control.socket, 4096).unwrap();
    let mut state = PeerState::Present;
    for round in 0_u32..200_000 {
        let segment = Identity {
            segment: 1 + round,
            ..identity()
        };
        (&theirs)
            .write_all(&written(&Frame::Segment(segment)))
            .unwrap();
        (&theirs)
            .write_all(&written(&Frame::SegmentGone(1 + round)))
            .unwrap();
        state = control.peer_state();
        if state != PeerState::Present {
            break;
        }
    }
    let what = "announced segments without reading the answers";
    assert_eq!(state, PeerState::Broken(what.to_owned()));
    assert!(control.outbound.len() < 1 << 17);
}

proptest! {
    /// Whatever a peer sends, and with however many descriptors: nothing panics, and few descriptors are kept.
    #[test]
    fn any_bytes_and_descriptors_are_taken_or_end_the_channel(
        messages in proptest::collection::vec(
            (proptest::collection::vec(prop_oneof![1_u8..12, any::<u8>()], 1..40), 0_usize..5),
            1..8,
        ),
    ) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut control = Control::with_segments(ours);
        let file = theirs.as_fd();
        for (bytes, files) in messages {
            send_with(&theirs, &bytes, &[file; 5][..files]);
            let _ = control.peer_state();
            let waiting = control.segments.as_ref().map_or(0, Segments::waiting);
            prop_assert!(waiting <= 3);
        }
    }

    #[test]
    fn any_bytes_parse_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(Some((_, length))) = Frame::parse(&bytes) {
            prop_assert!(length >= 1 && length <= bytes.len());
        }
    }

    #[test]
    fn any_text_travels(message in ".{0,2000}", code in 1u8..=9, culprit: Option<u32>) {
        let code = Code::from_number(code).unwrap();
        // As one that is read is shown.
        let message = ForeignText::read(message.as_bytes()).unwrap().into();
        let notice = Notice { code, origin: 1, culprit, message };
        let mut bytes = Vec::new();
        Frame::Abort(notice.clone()).write(&mut bytes);
        let Ok(Some((Frame::Abort(seen), _))) = Frame::parse(&bytes) else {
            return Err(TestCaseError::fail("the notice did not parse"));
        };
        prop_assert!(notice.message.starts_with(&seen.message));
        let message = notice.message.clone();
        prop_assert_eq!(Notice { message, ..seen }, notice);
    }
}

#[test]
fn a_question_is_answered_by_whoever_reads_it() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (mut asker, mut asked) = (Control::new(ours), Control::new(theirs));
    assert_eq!(asker.silence(), None);
    asker.ask();
    asker.ask();
    assert_eq!(asker.peer_state(), PeerState::Present);
    assert!(asker.silence().is_some());
    assert_eq!(asked.peer_state(), PeerState::Present);
    assert_eq!(asker.peer_state(), PeerState::Present);
    assert_eq!(asker.silence(), None);
    assert!(!asked.has_news() && !asker.has_news());
    // Any other word is a sign of life as well.
    asker.ask();
    asked.ring_doorbell();
    asker.drain();
    assert_eq!(asker.silence(), None);
}

#[test]
fn a_peer_that_asks_and_does_not_read_piles_up_no_answers() {
    let (mut control, mut peer) = pair();
    peer.set_nonblocking(true).unwrap();
    let questions = [QUESTION, 0, 0].repeat(300);
    let mut pace = 0;
    for _ in 0..100_000 {
        match peer.write(&questions) {
            Ok(_) => pace = 0,
            Err(_) => pace += 1,
        }
        assert_eq!(control.peer_state(), PeerState::Present);
        assert!(control.outbound.len() <= 3);
        if pace > 10 {
            break;
        }
    }
}

#[test]
fn the_end_of_the_process_is_seen_beside_a_socket_that_stays_open() {
    for farewell in [false, true] {
        let (mut control, mut peer) = pair();
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        assert_eq!(
            control.peer_state_beside(pidfd.as_fd(), None),
            PeerState::Present
        );
        // More than one call reads.
        let mut said = [DOORBELL].repeat(40_000);
        if farewell {
            said.extend([FAREWELL, 0, 0]);
        }
        peer.write_all(&said).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let mut state = PeerState::Present;
        while state == PeerState::Present {
            state = control.peer_state_beside(pidfd.as_fd(), None);
        }
        let lost = PeerState::Lost(NOT_THE_SOCKET.to_owned());
        assert_eq!(state, if farewell { PeerState::Left } else { lost });
        assert_eq!(control.peer_state_beside(pidfd.as_fd(), None), state);
    }
}

#[test]
fn a_question_with_a_payload_is_none() {
    for kind in [QUESTION, ANSWER] {
        let (mut control, mut peer) = pair();
        peer.write_all(&[kind, 1, 0, 9]).unwrap();
        let what = format!("frame kind {kind:#04x} of 1 bytes on the control channel");
        assert_eq!(control.peer_state(), PeerState::Broken(what));
    }
}
