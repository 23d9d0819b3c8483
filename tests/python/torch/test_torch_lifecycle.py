"""How groups and processes of torch begin and end on unisono: nothing leaks, nothing is said.

The rank functions are in ``torch_lifecycle_ranks``. Where the end of the interpreter matters, ranks
run a script that is here.
"""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest
from ranks import RankResult, run_ranks, run_torchrun

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

OURS = "torch_lifecycle_ranks"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Memory that 200 groups may leave in a process: torch keeps a little of each, rank 0 the keys of
# its store, and lists of a fixed length fill up, 2 to 3 MiB in all. The next 3,000 groups leave 2
# to 5 KiB each, as with gloo (1 to 2). A socket buffer or a thread's stack would be more.
MEMORY = 6 << 20


def test_groups_come_and_go_without_a_trace() -> None:
    results = run_ranks(3, f"{OURS}:makes_and_destroys_groups", "unisono", torch=True, timeout=180)
    for result in results:
        before, after = result.value
        grown = {name: after[name] - before[name] for name in before}
        where = f"rank {result.rank}: {grown}, before {before}"
        assert grown["descriptors"] <= 0, where
        assert grown["threads"] <= 0, where
        assert grown["shared"] <= 0, where
        assert grown["mappings"] < 50, where
        assert grown["memory"] < MEMORY, where


def test_threads_go_with_the_last_group(tmp_path: Path) -> None:
    target = f"{OURS}:has_threads_while_it_has_groups"
    for result in run_ranks(2, target, "unisono", str(tmp_path), torch=True):
        assert result.value == []


def test_ranks_join_although_the_one_that_serves_the_store_ends_at_once() -> None:
    results = run_ranks(6, f"{OURS}:leaves_at_once", "unisono", torch=True, check=False)
    assert [result.value for result in results[1:]] == [True] * 5, "\n".join(
        result.report() for result in results
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_store_file_that_a_killed_job_left_is_said_to_be_one(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    (result,) = run_ranks(1, f"{OURS}:finds_the_file_of_a_killed_job", "unisono", path, torch=True)
    assert f"or torch's store file {path} is left over from an earlier job" in result.value


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_ends_by_itself() -> None:
    for result in run_ranks(2, f"{OURS}:is_forked", "unisono", torch=True):
        assert result.value == 0


def test_a_forked_child_that_destroys_the_group_leaves_it_to_its_parent() -> None:
    for result in run_ranks(2, f"{OURS}:destroys_in_a_child", "unisono", torch=True):
        assert result.value == [0, 0]


def test_a_forked_child_makes_a_group_and_leaves_its_parents_gradients_alone(
    tmp_path: Path,
) -> None:
    target = f"{OURS}:makes_a_group_in_a_child"
    for result in run_ranks(2, target, "unisono", str(tmp_path), torch=True):
        assert result.value == [0, 0]


@pytest.mark.parametrize("gone, how", [([1], "die"), ([1, 3], "die"), ([2], "live")])
def test_a_group_goes_on_without_ranks(gone: list[int], how: str) -> None:
    results = run_ranks(
        4,
        "torch_lifecycle_ranks:shrinks",
        gone,
        how,
        torch=True,
        timeout=60,
        check=False,
    )
    report = "\n".join(map(RankResult.report, results))
    left = [rank for rank in range(4) if rank not in gone]
    for rank, result in enumerate(results):
        if rank in gone and how == "die":
            assert result.exit_code == -signal.SIGKILL, report
        else:
            assert result.ok, report
    mean = 2 * sum(rank + 1 for rank in left) / len(left)
    assert all(results[rank].value == pytest.approx([mean] * 4) for rank in left), report


def test_monitored_barrier_names_every_missing_rank() -> None:
    run_ranks(3, f"{OURS}:misses_a_monitored_barrier", "unisono", torch=True)


def test_detail_mode_runs_collectives_and_names_disagreements() -> None:
    results = run_ranks(
        2, f"{OURS}:debugs", "unisono", torch=True, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    )
    for result in results:
        # torch's own comparison, which sees the calls before they reach the backend.
        for name, text in result.value.items():
            assert "Detected mismatch between collectives on ranks" in text, (name, text)
        assert "4" in result.value["shapes"], result.value
        assert "5" in result.value["shapes"], result.value
        assert "Int" in result.value["types"], result.value
        assert "BROADCAST" in result.value["operations"], result.value


def test_torchrun_starts_again_after_a_worker_dies(tmp_path: Path) -> None:
    from torch_lifecycle_ranks import DIES_BEFORE, STEPS, trained_alone

    script = Path(__file__).with_name("torch_lifecycle_ranks.py")
    output = run_torchrun(
        script,
        2,
        ["unisono", str(tmp_path)],
        timeout=150,
        env={
            "PET_MAX_RESTARTS": "1",
            "PET_MONITOR_INTERVAL": "0.2",
        },
    )
    for rank in range(2):
        assert f"attempt 0: rank {rank} begins at step 0" in output, output
        # Rank 0 may have been about to save the step that rank 1 did not live to begin.
        assert f"attempt 1: rank {rank} begins at step {DIES_BEFORE}" in output, output
        assert f"attempt 1: rank {rank} is done" in output, output
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["step"] == STEPS
    for name, expected in trained_alone().state_dict().items():
        torch.testing.assert_close(saved["network"][name], expected, rtol=1e-5, atol=1e-6)


# The end of the interpreter, with the groups still there

LEAVES = """
import own_threads
own_threads.look_at_exit()
import sys, threading
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
dist.init_process_group("unisono")
rank = dist.get_rank()
groups = [dist.new_group() for _ in range(3)] + [dist.new_group([r]) for r in range(2)]
# Kept by a global until the interpreter clears its modules.
works = [
    dist.all_reduce(torch.ones(1000), group=group, async_op=True)
    for group in groups[:3] for _ in range(10)
]
for work in works:
    work.wait()
future = works[0].get_future().then(lambda done: done.value()[0] + 1)
assert future.wait()[0] == 3
network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
network(torch.ones(2, 3)).sum().backward()
assert functional.all_reduce(torch.ones(3), "sum", groups[1])[0] == 2
objects = [None, None]
dist.all_gather_object(objects, rank)
dist.barrier()
assert threading.active_count() == 1, threading.enumerate()
"""

# How the ranks leave, each in a way of its own; the work of both is done.
WAYS = {
    "by its last line or by sys.exit": "if rank: sys.exit(0)",
    "having forgotten or not": "if rank: dist.destroy_process_group()",
}


def leave(tmp_path: Path, script: str) -> list[RankResult]:
    path = tmp_path / "leaves.py"
    path.write_text(script)
    return run_ranks(2, path, env=ONE_THREAD, check=False)


@pytest.mark.parametrize("way", list(WAYS))
def test_a_script_leaves_without_a_word(tmp_path: Path, way: str) -> None:
    for result in leave(tmp_path, LEAVES + WAYS[way]):
        assert result.ok, result.report()
        assert result.output == "", result.report()


def only_traceback(result: RankResult, last: str) -> None:
    """Exit code 1 and one traceback, which ends in ``last``, and nothing else."""
    assert result.exit_code == 1, result.report()
    lines = result.output.strip().splitlines()
    # torch prefixes the lines of an uncaught exception with the rank.
    lines = [line.removeprefix(f"[rank{result.rank}]: ") for line in lines]
    assert lines[0].startswith("Traceback"), result.report()
    assert sum(line.startswith("Traceback") for line in lines) == 1, result.report()
    assert any(line.startswith(last) for line in lines), result.report()
    assert not any("Warning" in line for line in lines), result.report()


RAISES = 'raise LookupError("not the fault of anyone else")'
UNDER_WAY = "late = dist.all_reduce(torch.ones(1_000_000), async_op=True)"


@pytest.mark.parametrize(
    "script",
    [f"{LEAVES}\n{RAISES}", f"{LEAVES}\n{UNDER_WAY}\n{RAISES}"],
    ids=["at rest", "under way"],
)
def test_a_script_that_raises_shows_its_traceback_alone(tmp_path: Path, script: str) -> None:
    """Both ranks raise, with finished work in globals, and with an operation under way."""
    for result in leave(tmp_path, script):
        only_traceback(result, "LookupError: not the fault of anyone else")
        assert result.output.rstrip().endswith("anyone else"), result.report()


def test_a_rank_that_waits_for_a_script_that_raised_gets_an_error(tmp_path: Path) -> None:
    waits = (
        LEAVES
        + """
if rank == 1:
    raise LookupError("of rank 1 alone")
dist.all_reduce(torch.ones(3))
"""
    )
    waiting, raising = leave(tmp_path, waits)
    only_traceback(raising, "LookupError: of rank 1 alone")
    # torch's flight recorder, which it gives to every backend but its own, says a line of its own.
    said = [line for line in waiting.output.splitlines() if "FlightRecorderHook" not in line]
    waiting = dataclasses.replace(waiting, output="\n".join(said))
    only_traceback(waiting, "torch.distributed.DistNetworkError: ")
    assert "rank 1" in waiting.output, waiting.report()
