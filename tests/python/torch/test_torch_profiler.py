"""Collectives in the traces of torch's profiler, by the names that readers of traces know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch")

from torch_profiler_ranks import COUNT  # noqa: E402

# Whether the record has the number of a call and whether it goes on in the background.
IS_NUMBERED = (
    "setSequenceInfo"
    in (
        Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ParamCommsUtils.hpp"
    ).read_text()
)
# The calls of a step, in their order: their names, and the elements that rank 0 gives and gets.
CALLS = [
    ("allreduce", 32, 32),  # of DDP
    ("allreduce", COUNT, COUNT),
    ("broadcast", COUNT, COUNT),
    ("reduce", COUNT, COUNT),
    ("allgather", COUNT, 2 * COUNT),
    ("allgather", COUNT, 2 * COUNT),
    ("reduce_scatter", 2 * COUNT, COUNT),
    ("gather", COUNT, 2 * COUNT),
    ("scatter", 2 * COUNT, COUNT),
    ("all_to_all", 2 * COUNT, 2 * COUNT),
    ("all_to_allv", 2 * COUNT, 400),
    ("barrier", 0, 0),
    ("allreduce", COUNT, COUNT),
    ("send", COUNT, COUNT),
    # The operators.
    ("allreduce", COUNT, COUNT),
    ("allreduce", COUNT, COUNT),
    ("allgather", COUNT, 2 * COUNT),
    ("reduce_scatter", 2 * COUNT, COUNT),
    ("broadcast", COUNT, COUNT),
    ("allreduce", COUNT, COUNT),
]
HTA = """
import sys
from hta.configs.parser_config import ParserConfig
from hta.trace_analysis import TraceAnalysis

config = ParserConfig(ParserConfig.get_minimum_args() + ParserConfig.ARGS_COMMUNICATION)
ParserConfig.set_default_cfg(config)
trace = TraceAnalysis(trace_files={rank: f"{sys.argv[1]}/rank{rank}.json" for rank in (0, 1)}).t
calls = trace.get_trace(0)
names = trace.symbol_table.get_sym_table()
calls = calls[calls["name"] == names.index("record_param_comms")]
counts = calls.groupby("collective_name")["in_msg_nelems"].agg(["count", "sum"])
print(counts.to_json(orient="index"))
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("traces")
    results = run_ranks(2, "torch_profiler_ranks:calls_each", str(folder), timeout=90, torch=True)
    return folder, [result.value for result in results]


def test_each_call_is_recorded(traces: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    spans, others = traces[1]
    columns = ("Collective name", "In msg nelems", "Out msg nelems")
    told = [tuple(span["args"][column] for column in columns) for span in spans]
    # Two steps; DDP makes its calls in another thread.
    assert sorted(told) == sorted(CALLS * 2)
    assert sum(span["args"]["Collective name"] == "recv" for span in others) == 2


def test_a_record_has_all_arguments(traces: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    for span in traces[1][0]:
        args, name = span["args"], span["args"]["Collective name"]
        assert args["Group size"] == 2
        assert args["dtype"] == ("Byte" if name == "barrier" else "Float")
        is_whole = args["Process Group Description"] == "default_pg"
        # torch has no words for ranks that do not go up by equal steps.
        assert args["Process Group Ranks"] == ("[0, 1]" if is_whole else "[]")
        assert args["Process Group Name"] == ("0" if is_whole else "1")
        is_uneven = name == "all_to_allv"
        assert json.loads(args["In split size"]) == ([200, 1800] if is_uneven else [])
        assert json.loads(args["Out split size"]) == ([200, 200] if is_uneven else [])
        # The root, the peer of a message, or this rank.
        assert args["Rank"] == (1 if name in ("broadcast", "reduce", "send") or not is_whole else 0)
        if name == "send":
            assert args["Dst Rank"] == 1
        if IS_NUMBERED:
            assert args["Is asynchronized op"] == (name == "send" or args["In msg nelems"] == 32)


@pytest.mark.skipif(not IS_NUMBERED, reason="this torch does not record the numbers of calls")
def test_ranks_agree_on_the_numbers(traces: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    first, second = (
        [
            (span["args"]["Process Group Name"], span["args"]["Seq"], span["args"]["dtype"])
            for span in spans
            if "Seq" in span["args"]
        ]
        for spans in traces[1]
    )
    assert sorted(first) == sorted(second)
    # One of each, but for messages and all_reduce_int8_, which have none.
    assert len(set(first)) == 2 * (len(CALLS) - 2)


def test_hta_finds_them(traces: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """Holistic Trace Analysis has them in its table; its own analyses are of GPU kernels."""
    if find_spec("hta") is None:
        pytest.skip("Holistic Trace Analysis is not installed: pip install HolisticTraceAnalysis")
    modules = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", HTA, str(traces[0])],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": modules},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # It leaves out the step that the trace ends with, and keeps what came before its end.
    assert found["reduce_scatter"] == {"count": 2, "sum": 4 * COUNT}
    assert found["all_to_allv"] == {"count": 1, "sum": 2 * COUNT}
    assert found["barrier"] == {"count": 1, "sum": 0}
