"""``make conda``: a package for conda, made of a wheel by ``tools/conda/recipe.yaml``.

    python tools/build_conda.py [--channel dist/conda] dist/unisono-*.whl

It runs in an environment that has py-rattler-build and py-rattler. The package goes into a channel,
which is a folder, and its index is made anew. Nothing is compiled and nothing downloaded. Tests of
the recipe that want a Python are left to ``tools/test_conda.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from rattler.index import index_fs
from rattler_build import PlatformConfig, RattlerBuildError, RenderConfig, Stage0Recipe
from rattler_build.progress import LogEvent, ProgressCallback

RECIPE = Path(__file__).resolve().parent / "conda" / "recipe.yaml"
# Conda's names of the machines, by those in wheels.
MACHINES = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}
WHEEL = re.compile(
    # That of a release has the tags of free-threaded Pythons as well.
    r"unisono-(?P<version>[^-]+)-cp\d+[\w.]*-abi3[\w.]*-"
    rf"(manylinux_(?P<glibc>\d+_\d+)|linux)_(?P<machine>{'|'.join(MACHINES)})\.whl"
)


class Log(ProgressCallback):
    """Keeps what a build says, for the case that it fails."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_log(self, event: LogEvent) -> None:
        """Take a line."""
        self.lines.append(event.message)


def build(wheel: Path, channel: Path) -> Path:
    """Build the package of a wheel into the channel, and return it."""
    name = WHEEL.fullmatch(wheel.name)
    if name is None or not wheel.exists():
        machines = " or ".join(MACHINES)
        sys.exit(f"conda: {wheel} is no wheel of unisono for {machines} (`make wheel`)")
    # A wheel without that number was linked for the glibc of its builder: this machine's.
    glibc = (name["glibc"] or platform.libc_ver()[1]).replace("_", ".")
    with tempfile.TemporaryDirectory(prefix="unisono-conda-") as folder:
        # The user's cache of packages stays as it is.
        os.environ["RATTLER_CACHE_DIR"] = f"{folder}/cache"
        # Side by side: the wheel's path gets into the package, and by a hash into its name.
        recipe = Stage0Recipe.from_file(shutil.copy(RECIPE, folder))
        shutil.copy(wheel, folder)
        target = PlatformConfig(target_platform=MACHINES[name["machine"]])
        values = {"wheel": wheel.name, "version": name["version"], "glibc": glibc}
        log = Log()
        try:
            (result,) = recipe.run_build(
                output_dir=folder,
                channels=[],
                render_config=RenderConfig(platform=target, extra_context=values),
                progress_callback=log,
            )
        except RattlerBuildError as error:
            sys.exit("\n".join([*log.lines, f"conda: {error}"]))
        (made,) = map(Path, result.packages)
        place = channel / made.parent.name
        place.mkdir(parents=True, exist_ok=True)
        package = Path(shutil.copy(made, place))
    asyncio.run(index(channel))
    return package


async def index(channel: Path) -> None:
    """Write the index of a channel, also of packages that were there."""
    await index_fs(channel, force=True)


def leave(status: int) -> NoReturn:
    """End the process without the last steps of the interpreter.

    Threads of rattler still hold objects of Python by then, and one process in two crashed (issue
    40 of pyo3-async-runtimes).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Build the package that the command line asks for."""
    parser = argparse.ArgumentParser(description="Build unisono's package for conda.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--channel", type=Path, default=Path("dist", "conda"), help="the folder it goes to"
    )
    chosen = parser.parse_args()
    package = build(chosen.wheel.resolve(), chosen.channel.resolve())
    print(f"built {package}, {package.stat().st_size / 1e6:.1f} MB")
    leave(0)


if __name__ == "__main__":
    main()
