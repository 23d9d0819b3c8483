"""The examples of the frameworks above torch run over unisono.

By its name, and with unisono in gloo's place where they ask for gloo.

The backend that carried the training is read from the program's process group, so a framework that
fell back to a backend of its own choice fails here. Every rank has its own share of the images:
without the exchange of gradients the parameters would differ between ranks.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
from launching import run_python
from ranks import run_torchrun

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "frameworks"
PARAMETERS = "4,810"
BACKENDS = ["unisono", "gloo"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def needs(module: str, requirement: str) -> None:
    # Not imported here: each takes seconds and has warnings of its own.
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed (pip install '{requirement}')")


def asking_for(backend: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment with which an example runs on unisono."""
    return ["--backend", backend], {"UNISONO_AS_GLOO": "1"} if backend == "gloo" else {}


def assert_learned(
    output: str, backend: str, label: str = "", parameters: str = PARAMETERS
) -> None:
    """Check the three lines that every example prints, in a framework's own many."""
    lines = output.splitlines()
    assert ("unisono: in gloo's place" in output) == (backend == "gloo"), output
    first = f"{label}backend {backend}, 2 ranks"
    assert first in lines, output
    _, accuracy, last, *_ = lines[lines.index(first) :]
    match = re.fullmatch(r"accuracy ([\d.]+) on 360 held-out images", accuracy)
    assert match, output
    assert float(match[1]) >= 0.95, output
    assert last == f"parameters {parameters}, equal on all ranks", output
    assert "Traceback" not in output, output


@pytest.mark.parametrize("backend", BACKENDS)
def test_accelerate(backend: str) -> None:
    needs("accelerate", "accelerate")
    args, env = asking_for(backend)
    output = run_torchrun(EXAMPLES / "accelerate_digits.py", 2, args, env=env)
    assert_learned(output, backend)


def test_accelerate_takes_the_name() -> None:
    needs("accelerate", "accelerate")
    run_torchrun(Path(__file__).parent / "accelerate_ranks.py", 2)


def losses(output: str) -> str:
    """Return the losses that an example prints, to the last bit."""
    (line,) = (line for line in output.splitlines() if line.startswith("losses ["))
    return line


def test_the_option_of_transformers(tmp_path: Path) -> None:
    needs("transformers", "transformers[torch]")
    script = tmp_path / "option.py"
    script.write_text(
        "import unisono.accelerate; unisono.accelerate.install()\n"
        "from transformers import HfArgumentParser, TrainingArguments\n"
        "parser = HfArgumentParser(TrainingArguments)\n"
        "print(parser.parse_args(['--ddp_backend', 'unisono']).ddp_backend)\n"
    )
    assert run_python(script, timeout=60).strip().endswith("unisono")


# Two numbers have one sum, in whichever order: gloo itself gets the same bits.
def test_transformers() -> None:
    needs("transformers", "transformers[torch]")
    script = EXAMPLES / "transformers_digits.py"
    over = {one: run_torchrun(script, 2, ["--backend", one], env=OFFLINE) for one in BACKENDS}
    assert_learned(over["unisono"], "unisono", parameters="69,194")
    assert "backend gloo, 2 ranks" in over["gloo"].splitlines()
    assert losses(over["unisono"]) == losses(over["gloo"])


def test_trl_with_peft() -> None:
    needs("trl", "trl")
    needs("peft", "peft")
    script = EXAMPLES / "trl_sft.py"
    over = {one: run_torchrun(script, 2, ["--backend", one], env=OFFLINE) for one in BACKENDS}
    assert losses(over["unisono"]) == losses(over["gloo"])
    for backend, output in over.items():
        lines = output.splitlines()
        assert f"backend {backend}, 2 ranks" in lines, output
        assert "parameters 33,984, equal on all ranks" in lines, output
        match = re.search(r"loss ([\d.]+) in the first 5 steps, ([\d.]+) in the last", output)
        assert match, output
        assert float(match[2]) < float(match[1]) / 2, output


def test_torchtitan() -> None:
    """FSDP2 and tensor parallelism on four ranks, and neither on one."""
    needs("torchtitan", "torchtitan")
    if tuple(map(int, version("torch").split(".")[:2])) < (2, 15):
        pytest.skip("tried with torch 2.15 alone: torchtitan takes functions that are new in torch")
    script = EXAMPLES / "torchtitan_llama.py"
    together = run_torchrun(script, 4, ["--tensor-parallel", "2"], timeout=240)
    assert "backend unisono, 4 ranks\n" in together, together
    assert "parameters 6,163,712, data parallel 2, tensor parallel 2\n" in together, together
    ours, expected = map(losses, (together, run_torchrun(script, 1)))
    ours, expected = (json.loads(each.removeprefix("losses ")) for each in (ours, expected))
    assert ours == pytest.approx(expected, rel=1e-5)
    assert ours[-1] < ours[0] - 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_lightning(backend: str) -> None:
    needs("lightning", "lightning")
    args, env = asking_for(backend)
    output = run_torchrun(EXAMPLES / "lightning_digits.py", 2, args, env=env)
    assert_learned(output, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_deepspeed_zero(backend: str) -> None:
    needs("deepspeed", "deepspeed")
    script = EXAMPLES / "deepspeed_digits.py"
    args, env = asking_for(backend)
    output = run_torchrun(script, 2, args, timeout=180, env={**env, "DS_ACCELERATOR": "cpu"})
    for stage in (1, 2, 3):
        assert_learned(output, backend, f"stage {stage}, ")


@pytest.mark.usefixtures("alone_with_ray")
@pytest.mark.parametrize("backend", BACKENDS)
def test_ray_train(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("ray", "ray[train]")
    args, env = asking_for(backend)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    # A short path, for Ray puts Unix sockets deep under it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("HOME", folder)  # Ray leaves a token there
        monkeypatch.setenv("RAY_TMPDIR", folder)
        assert_learned(run_python(EXAMPLES / "ray_train_digits.py", *args, timeout=180), backend)


@pytest.mark.usefixtures("alone_with_ray")
def test_ray_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("ray", "ray")
    if importlib.util.find_spec("ray.util.collective.backend_registry") is None:
        pytest.skip("this version of ray takes no backend of others for ray.util.collective")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("HOME", folder)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        output = run_python(EXAMPLES / "ray_collective.py", timeout=180)
    for how, times in (("declared", 2), ("made", 1)):
        for rank in (0, 1):
            assert output.count(f"{how}: rank {rank} of 2\n") == times, output
            assert output.count(f"{how}: rank {rank} with torch\n") == times, output


def test_docs_list_every_example() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    for script in EXAMPLES.glob("*.py"):
        assert f"examples/frameworks/{script.name}" in page
