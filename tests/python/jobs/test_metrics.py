"""``unisono metrics``: text that the parser of Prometheus' own client reads."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import until
from ranks import run_ranks
from test_status import answer, process

from unisono._status import ask, metrics

pytest.importorskip("prometheus_client")
BOARD = Path(__file__).resolve().parents[3] / "examples" / "grafana" / "unisono.json"


def parsed(text: str) -> dict[str, dict]:
    """The families of a text, by name, each with its samples by their labels."""
    from prometheus_client import parser
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    # Node_exporter reads the older format, where UNIT and EOF are comments.
    assert len(list(parser.text_string_to_metric_families(text))) > 0
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict, name: str, **labels: object) -> float:
    family = families[name]
    wanted = {key: str(one) for key, one in labels.items()}
    (found,) = (one for one in family.samples if wanted.items() <= one.labels.items())
    return found.value


def test_all_that_status_knows_is_exported() -> None:
    states = [answer(0, "all_reduce #7", waits_for=[2]), answer(2)]
    states[0]["waited"] = {
        "seconds": 1.5,
        "operations": 3,
        "by_operation": {
            "all_reduce": {
                "operations": 3,
                "seconds": 1.5,
                "by_size": [{"up_to": 256, "operations": 3, "seconds": 1.5, "by_rank": []}],
            }
        },
        "by_rank": [{"rank": 2, "seconds": 1.5, "last": 3, "median_seconds": 0.5}],
    }
    states[0]["links"] = [{"rank": 2, "for": kind, "mended": 2} for kind in ("x", "y")]
    states[1] |= {"failure": "an error", "failure_code": 'a "quoted" \\ word\nof two lines'}
    stopped = ask.Process(11, 11, "train", ask.STOPPED, trouble="none", host="h")
    found = [process(0, states[0]), stopped, process(2, states[1])]
    text = metrics.text(found)
    assert text.endswith("# EOF\n")
    families = parsed(text)
    # Each that is promised has samples here.
    assert families.keys() == metrics.FAMILIES.keys()
    for name, (kind, unit, told) in metrics.FAMILIES.items():
        family = families[name]
        assert (family.type, family.unit, family.documentation) == (kind, unit, told)
    assert value(families, "unisono_ranks", state="running") == 1
    assert value(families, "unisono_ranks", state="failed") == 1
    assert value(families, "unisono_ranks", state="silent") == 1
    short = {"collective": "all_reduce", "up_to": 256, "rank": 0}
    assert value(families, "unisono_operations", **short) == 7
    assert value(families, "unisono_operation_bytes", **short) == 56
    assert value(families, "unisono_operation_moving_seconds", **short) == 0.25
    longest = {**short, "up_to": "+Inf"}
    assert value(families, "unisono_operation_moving_seconds", **longest) == 2.5
    assert value(families, "unisono_mended_connections", rank=0, for_rank=2) == 4
    code = states[1]["failure_code"]
    assert value(families, "unisono_failed", rank=2, code=code) == 1
    assert value(families, "unisono_operation_age_seconds", rank=0) == 2
    assert value(families, "unisono_awaited_by_ranks", rank=2) == 1
    assert value(families, "unisono_awaited_by_ranks", rank=0) == 0
    assert value(families, "unisono_wait_seconds", **short) == 1.5
    assert value(families, "unisono_wait_operations", **short) == 3
    assert value(families, "unisono_wait_for_last", rank=0, for_rank=2) == 3
    assert value(families, "unisono_rank", rank=2, global_rank=2, pid=12) == 1
    assert value(families, "unisono_silent_processes", state=ask.STOPPED) == 1
    labels = families["unisono_failed"].samples[0].labels
    assert labels.keys() == {"node", "comm_name", "nranks", "n_nodes", "slurm_job_id", "rank"}
    # A process that is gone.
    gone = parsed(metrics.text([process(0, states[0])]))
    assert value(gone, "unisono_ranks", state="dead") == 2


def test_without_jobs_the_text_is_whole() -> None:
    assert metrics.text([]) == "# EOF\n"


def test_a_job_is_exported_in_each_way(tmp_path: Path) -> None:
    printed, file, served, pids = run_ranks(2, "status_ranks:is_exported", tmp_path, timeout=60)[
        0
    ].value
    kind, _, page = served.partition("\n")
    assert kind == metrics.CONTENT_TYPE
    for text in (printed, file, page):
        families = parsed(text)
        (info,) = (
            one.labels
            for one in families["unisono_rank"].samples
            if one.labels["pid"] == str(pids[1])
        )
        place = {"comm_name": info["comm_name"], "rank": 1}
        assert value(families, "unisono_operations_under_way", **place) == 1
        assert value(families, "unisono_operation_age_seconds", **place) > 0
    # Nothing else is left of the writing.
    assert [path.name for path in tmp_path.iterdir()] == ["unisono.prom"]
    assert (tmp_path / "unisono.prom").stat().st_mode & 0o777 == 0o644


def test_a_file_is_written_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "unisono.prom"
    command = [sys.executable, "-m", "unisono", "metrics", "--file", path, "--interval", "0.1"]
    modules = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": modules}) as writer:
        try:
            # Each is a new file, which comes in the place of the one before.
            until(path.exists, "the first file")
            first = path.stat().st_ino, path.stat().st_mtime_ns
            until(lambda: (path.stat().st_ino, path.stat().st_mtime_ns) != first, "the next")
            writer.send_signal(signal.SIGINT)
            assert writer.wait(20) == 0
        finally:
            writer.kill()
    assert path.read_text().endswith("# EOF\n")


def test_a_job_of_slurm_is_told_by_its_number() -> None:
    here = {**os.environ, "SLURM_JOB_ID": "4711"}
    program = ["sh", "-c", "echo there; read line"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(program, env=here, **pipes) as rank:
        try:
            assert rank.stdout.readline() == b"there\n"
            assert metrics._slurm_job(rank.pid) == "4711"
        finally:
            rank.kill()
    assert metrics._slurm_job(rank.pid) == "unknown"


def test_the_board_uses_metrics_that_exist() -> None:
    board = json.loads(BOARD.read_text())
    expressions = [
        target["expr"] for panel in board["panels"] for target in panel.get("targets", ())
    ]
    assert len(expressions) >= 6
    samples = {name + metrics._SUFFIXES[kind] for name, (kind, _, _) in metrics.FAMILIES.items()}
    for expression in expressions:
        used = set(re.findall(r"\bunisono_\w+", expression))
        assert used, expression
        assert used <= samples, expression
    variables = {one["name"] for one in board["templating"]["list"]}
    named = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
    assert named - {"__rate_interval", "datasource"} <= variables
