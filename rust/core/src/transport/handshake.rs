//! The beginning of every connection: both ends prove that they are the ranks they say they are before either believes
//! a byte.
//!
//! ```text
//! initiator                                             acceptor
//!     | magic, version, suite, group id, from, to,           |
//!     |   first Noise message {purpose, lane, link id}       |
//!     | ---------------------------------------------------> |   looks up the group and the public key of `from`
//!     |   "go on", second Noise message                      |
//!     | <--------------------------------------------------- |
//!     |   first transport message, empty                     |
//!     | ---------------------------------------------------> |   only now acts on what it was asked for
//!     |   transport message {answer}                         |
//!     | <--------------------------------------------------- |
//! ```
//!
//! The Noise pattern is `KKpsk0` (Noise Protocol Framework, revision 34; library `snow`): each side holds its own private
//! key and knows the other's public key from the group's table, and the job's secret, where there is one, is mixed in
//! first. What goes in clear before the first message is its prologue, so no field can be changed on the way. The first
//! message proves that the initiator holds its key, but it could be a recording; the empty message after the second one
//! cannot, since that depends on the acceptor's fresh key.
//!
//! A hello that is wrong in any way is answered by one byte ([`Reply::Refused`]), the same for every reason.
//!
//! The handshake ends with the keys of a [`Cipher`], which encrypts the connection where the group asks for that.
//! Otherwise the bytes that follow are as they are, and an attacker on the path can read and alter them.
//!
//! This module does no I/O: it makes frames and judges them.

use std::fmt;

use snow::params::NoiseParams;
use snow::{HandshakeState, TransportState};

use super::cipher::Cipher;
use super::keys::GroupKey;
use crate::error::{Code, Error, Result};
use crate::types::Rank;

/// The first bytes of every connection.
pub const MAGIC: [u8; 8] = *b"unisono\n";
/// The version of the handshake and of what follows it.
pub const VERSION: u16 = 2;
/// What is sent in clear before the first Noise message.
const CLEAR: usize = 36;
/// Purpose, lane, link.
pub(super) const REQUEST: usize = 18;
/// The authentication tag of a message.
const TAG: usize = 16;
/// A public key that is made for one connection.
const KEY: usize = 32;
/// Bytes of the initiator's first frame.
pub const HELLO_BYTES: usize = CLEAR + KEY + REQUEST + TAG;
/// Bytes of the acceptor's first frame after its first byte, which is a [`Reply`].
pub const CHALLENGE_BYTES: usize = KEY + TAG;
/// Bytes of the initiator's second frame.
pub const PROOF_BYTES: usize = TAG;
/// Bytes of each answer of the acceptor.
pub const ANSWER_BYTES: usize = 1 + TAG;

/// The first byte that an acceptor sends, not authenticated: what follows it, or why nothing does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reply {
    /// The challenge follows.
    GoOn = 1,
    /// Too many connections are in their handshake: come again.
    Busy = 2,
    /// The hello is not one of a member of a group that is here.
    Refused = 3,
}

impl Reply {
    /// The reply that travels as `number`.
    pub fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::GoOn),
            2 => Some(Self::Busy),
            3 => Some(Self::Refused),
            _ => None,
        }
    }
}

/// With what a connection is authenticated, and encrypted where that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Suite {
    /// Fast where the processor has instructions for it.
    Aes = 1,
    /// Fast everywhere.
    ChaCha = 2,
}

impl Suite {
    /// What is faster on this machine; the acceptor takes both.
    fn fastest() -> Self {
        #[cfg(target_arch = "x86_64")]
        let has_aes = is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq");
        #[cfg(target_arch = "aarch64")]
        let has_aes = std::arch::is_aarch64_feature_detected!("aes");
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let has_aes = false;
        if has_aes { Self::Aes } else { Self::ChaCha }
    }

    fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Aes),
            2 => Some(Self::ChaCha),
            _ => None,
        }
    }

    fn parameters(self) -> NoiseParams {
        let name = match self {
            Self::Aes => "Noise_KKpsk0_25519_AESGCM_SHA256",
            Self::ChaCha => "Noise_KKpsk0_25519_ChaChaPoly_SHA256",
        };
        name.parse().expect("a valid pattern")
    }
}

/// One side of a handshake with the rank `peer` of the group, in the state before its first message.
fn begin(
    key: &GroupKey,
    suite: Suite,
    peer: u32,
    clear: &[u8],
    is_initiator: bool,
) -> Result<HandshakeState> {
    let public = key
        .member(peer)
        .ok_or_else(|| untrusted("there is no such rank in its group"))?;
    // Whether bytes will be encrypted belongs to what both must agree on.
    let prologue = [clear, &[u8::from(key.encrypts())]].concat();
    let build = || {
        let builder = snow::Builder::new(suite.parameters())
            .psk(0, key.shared())?
            .local_private_key(key.private())?
            .remote_public_key(public)?
            .prologue(&prologue)?;
        if is_initiator {
            builder.build_initiator()
        } else {
            builder.build_responder()
        }
    };
    build().map_err(|cause| Error::internal(format!("begin a handshake: {cause}")))
}

fn untrusted(what: impl Into<String>) -> Error {
    Error::new(Code::Untrusted, what)
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
    /// The acceptor could not make its end of the link from what it was given.
    Failed = 4,
    /// The acceptor was in the group and has left it.
    Left = 5,
}

impl Answer {
    fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Accept),
            2 => Some(Self::Crossing),
            3 => Some(Self::Duplicate),
            4 => Some(Self::Failed),
            5 => Some(Self::Left),
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
    fn clear(&self, group: &[u8; 16], suite: Suite) -> [u8; CLEAR] {
        let mut clear = [0; CLEAR];
        clear[..8].copy_from_slice(&MAGIC);
        clear[8..10].copy_from_slice(&VERSION.to_le_bytes());
        clear[10] = suite as u8;
        clear[12..28].copy_from_slice(group);
        clear[28..32].copy_from_slice(&self.from.to_le_bytes());
        clear[32..36].copy_from_slice(&self.to.to_le_bytes());
        clear
    }

    pub(super) fn request(&self) -> [u8; REQUEST] {
        let mut request = [0; REQUEST];
        request[0] = self.purpose as u8;
        request[1] = self.lane as u8;
        request[2..].copy_from_slice(&self.link);
        request
    }

    fn from_request(request: &[u8; REQUEST], from: u32, to: u32) -> Option<Self> {
        Some(Self {
            purpose: Purpose::from_number(request[0])?,
            lane: Lane::from_number(request[1])?,
            from,
            to,
            link: array(&request[2..]),
        })
    }
}

/// The initiator's side, before the challenge.
pub struct Initiator {
    state: HandshakeState,
    hello: [u8; HELLO_BYTES],
}

impl Initiator {
    /// Begins a handshake with the rank `hello.to` of the group, as its rank `hello.from`.
    ///
    /// # Errors
    /// `Untrusted` when the group has no such rank; `Internal` when no key can be made.
    pub fn new(key: &GroupKey, hello: &Hello) -> Result<Self> {
        Self::asking(key, hello, &hello.request())
    }

    /// As [`Initiator::new`], asking for what these bytes say.
    pub(super) fn asking(key: &GroupKey, hello: &Hello, request: &[u8; REQUEST]) -> Result<Self> {
        let suite = Suite::fastest();
        let clear = hello.clear(&key.id(), suite);
        let mut state = begin(key, suite, hello.to, &clear, true)?;
        let mut frame = [0; HELLO_BYTES];
        frame[..CLEAR].copy_from_slice(&clear);
        state
            .write_message(request, &mut frame[CLEAR..])
            .map_err(|cause| Error::internal(format!("write a hello: {cause}")))?;
        Ok(Self {
            state,
            hello: frame,
        })
    }

    /// The frame to send first.
    pub fn hello(&self) -> &[u8; HELLO_BYTES] {
        &self.hello
    }

    /// Judges the acceptor's challenge; gives the proof to send and what judges the answers.
    ///
    /// # Errors
    /// `Untrusted` when the acceptor is not the rank that the hello was meant for.
    pub fn prove(
        mut self,
        challenge: &[u8; CHALLENGE_BYTES],
    ) -> Result<([u8; PROOF_BYTES], Proven)> {
        self.state
            .read_message(challenge, &mut [0; TAG])
            .map_err(|_| untrusted("the other side does not hold that rank's key"))?;
        let mut session = transport(self.state)?;
        let mut proof = [0; PROOF_BYTES];
        seal(&mut session, &[], &mut proof)?;
        Ok((proof, Proven { session }))
    }
}

/// The initiator's side after its proof: the acceptor is known to be the rank it was meant for.
pub struct Proven {
    session: TransportState,
}

impl Proven {
    /// Judges the next answer.
    ///
    /// # Errors
    /// `Untrusted` when the acceptor did not write it for this place in this conversation.
    pub fn answer(&mut self, frame: &[u8; ANSWER_BYTES]) -> Result<Answer> {
        let mut answer = [0; ANSWER_BYTES];
        let read = self.session.read_message(frame, &mut answer);
        read.ok()
            .and_then(|_| Answer::from_number(answer[0]))
            .ok_or_else(|| untrusted("the answer to the handshake is not authentic"))
    }

    /// What encrypts the rest of the conversation.
    pub fn into_cipher(self) -> Cipher {
        Cipher::new(self.session)
    }
}

/// The acceptor's side with a hello of which nothing is believed.
pub struct Stranger {
    hello: [u8; HELLO_BYTES],
    suite: Suite,
}

impl Stranger {
    /// Looks at the magic bytes, the version and the suite, nothing else.
    ///
    /// # Errors
    /// `Untrusted`, saying what the other side seems to be.
    pub fn new(hello: [u8; HELLO_BYTES]) -> Result<Self> {
        if hello[..8] != MAGIC {
            return Err(untrusted("it does not speak unisono's protocol"));
        }
        let version = u16::from_le_bytes(array(&hello[8..10]));
        let suite = Suite::from_number(hello[10]).filter(|_| version == VERSION);
        let suite = suite.ok_or_else(|| {
            untrusted(format!(
                "it speaks version {version} of the protocol, this side version {VERSION}"
            ))
        })?;
        Ok(Self { hello, suite })
    }

    /// The group it claims to belong to: 16 opaque bytes to look up.
    pub fn group(&self) -> [u8; 16] {
        array(&self.hello[12..28])
    }

    /// The rank it claims to be.
    fn from(&self) -> u32 {
        u32::from_le_bytes(array(&self.hello[28..32]))
    }

    /// The rank it wants to speak to: four more opaque bytes for the look-up.
    pub fn to(&self) -> Rank {
        u32::from_le_bytes(array(&self.hello[32..36])) as Rank
    }

    /// Judges the hello as far as that goes, with the key of the rank that it is meant for, and makes the challenge.
    ///
    /// # Errors
    /// `Untrusted` when it was not written with the key of the rank that it claims to be from, for this rank.
    pub fn challenge(self, key: &GroupKey) -> Result<Challenged> {
        let (from, to) = (self.from(), self.to() as u32);
        let (clear, message) = self.hello.split_at(CLEAR);
        let mut state = begin(key, self.suite, from, clear, false)?;
        let mut request = [0; REQUEST + TAG];
        let hello = state
            .read_message(message, &mut request)
            .map_err(|_| untrusted("its hello does not prove that it is a member of the group"))
            .and_then(|_| {
                Hello::from_request(&array(&request[..REQUEST]), from, to)
                    .ok_or_else(|| untrusted("its hello has no meaning"))
            })?;
        let mut frame = [0; 1 + CHALLENGE_BYTES];
        frame[0] = Reply::GoOn as u8;
        state
            .write_message(&[], &mut frame[1..])
            .map_err(|cause| Error::internal(format!("write a challenge: {cause}")))?;
        Ok(Challenged {
            session: transport(state)?,
            hello,
            frame,
        })
    }
}

/// The acceptor's side, waiting for the proof that the hello is not a recording.
pub struct Challenged {
    session: TransportState,
    hello: Hello,
    frame: [u8; 1 + CHALLENGE_BYTES],
}

impl Challenged {
    /// The frame to send, with the byte before it.
    pub fn frame(&self) -> &[u8; 1 + CHALLENGE_BYTES] {
        &self.frame
    }

    /// Judges the proof; gives the hello, which may now be believed, and what signs the answers.
    ///
    /// # Errors
    /// `Untrusted` when the initiator does not hold the key of the rank that the hello is from.
    pub fn verify(mut self, proof: &[u8; PROOF_BYTES]) -> Result<(Hello, Answers)> {
        self.session
            .read_message(proof, &mut [0; PROOF_BYTES])
            .map_err(|_| untrusted("it does not hold the key of the rank that it claims to be"))?;
        let answers = Answers {
            session: self.session,
        };
        Ok((self.hello, answers))
    }
}

/// The acceptor's side with a proven member.
pub struct Answers {
    session: TransportState,
}

impl Answers {
    /// The frame of the next answer.
    ///
    /// # Errors
    /// `Internal` when the conversation has used up its numbers, which takes longer than any process lives.
    pub fn frame(&mut self, answer: Answer) -> Result<[u8; ANSWER_BYTES]> {
        let mut frame = [0; ANSWER_BYTES];
        seal(&mut self.session, &[answer as u8], &mut frame)?;
        Ok(frame)
    }

    /// What encrypts the rest of the conversation.
    pub fn into_cipher(self) -> Cipher {
        Cipher::new(self.session)
    }
}

fn transport(state: HandshakeState) -> Result<TransportState> {
    state
        .into_transport_mode()
        .map_err(|cause| Error::internal(format!("end a handshake: {cause}")))
}

fn seal(session: &mut TransportState, bytes: &[u8], frame: &mut [u8]) -> Result<()> {
    session
        .write_message(bytes, frame)
        .map(drop)
        .map_err(|cause| Error::internal(format!("write in a handshake: {cause}")))
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

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

    /// What lies in the store, all public keys, gives nothing to a process that holds none of the private ones.
    #[test]
    fn public_keys_alone_convince_no_member() {
        let ours = keys();
        let members: Vec<_> = (0..4).map(|rank| *ours[0].member(rank).unwrap()).collect();
        let own = std::sync::Arc::new(super::super::keys::KeyPair::random().unwrap());
        let forged = GroupKey::new(own, members, [0; 32], false);
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
}
