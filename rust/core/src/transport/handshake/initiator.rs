//! The side that opens a connection.

use snow::{HandshakeState, TransportState};

use super::noise::{Suite, begin, seal, transport, untrusted};
use super::words::{Answer, Hello};
use super::{ANSWER_BYTES, CHALLENGE_BYTES, CLEAR, HELLO_BYTES, PROOF_BYTES, REQUEST, TAG};
use crate::error::{Error, Result};
use crate::transport::cipher::Cipher;
use crate::transport::keys::GroupKey;

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
    pub(in crate::transport) fn asking(
        key: &GroupKey,
        hello: &Hello,
        request: &[u8; REQUEST],
    ) -> Result<Self> {
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

    /// The cipher for the rest of the conversation.
    pub fn into_cipher(self) -> Cipher {
        Cipher::new(self.session)
    }
}
