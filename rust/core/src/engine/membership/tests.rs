//! Agreements from seeds. A seed decides which ranks take part, the order in which messages arrive, and what goes wrong and
//! when: ranks die, with or without what they had sent, links between living ranks are cut, ranks stay away or come late. A
//! failure prints its seed; `AGREEMENT_SEED=7 cargo test -p unisono --lib membership -- --nocapture` tells the story of one.
//! `AGREEMENT_SEEDS=1000000` tries that many, in a minute or so.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::env;

use super::agreement::{Action, Agreement, Event, Loss, Outcome};
use super::message::{Ballot, Decision, Message, Refusal};
use crate::engine::world::random::Random;
use crate::error::Result;
use crate::fence;
use crate::types::Rank;

const SEEDS: u64 = 20_000;
/// All that some seed must reach.
const MARKS: [&str; 10] = [
    "a leader dies before it decides",
    "a leader dies after it has decided",
    "a rank dies amid a proposal",
    "a decision with a rank that has died",
    "two ranks die",
    "a decision is taken over",
    "a minority stays behind",
    "a rank that is cut off is left out",
    "an absent rank keeps all",
    "a rank is excluded",
];

/// One direction of a link.
#[derive(Default)]
struct Way {
    messages: VecDeque<Message>,
    /// All that has been sent, for a link that is opened again.
    sent: Vec<Message>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// It has not called yet.
    Away,
    Takes,
    Dead,
}

#[derive(Clone, Copy, Debug)]
enum Next {
    Begin(Rank),
    /// The first message from one rank to another.
    Deliver(Rank, Rank),
    /// The first rank learns that the second is lost.
    Lose(Rank, Rank, Loss),
    Kill(Rank),
    Cut(Rank, Rank),
    /// The link between these ranks breaks, and is opened again.
    Break(Rank, Rank),
    /// The first rank gives up the second, which never calls.
    Exclude(Rank, Rank),
}

struct World {
    random: Random,
    ranks: Vec<Agreement>,
    lives: Vec<Life>,
    ended: Vec<u64>,
    excluded: BTreeSet<Rank>,
    /// The ranks that live and never call.
    absent: BTreeSet<Rank>,
    opened: BTreeSet<(Rank, Rank)>,
    told: BTreeSet<(Rank, Rank)>,
    cuts: BTreeSet<(Rank, Rank)>,
    ways: BTreeMap<(Rank, Rank), Way>,
    /// Ranks may exclude the one that never calls.
    gives_up: bool,
    deaths: usize,
    cuts_left: usize,
    /// The ranks that were dead before any other began.
    dead_before: BTreeSet<Rank>,
    had_died: bool,
    marks: BTreeSet<&'static str>,
    story: Option<String>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let world = 2 + random.below(7);
        let excluded: BTreeSet<Rank> = match random.once_in(6) {
            true => [random.below(world)].into(),
            false => BTreeSet::new(),
        };
        let others: Vec<Rank> = (0..world).filter(|rank| !excluded.contains(rank)).collect();
        let absent = match random.once_in(8) {
            true => [random.pick(&others)].into(),
            false => BTreeSet::new(),
        };
        let ended: Vec<u64> = (0..world).map(|_| 7 + random.below(2) as u64).collect();
        let part = |rank: Rank| Agreement::new(rank, world, excluded.clone(), ended[rank]);
        let mut deaths = random.below(world.min(4));
        let mut lives = vec![Life::Away; world];
        let mut dead_before = BTreeSet::new();
        if deaths > 0 && random.once_in(2) {
            let rank = random.below(world);
            lives[rank] = Life::Dead;
            dead_before.insert(rank);
            deaths -= 1;
        }
        Self {
            ranks: (0..world).map(part).collect(),
            gives_up: random.once_in(2),
            lives,
            ended,
            excluded,
            absent,
            opened: BTreeSet::new(),
            told: BTreeSet::new(),
            cuts: BTreeSet::new(),
            ways: BTreeMap::new(),
            deaths,
            cuts_left: if random.once_in(4) {
                1 + random.below(6)
            } else {
                0
            },
            dead_before,
            had_died: false,
            marks: BTreeSet::new(),
            story: None,
            random,
        }
    }

    fn tell(&mut self, what: impl FnOnce() -> String) {
        if let Some(story) = &mut self.story {
            story.push_str(&what());
            story.push('\n');
        }
    }

    fn is_cut(&self, a: Rank, b: Rank) -> bool {
        self.cuts.contains(&(a.min(b), a.max(b)))
    }

    /// Whether the rank has an end of this link.
    fn has_open(&self, own: Rank, peer: Rank) -> bool {
        self.opened.contains(&(own, peer)) && !self.told.contains(&(own, peer))
    }

    fn takes_part(&self, rank: Rank) -> bool {
        self.lives[rank] == Life::Takes && !self.ranks[rank].is_over()
    }

    /// All that can happen next.
    fn possible(&self) -> Vec<Next> {
        let mut possible = Vec::new();
        let world = self.ranks.len();
        for own in 0..world {
            let calls = !self.excluded.contains(&own) && !self.absent.contains(&own);
            if self.lives[own] == Life::Away && calls {
                possible.push(Next::Begin(own));
            }
            if !self.takes_part(own) {
                continue;
            }
            for peer in 0..world {
                // A driver looks for those that there is no way to yet.
                let is_told = self.told.contains(&(own, peer));
                if self.is_cut(own, peer) && !self.opened.contains(&(own, peer)) && !is_told {
                    possible.push(Next::Lose(own, peer, Loss::Cut));
                }
                if !self.has_open(own, peer) {
                    continue;
                }
                let way = self.ways.get(&(peer, own));
                let has_message = way.is_some_and(|way| !way.messages.is_empty());
                if has_message {
                    possible.push(Next::Deliver(peer, own));
                } else if self.is_cut(own, peer) {
                    possible.push(Next::Lose(own, peer, Loss::Cut));
                } else if self.lives[peer] == Life::Dead {
                    possible.push(Next::Lose(own, peer, Loss::Ended));
                } else if self.lives[peer] == Life::Takes && self.ranks[peer].is_over()
                    || self.absent.contains(&peer)
                    || self.told.contains(&(peer, own))
                {
                    possible.push(Next::Lose(own, peer, Loss::Absent));
                }
            }
        }
        possible
    }

    /// When all is quiet: a rank that waits for one that has not opened its end of the link gives it up.
    fn patience_ends(&self) -> Vec<Next> {
        let waits = |(own, peer): &&(Rank, Rank)| {
            let is_open = self.takes_part(*own) && self.has_open(*own, *peer);
            is_open && !self.opened.contains(&(*peer, *own))
        };
        let lost = self.opened.iter().filter(waits);
        lost.map(|&(own, peer)| Next::Lose(own, peer, Loss::Absent))
            .collect()
    }

    /// Things that go wrong, now and then.
    fn mishap(&mut self) -> Option<Next> {
        let world = self.ranks.len();
        if self.deaths > 0 && self.random.once_in(12) {
            self.deaths -= 1;
            let rank = self.random.below(world);
            return Some(Next::Kill(rank));
        }
        if self.cuts_left > 0 && self.random.once_in(6) {
            self.cuts_left -= 1;
            let (a, b) = (self.random.below(world), self.random.below(world));
            return (a != b).then_some(Next::Cut(a, b));
        }
        if let Some(&absent) = self.absent.first()
            && self.gives_up
            && self.random.once_in(10)
        {
            let by = self.random.below(world);
            return (by != absent).then_some(Next::Exclude(by, absent));
        }
        if self.random.once_in(20) {
            let (a, b) = (self.random.below(world), self.random.below(world));
            return (a != b).then_some(Next::Break(a, b));
        }
        None
    }

    fn run(&mut self) {
        for _ in 0..100_000 {
            let next = match self.mishap() {
                Some(next) => next,
                None => {
                    let mut possible = self.possible();
                    if possible.is_empty() {
                        possible = self.patience_ends();
                    }
                    if possible.is_empty() {
                        return;
                    }
                    self.random.pick(&possible)
                }
            };
            self.tell(|| format!("{next:?}"));
            self.happen(next);
        }
        panic!("it goes on for ever");
    }

    fn happen(&mut self, next: Next) {
        match next {
            Next::Begin(rank) => {
                self.lives[rank] = Life::Takes;
                let actions = self.ranks[rank].begin();
                self.act(rank, actions);
            }
            Next::Deliver(from, to) => {
                let way = self.ways.entry((from, to)).or_default();
                let message = way.messages.pop_front().expect("it is there");
                let world = self.ranks.len();
                let bytes = message.to_bytes(world);
                let message = Message::from_bytes(&bytes, world).expect("as it was written");
                self.tell(|| format!("    {message:?}"));
                let actions = self.ranks[to].handle(from, Event::Message(message));
                self.act(to, actions);
            }
            Next::Lose(own, peer, loss) => {
                self.told.insert((own, peer));
                let actions = self.ranks[own].handle(peer, Event::Lost(loss));
                self.act(own, actions);
            }
            Next::Kill(rank) => self.kill(rank),
            Next::Exclude(by, rank) => {
                if self.takes_part(by) {
                    let actions = self.ranks[by].exclude([rank].into());
                    self.act(by, actions);
                }
            }
            Next::Break(a, b) => {
                for (from, to) in [(a, b), (b, a)] {
                    let again = self.takes_part(from) && self.takes_part(to);
                    if let Some(way) = self.ways.get_mut(&(from, to)).filter(|_| again) {
                        way.messages = way.sent.iter().cloned().collect();
                    }
                }
            }
            Next::Cut(a, b) => {
                self.cuts.insert((a.min(b), a.max(b)));
                self.ways.remove(&(a, b));
                self.ways.remove(&(b, a));
            }
        }
    }

    fn kill(&mut self, rank: Rank) {
        if self.lives[rank] == Life::Dead {
            return;
        }
        let others = 0..self.ranks.len();
        let leads = others
            .filter(|other| self.lives[*other] != Life::Dead)
            .min()
            == Some(rank);
        let has_decided = self.ranks[rank].outcome().is_some();
        if self.lives[rank] == Life::Takes && !self.ranks[rank].is_over() {
            self.marks.insert(match (leads, has_decided) {
                (true, false) => "a leader dies before it decides",
                (true, true) => "a leader dies after it has decided",
                (false, _) => "a rank dies amid a proposal",
            });
        }
        if self.had_died {
            self.marks.insert("two ranks die");
        }
        self.had_died = true;
        self.lives[rank] = Life::Dead;
        // The system may lose some of what it had sent.
        for (_, way) in self.ways.iter_mut().filter(|((from, _), _)| *from == rank) {
            let kept = self.random.below(way.messages.len() + 1);
            way.messages.truncate(kept);
        }
    }

    fn act(&mut self, rank: Rank, actions: Vec<Action>) {
        for action in actions {
            self.tell(|| format!("    {rank}: {action:?}"));
            match action {
                Action::Open(peer) => {
                    assert!(
                        self.opened.insert((rank, peer)),
                        "{rank} opens {peer} twice"
                    );
                }
                Action::Send(to, message) => {
                    assert!(
                        self.opened.contains(&(rank, to)),
                        "{rank} has no way to {to}"
                    );
                    if !self.is_cut(rank, to) && !self.told.contains(&(to, rank)) {
                        let way = self.ways.entry((rank, to)).or_default();
                        way.messages.push_back(message.clone());
                        way.sent.push(message);
                    }
                }
            }
        }
    }

    /// Checks the outcomes.
    fn judge(&mut self) {
        let world = self.ranks.len();
        let decisions: Vec<(Rank, Decision)> = (0..world)
            .filter_map(|rank| match self.ranks[rank].outcome()? {
                Outcome::Decided(decision) => Some((rank, decision.clone())),
                _ => None,
            })
            .collect();
        let is_dead = |rank: &Rank| self.lives[*rank] == Life::Dead;
        // Once all of a decision have died, it binds no rank.
        let binds = |decision: &Decision| !decision.living.iter().all(is_dead);
        let mut binding = decisions.iter().filter(|(_, decision)| binds(decision));
        if let Some((_, first)) = binding.next() {
            for (rank, decision) in binding {
                assert_eq!(decision, first, "rank {rank} has another decision");
            }
            assert!(decisions.iter().all(|(rank, it)| it.living.contains(rank)));
            assert!(first.living.is_disjoint(&self.excluded));
            assert!(first.living.is_disjoint(&self.absent));
            assert!(first.living.is_disjoint(&self.dead_before));
            let ended = first.living.iter().map(|rank| self.ended[*rank]);
            assert_eq!(Some(first.ended), ended.min());
            if first.living.iter().any(is_dead) {
                self.marks.insert("a decision with a rank that has died");
            }
            if !self.excluded.is_empty() {
                self.marks.insert("a rank is excluded");
            }
        }
        let lives = |rank: &Rank| self.lives[*rank] == Life::Takes;
        let living: Vec<Rank> = (0..world).filter(lives).collect();
        let is_whole = self.cuts.is_empty() && self.absent.is_empty();
        for &rank in &living {
            let outcome = self.ranks[rank].outcome();
            assert!(outcome.is_some(), "rank {rank} waits for ever");
            match outcome {
                Some(Outcome::Decided(_)) => {}
                Some(Outcome::LeftOut(_)) => {
                    assert!(!self.cuts.is_empty(), "rank {rank} is left out");
                    self.marks.insert("a rank that is cut off is left out");
                }
                Some(Outcome::Refused(Refusal::Minority(cut))) => {
                    assert!(!self.cuts.is_empty() && !cut.is_empty(), "rank {rank}");
                    self.marks.insert("a minority stays behind");
                }
                Some(Outcome::Refused(Refusal::Absent(ranks))) => {
                    assert!(!is_whole, "rank {rank} calls {ranks:?} absent");
                    self.marks.insert("an absent rank keeps all");
                }
                None => unreachable!(),
            }
            if is_whole {
                assert!(self.ranks[rank].is_over(), "rank {rank} goes on for ever");
                assert!(decisions.iter().any(|(by, _)| *by == rank));
            }
        }
        if decisions
            .iter()
            .any(|(rank, _)| self.ranks[*rank].has_inherited())
        {
            self.marks.insert("a decision is taken over");
        }
    }
}

/// The marks that a seed reaches, or why it does not hold.
fn holds(seed: u64) -> Result<BTreeSet<&'static str>> {
    let mut world = World::new(seed);
    fence::guard(|| {
        world.run();
        world.judge();
        Ok(())
    })?;
    Ok(world.marks)
}

#[test]
fn agreements_hold_whatever_the_seed() {
    if let Ok(seed) = env::var("AGREEMENT_SEED") {
        let mut world = World::new(seed.parse().expect("a number"));
        world.story = Some(String::new());
        let failure = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            world.run();
            world.judge();
        }));
        println!("{}", world.story.unwrap_or_default());
        assert!(failure.is_ok(), "it fails");
        return;
    }
    let seeds = env::var("AGREEMENT_SEEDS").map_or(SEEDS, |seeds| seeds.parse().expect("a number"));
    let (mut reached, mut broken) = (BTreeSet::new(), Vec::new());
    for seed in 0..seeds {
        match holds(seed) {
            Ok(marks) => reached.extend(marks),
            Err(why) => broken.push((seed, why)),
        }
    }
    for (seed, why) in broken.iter().take(5) {
        println!(
            "replay AGREEMENT_SEED={seed}: {}",
            why.message.replace('\n', " ")
        );
    }
    assert_eq!(broken.len(), 0, "of {seeds} seeds");
    let missing: Vec<_> = MARKS
        .iter()
        .filter(|mark| !reached.contains(*mark))
        .collect();
    assert!(missing.is_empty(), "no seed reaches {missing:?}");
}

/// The report of a rank that has accepted nothing.
fn report() -> Message {
    Message::Report {
        excluded: BTreeSet::new(),
        ended: 1,
        accepted: None,
        is_decided: false,
    }
}

/// A leader that has taken a proposal over loses most of those that it needs: they may decide, and it must not.
#[test]
fn a_proposal_that_was_taken_over_needs_the_majority_as_well() {
    let world = 5;
    let mut rank = Agreement::new(1, world, BTreeSet::new(), 1);
    let ballot = Ballot {
        leader: 0,
        round: 1,
    };
    let all = Decision {
        living: (0..world).collect(),
        ended: 1,
    };
    rank.begin();
    rank.handle(0, Event::Message(Message::Propose(ballot, all)));
    rank.handle(0, Event::Lost(Loss::Ended));
    for other in [2, 3, 4] {
        rank.handle(other, Event::Message(report()));
    }
    for other in [2, 3] {
        assert_eq!(rank.outcome(), None);
        rank.handle(other, Event::Lost(Loss::Cut));
    }
    // Two of five are too few already.
    let refused = Outcome::Refused(Refusal::Minority([2, 3].into()));
    assert_eq!(rank.outcome(), Some(&refused));
}

/// A rank that has reported and is stopped is excluded when it is already part of a proposal.
#[test]
fn a_proposal_is_made_again_without_a_rank_that_is_excluded() {
    let mut rank = Agreement::new(0, 3, BTreeSet::new(), 1);
    rank.begin();
    for other in [1, 2] {
        rank.handle(other, Event::Message(report()));
    }
    assert_eq!(rank.awaited(), [1, 2].into());
    let actions = rank.exclude([2].into());
    let Some(Action::Send(1, Message::Propose(ballot, decision))) = actions.first() else {
        panic!("{actions:?}");
    };
    assert_eq!(decision.living, [0, 1].into());
    rank.handle(1, Event::Message(Message::Accept(*ballot)));
    assert_eq!(rank.outcome(), Some(&Outcome::Decided(decision.clone())));
}

/// A second attempt is bound by the proposals of others that were accepted in the first, and not by this rank's own.
#[test]
fn another_attempt_remembers_what_was_accepted() {
    let ballot = |leader| Ballot { leader, round: 3 };
    let all = || Decision {
        living: (0..3).collect(),
        ended: 1,
    };
    let accepted = |leader| Message::Report {
        excluded: BTreeSet::new(),
        ended: 1,
        accepted: Some((ballot(leader), all())),
        is_decided: false,
    };
    // Rank 0 had proposed that and gave it up; now it leaves rank 2 out.
    let mut own = Agreement::new(0, 3, BTreeSet::new(), 1);
    own.begin();
    for other in [1, 2] {
        own.handle(other, Event::Message(report()));
    }
    own.leave();
    let mut own = own.again([2].into());
    own.begin();
    let actions = own.handle(1, Event::Message(accepted(0)));
    let Some(Action::Send(1, Message::Propose(next, decision))) = actions.first() else {
        panic!("{actions:?}");
    };
    assert_eq!(next.round, 2);
    assert_eq!(decision.living, [0, 1].into());
    // Rank 1 had accepted it, and rank 0 may have decided it before its end.
    let mut other = Agreement::new(1, 3, BTreeSet::new(), 1);
    other.begin();
    other.handle(0, Event::Message(Message::Propose(ballot(0), all())));
    other.handle(0, Event::Message(Message::Leave));
    assert!(other.is_over());
    let mut other = other.again([2].into());
    other.begin();
    other.handle(0, Event::Lost(Loss::Ended));
    let actions = other.handle(2, Event::Message(report()));
    let Some(Action::Send(2, Message::Propose(_, decision))) = actions.first() else {
        panic!("{actions:?}");
    };
    assert_eq!(*decision, all());
}

/// A group that is cut in two: one half goes on.
#[test]
fn of_two_halves_the_one_with_the_lowest_rank_goes_on() {
    let halves = |world: usize, left: usize| {
        let mut ranks: Vec<Agreement> = (0..world)
            .map(|rank| Agreement::new(rank, world, BTreeSet::new(), 1))
            .collect();
        let mut ways: VecDeque<(Rank, Rank, Event)> = VecDeque::new();
        let act = |ways: &mut VecDeque<_>, rank: Rank, actions: Vec<Action>| {
            for action in actions {
                match action {
                    Action::Open(peer) if (rank < left) != (peer < left) => {
                        ways.push_back((peer, rank, Event::Lost(Loss::Cut)));
                    }
                    Action::Send(to, message) if (rank < left) == (to < left) => {
                        ways.push_back((rank, to, Event::Message(message)));
                    }
                    _ => {}
                }
            }
        };
        for (rank, part) in ranks.iter_mut().enumerate() {
            act(&mut ways, rank, part.begin());
        }
        while let Some((from, to, event)) = ways.pop_front() {
            let actions = ranks[to].handle(from, event);
            act(&mut ways, to, actions);
        }
        let goes_on = |part: &Agreement| matches!(part.outcome(), Some(Outcome::Decided(_)));
        ranks.iter().map(goes_on).collect::<Vec<_>>()
    };
    assert_eq!(halves(4, 2), [true, true, false, false]);
    assert_eq!(halves(5, 2), [false, false, true, true, true]);
    assert_eq!(halves(2, 1), [true, false]);
}
