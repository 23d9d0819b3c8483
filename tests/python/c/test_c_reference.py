"""The comments of unisono.h: a reference can be built of them, and no parameter is left out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from c_programs import CHECKOUT, INCLUDE, MissingError, check_syntax, compiler

HEADER = (INCLUDE / "unisono.h").read_text("utf-8")
COMMENT = r"/\*\*(?P<comment>(?:[^*]|\*(?!/))*)\*/\n"
FUNCTION = r"(?:const )?\w+\*? (?P<name>unisono_\w+)\((?P<parameters>[^)]*)\);"
CALLBACK = r"typedef void \(\*(?P<name>unisono_\w+)\)\((?P<parameters>[^)]*)\);"
DOCUMENTED = [
    (found["name"], found["comment"], found["parameters"])
    for shape in (FUNCTION, CALLBACK)
    for found in re.finditer(COMMENT + shape, HEADER)
]


def test_every_function_has_a_comment() -> None:
    bare = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    declared = re.findall(r"(?m)^[a-z].*?\b(unisono_\w+)\)?\(", bare)
    assert sorted(declared) == sorted(name for name, *_ in DOCUMENTED)


@pytest.mark.parametrize(
    "comment, parameters", [one[1:] for one in DOCUMENTED], ids=[one[0] for one in DOCUMENTED]
)
def test_every_parameter_is_documented_in_order(comment: str, parameters: str) -> None:
    names = [one.split("*")[-1].split()[-1] for one in parameters.split(",") if one != "void"]
    tags = re.findall(r"(?m)^ \* \\param(?:\[[a-z,]+\])? (\w+)  +\S", comment)
    assert tags == names
    assert comment.count("\\param") == len(names)


def test_a_reference_can_be_built(tmp_path: Path) -> None:
    doxygen = shutil.which("doxygen")
    if doxygen is None:
        pytest.skip("doxygen is not installed")
    done = subprocess.run(
        [doxygen, "docs/Doxyfile"],
        cwd=CHECKOUT,
        env={**os.environ, "OUTPUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    pages = "".join(page.read_text("utf-8") for page in tmp_path.glob("group__*.html"))
    assert {name for name, *_ in DOCUMENTED} <= set(re.findall(r"</span>(unisono_\w+)", pages))


def test_clang_reads_the_same_in_the_comments() -> None:
    try:
        compiler("clang")
    except MissingError as reason:
        pytest.skip(str(reason))
    check_syntax("comments.c", "#include <unisono.h>\n", "clang", "-std=c99", "-Wdocumentation")
