"""The streams that torch's calls on CUDA tensors are put into, over the emulated driver.

The rank functions are in ``torch_cuda_streams_ranks``.
"""

from __future__ import annotations

import pytest
from ranks import run_ranks
from torch_cuda_device import build

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

STAGED = {"CUDA_EMULATOR_IPC": "refuse-import"}


@pytest.fixture(scope="module")
def emulated() -> dict[str, str]:
    return build()


@pytest.fixture(params=["direct", "staged"])
def way(request: pytest.FixtureRequest, emulated: dict[str, str]) -> dict[str, str]:
    return emulated | (STAGED if request.param == "staged" else {})


def run(name: str, env: dict[str, str], *args: object) -> None:
    run_ranks(2, f"torch_cuda_streams_ranks:{name}", *args, torch=True, env=env, timeout=120)


def test_keeps_off_torchs_pool(way: dict[str, str]) -> None:
    run("keeps_off_torchs_pool", way)


def test_holds_up_no_stream(emulated: dict[str, str]) -> None:
    run("holds_up_no_stream", emulated)


def test_gives_streams_back(way: dict[str, str]) -> None:
    run("gives_streams_back", way)


def test_sends_before_it_receives(emulated: dict[str, str]) -> None:
    run("sends_before_it_receives", emulated | {"CUDA_EMULATOR_CONNECTIONS": "1"})


@pytest.mark.parametrize("captures", [True, False])
def test_refuses_in_a_capture(captures: bool, emulated: dict[str, str]) -> None:
    run("refuses_in_a_capture", emulated | ({} if captures else STAGED), captures)
