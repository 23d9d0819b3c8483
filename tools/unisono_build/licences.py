"""The licences of the crates inside a wheel's libraries, which ask to be passed on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from unisono_build import parts, toolchain

# The crates that become libraries, and how files with licences are called.
_OURS = ("unisono-module", "unisono-torch", "unisono-capi")
_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "COPYRIGHT", "UNLICENSE")


def collect(build: parts.Build) -> str:
    """Return the licences of all that is not ours, each text once, after what it is for."""
    texts: dict[str, list[str]] = {}
    for package in _linked(build):
        name = f"{package['name']} {package['version']} ({package['license']})"
        folder = Path(package["manifest_path"]).parent
        files = [path for path in sorted(folder.iterdir()) if path.name.upper().startswith(_NAMES)]
        for path in files:
            if path.is_file():
                texts.setdefault(path.read_text(errors="replace").strip(), []).append(name)
        if not files:
            authors = ", ".join(package["authors"]) or "its authors"
            texts.setdefault(f"Copyright {authors}; {package['license']}", []).append(name)
    parted = "\n\n" + "=" * 100 + "\n\n"
    return parted.join("\n".join([*names, "", text]) for text, names in texts.items()) + "\n"


def _linked(build: parts.Build) -> list[dict[str, Any]]:
    command = [toolchain.cargo(), "metadata", "--format-version=1", "--locked", "--all-features"]
    command += build.manifest
    command += ["--filter-platform", build.triple] if build.triple else []
    said = subprocess.run(
        command,
        cwd=toolchain.ANYWHERE,
        env=build.variables,
        capture_output=True,
        text=True,
        check=True,
    )
    metadata = json.loads(said.stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    needs = {node["id"]: node["deps"] for node in metadata["resolve"]["nodes"]}
    waiting = [name for name, package in packages.items() if package["name"] in _OURS]
    seen = set(waiting)
    while waiting:
        for need in needs[waiting.pop()]:
            # Neither what only builds nor what only tests.
            linked = any(kind["kind"] is None for kind in need["dep_kinds"])
            if linked and need["pkg"] not in seen:
                seen.add(need["pkg"])
                waiting.append(need["pkg"])
    others = [packages[name] for name in seen if packages[name]["source"] is not None]
    return sorted(others, key=lambda package: (package["name"], package["version"]))
