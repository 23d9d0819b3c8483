//! The records that the ranks write into the store while a group forms, as bytes: entries, and one verdict.
//!
//! Every record begins the same way in every version of unisono, so that different versions can say so to each
//! other; the rest is read only by the same version. Where the job has a secret every record ends with its HMAC under
//! a key derived from it. Numbers are little-endian; a text or a run of bytes has its length before it (2 bytes).
//!
//! ```text
//! record:   magic (4)  flags (1: authenticated)  version  content  [HMAC-SHA256 of all before (32)]
//! entry:    rank (4)  world (4)  process (16)  member  count (2)  {name  value}
//! member:   public key (32)  attempt (16)  pid (4)  memory node (2, all ones: none)  is new (1)  host  hostname  address
//! table:    0 (1)  costs (8)  world (4)  pages (2)  {SHA-256 of the page's record (32)}
//! failure:  1 (1)  code (1)  peer (4, all ones: none)  message
//! page:     hosts (4)  {host  hostname}  members (4)
//!           {public key (32)  attempt (16)  pid (4)  memory node (2)  is new (1)  host's number (4)  address}
//! ```
//!
//! A store's value has a limit, so the members of a large group are on several pages. The table is published after them, and
//! the page that a rank reads must be the one that rank 0 has named there.
//!
//! Whatever is read is hostile until it has been parsed: every length is checked against what is there and
//! against a limit, and nothing may follow the end.

mod page;
mod reader;
#[cfg(test)]
mod tests;

use hmac::{Hmac, Mac};
use sha2::{Digest as _, Sha256};

use self::page::Page;
use self::reader::{Reader, put};

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

const ENTRY: &[u8; 4] = b"uniE";
const VERDICT: &[u8; 4] = b"uniV";
const PAGE_MAGIC: &[u8; 4] = b"uniP";
const AUTHENTICATED: u8 = 1;
const TAG: usize = 32;
const NO_PEER: u32 = u32::MAX;
const NO_NODE: u16 = u16::MAX;

/// Tells one process, or one attempt to join, from all others.
pub(super) type Uuid = [u8; 16];
/// The SHA-256 of a page.
pub(super) type Digest = [u8; 32];

/// The entry of one rank about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) rank: u32,
    pub(super) world: u32,
    /// The same in all groups that its process joins.
    pub(super) process: Uuid,
    pub(super) row: Row,
    pub(super) settings: Vec<(String, String)>,
}

/// The verdict that rank 0 publishes when it has heard all ranks, or knows that it never will.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Table(Table),
    Failure(Error),
}

/// The data of a group, without its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    /// By which all ranks choose algorithms.
    pub(super) costs: Rounded,
    /// How many ranks there are.
    pub(super) world: u32,
    /// The pages on which they are, in order.
    pub(super) pages: Vec<Digest>,
}

/// One rank on a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// Its process's, the same in all groups.
    pub(super) key: PublicKey,
    /// Drawn for this attempt to join: it tells two that claim one rank apart, and this group from others of the same
    /// processes.
    pub(super) attempt: Uuid,
    pub(super) pid: u32,
    /// The memory node of its host that the rank is bound to.
    pub(super) node: Option<u16>,
    /// It was not in the group that takes in others by this one.
    pub(super) is_new: bool,
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
            Verdict::Table(table) => {
                bytes.push(0);
                bytes.extend(table.costs.to_bytes());
                bytes.extend(table.world.to_le_bytes());
                bytes.extend((table.pages.len() as u16).to_le_bytes());
                bytes.extend(table.pages.as_flattened());
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

    /// The pages for `rows`, and how the table names them. A page is full when it has `most` bytes or more.
    pub(super) fn write_pages(self, rows: &[Row], most: usize) -> Vec<(Digest, Vec<u8>)> {
        let mut pages = Vec::new();
        let mut rows = rows.iter();
        while let Some(first) = rows.next() {
            let mut page = Page::default();
            page.put(first);
            while page.length() < most
                && let Some(row) = rows.next()
            {
                page.put(row);
            }
            let mut bytes = self.begin(PAGE_MAGIC);
            page.write(&mut bytes);
            let bytes = self.end(bytes);
            pages.push((Sha256::digest(&bytes).into(), bytes));
        }
        pages
    }

    /// The members on a page, if it is the one that the table names.
    pub(super) fn read_page(self, bytes: &[u8], named: &Digest) -> Result<Vec<Row>, Refused> {
        match <Digest>::from(Sha256::digest(bytes)) == *named {
            true => self.read_any_page(bytes),
            false => Err(Refused::Malformed),
        }
    }

    pub(super) fn read_any_page(self, bytes: &[u8]) -> Result<Vec<Row>, Refused> {
        let mut reader = self.open(PAGE_MAGIC, bytes)?;
        let rows = Page::read(&mut reader).ok_or(Refused::Malformed)?;
        reader.finish().map(|()| rows)
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
            let world = reader.u32()?;
            let count = usize::from(reader.u16()?);
            let pages = (0..count).map(|_| reader.array());
            let pages = pages.collect::<Option<_>>()?;
            Some(Verdict::Table(Table {
                costs,
                world,
                pages,
            }))
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
        key: reader.array()?,
        attempt: reader.array()?,
        pid: reader.u32()?,
        node: read_node(reader)?,
        is_new: read_bool(reader)?,
        host: reader.text(MAX_TEXT)?,
        hostname: reader.text(MAX_TEXT)?,
        address: reader.bytes(MAX_ADDRESS)?.to_vec(),
    })
}

#[expect(
    clippy::option_option,
    reason = "whether it could be read, and whether there is one"
)]
fn read_node(reader: &mut Reader<'_>) -> Option<Option<u16>> {
    let node = reader.u16()?;
    Some((node != NO_NODE).then_some(node))
}

fn read_bool(reader: &mut Reader<'_>) -> Option<bool> {
    match reader.array::<1>()? {
        [0] => Some(false),
        [1] => Some(true),
        _ => None,
    }
}

fn put_row(to: &mut Vec<u8>, row: &Row) {
    to.extend(row.key);
    to.extend(row.attempt);
    to.extend(row.pid.to_le_bytes());
    to.extend(row.node.unwrap_or(NO_NODE).to_le_bytes());
    to.push(row.is_new.into());
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
