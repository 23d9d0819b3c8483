"""The programs that ``behind_gloo.py`` runs when none is given: what is installed of them.

None of them is copied here. Those of other packages are named by where the package has put them;
for what a package does not ship, ``CONFORMANCE_FETCHED`` names a folder in which its user has put
the repository under its own name, such as DeepSpeed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from behind_gloo import Program, Reason

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples" / "frameworks"
# Runs a program with the same random numbers each time.
SEEDED = HERE.parent / "support" / "seeded.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# On a machine with a GPU they would take it.
ON_CPU = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
# A short path, for Ray puts Unix sockets deep under it; and it leaves a token at home.
RAY = {"HOME": "{scratch}", "RAY_TMPDIR": "{scratch}", "RAY_USAGE_STATS_ENABLED": "0"}

# As many ranks as a test may want on a host without accelerators; pools that are used again hang.
DEEPSPEED = {"LOCAL_SIZE": "4", "DS_DISABLE_REUSE_DIST_ENV": "1"}
# Of its tests of ZeRO and checkpoints, which take hours, some that save, load, and partition.
DEEPSPEED_TESTS = {
    "comm": ["comm/test_dist.py"],
    "zero": [
        f"v1/zero/test_zero.py::{name}"
        for name in (
            "TestZeroUnbalancedGradients",
            "TestZero3RepeatForwardLoop",
            "TestZero3ParamPartitioningManyParams",
            "TestZero3DictFwd",
            "TestZeroPartitionCache",
        )
    ],
    "checkpoint": [
        f"checkpoint/test_zero_optimizer.py::{name}"
        for name in ("TestZeROSaveLoadEdgeCase", "TestSaveTensorClone", "TestZeRONonDistributed")
    ],
}
# These look for the words of gloo's errors. unisono raises there too, in words of its own.
TORCHFT_DIFFERS = {
    "*.test_gloo_timeout": Reason(
        "the error names the rank that did not come; the test looks for gloo's words"
    ),
    "*_with_resiliency*": Reason(
        "the error names the rank that left; the test looks for gloo's words",
        says="has left the group in good order while this operation still needs it",
    ),
}


def programs() -> tuple[list[Program], list[str]]:
    """Return what can be run here, and a line on each thing that cannot."""
    found: list[Program] = []
    absent: list[str] = []
    for part in (of_torch, of_accelerate, of_lightning, of_deepspeed, of_ray, of_torchft):
        for each in part():
            if isinstance(each, Program):
                found.append(each)
            else:
                absent.append(each)
    return found, absent


def fetched(*parts: str) -> Path | None:
    """Return what the user has fetched, by its path in the folder that they name, or None."""
    folder = os.environ.get("CONFORMANCE_FETCHED")
    path = Path(folder, *parts).resolve() if folder else None
    return path if path and path.exists() else None


def package(name: str) -> Path | None:
    """Return the folder of a package, without an import of it, or None if it is not installed."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def of_torch() -> Iterator[Program | str]:
    """Suites of torch itself: all but DistributedTest, which ``run.py`` runs."""
    yield Program("torch rpc", [str(HERE / "torch_rpc.py")], tests=True, limit=3600)


def of_accelerate() -> Iterator[Program | str]:
    """Accelerate's tests of itself on several processes, and the example here."""
    folder = package("accelerate")
    if folder is None:
        yield "accelerate is not installed: its scripts are left out"
        return
    scripts = folder / "test_utils" / "scripts"
    for script in ("test_script", "test_ops", "test_sync"):
        command = [*TORCHRUN, str(SEEDED), str(scripts / f"{script}.py")]
        yield Program(f"accelerate {script}", command, environment=ON_CPU)
    yield Program(
        "accelerate test_distributed_data_loop",
        [*TORCHRUN, str(scripts / "test_distributed_data_loop.py")],
        environment=ON_CPU,
        explained={
            "": Reason("its ranks call different operations: gloo waits, unisono names them")
        },
        limit=90,
    )
    yield example("accelerate_digits")


def of_lightning() -> Iterator[Program | str]:
    """Lightning's demonstration model by its default for the CPU, and the example here."""
    if package("lightning") is None:
        yield "lightning is not installed: its model and the example are left out"
        return
    program = (
        "from lightning.pytorch import Trainer;"
        "from lightning.pytorch.demos.boring_classes import BoringModel as Model;"
        "settings = dict(accelerator='cpu', devices=2, strategy='ddp_spawn', max_epochs=2);"
        "trainer = Trainer(**settings, enable_progress_bar=False);"
        "trainer.fit(Model());"
        "trainer.test(Model())"
    )
    command = [sys.executable, "-c", program]
    yield Program("lightning BoringModel", command, environment=ON_CPU)
    yield example("lightning_digits")


def of_deepspeed() -> Iterator[Program | str]:
    """The example here, and of DeepSpeed's repository the tests of groups and of ZeRO."""
    if package("deepspeed") is None:
        yield "deepspeed is not installed: its tests are left out"
        return
    yield example("deepspeed_digits")
    unit = fetched("DeepSpeed", "tests", "unit")
    if unit is None:
        yield "CONFORMANCE_FETCHED holds no DeepSpeed: its tests/unit are left out"
        return
    options = [f"--rootdir={unit.parent}", f"--confcutdir={unit.parent}"]
    for name, files in DEEPSPEED_TESTS.items():
        yield Program(
            f"deepspeed {name}",
            [*options, *(str(unit / file) for file in files)],
            tests=True,
            environment={**ON_CPU, **DEEPSPEED},
        )


def of_ray() -> Iterator[Program | str]:
    """The one of Ray's own examples that needs no download and no GPU, and the one here."""
    folder = package("ray")
    if folder is None:
        yield "ray is not installed: its examples are left out"
        return
    path = folder / "train" / "examples" / "pytorch" / "torch_linear_example.py"
    command = [sys.executable, str(path), "--smoke-test"]
    yield Program("ray torch_linear_example", command, environment={**ON_CPU, **RAY})
    yield example("ray_train_digits", launched=False)


def of_torchft() -> Iterator[Program | str]:
    """The tests that torchft has in its package."""
    folder = package("torchft")
    if folder is None:
        yield "torchft is not installed: its tests are left out"
        return
    for name in ("process_group_test", "local_sgd_integ_test"):
        path = str(folder / f"{name}.py")
        yield Program(f"torchft {name}", [path], tests=True, explained=TORCHFT_DIFFERS)


def example(name: str, launched: bool = True) -> Program:
    """Return an example of this repository, asked to run on gloo."""
    start = TORCHRUN if launched else (sys.executable,)
    command = [*start, str(EXAMPLES / f"{name}.py"), "--backend", "gloo"]
    environment = ON_CPU if launched else {**ON_CPU, **RAY}
    return Program(f"example {name}", command, environment=environment)
