"""`piper view -o` writes what the name of the file says."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from piper.cli import app

BEGINS = {"page.html": b"<!doctype html", "page": b"<!doctype html", "a.svg": b"<svg"}


def viewed(tmp_path: Path, name: str) -> tuple[int, str, Path]:
    (tmp_path / "s.csv").write_text("0F0,0B0\n")
    file = tmp_path / name
    found = CliRunner().invoke(app, ["view", str(tmp_path / "s.csv"), "-o", str(file)])
    return found.exit_code, found.output, file


@pytest.mark.parametrize("name", BEGINS)
def test_a_page_or_a_picture_is_written(name: str, tmp_path: Path) -> None:
    code, _, file = viewed(tmp_path, name)

    assert code == 0 and file.read_bytes().lower().startswith(BEGINS[name].lower())


@pytest.mark.parametrize("name", ["a.pdf", "a.txt", "a.jpg"])
def test_other_endings_are_refused(name: str, tmp_path: Path) -> None:
    code, output, file = viewed(tmp_path, name)

    words = output.replace("│", " ").split()  # the message is in a frame
    assert code == 2 and ".svg or .png" in " ".join(words) and not file.exists()
