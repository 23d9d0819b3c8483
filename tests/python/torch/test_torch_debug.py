"""unisono in torch's debug server: a page that says who waits for whom; the health of ranks."""

from __future__ import annotations

import importlib
import json
import platform
import socket
import sys
import threading
import time
from datetime import datetime, timezone
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import free_port, run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("jinja2")

from torch_debug_ranks import text_of  # noqa: E402

from unisono import _torch_debug, _torch_page  # noqa: E402
from unisono._status import ask  # noqa: E402

needs_all_pages = pytest.mark.skipif(
    find_spec("tabulate") is None, reason="torch's own pages need tabulate: pip install tabulate"
)
needs_health = pytest.mark.skipif(
    not hasattr(torch.distributed.distributed_c10d, "HealthCheckHook"),
    reason="torch 2.15 brought its health checks",
)


@needs_all_pages
@pytest.mark.parametrize("early", [False, True])
def test_the_page_names_the_rank_that_others_wait_for(early: bool) -> None:
    results = run_ranks(
        3, "torch_debug_ranks:is_shown", free_port(), early, timeout=150, torch=True
    )
    waits, stopped, pids = results[2].value
    assert '<a href="/unisono">unisono</a>' in waits
    told = text_of(waits)
    head, _, table = told.partition("Group ")
    assert (
        f"rank 2 (host {platform.node()}, pid {pids[2]}) is in no operation of this group" in head
    )
    # The rest of the title comes first, whose name of the group may be a number.
    rows = [line.split() for line in table.splitlines()[1:]]
    ranks = [row for row in rows if row and row[0].isdigit() and str(pids[int(row[0])]) in row]
    # The one that others wait for is the first.
    assert [row[0] for row in ranks] == ["2", "0", "1"], told
    assert all("rank 2" in " ".join(row) for row in ranks[1:]), told
    assert "Links: 6 by shared memory" in told
    lines = text_of(stopped).splitlines()
    assert any(f"pid {pids[1]}, stopped" in line and "rank 1 of group" in line for line in lines)


def rank(number: int, world: list[tuple[str, int]], **state: Any) -> ask.Process:
    """A process that answers, of a group whose ranks are these hosts and pids."""
    host, pid = world[number]
    members = [
        {"global": one, "process": f"host {name}, pid {of}"} for one, (name, of) in enumerate(world)
    ]
    group = {
        "id": "4ba1d815",
        "rank": number,
        "ranks": members,
        "operations": [],
        "links": [],
        "failure": None,
        "failure_rank": None,
        "last": None,
        "collectives": 0,
        "messages": 0,
        **state,
    }
    answer = {"host": host, "groups": [group], "version": "0.1.0"}
    return ask.Process(pid, pid, "python train.py", "running", answer, host=host)


def test_one_rank_of_a_host_tells_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    here = platform.node()
    world = [(here, 10), (here, 11), ("b", 12), ("b", 13), ("c", 14)]
    waits = {"name": "all_reduce #1", "number": 1, "seconds": 7.0, "waits_for": [3]}
    processes = {
        10: rank(0, world, operations=[waits], collectives=1),
        11: rank(1, world, operations=[waits], collectives=1),
        12: rank(2, world, operations=[waits], collectives=1),
        13: ask.Process(13, 13, "", ask.STOPPED, trouble="no answer before it goes on", host="b"),
    }
    stranger = rank(0, [("b", 99)])
    stranger.answer["groups"][0]["id"] = "77777777"
    answers = {
        "http://b:1": "no answer: timed out",
        "http://b:2": [processes[12], processes[13], stranger],
        "http://c:1": "no answer: Connection refused",
    }
    asked: list[str] = []

    def of_rank(address: str, _end: float) -> list[ask.Process] | str:
        asked.append(address)
        return answers.get(address, [processes[10], processes[11]])

    addresses = {0: f"http://{here}:1", 1: f"http://{here}:2", 2: "http://b:1", 3: "http://b:2"}
    monkeypatch.setattr(_torch_page, "_addresses", lambda: ({**addresses, 4: "http://c:1"}, {}))
    monkeypatch.setattr(_torch_page, "_of_rank", of_rank)
    monkeypatch.setattr(ask, "processes", lambda: [processes[10], processes[11]])
    job = _torch_page.look(10)
    assert [process.pid for process in job.processes] == [10, 11, 12, 13]
    assert job.unknown == {4: "http://c:1: no answer: Connection refused"}
    # The second of this host was not asked: the first one knows it.
    assert asked.count(f"http://{here}:2") == 0, asked
    told = text_of(
        _torch_page.page(job, datetime.now(timezone.utc)).replace("<p", "</style>\n<p", 1)
    )
    assert "pid 13, stopped" in told
    assert "rank 3 (host b, pid 13) is stopped (SIGCONT lets it go on)" in told
    assert "3 ranks wait for it in all_reduce #1, for 7.0 s" in told
    assert "rank 4: http://c:1: no answer: Connection refused" in told


@pytest.mark.parametrize(
    "length, answered, told",
    [
        (100, '[{"pid": 1,', "no answer: IncompleteRead"),
        (None, "<html>", "no answer: "),
        (None, '{"pid": 1}', "its answer has another form"),
        (None, "7", "its answer has another form"),
        (None, "[7]", "its answer has another form"),
        (None, '[{"host": "b"}]', "its answer has another form"),
        (
            None,
            json.dumps([vars(rank(0, [("b", 1)], links=[{"rank": 1}]))]),
            "its answer has another form",
        ),
        (None, json.dumps([vars(rank(0, [("b", 1)]))]), None),
    ],
)
def test_an_answer_that_is_none_is_a_reason(
    length: int | None, answered: str, told: str | None
) -> None:
    body = answered.encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {length or len(body)}\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            stream, _ = listener.accept()
            with stream:
                stream.recv(1 << 16)
                stream.sendall(head.encode() + body)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        found = _torch_page._of_rank(address, time.monotonic() + 10)
        thread.join(10)
    if told is None:
        (process,) = found
        assert (process.host, process.pid) == ("b", 1)
    else:
        assert isinstance(found, str)
        assert found.startswith(told), found


def test_a_host_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    limits: list[float] = []

    def urlopen(_request: Any, timeout: float) -> None:
        nonlocal now
        limits.append(timeout)
        now += timeout
        raise TimeoutError("timed out")

    addresses = {number: f"http://b:{number}" for number in range(4)}
    monkeypatch.setattr(_torch_page, "_addresses", lambda: (addresses, {}))
    monkeypatch.setattr(_torch_page, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(_torch_page.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(ask, "processes", list)
    job = _torch_page.look(10)
    assert not job.processes
    assert list(job.unknown) == list(addresses)
    # Three ranks of the host after one another, and then all in the time that is left.
    assert limits[:3] == [4.0, 2.0, 1.0]
    assert len(limits) > 3
    assert max(limits[3:]) <= 1.0, limits


def test_a_page_that_cannot_be_made_leaves_the_server_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def handler() -> None:
        raise ImportError("no torch.distributed.debug._frontend")

    module = SimpleNamespace(default_handlers=lambda: ["stacks"])
    monkeypatch.setattr(_torch_debug, "handler", handler)
    _torch_debug._add_page(module)
    with pytest.warns(UserWarning, match=r"no page of unisono: no torch\.distributed\.debug"):
        assert module.default_handlers() == ["stacks"]
    _torch_debug._add_page(without := SimpleNamespace())
    assert not vars(without)


def test_the_page_comes_though_a_tool_has_looked_for_the_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "pages_of_a_test"
    (tmp_path / f"{name}.py").write_text("def default_handlers(): return ['stacks']")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_torch_debug, "_PAGES", name)
    monkeypatch.setattr(_torch_debug, "handler", lambda: "unisono")
    monkeypatch.setattr(sys, "meta_path", [_torch_debug._AtImport(), *sys.meta_path])
    spec = find_spec(name)
    spec.loader.exec_module(module_from_spec(spec))
    try:
        module = importlib.import_module(name)
        assert module.default_handlers() == ["stacks", "unisono"]
        assert importlib.reload(module).default_handlers() == ["stacks", "unisono"]
    finally:
        sys.modules.pop(name, None)


def test_words_of_others_are_no_html() -> None:
    failed = rank(0, [("<b>", 1)], failure="all_reduce #1: <script>")
    page = _torch_page.page(_torch_page.Job([failed], {}), datetime.now(timezone.utc))
    assert "<script>" not in page
    assert "<b>" not in page
    assert "has failed: all_reduce #1: &lt;script&gt;" in page


def test_it_says_where_there_is_no_debug_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.torch import debug_handler

    monkeypatch.delitem(sys.modules, "unisono._torch_page", raising=False)
    monkeypatch.setitem(sys.modules, "torch.distributed.debug._frontend", None)
    with pytest.raises(ImportError, match=r"no torch\.distributed\.debug\._frontend; torch 2\.11"):
        debug_handler()


@needs_health
@pytest.mark.parametrize("call", ["all_reduce", "operator"])
def test_a_rank_whose_call_has_failed_is_unhealthy(call: str, tmp_path: Path) -> None:
    prefix = str(tmp_path / "record_")
    env = {"TORCH_FR_DUMP_TEMP_FILE": prefix}
    ranks = run_ranks(
        2, "torch_debug_ranks:is_unhealthy", call, prefix, timeout=60, env=env, torch=True
    )
    waits, late = (result.value for result in ranks)
    assert "timed out after" in waits["told"]
    for found in (waits, late):
        assert found["before"] == {"healthy": True, "unhealthy_backends": []}
        assert ("unisono:all_reduce", "completed") in found["record"], found
    assert waits["after"] == {"healthy": False, "unhealthy_backends": ["unisono"]}
    # It is in no call, so it has not heard of the failure.
    assert late["after"]["healthy"]
    if call == "all_reduce":
        assert ("unisono:all_reduce", "scheduled") in waits["record"]
