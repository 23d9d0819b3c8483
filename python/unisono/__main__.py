"""``python -m unisono``, or ``unisono``: what is installed, and what can be done with it.

``COMMANDS`` has the commands and the module of each; one is imported when it is asked for.
``settings`` prints the table of settings as it stands in ``docs/settings.md``; ``--cflags --libs``
and the like say what a C compiler needs (see ``unisono._c``).
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import unisono
from unisono import _c

#: The commands: in words, and where it is so simple the module with a function of that name, which
#: takes the arguments and the name of this program, and returns the exit status.
COMMANDS = {
    "launch": ("start the ranks of a program, here or on several hosts", None),
    "run": ("run a program with unisono in gloo's place", None),
    "doctor": ("this host, and under a launcher every pair of ranks", "_doctor"),
    "status": ("the ranks on this host, and for whom they wait", "_status"),
    "top": ("the same again and again, with rates", "_status.top"),
    "metrics": ("the same for Prometheus, as OpenMetrics", "_status.metrics"),
    "trace": ("one file of what the ranks did in time, and who was late", "_trace"),
    "bench": ("how fast the operations are here, with checked results", "_bench"),
    "chaos": ("jobs whose ranks are killed and whose connections break", "_chaos"),
    "explain": ("the algorithm that a group would take for a call, and why", "_explain"),
    "simulate": ("a job that is not run, in time, and what a fault would do", "_simulate"),
    "completion": ("a script by which a shell completes this command", "_completion"),
    "build-torch": ("build for a torch that this installation lacks", None),
    "settings": ("print the table of settings, as Markdown", None),
}


def table() -> str:
    """Return every setting as a row of a Markdown table."""
    rows = ["| variable | takes | default | what it does |", "|---|---|---|---|"]
    for setting in unisono.settings():
        agree = " Must be the same on every rank." if setting.must_agree else ""
        rows.append(
            f"| `{setting.variable}` | {setting.accepts} | {setting.default} "
            f"| {setting.consequence}{agree} |"
        )
    return "\n".join(rows)


def overview() -> str:
    """Return what is installed, what it serves here, and the settings."""
    from unisono import _native

    built = _native.doors()
    lines = [
        f"unisono {unisono.__version__}, in {_native.FOLDER}",
        f"  torch here   {_torch_here()}",
        f"  built for    {'torch ' + ', '.join(built) if built else 'no torch'}",
        f"  C library    {_c_library()}",
        f"  CUDA         {_cuda()}",
        "",
        "Settings, each by its variable or as a keyword of unisono.Options:",
    ]
    for setting in unisono.settings():
        lines.append(f"  {setting.variable}={setting.default}  ({setting.accepts})")
        lines.append(f"      {setting.consequence}")
    return "\n".join(lines)


def _torch_here() -> str:
    from unisono import _build_torch, _native

    folder = _build_torch.torch_folder()
    if folder is None:
        return "not installed; NumPy and DLPack arrays need none"
    version = _build_torch.torch_version(folder)
    path = _native.door(version)
    if path is None:
        return f"{version}, not served: `{_native.BUILD}` makes a build for it"
    # In another process: this one may hold the module without a backend already.
    tried = _build_torch.run_python(
        "import pathlib, torch, ctypes; from unisono import _native; "
        f"ctypes.CDLL(_native.to_load(pathlib.Path({str(path)!r})))"
    )
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"{version}, not served: {path} does not load ({why}); try `{_native.BUILD}`"
    return f'{version}, served: init_process_group("unisono") uses {path.name}'


def _c_library() -> str:
    try:
        return (
            f"{_c.answer(['--libdir'])} (--cflags, --libs and --cmakedir say what compilers take)"
        )
    except FileNotFoundError as error:
        return f"not installed: {error}"


def _cuda() -> str:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver here: CPU tensors and arrays alone"
    number = ctypes.c_int()
    # Works before the driver is initialised, and starts nothing.
    driver.cuDriverGetVersion(ctypes.byref(number))
    return f"the NVIDIA driver is here, for CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def _name() -> str:
    return "unisono" if Path(sys.argv[0]).name == "unisono" else "python -m unisono"


def root_parser(
    parsers: Mapping[str, argparse.ArgumentParser] = MappingProxyType({}),
) -> argparse.ArgumentParser:
    """Return the parser of all commands; `parsers` are those of some, with their options."""
    parser = argparse.ArgumentParser(
        prog=_name(), description="Collective communication between the processes of one job."
    )
    parser.add_argument("--version", action="version", version=f"unisono {unisono.__version__}")
    for flag, what in _c.FLAGS.items():
        parser.add_argument(flag, action="append_const", dest="flags", const=flag, help=what)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for command, (told, _) in COMMANDS.items():
        of_it = [parsers[command]] if command in parsers else []
        commands.add_parser(command, help=told, parents=of_it, add_help=not of_it)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Do what `arguments` (the command line's) ask for, and return the exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
    # Each reads its own arguments: of these two, some belong to the program that is started.
    if arguments[:1] == ["launch"]:
        from unisono import _native, _python
        from unisono._launch import launch

        return launch(arguments[1:], _native.load(), _python.note("launch"))
    if arguments[:1] == ["run"]:
        from unisono._run import run

        return run(arguments[1:])
    if arguments and (module := COMMANDS.get(arguments[0], ("", None))[1]):
        command = getattr(import_module(f"unisono.{module}"), arguments[0])
        status: int = command(arguments[1:], _name())
        return status
    chosen = root_parser().parse_args(arguments)
    if chosen.flags:
        try:
            print(_c.answer(chosen.flags))
        except FileNotFoundError as error:
            print(f"unisono: {error}", file=sys.stderr)
            return 1
        return 0
    if chosen.command == "build-torch":
        from unisono import _build_torch

        return _build_torch.build_torch()
    print(table() if chosen.command == "settings" else overview())
    return 0


if __name__ == "__main__":
    # A reader that has seen enough, such as `head`, is no error.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
