"""Files that `make install` puts below a prefix are found, linked and run from outside the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from c_programs import CHECKOUT, SOURCES, compiler, library, run_programs

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")


def run(*command: str | Path, **variables: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def tool(name: str) -> str:
    """Find a program beside this Python, or on the PATH, or skip the test."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.fixture(scope="module", params=["lib", "lib64/some"])
def prefix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install below one folder and move that: nothing may name it."""
    folder = tmp_path_factory.mktemp("install")
    run("sh", CHECKOUT / "rust/capi/install.sh", library(), folder / "first", request.param)
    return (folder / "first").rename(folder / "moved")


def hello(program: str | Path, folder: Path, **variables: str) -> None:
    folder.mkdir(exist_ok=True)
    run_programs(2, [program, folder], env=variables)


def headers(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.h*")}


def test_every_header_is_installed(prefix: Path) -> None:
    assert headers(prefix / "include") == headers(CHECKOUT / "include")


def test_with_pkg_config(prefix: Path, tmp_path: Path) -> None:
    pkg_config, found = tool("pkg-config"), next(prefix.rglob("pkgconfig"))
    flags = run(
        pkg_config, "--cflags", "--libs", "unisono >= 0.1", PKG_CONFIG_PATH=str(found)
    ).split()
    program, libdir = tmp_path / "hello", found.parent
    run(compiler("gcc"), SOURCES / "hello.c", "-o", program, *flags)
    hello(program, tmp_path / "ranks", LD_LIBRARY_PATH=str(libdir))
    flags = run(pkg_config, "--static", "--libs", "unisono", PKG_CONFIG_PATH=str(found))
    assert "-lpthread" in flags


def test_with_cmake(prefix: Path, tmp_path: Path) -> None:
    cmake, build = tool("cmake"), tmp_path / "build"
    project = tmp_path / "consumer"
    shutil.copytree(SOURCES / "consumer", project)
    found = next(prefix.rglob("cmake"))
    run(
        cmake,
        "-S",
        project,
        "-B",
        build,
        f"-DHELLO={SOURCES / 'hello.c'}",
        f"-Dunisono_DIR={found / 'unisono'}",
    )
    run(cmake, "--build", build)
    for program in ("shared", "static"):
        hello(build / program, tmp_path / program)
    # As the prefix of a system, too; and a version that is not compatible is refused.
    if found.parent.name == "lib":
        again = tmp_path / "again"
        source = f"-DHELLO={SOURCES / 'hello.c'}"
        run(cmake, "-S", project, "-B", again, source, f"-DCMAKE_PREFIX_PATH={prefix}")
    lists = project / "CMakeLists.txt"
    lists.write_text(lists.read_text().replace("unisono 0.1", "unisono 0.2"))
    with pytest.raises(AssertionError, match=r"compatible|not accepted|version"):
        run(cmake, "-S", project, "-B", tmp_path / "other", f"-Dunisono_DIR={found / 'unisono'}")


def test_as_a_wheel_has_it(tmp_path: Path) -> None:
    """`python -m unisono` answers with what compiles, without links and without a search path."""
    package = tmp_path / "unisono"
    ignore = shutil.ignore_patterns("c", "__pycache__", "core-torch-*")
    shutil.copytree(CHECKOUT / "python" / "unisono", package, ignore=ignore)

    def ask(*flags: str) -> str:
        return run(sys.executable, "-m", "unisono", *flags, PYTHONPATH=str(tmp_path)).strip()

    with pytest.raises(AssertionError, match="make c"):
        ask("--libs")
    run("sh", CHECKOUT / "rust/capi/install.sh", "--wheel", library(), package / "c")
    assert not [path for path in package.rglob("*") if path.is_symlink()]
    program = tmp_path / "hello"
    flags = ask("--cflags", "--libs").split()
    run(compiler("gcc"), SOURCES / "hello.c", "-o", program, *flags)
    hello(program, tmp_path / "ranks")
    assert headers(Path(ask("--includedir"))) == headers(CHECKOUT / "include")
    assert not list(package.rglob("*.a"))
    assert (Path(ask("--cmakedir")) / "unisono-config.cmake").exists()
