//! What the ranks write into the store while a group forms, as bytes: entries, and one verdict.
//!
//! Every record begins the same way in every version of unisono, so that different versions can say so to each
//! other; the rest is read only by the same version. Where the job has a secret every record ends with its HMAC under
//! a key derived from it. Numbers are little-endian; a text or a run of bytes has its length before it (2 bytes).
//!
//! ```text
//! record:   magic (4)  flags (1: authenticated)  version  content  [HMAC-SHA256 of all before (32)]
//! entry:    rank (4)  world (4)  process (16)  member  count (2)  {name  value}
//! table:    0 (1)  costs (6)  count (4)  {member}
//! member:   uuid (16)  public key (32)  pid (4)  memory node (2, all ones: none)  host  hostname  address
//! failure:  1 (1)  code (1)  peer (4, all ones: none)  message
//! ```
//!
//! Whatever is read is hostile until it has been parsed: every length is checked against what is there and
//! against a limit, and nothing may follow the end.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::error::{Code, Error};
use crate::plan::cost::Rounded;
use crate::transport::keys::PublicKey;
use crate::types::Rank;

/// The longest text (host label, host name, setting, version).
pub(super) const MAX_TEXT: usize = 256;
/// The longest address.
pub(super) const MAX_ADDRESS: usize = 4096;
/// The longest message of a failure.
const MAX_MESSAGE: usize = 8192;
/// The most settings of an entry.
const MAX_SETTINGS: usize = 64;
/// The smallest member of a table: what a hostile count is checked against.
const MIN_MEMBER: usize = 16 + 32 + 4 + 2 + 3 * 2;

const ENTRY: &[u8; 4] = b"uniE";
const VERDICT: &[u8; 4] = b"uniV";
const AUTHENTICATED: u8 = 1;
const TAG: usize = 32;
const NO_PEER: u32 = u32::MAX;
const NO_NODE: u16 = u16::MAX;

/// Distinguishes two processes that claim the same rank.
pub(super) type Uuid = [u8; 16];

/// What one rank says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) rank: u32,
    pub(super) world: u32,
    /// The same in all groups that its process joins.
    pub(super) process: Uuid,
    pub(super) row: Row,
    pub(super) settings: Vec<(String, String)>,
}

/// What rank 0 publishes when it has heard all ranks, or knows that it never will.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Table {
        /// By which all ranks choose algorithms.
        costs: Rounded,
        rows: Vec<Row>,
    },
    Failure(Error),
}

/// One rank in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// Drawn for this attempt to join.
    pub(super) uuid: Uuid,
    pub(super) key: PublicKey,
    pub(super) pid: u32,
    /// The memory node of its host that the rank is bound to.
    pub(super) node: Option<u16>,
    pub(super) host: String,
    pub(super) hostname: String,
    pub(super) address: Vec<u8>,
}

/// Why a record cannot be believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// It is not what a member would write.
    Malformed,
    /// It was written by this other version.
    Version(String),
    /// The writer has a secret and this rank has none (true), or the other way round (false).
    SecretUse(bool),
    /// The writer has another secret.
    SecretDiffers,
}

/// Seals and opens records: the version of this rank, and the key that comes from the job's secret.
#[derive(Clone, Copy)]
pub(super) struct Seal<'a> {
    pub(super) version: &'a str,
    pub(super) key: Option<[u8; 32]>,
}

impl Seal<'_> {
    pub(super) fn write_entry(self, entry: &Entry) -> Vec<u8> {
        let mut bytes = self.begin(ENTRY);
        bytes.extend(entry.rank.to_le_bytes());
        bytes.extend(entry.world.to_le_bytes());
        bytes.extend(entry.process);
        put_row(&mut bytes, &entry.row);
        bytes.extend((entry.settings.len() as u16).to_le_bytes());
        for (name, value) in &entry.settings {
            put(&mut bytes, name.as_bytes());
            put(&mut bytes, value.as_bytes());
        }
        self.end(bytes)
    }

    pub(super) fn read_entry(self, bytes: &[u8]) -> Result<Entry, Refused> {
        let mut reader = self.open(ENTRY, bytes)?;
        let entry = read_entry(&mut reader).ok_or(Refused::Malformed)?;
        reader.finish().map(|()| entry)
    }

    pub(super) fn write_verdict(self, verdict: &Verdict) -> Vec<u8> {
        let mut bytes = self.begin(VERDICT);
        match verdict {
            Verdict::Table { costs, rows } => {
                bytes.push(0);
                bytes.extend(costs.to_bytes());
                bytes.extend((rows.len() as u32).to_le_bytes());
                for row in rows {
                    put_row(&mut bytes, row);
                }
            }
            Verdict::Failure(error) => {
                let peer = error.peer.map_or(NO_PEER, |peer| peer as u32);
                bytes.extend([1, error.code as u8]);
                bytes.extend(peer.to_le_bytes());
                put(
                    &mut bytes,
                    shortened(&error.message, MAX_MESSAGE).as_bytes(),
                );
            }
        }
        self.end(bytes)
    }

    pub(super) fn read_verdict(self, bytes: &[u8]) -> Result<Verdict, Refused> {
        let mut reader = self.open(VERDICT, bytes)?;
        let verdict = read_verdict(&mut reader).ok_or(Refused::Malformed)?;
        reader.finish().map(|()| verdict)
    }

    fn begin(self, magic: &[u8; 4]) -> Vec<u8> {
        let mut bytes = magic.to_vec();
        bytes.push(if self.key.is_some() { AUTHENTICATED } else { 0 });
        put(&mut bytes, self.version.as_bytes());
        bytes
    }

    fn end(self, mut bytes: Vec<u8>) -> Vec<u8> {
        if let Some(key) = &self.key {
            let tag = mac(key, &bytes).finalize().into_bytes();
            bytes.extend(tag);
        }
        bytes
    }

    /// Checks all of a record but its content, which the reader returned is at.
    fn open<'b>(self, magic: &[u8; 4], bytes: &'b [u8]) -> Result<Reader<'b>, Refused> {
        let mut reader = Reader { rest: bytes };
        if reader.take(4) != Some(magic) {
            return Err(Refused::Malformed);
        }
        let flags = reader.array::<1>().ok_or(Refused::Malformed)?[0];
        let version = reader.text(MAX_TEXT).ok_or(Refused::Malformed)?;
        if version != self.version {
            return Err(Refused::Version(version));
        }
        match (flags, &self.key) {
            (0, None) => Ok(reader),
            (AUTHENTICATED, None) => Err(Refused::SecretUse(true)),
            (0, Some(_)) => Err(Refused::SecretUse(false)),
            (AUTHENTICATED, Some(key)) => {
                let Some(length) = reader.rest.len().checked_sub(TAG) else {
                    return Err(Refused::Malformed);
                };
                let (signed, tag) = bytes.split_at(bytes.len() - TAG);
                let verified = mac(key, signed).verify_slice(tag);
                verified.map_err(|_| Refused::SecretDiffers)?;
                reader.rest = &reader.rest[..length];
                Ok(reader)
            }
            _ => Err(Refused::Malformed),
        }
    }
}

fn mac(key: &[u8; 32], bytes: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    mac.update(bytes);
    mac
}

fn read_entry(reader: &mut Reader<'_>) -> Option<Entry> {
    Some(Entry {
        rank: reader.u32()?,
        world: reader.u32()?,
        process: reader.array()?,
        row: read_row(reader)?,
        settings: {
            let count = usize::from(reader.u16()?);
            if count > MAX_SETTINGS {
                return None;
            }
            let setting = |_| Some((reader.text(MAX_TEXT)?, reader.text(MAX_TEXT)?));
            (0..count).map(setting).collect::<Option<_>>()?
        },
    })
}

fn read_verdict(reader: &mut Reader<'_>) -> Option<Verdict> {
    match reader.array::<1>()?[0] {
        0 => {
            let costs = Rounded::from_bytes(reader.array()?)?;
            let count = reader.u32()? as usize;
            // So many members cannot be there: do not even make room for them.
            if count > reader.rest.len() / MIN_MEMBER {
                return None;
            }
            let rows = (0..count).map(|_| read_row(reader));
            let rows = rows.collect::<Option<_>>()?;
            Some(Verdict::Table { costs, rows })
        }
        1 => {
            let code = Code::from_number(reader.array::<1>()?[0])?;
            let peer = reader.u32()?;
            let mut error = Error::new(code, reader.text(MAX_MESSAGE)?);
            error.peer = (peer != NO_PEER).then_some(peer as Rank);
            Some(Verdict::Failure(error))
        }
        _ => None,
    }
}

fn read_row(reader: &mut Reader<'_>) -> Option<Row> {
    Some(Row {
        uuid: reader.array()?,
        key: reader.array()?,
        pid: reader.u32()?,
        node: Some(reader.u16()?).filter(|node| *node != NO_NODE),
        host: reader.text(MAX_TEXT)?,
        hostname: reader.text(MAX_TEXT)?,
        address: reader.bytes(MAX_ADDRESS)?.to_vec(),
    })
}

fn put_row(to: &mut Vec<u8>, row: &Row) {
    to.extend(row.uuid);
    to.extend(row.key);
    to.extend(row.pid.to_le_bytes());
    to.extend(row.node.unwrap_or(NO_NODE).to_le_bytes());
    put(to, row.host.as_bytes());
    put(to, row.hostname.as_bytes());
    put(to, &row.address);
}

/// The beginning of `text`, at most `most` bytes of it.
fn shortened(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Appends `bytes` with its length. Lengths were checked when the introduction was.
fn put(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend((bytes.len() as u16).to_le_bytes());
    to.extend(bytes);
}

/// What has not been parsed yet.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn bytes(&mut self, most: usize) -> Option<&'a [u8]> {
        let length = usize::from(self.u16()?);
        if length > most {
            return None;
        }
        self.take(length)
    }

    fn text(&mut self, most: usize) -> Option<String> {
        let bytes = self.bytes(most)?;
        std::str::from_utf8(bytes).ok().map(str::to_owned)
    }

    /// Nothing may follow.
    fn finish(self) -> Result<(), Refused> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(Refused::Malformed)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::cost::Costs;

    const OPEN: Seal<'static> = Seal {
        version: "1.2.3",
        key: None,
    };
    const CLOSED: Seal<'static> = Seal {
        version: "1.2.3",
        key: Some([3; 32]),
    };

    fn text() -> impl Strategy<Value = String> {
        ".{0,40}"
    }

    prop_compose! {
        fn row()(
            uuid in any::<Uuid>(),
            key in any::<PublicKey>(),
            pid in any::<u32>(),
            node in any::<Option<u16>>(),
            host in text(),
            hostname in text(),
            address in prop::collection::vec(any::<u8>(), 0..100),
        ) -> Row {
            Row { uuid, key, pid, node: node.filter(|node| *node != NO_NODE), host, hostname, address }
        }
    }

    prop_compose! {
        fn entry()(
            rank in any::<u32>(),
            world in any::<u32>(),
            process in any::<Uuid>(),
            row in row(),
            settings in prop::collection::vec((text(), text()), 0..5),
        ) -> Entry {
            Entry { rank, world, process, row, settings }
        }
    }

    fn costs() -> impl Strategy<Value = Rounded> {
        (any::<[f64; 3]>(), any::<usize>()).prop_map(|([turn, copy, fold], cores)| {
            Costs {
                turn,
                copy,
                fold,
                ..Costs::TYPICAL
            }
            .rounded(cores)
        })
    }

    fn verdict() -> impl Strategy<Value = Verdict> {
        let failure = (0..Code::ALL.len(), prop::option::of(0..1000_usize), text());
        prop_oneof![
            (costs(), prop::collection::vec(row(), 0..6))
                .prop_map(|(costs, rows)| Verdict::Table { costs, rows }),
            failure.prop_map(|(code, peer, message)| {
                let mut error = Error::new(Code::ALL[code], message);
                error.peer = peer;
                Verdict::Failure(error)
            }),
        ]
    }

    proptest! {
        #[test]
        fn records_come_back(entry in entry(), verdict in verdict()) {
            for seal in [OPEN, CLOSED] {
                prop_assert_eq!(&seal.read_entry(&seal.write_entry(&entry)), &Ok(entry.clone()));
                prop_assert_eq!(&seal.read_verdict(&seal.write_verdict(&verdict)), &Ok(verdict.clone()));
            }
        }

        #[test]
        fn what_is_cut_or_longer_is_refused(
            entry in entry(),
            verdict in verdict(),
            cut in any::<prop::sample::Index>(),
            more in any::<u8>(),
        ) {
            for seal in [OPEN, CLOSED] {
                let mut bytes = seal.write_entry(&entry);
                prop_assert!(seal.read_entry(&bytes[..cut.index(bytes.len())]).is_err());
                prop_assert!(seal.read_verdict(&bytes).is_err());
                bytes.push(more);
                prop_assert!(seal.read_entry(&bytes).is_err());
                let mut bytes = seal.write_verdict(&verdict);
                prop_assert!(seal.read_verdict(&bytes[..cut.index(bytes.len())]).is_err());
                bytes.push(more);
                prop_assert!(seal.read_verdict(&bytes).is_err());
            }
        }

        #[test]
        fn with_a_secret_no_changed_byte_is_believed(
            entry in entry(),
            at in any::<prop::sample::Index>(),
            flip in 1..=255_u8,
        ) {
            let mut bytes = CLOSED.write_entry(&entry);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            prop_assert!(CLOSED.read_entry(&bytes).is_err());
        }

        #[test]
        fn no_bytes_panic(content in prop::collection::vec(any::<u8>(), 0..300), begun in any::<bool>()) {
            for magic in [ENTRY, VERDICT] {
                let mut bytes = if begun { OPEN.begin(magic) } else { Vec::new() };
                bytes.extend(&content);
                for seal in [OPEN, CLOSED] {
                    let _ = seal.read_entry(&bytes);
                    let _ = seal.read_verdict(&bytes);
                }
            }
        }
    }

    #[test]
    fn differences_of_version_and_secret_are_told_apart() {
        let failure = Verdict::Failure(Error::invalid("why"));
        let newer = Seal {
            version: "1.3.0",
            ..OPEN
        };
        let other = Seal {
            key: Some([4; 32]),
            ..OPEN
        };
        let read = |by: Seal<'_>, from: Seal<'_>| by.read_verdict(&from.write_verdict(&failure));
        assert_eq!(read(OPEN, newer), Err(Refused::Version("1.3.0".to_owned())));
        assert_eq!(read(OPEN, CLOSED), Err(Refused::SecretUse(true)));
        assert_eq!(read(CLOSED, OPEN), Err(Refused::SecretUse(false)));
        assert_eq!(read(CLOSED, other), Err(Refused::SecretDiffers));
    }

    #[test]
    fn impossible_costs_are_refused() {
        let table = |costs: [u8; Rounded::LENGTH]| {
            let mut bytes = OPEN.begin(VERDICT);
            bytes.push(0);
            bytes.extend(costs);
            bytes.extend(0_u32.to_le_bytes());
            OPEN.read_verdict(&bytes)
        };
        assert!(table([3, 4, 5, 6, 2, 0]).is_ok());
        for hostile in [
            [200, 4, 5, 6, 2, 0],
            [3, 255, 5, 6, 2, 0],
            [3, 4, 99, 6, 2, 0],
            [3, 4, 5, 41, 2, 0],
            [3, 4, 5, 6, 0, 0],
        ] {
            assert_eq!(table(hostile), Err(Refused::Malformed));
        }
    }

    #[test]
    fn a_hostile_count_makes_no_room() {
        let mut bytes = OPEN.begin(VERDICT);
        bytes.push(0);
        bytes.extend(Costs::TYPICAL.rounded(1).to_bytes());
        bytes.extend(u32::MAX.to_le_bytes());
        assert_eq!(OPEN.read_verdict(&bytes), Err(Refused::Malformed));
    }
}
