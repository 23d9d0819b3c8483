"""Values of command lines that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """Parse 512, 16K, 64M or 1G into bytes."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].isalpha() else (text, 1)
    parsed = int(number) * unit
    if parsed <= 0:
        raise ValueError("a size is positive")
    return parsed


def ranks(text: str) -> int:
    world = int(text)
    if world < 2:
        raise ValueError("a collective needs two ranks or more")
    return world


def one_of(*known: str) -> Callable[[str], str]:
    def parse(name: str) -> str:
        if name not in known:
            raise ValueError(f"{name} is not one of {', '.join(known)}")
        return name

    return parse


def list_of(parse: Callable[[str], object]) -> Callable[[str], tuple]:
    """Parse a list with commas; argparse reports what `parse` refuses."""

    def parse_list(text: str) -> tuple:
        try:
            return tuple(parse(item.strip()) for item in text.split(","))
        except (ValueError, KeyError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error

    return parse_list


def size_name(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
