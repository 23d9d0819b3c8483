"""unisono as a one-sided transport of torch (2.15 and newer)."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from namespaces import hosts, why_not
from ranks import run_ranks

torch = pytest.importorskip("torch")
transport_api = pytest.importorskip("torch.distributed._transport")

import unisono  # noqa: E402
from unisono.transports import UnisonoRemoteBuffer, UnisonoTransport  # noqa: E402

SIZES = [1, 1000, 70_001, (3 << 20) + 5]
TROUBLE = why_not()


def run(what: str, *args: object, check: bool = True, **env: str) -> list:
    target = f"torch_transports_ranks:{what}"
    return run_ranks(2, target, *args, torch=True, timeout=90, env=env, check=check)


@pytest.fixture
def pair():
    new = transport_api.new_transport
    with new("unisono", "cpu") as left, new("unisono", "cpu") as right:
        left.connect(right.bind())
        right.connect(left.bind())
        yield left, right


def test_torch_finds_it_by_name():
    assert "unisono" in transport_api.available_transports()
    assert UnisonoTransport.supported()
    with transport_api.new_transport("Unisono") as transport:
        assert isinstance(transport, UnisonoTransport)
        assert not transport.connected()
    with pytest.raises(RuntimeError, match="failed to create") as failed:
        transport_api.new_transport("unisono", "meta")
    assert "not of meta" in str(failed.value.__cause__)


def test_what_it_returns_is_what_torch_asks_for(pair):
    left, right = pair
    tensor = torch.arange(8, dtype=torch.float32)
    memory = left.register_memory(tensor)
    remote = right.register_memory(torch.zeros(8)).to_remote_buffer()
    assert isinstance(memory, transport_api.Memory)
    assert isinstance(memory.to_view(), transport_api.MemoryView)
    assert not isinstance(memory.to_view(), transport_api.MutableMemoryView)
    assert isinstance(memory.to_mutable_view(), transport_api.MutableMemoryView)
    assert isinstance(remote, transport_api.RemoteBuffer)
    assert UnisonoRemoteBuffer.deserialize(remote.serialize()) == remote
    work = left.write(memory.to_view(), remote, async_op=True)
    assert isinstance(work, transport_api.Work)
    assert work.wait(timedelta(seconds=20))
    assert work.is_completed()
    assert work.is_success()
    assert work.result() == []
    assert work.exception() is None
    assert work.get_future().wait() == []


def test_values_of_every_type_arrive(pair):
    left, right = pair
    for dtype in [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]:
        sent = torch.randint(0, 2, (3, 5)).to(dtype)
        received = torch.zeros(3, 5, dtype=dtype)
        source, target = left.register_memory(sent), right.register_memory(received)
        assert left.write(source.to_view(), target.to_remote_buffer()) == 0
        torch.testing.assert_close(received, sent)
        back = left.register_memory(torch.zeros(3, 5, dtype=dtype))
        assert left.read(back.to_mutable_view(), target.to_remote_buffer()) == 0
    # The weights of a model, where they lie.
    parameter = torch.nn.Linear(4, 4).weight
    memory = right.register_memory(parameter)
    zeros = left.register_memory(torch.zeros(4, 4))
    left.write(zeros.to_view(), memory.to_remote_buffer())
    assert not parameter.any()


def test_it_works_inside_asyncio(pair):
    left, right = pair
    sent = torch.arange(1000)
    source = left.register_memory(sent)
    targets = [torch.zeros(1000, dtype=torch.int64) for _ in range(5)]
    remote = [right.register_memory(target).to_remote_buffer() for target in targets]

    async def push() -> None:
        await asyncio.gather(
            *(left.write_async(source.to_view(), buffer, timeout=20) for buffer in remote)
        )
        await left.read_async(source.to_mutable_view(), remote[0])
        with pytest.raises(unisono.InvalidArgumentError):
            await left.write_async(source.to_view(), remote[0].part(0, 8))
        await left.close_async(timeout=20)

    asyncio.run(push())
    for target in targets:
        torch.testing.assert_close(target, torch.arange(1000))
    assert not left.connected()


def test_a_callback_may_wait_for_a_later_future(pair):
    left, right = pair
    source = left.register_memory(torch.ones(4 << 20))
    remote = right.register_memory(torch.zeros(4 << 20)).to_remote_buffer()
    works = [left.write(source.to_view(), remote, async_op=True) for _ in range(3)]
    first, second, third = (work.get_future() for work in works)
    results = []
    ended = threading.Event()

    def wait_for(later: torch.futures.Future) -> None:
        results.append(later.wait())
        if len(results) == 2:
            ended.set()

    first.add_done_callback(lambda _: wait_for(second.then(lambda _: third.wait())))
    second.add_done_callback(lambda _: wait_for(third))
    assert ended.wait(30)
    assert results == [[], []]
    # That of a transfer which has ended is done.
    work = left.write(source.to_view(), remote, async_op=True)
    work.wait()
    assert work.get_future().done()


def test_a_future_raises_what_ended_its_transfer(pair):
    left, right = pair
    source = left.register_memory(torch.ones(1 << 20))
    target = right.register_memory(torch.zeros(1 << 20))
    remote = target.to_remote_buffer()
    right.unregister_memory(target)
    future = left.write(source.to_view(), remote, async_op=True).get_future()
    with pytest.raises(ValueError, match="no such memory registered"):
        future.wait()


def test_wrong_calls_say_what_is_wrong(pair):
    left, right = pair
    tensor = torch.arange(100)
    memory = left.register_memory(tensor)
    other = right.register_memory(torch.zeros(100))
    remote = other.to_remote_buffer()
    for wrong, error, says in [
        (lambda: left.register_memory([1]), TypeError, "torch.Tensor"),
        (lambda: left.register_memory(torch.zeros(0)), ValueError, "empty"),
        (lambda: left.register_memory(torch.zeros(4, 4).t()), ValueError, "contiguous"),
        (lambda: left.register_memory(torch.zeros(4, device="meta")), ValueError, "meta"),
        (lambda: memory.to_view(-1), ValueError, "no offset"),
        (lambda: memory.to_view(799, 2), ValueError, "do not lie"),
        (lambda: memory.to_view(801), ValueError, "do not lie"),
        (lambda: left.read(memory.to_view(), remote), TypeError, "to_mutable_view"),
        (lambda: left.write(other.to_view(), remote), TypeError, "no view of memory of this"),
        (lambda: left.write(memory.to_view(), b"x"), TypeError, "not one of unisono's"),
        (lambda: left.write(memory.to_view(), remote), ValueError, "do not fit"),
        (lambda: left.write(memory.to_view(), remote, timeout=-1), ValueError, "timeout"),
        (lambda: left.connect(right.bind()), RuntimeError, "already"),
        (lambda: left.connect(b"x"), RuntimeError, "already"),
        (lambda: right.unregister_memory(memory), TypeError, "not registered by this"),
        (lambda: remote.part(1, 400), ValueError, "do not lie"),
        (lambda: UnisonoRemoteBuffer.deserialize(b"x" * 64), ValueError, "no memory of a peer"),
        (lambda: UnisonoRemoteBuffer.deserialize("x"), TypeError, "bytes"),
        (lambda: UnisonoRemoteBuffer.deserialize(pickle.dumps(1)), ValueError, "64 do"),
    ]:
        with pytest.raises(error, match=says):
            wrong()
    with transport_api.new_transport("unisono") as alone:
        mine = alone.register_memory(tensor)
        with pytest.raises(ValueError, match="not connected"):
            alone.write(mine.to_view(), remote)
        with pytest.raises(ValueError, match="these bytes are no address of a port"):
            alone.connect(b"x")
    with pytest.raises(RuntimeError, match="closed"):
        alone.register_memory(tensor)
    # The refused calls have cost nothing.
    left.write(memory.to_view(0, 400), remote)


def test_registrations_end(pair):
    left, right = pair
    sent, received = torch.ones(64), torch.zeros(64)
    source, target = left.register_memory(sent), right.register_memory(received)
    remote = target.to_remote_buffer()
    right.unregister_memory(target)
    right.unregister_memory(target)
    with pytest.raises(ValueError, match="no such memory registered"):
        left.write(source.to_view(), remote)
    assert not received.any()
    with pytest.raises(ValueError, match="unregistered"):
        target.to_remote_buffer()
    again = right.register_memory(received).to_remote_buffer()
    left.write(source.to_view(), again)
    assert received.all()
    # Another handle of the same memory is the same registration.
    twin = left.register_memory(sent)
    left.unregister_memory(twin)
    with pytest.raises(RuntimeError, match="unregistered"):
        source.to_view()


def test_a_registered_tensor_keeps_its_memory(pair):
    left, right = pair
    received = torch.zeros(1 << 20)
    remote = right.register_memory(received).to_remote_buffer()
    tensor = torch.ones(1 << 20)
    source = left.register_memory(tensor)
    del tensor
    left.write(source.to_view(), remote)
    assert received.all()
    resized = torch.ones(8)
    view = left.register_memory(resized).to_view()
    resized.resize_(1 << 16)
    with pytest.raises(RuntimeError, match="resized"):
        left.write(view, remote)


@pytest.mark.parametrize(
    "env",
    [{}, {"UNISONO_TRANSPORT": "tcp"}, {"UNISONO_TRANSPORT": "tcp", "UNISONO_ENCRYPT": "1"}],
    ids=["shared memory", "tcp", "encrypted"],
)
def test_two_processes_read_and_write_each_other(env):
    run("exchange", SIZES, False, **env)


def test_memory_of_the_heap_is_written_in_place():
    run("exchange", SIZES, True)


@pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")
def test_two_hosts_read_and_write_each_other():
    with hosts() as net:
        # As if each were started by a launcher that knows of its own host alone.
        env = {"MASTER_ADDR": net.address(0), "MASTER_PORT": "29533", "LOCAL_WORLD_SIZE": "1"}
        target = "torch_transports_ranks:exchange"
        run_ranks(
            2, target, SIZES, False, torch=True, timeout=90, env=env, host=net.names.__getitem__
        )


def test_the_target_need_not_call_anything():
    seconds = [result.value for result in run("target_does_nothing")]
    # It holds Python's lock for six.
    assert seconds[0] < 5, seconds


def test_many_small_transfers_are_under_way_at_once():
    run("many")


def test_the_death_of_a_peer_ends_transfers():
    results = run("death", check=False)
    message, seconds = results[0].value
    pid = message.split()[-1]
    assert "closed its port or has ended" in message
    assert f"pid {pid}" in message
    assert seconds < 20


def test_waits_for_a_stopped_peer_end_and_the_transfer_goes_on():
    run("stopped")


def test_memory_in_use_is_not_waited_for_longer_than_asked():
    run("in_use_at_the_target")


def test_the_first_transfer_may_come_late():
    run("late_first_transfer")


def threads() -> Counter[str]:
    """Count this process's threads of transports by name."""
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        # One that ends meanwhile has none.
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text().strip())
    ours = ["unisono-port", "unisono-store", "unisono-target"]
    return Counter(name for name in names if name in ours)


def test_a_close_while_peers_connect_leaves_nothing():
    before = threads()
    for turn in range(100):
        target = transport_api.new_transport("unisono")
        peer = transport_api.new_transport("unisono")
        url = target.bind()

        def connect(peer=peer, url=url) -> None:
            with contextlib.suppress(unisono.Error):
                peer.connect(url, timeout=0.5)

        connects = threading.Thread(target=connect)
        connects.start()
        time.sleep(0.0002 * (turn % 20))
        target.close()
        connects.join()
        peer.close()
    deadline = time.monotonic() + 15
    while threads() - before:
        assert time.monotonic() < deadline, (before, threads())
        time.sleep(0.05)


def test_a_program_may_end_without_closing():
    for result in run("ends_without_closing"):
        assert "Error" not in result.output, result.report()
        assert result.seconds < 20, result.report()
