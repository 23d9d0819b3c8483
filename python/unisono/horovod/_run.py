"""Runs a function on ranks that it starts, as Horovod's ``run`` does.

This process leaves the function in a folder and calls ``unisono launch``; each rank reads it there
(``python -m unisono.horovod._run FOLDER``), calls it and leaves its result.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_CALL = "call"
_RESULT = "result-"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    min_num_proc: int | None = None,
    hosts: str | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    executable: str | None = None,
    np: int | None = None,
) -> list[Any]:
    """Call a function on ranks of this host, and return what it returned on each.

    The function joins them by ``hvd.init()``. It may be one of the program itself or a closure.
    Its output appears as that of ``unisono launch``, with the rank before every line.

    Parameters
    ----------
    func
        What each rank calls; pickled by cloudpickle, like its arguments and its result.
    args, kwargs
        Its arguments.
    num_proc, np
        How many ranks to start.
    min_num_proc
        With how many the job goes on where some fail (``unisono launch --min``).
    hosts
        None or this host: ``"localhost:2"``. For several, ``unisono launch --hosts``.
    use_gloo, use_mpi
        Not used.
    executable
        The Python of the ranks; this one by default.

    Returns
    -------
    list
        The result of each rank, in the order of their numbers; with `min_num_proc` of those that
        ended well.

    Raises
    ------
    RuntimeError
        A rank has failed. Its error stands in its output.
    NotImplementedError
        `hosts` names another host.
    ImportError
        cloudpickle is not installed.
    """
    del use_gloo, use_mpi
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            "unisono.horovod.run needs cloudpickle: pip install cloudpickle"
        ) from error
    ranks = num_proc if np is None else np
    _refuse_other_hosts(hosts)
    with tempfile.TemporaryDirectory(prefix="unisono-run-") as name:
        folder = Path(name)
        call = (func, tuple(args), dict(kwargs or {}))
        (folder / _CALL).write_bytes(cloudpickle.dumps(call))
        command = [executable or sys.executable, "-m", "unisono", "launch", "-n", str(ranks)]
        if min_num_proc is not None:
            command += ["--min", str(min_num_proc)]
        command += ["-m", __name__, name]
        # The function may come from a module beside the program.
        modules = os.pathsep.join(entry for entry in sys.path if entry)
        status = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": modules}, check=False
        ).returncode
        if status:
            raise RuntimeError(
                f"unisono.horovod.run: a rank of {ranks} has failed, with exit status {status}; "
                "its error stands in its output"
            )
        left = [folder / f"{_RESULT}{rank}" for rank in range(ranks)]
        return [pickle.loads(path.read_bytes()) for path in left if path.exists()]


def _refuse_other_hosts(hosts: str | None) -> None:
    names = [part.rpartition(":")[0] or part for part in (hosts or "").split(",") if part]
    others = [
        name for name in names if name not in ("localhost", "127.0.0.1", socket.gethostname())
    ]
    if others:
        raise NotImplementedError(
            f"unisono.horovod.run starts ranks on this host alone, not on {', '.join(others)}; for "
            "several hosts start the program with unisono launch --hosts"
        )


def _call(folder: Path) -> None:
    """Call the function on a rank."""
    import cloudpickle

    func, args, kwargs = pickle.loads((folder / _CALL).read_bytes())
    result = cloudpickle.dumps(func(*args, **kwargs))
    (folder / f"{_RESULT}{os.environ['RANK']}").write_bytes(result)


if __name__ == "__main__":
    _call(Path(sys.argv[1]))
