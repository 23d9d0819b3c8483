//! Trees: log2(n) hops, pipelined.
//!
//! # Two trees
//!
//! In one binary tree the leaves, half of the ranks, never forward anything. So there are two, and each
//! carries half of the elements: a rank that forwards in one is a leaf of the other (Sanders, Speck and Träff,
//! "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009). The root is the source of
//! both and no node of either. The others, 1 to m by their distance from the root around the circle, stand in
//! each tree at a *position*:
//!
//! ```text
//! first tree, position = number          second tree for even m: mirrored,
//!                                        for odd m: shifted by one
//!          root                                   root
//!            \                                     /
//!             4                                   3
//!           /   \                               /   \
//!         2       6          m = 6            5       1
//!        / \     /                           / \       \
//!       1   3   5                           6   4       2
//! ```
//!
//! Positions are numbered in order, so odd positions are leaves and the children of an even position p whose
//! lowest set bit is b are p - b/2 and p + b/2 (or the nearest below it that exists).
//!
//! # The pipeline
//!
//! Each half goes in pieces. Upwards, a rank folds its children's sums of a piece into its own contribution
//! and sends the sum to its parent; downwards it receives a piece from its parent and sends it to its
//! children. all_reduce does both, the downward pieces following `log2(n)` pieces behind, so that both
//! directions of the links are in use. The plan of every rank goes through (piece, up before down, tree) in
//! the same order, hence ranks never wait in a circle.
//!
//! One rank, the root, completes every sum, so all ranks get the same bits.
//!
//! gather and scatter use a binomial tree instead, see [`gather`].

mod price;

use std::ops::Range;

pub(super) use self::price::FAMILY;
use super::builder::{Steps, pieces, wire_from};
use super::{Buffer, Plan, Shape, Span, Wire};
use crate::types::Rank;

/// How many pieces of each tree a rank may have partial sums of at once.
const SLOTS: usize = 4;

/// Up to this many elements go through the first tree only: two messages would cost more than they save.
const ONE_TREE: usize = 1024;

/// This rank's neighbours in one of the two trees.
struct Neighbours {
    /// `None` for the root.
    parent: Option<Rank>,
    children: Vec<Child>,
}

struct Child {
    rank: Rank,
    /// A leaf sends its bare contribution, others partial sums.
    is_leaf: bool,
}

/// Whether the position has no children.
const fn is_leaf(position: usize) -> bool {
    position % 2 == 1
}

/// The parent of a position in the in-order tree of positions 1 to `last`; 0 for the topmost.
fn parent_of(position: usize, last: usize) -> usize {
    let lowest = 1 << position.trailing_zeros();
    let without = position - lowest;
    let up = without | (lowest << 1);
    if up > last { without } else { up }
}

/// The children of a position in the in-order tree of positions 1 to `last`.
fn children_of(position: usize, last: usize) -> impl Iterator<Item = usize> {
    let lowest = 1usize << position.trailing_zeros();
    let left = (lowest > 1).then(|| position - lowest / 2);
    let right = std::iter::successors(Some(lowest / 2), |step| Some(step / 2))
        .take_while(|&step| step > 0)
        .map(|step| position + step)
        .find(|&child| child <= last);
    left.into_iter().chain(right)
}

/// The position of number `v` in the tree (0 or 1).
fn position_of(v: usize, tree: usize, last: usize) -> usize {
    match tree {
        0 => v,
        _ if last.is_multiple_of(2) => last + 1 - v,
        _ if v == 1 => last,
        _ => v - 1,
    }
}

/// The number at a position: the inverse of [`position_of`].
fn number_at(position: usize, tree: usize, last: usize) -> usize {
    match tree {
        0 => position,
        _ if last.is_multiple_of(2) => last + 1 - position,
        _ if position == last => 1,
        _ => position + 1,
    }
}

fn neighbours(shape: &Shape, tree: usize) -> Neighbours {
    let last = shape.world - 1;
    let rank_at = |position: usize| (shape.root + number_at(position, tree, last)) % shape.world;
    let child = |position: usize| Child {
        rank: rank_at(position),
        is_leaf: is_leaf(position),
    };
    let number = shape.before(shape.root);
    if number == 0 {
        let topmost = 1 << last.ilog2();
        return Neighbours {
            parent: None,
            children: vec![child(topmost)],
        };
    }
    let position = position_of(number, tree, last);
    Neighbours {
        parent: Some(match parent_of(position, last) {
            0 => shape.root,
            parent => rank_at(parent),
        }),
        children: children_of(position, last).map(child).collect(),
    }
}

/// The elements of both trees, in pieces.
struct Pieces {
    halves: [Range<usize>; 2],
    chunk: usize,
}

impl Pieces {
    fn of(count: usize, chunk: usize) -> Self {
        let middle = if count <= chunk.min(ONE_TREE) {
            count
        } else {
            count.div_ceil(2)
        };
        Self {
            halves: [0..middle, middle..count],
            chunk: chunk.min(middle).max(1),
        }
    }

    /// The number of pieces of the longer half.
    fn len(&self) -> usize {
        pieces(self.halves[0].len(), self.chunk)
    }

    /// Piece `index` of a tree; empty when that half has none left.
    fn get(&self, tree: usize, index: usize) -> Range<usize> {
        let half = &self.halves[tree];
        let end_of = |pieces: usize| half.end.min(half.start + pieces * self.chunk);
        end_of(index)..end_of(index + 1)
    }
}

/// Everything one rank needs to climb and descend both trees.
struct Climber<'a> {
    shape: &'a Shape<'a>,
    trees: [Neighbours; 2],
    pieces: Pieces,
    /// Where partial sums are kept when not in `Output`.
    slots: Option<Span>,
}

impl<'a> Climber<'a> {
    fn new(shape: &'a Shape<'a>, chunk: usize) -> Self {
        Self {
            shape,
            trees: [0, 1].map(|tree| neighbours(shape, tree)),
            pieces: Pieces::of(shape.count(), chunk),
            slots: None,
        }
    }

    /// Gives this rank memory for partial sums, if it adds any in either tree.
    fn with_slots(mut self, steps: &mut Steps) -> Self {
        let forwards = self.trees.iter().any(|tree| !tree.children.is_empty());
        if forwards {
            self.slots = Some(steps.scratch(2 * SLOTS * self.pieces.chunk));
        }
        self
    }

    /// Where the partial sum of a piece is kept.
    fn sum(&self, tree: usize, index: usize) -> Span {
        let piece = self.pieces.get(tree, index);
        match self.slots {
            None => self.shape.output().part(piece),
            Some(slots) => {
                let start = (tree * SLOTS + index % SLOTS) * self.pieces.chunk;
                slots.part(start..start + piece.len())
            }
        }
    }

    /// Piece `index` of both trees, from the children to the parent. `inner` is what ranks with children
    /// send.
    fn up(&self, steps: &mut Steps, index: usize, inner: Wire) {
        for (tree, Neighbours { parent, children }) in self.trees.iter().enumerate() {
            let piece = self.pieces.get(tree, index);
            let mut sum = self.shape.contribution().part(piece.clone());
            if !children.is_empty() {
                let own = sum;
                sum = self.sum(tree, index);
                steps.copy(own, sum);
            }
            for child in children {
                let wire = if child.is_leaf { Wire::Element } else { inner };
                steps.fold(child.rank, sum, wire);
            }
            match *parent {
                Some(parent) => steps.send(parent, sum),
                None => steps.finish(sum, self.shape.output().part(piece)),
            }
        }
    }

    /// Piece `index` of both trees, from the parent to the children.
    fn down(&self, steps: &mut Steps, index: usize) {
        for (tree, Neighbours { parent, children }) in self.trees.iter().enumerate() {
            let piece = self.shape.output().part(self.pieces.get(tree, index));
            if let Some(parent) = *parent {
                steps.recv(parent, piece, Wire::Element);
            }
            for child in children {
                steps.send(child.rank, piece);
            }
        }
    }
}

/// Up to rank 0 and down again.
fn all_reduce(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let mut climber = Climber::new(shape, chunk);
    let mut inner = wire_from(Buffer::Output);
    if shape.widen {
        climber = climber.with_slots(&mut steps);
        inner = wire_from(Buffer::Scratch);
    }
    let pieces = climber.pieces.len();
    let lag = pieces.min(shape.world.ilog2() as usize);
    for index in 0..pieces + lag {
        if index < pieces {
            climber.up(&mut steps, index, inner);
        }
        if index >= lag {
            climber.down(&mut steps, index - lag);
        }
    }
    steps.done()
}

/// Up to the root. Only the root has an output to accumulate in.
fn reduce(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let mut climber = Climber::new(shape, chunk);
    if shape.widen || shape.rank != shape.root {
        climber = climber.with_slots(&mut steps);
    }
    for index in 0..climber.pieces.len() {
        climber.up(&mut steps, index, wire_from(Buffer::Scratch));
    }
    steps.done()
}

/// Down from the root.
fn broadcast(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let climber = Climber::new(shape, chunk);
    for index in 0..climber.pieces.len() {
        climber.down(&mut steps, index);
    }
    steps.done()
}

/// The binomial tree of gather and scatter: number v stands for the blocks v to v + lowest set bit of v, its
/// parent is v without that bit.
///
/// ```text
///             0                 blocks 0-7       numbers are distances from the root around the circle
///       /     |    \
///      4      2     1           4: 4-7   2: 2-3   1: 1
///     / \     |
///    6   5    3                 6: 6-7   5: 5     3: 3
///    |
///    7                          7: 7
/// ```
///
/// log2(n) messages at the root instead of n - 1; each block is sent up to log2(n) times. For short blocks.
struct Binomial {
    world: usize,
    root: Rank,
    number: usize,
}

impl Binomial {
    fn of(shape: &Shape) -> Self {
        Self {
            world: shape.world,
            root: shape.root,
            number: shape.before(shape.root),
        }
    }

    /// The lowest set bit of this rank's number; for the root, a power of two not below the world.
    fn span(&self) -> usize {
        match self.number {
            0 => self.world.next_power_of_two(),
            number => 1 << number.trailing_zeros(),
        }
    }

    /// The numbers this rank answers for.
    fn subtree(&self) -> Range<usize> {
        self.number..self.world.min(self.number + self.span())
    }

    fn parent(&self) -> Rank {
        self.rank(self.number - self.span())
    }

    fn rank(&self, number: usize) -> Rank {
        (self.root + number) % self.world
    }

    /// The numbers each child answers for, smallest subtree first. A child is the first of them.
    fn children(&self) -> impl DoubleEndedIterator<Item = Range<usize>> {
        let subtree = self.subtree();
        (0..self.span().ilog2()).filter_map(move |bit| {
            let first = subtree.start + (1 << bit);
            (first < subtree.end).then(|| first..subtree.end.min(first + (1 << bit)))
        })
    }

    /// Numbers that are next to each other are ranks that are, except where ranks pass the end of the world:
    /// there a run is cut in two, because the root keeps its blocks by rank.
    fn cut(&self, run: Range<usize>) -> [Range<usize>; 2] {
        let wrap = (self.world - self.root).clamp(run.start, run.end);
        [run.start..wrap, wrap..run.end]
    }
}

/// Up the binomial tree: each rank collects the blocks of its subtree.
fn gather(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let (tree, block) = (Binomial::of(shape), shape.count());
    let input = Span::new(Buffer::Input, 0, block);
    if tree.number == 0 {
        let output = Span::new(Buffer::Output, 0, shape.world * block);
        let place = |run: Range<usize>| {
            let first = tree.rank(run.start);
            output.part(first * block..(first + run.len()) * block)
        };
        steps.copy(input, place(0..1));
        for run in tree.children() {
            for part in tree.cut(run.clone()) {
                if !part.is_empty() {
                    let wire = wire_of_subtree(&run);
                    steps.recv(tree.rank(run.start), place(part), wire);
                }
            }
        }
        return steps.done();
    }
    let subtree = tree.subtree();
    let mut collected = input;
    if subtree.len() > 1 {
        collected = steps.scratch(subtree.len() * block);
        steps.copy(input, collected.part(0..block));
    }
    let place = |run: Range<usize>| {
        collected.part((run.start - tree.number) * block..(run.end - tree.number) * block)
    };
    for run in tree.children() {
        let wire = wire_of_subtree(&run);
        steps.recv(tree.rank(run.start), place(run), wire);
    }
    if tree.parent() == shape.root {
        for part in tree.cut(subtree) {
            steps.send(shape.root, place(part));
        }
    } else {
        steps.send(tree.parent(), collected);
    }
    steps.done()
}

/// A rank that answers for itself alone sends from `Input`, others from where they collect.
fn wire_of_subtree(run: &Range<usize>) -> Wire {
    wire_from(if run.len() == 1 {
        Buffer::Input
    } else {
        Buffer::Scratch
    })
}

/// Down the binomial tree: each rank gets the blocks of its subtree and passes on all but its own. The
/// largest subtrees are served first, they have the longest way to go.
fn scatter(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let (tree, block) = (Binomial::of(shape), shape.count());
    let output = Span::new(Buffer::Output, 0, block);
    if tree.number == 0 {
        let input = Span::new(Buffer::Input, 0, shape.world * block);
        let place = |run: Range<usize>| {
            let first = tree.rank(run.start);
            input.part(first * block..(first + run.len()) * block)
        };
        for run in tree.children().rev() {
            for part in tree.cut(run.clone()) {
                if !part.is_empty() {
                    steps.send(tree.rank(run.start), place(part));
                }
            }
        }
        steps.copy(place(0..1), output);
        return steps.done();
    }
    let subtree = tree.subtree();
    let is_leaf = subtree.len() == 1;
    let received = if is_leaf {
        output
    } else {
        steps.scratch(subtree.len() * block)
    };
    let place = |run: Range<usize>| {
        received.part((run.start - tree.number) * block..(run.end - tree.number) * block)
    };
    if tree.parent() == shape.root {
        for part in tree.cut(subtree) {
            steps.recv(shape.root, place(part), Wire::Element);
        }
    } else {
        steps.recv(tree.parent(), received, Wire::Partial);
    }
    for run in tree.children().rev() {
        steps.send(tree.rank(run.start), place(run));
    }
    steps.copy(place(tree.number..tree.number + 1), output);
    steps.done()
}
