//! The field's words for what a plan is of: ranks, collectives, algorithms.
//!
//! The numbers of [`Collective`] travel on the wire and are the C ABI's, so they are explicit and never reused.

use std::fmt;

/// A process's number in a communicator, `0..world_size`.
pub type Rank = usize;

macro_rules! collectives {
    ($($(#[doc = $doc:literal])+ $name:ident = $number:literal $text:literal,)+) => {
        /// The operations of a communicator.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Collective {
            $($(#[doc = $doc])+ $name = $number,)+
        }

        impl Collective {
            /// Every operation, in the order of their numbers.
            pub const ALL: [Self; [$(Collective::$name),+].len()] = [$(Self::$name),+];

            /// The name users know it by (`all_reduce`).
            #[inline]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                }
            }
        }
    };
}

collectives! {
    /// Every rank gets the reduction of all inputs.
    AllReduce = 1 "all_reduce",
    /// The root gets the reduction of all inputs.
    Reduce = 2 "reduce",
    /// Every rank gets the root's buffer.
    Broadcast = 3 "broadcast",
    /// Every rank gets all inputs, in rank order.
    AllGather = 4 "all_gather",
    /// Rank r gets block r of the reduction of all inputs.
    ReduceScatter = 5 "reduce_scatter",
    /// The root gets all inputs, in rank order.
    Gather = 6 "gather",
    /// Rank r gets block r of the root's input.
    Scatter = 7 "scatter",
    /// Rank r gets block r of every rank's input, in rank order.
    AllToAll = 8 "all_to_all",
    /// No rank leaves before all ranks have come.
    Barrier = 9 "barrier",
    /// Point-to-point send.
    Send = 10 "send",
    /// Point-to-point receive.
    Recv = 11 "recv",
    /// Rank r gets `((x0 op x1) op ...) op xr`, the reduction of the inputs up to its own, in exactly this order.
    Scan = 12 "scan",
    /// The same without its own: rank 0 gets nothing, and what its output holds stays there.
    Exscan = 13 "exscan",
}

impl Collective {
    /// Whether it combines inputs by an operator.
    #[inline]
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter) || self.is_prefix()
    }

    /// Whether each rank gets the reduction of the ranks before it.
    #[inline]
    pub(crate) const fn is_prefix(self) -> bool {
        matches!(self, Self::Scan | Self::Exscan)
    }

    /// Whether one rank, the root, has another part than the others.
    #[inline]
    pub const fn has_root(self) -> bool {
        matches!(
            self,
            Self::Reduce | Self::Broadcast | Self::Gather | Self::Scatter
        )
    }

    /// Whether the input may lie in the output.
    #[inline]
    pub const fn may_be_in_place(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::AllGather) || self.is_prefix()
    }

    /// Whether an input has a block for each rank.
    #[inline]
    pub const fn gives_blocks(self) -> bool {
        matches!(self, Self::ReduceScatter | Self::Scatter | Self::AllToAll)
    }

    /// Whether an output has a block of each rank.
    #[inline]
    pub const fn takes_blocks(self) -> bool {
        matches!(self, Self::AllGather | Self::Gather | Self::AllToAll)
    }

    /// Blocks of the longer buffer of a rank, the root where there is one, among `world` ranks.
    #[inline]
    pub const fn blocks(self, world: usize) -> usize {
        match self.gives_blocks() || self.takes_blocks() {
            true => world,
            false => 1,
        }
    }

    /// Whether what goes from one rank to another is known to these two alone, unless all ranks give the same count.
    #[inline]
    pub const fn is_between_pairs(self) -> bool {
        matches!(self, Self::Gather | Self::Scatter | Self::AllToAll)
    }

    /// The operation with this number, if there is one.
    #[inline]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

macro_rules! algorithms {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// The families of algorithms.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Algorithm {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Algorithm {
            /// Every algorithm.
            pub const ALL: [Self; [$(Algorithm::$name),+].len()] = [$(Self::$name),+];

            /// The values of the setting, in words.
            pub const ACCEPTS: &str = concat!("auto", $(", ", $text),+);

            /// The name used in settings and reports.
            #[inline]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                }
            }
        }
    };
}

algorithms! {
    /// Each rank to each other rank: the fewest rounds, one fixed order of reduction at any size.
    Direct = "direct",
    /// Direct in two shots: each rank reduces its slice from all ranks, then sends it to all. The volume of the ring in
    /// two rounds, and the order of reduction of `Direct`.
    TwoShot = "two_shot",
    /// Around a ring: each link direction of each rank is used by one neighbour only.
    Ring = "ring",
    /// Double binary tree (Sanders, Speck, Träff 2009).
    Tree = "tree",
    /// Recursive doubling: log2(n) exchanges of everything.
    RecursiveDoubling = "recursive_doubling",
    /// Recursive halving, then doubling (Rabenseifner 2004; any world size).
    Halving = "halving",
    /// Bruck et al. 1997: log2(n) rounds for all_to_all, all_gather and barrier.
    Bruck = "bruck",
    /// Inside each host, across the hosts by all ranks at once, inside each host. See plan/hierarchical/.
    Hierarchical = "hierarchical",
    /// Copy-in, copy-out: chunk by chunk through windows, memory of each rank that all ranks of the host map. For
    /// buffers that the peers cannot reach. See plan/windows/.
    Windows = "windows",
    /// An all_reduce in one pass over the buffers of all ranks, where they lie in the heap that the ranks of the host
    /// share: each rank sums up its slice of all of them and stores the sum to all of them.
    InPlace = "in_place",
}

impl Algorithm {
    /// Its number in [`Self::ALL`], by which ranks compare what they do.
    #[inline]
    pub fn number(self) -> u8 {
        Self::ALL
            .iter()
            .position(|known| *known == self)
            .unwrap_or(0) as u8
    }

    /// Whether all ranks must share memory for it, and agree on that before.
    #[inline]
    pub const fn needs_shared_memory(self) -> bool {
        matches!(self, Self::Windows | Self::InPlace)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lead_back_to_their_values() {
        for collective in Collective::ALL {
            assert_eq!(Collective::from_number(collective as u8), Some(collective));
        }
        assert_eq!(Collective::from_number(0), None);
        assert_eq!(Collective::from_number(14), None);
    }
}
