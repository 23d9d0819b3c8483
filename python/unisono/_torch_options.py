"""The options for `pg_options=`; a module of its own because the base class needs torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend

from unisono import Options as _Settings


class Options(Backend.Options):
    """Settings of one process group, for ``pg_options=``.

    Parameters
    ----------
    timeout : timedelta or float, optional
        How long an operation may take, as a duration or in seconds; default: what
        ``init_process_group(timeout=...)`` says.
    **settings
        Any of unisono's settings by name, such as ``transport="tcp"``.

    Raises
    ------
    InvalidArgumentError
        There is no such setting (the message names the nearest), or it does not take the value.

    Examples
    --------
    >>> options = unisono.torch.Options(transport="tcp")
    >>> dist.init_process_group("unisono", pg_options=options)
    """

    def __init__(self, timeout: timedelta | float | None = None, **settings: Any) -> None:
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        if timeout is None:
            super().__init__("unisono")
        else:
            super().__init__("unisono", timeout)
            settings["timeout"] = timeout
        self.settings: dict[str, str] = dict(_Settings(**settings))
