"""``unisono trace``: the files of ranks become one file with arrows, and a report."""

from __future__ import annotations

import gzip
import json
import signal
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from ranks import free_port, run_ranks
from trace_ranks import LENGTHS, STEPS

import unisono
from unisono import _trace
from unisono._trace import merge, proto, report
from unisono._trace.job import Job, Member, NoTraceError, Process, _clocks

WORLD = 3
LATE = 1


def traced(folder: Path, what: str, *args: object, world: int = WORLD, **options: object) -> list:
    env = {"UNISONO_TRACE": str(folder)}
    return run_ranks(world, f"trace_ranks:{what}", *args, timeout=60, env=env, **options)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job whose rank 1 is 20 ms late in 30 calls."""
    folder = tmp_path_factory.mktemp("trace") / "made" / "by-the-ranks"
    traced(folder, "is_late", LATE)
    return folder


def arrows(trace: bytes) -> tuple[Counter[int], Counter[int]]:
    """The numbers of the arrows that begin and end at the operations of a trace."""
    leaving: Counter[int] = Counter()
    arriving: Counter[int] = Counter()
    for _, packet in proto._fields(memoryview(trace)):
        for number, body in proto._fields(packet):
            if number == 11:
                for field, value in proto._fields(body):
                    if field in (47, 48):
                        found = leaving if field == 47 else arriving
                        found[int.from_bytes(value, "little")] += 1
    return leaving, arriving


def test_the_straggler_is_named(late: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = late.parent / "page.html"
    assert _trace.trace(["report", str(late), "--html", str(page)], "unisono") == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines[lines.index("Stragglers") + 1]
    assert first.startswith(f"  rank {LATE} (host "), first
    assert "mostly in all_reduce" in first
    told = report.report(Job.read(late))
    worst = told.stragglers[0]
    assert worst.rank == LATE
    assert len(worst.late) >= STEPS
    assert 0.018 < sorted(worst.late)[len(worst.late) // 2] < 0.2
    for rank in told.ranks:
        # The others wait for most of the time.
        share = rank.waiting / rank.span
        assert share > 0.4 if rank.rank != LATE else share < 0.4, told.ranks
        assert rank.waiting <= rank.inside <= rank.span
    text = page.read_text()
    assert text.count("<svg") == 4
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert f"rank {LATE} (host " in text


def test_operations_of_all_ranks_join(late: Path) -> None:
    job = Job.read(late)
    assert [process.rank for process in job.processes] == [0, 1, 2]
    assert {len(parts) for parts in job.collectives.values()} == {WORLD}
    names = Counter(parts[0].name for parts in job.collectives.values())
    assert names == {"all_reduce": STEPS + 3, "broadcast": 1}
    # The lengths of messages say that each met the one that it should.
    assert len(job.messages) == WORLD * (len(LENGTHS) + 1)
    for sent, received in job.messages:
        assert sent.bytes == received.bytes
        assert (sent.member.rank + 1) % WORLD == received.member.rank
        assert received.end > sent.begin
    assert job.backwards == job.lost == 0
    reduced = [one for one in job.operations() if one.name == "all_reduce"]
    assert all("algorithm" in one.notes and one.bytes >= 16384 for one in reduced)
    # The engine has seen the wait, too.
    waited = [one for one in reduced if "waited_ns" in one.notes and one.member.rank != LATE]
    assert len(waited) > STEPS / 2


def test_arrows_lead_from_sends_to_receives(late: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = late.parent / "all.pftrace"
    assert _trace.trace(["merge", str(late), "-o", str(target)], "unisono") == 0
    assert "15 arrows of messages" in capsys.readouterr().out
    leaving, arriving = arrows(target.read_bytes())
    assert leaving.keys() == arriving.keys()
    assert set(leaving.values()) == set(arriving.values()) == {1}
    # And to those that waited for the late rank.
    assert len(leaving) >= 15 + STEPS * (WORLD - 1)
    events = list(proto.packets(target.read_bytes()))
    assert len(events) == 2 * sum(1 for _ in Job.read(late).operations())
    ends: dict[int, int] = {}
    for event in events:
        # Those of one track do not overlap.
        if event.kind == proto.BEGIN:
            assert event.time >= ends.get(event.track, 0)
            if event.notes.get("came_last") == f"rank {LATE}":
                assert event.notes["until_then_us"] >= 0
        ends[event.track] = event.time


def test_perfetto_s_own_messages_read_the_trace(late: Path, tmp_path: Path) -> None:
    messages = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    job = Job.read(late)
    merge.write(job, late, target := tmp_path / "all.pftrace")
    for path in [target, *late.glob("rank-*")]:
        trace = messages.Trace()
        trace.ParseFromString(path.read_bytes())
        assert all(packet.timestamp_clock_id == proto.MONOTONIC for packet in trace.packet)
        tracks = {packet.track_descriptor.uuid for packet in trace.packet}
        events = [one.track_event for one in trace.packet if one.HasField("track_event")]
        kinds = Counter(event.type for event in events)
        assert kinds[messages.TrackEvent.TYPE_SLICE_BEGIN] > STEPS
        assert (
            kinds[messages.TrackEvent.TYPE_SLICE_BEGIN] == kinds[messages.TrackEvent.TYPE_SLICE_END]
        )
        assert {event.track_uuid for event in events} <= tracks
        if path == target:
            ends = [flow for event in events for flow in event.terminating_flow_ids]
            assert sorted(ends) == sorted(flow for event in events for flow in event.flow_ids)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two ranks of torch, with its own traces and some that are none."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("trace")
    traced(folder, "is_profiled", str(folder), world=2, torch=True)
    (folder / "other.json").write_text("{}")
    (folder / "cut.json.gz").write_bytes(gzip.compress(b"{}")[:-4])
    return folder


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_traces_of_torch_lie_beside(profiled: Path, suffix: str, tmp_path: Path) -> None:
    folder = profiled
    job = Job.read(folder)
    merged = merge.write(job, folder, target := tmp_path / f"all{suffix}")
    assert merged.beside == ["profile-0.json", "profile-1.json.gz"]
    cut, other = merged.left_out
    assert cut.startswith("cut.json.gz: ")
    assert other == "other.json: no trace of torch's profiler"
    if suffix == ".zip":
        with zipfile.ZipFile(target) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    else:
        with tarfile.open(target) as archive:
            members = {one.name: archive.extractfile(one).read() for one in archive}
    assert members["perfetto_manifest.json"].startswith(b'{"perfetto_manifest"')
    manifest = json.loads(members["perfetto_manifest.json"])["perfetto_manifest"]
    assert manifest["version"] == 1
    operations, *others = manifest["files"]
    assert operations == {"path": "unisono.pftrace"}
    assert members.keys() == {"perfetto_manifest.json"} | {one["path"] for one in manifest["files"]}
    for rank, entry in enumerate(others):
        assert entry["path"] == f"torch/profile-{rank}.json"
        assert entry["clocks"]["sync_to"] == {"file": "unisono.pftrace", "clock": "MONOTONIC"}
        moved = entry["clocks"]["offset_ns"]
        spans = [
            (one["ts"] * 1e3 + moved, (one["ts"] + one["dur"]) * 1e3 + moved)
            for one in json.loads(members[entry["path"]])["traceEvents"]
            if one.get("ph") == "X" and one["name"] == "c10d::allreduce_"
        ]
        calls = [one for one in job.processes[rank].operations() if one.name == "all_reduce"]
        assert len(spans) == 3
        # The one before is outside of the profile; they are 400 ms apart.
        for (begin, _), call in zip(spans, calls[-3:], strict=True):
            assert abs(begin - call.begin) < 150e6, (rank, begin - call.begin)


def test_hosts_compare_their_clocks_over_their_link(tmp_path: Path) -> None:
    def apart(rank: int) -> dict[str, str]:
        return {"UNISONO_TRACE": str(tmp_path), "UNISONO_HOST": f"node{rank // 2}"}

    run_ranks(WORLD, "trace_ranks:is_late", LATE, timeout=60, env=apart)
    job = Job.read(tmp_path)
    clocks = [member.clock for process in job.processes for member in process.members]
    assert clocks[:2] == [None, None]
    offset, error = clocks[2]
    # It is the same clock.
    assert abs(offset) <= error < 100e6
    assert len(job.clocks) == 1


def member_of(process: Process, rank: int, clock: tuple[int, int] | None = None) -> Member:
    member = Member("g", 0, rank, [0, 1, 2], process, clock=clock)
    process.members.append(member)
    return member


def test_clocks_lead_to_the_first_host() -> None:
    first, second, third = (
        Process(Path(), host=name, boot=name, rank=rank, realtime=1000 * rank)
        for rank, name in enumerate("abc")
    )
    member_of(first, 0)
    member_of(second, 1, (-70, 5))
    # That of another group of its own, between the second and the third host.
    second.members.append(Member("h", 0, 0, [1, 2], second))
    third.members.append(Member("h", 0, 1, [1, 2], third, clock=(30, 8)))
    clocks = _clocks([first, second, third])
    assert [(one.offset, one.error) for one in clocks.values()] == [(0, 0), (-70, 5), (-40, 13)]
    third.members.clear()
    clocks = _clocks([first, second, third])
    assert (clocks["c"].offset, clocks["c"].error) == (2000, None)


def test_a_killed_rank_leaves_all_but_the_last_moment(tmp_path: Path) -> None:
    results = traced(tmp_path, "one_is_killed", check=False)
    assert [result.exit_code for result in results] == [0, 0, -signal.SIGKILL]
    job = Job.read(tmp_path)
    counts = [sum(1 for _ in process.operations()) for process in job.processes]
    assert 0 < counts[2] < counts[0]
    failures = report.report(job).failures
    assert failures[0].startswith("rank 0: "), failures
    assert any("rank 2" in failure for failure in failures)
    # A file that was cut in the middle of a packet.
    path = job.processes[0].path
    path.write_bytes(path.read_bytes()[:-3])
    assert sum(1 for _ in Job.read(tmp_path).processes[0].operations()) >= counts[0] - 1


def test_a_folder_without_a_trace_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-0000-x-1.pftrace").write_bytes(b"\x0a")
    with pytest.raises(NoTraceError):
        Job.read(tmp_path)
    assert _trace.trace(["report", str(tmp_path)], "unisono") == 1
    assert f"UNISONO_TRACE={tmp_path}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_an_error() -> None:
    place, options = f"tcp://127.0.0.1:{free_port()}", unisono.Options(trace="/proc/trace")
    with pytest.raises(unisono.Error, match="write a trace into /proc/trace"):
        unisono.init(place, rank=0, world_size=1, options=options)
