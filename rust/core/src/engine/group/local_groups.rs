//! Groups inside one process that are parts of another one, made by the first of their members that asks.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::locks::Mutex;
use crate::types::Rank;

/// The members, each a `G`, that have not been taken yet.
pub(crate) struct LocalGroups<G> {
    groups: Mutex<HashMap<Vec<u8>, Members<G>>>,
}

/// By rank; `None` for those that have been taken.
type Members<G> = Vec<Option<G>>;

impl<G> LocalGroups<G> {
    pub(crate) fn new() -> Self {
        Self {
            groups: Mutex::default(),
        }
    }

    /// Number `rank` among the members of the group of `ranks`, which the first that asks `make`s.
    pub(crate) fn take(
        &self,
        ranks: &[Rank],
        label: &[u8],
        rank: Rank,
        make: impl FnOnce() -> Result<Vec<G>>,
    ) -> Result<G> {
        let mut key: Vec<u8> = ranks.iter().flat_map(|rank| rank.to_le_bytes()).collect();
        key.extend_from_slice(label);
        let mut groups = self.groups.lock();
        if !groups.contains_key(&key) {
            groups.insert(key.clone(), make()?.into_iter().map(Some).collect());
        }
        let members = groups.get_mut(&key).expect("it was just put there");
        let taken = members[rank].take();
        if members.iter().all(Option::is_none) {
            groups.remove(&key);
        }
        taken.ok_or_else(|| Error::invalid("this subgroup has been made before"))
    }
}
