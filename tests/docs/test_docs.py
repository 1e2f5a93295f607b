"""The pages say what the code says."""

import re
from inspect import signature
from pathlib import Path
from textwrap import dedent
from typing import get_args

from architectures import ARCHITECTURES

import piper
from piper.directives import Strategy
from piper.directives.base import DIRECTIVES
from piper.errors import PiperError
from piper.ir.nodes import Way
from piper.ir.placement.placements import Step
from piper.plan.instructions import Instruction
from piper.strategies import BUILDERS

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "piper"


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
    found = (one for one in vars(errors).values() if isinstance(one, type))
    names = [one.__name__ for one in found if issubclass(one, PiperError)]

    missing = [name for name in names if f"`{name}`" not in page and name != "Located"]

    assert not missing


def test_every_public_name_of_the_trainer_is_on_its_page() -> None:
    page = (DOCS / "trainer.md").read_text()
    rows = page.split("## Attributes and methods")[1].split("## Batches")[0]
    names = [name for name in dir(piper.Trainer) if not name.startswith("_")]

    missing = [name for name in [*names, "rank"] if not re.search(rf"`{name}[`(]", rows)]

    assert len(names) > 15 and not missing


def test_every_option_of_the_trainer_is_on_its_page_and_in_its_docstring() -> None:
    rows = (DOCS / "trainer.md").read_text().split("## Arguments")[1].split("## Attributes")[0]
    options = list(signature(piper.Trainer).parameters)

    missing = [name for name in options if f"| `{name}` |" not in rows]
    unsaid = [name for name in options[3:] if f"`{name}" not in (piper.Trainer.__doc__ or "")]

    assert len(options) > 20 and not missing and not unsaid


def sections(page: Path) -> list[str]:
    """The names under which links find the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


def test_every_link_of_every_page_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for target, section in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            found = page.parent / target if target else page
            assert found.exists(), f"{page.name}: {target}"
            assert not section or section in sections(found), f"{page.name}: {target}#{section}"


def test_every_path_on_the_page_of_the_architecture_exists() -> None:
    page = (DOCS / "architecture.md").read_text()
    paths = [word for word in re.findall(r"`([\w/.]+)`", page) if "/" in word or ".py" in word]

    missing = [path for path in paths if not any((base / path).exists() for base in (ROOT, SOURCE))]

    assert len(paths) > 50
    assert not missing


def readme_strategies() -> list[str]:
    """The code blocks of the README that are no script."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [block for block in blocks if "piper.Trainer(" not in block]


def strategy_of(block: str, known: dict[str, object]) -> Strategy:
    found = dict(known)
    exec(block, found)
    return found["strategy"]


def test_the_strategies_of_the_readme_are_strategies() -> None:
    known = {name: getattr(piper, name) for name in piper.__all__} | {"piper": piper}

    written = [strategy_of(block, known) for block in readme_strategies()]
    built = re.findall(r"#.* (piper\.strategies\..*)", (ROOT / "README.md").read_text())

    assert [len(one) for one in written] == [5, 4]
    assert all(len(eval(call, known)) > 3 for call in built) and len(built) == 3


def test_every_builder_is_on_the_page_of_strategies() -> None:
    page = (DOCS / "strategies.md").read_text()

    for name, builder in BUILDERS.items():
        assert f"| `{builder.__name__}` | `{name}` |" in page
        assert all(f"`{option}`" in page for option in signature(builder).parameters)


def test_every_instruction_is_on_the_page_of_plans() -> None:
    page = (DOCS / "plan.md").read_text().split("## Instructions")[1]
    kinds = {one.__name__.lower() for one in get_args(Instruction)} - {"exchange", "redistribute"}
    ways = {str(way) for way in Way} | {str(step) for step in Step} - {"nothing"}

    assert [one for one in kinds | ways | {"scatter"} if f"`{one}`" not in page] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()

    listed = set(re.findall(r": ([\w/]+\.md)$", site, re.MULTILINE))

    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_every_public_name_is_in_the_reference() -> None:
    listed = set(re.findall(r"^::: piper\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE))

    assert listed == set(piper.__all__)


def test_the_page_of_hugging_face_lists_what_is_tested() -> None:
    page = (DOCS / "hugging_face.md").read_text()
    table = page.partition("| family | classes |")[2].partition("\n\n")[0]

    assert re.findall(r"`(\w+)`", table) == [one.name for one in ARCHITECTURES]
    assert len(ARCHITECTURES) >= 25
