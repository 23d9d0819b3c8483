"""Shared by the tests on a real GPU: the devices of the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from cuda_arrays import device_count
from ranks import RankResult, run_ranks


@pytest.fixture(params=["one device", "a device each"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[RankResult]]:
    """``run_ranks``, with all ranks on one device, and again with those of this host in turn."""
    place = {}
    if request.param == "one device":
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        place = {"CUDA_VISIBLE_DEVICES": first}
    elif device_count() < 2:
        pytest.skip("there is one CUDA device here")

    def start(*arguments: Any, env: dict[str, str] | None = None, **options: Any) -> Any:
        return run_ranks(*arguments, env={**place, **(env or {})}, **options)

    return start
