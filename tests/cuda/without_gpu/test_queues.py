"""How many hardware queues a process asks CUDA for."""

import os
import subprocess
import sys
import textwrap

import pytest

from unisono import _queues

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def _printed(program: str, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


SAY = f"import os, unisono; print(os.environ.get({VARIABLE!r}))"


def test_importing_asks_for_the_most() -> None:
    assert _printed(SAY) == "32"


def test_what_was_said_stays() -> None:
    assert _printed(SAY, **{VARIABLE: "1"}) == "1"


def test_at_import_torch_nothing_is_asked_for() -> None:
    program = f"""
        import os, sys, types
        from importlib.machinery import ModuleSpec

        torch = types.ModuleType("torch")
        torch.__spec__ = ModuleSpec("torch", None)
        torch.__spec__._initializing = True
        sys.modules["torch"] = torch
        import unisono, unisono._queues
        print(os.environ.get({VARIABLE!r}))
        torch.__spec__._initializing = False
        unisono._queues.widen()
        print(os.environ.get({VARIABLE!r}))
    """
    assert _printed(program).split() == ["None", "32"]


def test_it_is_too_late_when_a_gpu_is_open(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "3").symlink_to("/dev/null")
    assert not _queues._is_cuda_in_use(str(tmp_path))
    (tmp_path / "4").symlink_to("/dev/nvidiactl")
    assert _queues._is_cuda_in_use(str(tmp_path))
    assert not _queues._is_cuda_in_use(str(tmp_path / "none"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(_queues, "_is_cuda_in_use", lambda: True)
    _queues.widen()
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    "ranks, asked", [("2", "8"), ("12", "8"), ("16", "6"), ("96", "None"), ("0", "None")]
)
def test_processes_that_share_a_pool_of_queues_leave_some_to_others(
    tmp_path, ranks: str, asked: str
) -> None:
    def said(pipes: str) -> str:
        return _printed(SAY, CUDA_MPS_PIPE_DIRECTORY=pipes, LOCAL_WORLD_SIZE=ranks)

    (tmp_path / "nvidia-cuda-mps-control.pid").touch()
    assert said(str(tmp_path)) == asked
    assert said(str(tmp_path / "none")) == "32"
