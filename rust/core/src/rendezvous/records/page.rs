//! A page of the table: some members of a group, one after the other. The label and the name of each host are on it once.

use std::collections::HashMap;

use super::reader::{Reader, put};
use super::{MAX_ADDRESS, MAX_TEXT, NO_NODE, Row, read_bool, read_node};

/// The smallest host and the smallest member: what a hostile count is checked against.
const MIN_HOST: usize = 2 * 2;
const MIN_MEMBER: usize = 32 + 16 + 4 + 2 + 1 + 4 + 2;

/// A page that is being written.
#[derive(Default)]
pub(super) struct Page<'a> {
    numbers: HashMap<(&'a str, &'a str), u32>,
    hosts: Vec<u8>,
    members: Vec<u8>,
    count: u32,
}

impl<'a> Page<'a> {
    pub(super) fn put(&mut self, row: &'a Row) {
        let next = self.numbers.len() as u32;
        let host = (row.host.as_str(), row.hostname.as_str());
        let number = *self.numbers.entry(host).or_insert_with(|| {
            put(&mut self.hosts, host.0.as_bytes());
            put(&mut self.hosts, host.1.as_bytes());
            next
        });
        self.members.extend(row.key);
        self.members.extend(row.attempt);
        self.members.extend(row.pid.to_le_bytes());
        let node = row.node.unwrap_or(NO_NODE);
        self.members.extend(node.to_le_bytes());
        self.members.push(row.is_new.into());
        self.members.extend(number.to_le_bytes());
        put(&mut self.members, &row.address);
        self.count += 1;
    }

    /// Bytes of what has been put on it.
    pub(super) fn length(&self) -> usize {
        self.hosts.len() + self.members.len()
    }

    pub(super) fn write(&self, to: &mut Vec<u8>) {
        to.extend((self.numbers.len() as u32).to_le_bytes());
        to.extend(&self.hosts);
        to.extend(self.count.to_le_bytes());
        to.extend(&self.members);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Option<Vec<Row>> {
        // Of what cannot be there not even room is made.
        let count = |reader: &mut Reader<'_>, least: usize| {
            let count = reader.u32()? as usize;
            (count <= reader.rest.len() / least).then_some(count)
        };
        let hosts = count(reader, MIN_HOST)?;
        let hosts: Vec<_> = (0..hosts)
            .map(|_| Some((reader.text(MAX_TEXT)?, reader.text(MAX_TEXT)?)))
            .collect::<Option<_>>()?;
        let members = count(reader, MIN_MEMBER)?;
        let member = |_| {
            let (key, attempt) = (reader.array()?, reader.array()?);
            let (pid, node) = (reader.u32()?, read_node(reader)?);
            let is_new = read_bool(reader)?;
            let (host, hostname) = hosts.get(reader.u32()? as usize)?;
            Some(Row {
                key,
                attempt,
                pid,
                node,
                is_new,
                host: host.clone(),
                hostname: hostname.clone(),
                address: reader.bytes(MAX_ADDRESS)?.to_vec(),
            })
        };
        (0..members).map(member).collect()
    }
}
