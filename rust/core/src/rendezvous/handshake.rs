//! Who may join: both ends of a connection prove that they know the group's secret before either believes a byte.
//!
//! A group has a random secret that its ranks learn through the store. A connection begins with four frames of
//! fixed size:
//!
//! ```text
//! initiator                                             acceptor
//!     | Hello: magic, version, group id, purpose, lane,    |
//!     |        from, to, link id, nonce                    |
//!     | -------------------------------------------------> |   reads magic, version and 16 opaque bytes
//!     |            nonce, mac("acceptor", hello, nonce)    |
//!     | <------------------------------------------------- |
//!     | mac("initiator", hello, nonce, mac)                |
//!     | -------------------------------------------------> |   only now interprets the hello
//!     |       answer, mac("answer", step, ..., answer)     |
//!     | <------------------------------------------------- |
//! ```
//!
//! Every mac is HMAC-SHA256 keyed by a key derived from the secret. Both nonces are fresh, so nothing can be
//! replayed; each mac begins with its sender's role, so nothing can be reflected; and each covers all that was
//! said before, so no field can be changed on the way. Macs are compared in constant time. A side that is not
//! convinced closes the connection without a word.
//!
//! This module does no I/O: it makes frames and judges them. It authenticates the peer when the connection is made;
//! it does not protect the bytes that follow from someone who can alter packets in the network.

use std::fmt;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::error::{Code, Error, Result};
use crate::types::Rank;

/// The first bytes of every connection.
pub const MAGIC: [u8; 8] = *b"unisono\n";
/// The version of the handshake and of what follows it.
pub const VERSION: u16 = 1;
/// Bytes of the initiator's first frame.
pub const HELLO_BYTES: usize = 84;
/// Bytes of the acceptor's first frame.
pub const CHALLENGE_BYTES: usize = 64;
/// Bytes of the initiator's second frame.
pub const PROOF_BYTES: usize = 32;
/// Bytes of each answer of the acceptor.
pub const ANSWER_BYTES: usize = 33;

/// What a group is known by and what its members know.
///
/// Make it with the constructors: `id` is public and always the one that belongs to `secret`.
#[derive(Clone)]
pub struct GroupKey {
    /// The group's public name, derived from the secret.
    pub id: [u8; 16],
    /// What every member knows and nobody else does.
    pub secret: [u8; 32],
}

impl GroupKey {
    /// A new random key.
    ///
    /// # Errors
    /// `System` when the operating system gives no random bytes.
    pub fn random() -> Result<Self> {
        Ok(Self::from_bytes(random_bytes()?))
    }

    /// The key with this secret.
    pub fn from_bytes(secret: [u8; 32]) -> Self {
        let tag = keyed(&secret, &[b"unisono v1 group id"]);
        let mut id = [0; 16];
        id.copy_from_slice(&tag[..16]);
        Self { id, secret }
    }

    /// The key of a group split off from this one. The same label gives the same key on every member.
    #[must_use]
    pub fn derive(&self, label: &[u8]) -> Self {
        Self::from_bytes(keyed(&self.secret, &[b"unisono v1 derived group", label]))
    }

    /// This key strengthened by a secret that the user gave to every rank: who learns only one of the two stays
    /// outside.
    #[must_use]
    pub fn mix(&self, user_secret: &[u8]) -> Self {
        Self::from_bytes(keyed(
            &self.secret,
            &[b"unisono v1 user secret", user_secret],
        ))
    }

    fn handshake_key(&self) -> [u8; 32] {
        keyed(&self.secret, &[b"unisono v1 handshake"])
    }
}

impl fmt::Debug for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupKey({})", Hex(&self.id))
    }
}

/// Bytes shown as hexadecimal digits.
pub(crate) struct Hex<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Which of the streams between two ranks a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Lane {
    /// Carries collectives, in the order in which they were called.
    Collective = 0,
    /// Carries send and recv.
    PointToPoint = 1,
}

impl Lane {
    fn from_number(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Collective),
            1 => Some(Self::PointToPoint),
            _ => None,
        }
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Collective => "collective",
            Self::PointToPoint => "point-to-point",
        })
    }
}

/// What a connection will be part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    /// The control channel of a shared memory link; the segment follows the answer.
    SharedMemory = 1,
    /// The stream of a TCP link; its control channel is a second connection with the same link id.
    TcpData = 2,
    /// The control channel of a TCP link.
    TcpControl = 3,
}

impl Purpose {
    fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::SharedMemory),
            2 => Some(Self::TcpData),
            3 => Some(Self::TcpControl),
            _ => None,
        }
    }
}

/// What the acceptor says to a proven member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Answer {
    /// Go on.
    Accept = 1,
    /// The acceptor is connecting to the initiator, and its attempt wins.
    Crossing = 2,
    /// The acceptor has this link already.
    Duplicate = 3,
    /// The acceptor is not the rank that the hello is addressed to, or has no such peer.
    WrongRank = 4,
    /// The acceptor could not make its end of the link from what it was given.
    Failed = 5,
    /// The acceptor was in the group and has left it.
    Left = 6,
}

impl Answer {
    fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Accept),
            2 => Some(Self::Crossing),
            3 => Some(Self::Duplicate),
            4 => Some(Self::WrongRank),
            5 => Some(Self::Failed),
            6 => Some(Self::Left),
            _ => None,
        }
    }
}

/// Who wants to open what to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What the connection is for.
    pub purpose: Purpose,
    /// Which link of the two ranks.
    pub lane: Lane,
    /// The initiator's rank.
    pub from: u32,
    /// The acceptor's rank.
    pub to: u32,
    /// Random; the connections of one link have the same.
    pub link: [u8; 16],
}

impl Hello {
    fn encode(&self, group: &[u8; 16], nonce: &[u8; 32]) -> [u8; HELLO_BYTES] {
        let mut frame = [0; HELLO_BYTES];
        frame[..8].copy_from_slice(&MAGIC);
        frame[8..10].copy_from_slice(&VERSION.to_le_bytes());
        frame[10] = self.purpose as u8;
        frame[11] = self.lane as u8;
        frame[12..28].copy_from_slice(group);
        frame[28..32].copy_from_slice(&self.from.to_le_bytes());
        frame[32..36].copy_from_slice(&self.to.to_le_bytes());
        frame[36..52].copy_from_slice(&self.link);
        frame[52..84].copy_from_slice(nonce);
        frame
    }

    fn decode(frame: &[u8; HELLO_BYTES]) -> Option<Self> {
        Some(Self {
            purpose: Purpose::from_number(frame[10])?,
            lane: Lane::from_number(frame[11])?,
            from: u32::from_le_bytes(array(&frame[28..32])),
            to: u32::from_le_bytes(array(&frame[32..36])),
            link: array(&frame[36..52]),
        })
    }
}

/// The initiator's side, before the challenge.
pub struct Initiator {
    key: [u8; 32],
    hello: [u8; HELLO_BYTES],
}

impl Initiator {
    /// Begins a handshake with a fresh nonce.
    ///
    /// # Errors
    /// `System` when the operating system gives no random bytes.
    pub fn new(key: &GroupKey, hello: &Hello) -> Result<Self> {
        Ok(Self {
            key: key.handshake_key(),
            hello: hello.encode(&key.id, &random_bytes()?),
        })
    }

    /// The frame to send first.
    pub fn hello(&self) -> &[u8; HELLO_BYTES] {
        &self.hello
    }

    /// Judges the acceptor's challenge; gives the proof to send and what judges the answers.
    ///
    /// # Errors
    /// `Untrusted` when the acceptor does not know the secret.
    pub fn prove(self, challenge: &[u8; CHALLENGE_BYTES]) -> Result<([u8; PROOF_BYTES], Proven)> {
        let (nonce, tag) = challenge.split_at(32);
        verify(&self.key, &[b"acceptor", &self.hello, nonce], tag).ok_or_else(|| {
            Error::new(
                Code::Untrusted,
                "the other side does not know the group's secret",
            )
        })?;
        let proof = keyed(&self.key, &[b"initiator", &self.hello, challenge]);
        let session = Session::new(&self.key, &self.hello, challenge, &proof);
        Ok((proof, Proven { session, step: 0 }))
    }
}

/// The initiator's side after its proof: the acceptor is known to be a member.
pub struct Proven {
    session: Session,
    step: u8,
}

impl Proven {
    /// Judges the next answer.
    ///
    /// # Errors
    /// `Untrusted` when the acceptor did not write it for this place in this conversation.
    pub fn answer(&mut self, frame: &[u8; ANSWER_BYTES]) -> Result<Answer> {
        self.step += 1;
        verify(&self.session.0, &[&[self.step, frame[0]]], &frame[1..])
            .and_then(|()| Answer::from_number(frame[0]))
            .ok_or_else(|| {
                Error::new(
                    Code::Untrusted,
                    "the answer to the handshake is not authentic",
                )
            })
    }
}

/// The acceptor's side with a hello of which nothing is believed.
pub struct Stranger {
    hello: [u8; HELLO_BYTES],
}

impl Stranger {
    /// Looks at the magic bytes and the version, nothing else.
    ///
    /// # Errors
    /// `Untrusted`, saying what the other side seems to be.
    pub fn new(hello: [u8; HELLO_BYTES]) -> Result<Self> {
        if hello[..8] != MAGIC {
            return Err(Error::new(
                Code::Untrusted,
                "it does not speak unisono's protocol",
            ));
        }
        let version = u16::from_le_bytes(array(&hello[8..10]));
        if version != VERSION {
            return Err(Error::new(
                Code::Untrusted,
                format!("it speaks version {version} of the protocol, this side version {VERSION}"),
            ));
        }
        Ok(Self { hello })
    }

    /// The group it claims to belong to: 16 opaque bytes to look up.
    pub fn group(&self) -> [u8; 16] {
        array(&self.hello[12..28])
    }

    /// The rank it wants to speak to: four more opaque bytes for the look-up.
    pub fn rank(&self) -> Rank {
        u32::from_le_bytes(array(&self.hello[32..36])) as Rank
    }

    /// Proves this side's membership and asks for the other's, with a fresh nonce.
    ///
    /// # Errors
    /// `System` when the operating system gives no random bytes.
    pub fn challenge(self, key: &GroupKey) -> Result<Challenged> {
        let key = key.handshake_key();
        let nonce: [u8; 32] = random_bytes()?;
        let mut frame = [0; CHALLENGE_BYTES];
        frame[..32].copy_from_slice(&nonce);
        frame[32..].copy_from_slice(&keyed(&key, &[b"acceptor", &self.hello, &nonce]));
        Ok(Challenged {
            key,
            hello: self.hello,
            frame,
        })
    }
}

/// The acceptor's side, waiting for the proof.
pub struct Challenged {
    key: [u8; 32],
    hello: [u8; HELLO_BYTES],
    frame: [u8; CHALLENGE_BYTES],
}

impl Challenged {
    /// The frame to send.
    pub fn frame(&self) -> &[u8; CHALLENGE_BYTES] {
        &self.frame
    }

    /// Judges the proof; gives the hello, which may now be believed, and what signs the answers.
    ///
    /// # Errors
    /// `Untrusted` when the initiator does not know the secret, or sent a hello without meaning.
    pub fn verify(self, proof: &[u8; PROOF_BYTES]) -> Result<(Hello, Answers)> {
        verify(&self.key, &[b"initiator", &self.hello, &self.frame], proof)
            .ok_or_else(|| Error::new(Code::Untrusted, "it does not know the group's secret"))?;
        let hello = Hello::decode(&self.hello)
            .ok_or_else(|| Error::new(Code::Untrusted, "its hello has no meaning"))?;
        let session = Session::new(&self.key, &self.hello, &self.frame, proof);
        Ok((hello, Answers { session, step: 0 }))
    }
}

/// The acceptor's side with a proven member.
pub struct Answers {
    session: Session,
    step: u8,
}

impl Answers {
    /// The frame of the next answer.
    pub fn frame(&mut self, answer: Answer) -> [u8; ANSWER_BYTES] {
        self.step += 1;
        let mut frame = [0; ANSWER_BYTES];
        frame[0] = answer as u8;
        let tag = keyed(&self.session.0, &[&[self.step, answer as u8]]);
        frame[1..].copy_from_slice(&tag);
        frame
    }
}

/// A key that belongs to one conversation.
struct Session([u8; 32]);

impl Session {
    fn new(
        key: &[u8; 32],
        hello: &[u8; HELLO_BYTES],
        challenge: &[u8; CHALLENGE_BYTES],
        proof: &[u8; PROOF_BYTES],
    ) -> Self {
        Self(keyed(key, &[b"answer", hello, challenge, proof]))
    }
}

/// `N` random bytes from the operating system.
///
/// # Errors
/// `System` when there are none.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|cause| Error::system("draw random bytes", cause))?;
    Ok(bytes)
}

/// HMAC-SHA256 of the parts, each preceded by its length, so that no two lists of parts have the same image.
fn mac(key: &[u8; 32], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

fn keyed(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    mac(key, parts).finalize().into_bytes().into()
}

/// `Some` when `tag` is the mac of the parts, found in constant time.
fn verify(key: &[u8; 32], parts: &[&[u8]], tag: &[u8]) -> Option<()> {
    mac(key, parts).verify_slice(tag).ok()
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        Hello {
            purpose: Purpose::TcpData,
            lane: Lane::PointToPoint,
            from: 1,
            to: 7,
            link: [9; 16],
        }
    }

    #[test]
    fn members_convince_each_other() {
        let key = GroupKey::random().unwrap();
        let initiator = Initiator::new(&key, &hello()).unwrap();
        let stranger = Stranger::new(*initiator.hello()).unwrap();
        assert_eq!(stranger.group(), key.id);
        let challenged = stranger.challenge(&key).unwrap();
        let (proof, mut proven) = initiator.prove(challenged.frame()).unwrap();
        let (said, mut answers) = challenged.verify(&proof).unwrap();
        assert_eq!(said, hello());
        for answer in [Answer::Accept, Answer::Failed] {
            assert_eq!(proven.answer(&answers.frame(answer)).unwrap(), answer);
        }
    }

    #[test]
    fn an_answer_holds_for_its_step_alone() {
        let key = GroupKey::random().unwrap();
        let initiator = Initiator::new(&key, &hello()).unwrap();
        let challenged = Stranger::new(*initiator.hello()).unwrap();
        let challenged = challenged.challenge(&key).unwrap();
        let (proof, mut proven) = initiator.prove(challenged.frame()).unwrap();
        let (_, mut answers) = challenged.verify(&proof).unwrap();
        let first = answers.frame(Answer::Accept);
        proven.answer(&first).unwrap();
        assert_eq!(proven.answer(&first).unwrap_err().code, Code::Untrusted);
    }

    #[test]
    fn another_secret_convinces_nobody() {
        let ours = GroupKey::random().unwrap();
        let mut theirs = GroupKey::random().unwrap();
        theirs.id = ours.id;
        let initiator = Initiator::new(&theirs, &hello()).unwrap();
        let challenged = Stranger::new(*initiator.hello()).unwrap();
        let challenged = challenged.challenge(&ours).unwrap();
        let forged = keyed(
            &theirs.handshake_key(),
            &[b"initiator", initiator.hello(), challenged.frame()],
        );
        assert_eq!(
            initiator.prove(challenged.frame()).err().unwrap().code,
            Code::Untrusted
        );
        assert_eq!(
            challenged.verify(&forged).err().unwrap().code,
            Code::Untrusted
        );
    }

    #[test]
    fn a_challenge_cannot_be_reflected_as_proof() {
        let key = GroupKey::random().unwrap();
        let initiator = Initiator::new(&key, &hello()).unwrap();
        let challenged = Stranger::new(*initiator.hello()).unwrap();
        let challenged = challenged.challenge(&key).unwrap();
        let reflected = array(&challenged.frame()[32..]);
        assert_eq!(
            challenged.verify(&reflected).err().unwrap().code,
            Code::Untrusted
        );
    }

    #[test]
    fn a_transcript_cannot_be_replayed() {
        let key = GroupKey::random().unwrap();
        let initiator = Initiator::new(&key, &hello()).unwrap();
        let recorded = *initiator.hello();
        let first = Stranger::new(recorded).unwrap().challenge(&key).unwrap();
        let (proof, _) = initiator.prove(first.frame()).unwrap();
        first.verify(&proof).unwrap();
        let second = Stranger::new(recorded).unwrap().challenge(&key).unwrap();
        assert_eq!(second.verify(&proof).err().unwrap().code, Code::Untrusted);
    }

    #[test]
    fn keys_derive_deterministically_and_apart() {
        let key = GroupKey::from_bytes([3; 32]);
        assert_eq!(key.derive(b"a").secret, key.derive(b"a").secret);
        let ids = [
            key.id,
            key.derive(b"a").id,
            key.derive(b"b").id,
            key.mix(b"a").id,
            key.derive(b"").id,
        ];
        for (i, id) in ids.iter().enumerate() {
            assert!(!ids[..i].contains(id));
        }
        assert!(
            !format!("{key:?}").contains("03"),
            "the secret stays out of logs"
        );
    }

    proptest! {
        /// Whatever is changed in any frame, the side that reads it is not convinced.
        #[test]
        fn no_bit_can_be_changed(frame in 0..3, at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let key = GroupKey::from_bytes([1; 32]);
            let initiator = Initiator::new(&key, &hello()).unwrap();
            let flip = |bytes: &mut [u8]| bytes[at.index(bytes.len())] ^= 1 << bit;
            let mut sent = *initiator.hello();
            if frame == 0 {
                flip(&mut sent);
            }
            let Ok(stranger) = Stranger::new(sent) else { return Ok(()) };
            let challenged = stranger.challenge(&key).unwrap();
            let mut challenge = *challenged.frame();
            if frame == 1 {
                flip(&mut challenge);
            }
            match initiator.prove(&challenge) {
                Err(error) => prop_assert_eq!(error.code, Code::Untrusted),
                Ok((mut proof, _)) => {
                    prop_assert_eq!(frame, 2);
                    flip(&mut proof);
                    prop_assert!(challenged.verify(&proof).is_err());
                }
            }
        }

        /// Arbitrary bytes are refused or reach the proof, which they cannot pass.
        #[test]
        fn garbage_is_refused(
            bytes in prop::collection::vec(any::<u8>(), HELLO_BYTES),
            proof in any::<[u8; PROOF_BYTES]>(),
            keep_head in any::<bool>(),
        ) {
            let mut frame: [u8; HELLO_BYTES] = array(&bytes);
            if keep_head {
                frame[..8].copy_from_slice(&MAGIC);
                frame[8..10].copy_from_slice(&VERSION.to_le_bytes());
            }
            if let Ok(stranger) = Stranger::new(frame) {
                let challenged = stranger.challenge(&GroupKey::from_bytes([1; 32])).unwrap();
                prop_assert!(challenged.verify(&proof).is_err());
            }
        }
    }
}
