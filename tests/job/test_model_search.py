"""A search: random models of kinds that no other test has, under random strategies.

    python tests/job/test_model_search.py 0 300 --jobs 14

prints one line of JSON for each model, and a table. Each model trains as plain PyTorch does on the
whole batch, or is refused with a fix, or a warning says that its microbatches compute with their
own rows, and it trains as a loop that accumulates their gradients.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "scripts")]

import searched_python  # noqa: F401 (more blocks)
import searched_rows  # noqa: F401 (more blocks)
import torch
from draws import drawn, draws
from searched_blocks import BLOCKS, IDS, D, Layer, T
from searched_losses import COUNTS, HEADS, SUMS, C
from torch import Tensor, nn

import piper
from piper import Place, Strategy, rehearse
from piper.errors import PiperError
from piper.strategies import BUILDERS

STEPS = 3
WRONG = ("different", "crash")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.8, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "nadam": partial(torch.optim.NAdam, lr=1e-2, eps=1e-3),
    "adamax": partial(torch.optim.Adamax, lr=1e-2, eps=1e-3),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, eps=1e-3, centered=True),
}
SHAPES = [  # pp, microbatches, dp, rows of a microbatch
    (1, 2, 1, 3), (1, 3, 2, 2), (2, 2, 1, 2), (2, 4, 1, 1), (2, 3, 2, 2), (3, 3, 1, 4),
    (1, 4, 1, 2),
]  # fmt: skip


class Net(nn.Module):
    """Blocks with tags, and a head. Some outputs of early layers skip to later ones."""

    def __init__(self, seed: int, head: Callable[..., Any], least: int) -> None:
        super().__init__()
        draw, self.head = random.Random(seed), head
        torch.manual_seed(seed)
        self.names = [draw.choice(list(BLOCKS)) for _ in range(max(least, draw.randint(3, 5)))]
        self.layers = nn.ModuleList(Layer(*BLOCKS[name]) for name in self.names)
        self.skip = draw.random() < 0.4
        self.out, self.gate = nn.Linear(D, C), nn.Parameter(torch.rand(D))
        self.mix = nn.Parameter(torch.randn(D, 3))
        if draw.random() < 0.2:
            draw.choice(list(self.layers)).requires_grad_(False)
        self.double()

    def forward(self, x: Tensor, ids: Tensor, keep: Tensor) -> Any:
        *layers, last = self.layers
        outputs: list[Tensor] = []
        for layer in layers:
            with piper.annotate("L"):
                x = layer(x, ids, keep)
                outputs.append(x)
        with piper.annotate("L"):
            x = last(x + 0.3 * outputs[0] if self.skip else x, ids, keep)
            return self.head(self, x, outputs[0])


@dataclass(frozen=True)
class Case:
    """A model, a loss, a strategy and an optimizer."""

    seed: int
    head: str
    loss: Callable[..., Tensor]
    optimizer: str
    strategy: Strategy
    described: str
    rows: int  # of a microbatch
    parts: int  # microbatches of all replicas
    options: dict[str, Any]

    def model(self) -> Net:
        stages = sum(isinstance(one, Place) for one in self.strategy)
        return Net(self.seed, HEADS[self.head][0], stages).train()

    def batches(self) -> list[tuple[Any, ...]]:
        draw, rows = torch.Generator().manual_seed(self.seed), self.rows * self.parts
        return [batch(rows, draw) for _ in range(STEPS)]


def batch(rows: int, draw: torch.Generator) -> tuple[Any, ...]:
    x = torch.randn(rows, T, D, generator=draw, dtype=torch.float64)
    ids = torch.randint(0, IDS, (rows, T), generator=draw)
    keep = torch.rand(rows, T, generator=draw) > 0.2
    keep[:, 0] = True
    labels = torch.randint(0, C, (rows, T), generator=draw)
    labels[:, 2:][torch.rand(rows, T - 2, generator=draw) < 0.3] = -100
    value = torch.randn(rows, generator=draw, dtype=torch.float64)
    weight = torch.rand(rows, generator=draw, dtype=torch.float64) + 0.1
    return x, ids, keep, {"labels": labels, "value": value, "weight": weight}


def case(seed: int) -> Case:
    draw = random.Random(1_000_003 + seed)
    head = (
        list(HEADS)[seed % len(HEADS)] if draw.random() < 0.5 else draw.choice(["plain", "pairs"])
    )
    loss = draw.choice(HEADS[head][1])
    schedule, (pp, microbatches, dp, rows) = draw.choice(list(BUILDERS)), draw.choice(SHAPES)
    options: dict[str, Any] = {"zero": draw.randrange(4) if dp > 1 else 0}
    options |= {"tp": 2} if draw.random() < 0.25 else {}
    options |= {"remat": True} if draw.random() < 0.3 else {}
    while True:  # not every schedule has every size
        try:
            built = BUILDERS[schedule](pp=pp, microbatches=microbatches, dp=dp, **options)
            break
        except PiperError:
            schedule, (pp, microbatches, dp, rows) = "1f1b", draw.choice(SHAPES)
    replicas = dp * (2 if schedule == "dualpipe" else 1)
    text = f"{schedule} pp={pp} microbatches={microbatches} dp={dp} {options}"
    more = {"max_norm": 0.5} if draw.random() < 0.3 else {}
    chosen = draw.choice(list(OPTIMIZERS))
    return Case(seed, head, loss, chosen, built, text, rows, microbatches * replicas, more)


Result = tuple[list[float], dict[str, Tensor]]


def plainly(case: Case, parts: int) -> Result:
    """A plain loop: the whole batch, or so many parts of it, weighted by what their loss counts."""
    model, losses = case.model(), []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](trained)
    for *given, labels in case.batches():
        optimizer.zero_grad()
        pieces = zip(*(t.chunk(parts) for t in given), strict=True)
        wanted = [{n: t.chunk(parts)[k] for n, t in labels.items()} for k in range(parts)]
        count = COUNTS.get(id(case.loss), lambda _: 1)
        weights = [float(count(one)) for one in wanted]
        found = [case.loss(model(*a), b) for a, b in zip(pieces, wanted, strict=True)]
        total = 1.0 if case.loss in SUMS else sum(weights)
        loss = sum(w * one for w, one in zip(weights, found, strict=True)) / total
        loss.backward()
        if "max_norm" in case.options:
            torch.nn.utils.clip_grad_norm_(trained, case.options["max_norm"])
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


class Warned(logging.Handler):
    """Keeps the warnings that Piper logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def outcome(case: Case) -> str:
    """equal, warned, refused, different, or invalid (plain PyTorch cannot train it)."""
    try:
        whole = plainly(case, 1)
    except Exception as error:
        return f"invalid: {error}"
    log, handler = logging.getLogger("piper"), Warned()
    log.addHandler(handler)
    optimizer = OPTIMIZERS[case.optimizer]
    given = case.model(), case.loss, case.strategy, case.batches()
    try:
        found = rehearse(*given, optimizer=optimizer, **case.options)
    except PiperError as refused:
        return f"refused: {refused}"
    finally:
        log.removeHandler(handler)
    result = list(found.losses), dict(found.parameters)
    differs = difference(result, whole)
    said = [one for one in handler.seen if "accumulates gradients" in one]
    if not differs:
        return "equal: with a warning" if said else "equal"
    if said and not difference(result, plainly(case, case.parts)):
        return f"warned: {said[0]}"
    return f"different: {differs}"


def difference(found: Result, wanted: Result) -> str:
    for step, (one, other) in enumerate(zip(found[0], wanted[0], strict=True)):
        if apart(torch.tensor(one), torch.tensor(other)):
            return f"the loss of step {step}: {one} instead of {other}"
    for name, other in wanted[1].items():
        if name in found[1] and apart(found[1][name], other):
            return f"{name} by {(found[1][name] - other).abs().max():.1e}"
    return ""


def apart(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return True
    return not torch.allclose(one, other, rtol=1e-7, atol=1e-8, equal_nan=True)


QUICK = 3  # a seed of small blocks that train


@drawn
def test_a_model_of_a_new_kind_trains_as_in_pytorch_or_is_refused_or_warned_of() -> None:
    for seed in (QUICK, *range(draws(0, 300))):
        found = case(seed)
        result = outcome(found)

        accepted = result.partition(":")[0] in ("equal", "warned", "invalid")
        assert accepted or "fix:" in result, f"{found}: {result}"


def line(case: Case) -> dict[str, Any]:
    """The outcome as a line of JSON."""
    try:
        kind, _, why = outcome(case).partition(": ")
    except Exception as error:
        kind, why = "crash", f"{type(error).__name__} {error}"
    loss = getattr(case.loss, "__qualname__", repr(case.loss))
    blocks = case.model().names
    about = {"seed": case.seed, "head": case.head, "loss": loss, "blocks": blocks}
    return {**about, "strategy": case.described, "outcome": kind, "why": why}


def searched(seed: int) -> dict[str, Any]:
    """The line of one model. One thread: the other cores have models of their own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return line(case(seed))


def in_processes(seeds: range, jobs: int) -> Iterator[dict[str, Any]]:
    """The lines as they come. A model that ends its process is a crash, as those beside it are."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(searched, seed): seed for seed in seeds}
        for done in as_completed(waiting):
            if (error := done.exception()) is None:
                yield done.result()
            else:
                yield {"seed": waiting[done], "outcome": "crash", "why": repr(error)}


def table(found: Sequence[dict[str, Any]]) -> str:
    """How many models had each outcome, and the seeds of those that none should have."""
    counts = Counter(one["outcome"] for one in found)
    rows = [f"{kind:<10} {many:>5}" for kind, many in counts.most_common()]
    wrong = [f"{one['outcome']}: seed {one['seed']}" for one in found if one["outcome"] in WRONG]
    return "\n".join([*rows, f"{'all':<10} {len(found):>5}", *wrong])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("many", type=int, help="how many models")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread")
    args = parser.parse_args()
    seeds, found = range(args.first, args.first + args.many), []
    for told in map(searched, seeds) if args.jobs == 1 else in_processes(seeds, args.jobs):
        found.append(told)
        print(json.dumps(told), flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
