"""Hooks of mkdocs: the pages of the site that are not files of ``docs/``.

A file outside of ``docs/`` that a page links to becomes a page below ``files/``: Markdown as it is,
anything else as a block of code. So the same links work on the site as in the checkout, and none
leads out of it. The references come besides: Python's by mkdocstrings, and that of the C header
from the folder where ``make docs-c`` has left it.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# No page of docs/ links to these; the navigation does.
IN_NAVIGATION = ("CHANGELOG.md", "CONTRIBUTING.md")
FENCE = re.compile(r"(?ms)^( *)```.*?^\1```$")
# The target of a link or picture, without its fragment.
TARGET = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
CELL, CODE = re.compile(r"(?s)<td.*?</td>"), re.compile(r"(?<=<code>)[^<]*")
C_REFERENCE = Path(os.environ.get("C_REFERENCE", ROOT / "target" / "reference"))

# The order of the Python reference: these, other public names, and modules.
FIRST = ("init", "Communicator", "Work", "ReduceOp", "ANY_SOURCE", "empty", "heap", "Heap")
MODULES = (
    "errors",
    "torch",
    "transports",
    "ray",
    "lightgbm",
    "deepspeed",
    "torchft",
    "vllm",
    "vllm_weights",
    "torchstore",
)


def names() -> list[str]:
    """Return the names of the reference, in order."""
    source = (ROOT / "python" / "unisono" / "__init__.py").read_text("utf-8")
    public = ast.literal_eval(re.search(r"(?s)__all__ = (\[.*?\])", source)[1])
    others = [name for name in public if not name.startswith("__") and not name.endswith("Error")]
    return list(dict.fromkeys([*FIRST, *others, *MODULES]))


PYTHON = """# Python reference

[With NumPy, DLPack and CuPy](../python.md) and [with torch](../torch.md) are the guides; this page
has every name. It is made of the types and the docstrings of the package.

""" + "\n".join(f"::: unisono.{name}" for name in names())
C_IS_THERE = """# C reference

[unisono.h](c/unisono_8h.html) has every function and type of the C header, made of its comments.
[From C and C++](../c.md) is the guide.
"""
C_IS_MISSING = """# C reference

The comments of [unisono.h](../files/include/unisono.h.md) are the reference. `make docs-c docs`
makes pages of them, which this build of the site is without. [From C and C++](../c.md) is the
guide.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of other files, and the references."""
    pages = [file for file in files if file.is_documentation_page()]
    wanted = [*IN_NAVIGATION, "include/unisono.h"]
    for file in pages:
        wanted += outside(f"docs/{file.src_uri}", file.content_string)
    seen = set()
    while wanted:
        path = wanted.pop()
        if path in seen:
            continue
        seen.add(path)
        text = (ROOT / path).read_text("utf-8")
        if path.endswith(".md"):
            wanted += outside(path, text)
        else:
            language = {"py": "python", "h": "c"}.get(
                path.rpartition(".")[2], path.rpartition(".")[2]
            )
            text = f"# {posixpath.basename(path)}\n\n`{path}`\n\n````{language}\n{text}````\n"
        files.append(File.generated(config, uri_of(path), content=text))
    files.append(File.generated(config, "site.css", abs_src_path=str(HERE / "site.css")))
    files.append(File.generated(config, "reference/python.md", content=PYTHON))
    there = (C_REFERENCE / "unisono_8h.html").is_file()
    text = C_IS_THERE if there else C_IS_MISSING
    files.append(File.generated(config, "reference/c.md", content=text))
    for path in C_REFERENCE.rglob("*") if there else ():
        if path.is_file():
            uri = f"reference/c/{path.relative_to(C_REFERENCE).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let the links of a page lead to where their files are on the site."""
    here = page.file.src_uri
    if here.startswith("reference/"):
        return markdown
    origin = here.removeprefix("files/") if here.startswith("files/") else f"docs/{here}"

    def placed(found: re.Match[str]) -> str:
        path = resolved(origin, found[1])
        uri = path.removeprefix("docs/") if path.startswith("docs/") else uri_of(path)
        return posixpath.relpath(uri, posixpath.dirname(here) or ".")

    return outside_of_code(markdown, lambda text: TARGET.sub(placed, text))


def on_page_content(html: str, **_: object) -> str:
    """Let long paths in tables be broken after their slashes and colons."""

    def broken(cell: re.Match[str]) -> str:
        return CODE.sub(lambda code: re.sub(r"(/|::)(?=\w)", r"\1<wbr>", code[0]), cell[0])

    return CELL.sub(broken, html)


def outside(origin: str, markdown: str) -> Iterator[str]:
    """The files of the checkout, but for those of ``docs/``, that a page links to."""
    for target in TARGET.findall(FENCE.sub("", markdown)):
        path = resolved(origin, target)
        if not path.startswith("docs/"):
            yield path


def resolved(origin: str, target: str) -> str:
    """Return the path in the checkout that a link of the file `origin` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def uri_of(path: str) -> str:
    """Return the page of a file outside of ``docs/``."""
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.md"


def outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    """Change all but the blocks of code."""
    parts, end = [], 0
    for block in FENCE.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])
