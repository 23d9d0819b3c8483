//! The side that a connection comes to.

use snow::TransportState;

use super::noise::{Suite, begin, seal, transport, untrusted};
use super::words::{Answer, Hello, Reply, array};
use super::{
    ANSWER_BYTES, CHALLENGE_BYTES, CLEAR, HELLO_BYTES, MAGIC, PROOF_BYTES, REQUEST, TAG, VERSION,
};
use crate::error::{Error, Result};
use crate::transport::cipher::Cipher;
use crate::transport::keys::GroupKey;
use crate::types::Rank;

/// The acceptor's side with a hello that is not believed yet.
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

    /// The cipher for the rest of the conversation.
    pub fn into_cipher(self) -> Cipher {
        Cipher::new(self.session)
    }
}
