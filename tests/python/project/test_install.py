"""Which build of the extension module a process gets, and how the builds are made."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from unisono_build import assemble, sources, toolchain, torches

CHECKOUT = Path(__file__).resolve().parents[3]
VERSION = "2.17.0"
ASK = """
import sys
from unisono import _native
print(_native.door(sys.argv[1]))
"""
LOAD = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].__version__ = sys.argv[1]
from unisono import _native
try:
    _native.load_for_torch()
except ImportError as error:
    print(error, error.__cause__)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An installed package without doors, with an empty cache beside it."""
    installed = tmp_path / "site" / "unisono"
    ignore = shutil.ignore_patterns("c", "__pycache__", "core-torch-*")
    shutil.copytree(CHECKOUT / "python" / "unisono", installed, ignore=ignore)
    (installed / "source.tar.gz").write_bytes(b"the sources")
    return installed


def python(package: Path, program: str, *arguments: str) -> str:
    home = package.parent.parent / "cache"
    variables = os.environ | {"PYTHONPATH": str(package.parent), "XDG_CACHE_HOME": str(home)}
    command = [sys.executable, "-c", program, *arguments]
    run = subprocess.run(
        command,
        env=variables,
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def cached(package: Path) -> Path:
    """The folder of doors that were built for this installation."""
    (package.parent.parent / "cache" / "unisono").mkdir(parents=True, mode=0o700)
    folder = Path(python(package, "from unisono import _native; print(_native.cache())"))
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "version, name",
    [
        ("2.17.0", "core-torch-2.17.so"),
        ("2.17.3+cu131", "core-torch-2.17.so"),
        ("2.17.0rc2", "core-torch-2.17.so"),
        ("2.17.0.dev20270101+cpu", None),
        ("2.17.0a0+git123", None),
        ("2.1.0", None),
        ("2.170.0", None),
    ],
)
def test_releases_of_a_minor_version_share_a_door(
    package: Path, version: str, name: str | None
) -> None:
    (package / "core-torch-2.17.so").touch()
    wanted = str(package / name) if name else "None"
    assert python(package, ASK, version) == wanted


@pytest.mark.parametrize("version", ["2.17.0", "2.17.0.dev20270101+cpu"])
def test_a_door_that_was_built_here_goes_first(package: Path, version: str) -> None:
    (package / "core-torch-2.17.so").touch()
    made = cached(package) / f"core-torch-{version}.so"
    made.touch()
    assert python(package, ASK, version) == str(made)
    # Another version of unisono has other sources, and so another folder.
    (package / "source.tar.gz").write_bytes(b"other sources")
    assert python(package, ASK, version) != str(made)


def test_what_is_built_is_in_the_package_and_in_the_cache(package: Path) -> None:
    ask = "from unisono import _native; print(_native.doors())"
    assert python(package, ask) == "[]"
    for minor in (9, 17):
        (package / f"core-torch-2.{minor}.so").touch()
    assert python(package, ask) == "['2.9', '2.17']"
    made = cached(package)
    for version in ("2.10.1+local", "2.17.0"):
        (made / f"core-torch-{version}.so").touch()
    assert python(package, ask) == "['2.9', '2.10.1+local', '2.17', '2.17.0']"
    made.parent.chmod(0o770)
    assert python(package, ask) == "['2.9', '2.17']"


def test_nothing_is_run_from_a_folder_that_others_may_write_to(package: Path) -> None:
    made = cached(package) / f"core-torch-{VERSION}.so"
    made.touch()
    assert python(package, ASK, VERSION) == str(made)
    made.parent.parent.chmod(0o770)
    assert python(package, ASK, VERSION) == "None"


def others_may_write_to(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def belongs_to_another(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 65534, -1)


def is_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("spoil", [others_may_write_to, belongs_to_another])
@pytest.mark.parametrize("above", [0, 1, 2, 3])
def test_a_door_is_used_only_if_all_on_the_way_to_it_is_the_users(
    package: Path, spoil: Callable[[Path], None], above: int
) -> None:
    made = cached(package) / f"core-torch-{VERSION}.so"
    made.touch(mode=0o755)
    ask = "from unisono import _native; print(_native.doors())"
    assert python(package, ask) == f"['{VERSION}']"
    spoil([made, *made.parents][above])
    assert python(package, ASK, VERSION) == "None"
    assert python(package, ask) == "[]"
    if above > 1:
        # The error about the missing door says what the user can do.
        assert f" {[made, *made.parents][above]}" in python(package, LOAD, VERSION)


def test_links_may_lead_to_the_cache_and_a_sticky_folder_may_lie_on_the_way(package: Path) -> None:
    made = cached(package) / f"core-torch-{VERSION}.so"
    made.touch(mode=0o755)
    cache = package.parent.parent / "cache"
    shared = package.parent.parent / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    cache.rename(shared / "cache")
    cache.symlink_to(shared / "cache")
    assert python(package, ASK, VERSION) == str(made)
    # Without it, anyone may put another folder into the place of this one.
    shared.chmod(0o777)
    assert python(package, ASK, VERSION) == "None"
    shared.chmod(0o1777)
    is_a_link(made)
    assert python(package, ASK, VERSION) == "None"


# A stand-in for the sources: a module without anything, which builds in a second.
SOURCES = {
    "Cargo.toml": """
[workspace]
members = ["rust/torch"]
resolver = "2"
[workspace.package]
rust-version = "1.60"
""",
    "Cargo.lock": 'version = 3\n[[package]]\nname = "unisono-torch"\nversion = "0.1.0"\n',
    "rust/torch/Cargo.toml": """
[package]
name = "unisono-torch"
version = "0.1.0"
edition = "2021"
[lib]
name = "core_torch"
crate-type = ["cdylib"]
""",
    "rust/torch/src/lib.rs": """
// PyModuleDef, of which all but the count, the name and the size is zero.
static mut DEFINITION: [isize; 13] = [0; 13];
extern "C" {
    fn PyModule_Create2(definition: *mut isize, version: i32) -> *mut u8;
}
#[no_mangle]
pub unsafe extern "C" fn PyInit__core() -> *mut u8 {
    let definition = std::ptr::addr_of_mut!(DEFINITION).cast::<isize>();
    *definition = 1;
    *definition.add(5) = "_core\\0".as_ptr() as isize;
    *definition.add(7) = -1;
    PyModule_Create2(definition, 3)
}
""",
}
TORCH = {
    "__init__.py": "from torch.version import __version__\n",
    "version.py": f"__version__ = '{VERSION}'\n",
    "include/torch/headeronly/version.h": "#define TORCH_VERSION_MAJOR 2\n"
    "#define TORCH_VERSION_MINOR 17\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def lay_traps(folder: Path) -> Path:
    """Write what cargo and rustup obey in a folder above the one they work in; return its log."""
    trap, log = folder / "trap", folder / "trap.log"
    trap.write_text(f'#!/bin/sh\necho "$0 $*" >>{log}\nexit 1\n')
    trap.chmod(0o755)
    (folder / "toolchain" / "bin").mkdir(parents=True)
    for name in ("cargo", "rustc"):
        shutil.copy(trap, folder / "toolchain" / "bin" / name)
    write(
        folder,
        {
            ".cargo/config.toml": f'[build]\nrustc-wrapper = "{trap}"\n',
            "rust-toolchain.toml": f'[toolchain]\npath = "{folder}/toolchain"\n',
            # Of Python, which looks into the folder it is called in.
            "torch.py": f"open({str(log)!r}, 'a').write('torch.py')\n",
        },
    )
    return log


def needs(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")


def cargo_itself() -> str:
    """The cargo that rustup calls, where the one on PATH is rustup's."""
    ask = ["rustc", "--print", "sysroot"]
    said = subprocess.run(ask, cwd="/", capture_output=True, text=True, check=True)
    found = Path(said.stdout.strip()) / "bin" / "cargo"
    return str(found) if found.exists() else "cargo"


def test_the_doors_and_the_c_library_share_one_build_of_the_core() -> None:
    """It is one build if all that it is made of has the same features, whichever is built."""
    needs("cargo")

    def crates(package: str) -> dict[str, str]:
        """The crates of the package, by name and version, with their features."""
        said = subprocess.run(
            ["cargo", "tree", "--locked", "--package", package, "--edges=normal,build",
             "--prefix=none", "--no-dedupe", "--format={p}={f}"],
            cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return dict(line.split("=") for line in said.stdout.splitlines())

    core = crates("unisono").keys()
    assert any(crate.startswith("proc-macro2 ") for crate in core)
    torch = crates("unisono-torch").items()
    for other in ("unisono-module", "unisono-capi"):
        assert {crate for crate, _ in torch ^ crates(other).items()}.isdisjoint(core), other


def test_what_lies_above_the_sources_does_not_reach_the_build(package: Path) -> None:
    needs("cargo", "rustc", "cc", "c++", "strip")
    shared = package.parent.parent
    sources_here = write(shared / "sources", SOURCES)
    shutil.copytree(CHECKOUT / "tools" / "unisono_build", sources_here / "tools" / "unisono_build")
    write(package.parent / "torch", TORCH)
    with tarfile.open(package / "source.tar.gz", "w:gz") as archive:
        for name in ("Cargo.toml", "Cargo.lock", "rust", "tools"):
            archive.add(sources_here / name, name)
    log = lay_traps(shared)
    # A build that was killed.
    write(shared / "cache" / "unisono" / "build-old", {"large": "a gigabyte"})
    for folder in (shared / "cache", shared / "cache" / "unisono"):
        folder.chmod(0o700)
    variables = {
        "PYTHONPATH": str(package.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(shared / "cache"),
        "TMPDIR": str(shared),
        # rustup's cargo tells rustup's rustc which toolchain it has chosen. This one does not.
        "CARGO": cargo_itself(),
    }
    # As the command `unisono` begins. Its folder is not where Python looks for modules.
    begin = "import sys; sys.path.remove(''); from unisono.__main__ import main; sys.exit(main())"
    built = subprocess.run(
        [sys.executable, "-c", begin, "build-torch"],
        env=os.environ | variables, cwd=shared, umask=0,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert not log.exists(), log.read_text()
    assert built.returncode == 0, built.stdout + built.stderr
    (made,) = (shared / "cache" / "unisono").iterdir()
    door = made / f"core-torch-{VERSION}.so"
    assert f"built {door}" in built.stdout
    assert [path.stat().st_mode & 0o777 for path in (door, made)] == [0o755, 0o700]
    # It is loaded by the descriptor of this very file, and says that it is this one.
    load = (
        "import torch, shutil; from unisono import _native; to_load = _native.to_load; "
        f"_native.to_load = lambda path: (to_load(path), shutil.move(path, {str(shared)!r}))[0]; "
        "print(_native.load_for_torch().__file__)"
    )
    assert python(package, load) == str(door)


def test_what_lies_above_the_sources_does_not_reach_what_pip_calls(tmp_path: Path) -> None:
    needs("cargo", "maturin")
    root = tmp_path / "pip" / "unisono-9"
    packed = sources.source_distribution(CHECKOUT, root.name, b"")
    unpacked(packed, root.parent)
    log = lay_traps(tmp_path)
    call = "import sys; sys.path.insert(0, 'tools'); from unisono_build import backend; "
    call += "print(backend.prepare_metadata_for_build_wheel(sys.argv[1]))"
    said = subprocess.run(
        [sys.executable, "-c", call, tmp_path / "made"],
        env=os.environ | {"UNISONO_TORCH_DIR": "none", "PYTHONPATH": ""}, cwd=root,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert not log.exists(), log.read_text()
    assert said.returncode == 0, said.stderr
    info = tmp_path / "made" / said.stdout.strip().splitlines()[-1]
    assert "Name: unisono" in (info / "METADATA").read_text()


def test_a_door_that_does_not_load_says_what_it_was_built_for(package: Path) -> None:
    (package / "core-torch-2.17.so").write_bytes(b"no library")
    said = python(package, LOAD, "2.17.1+local")
    assert "a build for torch 2.17, and it does not load into this torch 2.17.1+local" in said
    assert "`python -m unisono build-torch`" in said
    assert "ELF" not in said
    assert said.endswith("None")


def test_a_torch_without_a_door_gets_the_command_that_makes_one(package: Path) -> None:
    for minor in (9, 12, 100):
        (package / f"core-torch-2.{minor}.so").touch()
    said = python(package, LOAD, VERSION)
    assert said.startswith(
        "unisono is installed for torch 2.9, 2.12, 2.100, and this is torch 2.17.0"
    )
    assert "`python -m unisono build-torch`" in said


def test_names_of_doors_are_the_ones_looked_for(package: Path, tmp_path: Path) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    for version in ("2.17.0", "2.17.0+cpu", "2.17.0rc1", "2.17.0a0+git1", "2.17.0.dev1+cpu"):
        (torch / "version.py").write_text(f"__version__ = '{version}'\n")
        door = package / torches.door_of(torch)
        door.touch()
        assert python(package, ASK, version) == str(door)
        door.unlink()


def test_torch_is_found_where_pip_installs_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(folder: Path, minor: int) -> Path:
        header = folder / "torch" / "include" / "torch" / "headeronly" / "version.h"
        header.parent.mkdir(parents=True)
        header.write_text(f"#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR {minor}\n")
        (folder / "torch" / "lib").mkdir()
        (folder / "torch" / "lib" / "libtorch_cpu.so").touch()
        return folder / "torch"

    environment = make(tmp_path / "environment", 15)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "environment"))
    monkeypatch.delenv("UNISONO_TORCH_DIR", raising=False)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert torches.find() == environment
    old = make(tmp_path / "old", 10)
    assert torches.minor_of(old) is None
    monkeypatch.setenv("UNISONO_TORCH_DIR", str(old))
    assert torches.find() == old
    monkeypatch.setenv("UNISONO_TORCH_DIR", "none")
    assert torches.find() is None


def test_a_missing_compiler_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CARGO", "CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(
        toolchain.MissingError, match=r"cargo, .* and a C compiler .*g\+\+"
    ) as caught:
        toolchain.check(CHECKOUT, torch=tmp_path)
    assert "\n" not in str(caught.value)


def test_an_old_rust_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cargo = tmp_path / "cargo"
    cargo.write_text("#!/bin/sh\necho cargo 1.70.0\n")
    cargo.chmod(0o755)
    monkeypatch.setenv("CARGO", str(cargo))
    with pytest.raises(
        toolchain.MissingError, match=r"needs Rust 1\.89 or newer, and this is 1\.70"
    ):
        toolchain.check(CHECKOUT, torch=None)


def test_a_python_that_is_missing_fails_the_test_of_a_wheel(tmp_path: Path) -> None:
    (tmp_path / "unisono.whl").touch()
    run = subprocess.run(
        [sys.executable, CHECKOUT / "tools" / "test_wheel.py", tmp_path / "unisono.whl",
         "--only", "3.98:none", "--only", "3.99:2.15.0"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr.startswith("not on this machine: the Python of 3.98:none, 3.99:2.15.0")


@pytest.mark.parametrize("required, status", [("no", 0), ("yes", 1)])
def test_what_cannot_be_emulated_is_skipped_unless_it_is_required(
    tmp_path: Path, required: str, status: int
) -> None:
    nothing = {"CARGO": "/nonexistent", "CARGO_TARGET_DIR": str(tmp_path), "REQUIRED": required}
    run = subprocess.run(
        [CHECKOUT / "tools" / "aarch64" / "test.sh", "quick"],
        env=os.environ | nothing, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == status, run.stderr
    assert run.stderr.startswith("aarch64: ")
    assert ("skipped" in run.stdout) == (required == "no")
    assert ("REQUIRED=yes" in run.stderr) == (required == "yes")


def tracked(*folders: str) -> set[str]:
    """The files that git tracks, or a skip where there is no checkout to compare with."""
    command = ["git", "ls-files", "-z", "--", *folders]
    if not (CHECKOUT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout: nothing tells which files there must be")
    said = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    # Removed and not committed yet is removed.
    return {name for name in said.stdout.split("\0") if name and (CHECKOUT / name).is_file()}


def unpacked(packed: bytes, folder: Path) -> set[str]:
    """Unpack an archive into a folder, and return the names of its files."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        arguments = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **arguments)
        return set(archive.getnames())


def test_the_sources_in_the_wheel_are_all_that_a_build_reads(tmp_path: Path) -> None:
    wanted = tracked("rust", "csrc", "include", "Cargo.lock", "Cargo.toml")
    packed = sources.archive_for_the_wheel(CHECKOUT)
    names = unpacked(packed, tmp_path)
    assert wanted <= names
    assert names <= tracked()
    assert sources.archive_for_the_wheel(tmp_path) == packed, "without git it is not the same"


def test_the_source_distribution_is_what_git_tracks(tmp_path: Path) -> None:
    wanted = {f"unisono-9/{name}" for name in tracked()}
    packed = sources.source_distribution(CHECKOUT, "unisono-9", b"Name: unisono\n")
    names = unpacked(packed, tmp_path)
    assert names == wanted | {"unisono-9/PKG-INFO"}
    again = sources.source_distribution(tmp_path / "unisono-9", "unisono-9", b"Name: unisono\n")
    assert again == packed, "without git it is not the same"


def test_what_git_does_not_track_is_not_packed(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git = ["git", "-c", "init.defaultBranch=main", "-C", tmp_path]
    subprocess.run([*git, "init", "--quiet"], check=True)
    (tmp_path / "rust").mkdir()
    (tmp_path / "rust" / "lib.rs").write_text("// tracked\n")
    subprocess.run([*git, "add", "rust/lib.rs"], check=True)
    before = sources.archive_for_the_wheel(tmp_path)
    (tmp_path / "rust" / "notes.txt").write_text("not tracked\n")
    assert sources.archive_for_the_wheel(tmp_path) == before
    assert unpacked(before, tmp_path / "unpacked") == {"rust/lib.rs"}


def test_the_same_parts_give_the_same_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheelfile = pytest.importorskip("wheel.wheelfile", reason="the package wheel packs wheels")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")

    def assembled(root: Path, umask: int, files: list[str]) -> bytes:
        before = os.umask(umask)
        try:
            plain, parts = root / "unisono-9-py3-none-any.whl", root / "parts"
            info = "unisono-9.dist-info"
            (parts / "c").mkdir(parents=True)
            for name in files:
                (parts / "c" / name).write_text(name)
            (parts / "c" / "library.so").chmod(0o755 & ~umask)
            with wheelfile.WheelFile(plain, "w") as archive:
                archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: unisono\n")
                archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
                archive.writestr(f"{info}/sboms/crates.json", f'"path+file://{root}/rust"')
                archive.writestr("unisono/__init__.py", "")
            return assemble.add(plain, parts, root / "out", root).read_bytes()
        finally:
            os.umask(before)

    files = ["library.so", "header.h", "more.h"]
    first = assembled(tmp_path / "here", 0o022, files)
    # In another place, order and time, and where files are for their owner alone.
    again = assembled(tmp_path / "there" / "deeper", 0o077, files[::-1])
    assert again == first
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        modes = {entry.filename: entry.external_attr >> 16 & 0o777 for entry in archive.infolist()}
    assert modes["unisono/c/library.so"] == 0o755
    assert modes["unisono/c/header.h"] == 0o644
