"""Breaks the engine in one place after the other, and shows which simulated worlds find each break.

    python tools/break_engine.py [--worlds N] [NAME ...]

Some places are invented. Others put back a defect that the engine had: those name the commit that
mended it. A defect of the agreement on the ranks that are left shows in the simulated
agreements, not in the worlds.

It works on a copy of the commit in ``target/broken``, so the checkout stays as it is. A break that
no world finds, and one whose code is not there any more, is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "target" / "broken"
SOURCES = Path("rust/core/src")
WORLDS = "engine::world::tests::ten_thousand"
AGREEMENTS = "engine::membership::tests::agreements_hold"
# Seconds; a break that loops would run for ever.
LIMIT = 3600


class Break(NamedTuple):
    """One place: the code that is replaced, which occurs once, and what replaces it.

    ``mended`` is the commit that mended the defect, if the engine had it.
    """

    name: str
    file: str
    code: str
    broken: str
    mended: str = ""

    @property
    def test(self) -> str:
        """The test whose seeds are tried."""
        return AGREEMENTS if self.file.startswith("engine/membership/") else WORLDS


BREAKS = [
    Break(
        "a lost wake-up: a rank that waits for room sleeps on without it",
        "engine/group/step.rs",
        "Direction::Send => open.interest.writable = true,",
        "Direction::Send => {}",
    ),
    Break(
        "a dropped frame: the sender of a long message does not hear that its receiver is ready",
        "engine/message/peer.rs",
        "self.push_control(Frame {\n            kind: Kind::Ready,",
        "let _ = (Frame {\n            kind: Kind::Ready,",
    ),
    Break(
        "matching: a message meets the last receive that fits, not the first",
        "engine/message/meeting.rs",
        "alike.next().map(|(_, _, _, number)| *number)",
        "alike.next_back().map(|(_, _, _, number)| *number)",
    ),
    Break(
        "matching: a receive meets the last message that was kept",
        "engine/message/meeting.rs",
        "alike.next().map(|(at, kept)| (*at, kept))",
        "alike.next_back().map(|(at, kept)| (*at, kept))",
    ),
    Break(
        "a forgotten farewell",
        "engine/group/end.rs",
        "open.link.send_farewell();",
        "let _ = open;",
    ),
    Break(
        "a failure of which the others do not hear",
        "engine/group/end.rs",
        "let _ = contained(|| open.link.send_abort(notice));",
        "let _ = open;",
    ),
    Break(
        "a mended connection repeats one byte too few",
        "transport/tcp/ledger.rs",
        "self.again = missing;",
        "self.again = missing.saturating_sub(1);",
    ),
    Break(
        "a mended connection forgets bytes that it had received",
        "transport/tcp/connection/resumption.rs",
        "self.ledger.note_received(count);",
        "",
    ),
    Break(
        "messages never time out",
        "engine/message/matching.rs",
        "message.work.deadline.is_some_and(|due| now >= due);",
        "message.work.deadline.is_some_and(|due| now >= due && false);",
    ),
    Break(
        "the positions that peers tell are not compared",
        "engine/group/step.rs",
        "let contradiction = self.contradiction_told(core);",
        "let contradiction: Option<Error> = None;",
        "08de77c0",
    ),
    Break(
        "in place: an operation ends while peers still write to its buffer",
        "engine/collective/shared/run.rs",
        "let is_back = self.round.is_back(operands, links, Loan::Returned)?;",
        "let is_back = self.round.is_back(operands, links, Loan::Returned)? || true;",
    ),
    Break(
        "agreement: a rank decides by its own proposal alone",
        "engine/collective/shared/run.rs",
        "&& !self.round.all_propose(operands, Proposal::PreferMessages);",
        "&& self.round.proposal != Some(Proposal::PreferMessages);",
    ),
    Break(
        "headers: collective, type, operator and algorithm are not compared",
        "engine/collective/header.rs",
        "differs(0) | differs(8) |",
        "differs(8) |",
    ),
    Break(
        "a receive from any rank goes on when every rank has left",
        "engine/group/step.rs",
        "if present == 0 && core.matching.waits_for_any()",
        "if self.world == 0 && present == 0 && core.matching.waits_for_any()",
    ),
    Break(
        "a link that comes late to a rank that has failed or left is not looked at",
        "engine/state.rs",
        "if self.failure.get().is_some() || self.is_closed() {",
        "if self.world == 0 {",
        "6107ca84",
    ),
    Break(
        "a rank that has left says no farewell over links that come late",
        "engine/group/opening.rs",
        "} else if self.is_closed() {",
        "} else if self.world == 0 {",
        "9908babc",
    ),
    Break(
        "a rank that left before a link to it was made is taken for lost",
        "engine/group/step.rs",
        "[Lane::PointToPoint, Lane::Collective].into_iter();",
        "[Lane::PointToPoint].into_iter();",
        "6107ca84",
    ),
    Break(
        "a rank that says that it has left, when it is asked for a link, is taken for lost",
        "engine/group/step.rs",
        "if error.is_of_one_that_left() => return true,",
        "if error.is_of_one_that_left() => return false,",
        "e12f0c02",
    ),
    Break(
        "premul_sum reads its input before its turn",
        "engine/group/submit.rs",
        "        if let Some(prepared) = prepared {",
        "        let mut none = crate::engine::links::LinkTable::new(self.world);\n"
        "        run.advance(&mut none, &|_| false, (&mut core.shared, false))?;\n"
        "        if let Some(prepared) = prepared {",
        "9908babc",
    ),
    Break(
        "a receive whose message was there is not told that it has ended",
        "engine/group/submit.rs",
        "        if moves {",
        "        if moves && collective == Collective::Send {",
        "99191bb1",
    ),
    Break(
        "a message that has met its receive depends on no peer",
        "engine/message/matching.rs",
        "self.posted.ask_for(Some(rank)) || is_met()",
        "self.posted.ask_for(Some(rank))",
        "2c34dce4",
    ),
    Break(
        "a rank stays awake for a proposal that it does not read yet",
        "engine/collective/shared/agreement.rs",
        "let direction = match reads(peer) {",
        "let direction = match reads(peer) || true {",
        "e9941fc4",
    ),
    Break(
        "a peer is lost for one of its links, and not for the other that does not come",
        "engine/group/step.rs",
        "=> lost(links.lost_elsewhere(lane, peer, now)?),",
        "=> None,",
        "90660e3a",
    ),
    Break(
        "a rank that leaves does not wait for connections that are made again",
        "engine/group/end.rs",
        "let owes = open.link.is_owing();",
        "let owes = open.link.is_owing() && self.world == 0;",
        "fe6493df",
    ),
    Break(
        "an outage counts as time in which bytes could have been acknowledged",
        "engine/group/end.rs",
        "now < parting.mended + SETTLE",
        "now < parting.begun + SETTLE",
        "4e6ee69f",
    ),
    Break(
        "a rank that leaves does not wait until its bytes are acknowledged",
        "engine/group/end.rs",
        "if !owes && open.link.is_settled() {",
        "if !owes {",
        "c356d057",
    ),
    Break(
        "bytes count as received that a socket acknowledges while another takes its place",
        "transport/tcp/connection.rs",
        "true => usize::MAX,",
        "true => lacking(socket, sealed.is_some()),",
        "50ca51f7",
    ),
    Break(
        "a rank sleeps on when a peer counts as lost for a link that does not come",
        "engine/group/step.rs",
        "[core.matching.due(), core.links.next_loss(self.clock.now())]",
        "[core.matching.due()]",
        "3f89579c",
    ),
    Break(
        "agreement on the ranks that are left: a proposal that was taken over needs no majority",
        "engine/membership/agreement.rs",
        "if !lead.is_settled {",
        "if !lead.is_settled && lead.inherited.is_none() {",
        "712c37bc",
    ),
]


def main() -> int:
    """Try the breaks that were named, or all, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", type=int, default=10_000, help="seeds for each (%(default)s)")
    parser.add_argument("names", nargs="*", help="parts of the names of breaks; without one: all")
    arguments = parser.parse_args()
    wanted = [
        one
        for one in BREAKS
        if not arguments.names or any(part in one.name for part in arguments.names)
    ]
    if not wanted:
        parser.error("no break has such a name")
    # Its own copy of the commit, with a build folder that the next run finds again.
    shutil.rmtree(COPY / "rust", ignore_errors=True)
    COPY.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-xmf", "-", "-C", COPY], input=archive.stdout, check=True)
    return sum([not _is_found(one, arguments.worlds) for one in wanted]) and 1


def _is_found(one: Break, worlds: int) -> bool:
    path = COPY / SOURCES / one.file
    text = path.read_text()
    if text.count(one.code) != 1:
        print(f"{one.name}: its code is {text.count(one.code)} times in {one.file}", flush=True)
        return False
    path.write_text(text.replace(one.code, one.broken))
    try:
        said = _seeds(one.test, worlds)
    finally:
        path.write_text(text)
    name = f"{one.name} (mended in {one.mended})" if one.mended else one.name
    print(f"{name}: {said or f'no seed of {worlds} finds it'}", flush=True)
    return said is not None


def _seeds(test: str, worlds: int) -> str | None:
    """Return what the first seeds that do not hold say, or None if all hold."""
    command = ["cargo", "test", "-q", "-p", "unisono", "--lib", test]
    environment = {**os.environ, "RUSTFLAGS": "-Awarnings"}
    environment |= {"WORLD_SEEDS": str(worlds), "AGREEMENT_SEEDS": str(worlds)}
    environment["CARGO_TARGET_DIR"] = str(COPY / "target")
    built = subprocess.run([*command, "--no-run"], cwd=COPY, env=environment, check=False)
    if built.returncode:
        sys.exit("it does not compile")
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=COPY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    took = time.monotonic() - began
    seeds = re.findall(r"replay [A-Z]+_SEED=(\d+): (.*)", done.stdout)
    count = re.search(r"left: (\d+)", done.stdout + done.stderr)
    if not seeds:
        if done.returncode:
            print(f"it ended in another way: {done.stdout[-500:]}{done.stderr[-500:]}")
        return None
    first = ", ".join(seed for seed, _ in seeds)
    found = f"{count[1] if count else 'some'} of {worlds} seeds in {took:.0f} s, the first {first}"
    return f"{found}; {seeds[0][1][:200]}"


if __name__ == "__main__":
    sys.exit(main())
