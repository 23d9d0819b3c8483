//! Several contributions in one pass: the results of the reference, whatever form the contributions
//! have and wherever the result goes.

use proptest::prelude::*;

use super::reference::{Random, contribution, reduce};
use super::{Shifted, Tier, assert_same, meaningful};
use crate::types::{DataType, ReduceOp};
use crate::{Kernel, Source, Streaming};

/// How a contribution comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Element,
    Partial,
    Destination,
}

const FORMS: [Form; 3] = [Form::Element, Form::Partial, Form::Destination];

fn widened(kernel: &Kernel, elements: &[u8]) -> Vec<u8> {
    let count = elements.len() / kernel.element().size();
    let mut wide = vec![0; count * kernel.accumulator().size()];
    kernel.widen(&mut wide, elements);
    wide
}

/// A destination with something before and after it that must not change.
struct Guarded {
    space: Shifted,
    start: usize,
    len: usize,
}

impl Guarded {
    const MARGIN: usize = 192;

    fn new(offset: usize, content: &[u8]) -> Self {
        let mut space = Shifted::zeros(offset, content.len() + 2 * Self::MARGIN);
        space.fill(0xa5);
        space[Self::MARGIN..][..content.len()].copy_from_slice(content);
        Self {
            space,
            start: Self::MARGIN,
            len: content.len(),
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.space[self.start..][..self.len]
    }

    fn result(&self, what: &str) -> &[u8] {
        let outside = self.space[..self.start]
            .iter()
            .chain(&self.space[self.start + self.len..]);
        assert!(
            outside.copied().all(|byte| byte == 0xa5),
            "{what}: wrote outside"
        );
        &self.space[self.start..][..self.len]
    }
}

/// Reduces `ranks`, which come in `forms`, in both ways, and compares with the reference.
fn check(
    (op, dtype): (ReduceOp, DataType),
    ranks: &[Vec<u8>],
    forms: &[Form],
    streaming: Streaming,
    offset: usize,
) {
    let world = ranks.len();
    let expected = reduce(op, dtype, ranks);
    for tier in Tier::all() {
        let kernel = Kernel::on(tier, op, dtype).unwrap();
        let what = format!("{op} of {dtype} from {forms:?}, {streaming:?}, {offset}, {tier:?}");
        // A destination that is no source holds what must not matter.
        let held = forms.iter().position(|form| *form == Form::Destination);
        let before = held.map_or_else(|| vec![0x77; ranks[0].len()], |at| ranks[at].clone());
        let wide: Vec<_> = ranks
            .iter()
            .map(|rank| Shifted::new(offset * 5 % 23, &widened(&kernel, rank)))
            .collect();
        let narrow: Vec<_> = ranks
            .iter()
            .map(|rank| Shifted::new(offset * 3 % 17, rank))
            .collect();
        let sources: Vec<_> = (0..world)
            .map(|rank| match forms[rank] {
                Form::Element => Source::Element(&narrow[rank]),
                Form::Partial => Source::Partial(&wide[rank]),
                Form::Destination => Source::Destination,
            })
            .collect();

        let mut finished = Guarded::new(offset, &before);
        kernel.reduce(finished.bytes(), &sources, world, streaming);
        assert_same(dtype, finished.result(&what), &expected, &what);

        let mut folded = Guarded::new(offset + 4, &widened(&kernel, &before));
        kernel.fold_all(folded.bytes(), &sources, streaming);
        let mut result = vec![0; expected.len()];
        kernel.finish(&mut result, folded.result(&what), world);
        assert_same(
            dtype,
            &result,
            &expected,
            &format!("{what}, finished apart"),
        );
    }
}

/// Destination at most once, since the ranks' contents differ.
fn forms(random: &mut Random, world: usize) -> Vec<Form> {
    let mut form = || FORMS[random.next() as usize / 7 % 3];
    let mut forms: Vec<_> = (0..world).map(|_| form()).collect();
    let mut held = forms.iter_mut().filter(|form| **form == Form::Destination);
    held.next();
    held.for_each(|form| *form = Form::Element);
    forms
}

#[test]
fn every_operator_matches_the_reference_across_blocks() {
    let mut random = Random::new(11);
    for pair in meaningful() {
        for (i, count) in [0, 1, 7, 255, 256, 257, 1023, 1040, 4100]
            .into_iter()
            .enumerate()
        {
            let ranks: Vec<_> = (0..1 + (i + 1) % 5)
                .map(|_| contribution(pair.1, count, &mut random))
                .collect();
            let streaming = [Streaming::No, Streaming::Yes][i % 2];
            check(
                pair,
                &ranks,
                &forms(&mut random, ranks.len()),
                streaming,
                count % 16,
            );
        }
    }
}

proptest! {
    #[test]
    fn any_pass_matches_the_reference(
        pair in prop::sample::select(meaningful().collect::<Vec<_>>()),
        seed in any::<u64>(),
        world in 1..20_usize,
        count in 0..2500_usize,
        streaming in prop::sample::select(vec![Streaming::No, Streaming::Yes]),
        offset in 0..70_usize,
    ) {
        let mut random = Random::new(seed);
        let ranks: Vec<_> = (0..world).map(|_| contribution(pair.1, count, &mut random)).collect();
        let forms = forms(&mut random, world);
        check(pair, &ranks, &forms, streaming, offset);
    }
}

#[test]
fn a_pass_has_the_bits_of_successive_folds() {
    let mut random = Random::new(5);
    let worlds = [6, 20];
    for (op, dtype, world) in meaningful().flat_map(|(op, dtype)| worlds.map(|n| (op, dtype, n))) {
        let ranks: Vec<_> = (0..world)
            .map(|_| contribution(dtype, 1500, &mut random))
            .collect();
        let kernel = Kernel::new(op, dtype).unwrap();
        let mut acc = widened(&kernel, &ranks[0]);
        for rank in &ranks[1..] {
            kernel.fold_element(&mut acc, rank);
        }
        let sources: Vec<_> = ranks.iter().map(|rank| Source::Element(rank)).collect();
        let mut folded = vec![0; acc.len()];
        kernel.fold_all(&mut folded, &sources, Streaming::No);
        let what = format!("{op} of {dtype} by {world} ranks");
        assert_same(kernel.accumulator(), &folded, &acc, &what);
        let (mut expected, mut result) = (ranks[0].clone(), ranks[1].clone());
        kernel.finish(&mut expected, &acc, world);
        kernel.reduce(&mut result, &sources, world, Streaming::Yes);
        assert_same(dtype, &result, &expected, &what);
    }
}

#[test]
fn fold_into_leaves_its_sources() {
    let mut random = Random::new(9);
    for (op, dtype) in meaningful() {
        let dtype = match op.accumulator(dtype) {
            // Of partial sums alone.
            DataType::Int128 => continue,
            accumulator => accumulator,
        };
        let pair = [0, 1].map(|_| contribution(dtype, 131, &mut random));
        let expected = reduce(op, dtype, &pair);
        for tier in Tier::all() {
            let kernel = Kernel::on(tier, op, dtype).unwrap();
            let [a, b] = [0, 1].map(|i| Shifted::new(3 * i + 1, &pair[i]));
            let mut dst = Guarded::new(7, &vec![0; a.len()]);
            kernel.fold_into(dst.bytes(), &a, &b);
            let folded = dst.result("fold_into").to_vec();
            let mut result = vec![0; folded.len()];
            kernel.finish(&mut result, &folded, 2);
            assert_same(
                dtype,
                &result,
                &expected,
                &format!("{op} of {dtype} on {tier:?}"),
            );
            assert!(*a == pair[0] && *b == pair[1]);
        }
    }
}

#[test]
#[should_panic(expected = "not as many whole elements")]
fn sources_of_other_lengths_are_a_mistake() {
    let kernel = Kernel::new(ReduceOp::Sum, DataType::Float16).unwrap();
    let sources = [Source::Element(&[0; 8]), Source::Partial(&[0; 8])];
    kernel.reduce(&mut [0; 8], &sources, 2, Streaming::No);
}

#[test]
#[should_panic(expected = "no contributions")]
fn a_result_of_nothing_is_a_mistake() {
    let kernel = Kernel::new(ReduceOp::Sum, DataType::Float32).unwrap();
    kernel.reduce(&mut [0; 8], &[], 1, Streaming::No);
}
