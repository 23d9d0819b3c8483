"""Windows through the Python door: puts, signals, mapped arrays, and the ends of peers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from namespaces import hosts, why_not
from ranks import run_ranks

TROUBLE = why_not()
PAGE = Path(__file__).resolve().parents[3] / "docs" / "python.md"


@pytest.mark.check
@pytest.mark.parametrize("where", ["shared", "private", "mixed"])
def test_ranks_write_to_each_others_arrays(where):
    results = run_ranks(3, "numpy_windows_ranks:exchange", where)
    for result in results:
        expected = {
            "shared": [True] * 3,
            "private": [rank == result.rank for rank in range(3)],
            "mixed": [rank in (0, 2, result.rank) for rank in range(3)],
        }
        assert result.value == expected[where]


def test_ranks_write_to_each_others_arrays_over_tcp():
    results = run_ranks(
        3, "numpy_windows_ranks:exchange", "shared", env={"UNISONO_TRANSPORT": "tcp"}
    )
    assert [result.value.index(True) for result in results] == [0, 1, 2]


def test_more_ranks_than_cores_and_a_rank_alone():
    run_ranks(8, "numpy_windows_ranks:exchange", "shared")
    run_ranks(1, "numpy_windows_ranks:exchange", "shared")


@pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")
def test_ranks_write_to_each_others_arrays_between_hosts():
    with hosts() as net:

        def variables(rank: int) -> dict[str, str]:
            return {
                "MASTER_ADDR": net.address(0),
                "MASTER_PORT": "29521",
                "LOCAL_RANK": str(rank % 2),
                "LOCAL_WORLD_SIZE": "2",
            }

        results = run_ranks(
            4,
            "numpy_windows_ranks:exchange",
            "shared",
            env=variables,
            host=lambda rank: net.names[rank // 2],
        )
    for result in results:
        assert result.value == [rank // 2 == result.rank // 2 for rank in range(4)], result


def test_an_array_of_a_neighbour_is_its_memory():
    run_ranks(2, "numpy_windows_ranks:mapped")


@pytest.mark.check
def test_wrong_arguments_are_refused_and_cost_nothing():
    run_ranks(2, "numpy_windows_ranks:refusals")


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("doing", ["wait_signal", "fence", "put"])
def test_the_end_of_a_process_ends_the_waits_of_the_others(doing, transport):
    results = run_ranks(
        3,
        "numpy_windows_ranks:peer_dies",
        1,
        doing,
        check=False,
        env={"UNISONO_TRANSPORT": transport},
    )
    assert results[1].exit_code == -9
    for result in (results[0], results[2]):
        assert result.ok, result.report()
        text, took, peer, operation, later = result.value
        assert took < 10
        assert "rank 1" in text
        assert peer == 1
        assert doing in operation
        assert "make a new window" in later


@pytest.mark.parametrize("shared", [True, False])
def test_a_process_that_dies_amid_a_put_leaves_nothing_behind(shared):
    results = run_ranks(2, "numpy_windows_ranks:dies_amid_a_put", shared, check=False)
    assert results[0].ok, results[0].report()
    assert results[0].value < 2


def test_a_process_that_stops_amid_a_put_loses_the_memory():
    results = run_ranks(2, "numpy_windows_ranks:stopped_amid_a_put")
    assert results[0].value < 3


def test_a_signal_of_the_system_ends_a_wait():
    results = run_ranks(2, "numpy_windows_ranks:interrupted")
    assert 0.2 < results[0].value < 5


def test_ranks_that_keep_their_numbers():
    results = run_ranks(3, "numpy_windows_ranks:masked", check=False)
    for result in (results[0], results[2]):
        assert result.ok, result.report()


def test_the_program_of_the_page_runs(tmp_path):
    found = re.search(r"(?s)\n## Windows\n.*?```python\n(.*?)```", PAGE.read_text())
    assert found
    (tmp_path / "page.py").write_text(found[1])
    run_ranks(3, tmp_path / "page.py")
