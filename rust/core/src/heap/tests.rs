use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use proptest::prelude::*;

use super::arena::{Arena, GRAIN};
use super::*;
use crate::fork::tests::in_child;

const MIB: usize = 1 << 20;

/// A heap of its own, which keeps empty segments.
fn heap(limit: usize) -> Arena {
    let arena = Arena::retaining(Duration::from_secs(3600));
    arena.set_limit(limit);
    arena.add_sharer();
    arena
}

/// Frees a block that the test has made and no longer uses.
fn free(arena: &Arena, block: Block) {
    // SAFETY: as it says.
    assert!(unsafe { arena.free(block.address) });
}

fn bytes(block: Block) -> &'static mut [u8] {
    // SAFETY: the tests use each block from one place at a time.
    unsafe { std::slice::from_raw_parts_mut(block.address.as_ptr(), block.bytes) }
}

#[test]
fn blocks_are_aligned_and_known_to_peers_by_their_place() {
    let arena = heap(256 * MIB);
    let small = arena.allocate(1, 1).unwrap();
    let large = arena.allocate(100_000, 64).unwrap();
    let aligned = arena.allocate(100, 1 << 21).unwrap();
    assert_eq!(small.bytes, GRAIN);
    assert_eq!(large.bytes % page(), 0);
    assert_eq!(large.address.addr().get() % page(), 0);
    assert_eq!(aligned.address.addr().get() % (1 << 21), 0);
    let place = arena.locate(small.address.as_ptr(), 1).unwrap();
    let other = arena.locate(large.address.as_ptr(), 100_000).unwrap();
    assert_eq!(place.segment, other.segment);
    let apart = large.address.addr().get() - small.address.addr().get();
    assert_eq!((other.offset - place.offset) as usize, apart);
    let local = [0_u8; 8];
    assert_eq!(arena.locate(local.as_ptr(), 8), None);
    // SAFETY: refused.
    assert!(!unsafe { arena.free(NonNull::from(&local).cast()) });
    // SAFETY: refused.
    assert!(!unsafe { arena.free(small.address.add(1)) });
}

#[test]
fn a_peer_that_maps_the_segment_sees_the_block() {
    let arena = heap(256 * MIB);
    let block = arena.allocate(5000, 64).unwrap();
    bytes(block)[..6].copy_from_slice(b"unison");
    let place = arena.locate(block.address.as_ptr(), 5000).unwrap();
    let file = arena.segment_file(place.segment).unwrap();
    let mut peer = PeerHeap::default();
    let identity = Identity::of(place.segment, &file).unwrap();
    assert!(peer.admit(identity, Some(file)).unwrap());
    // SAFETY: nothing writes meanwhile.
    let seen = unsafe { peer.slice(place.segment, place.offset, 6) }
        .unwrap()
        .unwrap();
    assert_eq!(seen, b"unison");
    free(&arena, block);
    arena.trim();
    assert!(!arena.is_live(place.segment));
    // The mapping outlives the segment, and the memory does not.
    // SAFETY: nothing writes any more.
    let seen = unsafe { peer.slice(place.segment, place.offset, 6) }
        .unwrap()
        .unwrap();
    assert_eq!(seen, [0; 6]);
}

#[test]
fn the_limit_holds_and_room_is_made_from_empty_segments() {
    let arena = heap(100 * MIB);
    let first = arena.allocate(60 * MIB, 64).unwrap();
    assert_eq!(arena.allocate(41 * MIB, 64), None);
    let second = arena.allocate(30 * MIB, 64).unwrap();
    assert_eq!(arena.allocate(20 * MIB, 64), None);
    assert_eq!(arena.statistics().reserved, 100 * MIB);
    free(&arena, first);
    free(&arena, second);
    assert_eq!(arena.statistics().segments, 2);
    let whole = arena.allocate(100 * MIB, 64).unwrap();
    let statistics = arena.statistics();
    assert_eq!((statistics.segments, statistics.in_use), (1, 100 * MIB));
    assert_eq!(arena.allocate(1, 1), None);
    arena.set_limit(200 * MIB);
    assert!(arena.allocate(1, 1).is_some());
    free(&arena, whole);
}

#[test]
fn a_heap_of_a_few_pages_and_none_at_all() {
    let arena = heap(3 * page() + 5);
    let block = arena.allocate(2 * page(), 64).unwrap();
    assert!(arena.allocate(page(), 64).is_some());
    assert_eq!(arena.allocate(1, 64), None);
    assert_eq!(arena.statistics().reserved, 3 * page());
    free(&arena, block);
    let off = heap(0);
    assert_eq!(off.allocate(1, 1), None);
    assert_eq!(off.statistics(), Statistics::default());
}

#[test]
fn nonsense_is_refused() {
    let arena = heap(256 * MIB);
    assert_eq!(arena.allocate(usize::MAX, 64), None);
    assert_eq!(arena.allocate(isize::MAX as usize, 64), None);
    assert_eq!(arena.allocate(1, 3), None);
    assert_eq!(arena.allocate(1, 0), None);
    assert_eq!(arena.allocate(1, 1 << 40), None);
    assert!(arena.allocate(0, 1).is_some());
}

#[test]
fn segments_grow_with_the_heap_and_a_huge_block_has_its_own() {
    let arena = heap(1 << 40);
    let mut blocks = vec![arena.allocate(1, 1).unwrap()];
    assert_eq!(arena.statistics().reserved, 64 * MIB);
    blocks.push(arena.allocate(64 * MIB, 1).unwrap());
    assert_eq!(arena.statistics().reserved, 128 * MIB);
    blocks.push(arena.allocate(300 * MIB, 1).unwrap());
    assert_eq!(arena.statistics().reserved, 428 * MIB);
    blocks.push(arena.allocate(64 * MIB, 1).unwrap());
    assert_eq!(arena.statistics().reserved, 856 * MIB);
    let statistics = arena.statistics();
    assert_eq!((statistics.segments, statistics.blocks), (4, 4));
    for block in blocks {
        free(&arena, block);
    }
    assert_eq!(arena.statistics().segments, 4);
    assert_eq!(arena.statistics().in_use, 0);
    assert!(arena.statistics().peak >= 428 * MIB);
}

#[test]
fn empty_segments_are_kept_for_the_next_block_while_links_share_them() {
    let arena = heap(256 * MIB);
    let block = arena.allocate(MIB, 64).unwrap();
    bytes(block).fill(7);
    assert_eq!(block.used, 0);
    let before = retired();
    free(&arena, block);
    assert_eq!(arena.statistics().segments, 1);
    let again = arena.allocate(2 * MIB, 64).unwrap();
    assert_eq!((again.address, again.used), (block.address, MIB));
    assert!(bytes(again)[MIB..].iter().all(|&byte| byte == 0));
    free(&arena, again);
    // With the last link they go, and without one they go with their last block.
    arena.remove_sharer();
    assert_eq!(arena.statistics().segments, 0);
    assert!(retired() > before);
    let block = arena.allocate(MIB, 64).unwrap();
    free(&arena, block);
    assert_eq!(
        arena.statistics(),
        Statistics {
            limit: 256 * MIB,
            peak: 2 * MIB,
            ..Statistics::default()
        }
    );
}

#[test]
fn empty_segments_are_not_kept_for_ever() {
    let arena = Arena::retaining(Duration::ZERO);
    arena.set_limit(256 * MIB);
    arena.add_sharer();
    let [one, two] = [60, 60].map(|size| arena.allocate(size * MIB, 64).unwrap());
    free(&arena, one);
    assert_eq!(arena.statistics().segments, 1);
    free(&arena, two);
    assert_eq!(arena.statistics().segments, 0);
}

#[test]
fn a_buffer_is_zero_also_where_memory_was_used_before() {
    let mut first = Buffer::<f32>::zeroed(50_000);
    assert!(first.is_shared());
    assert!(locate(first.as_ptr().cast(), 200_000).is_some());
    first.fill(3.0);
    let neighbour = Buffer::from_slice(&[1_i64, 2, 3]);
    drop(first);
    let second = Buffer::<f32>::zeroed(40_000);
    assert!(second.iter().all(|&value| value == 0.0));
    assert_eq!(neighbour[..], [1, 2, 3]);
    assert_eq!(format!("{neighbour:?}"), "[1, 2, 3]");
    assert!(Buffer::<u8>::zeroed(0).is_empty());
}

#[test]
fn threads_get_blocks_of_their_own() {
    let arena = heap(512 * MIB);
    std::thread::scope(|scope| {
        for mark in 1..=4_u8 {
            let arena = &arena;
            scope.spawn(move || {
                for round in 0..300 {
                    let block = arena.allocate(1 + round * 997, 64).unwrap();
                    bytes(block).fill(mark);
                    std::thread::yield_now();
                    assert!(bytes(block).iter().all(|&byte| byte == mark));
                    free(arena, block);
                }
            });
        }
    });
    assert_eq!(arena.statistics().in_use, 0);
}

#[test]
fn a_forked_child_has_the_memory_for_itself_and_a_heap_of_its_own() {
    let block = allocate(MIB, 64).unwrap();
    // It may have been another test's before.
    bytes(block)[..2].copy_from_slice(&[1, 0]);
    // Another thread may be inside the heap at the fork; here it is certain to be.
    let busy = HEAP.hold();
    let address = block.address;
    let holds = in_child(|| {
        let seen = bytes(block)[0] == 1;
        bytes(block)[1] = 2;
        let own = allocate(MIB, 64).unwrap();
        let is_own = |block: Block| locate(block.address.as_ptr(), block.bytes).is_some();
        let apart = is_own(own) && !is_own(block) && statistics().blocks == 1;
        // SAFETY: neither is used any more.
        let freed = unsafe { super::free(address) && super::free(own.address) };
        seen && apart && freed && statistics().blocks == 0 && bytes(block)[1] == 2
    });
    drop(busy);
    assert!(holds);
    assert_eq!(bytes(block)[..2], [1, 0]);
    // SAFETY: it is not used any more.
    assert!(unsafe { super::free(address) });
}

#[derive(Clone, Debug)]
enum Call {
    Allocate(usize, u32),
    Free(usize),
    Trim,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let size = prop_oneof![1_usize..5000, 1_usize..3 * MIB, 60 * MIB..70 * MIB];
    let call = prop_oneof![
        4 => (size, 0_u32..16).prop_map(|(size, shift)| Call::Allocate(size, shift)),
        3 => any::<usize>().prop_map(Call::Free),
        1 => Just(Call::Trim),
    ];
    proptest::collection::vec(call, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn blocks_are_disjoint_and_zero_where_they_say(calls in calls()) {
        let arena = heap(300 * MIB);
        let mut blocks: BTreeMap<usize, (Block, u8)> = BTreeMap::new();
        for (mark, call) in calls.into_iter().enumerate() {
            match call {
                Call::Allocate(size, shift) => {
                    let Some(block) = arena.allocate(size, 1 << shift) else { continue };
                    let start = block.address.addr().get();
                    prop_assert!(block.bytes >= size && start.is_multiple_of((1 << shift).max(64)));
                    let before = blocks.range(..=start).next_back();
                    prop_assert!(before.is_none_or(|(at, (block, _))| at + block.bytes <= start));
                    let after = blocks.range(start..).next();
                    prop_assert!(after.is_none_or(|(at, _)| start + block.bytes <= *at));
                    prop_assert!(arena.locate(block.address.as_ptr(), block.bytes).is_some());
                    // The ends stand for the whole: touching all of it takes long.
                    let slice = bytes(block);
                    let fresh = &slice[block.used..];
                    let ends = [fresh.first(), fresh.last()];
                    prop_assert!(ends.into_iter().flatten().all(|&byte| byte == 0));
                    let mark = mark as u8 | 1;
                    slice[0] = mark;
                    slice[block.bytes - 1] = mark;
                    blocks.insert(start, (block, mark));
                }
                Call::Free(index) if !blocks.is_empty() => {
                    let start = *blocks.keys().nth(index % blocks.len()).unwrap();
                    let (block, mark) = blocks.remove(&start).unwrap();
                    let slice = bytes(block);
                    prop_assert_eq!((slice[0], slice[block.bytes - 1]), (mark, mark));
                    free(&arena, block);
                }
                Call::Free(_) => {}
                Call::Trim => arena.trim(),
            }
            let statistics = arena.statistics();
            prop_assert_eq!(statistics.in_use, blocks.values().map(|(block, _)| block.bytes).sum::<usize>());
            prop_assert!(statistics.in_use <= statistics.reserved && statistics.reserved <= 300 * MIB);
        }
        for (block, _) in blocks.into_values() {
            free(&arena, block);
        }
        arena.trim();
        let rest = arena.statistics();
        prop_assert_eq!((rest.reserved, rest.in_use, rest.blocks, rest.segments), (0, 0, 0, 0));
    }
}

#[test]
fn what_a_stopped_peer_may_write_is_withheld_until_it_can_no_more() {
    let arena = heap(64 << 20);
    let taken = || arena.allocate(1 << 20, 64).unwrap();
    let (first, beside) = (taken(), taken());
    let address = first.address.addr().get();
    let is_over = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_over);
    arena.detach(
        address + 5000,
        100,
        Arc::new(move || seen.load(Ordering::Relaxed)),
    );
    assert!(arena.locate(first.address.as_ptr(), 1 << 20).is_none());
    assert!(arena.locate(beside.address.as_ptr(), 1 << 20).is_some());
    // SAFETY: it is no longer used.
    assert!(unsafe { arena.free(first.address) });
    assert_ne!(taken().address, first.address);
    is_over.store(true, Ordering::Relaxed);
    let again = taken();
    assert_eq!(again.address, first.address);
    assert!(arena.locate(again.address.as_ptr(), 1 << 20).is_some());
    assert_eq!(arena.statistics().in_use, 3 << 20);
}

#[test]
fn what_is_in_use_stays_private_after_the_peer_has_gone_on() {
    let arena = heap(64 << 20);
    let block = arena.allocate(1 << 20, 64).unwrap();
    arena.detach(block.address.addr().get(), 100, Arc::new(|| true));
    // SAFETY: this test's block.
    let bytes = unsafe { std::slice::from_raw_parts_mut(block.address.as_ptr(), 100) };
    bytes.fill(7);
    assert!(arena.allocate(64, 64).is_some());
    assert_eq!(bytes, [7; 100]);
    assert!(arena.locate(block.address.as_ptr(), 1).is_none());
    // SAFETY: it is no longer used.
    assert!(unsafe { arena.free(block.address) });
    assert!(arena.locate(block.address.as_ptr(), 1).is_some());
}
