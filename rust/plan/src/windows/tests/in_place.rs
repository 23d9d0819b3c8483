//! Buffers that peers read where they lie, instead of in windows.

use super::*;

/// Any ranks may have their buffers read in place, in every collective with the same count on all ranks. An all_reduce in one
/// shot and the prefixes are none of these.
#[test]
fn buffers_are_read_in_place() {
    for world in [2, 3, 4] {
        for count in [1, 6, 20, 33] {
            let room = Room { half: 12, align: 1 };
            let all = cases(world, count);
            let can_be = |case: &&Case| {
                let is_one_shot = case.collective.is_prefix()
                    || case.collective == Collective::AllReduce && case.shots == Shots::One;
                matches!(case.sizes, Sizes::Even(_)) && !case.premultiplied && !is_one_shot
            };
            let all: Vec<&Case> = all.iter().filter(can_be).collect();
            for (number, case) in all.iter().enumerate() {
                let other = all[(number + 5) % all.len()];
                for among in 0..1_usize << world {
                    let placed: Peers = (0..world).filter(|rank| among >> rank & 1 == 1).collect();
                    let (known, known_of_other) = (lists(case, world), lists(other, world));
                    let row = [
                        operation(case, &known, &room, 0).placed(placed),
                        operation(case, &known, &room, 0),
                        operation(other, &known_of_other, &room, 1).placed(placed),
                        operation(case, &known, &room, 0).placed(placed),
                    ];
                    if let Err(problem) = verify(&row, room.half) {
                        panic!("world {world}, count {count}, {placed:?}, {case:?}: {problem}");
                    }
                }
            }
        }
    }
}

/// A rank that does not wait until its buffer has been read, or has it read where it may be written, is found out.
#[test]
fn buffers_that_change_too_early_are_refused() {
    let room = Room { half: 12, align: 1 };
    let case = |collective, shots| Case {
        collective,
        sizes: Sizes::Even(20),
        root: 0,
        in_place: collective == Collective::AllReduce,
        shots,
        premultiplied: false,
    };
    let all = Peers::others(3, 3);
    for collective in [
        Collective::AllGather,
        Collective::Broadcast,
        Collective::ReduceScatter,
    ] {
        let case = case(collective, Shots::One);
        let known = lists(&case, 3);
        let mut row = [operation(&case, &known, &room, 0).placed(all)];
        assert_eq!(verify(&row, room.half), Ok(()));
        row[0].plans[0].steps.pop();
        let problem = verify(&row, room.half).expect_err("a broken plan passed");
        let is_found = ["may still use its buffers", "in another operation"];
        assert!(
            is_found.iter().any(|words| problem.contains(words)),
            "{problem}"
        );
    }
    let case = case(Collective::AllReduce, Shots::One);
    let known = lists(&case, 3);
    let row = [operation(&case, &known, &room, 0).placed(all)];
    let problem = verify(&row, room.half).expect_err("a broken plan passed");
    assert!(problem.contains("in use"), "{problem}");
}
