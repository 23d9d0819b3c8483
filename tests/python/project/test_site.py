"""The site that ``make docs`` builds: no link of it leads nowhere or is fetched from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from launching import ROOT, TARGET

import unisono


class Reader(HTMLParser):
    """The targets of a page's links and the names that links may have as fragments."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.names = {"", "__top"}
        self.text: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "iframe"):
            self.fetched += [given[name] for name in ("href", "src") if name in given]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def site() -> dict[Path, Reader]:
    """All pages of the site, built anew."""
    tools = make(str(TARGET.resolve() / "docs-tools" / ".unisono"))
    if tools.returncode != 0:
        pytest.skip(f"what builds the site could not be installed: {tools.stderr[-300:]}")
    made = make("docs")
    assert made.returncode == 0, made.stdout + made.stderr
    return {path.resolve(): Reader(path) for path in (TARGET / "site").rglob("*.html")}


def make(target: str) -> subprocess.CompletedProcess[str]:
    command = ["make", target, "SETUP=no"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_link_leads_to_a_page_of_the_site(site: dict[Path, Reader]) -> None:
    broken = []
    for path, page in site.items():
        # This one is served for every address.
        for link in page.links if path.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = site.get(target)
            if there is None and target.is_file() and not parts.fragment:
                continue
            if there is None or unquote(parts.fragment) not in there.names:
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_nothing_is_fetched_from_elsewhere(site: dict[Path, Reader]) -> None:
    fetched = [link for page in site.values() for link in page.fetched]
    assert len(fetched) > len(site)
    assert [link for link in fetched if urlsplit(link).netloc] == []


def test_every_page_of_the_docs_is_there(site: dict[Path, Reader]) -> None:
    names = {path.name for path in site}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= names
    index = json.loads((TARGET / "site" / "search" / "search_index.json").read_text("utf-8"))
    assert {"faults.html", "reference/python.html"} <= {page["location"] for page in index["docs"]}


def test_the_reference_has_every_name(site: dict[Path, Reader]) -> None:
    page = next(
        page
        for path, page in site.items()
        if path.name == "python.html" and path.parent.name == "reference"
    )
    public = [name for name in unisono.__all__ if not name.startswith("__")]
    errors = [name for name in public if name.endswith("Error")]
    names = {f"unisono.errors.{name}" if name in errors else f"unisono.{name}" for name in public}
    names |= {
        f"unisono.{owner.__name__}.{name}"
        for owner in (unisono.Communicator, unisono.Work)
        for name in vars(owner)
        if not name.startswith("_")
    }
    assert names - page.names == set()
    # The docstrings of the module that was built, and not only the types of its stub.
    text = re.sub(r"\s+", " ", "".join(page.text))
    assert text.count("Reduce the arrays of all ranks; every rank gets the result") == 2
