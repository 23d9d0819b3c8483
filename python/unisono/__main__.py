"""``python -m unisono``: what is installed, and the table of settings.

``python -m unisono settings`` prints the table alone, as it stands in ``docs/settings.md``;
``python -m unisono --cflags --libs`` what a C compiler needs (see ``unisono._c``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import unisono
from unisono import _c


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


def main(arguments: list[str]) -> int:
    """Print what `arguments` ask for, and return the exit status."""
    if arguments and all(argument in _c.FLAGS for argument in arguments):
        try:
            print(_c.answer(arguments))
        except FileNotFoundError as error:
            print(f"unisono: {error}", file=sys.stderr)
            return 1
    elif arguments == ["settings"]:
        print(table())
    elif not arguments:
        print(f"unisono {unisono.__version__}, in {Path(__file__).resolve().parent}")
        print()
        print("Settings, each by its variable or as a keyword of unisono.Options:")
        for setting in unisono.settings():
            print(f"  {setting.variable}={setting.default}  ({setting.accepts})")
            print(f"      {setting.consequence}")
    else:
        flags = "".join(f"\n  {flag:13} {what}" for flag, what in _c.FLAGS.items())
        print(f"usage: python -m unisono [settings | FLAG ...]{flags}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
