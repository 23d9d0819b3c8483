"""``unisono chaos``: jobs whose ranks are killed and stopped, and whose connections break.

Each round is a job of some ranks that compute what is known beforehand, through one of the doors,
and meet faults while they do. It is right if no rank waits without end, no value is wrong, each
error names a rank that was killed, nothing fails where none was, the ranks that are left go on
together, and nothing is left behind. A seed gives the ranks, hosts and faults of a round. The
moment of a fault within its operation is up to the machine, so a round that has failed may need
some more runs to fail again.

``plan`` chooses a round, ``job`` plays and judges it, ``rank`` is the work of its ranks, ``hosts``
and ``sockets`` are the means.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from unisono import _c
from unisono._chaos import hosts, job, plan

_EXAMPLES = """\
examples:
  unisono chaos --rounds 20               20 rounds of 2 to 8 ranks on one host
  unisono chaos --hosts 2-4 --seed 7      one round on two to four hosts
  unisono chaos -n 4 --fault kill@2:30 --fault reset@0:31
  unisono chaos -n 4 --hosts 2 --faults reset --seconds 3600 --every 0.1
"""


def chaos(arguments: Sequence[str], name: str) -> int:
    """Do what the command line asks for; returns the exit status: 0 if all rounds are right."""
    parser = command_line(name)
    chosen = parser.parse_args(arguments)
    others = ("isolate", *plan.NOT_BESIDE_ISOLATION)
    given = [fault.kind for fault in chosen.fault if fault.kind in others]
    if "isolate" in given and len(given) > 1:
        parser.error(f"with isolate no other of {', '.join(others)}")
    if "c" in chosen.door:
        try:
            _c.answer(["--libdir"])
        except FileNotFoundError as error:
            parser.error(f"--door c: {error}")
    trouble = hosts.why_not()
    if trouble is None:
        hosts.alone(arguments)
    else:
        left_out = " or ".join(plan.ON_NETWORKS)
        print(f"no {left_out}, for want of a network of our own: {trouble}", file=sys.stderr)
    wishes = plan.Wishes(
        chosen.ranks,
        chosen.hosts,
        chosen.transport,
        chosen.door,
        chosen.faults,
        chosen.operations,
        chosen.fault,
        trouble is None,
    )
    job.prepare(set(chosen.door))
    made, outcomes = None, []
    # The ranks end with this process, however it ends.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if trouble is None and max(chosen.hosts) > 1:
            made = hosts.Hosts(max(chosen.hosts))
        for seed in range(chosen.seed, chosen.seed + chosen.rounds):
            one = plan.Round.choose(seed, wishes)
            if chosen.seconds:
                one = replace(one, seconds=chosen.seconds, every=chosen.every, faults=[])
                kinds = [kind for kind in chosen.faults if kind != "isolate"]
                one.kinds.extend(kind for kind in kinds if one.may_have(kind, wishes))
                if not one.kinds:
                    parser.error("--seconds: none of these faults can go on in such a round")
            if any(fault.rank >= one.world for fault in one.faults):
                parser.error(f"a fault is for a rank that a world of {one.world} has not")
            outcome = job.Job(one, made if len(set(one.hosts)) > 1 else None).run()
            outcomes.append(outcome)
            _print(outcome, chosen.json)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if made:
            made.end()
    if not chosen.json:
        _sum_up(outcomes)
    return 1 if any(outcome.troubles for outcome in outcomes) else 0


def _print(outcome: job.Outcome, as_json: bool) -> None:
    if as_json:
        print(json.dumps(outcome.record()), flush=True)
        return
    verdict = "FAILED" if outcome.troubles else "right"
    took = f"{outcome.seconds:.1f} s"
    if outcome.recoveries:
        took += f", ranks computed again after {max(outcome.recoveries):.2f} s"
    print(f"{outcome.round} -> {verdict}, {took}", flush=True)
    for trouble in outcome.troubles:
        print(f"    {trouble}", flush=True)


def _sum_up(outcomes: Sequence[job.Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.troubles]
    met = sum((outcome.met for outcome in outcomes), Counter[str]())
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(met.items())) or "no faults"
    operations = sum(outcome.operations for outcome in outcomes)
    print(f"{len(outcomes)} rounds, {len(failed)} failed; {operations} operations; {faults}")
    recoveries = sorted(second for outcome in outcomes for second in outcome.recoveries)
    if recoveries:
        print(
            f"{len(recoveries)} ranks computed again after a failure: median "
            f"{1000 * statistics.median(recoveries):.0f} ms, longest {1000 * recoveries[-1]:.0f} ms"
        )


def command_line(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=f"{name} chaos",
        description="Jobs whose ranks are killed and stopped, and whose connections break.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-n", "--ranks", default="2-8", type=_span, metavar="N", help="ranks of a round: 4, or 2-8"
    )
    parser.add_argument(
        "--hosts", default="1", type=_span, metavar="N", help="hosts of a round: 2, or 1-4 (1)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how many rounds (1)")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the first one (1)")
    parser.add_argument(
        "--door", default="numpy", type=_among(plan.DOORS), help=",".join(plan.DOORS)
    )
    parser.add_argument(
        "--transport", default="auto,shm,tcp", type=_among(plan.TRANSPORTS), help="auto,shm,tcp"
    )
    kinds = ",".join(plan.KINDS)
    parser.add_argument("--faults", default=kinds, type=_among(plan.KINDS), help=kinds)
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        type=_fault,
        metavar="KIND@RANK:OPERATION",
        help="this fault, and no others; with /SECONDS for those that last",
    )
    parser.add_argument(
        "--operations", type=int, default=100, help="operations of a round, at least (100)"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="a round goes on for so long")
    parser.add_argument(
        "--every", type=float, default=0.1, help="with --seconds: seconds between faults (0.1)"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON for each round")
    return parser


def _span(text: str) -> list[int]:
    low, _, high = text.partition("-")
    span = list(range(int(low), int(high or low) + 1))
    if not span or span[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write 4, or 2-8")
    return span


def _among(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if wrong := [one for one in found if one not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: there are {', '.join(known)}")
        return found

    return parse


def _fault(text: str) -> plan.Fault:
    try:
        return plan.Fault.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
