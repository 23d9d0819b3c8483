"""An optimizer whose gradients are those of all ranks.

Gradients are reduced while backward still computes others. All ranks must start the same operations
in the same order, whatever order their gradients come in, so parameters are put into buckets that
are the same on every rank: from the last parameter to the first, as backward meets them. A bucket
is reduced in place, in one operation, once it and all before it are complete; what no gradient came
for by ``synchronize`` counts as zeros.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.horovod.torch._call import Average, ReduceOp, call_of, chosen_op
from unisono.horovod.torch._calls import Handle
from unisono.horovod.torch._compression import Compression
from unisono.horovod.torch._reductions import reduce_together, sparse_allreduce_async
from unisono.horovod.torch._world import ProcessSet, global_process_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# Enough for the cost of an operation not to matter, and little enough to start early.
_BUCKET_BYTES = 4 << 20


class _Bucket:
    """Parameters whose gradients are reduced together."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.waiting = len(self.parameters)
        self.finish: list[Callable[[], None]] = []


class _Reducer:
    """Starts the reductions of one optimizer's gradients and puts their results in place."""

    def __init__(self, passes: int, compression: Any, op: ReduceOp, predivide: float,
                 sparse_as_dense: bool, process_set: ProcessSet) -> None:  # fmt: skip
        self.passes = passes
        self.compression = compression
        self.op = op
        self.predivide = predivide
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.is_active = process_set.included() and process_set.size() > 1
        self.buckets: list[_Bucket] = []
        self.bucket_of: dict[Tensor, _Bucket] = {}
        self.left: dict[Tensor, int] = {}
        self.started = 0

    def watch(self, buckets: Iterable[Sequence[Tensor]]) -> None:
        """Reduce the gradients of these parameters from now on."""
        for parameters in buckets:
            bucket = _Bucket(parameters)
            self.buckets.append(bucket)
            for parameter in parameters:
                self.bucket_of[parameter] = bucket
                self.left[parameter] = self.passes
                if self.is_active:
                    parameter.register_post_accumulate_grad_hook(self._gradient_came)

    def reset(self) -> None:
        """Expect all gradients anew."""
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)
            bucket.finish = []
        self.left = dict.fromkeys(self.left, self.passes)
        self.started = 0

    def _gradient_came(self, parameter: Tensor) -> None:
        if self.left[parameter] == 0:
            raise RuntimeError(
                "gradients were computed more than backward_passes_per_step times before step(); "
                "raise backward_passes_per_step to accumulate them"
            )
        self.left[parameter] -= 1
        if self.left[parameter]:
            return
        self.bucket_of[parameter].waiting -= 1
        while self.started < len(self.buckets) and self.buckets[self.started].waiting == 0:
            self._start(self.buckets[self.started])

    def synchronize(self) -> None:
        """Start what has not been started, and wait for all."""
        if not self.is_active:
            return
        while self.started < len(self.buckets):
            self._start(self.buckets[self.started])
        for bucket in self.buckets:
            for finish in bucket.finish:
                finish()
        self.reset()

    def _start(self, bucket: _Bucket) -> None:
        self.started += 1
        dense = []
        for parameter in bucket.parameters:
            if parameter.grad is None:
                # Other ranks may have one.
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                bucket.finish.append(self._start_sparse(parameter))
            else:
                dense.append(parameter.grad)
        if dense:
            bucket.finish.append(self._start_dense(dense))

    def _start_dense(self, gradients: list[Tensor]) -> Callable[[], None]:
        compressed = [self.compression.compress(gradient) for gradient in gradients]
        handle = self._reduce([tensor for tensor, _ in compressed])

        def finish() -> None:
            reduced = handle.result()
            for gradient, tensor, (_, context) in zip(gradients, reduced, compressed, strict=True):
                whole = self.compression.decompress(tensor, context)
                if whole is not gradient:
                    gradient.copy_(whole)

        return finish

    def _reduce(self, tensors: list[Tensor]) -> Handle:
        divides = self.op is Average
        call = call_of(
            "allreduce",
            tensors,
            op=self.op,
            prescale=1.0 / self.predivide if divides else 1.0,
            postscale=self.predivide if divides else 1.0,
        )
        return reduce_together(tensors, call, self.process_set)

    def _start_sparse(self, parameter: Tensor) -> Callable[[], None]:
        if self.sparse_as_dense:
            dense = parameter.grad.to_dense()
            handle = self._reduce([dense])
        else:
            handle = sparse_allreduce_async(
                parameter.grad, op=self.op, process_set=self.process_set
            )

        def finish() -> None:
            result = handle.result()
            parameter.grad = result[0].to_sparse() if self.sparse_as_dense else result

        return finish


class _DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """What `DistributedOptimizer` puts before the class of the optimizer that it gets."""

    _reducer: _Reducer
    _is_synchronized: bool
    _should_synchronize: bool

    def synchronize(self) -> None:
        """Wait until the gradients are those of all ranks; ``step`` does so by itself."""
        self._reducer.synchronize()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` take the gradients as they are, after ``synchronize`` has been called."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes a gradient is accumulated over before it is reduced."""
        _check_passes(passes)
        self._reducer.passes = passes
        self._reducer.reset()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the gradients of all ranks."""
        if not self._should_synchronize:
            self._is_synchronized = False
            return super().step(closure)
        if closure is not None:
            evaluate = closure

            def reduced() -> Any:
                loss = evaluate()
                self._reducer.synchronize()
                return loss

            closure = reduced
        else:
            if self._is_synchronized:
                warnings.warn(
                    "step() after synchronize() reduces the gradients again; call it within "
                    "skip_synchronize()",
                    stacklevel=2,
                )
            self._reducer.synchronize()
        self._is_synchronized = False
        return super().step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients. RuntimeError while they are being reduced."""
        if self._reducer.started:
            raise RuntimeError(
                "zero_grad() between backward() and step() or synchronize() would change "
                "gradients that are being reduced"
            )
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, and forget reductions under way."""
        self._reducer.reset()
        self._is_synchronized = False
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are reduced like the others."""
        super().add_param_group(param_group)
        added = [one for one in self.param_groups[-1]["params"] if one.requires_grad]
        self._reducer.watch(_in_buckets(added))


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer reduce its gradients over all ranks before each step.

    Parameters
    ----------
    optimizer
        Any optimizer of torch. The result has its class as a base and shares its state.
    named_parameters
        ``model.named_parameters()``. Names need not agree between ranks, for the order of the
        parameters counts; they are checked for being unique and complete.
    compression
        A member of :class:`Compression`.
    backward_passes_per_step
        How many backward passes accumulate into a gradient before it is reduced. Their sum is
        reduced, not their average.
    op
        Average or Sum; Min, Max and Product work as well.
    gradient_predivide_factor
        With Average: gradients are divided by this before the sum, and by size over this after it.
    num_groups
        The older form of `groups`.
    groups
        What is reduced together: the number of groups, or lists of parameters. None leaves it to
        the optimizer.
    sparse_as_dense
        Whether sparse gradients are reduced as dense ones.
    process_set
        The ranks that train together; others take their own gradients.

    Raises
    ------
    ValueError
        Names are missing or not unique, or a number is out of range.
    NotImplementedError
        `op` is Adasum.
    """
    chosen = chosen_op(op)
    _check_passes(backward_passes_per_step)
    if gradient_predivide_factor != 1.0 and chosen is not Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if named_parameters is not None:
        _check_names(list(named_parameters), parameters)
    base = type(optimizer)
    # The same name and module: what looks at the class finds the optimizer that it knows.
    own: Any = type(base.__name__, (_DistributedOptimizer, base), {"__module__": base.__module__})
    distributed = object.__new__(own)
    # A step that a scheduler has put into the instance would be that of the old one.
    distributed.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    )
    reducer = _Reducer(
        backward_passes_per_step, compression, chosen, gradient_predivide_factor, sparse_as_dense,
        process_set,
    )  # fmt: skip
    distributed._reducer = reducer
    distributed._is_synchronized = False
    distributed._should_synchronize = True
    trained = [one for one in parameters if one.requires_grad]
    reducer.watch(_grouped(trained, num_groups if groups is None and num_groups else groups))
    return distributed


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes} is less than 1")


def _check_names(named: list[Any], parameters: list[Tensor]) -> None:
    if any(not isinstance(one, tuple) or len(one) != 2 for one in named):
        raise ValueError("named_parameters takes pairs, as model.named_parameters() gives them")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters has names more than once: {', '.join(twice)}")
    known = {id(parameter) for _, parameter in named}
    unnamed = sum(id(parameter) not in known for parameter in parameters)
    if unnamed:
        raise ValueError(f"named_parameters lacks {unnamed} parameters of the optimizer")


def _grouped(
    parameters: list[Tensor], groups: int | Sequence[Sequence[Tensor]] | None
) -> list[list[Tensor]]:
    if groups is None:
        return _in_buckets(parameters)
    if isinstance(groups, int):
        if groups < 1:
            raise ValueError(f"groups={groups} is less than 1")
        backwards = parameters[::-1]
        rows, more = divmod(len(backwards), groups)
        sizes = [rows + (place < more) for place in range(groups)]
        starts = [sum(sizes[:place]) for place in range(groups)]
        pairs = zip(starts, sizes, strict=True)
        return [backwards[first : first + count] for first, count in pairs if count]
    chosen = [list(group) for group in groups]
    listed = [id(parameter) for group in chosen for parameter in group]
    if len(set(listed)) != len(listed):
        raise ValueError("a parameter appears more than once in groups")
    trained = {id(parameter) for parameter in parameters}
    kept = [[one for one in group if id(one) in trained] for group in chosen]
    alone = [[one] for one in parameters[::-1] if id(one) not in set(listed)]
    return [group for group in kept if group] + alone


def _in_buckets(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Divide parameters, from the last one on; a bucket has one type and device."""
    buckets: list[list[Tensor]] = []
    filled = 0
    for parameter in reversed(parameters):
        last = buckets[-1][0] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (
            parameter.dtype,
            parameter.device,
        )
        size = parameter.numel() * parameter.element_size()
        if not alike or filled + size > _BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += size
    return buckets
