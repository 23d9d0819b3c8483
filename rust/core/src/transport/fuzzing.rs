//! Bytes that come instead of a handshake, and after it.

use std::os::unix::net::UnixStream;
use std::sync::LazyLock;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::cipher::{Cipher, Failure, Sealed};
use super::endpoint::Message;
use super::handshake::{
    ANSWER_BYTES, CHALLENGE_BYTES, HELLO_BYTES, Hello, Initiator, Lane, PROOF_BYTES, Purpose,
    REQUEST, Stranger,
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

/// A member's request, in a hello that it has made with its key or over a socket by which it is known. It is refused, or
/// understood so that writing it again gives the same bytes.
pub fn request(bytes: &[u8]) {
    if let Some(message) = bytes.first_chunk()
        && let Some(understood) = Message::read(message)
    {
        assert_eq!(understood.write(), *message);
    }
    let Some(asked) = bytes.first_chunk::<REQUEST>() else {
        return;
    };
    let initiator = Initiator::asking(&KEYS[0], &hello(), asked).expect("a hello");
    let stranger = Stranger::new(*initiator.hello()).expect("it begins as one");
    let Ok(challenged) = stranger.challenge(&KEYS[1]) else {
        return;
    };
    let frame = challenged.frame()[1..].try_into().expect("its length");
    let (proof, _) = initiator.prove(frame).expect("the acceptor");
    let (understood, _) = challenged.verify(&proof).expect("the initiator");
    assert_eq!(understood.request(), *asked);
    assert_eq!((understood.from, understood.to), (0, 1));
}

/// Messages between processes that know each other, for [`request`].
#[cfg(test)]
pub(crate) fn messages() -> Vec<Vec<u8>> {
    let samples = Message::samples().into_iter();
    samples.map(|message| message.write().to_vec()).collect()
}

/// Both ends of a conversation after its handshake.
fn ciphers() -> (Cipher, Cipher) {
    let initiator = Initiator::new(&KEYS[0], &hello()).expect("a hello");
    let stranger = Stranger::new(*initiator.hello()).expect("a hello");
    let challenged = stranger.challenge(&KEYS[1]).expect("a member");
    let frame = challenged.frame()[1..].try_into().expect("its length");
    let (proof, proven) = initiator.prove(frame).expect("the acceptor");
    let (_, answers) = challenged.verify(&proof).expect("the initiator");
    (proven.into_cipher(), answers.into_cipher())
}

/// A stream of records with which something happens on the way: what is received is what was sealed, up to where the stream
/// differs first. Two bytes say what happens to a record and how many of the bytes after them it has.
pub fn sealed(bytes: &[u8]) {
    let (near, far) = UnixStream::pair().expect("descriptors");
    let (mut cipher, opener) = ciphers();
    let mut receiver = Sealed::new(opener);
    // The sealed data: the stream as it should be, the contents, and the lengths of both after each record.
    let (mut right, mut contents, mut ends) = (Vec::new(), Vec::new(), vec![(0, 0)]);
    let (mut wire, mut received) = (Vec::new(), Vec::new());
    let (mut last, mut rest) = (Vec::new(), bytes);
    while let [what, length, parts @ ..] = rest {
        let (content, parts) = parts.split_at(parts.len().min(usize::from(*length)));
        rest = parts;
        let mut record = Vec::new();
        cipher.seal(content, &mut record);
        right.extend_from_slice(&record);
        contents.extend_from_slice(content);
        ends.push((right.len(), contents.len()));
        let sent = match what % 6 {
            0 | 1 => record.clone(),
            2 => content.to_vec(),
            3 => {
                let mut record = record.clone();
                let at = usize::from(what / 6) % record.len();
                record[at] ^= 1;
                record
            }
            // The one before, once more or late.
            4 => last,
            _ => Vec::new(),
        };
        last = record;
        wire.extend_from_slice(&sent);
        let _ = send(&near, &sent, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        let same = wire.iter().zip(&right).take_while(|(a, b)| a == b).count();
        let whole = ends.iter().rev().find(|(end, _)| *end <= same);
        let expected = &contents[..whole.expect("nothing is whole").1];
        let mut piece = vec![0; 1 + usize::from(what / 6)];
        loop {
            match receiver.receive(&far, &mut piece) {
                Ok(count) => received.extend_from_slice(&piece[..count]),
                Err(Failure::Socket(errno)) => {
                    assert_eq!(errno, Errno::AGAIN);
                    break;
                }
                Err(Failure::Forged) => {
                    assert!(same < wire.len() && expected.starts_with(&received));
                    return;
                }
            }
        }
        assert!(received == expected);
    }
}

/// One stream for each change to a record, for [`sealed`].
#[cfg(test)]
pub(crate) fn records() -> Vec<(String, Vec<u8>)> {
    let right = [6 * 9, 5, 1, 2, 3, 4, 5, 0, 0, 6 * 40, 3, 7, 8, 9];
    (0..6)
        .map(|what| {
            let bytes = [&right[..], &[what, 4, 3, 0, 1, 2], &right].concat();
            (format!("then-{what}"), bytes)
        })
        .collect()
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
