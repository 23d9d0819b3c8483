"""Records what the current minor version promises to Python programs and to other ranks.

    python tools/record_version.py

writes ``tests/python/project/versions/0.1.txt``, one fact a line: public names with their
parameters, one by one, the settings, the entry points, and the numbers that the wire formats begin
with. ``tests/python/project/test_versioning.py`` holds the code against it. Once the minor version
is released (CHANGELOG.md has a section of it) the record only grows. docs/versioning.md says what
it is for; what C programs are promised is in ``tests/c/abi``.

Everything is read from the sources: nothing has to be built or installed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = "python/unisono"
_HOROVOD = "horovod/torch"
# The public modules: whose ``__all__`` counts, and where its names are defined.
_MODULES = {
    "unisono": ("__init__.py", ("_core.pyi", "errors.py")),
    "unisono.torch": ("torch.py", ("torch.py", "_torch_hooks.py", "_torch_options.py")),
    "unisono.horovod.torch": (
        f"{_HOROVOD}/__init__.py",
        tuple(
            f"{_HOROVOD}/{name}.py"
            for name in (
                *(
                    "_call",
                    "_calls",
                    "_compression",
                    "_exchanges",
                    "_join",
                    "_objects",
                    "_optimizer",
                ),
                *("_reductions", "_world"),
            )
        ),
    ),
    "unisono.lightgbm": ("lightgbm.py", ("lightgbm.py",)),
    "unisono.ray": ("ray.py", ("ray.py",)),
    "unisono.horovod.torch.elastic": (f"{_HOROVOD}/elastic.py", (f"{_HOROVOD}/elastic.py",)),
}
# The files of the first messages of ranks, to a store and to each other.
_WIRE = (
    *("engine/message/frame.rs", "engine/collective/header.rs", "transport/handshake/mod.rs"),
    *("transport/shm/segment.rs", "transport/endpoint/address.rs", "rendezvous/unique_id.rs"),
    *("rendezvous/file_store/format.rs", "rendezvous/records/mod.rs", "rendezvous/tcp/wire.rs"),
    "rendezvous/pairing.rs",
)


def minor_version(root: Path = ROOT) -> str:
    """Return the minor version of this checkout: ``0.1``."""
    text = (root / "Cargo.toml").read_text("utf-8")
    return re.search(r'^version = "(\d+\.\d+)\.\d+"', text, re.MULTILINE)[1]


def is_released(root: Path = ROOT) -> bool:
    """Return whether a version of this minor version is out."""
    changelog = (root / "CHANGELOG.md").read_text("utf-8")
    return f"\n## [{minor_version(root)}." in changelog


def record_path(root: Path = ROOT) -> Path:
    """Return where the record of this minor version is."""
    return root / "tests" / "python" / "project" / "versions" / f"{minor_version(root)}.txt"


def recorded_facts(root: Path = ROOT) -> set[str]:
    """Return what the record of this minor version says; nothing if there is none."""
    path = record_path(root)
    return set(path.read_text("utf-8").splitlines()) if path.exists() else set()


def current_facts(root: Path = ROOT) -> set[str]:
    """Return what the sources say."""
    return {
        *_python_facts(root),
        *_setting_facts(root),
        *_entry_point_facts(root),
        *_wire_facts(root),
    }


def broken(recorded: set[str], current: set[str]) -> list[str]:
    """Return what a program that was written for the record will miss, in words."""
    gone = [f"gone or changed: {fact}" for fact in recorded - current]
    callables = {fact.split(" ")[0] for fact in recorded if " -> " in fact}
    known = {fact.split(":")[0] for fact in recorded}
    # An overload may demand what another one leaves open.
    known |= {fact.split(":")[0] for fact in current if " parameter " in fact and " = " in fact}
    demanded = [
        f"callers do not know of it: {fact}"
        for fact in current - recorded
        if fact.endswith(" required")
        and fact.split(" ")[0] in callables
        and fact.split(":")[0] not in known
    ]
    return sorted(gone + demanded)


def new(recorded: set[str], current: set[str]) -> list[str]:
    """Return what is there and not recorded."""
    return sorted(current - recorded)


def _python_facts(root: Path) -> Iterator[str]:
    for module, (listing, sources) in _MODULES.items():
        trees = [ast.parse((root / _PACKAGE / source).read_text("utf-8")) for source in sources]
        definitions = {name: node for tree in trees for name, node in _definitions(tree)}
        for name in _listed(ast.parse((root / _PACKAGE / listing).read_text("utf-8"))):
            if name in definitions:
                yield from _facts(f"{module}.{name}", definitions[name])


def _listed(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError("there is no __all__")


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node


def _facts(name: str, node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield from _class_facts(name, node)
    elif isinstance(node, ast.FunctionDef):
        yield from _function_facts(name, node)
    elif isinstance(node, ast.AnnAssign):
        value = f" = {ast.unparse(node.value)}" if node.value else ""
        yield f"{name}: {ast.unparse(node.annotation)}{value}"
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield f"{name}{ast.unparse(target)} = {ast.unparse(node.value)}"


def _class_facts(name: str, node: ast.ClassDef) -> Iterator[str]:
    yield f"{name} is a class({', '.join(map(ast.unparse, node.bases))})"
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            if not member.name.startswith("_") or member.name.endswith("__"):
                yield from _function_facts(f"{name}.{member.name}", member, is_method=True)
        elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            yield from _facts(f"{name}.{member.target.id}", member)
        elif isinstance(member, ast.Assign):
            yield from _facts(f"{name}.", member)


def _function_facts(name: str, node: ast.FunctionDef, *, is_method: bool = False) -> Iterator[str]:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    returns = ast.unparse(node.returns) if node.returns else "Any"
    if "property" in decorators:
        yield f"{name}: {returns}"
        return
    # Overloads are one function; together they have more than one fact of some parameters.
    yield f"{name} -> {returns}"
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    is_bound = is_method and "staticmethod" not in decorators
    for place, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        if place == 0 and is_bound:
            continue
        how = " by place" if argument in arguments.posonlyargs else ""
        yield _parameter(name, f"{place + 1 - is_bound}{how}", argument, default)
    if arguments.vararg:
        yield f"{name} parameter *{ast.unparse(arguments.vararg)}"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(name, "by name", argument, default)
    if arguments.kwarg:
        yield f"{name} parameter **{ast.unparse(arguments.kwarg)}"


def _parameter(name: str, how: str, argument: ast.arg, default: ast.expr | None) -> str:
    value = f"= {ast.unparse(default)}" if default else "required"
    return f"{name} parameter {how} {ast.unparse(argument)} {value}"


def _setting_facts(root: Path) -> Iterator[str]:
    # A test compares this table with the code.
    text = (root / "docs" / "settings.md").read_text("utf-8")
    for variable in re.findall(r"^\| `(UNISONO_\w+)` \|", text, re.MULTILINE):
        yield f"setting {variable}"


def _entry_point_facts(root: Path) -> Iterator[str]:
    text = (root / "pyproject.toml").read_text("utf-8")
    for table, group in re.findall(
        r'^\[project\.(scripts|entry-points\."[\w.]+")\]\n((?:\S.*\n)*)', text, re.MULTILINE
    ):
        for name in re.findall(r"^(\w+) =", group, re.MULTILINE):
            yield f"entry point {table} {name}"


def _wire_facts(root: Path) -> Iterator[str]:
    for source in _WIRE:
        text = (root / "rust/core/src" / source).read_text("utf-8")
        found = re.findall(r"const (\w*(?:MAGIC|VERSION)|ENTRY|VERDICT): [^=]*= (.*);", text)
        if not found:
            raise ValueError(f"{source} begins with nothing")
        for name, value in found:
            yield f"wire {source} {name} = {value}"


def main() -> None:
    """Write the record."""
    recorded, current = recorded_facts(), current_facts()
    lost = broken(recorded, current)
    for fact in lost:
        print(fact, file=sys.stderr)
    if lost and is_released():
        sys.exit(
            f"{minor_version()} is released and programs rely on this: restore it, or raise the "
            "minor version in Cargo.toml"
        )
    for fact in new(recorded, current):
        print(f"new: {fact}")
    record_path().parent.mkdir(exist_ok=True)
    record_path().write_text("".join(f"{fact}\n" for fact in sorted(current)), "utf-8")


if __name__ == "__main__":
    main()
