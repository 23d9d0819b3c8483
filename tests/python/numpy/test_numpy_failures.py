"""Failures through the Python door: arguments, mismatches, deaths, interrupts, joins."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
from ranks import RankResult, run_ranks

import unisono

TRANSPORTS = ["shm", "tcp"]

# Differences of rank 1 from the others, and the words that the error must have for them.
DIFFERENCES = {
    "operation": ["all_reduce", "all_gather"],
    "prefix": ["scan #", "exscan #"],
    "dtype": ["float32", "int32"],
    "count": ["8", "5"],
    "op": ["sum", "max"],
    "root": ["root", "0", "1"],
    "root of reduce": ["root 0", "root 1"],
    "root of gather": ["root 0", "root 1"],
}


def transport(name: str) -> dict[str, str]:
    return {"UNISONO_TRANSPORT": name}


def survivors(results: list[RankResult], victim: int) -> list[RankResult]:
    assert results[victim].exit_code == -9
    alive = [result for result in results if result.rank != victim]
    assert all(result.ok for result in alive), "\n".join(result.report() for result in alive)
    return alive


@pytest.mark.parametrize("world", [2, 3])
def test_bad_arguments_are_refused_and_cost_nothing(world):
    run_ranks(world, "numpy_failures_ranks:bad_arguments")


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("field", [*DIFFERENCES])
def test_a_mismatch_names_both_ranks_and_the_field(field, name):
    results = run_ranks(3, "numpy_failures_ranks:mismatch", field, env=transport(name))
    words = DIFFERENCES[field]
    for result in results:
        text, kind, _, fatal = result.value
        assert kind == "MismatchError"
        assert fatal
        assert all(word in text for word in words), text
        ranks = set(re.findall(r"rank \d", text))
        assert "rank 1" in ranks
        assert len(ranks) > 1, text


def test_a_message_of_the_wrong_length_is_a_mismatch():
    for result in run_ranks(2, "numpy_failures_ranks:message_mismatch"):
        assert re.search(r"rank 1 \(host .*, pid \d+\) receives 12 bytes", result.value)
        assert re.search(r"rank 0 \(host .*, pid \d+\) sends 16 bytes", result.value)


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("waiting_in", ["all_reduce", "async", "recv"])
def test_the_end_of_a_process_ends_the_waits_of_the_others(waiting_in, name):
    results = run_ranks(
        3, "numpy_failures_ranks:peer_dies", 1, waiting_in, check=False, env=transport(name)
    )
    for result in survivors(results, 1):
        took, text, peer, operation = result.value
        assert took < 10
        assert "rank 1" in text
        assert peer == 1
        assert operation is not None


def test_the_end_of_a_process_reaches_its_other_groups():
    for result in survivors(
        run_ranks(3, "numpy_failures_ranks:killed_beside_a_split", check=False), 1
    ):
        assert "rank 1" in result.value


def test_timeouts():
    run_ranks(2, "numpy_failures_ranks:timeouts")


def test_monitored_barrier_names_the_missing():
    results = run_ranks(4, "numpy_failures_ranks:monitored_barrier_names_the_missing")
    assert "rank 1" in results[0].value
    assert "rank 3" in results[0].value


@pytest.mark.parametrize("waiting_in", ["all_reduce", "recv", "work", "split", "monitored_barrier"])
def test_an_interrupt_ends_a_wait(waiting_in):
    results = run_ranks(2, "numpy_failures_ranks:interrupted", waiting_in)
    assert results[0].value < 10


def test_an_interrupt_ends_joining():
    run_ranks(1, "numpy_failures_ranks:interrupted_while_joining")


def test_abort_reaches_every_rank_with_its_reason():
    for result in run_ranks(3, "numpy_failures_ranks:aborted"):
        assert "out of luck" in result.value
        assert "rank 0" in result.value


def test_an_exception_inside_with_reaches_the_others():
    results = run_ranks(2, "numpy_failures_ranks:left_by_an_exception")
    assert "ZeroDivisionError" in results[1].value


def test_a_missing_rank_is_named():
    results = run_ranks(2, "numpy_failures_ranks:join_as", [(0, 3), (2, 3)], 4)
    for result in results:
        kind, text = result.value
        assert kind == "TimeoutError"
        assert "rank 1 of 3 did not join" in text


def test_two_processes_that_claim_one_rank():
    results = run_ranks(3, "numpy_failures_ranks:join_as", [(0, 3), (1, 3), (1, 3)], 40)
    texts = [result.value for result in results]
    assert any(kind == "InvalidArgumentError" and "rank 1" in text for kind, text in texts), texts
    assert all(kind for kind, _ in texts)
    assert max(result.seconds for result in results) < 30


def test_ranks_that_disagree_on_the_world_size():
    results = run_ranks(2, "numpy_failures_ranks:join_as", [(0, 2), (1, 3)], 10)
    for result in results:
        kind, text = result.value
        assert kind == "MismatchError"
        assert "2" in text
        assert "3" in text


def test_ranks_that_disagree_on_a_setting():
    for result in run_ranks(2, "numpy_failures_ranks:join_with_settings"):
        kind, text = result.value
        assert kind == "MismatchError"
        assert "ring_bytes" in text


def test_a_closed_communicator_and_a_quiet_end():
    for result in run_ranks(2, "numpy_failures_ranks:closed"):
        assert result.output == ""


def test_threads_go_with_the_last_communicator(tmp_path):
    for result in run_ranks(2, "numpy_failures_ranks:threads_without_a_group", str(tmp_path)):
        assert result.value == []


def test_the_first_to_come_may_be_the_first_to_leave():
    results = run_ranks(3, "numpy_failures_ranks:left_early")
    assert [result.value for result in results] == [0, 1, 2]
    assert all(result.output == "" for result in results)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_a_fork():
    run_ranks(2, "numpy_failures_ranks:forked")


def test_without_a_launcher_the_error_says_how_to_start(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(unisono.InvalidArgumentError, match="RANK"):
        unisono.init()
    with pytest.raises(unisono.InvalidArgumentError, match="accepted are tcp://"):
        unisono.init("http://example.org", rank=0, world_size=2)
    with pytest.raises(unisono.InvalidArgumentError, match="out of range"):
        unisono.init("tcp://127.0.0.1:1", rank=2, world_size=2)


def test_settings_that_do_not_exist_are_answered_with_the_nearest(monkeypatch):
    with pytest.raises(unisono.InvalidArgumentError, match="did you mean timeout"):
        unisono.Options(timout=3)
    with pytest.raises(unisono.InvalidArgumentError, match="auto, shm or tcp"):
        unisono.Options(transport="udp")
    monkeypatch.setenv("UNISONO_TIMOUT", "3")
    with pytest.raises(unisono.InvalidArgumentError, match="did you mean UNISONO_TIMEOUT"):
        unisono.init(rank=0, world_size=1)


def test_errors_are_what_python_calls_them_and_survive_pickling():
    import pickle

    assert issubclass(unisono.TimeoutError, TimeoutError)
    assert issubclass(unisono.PeerLostError, ConnectionError)
    assert issubclass(unisono.InvalidArgumentError, ValueError)
    with pytest.raises(unisono.Error) as caught, unisono.init(rank=0, world_size=1) as comm:
        comm.send(np.ones(2), 5)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is unisono.InvalidArgumentError
    assert (str(again), again.code, again.peer) == (str(caught.value), "InvalidArgument", None)


def test_importing_loads_nothing_native_and_no_torch():
    program = (
        "import sys, unisono; assert 'unisono._core' not in sys.modules; unisono.ReduceOp.SUM; "
        "assert 'unisono._core' in sys.modules; assert 'torch' not in sys.modules; "
        "assert not hasattr(unisono, 'nothing'); assert 'init' in dir(unisono)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_ranks_meet_again_at_once():
    run_ranks(3, "numpy_failures_ranks:meets_again")
