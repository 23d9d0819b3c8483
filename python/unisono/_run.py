"""``python -m unisono run PROGRAM``: run what has a launcher of its own, with unisono for gloo.

The program takes the place of this process, so its exit status, its signals and its standard input
are its own. What it starts inherits the environment, and with it ``UNISONO_AS_GLOO``.
"""

from __future__ import annotations

import os
import shutil
import sys

USAGE = """\
usage: unisono run SCRIPT.py [ARGUMENTS]...
       unisono run -m MODULE [ARGUMENTS]...
       unisono run COMMAND [ARGUMENTS]...

Run a program and what it starts with unisono wherever PyTorch is asked for gloo: a script or a
module by this Python, any other command as it is. The same as UNISONO_AS_GLOO=1 before it.

Examples:
  unisono run train.py
  unisono run torchrun --nproc-per-node 4 train.py
  unisono run accelerate launch --cpu --num_processes 2 train.py"""


def run(arguments: list[str]) -> int:
    """Put the program that `arguments` name in the place of this process; return if it cannot."""
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    first = arguments[0]
    if first == "-m" or first.endswith(".py"):
        program, command = sys.executable, [sys.executable, *arguments]
    else:
        found = shutil.which(first)
        if found is None:
            print(f"unisono run: there is no command {first!r}", file=sys.stderr)
            return 127
        program, command = found, arguments
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        print(
            "unisono run: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from finding unisono; unset "
            "it, or call unisono.torch.replace_gloo() in the program",
            file=sys.stderr,
        )
        return 2
    os.environ["UNISONO_AS_GLOO"] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(program, command)
    except OSError as error:
        print(f"unisono run: {program}: {error.strerror}", file=sys.stderr)
        return 126
