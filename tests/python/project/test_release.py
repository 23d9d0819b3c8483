"""The parts of a release: workflows that name what exists and have few rights, and the crate."""

from __future__ import annotations

import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import rehearse
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# The job that looks for the release before has all of the history.
DEPTH = {"audit": {"fetch-depth": 0}}
# Steps that publish a version. Only a job with an environment may do so: maintainers approve it.
PUBLISHING = ("pypa/gh-action-pypi-publish", "rust-lang/crates-io-auth-action", "cargo publish")


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text("utf-8"))


def steps_of(workflow: dict) -> list[tuple[str, dict]]:
    return [(name, step) for name, job in workflow["jobs"].items() for step in job["steps"]]


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.name)
def path(request) -> Path:
    return request.param


@pytest.fixture
def workflow(path) -> dict:
    return read(path)


@pytest.fixture
def release() -> dict:
    return read(ROOT / ".github" / "workflows" / "release.yml")


def in_makefile(pattern: str) -> set[str]:
    return set(re.findall(pattern, (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def test_make_targets_and_files_exist(workflow):
    targets = in_makefile(r"^([a-z0-9-]+):")
    commands = "\n".join(step["run"] for _, step in steps_of(workflow) if "run" in step)
    used = set(re.findall(r"\bmake ([a-z0-9-]+)", commands))
    assert used
    assert used <= targets
    files = re.findall(r"(?<![\w/.-])(?:tools|rust|tests|benchmarks)/[\w./-]+", commands)
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_all_python_and_shell_is_linted():
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout: nothing tells which files there are")
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.pyi", "*.sh"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    (kernels,) = in_makefile(r"^KERNELS := (.*)")
    (folders,) = in_makefile(r"^PYTHON_DIRS := (.*)")
    (patterns,) = in_makefile(r"^SHELL_FILES := (.*)")
    folders = folders.replace("$(KERNELS)", kernels).split()
    shell = {path.relative_to(ROOT).as_posix() for p in patterns.split() for path in ROOT.glob(p)}
    files = listed.stdout.split()
    assert {name for name in files if name.endswith(".sh")} <= shell
    python = [name for name in files if not name.endswith(".sh")]
    assert [n for n in python if not any(n.startswith(f"{folder}/") for folder in folders)] == []
    assert [
        folder for folder in folders if not any(n.startswith(f"{folder}/") for n in python)
    ] == []


def test_variables_of_make_exist(workflow):
    commands = [step["run"] for _, step in steps_of(workflow) if "run" in step]
    used = {name for run in commands for name in re.findall(r"make .*?\b([A-Z_]+)=", run)}
    assert used <= in_makefile(r"^([A-Z_]+) \?=")


def test_actions_are_pinned_by_commit_with_their_version(path):
    uses = re.findall(r"uses: (.*)", path.read_text("utf-8"))
    assert uses
    pinned = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [one for one in uses if not pinned.fullmatch(one)] == []
    commits = {}
    for one in uses:
        commits.setdefault(one.split("@")[0], set()).add(one)
    assert [name for name, pins in commits.items() if len(pins) > 1] == []


def test_jobs_have_the_least_rights(workflow):
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        rights = job["permissions"]
        assert "write-all" not in rights, name
        written = {right for right, level in rights.items() if level == "write"}
        assert written <= {"id-token", "attestations"}, name
        assert "timeout-minutes" in job, name
        # A job with such a right runs neither make nor a script of the repository.
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert not written or all(run.startswith("cargo publish") for run in commands), name
        checkouts = [s for s in job["steps"] if s.get("uses", "").startswith("actions/checkout@")]
        for step in checkouts:
            assert step["with"] == {"persist-credentials": False} | DEPTH.get(name, {}), name


def test_only_a_tag_publishes(release):
    # YAML 1.1 reads `on` as true.
    assert release[True] == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}
    publishing = set()
    for name, step in steps_of(release):
        does = step.get("run", "") + step.get("uses", "")
        if any(way in does for way in PUBLISHING) and "--dry-run" not in does:
            publishing.add(name)
    assert publishing == {"pypi", "crates-io"}
    for name, job in release["jobs"].items():
        if "id-token" in job["permissions"]:
            assert job["if"] == "github.event_name == 'push'", name
    assert all(release["jobs"][name]["environment"] == name for name in publishing)
    assert all(release["jobs"][name]["needs"] == "attest" for name in publishing)
    before = {"audit", "build", "sdist", "test", "test-sdist"}
    assert set(release["jobs"]["attest"]["needs"]) == before


def test_every_supported_torch_is_tested_on_every_machine(release):
    source = (ROOT / "tools" / "unisono_build" / "release.py").read_text("utf-8")
    listed = re.search(r"^TORCHES = \((.*)\)", source, re.MULTILINE)[1]
    torches = set(re.findall(r'"([\d.]+)"', listed))
    matrix = release["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["machine"] == release["jobs"]["build"]["strategy"]["matrix"]["machine"]
    for machine in matrix["machine"]:
        tested = {one["torch"] for one in matrix["include"] if one["machine"] == machine}
        assert tested == torches
    classified = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text("utf-8"))
    assert matrix["python"] == classified


def test_all_that_is_published_is_tested(release):
    jobs = release["jobs"]
    built = {"build": "test", "sdist": "test-sdist"}
    for maker, tester in built.items():
        (upload,) = [
            s["with"] for s in jobs[maker]["steps"] if "upload-artifact" in s.get("uses", "")
        ]
        (got,) = [
            s["with"] for s in jobs[tester]["steps"] if "download-artifact" in s.get("uses", "")
        ]
        assert jobs[tester]["needs"] == maker
        assert got["name"] == upload["name"]
    (newest,) = re.findall(
        r"^DEFAULT_TORCH := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE
    )
    (run,) = [s["run"] for s in jobs["test-sdist"]["steps"] if "run" in s]
    assert set(re.findall(r":([\w.]+)", run)) == {newest, "none"}


def test_the_image_of_the_documents_is_that_of_the_workflow(release):
    images = {job["container"] for job in release["jobs"].values() if "container" in job}
    assert len(images) == 1
    document = (ROOT / "docs" / "releasing.md").read_text("utf-8")
    assert set(re.findall(r"\brust:[\w.-]+", document)) == images


def test_a_rehearsal_begins_with_the_same_wheel_under_a_lower_version(tmp_path):
    tag = "cp310-abi3-manylinux_2_28_x86_64"
    info = "unisono-0.1.0.dist-info"
    wheel = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n"
    metadata = "Metadata-Version: 2.4\nName: unisono\nVersion: 0.1.0\n"
    parts = {"unisono/__init__.py": "", f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    for name, text in parts.items():
        part = tmp_path / "tree" / name
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
    rehearse.call("wheel", "pack", "--dest-dir", tmp_path, tmp_path / "tree")
    made = rehearse.lower(tmp_path / f"unisono-0.1.0-{tag}.whl", tmp_path)
    assert made.name == f"unisono-{rehearse.LOWER}-{tag}.whl"
    with zipfile.ZipFile(made) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"unisono-{rehearse.LOWER}.dist-info/METADATA").decode()
    assert f"Version: {rehearse.LOWER}\n" in metadata
    assert {"unisono/__init__.py", rehearse.LEFT_BEHIND} <= names
    assert not any(info in name for name in names)


# The crates that are published, and the folder of each.
CRATES = {
    "unisono-plan": ROOT / "rust" / "plan",
    "unisono-reduce": ROOT / "rust" / "reduce",
    "unisono": ROOT / "rust" / "core",
    "unisono-launch": ROOT / "rust" / "launch",
}


def cargo(*arguments: str) -> str:
    """Run cargo without the network, and return its output."""
    command = [os.environ.get("CARGO", "cargo"), *arguments, "--offline"]
    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_index_takes_the_metadata_of_the_crates():
    packages = {one["name"]: one for one in json.loads(cargo("metadata", "--no-deps"))["packages"]}
    # `publish = false` is an empty list of registries.
    published = {name for name, one in packages.items() if one["publish"] is None}
    assert published == CRATES.keys()
    for name in published:
        one = packages[name]
        assert one["description"], name
        assert one["license"] == "Apache-2.0 OR MIT", name
        assert one["documentation"] == f"https://docs.rs/{name}", name
        assert one["readme"] == "README.md", name
        assert one["rust_version"], name
        # crates.io refuses more than five of either, and keywords of more than 20 characters.
        assert 0 < len(one["keywords"]) <= 5, name
        assert all(len(word) <= 20 for word in one["keywords"]), name
        assert 0 < len(one["categories"]) <= 5, name
        assert "x86_64-unknown-linux-gnu" in one["metadata"]["docs"]["rs"]["targets"], name
        for needed in one["dependencies"]:
            if needed.get("path") and needed["kind"] != "dev":
                assert needed["name"] in published, (name, needed["name"])
                assert needed["req"] == f"={one['version']}", (name, needed["name"])


def test_the_crates_are_packed(tmp_path):
    packages = [word for name in CRATES for word in ("-p", name)]
    target = ["--target-dir", str(tmp_path)]
    cargo("package", "--allow-dirty", "--no-verify", *packages, *target)
    packed = {path.name for path in (tmp_path / "package").glob("*.crate")}
    (version,) = re.findall(r'(?m)^version = "(.*)"$', (ROOT / "Cargo.toml").read_text("utf-8"))
    assert packed == {f"{name}-{version}.crate" for name in CRATES}


def test_the_crates_are_published_together(release):
    packages = " ".join(f"-p {name}" for name in CRATES)
    commands = [step["run"] for _, step in steps_of(release) if "cargo publish" in str(step)]
    assert len(commands) == 2
    assert all(command.endswith(f" {packages}") for command in commands)
    assert f"`cargo publish {packages}`" in (ROOT / "docs" / "releasing.md").read_text("utf-8")


@pytest.fixture
def history(tmp_path) -> Path:
    """A clone of four commits with tags, and a stand-in for the tool."""
    clone = tmp_path / "clone"
    clone.mkdir()
    tool = clone / "tools" / "bin" / "cargo-semver-checks"
    tool.parent.mkdir(parents=True)
    version = re.search(r"(?m)^version=(.*)$", (ROOT / "tools" / "semver.sh").read_text())[1]
    tool.write_text(
        f'#!/bin/sh\n[ "$1" != --version ] || exec echo cargo-semver-checks {version}\n'
        'echo "$@"; exit 100\n'
    )
    tool.chmod(0o755)
    git(clone, "init", "--quiet")
    for tag in ("v0.9.0", "v0.10.0", "other", "v0.11.0"):
        git(clone, "commit", "--quiet", "--allow-empty", "--message", tag)
        git(clone, "tag", tag)
    return clone


def git(clone: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *arguments], cwd=clone, check=True, timeout=20)


def semver(clone: Path, *baseline: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "tools" / "semver.sh", clone / "tools", *baseline]
    return subprocess.run(
        command, cwd=clone, capture_output=True, text=True, timeout=20, check=False
    )


def test_the_crates_are_compared_with_the_release_before(history):
    packages = " ".join(f"--package {name}" for name in CRATES)
    for baseline, expected in ((), "v0.10.0"), (("other",), "other"):
        done = semver(history, *baseline)
        # A finding of the tool is a failure.
        assert done.returncode == 100
        assert done.stdout.splitlines() == [
            f"semver: compared with {expected}",
            f"semver-checks --baseline-rev {expected} {packages}",
        ]
    git(history, "commit", "--quiet", "--allow-empty", "--message", "begin the next version")
    assert semver(history).stdout.startswith("semver: compared with v0.11.0\n")


def test_before_the_first_release_there_is_nothing_to_compare_with(history, tmp_path):
    git(history, "tag", "--delete", "v0.9.0", "v0.10.0")
    done = semver(history)
    assert done.returncode == 0
    assert "there is no release yet" in done.stdout
    # Where the tags may be missing, that is not said.
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{history}", "shallow")
    done = semver(tmp_path / "shallow")
    assert done.returncode == 1
    assert "git fetch --unshallow --tags" in done.stderr


@pytest.mark.parametrize("crate", CRATES)
def test_a_crate_holds_its_sources_and_nothing_from_beside_it(crate):
    files = set(cargo("package", "-p", crate, "--list", "--allow-dirty").split())
    beside = {name for name in files if not name.startswith("src/")}
    assert {"README.md", "LICENSE-APACHE", "LICENSE-MIT", "Cargo.toml"} <= beside
    assert beside <= {
        *("README.md", "LICENSE-APACHE", "LICENSE-MIT", ".cargo_vcs_info.json"),
        *("Cargo.lock", "Cargo.toml", "Cargo.toml.orig"),
    }
    sources = {p.relative_to(CRATES[crate]).as_posix() for p in CRATES[crate].glob("src/**/*.rs")}
    assert "src/lib.rs" in sources
    assert sources <= files
    kernels = "src/transport/cuda/kernels/ptx"
    assert {f"{kernels}/{p.name}" for p in CRATES[crate].glob(f"{kernels}/*")} <= files
