"""unisono as the transport of torchstore, with torchstore's own classes."""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import run_python

if importlib.util.find_spec("torchstore") is None:
    pytest.skip("torchstore is not installed (torchstore 0.1.2)", allow_module_level=True)

import torch
from torchstore.storage_volume import InMemoryStore
from torchstore.transport import Pipe, Request, TensorSlice

import unisono
import unisono.torchstore

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "frameworks" / "torchstore_weights.py"


def test_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])
    lines = run_python(HERE / "torchstore_running.py", str(EXAMPLE), timeout=180).splitlines()
    for step in (1, 2):
        state = f"{step}000000, {[step + each + 0.0 for each in range(3)]}"
        for generator in (0, 1):
            line = f"step {step}, generator {generator}: {state}, in the heap: True"
            assert line in lines, lines


class Volume:
    """torchstore's storage, called as Monarch would: with copies of all arguments."""

    def __init__(self) -> None:
        self.store = InMemoryStore()

    def __getattr__(self, name: str) -> Any:
        async def call_one(*args: Any) -> Any:
            result = await getattr(self.store, name)(*pickle.loads(pickle.dumps(args)))
            return pickle.loads(pickle.dumps(result))

        return SimpleNamespace(call_one=call_one)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Pipe:
    monkeypatch.setattr(Pipe, "create_transport_buffer", None)  # as before, afterwards
    unisono.torchstore.install()
    return Pipe(Volume())


def put(pipe: Pipe, value: Any) -> None:
    asyncio.run(pipe.put_to_storage_volume("key", Request.from_any(value)))


def get(pipe: Pipe, request: Request | None = None) -> Any:
    return asyncio.run(pipe.get_from_storage_volume("key", request or Request()))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6),
        torch.arange(24).reshape(4, 6).t(),
        torch.tensor(3, dtype=torch.bfloat16),
        torch.empty(0, 5),
        torch.ones(3, requires_grad=True),
        (torch.arange(6.0) * (1 + 2j)).conj(),
        torch._neg_view(torch.arange(6.0)),
    ],
    ids=["plain", "transposed", "scalar", "empty", "gradient", "conjugate", "negative"],
)
def test_tensors(pipe: Pipe, tensor: torch.Tensor) -> None:
    put(pipe, tensor)
    stored = pipe.storage_volume.store.kv["key"]
    assert stored.data_ptr() != tensor.data_ptr() or not tensor.numel()
    found = get(pipe)
    torch.testing.assert_close(found, tensor.detach(), rtol=0, atol=0)
    assert not tensor.numel() or found.data_ptr() != stored.data_ptr()


def test_objects(pipe: Pipe) -> None:
    put(pipe, {"step": 3})
    assert get(pipe) == {"step": 3}


def test_into_a_tensor_of_the_caller(pipe: Pipe) -> None:
    put(pipe, torch.arange(12).reshape(3, 4))
    for own in (torch.zeros(3, 4, dtype=torch.long), torch.zeros(4, 3, dtype=torch.long).t()):
        assert get(pipe, Request(tensor_val=own)) is own
        assert torch.equal(own, torch.arange(12).reshape(3, 4))
    with pytest.raises(ValueError, match=r"a tensor of \(3, 4\), .* where \(4, 4\)"):
        get(pipe, Request(tensor_val=torch.zeros(4, 4, dtype=torch.long)))


def test_a_part_of_a_tensor_that_is_stored_in_parts(pipe: Pipe) -> None:
    for row in (0, 1):
        part = TensorSlice((2 * row, 0), (row,), (4, 3), (2, 3), (2,))
        value = torch.arange(6).reshape(2, 3) + 10 * row
        asyncio.run(pipe.put_to_storage_volume("key", Request(value, part)))
    wanted = TensorSlice((2, 0), (1,), (4, 3), (2, 3), (2,))
    assert torch.equal(get(pipe, Request(tensor_slice=wanted)), torch.arange(6).reshape(2, 3) + 10)


def test_offers_end(pipe: Pipe) -> None:
    from unisono import _offers

    before = len(_offers._process.own().regions._counted)
    put(pipe, torch.ones(5))
    get(pipe)
    assert len(_offers._process.own().regions._counted) == before
