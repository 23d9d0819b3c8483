"""TorchRec's tables of embeddings, cut into rows over the ranks, give what whole tables give."""

from __future__ import annotations

import importlib.util

import pytest
from ranks import run_ranks

# The kernels are built for one torch each: fbgemm-gpu-cpu 1.6.0 with torchrec 1.6.1 for torch 2.11.
for _module in ("torchrec", "fbgemm_gpu"):
    if importlib.util.find_spec(_module) is None:
        pytest.skip(f"{_module} is not installed", allow_module_level=True)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tables_in_rows_are_trained_as_a_whole(world: int) -> None:
    run_ranks(world, "torchrec_ranks:trains_tables_in_rows", torch=True, timeout=120)
