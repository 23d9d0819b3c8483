//! What comes instead of a handshake, and after it.

use std::sync::LazyLock;

use super::cipher::Cipher;
use super::handshake::{
    ANSWER_BYTES, CHALLENGE_BYTES, HELLO_BYTES, Hello, Initiator, Lane, PROOF_BYTES, Purpose,
    Stranger,
};
use super::keys::GroupKey;

static KEYS: LazyLock<Vec<GroupKey>> = LazyLock::new(|| GroupKey::of_ranks(2, [0; 32], true));

fn hello() -> Hello {
    Hello {
        purpose: Purpose::TcpData,
        lane: Lane::Collective,
        from: 0,
        to: 1,
        link: [0; 16],
    }
}

/// Whatever comes instead of the frames of a handshake, in the order hello, challenge, proof, answer, record: neither
/// side is convinced, and nothing is opened.
pub fn handshake(bytes: &[u8]) {
    let Some((hello_frame, rest)) = bytes.split_first_chunk::<HELLO_BYTES>() else {
        return;
    };
    if let Ok(stranger) = Stranger::new(*hello_frame) {
        let _ = (stranger.group(), stranger.to());
        assert!(stranger.challenge(&KEYS[1]).is_err());
    }
    let Some((challenge, rest)) = rest.split_first_chunk::<CHALLENGE_BYTES>() else {
        return;
    };
    let initiator = || Initiator::new(&KEYS[0], &hello()).expect("a hello");
    assert!(initiator().prove(challenge).is_err());
    let Some((proof, rest)) = rest.split_first_chunk::<PROOF_BYTES>() else {
        return;
    };
    let begin = || {
        let initiator = initiator();
        let stranger = Stranger::new(*initiator.hello()).expect("a hello");
        let challenged = stranger.challenge(&KEYS[1]).expect("a member");
        (initiator, challenged)
    };
    let (_, challenged) = begin();
    assert!(challenged.verify(proof).is_err());
    let Some((answer, record)) = rest.split_first_chunk::<ANSWER_BYTES>() else {
        return;
    };
    let (initiator, challenged) = begin();
    let frame = challenged.frame()[1..].try_into().expect("its length");
    let (proof, mut proven) = initiator.prove(frame).expect("the acceptor");
    let (_, answers) = challenged.verify(&proof).expect("the initiator");
    assert!(proven.answer(answer).is_err());
    let mut cipher: Cipher = answers.into_cipher();
    let mut opened = vec![0; record.len()];
    assert!(cipher.open(record, &mut opened).is_err());
}

/// A conversation of other members of another group.
#[cfg(test)]
pub(crate) fn seed() -> Vec<u8> {
    let keys = GroupKey::of_ranks(2, [0; 32], true);
    let initiator = Initiator::new(&keys[0], &hello()).expect("a hello");
    let mut bytes = initiator.hello().to_vec();
    let stranger = Stranger::new(*initiator.hello()).expect("a hello");
    let challenged = stranger.challenge(&keys[1]).expect("a member");
    let frame: [u8; CHALLENGE_BYTES] = challenged.frame()[1..].try_into().expect("its length");
    bytes.extend(frame);
    let (proof, proven) = initiator.prove(&frame).expect("the acceptor");
    bytes.extend(proof);
    bytes.extend([0; ANSWER_BYTES]);
    let mut sealed = Vec::new();
    proven.into_cipher().seal(b"a message", &mut sealed);
    bytes.extend(&sealed[Cipher::HEAD..]);
    bytes
}
