//! Streams of TCP links that wait for their control connections. No thread waits for those: they are kept here for a while.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use super::membership::{Claim, Membership};
use crate::transport::cipher::Cipher;

/// The stream of a TCP link whose control connection is to follow.
pub(super) struct Parked {
    pub(super) link: [u8; 16],
    pub(super) claim: Claim,
    pub(super) data: TcpStream,
    /// The cipher of the stream, where the group asks for encryption.
    pub(super) cipher: Option<Cipher>,
    pub(super) expires: Instant,
}

impl Parked {
    pub(super) fn belongs_to(&self, membership: &Arc<Membership>) -> bool {
        Arc::ptr_eq(self.claim.membership(), membership)
    }
}
