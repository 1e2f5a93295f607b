"""Types reach the user: mypy accepts scripts that are right and finds the mistakes of others."""

from __future__ import annotations

import ast
import sys
from inspect import Parameter, signature
from pathlib import Path
from subprocess import run
from typing import get_type_hints

import pytest
from draws import one_of

pytest.importorskip("mypy")

import piper
from piper.directives import Replicate
from piper.strategies import BUILDERS, PipelineOptions
from piper.strategies.assembly import assemble

ROOT = Path(__file__).parents[2]
HEAD = """\
import piper
from piper import Order, Place, Replicate, Shard, Split, Strategy, Stream, strategies, where
"""
RIGHT = {
    "directives": """
parts = [Place(where(PP=0), devices=[0, 2]), Split("MB", 4)]
reveal_type(Strategy([*parts, [Stream("dp", priority="high")]]))
Replicate(where(), [[0, 1], [2, 3]], zero=3, reduce="once", bucket_mb=10)
Shard(where(EP="*"), devices=range(4))
Order([where(PP=0), [where(PP=1, PASS="F"), where(PP=None)]], ahead="pairs")
""",
    "builders": """
common: strategies.PipelineOptions = {"zero": 2, "bucket_mb": 0.25}
strategies.gpipe(2, 4, 2, **common)
strategies.interleaved_zb(pp=2, microbatches=4, virtual=3, dp=2, zero=1)
reveal_type(strategies.dualpipev(pp=2, microbatches=8, dp=4, ep=2, zero=3, reduce="once",
    bucket_mb=25, gather_ahead=2, gather_buffers=3, expert_stages=[1], ahead="pairs", remat=[0],
    mesh="dp,pp,ep", devices=range(8),
    stream="a", ep_stream="b", reduce_stream="c", gather_stream="d"))
""",
    "names": """
reveal_type(piper.where(PP=1))
reveal_type(piper.strategies.one_f_one_b(pp=1, microbatches=1).microbatches)
reveal_type(piper.Trainer.step)
reveal_type(piper.compile_strategy)
""",
}
REVEALED = {
    "directives": ["piper.directives.strategy.Strategy"],
    "builders": ["piper.directives.strategy.Strategy"],
    "names": [
        "piper.ir.filters.Filter",
        "int",
        "piper.trainer.Trainer",
        "piper.job.compile.compiler.",
    ],
}
WRONG = {
    "strategies.gpipe(pp=2, microbatches=4, zreo=3)": 'Unexpected keyword argument "zreo"',
    "strategies.gpipe(pp=2, microbatches=4, virtual=2)": 'Unexpected keyword argument "virtual"',
    "strategies.zbv(pp=2)": 'Missing positional argument "microbatches"',
    'strategies.zbv(pp="2", microbatches=4)': 'Argument "pp" to "zbv" has incompatible type "str"',
    "strategies.zb_h1(2, 4, zero='3')": 'Argument "zero" to "zb_h1" has incompatible type "str"',
    "strategies.dualpipe(2, 4, reduce='twice')": 'Argument "reduce" to "dualpipe" has incompat',
    "strategies.gpip(pp=2, microbatches=4)": 'has no attribute "gpip"',
    "piper.Trainr": 'has no attribute "Trainr"',
    "piper.Trainer.stepp": 'has no attribute "stepp"',
    "Place(where(PP=0), device=[0])": 'Unexpected keyword argument "device" for "Place"',
    "Place(where(PP=0), devices=0)": 'Argument "devices" to "Place" has incompatible type "int"',
    "where(PP=[0.5])": 'Argument "PP" to "where" has incompatible type "list[float]"',
    'where(PP=0) | "EP"': 'Unsupported operand types for | ("Filter" and "str")',
    'Stream("ep", priority="hihg")': 'Argument "priority" to "Stream" has incompatible type',
    'Strategy(["x"])': 'List item 0 has incompatible type "str"',
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says about each script, in one run for all."""
    folder = tmp_path_factory.mktemp("scripts")
    scripts = {**RIGHT, **{f"wrong{k}": text for k, text in enumerate(WRONG)}}
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(f"{HEAD}{text}\n")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *folder.glob("*")]
    done = run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    lines = done.stdout.splitlines()
    return {name: [line for line in lines if f"/{name}.py:" in line] for name in scripts}


@one_of(2)
@pytest.mark.parametrize("name", RIGHT)
def test_a_script_that_is_right_passes_with_its_types_known(
    name: str, found: dict[str, list[str]]
) -> None:
    said = found[name]

    assert [line for line in said if ": error: " in line] == []
    assert len(said) == len(REVEALED[name])
    assert all(kind in line for kind, line in zip(REVEALED[name], said, strict=True))
    assert not any('is "Any"' in line for line in said)


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_an_error(line: str, found: dict[str, list[str]]) -> None:
    said = found[f"wrong{list(WRONG).index(line)}"]

    (error,) = [one for one in said if ": error: " in one]
    assert WRONG[line] in error


def test_the_names_that_are_typed_are_the_names_that_are_loaded() -> None:
    tree = ast.parse(Path(piper.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.asname: f"{node.module}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert typed == {**piper._HOMES, **dict.fromkeys(piper._MODULES, "piper")}


def options_of(build: object) -> dict[str, Parameter]:
    parameters = signature(build, eval_str=True).parameters
    return {n: p for n, p in parameters.items() if p.kind is Parameter.KEYWORD_ONLY}


def test_the_typed_options_are_those_that_builders_take() -> None:
    typed = get_type_hints(PipelineOptions)

    assert typed == {name: option.annotation for name, option in options_of(assemble).items()}
    assert all(options_of(build) == options_of(assemble) for build in BUILDERS.values())


def test_options_of_replicas_have_the_defaults_of_replicate() -> None:
    defaults = {name: option.default for name, option in options_of(assemble).items()}
    own = {name: p.default for name, p in signature(Replicate).parameters.items()}
    del own["devices"]  # of one region; a builder's are those of the whole mesh

    different = {name for name in own.keys() & defaults.keys() if own[name] != defaults[name]}

    assert different == {"gather_stream"}  # gathers overlap with reductions on one of their own


def test_help_shows_every_option_with_its_default() -> None:
    shown = str(signature(piper.strategies.interleaved_zb))

    assert shown.startswith(
        "(pp: int, microbatches: int, virtual: int = 2, dp: int | "
        "collections.abc.Sequence[int] = 1, *, "
    )
    assert "gather_ahead: int = 1, gather_buffers: int | None = None" in shown
