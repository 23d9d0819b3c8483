//! Values as expressions, each made once and known by its number.

use rustc_hash::FxHashMap;

use super::rank_set::RankSet;
use crate::types::Rank;

/// The number of an expression; 0 stands for "not initialised".
pub(crate) type Id = u32;
pub(crate) const UNINITIALISED: Id = 0;

#[derive(Clone, Copy)]
pub(crate) struct Expression<const WORDS: usize> {
    /// The element of the reduction that it is about; for contributions, its place in the rank's input.
    pub(crate) element: usize,
    /// The ranks whose contributions are in it.
    pub(crate) contributors: RankSet<WORDS>,
    pub(crate) kind: Kind,
    /// Whether it is `((a op b) op c) op ...` with ranks ascending.
    pub(crate) in_rank_order: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Contribution,
    Sum,
    Finished,
}

/// All expressions of a run of at most 128 times `WORDS` ranks, each once.
pub(crate) struct Expressions<const WORDS: usize> {
    all: Vec<Expression<WORDS>>,
    contributions: FxHashMap<(Rank, usize), Id>,
    sums: FxHashMap<(Id, Id), Id>,
    finished: FxHashMap<Id, Id>,
}

impl<const WORDS: usize> Expressions<WORDS> {
    pub(crate) fn new() -> Self {
        let nothing = Expression {
            element: 0,
            contributors: RankSet::EMPTY,
            kind: Kind::Contribution,
            in_rank_order: true,
        };
        Self {
            all: vec![nothing],
            contributions: FxHashMap::default(),
            sums: FxHashMap::default(),
            finished: FxHashMap::default(),
        }
    }

    pub(crate) fn get(&self, id: Id) -> Expression<WORDS> {
        self.all[id as usize]
    }

    fn push(all: &mut Vec<Expression<WORDS>>, expression: Expression<WORDS>) -> Id {
        all.push(expression);
        Id::try_from(all.len() - 1).expect("fewer than 2^32 expressions")
    }

    pub(crate) fn contribution(&mut self, rank: Rank, element: usize) -> Id {
        let all = &mut self.all;
        *self
            .contributions
            .entry((rank, element))
            .or_insert_with(|| {
                let expression = Expression {
                    element,
                    contributors: RankSet::of(rank),
                    kind: Kind::Contribution,
                    in_rank_order: true,
                };
                Self::push(all, expression)
            })
    }

    pub(crate) fn sum(&mut self, left: Id, right: Id) -> Result<Id, String> {
        let (l, r) = (self.get(left), self.get(right));
        if l.kind == Kind::Finished || r.kind == Kind::Finished {
            return Err("reduces a sum that is finished already".into());
        }
        if l.element != r.element {
            return Err(format!(
                "reduces element {} with element {}",
                l.element, r.element
            ));
        }
        let twice = l.contributors & r.contributors;
        if !twice.is_empty() {
            return Err(format!(
                "reduces the contributions of ranks {:?} twice",
                twice.ranks()
            ));
        }
        let all = &mut self.all;
        Ok(*self.sums.entry((left, right)).or_insert_with(|| {
            let expression = Expression {
                element: l.element,
                contributors: l.contributors | r.contributors,
                kind: Kind::Sum,
                in_rank_order: l.in_rank_order
                    && r.kind == Kind::Contribution
                    && l.contributors.is_below(&r.contributors),
            };
            Self::push(all, expression)
        }))
    }

    pub(crate) fn finish(&mut self, sum: Id, all_ranks: RankSet<WORDS>) -> Result<Id, String> {
        let expression = self.get(sum);
        if expression.kind == Kind::Finished {
            return Err(format!("finishes element {} twice", expression.element));
        }
        if expression.contributors != all_ranks {
            return Err(format!(
                "finishes element {} without the contributions of ranks {:?}",
                expression.element,
                (all_ranks & !expression.contributors).ranks()
            ));
        }
        let all = &mut self.all;
        Ok(*self.finished.entry(sum).or_insert_with(|| {
            let expression = Expression {
                kind: Kind::Finished,
                ..expression
            };
            Self::push(all, expression)
        }))
    }
}
