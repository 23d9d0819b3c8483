"""Compression of tensors, so that less is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is sent for `tensor`, and what ``decompress`` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:  # noqa: ARG004
        """Return the tensor for which `tensor` was sent."""
        return tensor


class FP16Compressor:
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is sent for `tensor`, and what ``decompress`` needs to know: its type."""
        if tensor.is_floating_point():
            return tensor.to(torch.float16), tensor.dtype
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        """Return `tensor` in the type that it had."""
        return tensor.to(context)


class Compression:
    """The compressions that ``compression=`` takes; any class with the same two methods will do."""

    none = NoneCompressor
    fp16 = FP16Compressor
