"""Accelerate over unisono on CPUs by its name, and with it transformers' ``Trainer`` and TRL's.

::

    import unisono.accelerate

    unisono.accelerate.install()
    arguments = TrainingArguments(..., use_cpu=True, ddp_backend="unisono")

Accelerate passes on the name of any backend for a GPU. For the CPU it puts gloo or MPI in the place
of each name, and refuses the one that was given because it is another.
"""

from __future__ import annotations

from typing import Any

__all__ = ["install"]

_NAME = "unisono"


def install() -> None:
    """Have Accelerate take ``"unisono"`` as the backend of processes on the CPU.

    Call it before ``Accelerator(cpu=True, ...)`` or ``TrainingArguments(use_cpu=True, ...)``; it
    may be called again. It serves ``InitProcessGroupKwargs(backend="unisono")``, the argument
    ``ddp_backend="unisono"`` and the option ``--ddp_backend unisono``. Where another backend is
    asked for, or none, nothing changes.
    """
    from accelerate.state import PartialState

    if not hasattr(PartialState._prepare_backend, "_unisono_serves"):
        PartialState._prepare_backend = _taking_ours(PartialState._prepare_backend)
    _offer_the_option()


def _taking_ours(other: Any) -> Any:
    """Return ``PartialState._prepare_backend`` that keeps our name for processes on the CPU."""

    def _prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[Any, Any]:
        chosen, kind = other(self, cpu, sagemaker_dp, backend)
        if backend == _NAME and getattr(kind, "value", kind) == "MULTI_CPU":
            return _NAME, kind
        return chosen, kind

    _prepare_backend._unisono_serves = True  # type: ignore[attr-defined]
    return _prepare_backend


def _offer_the_option() -> None:
    """Add our name to the backends that transformers' command lines take, where it is installed."""
    try:
        from transformers import TrainingArguments
    except ImportError:
        return
    choices = TrainingArguments.__dataclass_fields__["ddp_backend"].metadata.get("choices", [])
    if _NAME not in choices:
        choices.append(_NAME)
