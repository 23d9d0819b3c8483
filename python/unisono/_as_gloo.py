"""Puts unisono in the place of torch's gloo, for programs that say "gloo" and never heard of us.

Programs ask for gloo in three ways, and each has its place here: by name, where torch makes a
group (:func:`_serve_the_name`); by the class ``ProcessGroupGloo``, which some construct and put
into a group themselves (:func:`_serve_the_class`); and by asking whether a backend is of that
class. Values that a program compares, ``get_backend()`` above all, still say gloo.

The groups are CUSTOM to torch's C++ code. It takes what is registered as GLOO for its own class and
reads fields of it.

Requests that only gloo can serve go to gloo itself, and one line says so.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "UNISONO_AS_GLOO"
# Names the socket at which `unisono run` hears that unisono served something: see unisono._run.
MARK = "UNISONO_RUN_MARK"
# The backend that torch looks up where a program says gloo.
_ALIAS = "unisono_as_gloo"
_DEFAULT_TIMEOUT = timedelta(minutes=30)

_making = threading.local()
_said: set[str] = set()
_replaced = False
# Whether this process says that unisono acts; None until it is known.
_speaks: bool | None = None


def replace(asked_by: str) -> None:
    """Put unisono in gloo's place in this process. `asked_by` is named in the line that says so."""
    global _replaced  # noqa: PLW0603
    import torch.distributed as dist

    if _replaced or not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    _serve_the_name(dist, c10d, asked_by)
    _serve_the_class(dist, c10d, asked_by)
    _keep_the_name(c10d)
    _replaced = True
    vllm = sys.modules.get("unisono.vllm")
    if vllm is not None:
        # vLLM has loaded its plug-ins already.
        vllm.register()


def is_active() -> bool:
    """Return whether unisono is in gloo's place in this process."""
    return _replaced


def is_ours(backend: Any) -> bool:
    """Return whether `backend`, of a process group, is unisono's."""
    from torch._C._distributed_c10d import Backend

    return isinstance(backend, Backend) and backend.name() == "unisono"


def _serve_the_name(dist: Any, c10d: Any, asked_by: str) -> None:
    """Have groups that are made by the name gloo made by us.

    torch turns the name into a table of backends by device, and looks there only while it makes a
    group. So it finds our name there and then, and gloo's everywhere else.
    """

    def create(opts: Any, options: Any = None) -> Any:
        from unisono.torch import create_backend

        own = options if hasattr(options, "settings") or hasattr(options, "keys") else None
        speaks = _is_to_speak(opts.store, opts.group_rank)
        backend = create_backend(opts, own)
        _announce(asked_by, speaks)
        return backend

    if hasattr(dist.Backend, "_ensure_backend_registered"):
        # torch 2.14 and newer do so when the name is first used, and would set its type again.
        dist.Backend._ensure_backend_registered("gloo")
    devices = list(dist.Backend.backend_capability["gloo"])
    dist.Backend.register_backend(_ALIAS, create, extended_api=True, devices=devices)
    dist.Backend.backend_type_map["gloo"] = dist.ProcessGroup.BackendType.CUSTOM
    table = c10d.BackendConfig.get_device_backend_map
    make = c10d._new_process_group_helper
    backend_at = list(inspect.signature(make).parameters).index("backend")

    def get_device_backend_map(self: Any) -> dict[str, str]:
        names = table(self)
        if getattr(_making, "depth", 0) == 0:
            return names  # type: ignore[no-any-return]
        return {device: _ALIAS if name == "gloo" else name for device, name in names.items()}

    def _new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        backend = args[backend_at] if len(args) > backend_at else kwargs["backend"]
        names = table(c10d.BackendConfig(backend))
        with _by_our_name(), _of_a_type_of_its_own(dist, names):
            return make(*args, **kwargs)

    c10d.BackendConfig.get_device_backend_map = get_device_backend_map
    c10d._new_process_group_helper = _new_process_group_helper
    _serve_the_recorder(c10d)


@contextlib.contextmanager
def _by_our_name() -> Iterator[None]:
    """Have torch find our name where a group's table of backends says gloo."""
    _making.depth = getattr(_making, "depth", 0) + 1
    try:
        yield
    finally:
        _making.depth -= 1


@contextlib.contextmanager
def _of_a_type_of_its_own(dist: Any, names: dict[str, str]) -> Iterator[None]:
    """See that a group can hold our backend beside another that is CUSTOM, such as nccl2.

    A group keeps one backend of each type: a second CUSTOM one would be put aside for the first.
    Where `names`, the group's table, has another, ours goes by the type of a backend that it has
    not; nothing in torch casts these.
    """
    types = dist.ProcessGroup.BackendType
    known = dist.Backend.backend_type_map
    taken = {known.get(name, types.CUSTOM) for name in names.values() if name != "gloo"}
    before = getattr(_making, "type_by_device", {})
    _making.type_by_device = {}
    if types.CUSTOM in taken:
        others = (types.UCC, types.MPI, types.XCCL)
        free = next((each for each in others if each not in taken), types.CUSTOM)
        _making.type_by_device = {device: free for device, name in names.items() if name == "gloo"}
    try:
        yield
    finally:
        _making.type_by_device = before


def _serve_the_recorder(c10d: Any) -> None:
    """Have the flight recorder and the health check of torch 2.15 know our groups as gloo's.

    gloo records by itself, where torch's tools look unless they are told otherwise, and torch
    attaches nothing to a group that is gloo's by its name.
    """
    attach = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if attach is None:
        return
    import torch
    from torch._C import _distributed_c10d as native

    def takes_gloos_name(pg: Any) -> bool:
        if all(device.type != "cpu" for device in pg._device_types):
            return False
        backend = pg._get_backend(torch.device("cpu"))
        # torch's wrapper for debugging stands in a backend's place, and takes no hooks.
        is_wrapped = isinstance(backend, getattr(native, "_ProcessGroupWrapper", ()))
        return is_ours(backend) and not is_wrapped and hasattr(torch.ops.unisono, "known_as_gloo")

    def _maybe_attach_flight_recorder(pg: Any, config: Any, global_ranks: list[int]) -> None:
        # A group that was made by our name is recorded by it.
        if takes_gloos_name(pg) and "unisono" not in config.get_device_backend_map().values():
            torch.ops.unisono.known_as_gloo(pg.boxed(), global_ranks)
            return
        ours = any(is_ours(pg._get_backend(device)) for device in pg._device_types)
        with _by_our_name() if ours else contextlib.nullcontext():
            attach(pg, config, global_ranks)

    c10d._maybe_attach_flight_recorder = _maybe_attach_flight_recorder
    genuine = getattr(c10d, "HealthCheckHook", None)
    if genuine is None:
        return

    def check_health(pg: Any) -> None:
        if takes_gloos_name(pg):
            torch.ops.unisono.unhealthy_as_gloo(pg.boxed())
        else:
            genuine.attach(pg)

    c10d.HealthCheckHook = SimpleNamespace(attach=check_health)


def _serve_the_class(dist: Any, c10d: Any, asked_by: str) -> None:
    """Have ``ProcessGroupGloo(...)`` make a backend of ours, which passes for one of that class."""
    import torch
    from torch._C import _distributed_c10d as native

    genuine: Any = getattr(c10d, "ProcessGroupGloo", None)
    if genuine is None:
        return  # A torch without gloo: programs cannot construct it there.

    class Likeness(type(native.Backend)):  # type: ignore[misc]
        """The class of ``ProcessGroupGloo``: gloo's own attributes, and our instances."""

        def __new__(
            cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any
        ) -> Any:
            if not any(isinstance(base, Likeness) for base in bases):
                return super().__new__(cls, name, bases, body)
            # A class that adds to gloo's class builds upon gloo.
            _say_once(name, f"the class {name} derives from ProcessGroupGloo and stays on gloo")
            own = tuple(genuine if base is likeness else base for base in bases)
            return type(genuine)(name, own, body, **kwargs)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return _construct(genuine, asked_by, *args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, genuine) or is_ours(instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return subclass is cls or issubclass(subclass, genuine)

        def __getattr__(cls, name: str) -> Any:
            return getattr(genuine, name)

        def __dir__(cls) -> list[str]:
            return dir(genuine)

    body = {"__module__": genuine.__module__, "__doc__": genuine.__doc__}
    likeness = Likeness(genuine.__name__, (native.Backend,), body)
    places: tuple[Any, ...] = (dist, c10d, native)
    for place in places:
        place.ProcessGroupGloo = likeness

    # A program that constructs the class puts the backend into a group of its own, as GLOO.
    types = dist.ProcessGroup.BackendType
    register = native.ProcessGroup._register_backend
    choose = native.ProcessGroup._set_default_backend

    def _register_backend(
        self: Any, device: torch.device, backend_type: Any, backend: Any = None
    ) -> None:
        if backend_type == types.GLOO and is_ours(backend):
            backend_type = types.CUSTOM
            # The program may have chosen the default before there was a backend.
            if self.name() == "gloo":
                choose(self, backend_type)
        elif backend_type == types.CUSTOM:
            by_device = getattr(_making, "type_by_device", {})
            backend_type = by_device.get(device.type, backend_type)
        register(self, device, backend_type, backend)

    def _set_default_backend(self: Any, backend_type: Any) -> None:
        if backend_type == types.GLOO and any(
            is_ours(self._get_backend(device)) for device in self._device_types
        ):
            backend_type = types.CUSTOM
        choose(self, backend_type)

    setattr(native.ProcessGroup, "_register_backend", _register_backend)  # noqa: B010
    setattr(native.ProcessGroup, "_set_default_backend", _set_default_backend)  # noqa: B010


def _keep_the_name(c10d: Any) -> None:
    """Have groups say "gloo" of themselves where torch's C++ code would say "custom"."""
    from torch._C import _distributed_c10d as native
    from torch.nn.parallel import DistributedDataParallel

    tell = native.ProcessGroup.name
    log = DistributedDataParallel._get_ddp_logging_data

    def is_ours_by_gloos_name(group: Any) -> bool:
        backend, _ = c10d._world.pg_map.get(group, (None, None))
        return backend in ("gloo", "undefined") and all(
            is_ours(group._get_backend(device)) for device in group._device_types
        )

    def name(self: Any) -> str:
        told: str = tell(self)
        return "gloo" if told == "custom" and is_ours_by_gloos_name(self) else told

    def _get_ddp_logging_data(self: Any) -> Any:
        data = log(self)
        if data.get("backend_name") == "custom" and is_ours_by_gloos_name(self.process_group):
            data["backend_name"] = "gloo"
            for variable in ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"):
                data[variable.lower()] = os.environ.get(variable, "N/A")
        return data

    setattr(native.ProcessGroup, "name", name)  # noqa: B010
    setattr(DistributedDataParallel, "_get_ddp_logging_data", _get_ddp_logging_data)  # noqa: B010


def _construct(
    genuine: Any,
    asked_by: str,
    store: Any,
    rank: int,
    size: int,
    options: Any = None,
    timeout: timedelta | None = None,
    enable_reconfigure: bool = False,
) -> Any:
    """Make a ``ProcessGroupGloo(...)``. torch takes options or a timeout as the fourth argument."""
    from unisono import _torch_names
    from unisono.torch import create_backend

    if isinstance(options, timedelta):
        options, timeout = None, options
    ranks: list[int] = []
    if options is not None:
        timeout = timeout or options._timeout
        ranks = list(getattr(options, "global_ranks_in_group", []))
        if getattr(options, "_devices", None):
            _say_once(
                "_devices",
                "the devices in gloo's options are not used: UNISONO_INTERFACE says which "
                "interface to take where the one found by itself is wrong",
            )
    speaks = _is_to_speak(store, rank)
    backend = create_backend(
        SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            timeout=timeout or _DEFAULT_TIMEOUT,
            global_ranks_in_group=ranks,
            enable_reconfigure=enable_reconfigure or getattr(options, "enable_reconfigure", False),
        )
    )
    if backend.options is None:
        # torch 2.11. Programs write a name and ranks into what they find here.
        options = options or genuine._Options()
        options._timeout = timeout or _DEFAULT_TIMEOUT
        _torch_names.keep_options(backend, options)
    _announce(asked_by, speaks)
    return backend


def _is_to_speak(store: Any, rank: int) -> bool:
    """Return whether this process says that unisono acts: rank 0 of the first group of the job.

    Asked before the group is made, when no rank can have gone on to another group.
    """
    global _speaks  # noqa: PLW0603
    if rank != 0:
        return False
    if _speaks is None:
        _speaks = _is_first(store)
    return _speaks


def _is_first(store: Any) -> bool:
    """Return whether no other process has asked so, in the store that all groups share."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if dist.is_initialized():
        store = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    # torchrun's store stays when it starts the ranks again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        return bool(store.add(f"unisono/in gloo's place/{attempt}", 1) <= 1)
    except Exception:
        # A store that does not count. It is better said twice than not at all.
        return True


def _announce(asked_by: str, speaks: bool) -> None:
    """Tell the user, and `unisono run`, that unisono acts."""
    if speaks:
        _say_once("acts", f"in gloo's place for the process groups of this program ({asked_by})")
    mark = os.environ.get(MARK)
    if mark and "mark" not in _said:
        _said.add("mark")
        # One word is enough: that others have filled it is no error, and neither that it is gone.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.setblocking(False)
            told.sendto(b"1", f"\0{mark}")


def _say_once(topic: str, text: str) -> None:
    if topic not in _said:
        _said.add(topic)
        print(f"unisono: {text}", file=sys.stderr, flush=True)
