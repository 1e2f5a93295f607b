"""A wheel has everything, and works from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import piper
from piper.capture.torch_version import FIRST, FIX, LAST, refuse_untested
from piper.errors import InputError

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    names = ("src", "pyproject.toml", "README.md", "LICENSE")
    source.mkdir()
    for name in names:  # a copy: building must not write into the tree
        copy = ["cp", "-r", str(ROOT / name), str(source / name)]
        subprocess.run(copy, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*build, "-w", str(folder)], cwd=source, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def test_a_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        names = archive.namelist()

    assert any(name.endswith("licenses/LICENSE") for name in names)
    for file in (ROOT / "src" / "piper").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert str(file.relative_to(ROOT / "src")) in names
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import piper, sys; from piper.cli import main; print(piper.__file__); main()"
    for arguments in (["--version"], ["schedule", "--help"]):
        found = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=environment,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert found.stdout.startswith(str(tmp_path / "site"))


def test_pip_installs_a_torch_that_piper_takes() -> None:
    """Newer ones have other private parts, and fail."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    (torch,) = [one for one in project["dependencies"] if one.startswith("torch")]

    assert f"pip install '{torch}'" == FIX
    assert torch == f"torch>=2.{FIRST[1]},<2.{LAST[1] + 1}"
    for version in ("2.10.1", "2.14.0", "3.0.0"):
        with pytest.raises(InputError, match=f"not tested with version {version}"):
            refuse_untested(version)


def test_no_text_installs_piper_from_an_index() -> None:
    """It is on none: pages install extras in the repository, messages the libraries themselves."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    files += (ROOT / "src").rglob("*.py")

    assert not [file for file in files if "piper-train[" in file.read_text()]


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert project["version"] == piper.__version__
    assert project["license"] == "BSD-3-Clause" and (ROOT / "LICENSE").read_text().startswith("BSD")
    assert set(project["optional-dependencies"]) == {"hf", "ray", "log", "notebook", "docs", "dev"}
