"""PyTorch's own DistributedTest, with unisono where it asks for gloo.

The suite comes with torch and decides by the literal names "gloo", "mpi" and "nccl" what a test
needs. So unisono takes gloo's place in these processes (``unisono.torch.replace_gloo``), the
all_to_all tests that only mpi could run on CPUs are opened, and where a test looks for gloo's names
in a profile it is given ours under those names. One number that torch reads out of gloo's own class
is given as gloo's. Nothing else is changed, and a group on anything but unisono is refused.

``run.py`` beside this file runs it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

BACKEND = os.environ.get("CONFORMANCE_BACKEND", "unisono")
_SUITE = "torch.testing._internal.distributed.distributed_test"

# The variables that the suite reads at import. Its processes import this module anew.
for _name, _value in {
    "BACKEND": "gloo",
    "WORLD_SIZE": "3",
    "INIT_METHOD": "env://",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29655",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(_name, _value)
if "TEMP_DIR" not in os.environ:
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="conformance-")
for _folder in ("barrier", "test_dir"):
    Path(os.environ["TEMP_DIR"], _folder).mkdir(exist_ok=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402 (after the environment is set)


def _load() -> ModuleType:
    """Import torch's suite with its mpi-only tests opened to the name gloo."""
    spec = importlib.util.find_spec(_SUITE)
    if spec is None or spec.origin is None:
        raise ImportError("this torch comes without its distributed tests")
    source = Path(spec.origin).read_text(encoding="utf-8")
    gate, opened = 'BACKEND != "mpi"', 'BACKEND not in ("mpi", "gloo")'
    if BACKEND != "gloo":
        if gate not in source:
            raise ImportError(f"torch's suite has no line with {gate}; this adapter is out of date")
        source = source.replace(gate, opened)
    module = ModuleType(_SUITE)
    module.__file__ = spec.origin
    module.__package__ = _SUITE.rpartition(".")[0]
    sys.modules[_SUITE] = module
    # Not with this file's `annotations`: torch looks at those of hooks.
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def _put_unisono_for_gloo(suite: ModuleType) -> None:
    from unisono import _as_gloo
    from unisono.torch import replace_gloo

    replace_gloo()
    make = dist.distributed_c10d._new_process_group_helper

    def _new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        group, store = make(*args, **kwargs)
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            backend = group._get_backend(_cpu)
            if not _as_gloo.is_ours(backend):
                raise AssertionError(f"the backend under test calls itself {backend.name()}")
        return group, store

    dist.distributed_c10d._new_process_group_helper = _new_process_group_helper
    find = suite.get_profiling_event

    def get_profiling_event(event_name: str, *args: Any, **kwargs: Any) -> Any:
        events = find(event_name.replace("gloo:", "unisono:"), *args, **kwargs)
        for event in events:
            event.name = event.name.replace("unisono:", "gloo:")
        return events

    suite.get_profiling_event = get_profiling_event
    _give_gloos_number_of_threads()


def _give_gloos_number_of_threads() -> None:
    """DDP's logger takes what is registered as gloo for gloo's class and reads a field of it."""
    ddp = torch.nn.parallel.DistributedDataParallel
    logged = ddp._get_ddp_logging_data

    def _get_ddp_logging_data(self: Any) -> Any:
        data = logged(self)
        data["gloo_num_threads"] = 2
        return data

    ddp._get_ddp_logging_data = _get_ddp_logging_data


_cpu = torch.device("cpu")
suite = _load()
if BACKEND != "gloo":
    _put_unisono_for_gloo(suite)


class TestConformance(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """All tests of the suite, each in processes of its own."""

    def setUp(self) -> None:
        """Start the processes in which the test runs."""
        super().setUp()
        self._spawn_processes()
