"""Builds what a wheel holds beside maturin's part."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from unisono_build import toolchain, torches


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
        own = {"CARGO_TARGET_DIR": str(self.target), **toolchain.NO_PYTHON, **self.environment}
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
