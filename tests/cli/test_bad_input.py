"""Whatever a user types or a file contains, a command ends with a message, not with a traceback."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from piper.cli import app, run, simulate, target
from piper.costs import Costs
from piper.costs.links import Link, Network
from piper.errors import PiperError
from piper.strategies import BUILDERS, one_f_one_b, to_csv

TINY = Path(__file__).parent.parent / "scripts" / "tiny.py"
NUMBERS = [
    "1", "2", "4", "0", "-1", "1000000000", "99999999999999999999", "1e9", "nan", "inf", "", "x",
    "0x4", "2.5", "٣", "²",
]  # fmt: skip
WORDS = [
    "1f1b", "h100", "h200:0-1,a100:2", "cpu", "h200:0-9999999999", "h200:²", "a,b:1", ":", ",",
    "ray", "ray:", "ray://x", "slurm", "\x01", "ü" * 300, "../..", "/dev/null", "/proc/version",
    "pp=1,2", "=", "pp=", "1:2", "0:0", "3:x", "dp,pp", "pp,pp", "--", "-h", "",
]  # fmt: skip
Draw = random.Random
Mutator = Callable[[str, Draw], bytes]


@cache
def inspected(arguments: tuple[str, ...]) -> Any:
    """Each strategy of the script is compiled once: here only what comes after it matters."""
    return ORIGINAL(TINY, list(arguments))


ORIGINAL = target.inspect


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files that are right, by their endings: what a command reads."""
    folder = tmp_path_factory.mktemp("right")
    trace = folder / "trace.json"
    found = CliRunner().invoke(app, ["view", str(TINY), "--chrome", str(trace)])
    assert found.exit_code == 0, found.output
    strategy = one_f_one_b(pp=2, microbatches=4)
    network = Network(4, uplink=Link(5e9), pairs={(0, 1): Link(1e9)})
    return {
        "trace.json": trace.read_text(),
        "strategy.json": strategy.to_json(),
        "schedule.csv": to_csv(strategy),
        "costs.json": Costs(link=2e9).to_json(),
        "network.json": network.to_json(),
        "script.py": TINY.read_text(),
    }


def as_it_is(text: str, _: Draw) -> bytes:
    return text.encode()


def cut_short(text: str, draw: Draw) -> bytes:
    return text.encode()[: draw.randrange(len(text) + 1)]


def flipped(text: str, draw: Draw) -> bytes:
    found = bytearray(text.encode())
    for _ in range(draw.choice((1, 3, 50))):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def binary(_: str, draw: Draw) -> bytes:
    return draw.randbytes(draw.choice((0, 1, 300)))


def deep(_: str, draw: Draw) -> bytes:
    return draw.choice((b"[", b'{"a":')) * 100_000


def other_value(text: str, draw: Draw) -> bytes:
    """JSON with other values in it, of any kind and size."""
    try:
        found = json.loads(text)
    except ValueError:
        return flipped(text, draw)
    hostile = [None, True, -1, 10**30, 1e308, float("nan"), "", "x", [], {}, [[]], [None], {"a": 1}]
    for _ in range(draw.choice((1, 2))):
        where, key = draw.choice(list(places(found)) or [(None, None)])
        if where is None:
            return json.dumps(draw.choice(hostile)).encode()
        if draw.random() < 0.3:
            del where[key]
        else:
            where[key] = draw.choice(hostile)
    return json.dumps(found).encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Of long lists some elements."""
    children = value.items() if isinstance(value, dict) else enumerate(value[:5])
    for key, child in list(children) if isinstance(value, dict | list) else ():
        yield value, key
        if isinstance(child, dict | list):
            yield from places(child)


MUTATORS: list[Mutator] = [
    as_it_is, cut_short, flipped, binary, deep, other_value, other_value, other_value,
]  # fmt: skip


class Fuzz:
    """Draws command lines, with the files that they name."""

    def __init__(self, files: dict[str, str], folder: Path, draw: Draw) -> None:
        self.files, self.folder, self.draw = files, folder, draw

    def file(self, *names: str) -> str:
        """A file, right or damaged; or something else than a file."""
        if self.draw.random() < 0.1:
            return self.draw.choice([str(self.folder), str(self.folder / "nowhere"), *WORDS])
        name = self.draw.choice(names)
        path = self.folder / name
        path.write_bytes(self.draw.choice(MUTATORS)(self.files[name], self.draw))
        return str(path)

    def script(self) -> str:
        return str(TINY)

    def output(self) -> str:
        places = ["out.json", "nowhere/out.json", ".", "x" * 300, "out"]
        return str(self.folder / self.draw.choice(places))

    def number(self) -> str:
        return self.draw.choice(NUMBERS)

    def part(self) -> str:
        """Of the time or of the devices."""
        return self.draw.choice(["0:4", "9:", ":", "0-3,8", "3-1", "7:999999999999", *NUMBERS])

    def word(self) -> str:
        return self.draw.choice(WORDS)

    def options(self, **kinds: Callable[[], str]) -> list[str]:
        """Some of these options, each with a value that may suit it."""
        found = []
        for name, value in kinds.items():
            if self.draw.random() < 0.4:
                given = value if self.draw.random() < 0.9 else self.word
                found += [f"--{name.replace('_', '-')}", given()]
        return found

    def line(self) -> list[str]:
        kinds = [self.schedule, self.check, self.show, self.view, self.simulate, self.run]
        return self.draw.choice(kinds)()

    def schedule(self) -> list[str]:
        name = self.draw.choice([*BUILDERS, self.word()])
        n, m = self.number, self.number
        more = self.options(
            dp=n, virtual=n, zero=n, mesh=self.word, format=self.word, steps=self.part,
            devices=self.part,
        )  # fmt: skip
        return ["schedule", name, "--pp", n(), "--microbatches", m(), *more]

    def check(self) -> list[str]:
        flags = self.options(memory=self.number, steps=self.number, seed=self.number)
        return ["check", self.file("strategy.json", "schedule.csv"), *flags]

    def show(self) -> list[str]:
        if self.draw.random() < 0.5:
            part = self.options(steps=self.part, devices=self.part)
            return ["show", self.file("strategy.json", "schedule.csv"), *part]
        more = self.options(
            plan=self.number, after=self.number, svg=self.output, network=self.network,
            per_node=self.number, steps=self.part, devices=self.part,
        )  # fmt: skip
        return ["show", self.script(), *more]

    def network(self) -> str:
        return self.file("network.json") if self.draw.random() < 0.5 else self.word()

    def costs(self) -> str:
        return self.file("costs.json") if self.draw.random() < 0.7 else self.word()

    def view(self) -> list[str]:
        more = self.options(
            svg=self.output, chrome=self.output, device=self.word, costs=self.costs,
            network=self.network, per_node=self.number,
        )  # fmt: skip
        shown = self.file("trace.json", "trace.json", "strategy.json", "schedule.csv")
        return ["view", shown, "-o", self.output(), *more]

    def simulate(self) -> list[str]:
        more = self.options(
            device=self.word, costs=self.costs, network=self.network, per_node=self.number,
            set=self.word, sort=self.word, plot=self.output, view=self.output, chrome=self.output,
            json=self.output, optimizer=self.number,
        )  # fmt: skip
        return ["simulate", self.script(), *more]

    def run(self) -> list[str]:
        more = self.options(on=self.word, trace=self.output, trace_steps=self.word)
        return ["run", self.file("script.py"), "-n", self.number(), *more]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is started, a strategy is compiled once, and words may name files to write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulate, "inspect", lambda _, rest, *__, **___: inspected(tuple(rest)))
    monkeypatch.setattr(run, "run_local", lambda *_: 0)
    monkeypatch.setattr(run, "run_on_ray", lambda *_: 0)


def tracebacks(fuzz: Fuzz, rounds: int) -> list[str]:
    """The command lines that ended with one."""
    found = []
    for _ in range(rounds):
        line = fuzz.line()
        result = CliRunner().invoke(app, line)
        if not isinstance(result.exception, PiperError | SystemExit | None):
            frames = traceback.extract_tb(result.exception.__traceback__)[-3:]
            found.append(f"{line}: {result.exception!r} at {frames}")
    return found


@pytest.mark.usefixtures("quick")
def test_no_input_leads_to_a_traceback(files: dict[str, str], tmp_path: Path) -> None:
    assert tracebacks(Fuzz(files, tmp_path, Draw(0)), 60) == []


@pytest.mark.soak
@pytest.mark.usefixtures("quick")
def test_no_input_of_a_thousand_leads_to_a_traceback(files: dict[str, str], tmp_path: Path) -> None:
    assert tracebacks(Fuzz(files, tmp_path, Draw(1)), 1000) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["show", str(TINY), "--plan", "9"], "--plan: the strategy has no device 9"),
        (["show", str(TINY), "--steps", "1:x"], "--steps: '1:x' names no time steps"),
        (["show", str(TINY), "--devices", "a"], "--devices: 'a' does not say which devices"),
        (["show", str(TINY), "--after", "-1"], "--after: -1 directives"),
        (["show", str(TINY), "--svg", "nowhere/a.svg"], "it cannot be written: No such file"),
        (["simulate", str(TINY), "--json", "."], ".: it cannot be written: Is a directory"),
        (["simulate", str(TINY), "--costs", "no.json"], "costs: there is no file 'no.json'"),
        (["simulate", str(TINY), "--device", "h200:0-9999999999"], "number devices from 0 to"),
        (
            ["schedule", "zbv", "--pp", "1000000000", "--microbatches", "2"],
            "zbv: pp=1000000000, microbatches=2 is more than any machine has",
        ),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
@pytest.mark.usefixtures("quick")
def test_the_message_names_what_is_wrong(line: list[str], message: str) -> None:
    result = CliRunner().invoke(app, line)

    assert isinstance(result.exception, PiperError)
    assert message in str(result.exception)
    assert "\n  fix: " in str(result.exception)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(b"\xff\xfe\x00")

    result = CliRunner().invoke(app, ["check", str(path)])

    assert str(result.exception).startswith(f"{path}: it cannot be read: 'utf-8' codec can't")


def test_a_script_is_no_command() -> None:
    shown = CliRunner().invoke(app, ["train.py", "--size", "2"])

    assert shown.exit_code == 2
    said = " ".join(shown.output.replace("│", " ").split())
    assert "'train.py' is not a command. To run a script, write: piper run train.py" in said
