"""The pages say what the code says."""

from inspect import signature
from pathlib import Path
from textwrap import dedent

from piper.cli.target import inspect
from piper.directives.base import DIRECTIVES
from piper.errors import PiperError
from piper.strategies import BUILDERS

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


def picture(directive: type) -> str:
    """The `rewrite:` picture of a directive's docstring."""
    lines = directive.__doc__.split("rewrite:\n")[1]
    return dedent(lines).strip("\n").rstrip()


def pages_that_differ(pages: Path) -> list[str]:
    """The directives that have no page, or one without the picture of their docstring."""
    found = {path.stem: path.read_text() for path in pages.glob("*.md")}
    return [op for op, one in DIRECTIVES.items() if picture(one.kind) not in found.get(op, "")]


def test_every_directive_has_a_page_with_the_picture_of_its_docstring() -> None:
    assert pages_that_differ(DOCS / "directives") == []


def test_every_error_is_on_the_page_of_errors() -> None:
    from piper import errors

    page = (DOCS / "errors.md").read_text()
    names = [
        name
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, PiperError)
    ]

    missing = [name for name in names if f"`{name}`" not in page and name != "Located"]

    assert not missing


def test_every_link_of_every_page_leads_somewhere() -> None:
    import re

    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_first_script_of_the_readme_compiles(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    script = tmp_path / "train.py"
    script.write_text(text)

    found = inspect(script, [])

    assert [len(plan.states) > 0 for plan in found.compiled.plans] == [True, True]
    assert [str(region.id) for region in found.captured.model.regions] == ["PP0", "PP1"]


def test_every_builder_is_on_the_page_of_strategies() -> None:
    page = (DOCS / "strategies.md").read_text()

    for name, builder in BUILDERS.items():
        assert f"| `{builder.__name__}` | `{name}` |" in page
        assert all(f"`{option}`" in page for option in signature(builder).parameters)
