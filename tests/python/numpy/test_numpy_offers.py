"""Arrays that processes offer to others, on which the doors of Ray, vLLM and torchstore stand."""

from __future__ import annotations

import signal

import pytest
from ranks import run_ranks

from unisono import _offers

RANKS = "offers_ranks"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_offers_are_read_and_written(transport: str) -> None:
    env = {"UNISONO_TRANSPORT": transport}
    run_ranks(3, f"{RANKS}:read_and_write", timeout=60, env=env)


def test_wrong_arrays_are_refused_and_offers_are_counted() -> None:
    run_ranks(2, f"{RANKS}:wrong_arrays", timeout=60)


@pytest.mark.parametrize("lazy", ["conjugate", "negative"])
def test_tensors_that_are_computed_when_read_are_copied(lazy: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12.0).reshape(3, 4)
    tensor = (tensor * (1 + 2j)).conj() if lazy == "conjugate" else torch._neg_view(tensor)
    assert tensor.is_contiguous()
    with pytest.raises(ValueError, match=r"see tensor\.resolve_conj\(\)\.resolve_neg\(\)"):
        _offers.offer_all([tensor])
    copy = _offers.readable(tensor)
    assert torch.equal(copy, tensor)
    offered = _offers.offer_all([copy])
    got = torch.empty_like(copy)
    _offers.read(offered.offers, [got]).wait(20)
    assert torch.equal(got, tensor)
    offered.withdraw()


def test_a_forked_child_has_offers_of_its_own() -> None:
    run_ranks(2, f"{RANKS}:forked", timeout=60)


def test_a_wait_has_an_end() -> None:
    run_ranks(2, f"{RANKS}:a_wait_that_is_stopped", timeout=60)


def test_a_process_that_dies_is_named() -> None:
    results = run_ranks(2, f"{RANKS}:a_peer_that_dies", timeout=60, check=False)
    assert results[0].value == "lost", results[0]
    assert results[1].exit_code == -signal.SIGKILL, results[1]


def test_times_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _offers.seconds("join_timeout") == 300
    monkeypatch.setenv("UNISONO_JOIN_TIMEOUT", "7.5")
    assert _offers.seconds("join_timeout") == 7.5
    monkeypatch.setenv("UNISONO_JOIN_TIMEOUT", "none")
    assert _offers.seconds("join_timeout") is None
