"""The distribution: its name, its readme, its extras, and what its source archive holds."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("ssd", "tests", "bench", "deploy", "scripts", "docs", ".ci", ".github")


def texts() -> list[Path]:
    """What tells people how to install something: code, scripts, deployment, docs."""
    kinds = (".py", ".md", ".sh", ".service", ".yaml", ".yml")
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*")]
    found = [file for file in files if file.suffix in kinds or file.name == "Dockerfile"]
    return [*found, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile"))]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with PKG-INFO (the metadata) and SOURCES.txt (the files of a source distribution)."""
    pytest.importorskip("setuptools", minversion="77")
    out = tmp_path_factory.mktemp("egg")
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(out)], cwd=ROOT, check=True)
    [folder] = out.iterdir()
    return folder


@pytest.fixture
def metadata(built: Path) -> Message:
    return Parser().parsestr((built / "PKG-INFO").read_text())


def test_the_package_is_ssd_engine_and_imported_as_ssd(metadata: Message) -> None:
    assert metadata["Name"] == "ssd-engine"
    assert PROJECT["scripts"] == {"ssd": "ssd.cli.main:app"}
    assert metadata["Author"]
    assert metadata["Keywords"]
    assert metadata.get_all("Classifier")
    assert str(metadata.get_payload()).startswith("# ssd\n")


def test_nothing_sends_people_to_an_address_that_does_not_exist(metadata: Message) -> None:
    """The repository is at no public address yet."""
    assert metadata.get_all("Project-URL") is None


def test_nobody_is_told_to_install_a_name_that_is_on_no_index() -> None:
    """Anybody could register it: what is installed comes from a checkout. Catches messages, scripts, units, docs."""
    wrong = [file.name for file in texts() if re.search(rf"install\b.*['\" ]{PROJECT['name']}\b", file.read_text())]
    assert not wrong


def test_pictures_of_the_readme_exist() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (ROOT / "README.md").read_text())
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).parent == ROOT / "docs" / "pictures"
        assert (ROOT / picture).is_file()


def test_the_source_archive_holds_what_its_tests_read(built: Path) -> None:
    held = set((built / "SOURCES.txt").read_text().splitlines())
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    pages = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md")
    settings = ("Makefile", "pyproject.toml", "setup.py", "mkdocs.yml", ".pre-commit-config.yaml")
    files += [ROOT / name for name in (*pages, *settings)]
    names = {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts and file.suffix != ".so"}
    assert names <= held, sorted(names - held)


def test_remedies_name_extras_that_exist() -> None:
    """Catches an extra that was renamed. In code, `install_extra` writes the remedy."""
    remedy = re.compile(r"pip install '\.\[([\w,]+)\]'|install_extra\(['\"](\w+)['\"]\)")
    found = [match for file in texts() for match in remedy.findall(file.read_text())]
    assert len(found) > 10
    for listed, extra in found:
        assert set((listed or extra).split(",")) <= set(PROJECT["optional-dependencies"])


def test_transformers_is_an_extra_and_the_development_set_up_is_pinned() -> None:
    assert not [name for name in PROJECT["dependencies"] if name.startswith("transformers")]
    extras = PROJECT["optional-dependencies"]
    assert [name for name in extras["tested"] if name.startswith("torch==")]
    assert [name for name in extras["dev"] if name.startswith("triton==")]
    assert [name for name in extras["dev"] if name.startswith("ssd-engine[") and "tested" in name]


@pytest.mark.parametrize("prompt", ["What costs $5?", 'a "b" $(HOME) $$ `id`', "100 % # sure", "", "it's"])
def test_make_demo_asks_what_was_typed(prompt: str, tmp_path: Path) -> None:
    """Catches a prompt that make or the shell expands."""
    command = tmp_path / "bin" / "ssd"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\nprintf "%s" "$*"\n')
    command.chmod(0o755)
    (tmp_path / ".installed").touch()
    make = ["make", "-s", "demo", f"VENV={tmp_path}", f"PROMPT={prompt}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == (f"demo --prompt={prompt}" if prompt else "demo")


@pytest.mark.slow
def test_type_checkers_find_an_editable_install(tmp_path: Path) -> None:
    """They follow the paths of .pth files, and do not run import hooks. `py.typed` tells them that there are types."""
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run([*command, "editable_wheel", "--dist-dir", str(tmp_path)], cwd=ROOT, check=True)
    [wheel] = tmp_path.glob("*.whl")
    with ZipFile(wheel) as files:
        [hook] = [name for name in files.namelist() if name.endswith(".pth")]
        assert files.read(hook).decode().strip() == str(ROOT)
    assert (ROOT / "ssd" / "py.typed").is_file()
