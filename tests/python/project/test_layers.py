"""Modules of the Python package that import each other in a circle are few.

`tests/rust/layers.rs` has the same rule for the crates.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "python" / "unisono"
# A circle cannot be read but as a whole.
LARGEST_CIRCLE = 3


def modules() -> dict[str, Path]:
    """Return the files of the package by the names of their modules."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(module: str, path: Path) -> set[str]:
    """Return the names that a module imports at any place, absolute."""
    names = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: -(node.level - 1) or None] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            # A name of a package is that of a module in it, or something that the package has.
            names.update({f"{origin}.{alias.name}" for alias in node.names} | {origin})
    return names


def uses(known: dict[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports; a package only for what it has itself."""
    found = {}
    for module, path in known.items():
        named = imports(module, path) & known.keys() - {module}
        found[module] = {
            name for name in named if not any(it.startswith(f"{name}.") for it in named)
        }
    return found


def reached(arrows: dict[str, set[str]], start: str) -> set[str]:
    far: set[str] = set()
    ahead = [start]
    while ahead:
        new = arrows[ahead.pop()] - far
        far |= new
        ahead.extend(new)
    return far


def test_circles_of_modules_are_small():
    arrows = uses(modules())
    assert sum(map(len, arrows.values())) > 100
    far = {module: reached(arrows, module) for module in arrows}
    circles = {frozenset(to for to in far[module] if module in far[to]) for module in far}
    large = [sorted(circle) for circle in circles if len(circle) > LARGEST_CIRCLE]
    assert not large, f"modules that import each other in a circle: {large}"
