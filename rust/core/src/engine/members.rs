//! The ranks of a group, as errors name them and links reach them.

use std::ops::Index;
use std::sync::Arc;

use crate::error::Error;
use crate::transport::endpoint::Address;
use crate::types::Rank;

/// A rank as errors name it and links reach it.
#[derive(Debug)]
pub(crate) struct Member {
    /// `host node7, pid 4321`.
    pub(crate) label: String,
    /// Its number in the group of the whole job, which users and launchers know it by.
    pub(crate) global: Rank,
    /// It was not in the group that took in others by forming this one.
    pub(crate) is_new: bool,
    /// Where it listens; `None` inside one process.
    pub(crate) address: Option<Address>,
}

/// The ranks of a group. One that was split from another shares what is known of each rank with it.
#[derive(Clone, Debug)]
pub(crate) struct Members(Arc<[Arc<Member>]>);

impl Members {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Member> {
        self.0.iter().map(|member| &**member)
    }

    /// Their numbers in the whole job.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = Rank> {
        self.iter().map(|member| member.global)
    }

    /// Those that were not in the group that took in others by forming this one.
    pub(crate) fn newcomers(&self) -> Vec<Rank> {
        let ranks = self.iter().enumerate();
        let new = ranks.filter(|(_, member)| member.is_new);
        new.map(|(rank, _)| rank).collect()
    }

    /// Those of some of these ranks, in their order.
    pub(crate) fn part(&self, ranks: &[Rank]) -> Self {
        let part = ranks.iter().map(|rank| Arc::clone(&self.0[*rank]));
        Self(part.collect())
    }

    /// `rank 3 (host node7, pid 4321)`; where that is another number, with the one in the whole job:
    /// `rank 3 (global rank 11, host node7, pid 4321)`.
    pub(crate) fn name(&self, rank: Rank) -> String {
        let Member { label, global, .. } = &self[rank];
        match *global == rank {
            true => format!("rank {rank} ({label})"),
            false => format!("rank {rank} (global rank {global}, {label})"),
        }
    }

    /// The same without host and process.
    pub(crate) fn number(&self, rank: Rank) -> String {
        match self.0.get(rank).map(|member| member.global) {
            Some(global) if global != rank => format!("rank {rank} (global rank {global})"),
            _ => format!("rank {rank}"),
        }
    }

    /// The error, with the number in the whole job of the rank that caused it, if its words have none.
    pub(crate) fn clarify(&self, error: Error) -> Error {
        const WORDS: &str = "global rank ";
        let global = error
            .peer
            .and_then(|peer| Some((peer, self.0.get(peer)?.global)));
        match global {
            Some((peer, global)) if peer != global && !error.message.contains(WORDS) => Error {
                message: format!(
                    "{}; rank {peer} of this group is {WORDS}{global}",
                    error.message
                ),
                ..error
            },
            _ => error,
        }
    }
}

impl FromIterator<Member> for Members {
    fn from_iter<T: IntoIterator<Item = Member>>(members: T) -> Self {
        Self(members.into_iter().map(Arc::new).collect())
    }
}

impl Index<Rank> for Members {
    type Output = Member;

    fn index(&self, rank: Rank) -> &Member {
        &self.0[rank]
    }
}

#[cfg(any(test, fuzzing))]
impl Members {
    /// Ranks with these numbers in the whole job.
    pub(crate) fn numbered(numbers: impl IntoIterator<Item = Rank>) -> Self {
        let member = |global| Member {
            label: format!("host h{global}, pid {}", 100 + global),
            global,
            is_new: false,
            address: None,
        };
        numbers.into_iter().map(member).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn a_rank_has_both_of_its_numbers_where_they_differ() {
        let all = Members::numbered(0..6);
        let part = all.part(&[0, 2, 5]);
        assert_eq!(all.name(2), "rank 2 (host h2, pid 102)");
        assert_eq!(part.name(2), "rank 2 (global rank 5, host h5, pid 105)");
        assert_eq!(part.number(1), "rank 1 (global rank 2)");
        assert_eq!((part.number(0), part.len()), ("rank 0".into(), 3));
        let error = |text: &str| Error::new(Code::PeerLost, text).with_peer(2);
        let clear = part.clarify(error("rank 2 is gone"));
        assert_eq!(
            clear.message,
            "rank 2 is gone; rank 2 of this group is global rank 5"
        );
        assert_eq!(part.clarify(clear.clone()), clear);
        assert_eq!(
            all.clarify(error("rank 2 is gone")),
            error("rank 2 is gone")
        );
    }
}
