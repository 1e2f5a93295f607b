"""What a type checker tells users of Piper: right scripts pass, and mistakes are found.

To add a case, append a script and the errors that it must give, each with its line.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from piper.job.trainer_options import TrainerOptions
from piper.trainer import Trainer

pytest.importorskip("mypy")

ROOT = Path(__file__).parents[1]
START = """\
from functools import partial
from typing import assert_type
import torch
from piper.directives import Place, Split
from piper.costs import Costs
from piper.ir.filters import where
from piper.job.programs.rehearsal import Rehearsal, rehearse
from piper.pretrained import from_pretrained
from piper.trainer import Trainer

def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()

model, x = torch.nn.Linear(3, 3), torch.randn(4, 3)
sgd = partial(torch.optim.SGD, lr=0.1)
"""
CASES: dict[str, tuple[str, list[str]]] = {
    "a script": (
        """\
strategy = [Place(where(), (0,)), Split("MB", 2)]
trainer = Trainer(
    model, loss_fn, strategy, example=(x, x), optimizer=sgd, max_norm=1.0, reduction="mean",
    loss_weight=lambda *microbatch: 1, costs="costs.json", device="cpu",
)
assert_type(trainer.step(x, x).loss, float)
assert_type(trainer.tune(x, x), Costs)
assert_type(trainer.resume("runs/a", missing_ok=True), int)
assert_type(rehearse(model, None, strategy, [(x, x)], seed=1, reduction="sum"), Rehearsal)
""",
        [],
    ),
    "options of a Trainer": (
        """\
Trainer(model, loss_fn, example=(x, x), max_nrom=1.0)
Trainer(model, loss_fn, example=(x, x), max_norm="1.0")
Trainer(model, loss_fn, example=(x, x), reduction="average")
Trainer(model, loss_fn)
""",
        [
            '1: Unexpected keyword argument "max_nrom" for "Trainer"; did you mean "max_norm"?',
            '2: Argument "max_norm" to "Trainer" has incompatible type "str"; '
            'expected "float | None"',
            '3: Argument "reduction" to "Trainer" has incompatible type "Literal[\'average\']"; '
            "expected \"Literal['mean', 'sum'] | None\"",
            '4: Missing named argument "example" for "Trainer"',
        ],
    ),
    "options of a rehearsal": (
        "rehearse(model, loss_fn, None, [(x, x)], lr_schedule=None)\n",
        [
            '1: Unexpected keyword argument "lr_schedule" for "rehearse"; '
            'did you mean "lr_scheduler"?'
        ],
    ),
    "options of a pretrained model": (
        """\
from_pretrained("llama", example=(x, x), loss_fn=loss_fn, max_norm=1.0, device="cpu")
from_pretrained("llama", example=(x, x), max_nrom=1.0)
from_pretrained("llama", example=(x, x), compiled="yes")
""",
        [
            '2: Unexpected keyword argument "max_nrom" for "from_pretrained"; '
            'did you mean "max_norm"?',
            '3: Argument "compiled" to "from_pretrained" has incompatible type "str"; '
            'expected "bool"',
        ],
    ),
    "what a Trainer has": (
        """\
trainer = Trainer(model, loss_fn, example=(x, x))
trainer.stpe(x, x)
trainer.replica = 1
""",
        [
            '2: "Trainer" has no attribute "stpe"',
            '3: Property "replica" defined in "Trainer" is read-only',
        ],
    ),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each script, all in one run: it reads Piper once."""
    folder = tmp_path_factory.mktemp("scripts")
    files = {f"script{k}.py": name for k, name in enumerate(CASES)}
    for file, name in files.items():
        (folder / file).write_text(START + CASES[name][0])
    options = ["--config-file", "pyproject.toml"]  # as `make lint`, which has read Piper before
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, sorted(folder.iterdir()))],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, list[str]] = defaultdict(list)
    pattern = r"^.*?(script\d+\.py):(\d+): error: (.*?)  \[[\w-]+\]$"
    for file, line, text in re.findall(pattern, done.stdout, re.MULTILINE):
        found[files[file]].append(f"{int(line) - START.count(chr(10))}: {text}")
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_type_checker_finds_just_the_mistakes(name: str, said: dict[str, list[str]]) -> None:
    assert said[name] == CASES[name][1]


def test_the_package_says_that_it_has_types() -> None:
    data = (ROOT / "pyproject.toml").read_text()

    assert (ROOT / "src" / "piper" / "py.typed").exists()
    assert '"piper" = ["py.typed"]' in data


def test_options_that_are_passed_on_are_those_of_the_trainer() -> None:
    taken = inspect.signature(Trainer.__init__).parameters.values()
    named = {one.name: one.annotation for one in taken if one.kind is one.KEYWORD_ONLY}

    assert TrainerOptions.__annotations__.keys() == named.keys() - {"example"}
    for name, kind in TrainerOptions.__annotations__.items():
        assert kind.__forward_arg__ == named[name]
