//! The keys of a group, by which a connection proves membership.
//!
//! Every process makes a key pair (X25519) and publishes the public half with its entry in the store, in each group that it
//! joins. The table of all public keys makes a group: its id is the hash of them and of what the ranks drew for this meeting,
//! and a process is rank `r` if it holds the private key that belongs to entry `r`. So the contents of the store prove nothing.
//! Where the ranks share a secret, it is mixed into every handshake as well, and a process needs both.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use snow::params::NoiseParams;

use crate::error::{Error, Result};
use crate::types::Rank;

/// The half of a key pair that the store holds.
pub type PublicKey = [u8; 32];

/// A process's key pair.
pub struct KeyPair {
    private: [u8; 32],
    public: PublicKey,
}

impl KeyPair {
    /// The length of a pair that is given away.
    pub(crate) const BYTES: usize = 64;

    /// A new random pair.
    ///
    /// # Errors
    /// `System` when the operating system gives no random bytes.
    pub fn random() -> Result<Self> {
        // Any pattern would do: all of them here use the same curve.
        let parameters: NoiseParams = "Noise_KK_25519_ChaChaPoly_SHA256"
            .parse()
            .expect("a valid pattern");
        let pair = snow::Builder::new(parameters)
            .generate_keypair()
            .map_err(|cause| Error::internal(format!("make a key pair: {cause}")))?;
        let half =
            |bytes: Vec<u8>| <[u8; 32]>::try_from(bytes).expect("keys of X25519 have 32 bytes");
        Ok(Self {
            private: half(pair.private),
            public: half(pair.public),
        })
    }

    /// The pair as it is given away, together with what it opens: its public half first.
    pub(crate) fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..32].copy_from_slice(&self.public);
        bytes[32..].copy_from_slice(&self.private);
        bytes
    }

    /// The pair that was given away as `bytes`. Where the halves do not belong together, no handshake succeeds.
    pub(crate) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let half = |at: usize| bytes[at..at + 32].try_into().expect("32 bytes");
        Self {
            public: half(0),
            private: half(32),
        }
    }

    /// The half to publish.
    pub fn public(&self) -> PublicKey {
        self.public
    }
}

impl fmt::Debug for KeyPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyPair({})", Hex(&self.public))
    }
}

/// The key by which a rank proves itself to the other members of its group, and judges their proofs.
#[derive(Clone)]
pub struct GroupKey {
    id: [u8; 16],
    own: Arc<KeyPair>,
    members: Arc<[PublicKey]>,
    shared: [u8; 32],
    encrypts: bool,
}

impl GroupKey {
    /// The key of the rank that holds `own`, in the group of the ranks that published `members`. `meeting` tells the group
    /// from all others that these processes form. `shared` is derived from the secret of the job, or zero where there is
    /// none. With `encrypts` all that goes over TCP is encrypted. All members must have the same of each.
    pub fn new(
        own: Arc<KeyPair>,
        (members, meeting): (Vec<PublicKey>, &[u8]),
        shared: [u8; 32],
        encrypts: bool,
    ) -> Self {
        let mut hash = Sha256::new_with_prefix(b"unisono group");
        for member in &members {
            hash.update(member);
        }
        hash.update(meeting);
        Self {
            id: shortened(hash),
            own,
            members: members.into(),
            shared,
            encrypts,
        }
    }

    /// The key of a group inside one process, which makes no connections.
    ///
    /// # Errors
    /// As [`KeyPair::random`].
    pub(crate) fn unconnected() -> Result<Self> {
        let own = Arc::new(KeyPair::random()?);
        let public = own.public();
        Ok(Self::new(own, (vec![public], b""), [0; 32], false))
    }

    /// The keys of a group of `world` ranks that all are in this process, by rank.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn of_ranks(world: usize, shared: [u8; 32], encrypts: bool) -> Vec<Self> {
        let pairs: Vec<_> = (0..world)
            .map(|_| Arc::new(KeyPair::random().expect("random bytes")))
            .collect();
        let members: Vec<_> = pairs.iter().map(|pair| pair.public()).collect();
        let key = |own| Self::new(own, (members.clone(), b""), shared, encrypts);
        pairs.into_iter().map(key).collect()
    }

    /// As this key, with another secret and another wish for encryption.
    #[cfg(test)]
    pub(super) fn with(&self, shared: [u8; 32], encrypts: bool) -> Self {
        Self {
            shared,
            encrypts,
            ..self.clone()
        }
    }

    /// The key of a group of some of this one's members, in the order of `ranks`, which must exist. The same label and
    /// ranks give the same group on every member.
    #[must_use]
    pub fn subset(&self, label: &[u8], ranks: &[Rank]) -> Self {
        let members: Arc<[PublicKey]> = ranks.iter().map(|&rank| self.members[rank]).collect();
        let mut hash = Sha256::new_with_prefix(b"unisono subgroup");
        hash.update(self.id);
        hash.update((label.len() as u64).to_le_bytes());
        hash.update(label);
        // By number as well: ranks of one process have one key.
        for (&rank, member) in ranks.iter().zip(members.iter()) {
            hash.update((rank as u64).to_le_bytes());
            hash.update(member);
        }
        Self {
            id: shortened(hash),
            members,
            ..self.clone()
        }
    }

    /// The key of a group of the same members that `meeting` tells from this one.
    #[must_use]
    pub(crate) fn apart(&self, meeting: &[u8]) -> Self {
        let mut hash = Sha256::new_with_prefix(b"unisono apart");
        hash.update(self.id);
        hash.update(meeting);
        Self {
            id: shortened(hash),
            ..self.clone()
        }
    }

    /// The group's name on the wire: the same on all members, and different for every group that ever formed. Public.
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// Whether what goes over TCP is encrypted.
    pub fn encrypts(&self) -> bool {
        self.encrypts
    }

    /// The [`PairKeys`] of this process and the rank `peer`; `None` when there is no such rank.
    pub(crate) fn pair(&self, peer: u32) -> Option<PairKeys> {
        Some(PairKeys {
            own: self.own.public(),
            peer: *self.member(peer)?,
            shared: self.shared,
            encrypts: self.encrypts,
        })
    }

    /// The public key by which the rank `peer` proves itself; `None` when there is no such rank.
    pub(crate) fn member(&self, peer: u32) -> Option<&PublicKey> {
        self.members.get(peer as usize)
    }

    pub(super) fn private(&self) -> &[u8; 32] {
        &self.own.private
    }

    pub(super) fn shared(&self) -> &[u8; 32] {
        &self.shared
    }
}

impl fmt::Debug for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupKey({})", Hex(&self.id))
    }
}

/// The keys, the secret and the encryption that two processes prove to each other by a handshake, whichever their group is.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PairKeys {
    own: PublicKey,
    peer: PublicKey,
    shared: [u8; 32],
    encrypts: bool,
}

impl PairKeys {
    /// Whether both are this process.
    pub(crate) fn is_one(&self) -> bool {
        self.own == self.peer
    }
}

fn shortened(hash: Sha256) -> [u8; 16] {
    let digest: [u8; 32] = hash.finalize().into();
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    id
}

/// Bytes shown as hexadecimal digits.
pub(crate) struct Hex<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_agree_on_the_id_and_groups_differ() {
        let group = GroupKey::of_ranks(3, [0; 32], false);
        assert!(group.iter().all(|key| key.id() == group[0].id()));
        let other = GroupKey::of_ranks(3, [0; 32], false);
        let part = |key: &GroupKey, label: &[u8], ranks: &[Rank]| key.subset(label, ranks).id();
        assert_eq!(
            part(&group[0], b"a", &[2, 0]),
            part(&group[2], b"a", &[2, 0])
        );
        let ids = [
            group[0].id(),
            other[0].id(),
            part(&group[0], b"a", &[2, 0]),
            part(&group[0], b"b", &[2, 0]),
            part(&group[0], b"a", &[0, 2]),
            part(&group[0], b"a", &[0, 1, 2]),
        ];
        for (i, id) in ids.iter().enumerate() {
            assert!(!ids[..i].contains(id));
        }
    }

    #[test]
    fn private_keys_stay_out_of_logs() {
        let key = &GroupKey::of_ranks(1, [7; 32], false)[0];
        let shown = format!("{key:?} {:?}", key.own);
        assert!(!shown.contains(&Hex(key.private()).to_string()));
        // Of the secret, in digits or in numbers; so long a run is not in random digits.
        assert!(!shown.contains("0707070707070707"));
        assert!(!shown.contains("7, 7, 7, 7"));
    }
}
