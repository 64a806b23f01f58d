"""The Dockerfile and the development container name things that exist, and can be built if Docker is installed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest

from tests.structure.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]
IGNORED = (ROOT / ".dockerignore").read_text().split()


def has_docker() -> bool:
    """Whether Docker is installed and its service can fetch images."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "pull", "python:3.12-slim"], capture_output=True).returncode == 0


def all_of(name: str) -> list[str]:
    return [words for instruction, words in INSTRUCTIONS if instruction == name]


def test_the_image_installs_the_project_with_its_pinned_versions_and_starts_its_command():
    (install,) = [words for words in all_of("RUN") if words.startswith("pip")]
    words = shlex.split(install)
    assert words[words.index("-c") + 1] == "/megalite/constraints.txt" and (ROOT / "constraints.txt").is_file()
    extras = re.fullmatch(r"/megalite\[([\w,]+)\]", words[-1])
    assert extras is not None and set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
    assert json.loads(all_of("ENTRYPOINT")[0]) == list(PROJECT["scripts"])
    version = re.match(r"python:(\d+)\.(\d+)-slim AS base", all_of("FROM")[0])
    minimum = re.search(r"(\d+)\.(\d+)", PROJECT["requires-python"])
    assert version is not None and minimum is not None
    assert tuple(map(int, version.groups())) >= tuple(map(int, minimum.groups()))


def test_what_is_copied_is_the_source_alone():
    needed = {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "megalite", "kernels", "configs"}
    assert all_of("COPY") == [". /megalite"] and needed.isdisjoint(IGNORED)
    unversioned = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    assert {".venv", "build", "data", "runs"} <= set(IGNORED) & unversioned and ".git" in IGNORED


def test_the_development_container_is_set_up_by_make():
    content = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert (ROOT / ".devcontainer" / content["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert content["build"]["target"] in {words.rpartition(" AS ")[2] for words in all_of("FROM") if " AS " in words}
    words = shlex.split(content["postCreateCommand"])
    done = subprocess.run([words[0], "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert words[:2] == ["make", "install"] and done.returncode == 0, done.stderr


@pytest.mark.manual
def test_the_image_is_built_and_runs():
    if not has_docker():
        pytest.skip("needs Docker")
    cpu = "PIP_FLAGS=--extra-index-url https://download.pytorch.org/whl/cpu"
    subprocess.run(["docker", "build", "--tag", "megalite-test", "--build-arg", cpu, "."], cwd=ROOT, check=True)
    done = subprocess.run(
        ["docker", "run", "--rm", "megalite-test", "train", "--list_configs"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "quickstart" in done.stdout
