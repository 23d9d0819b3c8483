//! The algorithm that a group would take for a call, without the group: its price, those of the others, and the plan of each
//! rank.

use super::cost::{Costs, predict, predict_private};
use super::select::choose;
use super::simulate::{CostModel, simulate};
use super::topology::Topology;
use super::{
    Algorithm, Buffer, Counts, Plan, Shape, Span, applicable_on, build_on, in_memory, piece_length,
    shared,
};
use crate::types::{Collective, Rank};

/// A call, the ranks that make it, and their machine.
#[derive(Clone, Debug)]
pub struct Question {
    /// The operation.
    pub collective: Collective,
    /// Elements, as [`Counts::Even`] has them.
    pub count: usize,
    /// The root, where there is one.
    pub root: Rank,
    /// Bytes of an element.
    pub element_size: usize,
    /// Sums are in another type than the elements.
    pub widen: bool,
    /// The buffers lie in memory that all ranks of a host map.
    pub in_heap: bool,
    /// Where the ranks are.
    pub topology: Topology,
    /// The prices of their machine.
    pub costs: Costs,
    /// The algorithm that the user asks for.
    pub wanted: Option<Algorithm>,
}

/// The algorithms that serve a call.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The one that the group takes.
    pub algorithm: Algorithm,
    /// The seconds that each takes, the cheapest first.
    pub prices: Vec<(Algorithm, f64)>,
}

impl Question {
    fn world(&self) -> usize {
        self.topology.host_of.len()
    }

    fn shape(&self, rank: Rank) -> Shape<'static> {
        Shape {
            collective: self.collective,
            rank,
            world: self.world(),
            counts: Counts::Even(self.count),
            root: self.root,
            // Where a group does it in the buffers themselves, the output holds the input.
            in_place: self.in_heap && self.collective == Collective::AllReduce,
            widen: self.widen,
        }
    }

    /// The algorithm that a group would take, and the prices of all that serve the call. `None` for messages between two ranks,
    /// a root that there is not, and no ranks.
    pub fn answer(&self) -> Option<Answer> {
        let is_message = matches!(self.collective, Collective::Send | Collective::Recv);
        if is_message || self.root >= self.world() {
            return None;
        }
        let (shape, size) = (self.shape(0), self.element_size);
        let (topology, costs) = (&self.topology, &self.costs);
        let choice = choose(&shape, size, topology, costs, self.wanted);
        let algorithm = match choice {
            choice if choice.in_place && self.in_heap => Algorithm::InPlace,
            choice if choice.windows && !self.in_heap => Algorithm::Windows,
            choice => choice.messages,
        };
        let serves = |algorithm: &Algorithm| match algorithm {
            Algorithm::InPlace => {
                self.in_heap && shared::serves(*algorithm, &shape, size, topology)
            }
            Algorithm::Windows => {
                !self.in_heap && shared::serves(*algorithm, &shape, size, topology)
            }
            _ => applicable_on(*algorithm, &shape, topology),
        };
        let price = match self.in_heap {
            true => predict,
            false => predict_private,
        };
        let all = Algorithm::ALL.into_iter().filter(serves);
        let priced =
            all.map(|algorithm| (algorithm, price(algorithm, &shape, size, topology, costs)));
        let mut prices: Vec<_> = priced.collect();
        prices.sort_by(|(_, one), (_, other)| one.total_cmp(other));
        Some(Answer { algorithm, prices })
    }

    /// The plan of a rank by this algorithm; `None` where it does not serve the call.
    pub fn plan(&self, algorithm: Algorithm, rank: Rank) -> Option<Plan> {
        let (shape, size) = (self.shape(rank), self.element_size);
        match algorithm {
            Algorithm::Windows | Algorithm::InPlace => {
                let cores = self.topology.cores_per_host;
                let chunk = shared::chunk(self.collective, self.world(), cores);
                in_memory::build(algorithm, &shape, size, chunk)
            }
            _ => {
                let piece = piece_length(algorithm, &shape, size, &self.topology, &self.costs);
                build_on(algorithm, &shape, piece, &self.topology)
            }
        }
    }

    /// Bytes of an element of a partial sum.
    fn partial_size(&self) -> usize {
        match self.widen {
            true => self.element_size.max(4),
            false => self.element_size,
        }
    }

    /// Bytes of a span.
    pub fn bytes(&self, span: Span) -> usize {
        let size = match span.buffer {
            Buffer::Scratch => self.partial_size(),
            _ => self.element_size,
        };
        span.len * size
    }

    /// The seconds that these plans, one for each rank, take in a [simulation](super::simulate).
    pub fn simulated(&self, plans: &[Plan]) -> f64 {
        let topology = self.topology.clone();
        let sizes = (self.element_size, self.partial_size());
        let model = CostModel::new(topology, &self.costs, sizes.0, sizes.1);
        simulate(plans, &model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(topology: Topology, count: usize) -> Question {
        Question {
            collective: Collective::AllReduce,
            count,
            root: 0,
            element_size: 4,
            widen: false,
            in_heap: false,
            topology,
            costs: Costs::TYPICAL,
            wanted: None,
        }
    }

    #[test]
    fn the_algorithm_of_a_group_is_the_cheapest_or_the_one_that_is_wanted() {
        for (hosts, ranks) in [(1, 4), (2, 4), (8, 1)] {
            for count in [2, 1 << 10, 1 << 20] {
                let mut question = question(Topology::even(hosts, ranks, 4), count);
                let answer = question.answer().expect("an answer");
                let [(cheapest, least), ..] = answer.prices[..] else {
                    panic!("no prices");
                };
                let taken = answer.prices.iter().find(|(it, _)| *it == answer.algorithm);
                let (_, price) = taken.expect("it has a price");
                // Where each rank has a core, windows may cost a little more.
                assert!(*price <= 1.25 * least, "{cheapest} for {least}: {answer:?}");
                question.wanted = Some(Algorithm::Ring);
                let answer = question.answer().expect("an answer");
                assert_eq!(answer.algorithm, Algorithm::Ring);
            }
        }
        let none = Question {
            root: 4,
            ..question(Topology::one_host(4, 4), 8)
        };
        assert!(none.answer().is_none());
    }

    #[test]
    fn plans_of_all_algorithms_with_a_price_complete() {
        for in_heap in [false, true] {
            for topology in [Topology::one_host(4, 2), Topology::even(2, 2, 2)] {
                let question = Question {
                    in_heap,
                    ..question(topology, 4096)
                };
                for (algorithm, price) in question.answer().expect("an answer").prices {
                    let plans = (0..4).map(|rank| question.plan(algorithm, rank));
                    let plans: Option<Vec<_>> = plans.collect();
                    let plans = plans.unwrap_or_else(|| panic!("no plan by {algorithm}"));
                    assert!(crate::rounds(&plans).is_some(), "{algorithm}");
                    let simulated = question.simulated(&plans);
                    assert!(
                        simulated > 0.0 && simulated.is_finite() && price > 0.0,
                        "{algorithm}"
                    );
                }
            }
        }
    }
}
