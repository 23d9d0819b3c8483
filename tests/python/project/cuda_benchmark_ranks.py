"""The rank functions for benchmarks/cuda.py where there is no GPU, for test_benchmarks.py."""

from __future__ import annotations

import importlib.util
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "cuda.py"


def benchmark() -> ModuleType:
    """The script as a module, under a name that no other module has."""
    spec = importlib.util.spec_from_file_location("benchmark_of_cuda", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    assert sys.path == before
    return module


def measures_the_others() -> tuple[dict, dict, dict]:
    """Measure two cells in memory of the host, on a group that works and one that fails."""
    script = benchmark()
    torch.cuda.synchronize = lambda: None
    dist.init_process_group("gloo")
    # Short, for it is what the other rank waits.
    fragile = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    rounds = 0

    class Cell(script.Cell):
        def _make(self, collective: str, size: int, group: dist.ProcessGroup) -> None:
            self.group, self.whole = group, torch.zeros(size // 4)
            self.call = getattr(self, collective)

        def round(self, calls: int) -> tuple[float, float, float]:
            nonlocal rounds
            rounds += self.group is fragile
            if rounds == 4 and self.group is fragile and dist.get_rank() == 1:
                raise RuntimeError("it broke\nsomewhere\nas it must")
            return super().round(calls)

    script.Cell = Cell
    _, missing = script.groups_of(["absent"])
    groups = {"gloo": dist.new_group(backend="gloo"), "breaks": fragile}
    cells = [script.measure("all_reduce", size, groups, 5) for size in (8, 4096)]
    return missing, cells[0], cells[1]


def finds_no_device(output: str) -> None:
    """Go through the whole of it, with ranks that die as they begin."""
    script = benchmark()
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_name = lambda _index: "no GPU at all"
    sys.argv = ["cuda.py", "--ranks", "2", "--collectives", "all_reduce", "--sizes", "8,1M"]
    sys.argv += ["--window", "64M", "--json", output]
    script.main()
