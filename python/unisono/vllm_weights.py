"""unisono as a backend of vLLM's weight transfer: from a trainer to the workers that generate.

vLLM's workers know it by its plug-in (``unisono.vllm``), where vLLM is started with
``--weight-transfer-config '{"backend": "unisono"}'``. The trainer makes its side by vLLM's own
factory::

    from unisono.vllm_weights import TrainerInitInfo
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    trainer = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=0), client=client, source=ModuleSource(model)
    )
    trainer.send_weights()

The trainer offers its tensors and names them to the workers by vLLM's own calls; each worker reads
all of them where they lie, one-sided, at its own pace, into memory of the heap, and loads them.
Nothing is agreed on in advance: no address, no port and no number of workers.
"""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo as _TrainerInitInfo,
)
from vllm.distributed.weight_transfer.base import (
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from unisono import _offers
from unisono.vllm import NAME, register_weights

__all__ = ["TrainerEngine", "TrainerInitInfo", "WorkerEngine", "move_to_heap"]

# The bytes of a part of the weights.
_PART = 1 << 30
# Of tensors in the heap, in bytes.
_ALIGNMENT = 64

register_weights()


@dataclass
class TrainerInitInfo(_TrainerInitInfo):  # type: ignore[misc]
    """The trainer's side of a transfer.

    Parameters
    ----------
    rank
        The number of this process of the trainer. Rank 0 offers the weights; the others iterate
        over their source, as all must for weights that are cut into parts.
    part_bytes
        How many bytes of the weights a worker reads and then loads at a time, and how many the
        trainer holds at the same time where its source makes them (FSDP).
    """

    backend: ClassVar[str] = NAME
    part_bytes: int = _PART


@dataclass
class _InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: an offer says where its tensors are."""


@dataclass
class _UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A part of the weights, in words that JSON has.

    It is offered in runs of bytes, each with one tensor or more, and a tensor has a place: the
    number of its run, and an offset in it.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    places: list[list[int]]
    lengths: list[int]
    url: str
    regions: list[str]

    @classmethod
    def of(
        cls, weights: dict[str, torch.Tensor], runs: _Runs, offers: list[_offers.Offer]
    ) -> _UpdateInfo:
        """Describe these weights, which lie in the runs that are offered."""
        return cls(
            names=list(weights),
            dtype_names=[str(each.dtype).removeprefix("torch.") for each in weights.values()],
            shapes=[list(each.shape) for each in weights.values()],
            places=runs.places,
            lengths=[block.nbytes for block in runs.blocks],
            url=base64.b64encode(offers[0].url).decode(),
            regions=[base64.b64encode(each.region).decode() for each in offers],
        )

    def read(self) -> dict[str, torch.Tensor]:
        """Read the weights of the trainer."""
        url = base64.b64decode(self.url)
        offers = [_offers.Offer(url, base64.b64decode(region)) for region in self.regions]
        blocks = [_offers.empty((length,), torch.uint8) for length in self.lengths]
        _offers.read(offers, blocks).wait()
        found = {}
        each = zip(self.names, self.dtype_names, self.shapes, self.places, strict=True)
        for name, dtype_name, shape, (run, offset) in each:
            dtype = getattr(torch, dtype_name)
            length = math.prod(shape) * dtype.itemsize
            found[name] = blocks[run][offset : offset + length].view(dtype).view(shape)
        return found


class _Runs:
    """Tensors as few runs of bytes: neighbours in one storage, as `move_to_heap` makes them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.places: list[list[int]] = []
        self.blocks: list[torch.Tensor] = []
        storage, first, end = None, 0, 0
        for tensor in tensors:
            own = tensor.untyped_storage()
            # The address of an empty tensor is 0, wherever in a storage it is.
            begin = tensor.storage_offset() * tensor.itemsize
            joins = own.data_ptr() == storage and end <= begin < end + _ALIGNMENT
            if not joins or (begin - first) % tensor.dtype.itemsize:
                storage, first = own.data_ptr(), begin
                self.blocks.append(torch.empty(0, dtype=torch.uint8))
            end = begin + tensor.nbytes
            self.blocks[-1].set_(own, first, (end - first,))
            self.places.append([len(self.blocks) - 1, begin - first])


class WorkerEngine(WeightTransferEngine):  # type: ignore[misc]
    """A worker's side, made by vLLM: reads the weights of a trainer, and loads them."""

    init_info_cls = _InitInfo
    update_info_cls = _UpdateInfo

    def init_transfer_engine(self, init_info: _InitInfo) -> None:
        """Do nothing: a connection is made when the first weights come."""

    def start_weight_update(self) -> None:
        """Prepare the model for weights as a checkpoint has them."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Complete the layers whose weights have come."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read and load a part of the weights."""
        # vLLM's own would wait for a device, which a worker on CPUs does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        """Read and load a part of the weights.

        Raises
        ------
        unisono.Error
            The trainer has gone, or has ended the offer.
        """
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        try:
            weights = update_info.read()
            # A draft model's weights come in several calls.
            with disable_mtp_completeness_check():
                self.model.load_weights(weights.items())
        except BaseException:
            # vLLM takes the update for ended and would not call this: layers for which nothing
            # came get their weights back, and the next update begins with all of them.
            self.finish_weight_update()
            raise

    def shutdown(self) -> None:
        """Do nothing: the connection ends with the trainer's process or this one."""


class TrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side, made by vLLM's ``WeightTransferTrainerFactory``."""

    init_info_cls = TrainerInitInfo

    def __init__(self, part_bytes: int, **common: Any) -> None:
        super().__init__(**common)
        self._part_bytes = part_bytes

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInitInfo, *, client: Any, source: Any = None
    ) -> TrainerEngine:
        """Make the engine, and tell vLLM's workers that there is one.

        Raises
        ------
        ValueError
            There is no source of weights.
        """
        if source is None:
            raise ValueError("unisono's weight transfer needs a WeightSource")
        engine = cls(
            init_info.part_bytes, client=client, source=source, is_sender=init_info.is_sender
        )
        if engine.is_sender:
            client.init_weight_transfer_engine({})
        return engine

    def send_weights(self) -> None:
        """Have all workers read and load the weights; return when they have.

        After an error workers have some of the weights, or none: send all of them again.
        """
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        try:
            self.client.start_weight_update()
            for weights in _parts(self.source, self._part_bytes):
                self._send(weights)
        except BaseException:
            # Workers that have not failed would refuse to start the next update; the others, for
            # which it has ended, refuse this.
            with contextlib.suppress(Exception):
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update()

    def _send(self, weights: dict[str, torch.Tensor]) -> None:
        runs = _Runs(weights.values())
        offered = _offers.offer_all(runs.blocks)
        try:
            self.client.update_weights(asdict(_UpdateInfo.of(weights, runs, offered.offers)))
        finally:
            offered.withdraw()


def move_to_heap(module: torch.nn.Module) -> None:
    """Move the parameters and buffers of a module on the CPU into unisono's heap.

    Other processes of the host read them there faster, in memory that they map, and all at once,
    for they lie in one block. Values and objects stay the same, so optimizers need not know of it.
    """
    tensors = [*module.parameters(), *module.buffers()]
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.numel()]
    places = [0]
    for tensor in tensors:
        places.append(places[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
    block = _offers.empty((places[-1],), torch.uint8)
    for tensor, place in zip(tensors, places, strict=False):
        moved = block[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = moved.copy_(tensor.detach())


def _parts(source: Any, limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights in parts of up to `limit` bytes, on the CPU and contiguous."""
    part: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in source:
        if part and held + tensor.nbytes > limit:
            yield part
            part, held = {}, 0
        part[name] = _offers.readable(tensor.detach())
        held += tensor.nbytes
    if part:
        yield part
