//! The bytes on a connection of the [TCP store](super::store): the handshake, frames, requests and replies.
//!
//! ```text
//! client                                       server
//! hello:    magic (8)  Noise message 1 (48)    ->
//!                                              <-  answer:   magic (8)  Noise message 2 (48)
//!                                              <-  or:       refusal (8), and the end
//! proof:    a frame with nothing in it         ->
//! request:  frames                             ->
//!                                              <-  reply:    frames
//! ```
//!
//! The handshake is Noise's NN with a pre-shared key before the first message (`NNpsk0`). The key comes from the name of
//! the job and, where there is one, from its secret, so the server knows by the first message whether the client has
//! them; it answers anything else with the same refusal, whatever is wrong, and interprets nothing of it. The proof
//! tells a client from one that replays another's hello. Neither side has an identity that it could give away.
//!
//! A frame is the length of a Noise message (2) and the message; numbers are little-endian. A request or a reply may
//! span any number of frames, and each side waits for the other before it sends the next:
//!
//! ```text
//! request:  operation (1)  0 (1)  key length (2)  value length (4)  milliseconds (8)  key  value
//! reply:    status (1)  0 (3)  value length (4)  value
//! ```

use std::fmt;
use std::time::Duration;

use snow::{Builder, HandshakeState, TransportState};

use crate::error::{Error, Result};
use crate::rendezvous::secret::Secret;
use crate::rendezvous::store::{MAX_KEY, MAX_VALUE};

const NOISE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// Another version of this protocol has another one.
pub(in crate::rendezvous) const MAGIC: &[u8; 8] = b"unisono2";
/// The answer to whatever is no hello of a member.
pub(in crate::rendezvous) const REFUSAL: &[u8; 8] = b"refused!";
/// A public key and a tag.
const MESSAGE: usize = 32 + TAG;
/// The length of a hello and of its answer.
pub(in crate::rendezvous) const HELLO: usize = MAGIC.len() + MESSAGE;

const TAG: usize = 16;
/// Before a Noise message.
pub(in crate::rendezvous) const FRAME_HEAD: usize = 2;
/// The most bytes of a request or a reply in one frame.
pub(in crate::rendezvous) const FRAME_CONTENT: usize = 16 << 10;
/// The longest Noise message that is sent.
pub(in crate::rendezvous) const LONGEST_FRAME: usize = FRAME_CONTENT + TAG;

const REQUEST_HEAD: usize = 16;
pub(in crate::rendezvous) const REPLY_HEAD: usize = 8;
pub(in crate::rendezvous) const MAX_REQUEST: usize = REQUEST_HEAD + MAX_KEY + MAX_VALUE;

const SET: u8 = 1;
const GET: u8 = 2;
const WAIT: u8 = 3;

/// The reply's value is the key's; empty unless it was asked for.
pub(in crate::rendezvous) const OK: u8 = 0;
/// The key is not set, or was not within the time.
pub(in crate::rendezvous) const ABSENT: u8 = 1;
/// The server holds as much as it is willing to.
pub(in crate::rendezvous) const FULL: u8 = 2;

/// The key that a process must know to use a store: derived from the name of the job, and from the secret where there is one.
#[derive(Clone)]
pub struct StoreKey {
    shared: [u8; 32],
    secret: Option<Secret>,
}

impl StoreKey {
    /// The key to the store of the job called `job`, whose ranks know `secret`. Without a secret it keeps different jobs
    /// apart and strangers out only as far as they do not know the name.
    pub fn new(job: &str, secret: Option<Secret>) -> Self {
        let label = [b"unisono store\0", job.as_bytes()].concat();
        let shared = match &secret {
            Some(secret) => secret.derive(&label),
            None => Secret::from_bytes(b"").derive(&label),
        };
        Self { shared, secret }
    }

    pub(in crate::rendezvous) fn secret(&self) -> Option<&Secret> {
        self.secret.as_ref()
    }

    fn builder(&self) -> Result<Builder<'_>, snow::Error> {
        Builder::new(NOISE.parse()?)
            .prologue(MAGIC)?
            .psk(0, &self.shared)
    }
}

impl fmt::Debug for StoreKey {
    /// Nothing of it but whether there is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreKey(secret: {})", self.secret.is_some())
    }
}

/// A client that has said hello.
pub(in crate::rendezvous) struct Greeting(HandshakeState);

impl Greeting {
    /// Begins a handshake: the bytes are the hello.
    pub(in crate::rendezvous) fn new(key: &StoreKey) -> Result<(Self, [u8; HELLO])> {
        let failed = |cause: snow::Error| {
            Error::system("begin the handshake with the store", cause.to_string())
        };
        let mut handshake = key
            .builder()
            .and_then(Builder::build_initiator)
            .map_err(failed)?;
        let mut hello = [0; HELLO];
        hello[..MAGIC.len()].copy_from_slice(MAGIC);
        handshake
            .write_message(&[], &mut hello[MAGIC.len()..])
            .map_err(failed)?;
        Ok((Self(handshake), hello))
    }

    /// The channel that the server's answer, without its magic, opens. `None`: it does not know the key.
    pub(in crate::rendezvous) fn finish(mut self, answer: &[u8; MESSAGE]) -> Option<Channel> {
        self.0.read_message(answer, &mut []).ok()?;
        self.0.into_transport_mode().ok().map(Channel)
    }
}

/// The server's answer to `hello`, and the channel that opens; `None` if it is not a member's.
pub(in crate::rendezvous) fn answer(
    key: &StoreKey,
    hello: &[u8; HELLO],
) -> Option<(Channel, [u8; HELLO])> {
    let message = hello.strip_prefix(MAGIC)?;
    let mut handshake = key.builder().and_then(Builder::build_responder).ok()?;
    handshake.read_message(message, &mut []).ok()?;
    let mut answer = [0; HELLO];
    answer[..MAGIC.len()].copy_from_slice(MAGIC);
    handshake
        .write_message(&[], &mut answer[MAGIC.len()..])
        .ok()?;
    let channel = Channel(handshake.into_transport_mode().ok()?);
    Some((channel, answer))
}

/// Bytes that were not sealed by the other end, in this order.
#[derive(Debug)]
pub(in crate::rendezvous) struct Forged;

/// The two directions of a connection after its handshake.
#[derive(Debug)]
pub(in crate::rendezvous) struct Channel(TransportState);

impl Channel {
    /// Appends the frame with `content`, at most [`FRAME_CONTENT`], to `frames`.
    pub(in crate::rendezvous) fn seal(&mut self, content: &[u8], frames: &mut Vec<u8>) {
        let length = content.len() + TAG;
        let start = frames.len() + FRAME_HEAD;
        frames.extend((length as u16).to_le_bytes());
        frames.resize(start + length, 0);
        self.0
            .write_message(content, &mut frames[start..])
            .expect("a frame is short, and a connection has fewer than 2^64 of them");
    }

    /// Appends what the Noise message of a frame holds to `content`.
    pub(in crate::rendezvous) fn open(
        &mut self,
        message: &[u8],
        content: &mut Vec<u8>,
    ) -> Result<(), Forged> {
        let start = content.len();
        content.resize(start + message.len(), 0);
        let opened = self.0.read_message(message, &mut content[start..]);
        content.truncate(start + opened.as_ref().copied().unwrap_or_default());
        opened.map(drop).map_err(|_| Forged)
    }
}

/// The length of the Noise message that follows `head`; `None` for one that is none.
pub(in crate::rendezvous) fn frame_length(head: [u8; FRAME_HEAD]) -> Option<usize> {
    let length = usize::from(u16::from_le_bytes(head));
    (TAG..=LONGEST_FRAME).contains(&length).then_some(length)
}

/// A request, bounded.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::rendezvous) enum Request<'a> {
    Set(&'a str, &'a [u8]),
    Get(&'a str),
    Wait(&'a str, Duration),
}

impl<'a> Request<'a> {
    pub(in crate::rendezvous) fn write(&self) -> Vec<u8> {
        let (operation, key, value, number) = match *self {
            Self::Set(key, value) => (SET, key, value, 0),
            Self::Get(key) => (GET, key, &[][..], 0),
            Self::Wait(key, time) => {
                let milliseconds = time.as_micros().div_ceil(1000);
                let number = u64::try_from(milliseconds).unwrap_or(u64::MAX);
                (WAIT, key, &[][..], number)
            }
        };
        let mut bytes = Vec::with_capacity(REQUEST_HEAD + key.len() + value.len());
        bytes.extend([operation, 0]);
        bytes.extend((key.len() as u16).to_le_bytes());
        bytes.extend((value.len() as u32).to_le_bytes());
        bytes.extend(number.to_le_bytes());
        bytes.extend(key.as_bytes());
        bytes.extend(value);
        bytes
    }

    /// Parses `input`. `Ok(None)`: it is not complete yet. Nothing may follow a request.
    pub(in crate::rendezvous) fn read(input: &'a [u8]) -> Result<Option<Self>, Forged> {
        let Some((head, body)) = input.split_first_chunk::<REQUEST_HEAD>() else {
            return Ok(None);
        };
        let [operation, _, k0, k1, v0, v1, v2, v3, number @ ..] = *head;
        let key = usize::from(u16::from_le_bytes([k0, k1]));
        let value = u32::from_le_bytes([v0, v1, v2, v3]) as usize;
        let number = u64::from_le_bytes(number);
        if !(SET..=WAIT).contains(&operation)
            || key > MAX_KEY
            || value > MAX_VALUE
            || (operation != SET && value != 0)
            || body.len() > key + value
        {
            return Err(Forged);
        }
        if body.len() < key + value {
            return Ok(None);
        }
        let (key, value) = body.split_at(key);
        let key = std::str::from_utf8(key).map_err(|_| Forged)?;
        Ok(Some(match operation {
            SET => Self::Set(key, value),
            GET => Self::Get(key),
            _ => Self::Wait(key, Duration::from_millis(number)),
        }))
    }
}

/// The head of a reply that has `length` bytes after it.
pub(in crate::rendezvous) fn reply_head(status: u8, length: usize) -> [u8; REPLY_HEAD] {
    let mut head = [0; REPLY_HEAD];
    head[0] = status;
    head[4..].copy_from_slice(&(length as u32).to_le_bytes());
    head
}

/// The status and the value of a reply; `Ok(None)`: it is not complete yet.
pub(in crate::rendezvous) fn read_reply(input: &[u8]) -> Result<Option<(u8, &[u8])>, Forged> {
    let Some((head, value)) = input.split_first_chunk::<REPLY_HEAD>() else {
        return Ok(None);
    };
    let [status, _, _, _, length @ ..] = *head;
    let length = u32::from_le_bytes(length) as usize;
    if status > FULL || length > MAX_VALUE || value.len() > length {
        return Err(Forged);
    }
    Ok((value.len() == length).then_some((status, value)))
}

/// Parses the bytes as a server does with a hello and a request, and as a client does with a reply.
#[cfg(test)]
fn parse_anything(bytes: &[u8]) {
    let key = StoreKey::new("", None);
    let mut padded = [0; HELLO];
    let length = bytes.len().min(HELLO);
    padded[..length].copy_from_slice(&bytes[..length]);
    let _ = answer(&key, &padded);
    if let Ok(Some(request)) = Request::read(bytes) {
        let written = request.write();
        assert_eq!(Request::read(&written).ok().flatten(), Some(request));
    }
    if let Ok(Some((status, value))) = read_reply(bytes) {
        let written = [&reply_head(status, value.len())[..], value].concat();
        assert_eq!(read_reply(&written).ok().flatten(), Some((status, value)));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pair(client: &StoreKey, server: &StoreKey) -> Option<(Channel, Channel)> {
        let (greeting, hello) = Greeting::new(client).expect("a hello");
        let (theirs, answer) = answer(server, &hello)?;
        let message = answer[MAGIC.len()..].try_into().expect("its length");
        Some((greeting.finish(message)?, theirs))
    }

    #[test]
    fn only_the_same_key_opens_a_channel() {
        let secret = |text: &str| Some(Secret::from_bytes(text.as_bytes()));
        let keys = [
            StoreKey::new("a", None),
            StoreKey::new("b", None),
            StoreKey::new("a", secret("one")),
            StoreKey::new("a", secret("two")),
            StoreKey::new("b", secret("one")),
        ];
        for (i, left) in keys.iter().enumerate() {
            for (j, right) in keys.iter().enumerate() {
                assert_eq!(pair(left, right).is_some(), i == j, "{i} {j}");
            }
        }
        assert_eq!(format!("{:?}", keys[2]), "StoreKey(secret: true)");
    }

    #[test]
    fn frames_open_once_in_order_and_unchanged() {
        let key = StoreKey::new("", None);
        let (mut client, mut server) = pair(&key, &key).expect("the same key");
        let mut frames = Vec::new();
        client.seal(b"first", &mut frames);
        let second = frames.len();
        client.seal(&[7; FRAME_CONTENT], &mut frames);
        let (first, second) = frames.split_at(second);
        let length = frame_length([second[0], second[1]]).expect("valid");
        assert_eq!(length, LONGEST_FRAME);
        let mut content = Vec::new();
        assert!(server.open(&second[FRAME_HEAD..], &mut content).is_err());
        server
            .open(&first[FRAME_HEAD..], &mut content)
            .expect("in order");
        assert!(server.open(&first[FRAME_HEAD..], &mut content).is_err());
        let mut changed = second.to_vec();
        changed[100] ^= 1;
        assert!(server.open(&changed[FRAME_HEAD..], &mut content).is_err());
        assert_eq!(content, b"first");
        server
            .open(&second[FRAME_HEAD..], &mut content)
            .expect("in order");
        assert_eq!(content.len(), 5 + FRAME_CONTENT);
        for length in [0, TAG - 1, LONGEST_FRAME + 1, 65535] {
            assert_eq!(frame_length((length as u16).to_le_bytes()), None);
        }
    }

    proptest! {
        #[test]
        fn requests_are_read_as_they_were_written(
            operation in 0..3,
            key in ".{0,40}",
            value in prop::collection::vec(any::<u8>(), 0..100),
            number in any::<u32>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let request = match operation {
                0 => Request::Set(&key, &value),
                1 => Request::Get(&key),
                _ => Request::Wait(&key, Duration::from_millis(number.into())),
            };
            let mut bytes = request.write();
            prop_assert_eq!(Request::read(&bytes).expect("valid"), Some(request));
            prop_assert!(Request::read(&bytes[..cut.index(bytes.len())]).expect("valid so far").is_none());
            bytes.push(0);
            prop_assert!(Request::read(&bytes).is_err());
        }

        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            parse_anything(&bytes);
        }

        #[test]
        fn parts_of_records_are_parsed_without_panic(
            operation in 0..5_u8,
            key in 0..20_u8,
            value in 0..20_u8,
            rest in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            parse_anything(&[&[operation, 0, key, 0, value, 0, 0, 0][..], &rest].concat());
        }

        #[test]
        fn a_changed_hello_is_no_hello(at in 0..HELLO, flip in 1..=255_u8) {
            let key = StoreKey::new("job", None);
            let (_, mut hello) = Greeting::new(&key).expect("a hello");
            hello[at] ^= flip;
            prop_assert!(answer(&key, &hello).is_none());
        }
    }
}
