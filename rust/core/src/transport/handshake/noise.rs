//! Noise as this handshake uses it: the pattern, its two suites, and messages before and after the handshake.

use snow::params::NoiseParams;
use snow::{HandshakeState, TransportState};

use crate::error::{Code, Error, Result};
use crate::transport::keys::GroupKey;

/// The cipher suite that authenticates a connection, and encrypts it where that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Suite {
    /// Fast where the processor has instructions for it.
    Aes = 1,
    /// Fast everywhere.
    ChaCha = 2,
}

impl Suite {
    /// The faster suite on this machine; the acceptor takes both.
    pub(super) fn fastest() -> Self {
        #[cfg(target_arch = "x86_64")]
        let has_aes = is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq");
        #[cfg(target_arch = "aarch64")]
        let has_aes = std::arch::is_aarch64_feature_detected!("aes");
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let has_aes = false;
        if has_aes { Self::Aes } else { Self::ChaCha }
    }

    pub(super) fn from_number(number: u8) -> Option<Self> {
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
pub(super) fn begin(
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

pub(super) fn untrusted(what: impl Into<String>) -> Error {
    Error::new(Code::Untrusted, what)
}

pub(super) fn transport(state: HandshakeState) -> Result<TransportState> {
    state
        .into_transport_mode()
        .map_err(|cause| Error::internal(format!("end a handshake: {cause}")))
}

pub(super) fn seal(session: &mut TransportState, bytes: &[u8], frame: &mut [u8]) -> Result<()> {
    session
        .write_message(bytes, frame)
        .map(drop)
        .map_err(|cause| Error::internal(format!("write in a handshake: {cause}")))
}
