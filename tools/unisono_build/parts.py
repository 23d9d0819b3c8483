"""Builds what a wheel holds beside maturin's part."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from unisono_build import toolchain, torches


@dataclass(frozen=True)
class FreeThreaded:
    """Pythons without a GIL that one module serves, since they load none for abi3.

    Attributes
    ----------
    tag
        The wheel's tag for them, without the platform.
    name
        The end of the module's name, by which they find it before any other.
    abi
        Their version and ABI, as PyO3 is told them: none of them takes part in the build.
    """

    tag: str
    name: str
    abi: str


FREE_THREADED = (
    FreeThreaded(
        "cp314-cp314t",
        "cpython-314t-{machine}-linux-gnu",
        "version=3.14\ntarget_abi=CPython-free_threaded-3.14\nbuild_flags=Py_GIL_DISABLED\n",
    ),
    # The first stable ABI for them, which later ones have as well.
    FreeThreaded("cp315-abi3t", "abi3t", "version=3.15\ntarget_abi=CPython-abi3t-3.15\n"),
)


@dataclass
class Build:
    """How cargo is run.

    Attributes
    ----------
    root
        The folder of the workspace.
    target
        Where cargo puts what it builds. Builds for several torches share it, and so the runtime.
    triple
        The platform to build for; None is this one.
    environment
        Variables besides those of this process.
    """

    root: Path
    target: Path
    triple: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The whole environment of a command of this build."""
        own = {"CARGO_TARGET_DIR": str(self.target), **self.environment}
        variables = toolchain.variables() | own
        # cargo reads an empty one as a platform without a name.
        return variables | ({"CARGO_BUILD_TARGET": self.triple} if self.triple else {})

    @property
    def results(self) -> Path:
        """The folder of what a release build made."""
        return self.target / (self.triple or "") / "release"

    @property
    def manifest(self) -> list[str]:
        """The arguments that name the workspace to cargo, which does not work in its folder."""
        return ["--manifest-path", str(self.root / "Cargo.toml")]

    def run(self, command: list[str], **more: str) -> None:
        """Run `command`, which gets no relative paths; its output goes to standard error."""
        # A front end may read this process's standard output.
        subprocess.run(
            command,
            cwd=toolchain.ANYWHERE,
            env=self.variables | more,
            stdout=sys.stderr,
            check=True,
        )


def torch_door(build: Build, torch: Path, folder: Path, name: str | None = None) -> Path:
    """Build the extension module for the torch in the folder `torch`, into `folder`."""
    if torches.minor_of(torch) is None:
        raise SystemExit(
            f"unisono: {torch} does not hold a torch that can be built for: one of "
            f"2.{torches.OLDEST_MINOR} or newer, with its headers"
        )
    command = [toolchain.cargo(), "build", "--release", "--locked", "-p", "unisono-torch"]
    command += build.manifest
    door = torches.door_of(torch)
    build.run(command, UNISONO_TORCH_DIR=str(torch.absolute()), UNISONO_DOOR=door)
    return _strip(build, build.results / "libcore_torch.so", folder / (name or door))


def module_of(python: FreeThreaded, machine: str) -> str:
    """Return the file name of the module for these Pythons."""
    return f"_core.{python.name.format(machine=machine)}.so"


def free_threaded_modules(build: Build, folder: Path) -> None:
    """Build the module that knows no torch for every Python without a GIL, into `folder`."""
    command = [toolchain.cargo(), "build", "--release", "--locked", "-p", "unisono-module"]
    command += build.manifest
    machine = build.triple.split("-")[0] if build.triple else platform.machine()
    for python in FREE_THREADED:
        name = module_of(python, machine)
        # Of the same name for each build, since cargo asks whether it has changed.
        told = build.target / "pyo3" / name
        told.parent.mkdir(parents=True, exist_ok=True)
        told.write_text(python.abi)
        build.run(command, PYO3_CONFIG_FILE=str(told))
        _strip(build, build.results / "lib_core.so", folder / name)


def c_library(build: Build, folder: Path) -> Path:
    """Build libunisono.so and install it with its headers below ``folder/c``, as a wheel has it."""
    built = build.target / (build.triple or "") / "c"
    scripts = build.root / "rust" / "capi"
    build.run([str(scripts / "build.sh"), str(built)])
    build.run([str(scripts / "install.sh"), "--wheel", str(built), str(folder / "c")])
    return folder / "c"


def _strip(build: Build, library: Path, stripped: Path) -> Path:
    stripped.parent.mkdir(parents=True, exist_ok=True)
    # Never in place: a process may have it mapped.
    new = stripped.with_name(stripped.name + ".new")
    build.run(
        [build.variables.get("STRIP", "strip"), "--strip-unneeded", "-o", str(new), str(library)]
    )
    # Whatever the umask: it is code, and for its owner alone to change.
    new.chmod(0o755)
    new.replace(stripped)
    return stripped
