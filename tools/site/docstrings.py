"""An extension of griffe, which reads the package for the Python reference: what is compiled.

The stub ``_core.pyi`` has the types, and the module that was built the docstrings, which its
sources in Rust give it. Methods that have several forms in the stub have one signature in the
module.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import griffe

STUB = "unisono._core"
ROLE = re.compile(r":\w+:`")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))


class Docstrings(griffe.Extension):
    """Gives the objects of the stub the docstrings of the module, and all of them Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Look the object up in the module."""
        is_value = obj.is_attribute and "property" not in obj.labels
        if obj.path.startswith(f"{STUB}.") and not is_value:
            obj.docstring = docstring(found_at(obj.path), obj)
        elif obj.docstring:
            obj.docstring.value = ROLE.sub("`", obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Make one method of several forms."""
        for name, forms in cls.overloads.items():
            if name in cls.members or not forms or not cls.path.startswith(f"{STUB}."):
                continue
            found = found_at(f"{cls.path}.{name}")
            method = griffe.Function(
                name,
                lineno=forms[0].lineno,
                endlineno=forms[-1].endlineno,
                parameters=parameters(found),
                parent=cls,
            )
            method.docstring = docstring(found, method)
            cls.set_member(name, method)
        in_order = sorted(cls.members.items(), key=lambda member: member[1].lineno or 0)
        cls.members = dict(in_order)


def found_at(path: str) -> Any:
    """Return the object of the module that is built."""
    found: Any = importlib.import_module(STUB)
    for name in path.removeprefix(f"{STUB}.").split("."):
        found = getattr(found, name, None)
    return found


def docstring(found: Any, owner: griffe.Object) -> griffe.Docstring | None:
    """Return the docstring of an object of the module."""
    text = inspect.getdoc(found)
    if not text:
        return None
    unknown: griffe.NumpyOptions = {"warn_unknown_params": False, "warn_missing_types": False}
    return griffe.Docstring(text, parent=owner, parser="numpy", parser_options=unknown)


def parameters(function: Any) -> griffe.Parameters:
    """Return the parameters that a method of the module has."""
    return griffe.Parameters(
        *(
            griffe.Parameter(
                one.name,
                kind=griffe.ParameterKind[one.kind.name.lower()],
                default=None if one.default is one.empty else repr(one.default),
            )
            for one in inspect.signature(function).parameters.values()
        )
    )
