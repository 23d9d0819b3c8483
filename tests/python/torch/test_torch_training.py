"""Training over unisono: DDP and FSDP against one process, and a quiet exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks
from test_torch_collectives import dist, start, torch


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )


def one_step(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_steps_like_one_process(world: int) -> None:
    run_ranks(world, f"{__name__}:rank_trains", torch=True, timeout=120)


def rank_trains() -> None:
    rank, world = start()
    torch.manual_seed(1)
    images, labels = torch.randn(6 * world, 1, 8, 8), torch.randint(5, (6 * world,))
    alone = model()
    one_step(alone, images, labels)
    for options in ({}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}):
        network = torch.nn.parallel.DistributedDataParallel(model(), **options)
        one_step(network, images[rank::world], labels[rank::world])
        for mine, expected in zip(network.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)
            by_rank = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(by_rank, mine.detach())
            # The same bits on every rank.
            assert all(torch.equal(by_rank[0], other) for other in by_rank)


def test_sharded_training() -> None:
    run_ranks(2, f"{__name__}:rank_shards", torch=True, timeout=120)


def rank_shards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, world = start()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    images, labels = torch.randn(6 * world, 1, 8, 8), torch.randint(5, (6 * world,))
    alone = model()
    one_step(alone, images, labels)
    network = fully_shard(model(), mesh=mesh)
    one_step(network, images[rank::world], labels[rank::world])
    for mine, expected in zip(network.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter that finds the package where this one does."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )


FORGETFUL = """
import torch, torch.distributed as dist
dist.init_process_group("unisono")
keep = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(5)]
keep[0].get_future().then(lambda f: f.value())
dist.new_group()
dist.barrier()
"""


def test_a_script_that_forgets_to_destroy_its_group_exits_quietly(tmp_path: Path) -> None:
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL)
    for result in run_ranks(2, script, env={"OMP_NUM_THREADS": "1"}):
        assert result.output == "", result.report()


REGISTERED = """
import sys, threading
import torch, torch.distributed as dist
assert not any(name.startswith("unisono._core") for name in sys.modules)
assert threading.active_count() == 1
dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "unisono"
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def test_torch_finds_the_backend_without_an_import() -> None:
    run = python("-W", "error", "-c", REGISTERED)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""


UNSUPPORTED = """
import torch
torch.__version__ = "2.3.0"
from unisono.torch import create_backend
try:
    create_backend(None)
except ImportError as error:
    print(error)
"""


def test_an_unsupported_torch_gets_a_sentence() -> None:
    run = python("-c", UNSUPPORTED)
    assert "this is torch 2.3.0" in run.stdout
    assert "python -m unisono build-torch" in run.stdout
