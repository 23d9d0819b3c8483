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
pub(crate) struct Members {
    all: Arc<[Arc<Member>]>,
    /// The numbers by which the group's users know its ranks, where these are others than in the group.
    kept: Option<Arc<[Rank]>>,
}

impl Members {
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Member> {
        self.all.iter().map(|member| &**member)
    }

    /// The number by which users know a rank.
    pub(crate) fn known_as(&self, rank: Rank) -> Rank {
        let kept = self.kept.as_ref().and_then(|kept| kept.get(rank));
        kept.copied().unwrap_or(rank)
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
        let part = ranks.iter().map(|rank| Arc::clone(&self.all[*rank]));
        Self {
            all: part.collect(),
            kept: None,
        }
    }

    /// The same, where users know them by the numbers that they have here.
    pub(crate) fn part_that_keeps_its_numbers(&self, ranks: &[Rank]) -> Self {
        let kept = ranks.iter().map(|rank| self.known_as(*rank));
        Self {
            kept: Some(kept.collect()),
            ..self.part(ranks)
        }
    }

    /// `rank 3 (host node7, pid 4321)`; where that is another number, with the one in the whole job:
    /// `rank 3 (global rank 11, host node7, pid 4321)`.
    pub(crate) fn name(&self, rank: Rank) -> String {
        let Member { label, global, .. } = &self[rank];
        let rank = self.known_as(rank);
        match *global == rank {
            true => format!("rank {rank} ({label})"),
            false => format!("rank {rank} (global rank {global}, {label})"),
        }
    }

    /// The same without host and process.
    pub(crate) fn number(&self, rank: Rank) -> String {
        let global = self.all.get(rank).map(|member| member.global);
        let rank = self.known_as(rank);
        match global {
            Some(global) if global != rank => format!("rank {rank} (global rank {global})"),
            _ => format!("rank {rank}"),
        }
    }

    /// The error, with the number in the whole job of the rank that caused it, if its words have none.
    pub(crate) fn clarify(&self, error: Error) -> Error {
        const WORDS: &str = "global rank ";
        let global = error
            .peer
            .and_then(|peer| Some((self.known_as(peer), self.all.get(peer)?.global)));
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
        Self {
            all: members.into_iter().map(Arc::new).collect(),
            kept: None,
        }
    }
}

impl Index<Rank> for Members {
    type Output = Member;

    fn index(&self, rank: Rank) -> &Member {
        &self.all[rank]
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
        let kept = part.part_that_keeps_its_numbers(&[0, 2]);
        assert_eq!(kept.number(1), "rank 2 (global rank 5)");
        let kept = all.part_that_keeps_its_numbers(&[0, 2, 5]);
        assert_eq!((kept.number(2), kept.len()), ("rank 5".into(), 3));
        assert_eq!(
            kept.part_that_keeps_its_numbers(&[1, 2]).name(1),
            "rank 5 (host h5, pid 105)"
        );
        let error = |text: &str| Error::new(Code::PeerLost, text).with_peer(2);
        assert_eq!(
            kept.clarify(error("rank 5 is gone")),
            error("rank 5 is gone")
        );
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
