"""Features built on torch.distributed, on two ranks of unisono: see ``torch_ecosystem_ranks``.

Two launches serve all of the tests; each test reads how its scenario went on every rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import RankResult, free_port, run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

OURS = "torch_ecosystem_ranks"
GRADIENTS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_base",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
]
SCENARIOS = [
    "objects",
    "batches",
    "batches_without_tags",
    *(f"gradient_of_{name}" for name in GRADIENTS),
    "compiled_collectives_aot_eager",
    "compiled_collectives_inductor",
    "compiled_ddp_aot_eager",
    "compiled_ddp_inductor",
    "checkpoints",
    "checkpoints_while_training",
    "checkpoints_of_uneven_tensors",
]
STORES = ["TCPStore", "FileStore", "HashStore", "PrefixStore", "file://", "tcp://", "env://"]
# Ignores torch's warnings of its own interfaces, as pyproject.toml does for tests in this process.
QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning"}


def assert_well(results: list[RankResult], name: str) -> None:
    for result in results:
        assert result.value[name] is None, f"rank {result.rank}: {result.value[name]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def scenarios(folder: Path) -> list[RankResult]:
    return run_ranks(
        2,
        f"{OURS}:run_scenarios",
        "unisono",
        SCENARIOS,
        str(folder),
        torch=True,
        timeout=240,
        env=QUIET,
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(scenarios: list[RankResult], name: str) -> None:
    assert_well(scenarios, name)


@pytest.fixture(scope="module")
def stores(folder: Path) -> list[RankResult]:
    ports = [free_port(), free_port()]
    return run_ranks(
        2, f"{OURS}:stores", "unisono", str(folder), ports, torch=True, timeout=120, env=QUIET
    )


@pytest.mark.parametrize("name", STORES)
def test_store(stores: list[RankResult], name: str) -> None:
    assert_well(stores, name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_two_ranks_opens_without_any(
    scenarios: list[RankResult], folder: Path
) -> None:
    """The ranks saved a plain checkpoint: a process that never joined a group reads it."""
    from torch.distributed import checkpoint
    from torch_ecosystem_ranks import STEPS, model, trained_alone

    assert_well(scenarios, "checkpoints")
    weights = {name: torch.zeros_like(value) for name, value in model().state_dict().items()}
    checkpoint.load({"model": weights}, checkpoint_id=folder / "first", no_dist=True)
    expected = trained_alone(STEPS).state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
