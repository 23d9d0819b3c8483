//! A group whose members are told by handles: texts by which processes introduce themselves, and which the program passes
//! around as it likes. No store takes part.
//!
//! A handle is the entry that its process would write into a store, and before it the costs on its machine, as hexadecimal
//! digits. All members get the same handles in the same order, so they come to the same table, and need no verdict.

use std::collections::HashSet;

use sha2::{Digest as _, Sha256};

use super::failures::{compare_settings, refusal};
use super::{Introduction, Roster};
use crate::error::{Error, Result};
use crate::plan::cost::Rounded;
use crate::rendezvous::records::Entry;
use crate::transport::keys::Hex;
use crate::types::Rank;

/// The handle of the process that `me` introduces, on whose machine these are the costs.
///
/// # Errors
/// `InvalidArgument` where it says too much of itself.
pub fn handle(me: &Introduction, costs: Rounded) -> Result<String> {
    me.check()?;
    let entry = me.seal().write_entry(&me.entry());
    Ok(format!("{}{}", Hex(&costs.to_bytes()), Hex(&entry)))
}

/// The rank of the process with the handle `own`, that of `me`, in the group of those with these handles, by their order, and
/// the group. `number` tells it from others of the same processes: each is used once.
///
/// # Errors
/// `InvalidArgument` where a handle is none, is there twice, or that of `me` is not among them; `Mismatch` where one is of
/// another version of unisono, or has other settings or another secret.
pub fn of_handles(
    (me, own): (&Introduction, &str),
    handles: &[String],
    number: i64,
) -> Result<(Rank, Roster)> {
    let Some(rank) = handles.iter().position(|handle| handle == own) else {
        return Err(Error::invalid(format!(
            "the handle of this process is not among the {} that were given",
            handles.len()
        )));
    };
    let me = &Introduction { rank, ..me.clone() };
    let entry_of_me = me.entry();
    let mut known = HashSet::new();
    let (mut costs, mut rows) = (None, Vec::new());
    let mut meeting = Sha256::new_with_prefix(b"unisono handles");
    meeting.update(number.to_le_bytes());
    for (at, handle) in handles.iter().enumerate() {
        // So members that were given other handles never meet.
        meeting.update(handle);
        let (theirs, entry) = read(me, at, handle)?;
        compare_settings(me, &entry_of_me, &entry)?;
        if !known.insert(entry.row.attempt) {
            return Err(Error::invalid(format!("handle {at} is there twice")));
        }
        costs.get_or_insert(theirs);
        rows.push(entry.row);
    }
    let costs = costs.expect("there is one handle at least");
    let mut roster = Roster::new(rows, costs, me);
    roster.key = roster.key.apart(&meeting.finalize());
    Ok((rank, roster))
}

/// The costs and the entry that handle number `at` has.
fn read(me: &Introduction, at: Rank, handle: &str) -> Result<(Rounded, Entry)> {
    let invalid = || Error::invalid(format!("handle {at} is not one that unisono gave"));
    let bytes = bytes(handle).ok_or_else(invalid)?;
    let (costs, entry) = bytes.split_first_chunk().ok_or_else(invalid)?;
    let costs = Rounded::from_bytes(*costs).ok_or_else(invalid)?;
    let entry = me.seal().read_entry(entry);
    let mut entry = entry.map_err(|why| refusal(me, at, why))?;
    // Errors name it by that.
    entry.rank = at as u32;
    Ok((costs, entry))
}

/// The bytes that these hexadecimal digits stand for.
fn bytes(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let is_plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    (is_plain && digits.len().is_multiple_of(2)).then(|| pairs.map(byte).collect())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::error::Code;
    use crate::plan::cost::Costs;

    fn introduction() -> Introduction {
        Introduction::new(0, 1, b"somewhere".to_vec(), &Config::default()).unwrap()
    }

    #[test]
    fn all_come_to_the_same_group() {
        let ranks = [(); 3].map(|()| introduction());
        let costs = Costs::TYPICAL.rounded(4);
        let handles: Vec<_> = ranks.iter().map(|me| handle(me, costs).unwrap()).collect();
        let of = |rank: Rank, number| {
            let me = (&ranks[rank], handles[rank].as_str());
            of_handles(me, &handles, number).unwrap()
        };
        let rosters: Vec<_> = (0..3).map(|rank| of(rank, 7)).collect();
        for (rank, (number, roster)) in rosters.iter().enumerate() {
            assert_eq!((*number, roster.members.len()), (rank, 3));
            assert_eq!(roster.key.id(), rosters[0].1.key.id());
            assert_eq!(roster.costs, costs);
        }
        assert_ne!(of(0, 8).1.key.id(), rosters[0].1.key.id());
    }

    #[test]
    fn others_are_refused() {
        let (me, other) = (introduction(), introduction());
        let costs = Costs::TYPICAL.rounded(4);
        let [mine, theirs] = [&me, &other].map(|me| handle(me, costs).unwrap());
        let refused = |handles: &[&str]| {
            let handles: Vec<_> = handles.iter().map(|&handle| handle.to_owned()).collect();
            of_handles((&me, &mine), &handles, 1).unwrap_err()
        };
        for (handles, text) in [
            (&[theirs.as_str()][..], "is not among the 1"),
            (&[&mine, &mine], "handle 1 is there twice"),
            (&[&mine, "nonsense"], "handle 1 is not one"),
            (&[&mine, "1"], "handle 1 is not one"),
            (&[&mine, "+1"], "handle 1 is not one"),
        ] {
            let error = refused(handles);
            assert_eq!(error.code, Code::InvalidArgument);
            assert!(error.message.contains(text), "{error}");
        }
        let mut config = Config::default();
        config.set("eager_bytes", "1K").unwrap();
        let other = Introduction::new(0, 1, Vec::new(), &config).unwrap();
        let other = handle(&other, costs).unwrap();
        let error = refused(&[&mine, &other]);
        assert_eq!(error.code, Code::Mismatch);
        assert!(error.message.contains("setting eager_bytes"), "{error}");
    }
}
