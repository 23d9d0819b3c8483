"""The C header and libunisono, from programs in C and C++: see tests/c."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import cuda_emulator
import pytest
from c_programs import (
    CHECKOUT,
    INCLUDE,
    SOURCES,
    MissingError,
    check_syntax,
    compile_program,
    compiler,
    library,
    run_programs,
)

from unisono._trace.job import Job

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")

HEADERS = sorted(str(path.relative_to(INCLUDE)) for path in INCLUDE.rglob("*.h*"))
SANITIZE = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile a program of tests/c once for each set of flags."""
    folder = tmp_path_factory.mktemp("programs")
    built: dict[tuple[str, ...], Path] = {}

    def program(name: str, *flags: str) -> Path:
        key = (name, *flags)
        if key not in built:
            target = folder / f"{len(built)}-{Path(name).stem}"
            built[key] = compile_program(SOURCES / name, target, *(flags or ("-O1",)))
        return built[key]

    return program


def compilers() -> list[str]:
    return ["gcc", "clang"]


def skip_without(driver: str) -> None:
    try:
        compiler(driver)
    except MissingError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("driver", compilers())
@pytest.mark.parametrize("standard", ["c99", "c11"])
def test_the_header_stands_alone_in_c(driver: str, standard: str) -> None:
    skip_without(driver)
    twice = "#include <unisono.h>\n#include <unisono.h>\nint nothing;\n"
    check_syntax("alone.c", twice, driver, f"-std={standard}", "-Wstrict-prototypes")


@pytest.mark.parametrize("driver, standard", [("gcc", "c++17"), ("clang", "c++20")])
@pytest.mark.parametrize("header", HEADERS)
def test_the_headers_stand_alone_in_cxx(driver: str, standard: str, header: str) -> None:
    compile_headers(driver, standard, [header])


@pytest.mark.parametrize("driver, standard", [("gcc", "c++20"), ("clang", "c++17")])
def test_the_headers_stand_together_in_cxx(driver: str, standard: str) -> None:
    compile_headers(driver, standard, HEADERS)


def compile_headers(driver: str, standard: str, headers: list[str]) -> None:
    driver = {"gcc": "g++", "clang": "clang++"}[driver]
    skip_without(driver)
    twice = "".join(f"#include <{header}>\n" for header in [*headers, *headers]) + "int nothing;\n"
    check_syntax("alone.cpp", twice, driver, f"-std={standard}", "-Wold-style-cast", "-Wshadow")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "name", ["hello", "collectives", "messages", "windows", "bad_input", "threads", "store"]
)
def test_programs(build: Callable[..., Path], tmp_path: Path, name: str, world: int) -> None:
    run_programs(world, [build(f"{name}.c"), tmp_path])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_on_an_emulated_device(build: Callable[..., Path], world: int) -> None:
    try:
        env = cuda_emulator.environment(devices=2)
    except cuda_emulator.MissingError as reason:
        pytest.skip(str(reason))
    run_programs(world, [build("cuda.c")], env=env)


def test_settings(build: Callable[..., Path]) -> None:
    run_programs(1, [build("settings.c")])


def test_a_program_writes_a_trace(build: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    run_programs(3, [build("messages.c"), tmp_path], env={"UNISONO_TRACE": str(folder)})
    job = Job.read(folder)
    assert [process.rank for process in job.processes] == [0, 1, 2]
    names = {operation.name for operation in job.operations()}
    assert {"send", "recv"} <= names
    assert len(job.messages) > 3
    assert all(sent.bytes == received.bytes for sent, received in job.messages)


@pytest.mark.parametrize("what", ["mismatch", "late", "absent"])
def test_failures(build: Callable[..., Path], tmp_path: Path, what: str) -> None:
    run_programs(3, [build("failures.c"), tmp_path, what])


def test_a_rank_that_dies(build: Callable[..., Path], tmp_path: Path) -> None:
    run_programs(3, [build("failures.c"), tmp_path, "dies"], expected={2: -9})


def test_a_rank_that_dies_while_others_wait_for_its_signal(
    build: Callable[..., Path], tmp_path: Path
) -> None:
    run_programs(3, [build("windows.c"), tmp_path, "death"], expected={2: -9})


def test_over_tcp(build: Callable[..., Path], tmp_path: Path) -> None:
    run_programs(3, [build("collectives.c"), tmp_path], env={"UNISONO_TRANSPORT": "tcp"})


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_cxx(build: Callable[..., Path], tmp_path: Path, standard: str, world: int) -> None:
    run_programs(world, [build("wrapper.cpp", f"-std={standard}", "-O1"), tmp_path])


@pytest.mark.parametrize(
    "name, world",
    [
        ("settings.c", 1),
        ("collectives.c", 2),
        ("messages.c", 3),
        ("windows.c", 2),
        ("bad_input.c", 2),
        ("threads.c", 2),
        ("store.c", 2),
        ("wrapper.cpp", 2),
    ],
)
def test_under_sanitizers(
    build: Callable[..., Path], tmp_path: Path, name: str, world: int
) -> None:
    env = {"ASAN_OPTIONS": "detect_stack_use_after_return=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    run_programs(world, [build(name, *SANITIZE), tmp_path], env=env)


def test_under_valgrind(build: Callable[..., Path], tmp_path: Path) -> None:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("valgrind is not installed")
    command = [valgrind, "--error-exitcode=9", "--quiet", "--leak-check=full"]
    command += ["--errors-for-leak-kinds=definite", f"--suppressions={SOURCES}/valgrind.supp"]
    run_programs(2, [*command, build("messages.c"), tmp_path], timeout=120)


def test_a_program_that_links_statically(tmp_path: Path) -> None:
    program, folder = tmp_path / "hello", library()
    command = [compiler("gcc"), "-I", str(INCLUDE), str(SOURCES / "hello.c"), "-o", str(program)]
    command += [str(folder / "libunisono.a"), "-lpthread", "-lm", "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    assert "libunisono" not in linked
    run_programs(2, [program, tmp_path])


def functions_of_the_abi() -> set[str]:
    """The functions that the record of the latest version lists."""
    records = (SOURCES / "abi").glob("*.txt")
    latest = max(records, key=lambda path: [int(number) for number in path.stem.split(".")])
    return {
        found[1]
        for line in latest.read_text().splitlines()
        if not line.startswith("typedef") and (found := re.search(r"\b(unisono_\w+)\(", line))
    }


def test_the_page_names_every_function_and_its_programs_run(tmp_path: Path) -> None:
    page = (CHECKOUT / "docs" / "c.md").read_text()
    named = set(re.findall(r"`(unisono_[a-z_]+)`", page))
    types = set(re.findall(r"\} (unisono_\w+);", (INCLUDE / "unisono.h").read_text()))
    assert named - types - {"unisono_config"} == functions_of_the_abi()
    for language, suffix in (("c", "c"), ("cpp", "cpp")):
        text = re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)
        assert text, language
        source = tmp_path / f"page.{suffix}"
        source.write_text(text[1])
        ended = run_programs(2, [compile_program(source, tmp_path / suffix)])
        if language == "c":
            said = re.search(r"\n\[0\] (rank 0 of 2: .*)", page)
            assert said
            assert ended[0].output == f"{said[1]}\n"


def test_only_the_functions_of_the_abi_are_exported() -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    shared = library() / "libunisono.so"
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", "--with-symbol-versions", shared],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    symbols = [line.split()[-1] for line in listed.splitlines()]
    functions = {symbol for symbol in symbols if not re.fullmatch(r"UNISONO_\d+\.\d+", symbol)}
    assert {name.partition("@")[0] for name in functions} == functions_of_the_abi()
    assert all(re.search(r"@@UNISONO_\d+\.\d+$", name) for name in functions)
    dynamic = subprocess.run(
        ["readelf", "-d", shared], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"SONAME.*libunisono\.so\.\d", dynamic)


def test_the_harness_notices(build: Callable[..., Path], tmp_path: Path) -> None:
    """A rank that fails, and one that hangs, are reported with what they were in."""
    with pytest.raises(AssertionError, match=r"(?s)rank 1: exit code 1.*argument"):
        run_programs(2, ["sh", "-c", "echo argument; exit $RANK"])
    with pytest.raises(AssertionError, match=r"(?s)rank 0: outlived.*thread sleep.*waiting for it"):
        run_programs(1, ["sh", "-c", "echo waiting for it; exec sleep 60"], timeout=0.5)
    assert (CHECKOUT / "include" / "unisono.h").exists()
