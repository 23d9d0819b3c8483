"""``unisono completion SHELL``: a script by which a shell completes the command, made by shtab."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib import import_module

from unisono.__main__ import COMMANDS, root_parser
from unisono._bench.operations import OPERATIONS

SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = """\
examples:
  unisono completion bash > ~/.local/share/bash-completion/completions/unisono
  unisono completion zsh > ~/.zfunc/_unisono      where fpath has ~/.zfunc
  unisono completion fish > ~/.config/fish/completions/unisono.fish
"""
# An option in the help of the launcher, which is a program in Rust.
_OPTION = re.compile(
    r"(?m)^ {2,6}(?:(?P<short>-\w), )?(?P<long>--[\w-]+)(?: <(?P<value>[^>]+)>)?\s+(?P<help>.*)$"
)
# Names of values that are files.
_FILES = ("FILE", "WHERE", "PROGRAM")
# The words that arguments take: the commands say in their own words which others are wrong.
_NAMES = {
    "operations": [*OPERATIONS, "all"],
    "collective": [name for name in OPERATIONS if name != "send_recv"],
}


def command_line(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=f"{name} completion",
        description="Print a script by which a shell completes this command.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return found


def completion(arguments: list[str], name: str) -> int:
    """Print the script, and return the exit status: 1 where shtab is not installed."""
    chosen = command_line(name).parse_args(arguments)
    try:
        import shtab
    except ImportError:
        print(f"{name} completion: it needs shtab: pip install shtab", file=sys.stderr)
        return 1
    parsers = _parsers()
    for parser in parsers.values():
        for action in parser._actions:
            if action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined] # read by shtab
            elif action.dest == "folder":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined] # read by shtab
            elif action.dest in _NAMES:
                action.choices = _NAMES[action.dest]
    root = root_parser(parsers)
    root.prog = "unisono"
    print(shtab.complete(root, shell=chosen.shell))
    return 0


def _parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands that have options, in Python or not."""
    found = {"launch": _launcher(), "run": argparse.ArgumentParser(prog="unisono run")}
    found["run"].add_argument("-m", action="store_true", help="the program is a module")
    for command in ("launch", "run"):
        found[command].add_argument("program", nargs="*", metavar="PROGRAM")
    for command, (_, module) in COMMANDS.items():
        if module:
            make = import_module(f"unisono.{module}").command_line
            found[command] = make("unisono")
    return found


def _launcher() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unisono launch")
    command = [sys.executable, "-m", "unisono", "launch", "--help"]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for option in _OPTION.finditer(usage):
        if option["long"] == "--help":
            continue
        names = [name for name in (option["short"], option["long"]) if name]
        told = option["help"].replace("%", "%%")
        if option["value"]:
            parser.add_argument(*names, metavar=option["value"], help=told)
        else:
            parser.add_argument(*names, action="store_true", help=told)
    return parser
