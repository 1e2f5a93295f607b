"""Where the metrics of steps go: a CSV file, TensorBoard, Weights & Biases, or the terminal."""

from __future__ import annotations

import csv
import importlib
import logging
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from piper.errors import InputError
from piper.job.loop.live_line import live_line
from piper.runtime.metrics import NAMES, Metrics, Readings

KINDS = 'log="print", "tensorboard", "wandb", "runs/a.csv", a function of Metrics, or a list'
LOG = logging.getLogger("piper")
Log = str | Path | Callable[[Metrics], None] | Sequence[Any] | None


class Sink(Protocol):
    def write(self, metrics: Metrics) -> None: ...

    def resume(self, steps: int) -> None:
        """The run goes on after so many steps. It may have been further before."""
        return

    def close(self) -> None: ...


class MetricLog:
    """Writes the metrics of steps, in the order of what the script does. No step waits for it.

    On a GPU, the metrics of a step are written when the next one has begun, when the script reads
    one of them, or before another call of the Trainer. Only the first process writes.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks
        self.last: Metrics | None = None

    def add(self, metrics: Metrics, over: bool = True) -> None:
        """`over`: the step has ended, and nothing waits if its metrics are read."""
        self.flush()
        if not self.sinks:
            return
        self.last = metrics
        if over:
            self.flush()
        else:
            metrics.read = partial(self.read, metrics, metrics.read)

    def read(self, metrics: Metrics, read: Callable[[], Readings]) -> Readings:
        """The script reads a metric, and may print it: the line of its step comes first."""
        if self.last is metrics:
            self.flush()
        return read()

    def flush(self) -> None:
        last, self.last = self.last, None
        if last is not None:
            self.sinks = [sink for sink in self.sinks if is_written(sink, last)]

    def resume(self, steps: int) -> None:
        for sink in self.sinks if steps else ():
            sink.resume(steps)

    def close(self) -> None:
        self.flush()
        for sink in self.sinks:
            sink.close()
        self.sinks = ()


def is_written(sink: Sink, metrics: Metrics) -> bool:
    """Whether a log goes on. A full disk ends it, and not the run."""
    try:
        sink.write(metrics)
    except OSError as error:
        if isinstance(sink, Function):
            raise
        LOG.warning("log: %s cannot be written (%s): training goes on without it", sink, error)
        with suppress(OSError):
            sink.close()
        return False
    return True


Makers = Sequence[Callable[[], Sink]]


def log_makers(given: Log) -> Makers:
    """Wrong names are an error on every process, before anything is captured."""
    several = list(given) if isinstance(given, list | tuple) else [given]
    return [maker(one) for one in several if one is not None]


def metric_log(makers: Makers, rank: int) -> MetricLog:
    try:
        return MetricLog([make() for make in makers] if rank == 0 else [])
    except OSError as error:
        raise InputError.of("log", str(error), "give a file where you can write") from None


def maker(given: Any) -> Callable[[], Sink]:
    match given:
        case "print":
            return Printed
        case "tensorboard":
            require("torch.utils.tensorboard", "tensorboard")
            return TensorBoard
        case "wandb":
            require("wandb", "wandb")
            return WandB
        case "csv":
            return lambda: CsvFile(Path("metrics.csv"))
        case str() | Path() if Path(given).suffix == ".csv":
            return lambda: CsvFile(Path(given))
    if callable(given):
        return lambda: Function(given)
    raise InputError.of("log", f"{given!r} is not a log", f"write {KINDS}")


def require(module: str, name: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError:
        fix = f'pip install {name}, or pip install ".[log]" in the repository of Piper'
        raise InputError.of("log", f"{name} is not installed", fix) from None


class Function(Sink):
    """The user's own."""

    def __init__(self, function: Callable[[Metrics], None]) -> None:
        self.function = function

    def write(self, metrics: Metrics) -> None:
        self.function(metrics)

    def close(self) -> None: ...


class Printed(Sink):
    """A line for each step; in a terminal, one line that changes."""

    def __init__(self) -> None:
        self.line = live_line()

    def write(self, metrics: Metrics) -> None:
        if self.line is None:
            print(metrics, flush=True)
        else:
            self.line.show(metrics.fields())

    def close(self) -> None:
        if self.line is not None:
            self.line.close()


class CsvFile(Sink):
    """One row for each step. A run that resumes adds rows, with the columns that are there.

    A run that begins at its first step has a file of its own: the one of an earlier run stays,
    under another name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.open()

    def open(self) -> None:
        path = self.path
        columns = columns_of(path)
        self.file = path.open("a", newline="")
        self.rows = csv.DictWriter(self.file, columns or NAMES, extrasaction="ignore")
        if not columns:
            self.rows.writeheader()

    def __str__(self) -> str:
        return str(self.path)

    def write(self, metrics: Metrics) -> None:
        if metrics.step == 1 and has_rows(self.path):
            self.file.close()
            keep(self.path)
            self.open()
        self.rows.writerow(metrics.asdict())
        self.file.flush()

    def resume(self, steps: int) -> None:
        """Drop rows at the end that are of later steps: they are taken again."""
        with open(self.file.name, newline="") as file:
            lines = file.readlines()
        kept = len(lines)
        while kept > 1 and step_of(lines[kept - 1], self.rows.fieldnames) > steps:
            kept -= 1
        if kept < len(lines):
            self.file.truncate(sum(len(line.encode()) for line in lines[:kept]))

    def close(self) -> None:
        self.file.close()


def step_of(line: str, columns: Collection[str]) -> float:
    """
    >>> step_of("7,2.5\\r\\n", ["step", "loss"]), step_of("torn", ["loss", "step"])
    (7, inf)
    """
    row = next(csv.DictReader([line], list(columns)), {})
    text = row.get("step") or ""
    return int(text) if text.isdecimal() else math.inf


def columns_of(path: Path) -> list[str]:
    """The first row of a file, if there is one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def has_rows(path: Path) -> bool:
    """Besides the one that names the columns."""
    with path.open(newline="") as file:
        return len([*zip(range(2), file, strict=False)]) == 2


def keep(path: Path) -> None:
    """Give a file the first name that is free: a.csv becomes a.1.csv."""
    names = (path.with_name(f"{path.stem}.{k}{path.suffix}") for k in count(1))
    old = next(name for name in names if not name.exists())
    path.rename(old)
    LOG.info("log: the rows of an earlier run in %s are now in %s", path, old.name)


class TensorBoard(Sink):
    """Scalars in runs/, where `tensorboard --logdir runs` finds them."""

    def __str__(self) -> str:
        return "tensorboard"

    def __init__(self) -> None:
        self.writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter()

    def write(self, metrics: Metrics) -> None:
        for name, value in metrics:
            if name != "step":
                self.writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self.writer.close()


class WandB(Sink):
    """The run that the script has begun with wandb.init(...), or a new one."""

    def __init__(self) -> None:
        self.wandb: Any = importlib.import_module("wandb")
        self.own = self.wandb.run is None
        self.run = self.wandb.init() if self.own else self.wandb.run

    def write(self, metrics: Metrics) -> None:
        self.run.log(metrics.asdict(), step=metrics.step)

    def close(self) -> None:
        if self.own:
            self.run.finish()
