"""The examples for torch run as their README says, and print what they promise.

Every example asserts its own result, so an exit status of 0 already means that the values were
right; the lines checked here make sure that every rank got that far.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import run_python
from ranks import run_ranks, run_torchrun

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "torch"

# The examples, their numbers of processes, and the text of their ranks after "rank R: ".
LAUNCHED = [
    ("send_recv.py", 2, r"received \d+ from rank \d"),
    ("isend_irecv.py", 2, r"exchanged 1000 numbers with ranks \d and \d"),
    ("all_reduce_group.py", 4, r"(a|no) member, \[.*\], 4 ranks in all"),
    ("collectives.py", 2, r"broadcast, .* all_gather gave the right result"),
    ("collectives.py", 4, r"broadcast, .* all_gather gave the right result"),
    ("sync_sgd.py", 2, r"898 images, loss \d.\d+ -> 0.\d+"),
    ("ddp_toy.py", 2, r"loss \d.\d+, averaged gradients, equal parameters"),
    ("ddp_model_parallel.py", 2, r"loss .*, both parts equal on all ranks"),
    ("fused_matmul.py", 2, r"matmul and all_reduce [\d.]+ ms, fused [\d.]+ ms, [\d.]+ times .*"),
    ("checkpoint.py", 2, r"parameters are those that rank 0 saved, to the last bit"),
]


@pytest.mark.parametrize(
    "script,world,line", LAUNCHED, ids=[f"{script}-{world}" for script, world, _ in LAUNCHED]
)
def test_example_gives_its_result_on_every_rank(script: str, world: int, line: str) -> None:
    for result in run_ranks(world, EXAMPLES / script, torch=True):
        assert_no_noise(result.output)
        assert re.fullmatch(rf"rank {result.rank}: {line}\n", result.output), result.output


def test_torchrun_starts_an_example() -> None:
    output = run_torchrun(EXAMPLES / "send_recv.py", 2, timeout=90)
    assert_no_noise(output)
    assert sorted(line[:6] for line in output.splitlines()) == ["rank 0", "rank 1"]


@pytest.mark.parametrize("world", [2, 4])
def test_digits_are_learned_and_equal_on_all_ranks(world: int) -> None:
    program = EXAMPLES / "train_digits.py"
    if world == 2:
        output = run_torchrun(program, world, timeout=180)
    else:
        results = run_ranks(world, program, "--no-compare", torch=True, timeout=120)
        output = "".join(result.output for result in results)
    assert_no_noise(output)
    accuracy = re.search(r"^accuracy +([\d.]+) on 360 held-out images$", output, re.MULTILINE)
    assert accuracy, output
    assert float(accuracy[1]) >= 0.95, output
    assert re.search(r"^parameters +38,282, bitwise equal on all ranks", output, re.MULTILINE)
    timing = r"^epoch time +unisono [\d.]+ ms"
    if world == 2:
        timing += r", gloo [\d.]+ ms, [\d.]+ times as long \(medians\)$"
    assert re.search(timing, output, re.MULTILINE), output
    # The progress bar is for terminals: in a pipe there is the summary and nothing else.
    assert len(output.splitlines()) == 4, output


def test_digits_refuse_a_model_that_has_not_learned() -> None:
    with pytest.raises(AssertionError, match=r"the accuracy is below 0\.95"):
        run_ranks(2, EXAMPLES / "train_digits.py", "--epochs", "1", "--no-compare", torch=True)


def test_spawned_ranks_meet_in_a_file() -> None:
    output = run_python(EXAMPLES / "spawn_file_init.py", "--world-size", "2", timeout=90)
    assert_no_noise(output)
    lines = sorted(output.splitlines())
    assert lines == ["rank 0 of 2: the sum is 3", "rank 1 of 2: the sum is 3"]


def test_readme_lists_every_example() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    for script in EXAMPLES.glob("*.py"):
        assert f"examples/torch/{script.name}" in readme


def assert_no_noise(output: str) -> None:
    """Fail on a traceback or a warning, whichever process printed it."""
    noise = re.search(r"traceback|warning|error|leak", output, re.IGNORECASE)
    assert noise is None, output
