//! Questions to ranks elsewhere.

use std::net::TcpListener;

use super::super::inquiry::{self, Question};
use super::*;

/// A group that has a state, and knows the others' addresses.
struct Known {
    others: Vec<(Rank, Address)>,
    state: Value,
}

impl Gate for Known {
    fn admit(&self, _: Rank, _: Lane) -> Verdict {
        Verdict::Left
    }

    fn established(&self, _: Rank, _: Lane, _: Box<dyn Link>) {}

    fn striped(&self, _: Rank, _: Lane, _: Stripe) {}

    fn status(&self) -> Option<Value> {
        Some(self.state.clone())
    }

    fn address_of(&self, peer: Rank) -> Option<Address> {
        let found = self.others.iter().find(|(rank, _)| *rank == peer);
        found.map(|(_, address)| address.clone())
    }
}

/// An endpoint of a host of its own, with that rank of a group.
fn known(keys: &[GroupKey], rank: Rank, others: &[(Rank, &Address)]) -> Arc<Endpoint> {
    let apart = EndpointOptions {
        host: Some(format!("host{rank}")),
        ..options()
    };
    let endpoint = Endpoint::start_with(&apart, limits()).unwrap();
    let others = others
        .iter()
        .map(|(rank, address)| (*rank, (*address).clone()));
    let gate = Known {
        others: others.collect(),
        // Longer than one part.
        state: json!({"rank": rank, "ranks": [], "id": "x", "recent": "y".repeat(100_000)}),
    };
    endpoint
        .register(keys[rank].clone(), rank, keys.len(), Arc::new(gate))
        .unwrap();
    endpoint
}

fn ask(from: &Endpoint, keys: &[GroupKey], ranks: &[Rank], records: bool) -> Vec<Value> {
    let written = json!({
        "group": Hex(&keys[0].id()).to_string(),
        "rank": 0,
        "ranks": ranks,
        "seconds": 3.0,
        "records": records,
    });
    let question = Question::read(written.to_string().as_bytes()).unwrap();
    let mut told = inquiry::ask(&from.shared, &question);
    let mut told: Vec<Value> = told["elsewhere"]
        .as_array_mut()
        .unwrap()
        .drain(..)
        .collect();
    told.sort_by_key(|one| one["rank"].as_u64());
    told
}

#[test]
fn a_member_elsewhere_tells_its_state_and_others_why_not() {
    let keys = group();
    let one = known(&keys, 1, &[]);
    // It has ended.
    let mut gone = one.address().clone();
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    gone.tcp = vec![port];
    // Its process is stopped: the system takes connections, and nothing answers.
    let stopped = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut silent = gone.clone();
    silent.tcp = vec![stopped.local_addr().unwrap()];
    let zero = known(&keys, 0, &[(1, one.address()), (2, &gone), (3, &silent)]);
    let told = ask(&zero, &keys, &[0, 1, 2, 3], true);
    assert_eq!(told.len(), 4, "{told:?}");
    let state = &told[1]["answer"];
    assert_eq!(state["host"], one.address().hostname());
    assert_eq!(state["groups"][0]["rank"], 1);
    assert_eq!(
        state["groups"][0]["recent"].as_str().map(str::len),
        Some(100_000)
    );
    let trouble = |one: &Value| one["trouble"].as_str().unwrap_or_default().to_owned();
    assert!(trouble(&told[2]).contains("has probably ended"), "{told:?}");
    assert!(trouble(&told[3]).contains("no answer from"), "{told:?}");
    // The rank itself is not asked, nor one that is none.
    assert!(trouble(&told[0]).contains("no way"), "{told:?}");
    let told = ask(&zero, &keys, &[9], true);
    assert!(trouble(&told[0]).contains("no way"), "{told:?}");
    let told = ask(&zero, &keys, &[1], false);
    assert!(
        told[0]["answer"]["groups"][0]["recent"].is_null(),
        "{told:?}"
    );
}

#[test]
fn a_stranger_is_told_nothing() {
    let keys = group();
    let one = known(&keys, 1, &[]);
    // It knows the name of the group, and has other keys.
    let others = GroupKey::of_ranks(4, [1; 32], false);
    let stranger = known(&others, 0, &[(1, one.address())]);
    let told = ask(&stranger, &others, &[1], true);
    let trouble = told[0]["trouble"].as_str().unwrap_or_default();
    assert!(trouble.contains("refuses"), "{told:?}");
    // It asks in a group that it is not in.
    assert!(ask(&stranger, &keys, &[1], true).is_empty());
}

/// More ranks do not answer than are asked at a time, and one after them does.
#[test]
fn ranks_that_do_not_answer_keep_no_other_from_it() {
    const SILENT: usize = 40;
    let keys = GroupKey::of_ranks(SILENT + 2, [2; 32], false);
    let last = known(&keys, SILENT + 1, &[]);
    let stopped = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut silent = last.address().clone();
    silent.tcp = vec![stopped.local_addr().unwrap()];
    let mut others: Vec<_> = (1..=SILENT).map(|rank| (rank, &silent)).collect();
    others.push((SILENT + 1, last.address()));
    let zero = known(&keys, 0, &others);
    let ranks: Vec<Rank> = (1..SILENT + 2).collect();
    let told = ask(&zero, &keys, &ranks, false);
    assert_eq!(told.len(), SILENT + 1);
    assert!(told[..SILENT].iter().all(|one| one["answer"].is_null()));
    assert_eq!(told[SILENT]["answer"]["host"], last.address().hostname());
}
