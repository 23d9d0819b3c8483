//! Members prove membership to each other, and no other process can.

use proptest::prelude::*;

use super::noise::Suite;
use super::words::array;
use super::*;
use crate::error::Code;
use crate::transport::cipher::Cipher;
use crate::transport::keys::{GroupKey, KeyPair};

/// Both ends of a conversation after its handshake.
pub(in super::super) fn conversation() -> (Cipher, Cipher) {
    let keys = keys();
    let initiator = Initiator::new(&keys[1], &hello()).unwrap();
    let challenged = Stranger::new(*initiator.hello()).unwrap();
    let challenged = challenged.challenge(&keys[2]).unwrap();
    let (proof, proven) = initiator.prove(&challenge_of(&challenged)).unwrap();
    let (_, answers) = challenged.verify(&proof).unwrap();
    (proven.into_cipher(), answers.into_cipher())
}

const LEN: usize = CHALLENGE_BYTES;

fn hello() -> Hello {
    Hello {
        purpose: Purpose::TcpData,
        lane: Lane::PointToPoint,
        from: 1,
        to: 2,
        link: [9; 16],
    }
}

fn keys() -> Vec<GroupKey> {
    GroupKey::of_ranks(4, [0; 32], false)
}

fn challenge_of(challenged: &Challenged) -> [u8; LEN] {
    array(&challenged.frame()[1..])
}

/// The code of the error that a stranger's hello with this key meets at rank 2 of `ours`.
fn refusal(ours: &[GroupKey], theirs: &GroupKey) -> Option<Code> {
    let initiator = Initiator::new(theirs, &hello()).unwrap();
    let stranger = Stranger::new(*initiator.hello()).unwrap();
    stranger.challenge(&ours[2]).err().map(|error| error.code)
}

#[test]
fn members_convince_each_other() {
    let keys = keys();
    let initiator = Initiator::new(&keys[1], &hello()).unwrap();
    let stranger = Stranger::new(*initiator.hello()).unwrap();
    assert_eq!((stranger.group(), stranger.to()), (keys[0].id(), 2));
    let challenged = stranger.challenge(&keys[2]).unwrap();
    assert_eq!(challenged.frame()[0], Reply::GoOn as u8);
    let (proof, mut proven) = initiator.prove(&challenge_of(&challenged)).unwrap();
    let (said, mut answers) = challenged.verify(&proof).unwrap();
    assert_eq!(said, hello());
    for answer in [Answer::Accept, Answer::Failed] {
        let frame = answers.frame(answer).unwrap();
        assert_eq!(proven.answer(&frame).unwrap(), answer);
    }
    let (mut near, mut far) = (proven.into_cipher(), answers.into_cipher());
    let mut sealed = Vec::new();
    near.seal(b"a message", &mut sealed);
    let mut opened = [0; 64];
    let length = far.open(&sealed[Cipher::HEAD..], &mut opened).unwrap();
    assert_eq!(&opened[..length], b"a message");
}

#[test]
fn an_answer_holds_for_its_step_alone() {
    let keys = keys();
    let initiator = Initiator::new(&keys[1], &hello()).unwrap();
    let challenged = Stranger::new(*initiator.hello()).unwrap();
    let challenged = challenged.challenge(&keys[2]).unwrap();
    let (proof, mut proven) = initiator.prove(&challenge_of(&challenged)).unwrap();
    let (_, mut answers) = challenged.verify(&proof).unwrap();
    let first = answers.frame(Answer::Accept).unwrap();
    proven.answer(&first).unwrap();
    assert_eq!(proven.answer(&first).unwrap_err().code, Code::Untrusted);
}

/// The store has public keys alone: they are of no use to a process that holds none of the private ones.
#[test]
fn public_keys_alone_convince_no_member() {
    let ours = keys();
    let members: Vec<_> = (0..4).map(|rank| *ours[0].member(rank).unwrap()).collect();
    let own = std::sync::Arc::new(KeyPair::random().unwrap());
    let forged = GroupKey::new(own, (members, b""), [0; 32], false);
    assert_eq!(forged.id(), ours[0].id());
    assert_eq!(refusal(&ours, &forged), Some(Code::Untrusted));
    // Nor can it play the acceptor: what it writes does not open with the rank's key.
    let initiator = Initiator::new(&ours[1], &hello()).unwrap();
    let answered = initiator.prove(&[7; LEN]);
    assert_eq!(answered.err().unwrap().code, Code::Untrusted);
}

#[test]
fn one_member_cannot_play_another() {
    let ours = keys();
    assert_eq!(refusal(&ours, &ours[1]), None);
    // Rank 3 says that it is rank 1.
    assert_eq!(refusal(&ours, &ours[3]), Some(Code::Untrusted));
}

#[test]
fn the_secret_and_the_wish_for_encryption_must_be_the_same() {
    let open = keys();
    let same = |shared, encrypts| {
        let other = |key: &GroupKey| key.with(shared, encrypts);
        open.iter().map(other).collect::<Vec<_>>()
    };
    assert_eq!(refusal(&same([1; 32], true), &same([1; 32], true)[1]), None);
    for other in [same([1; 32], false), same([0; 32], true)] {
        assert_eq!(refusal(&open, &other[1]), Some(Code::Untrusted));
        assert_eq!(refusal(&other, &open[1]), Some(Code::Untrusted));
    }
}

#[test]
fn a_transcript_cannot_be_replayed() {
    let keys = keys();
    let initiator = Initiator::new(&keys[1], &hello()).unwrap();
    let recorded = *initiator.hello();
    let first = Stranger::new(recorded)
        .unwrap()
        .challenge(&keys[2])
        .unwrap();
    let (proof, _) = initiator.prove(&challenge_of(&first)).unwrap();
    first.verify(&proof).unwrap();
    let second = Stranger::new(recorded)
        .unwrap()
        .challenge(&keys[2])
        .unwrap();
    assert_eq!(second.verify(&proof).err().unwrap().code, Code::Untrusted);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is changed in any frame, the side that reads it is not convinced.
    #[test]
    fn no_bit_can_be_changed(frame in 0..3, at in any::<prop::sample::Index>(), bit in 0..8u8) {
        let keys = keys();
        let initiator = Initiator::new(&keys[1], &hello()).unwrap();
        let flip = |bytes: &mut [u8]| bytes[at.index(bytes.len())] ^= 1 << bit;
        let mut sent = *initiator.hello();
        if frame == 0 {
            flip(&mut sent);
        }
        let stranger = Stranger::new(sent);
        let challenged = match stranger.and_then(|stranger| stranger.challenge(&keys[2])) {
            Err(error) => {
                prop_assert_eq!((frame, error.code), (0, Code::Untrusted));
                return Ok(());
            }
            Ok(challenged) => challenged,
        };
        let mut challenge = challenge_of(&challenged);
        if frame == 1 {
            flip(&mut challenge);
        }
        match initiator.prove(&challenge) {
            Err(error) => prop_assert_eq!((frame, error.code), (1, Code::Untrusted)),
            Ok((mut proof, _)) => {
                prop_assert_eq!(frame, 2);
                flip(&mut proof);
                prop_assert!(challenged.verify(&proof).is_err());
            }
        }
    }

    /// Arbitrary bytes are refused.
    #[test]
    fn garbage_is_refused(
        bytes in prop::collection::vec(any::<u8>(), HELLO_BYTES),
        keep_head in any::<bool>(),
    ) {
        let keys = keys();
        let mut frame: [u8; HELLO_BYTES] = array(&bytes);
        if keep_head {
            frame[..CLEAR].copy_from_slice(&hello().clear(&keys[0].id(), Suite::ChaCha));
        }
        if let Ok(stranger) = Stranger::new(frame) {
            prop_assert!(stranger.challenge(&keys[2]).is_err());
        }
    }
}
