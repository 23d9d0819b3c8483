"""Draw the output of a command, as a terminal shows it, in the form of an SVG.

    tools/screenshot.py [--columns N] FILE.svg COMMAND [ARGUMENTS]...

The command runs on a terminal of its own with that many columns, to its end. The pictures of
docs/images that show commands are made by it; the documents have the commands beside them.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

# As rich's own, without fonts from elsewhere.
FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px;
 line-height: {line_height}px; white-space: pre; }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def output(command: list[str], columns: int) -> str:
    """Run the command on a terminal; returns what it printed there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, env=environment) as process:
        os.close(theirs)
        printed = b""
        try:
            while part := os.read(ours, 1 << 16):
                printed += part
        except OSError:
            pass  # The other side has closed it.
    if process.returncode:
        sys.exit(f"{shlex.join(command)} ended with {process.returncode}")
    return printed.decode().replace("\r\n", "\n")


def draw(command: list[str], printed: str, columns: int) -> str:
    """Return the picture."""
    console = Console(
        record=True, file=io.StringIO(), width=columns, force_terminal=True, highlight=False
    )
    console.print(Text(f"$ {shlex.join(command)}", style="bold"))
    console.print(Text.from_ansi(printed.rstrip("\n")))
    return console.export_svg(title=command[0], code_format=FORMAT, unique_id=command[1])


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", type=int, default=110)
    parser.add_argument("file", type=Path, metavar="FILE.svg")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    printed = output(chosen.command, chosen.columns)
    chosen.file.write_text(draw(chosen.command, printed, chosen.columns))


if __name__ == "__main__":
    main()
