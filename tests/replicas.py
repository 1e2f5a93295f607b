"""Replicas against one process on the whole batch, in float64: what is not exact shows at once."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import experts
import torch
from shared_capture import using
from torch import Tensor, nn
from torch.nn import functional

from piper.capture import Captured, annotate, capture
from piper.directives import Place, Replicate, Split, Strategy
from piper.errors import PiperError
from piper.ir.filters import where
from piper.job.compile.division import feeds_of
from piper.job.numerics.differences import place_of
from piper.models.llama import Llama, LlamaConfig
from piper.runtime.state.device_state import DeviceState, Part, assembled
from piper.trainer import Trainer

STEPS, VOCAB, LENGTH, FEATURES = 3, 17, 5, 7
WIDE = 16  # the vocabulary of a model whose sizes divide by four
TOLERANCE = 1e-12
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


class Uneven(nn.Module):
    """Sizes that divide by nothing, a single number, a frozen layer, a matrix that is tied."""

    def __init__(self, stages: int, layers: int = 2) -> None:
        super().__init__()
        self.stages, self.layers = stages, layers
        count = stages * layers
        self.wide = nn.ModuleList(nn.Linear(FEATURES, 5) for _ in range(count))
        self.back = nn.ModuleList(nn.Linear(5, FEATURES) for _ in range(count))
        self.gain = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))
        self.tied = nn.Parameter(torch.randn(FEATURES, FEATURES) / 3)
        for layer in self.back[::2]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP", 0):
            x = x @ self.tied
        for k in range(self.stages * self.layers):
            with annotate("PP", k // self.layers), annotate("L", k):
                x = x + self.gain[k] * torch.tanh(self.back[k](self.wide[k](x)))
        with annotate("PP", self.stages - 1):
            return x @ self.tied.t()


@dataclass
class Run:
    """What one device saw, step by step; parts of parameters, since it may have shards only."""

    losses: list[dict[int, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    grads: list[list[Part]] = field(default_factory=list)
    digests: list[dict[str, str]] = field(default_factory=list)
    parameters: list[Part] = field(default_factory=list)
    optimizer: dict[str, list[Part]] = field(default_factory=dict)
    whole: dict[str, Tensor] | None = None


def build(name: str, stages: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    if name == "uneven":
        return Uneven(stages).double(), functional.mse_loss
    if name.startswith("moe"):
        return experts.Mixed(stages, name.removeprefix("moe ")).double(), experts.loss
    if name == "wide":
        config = LlamaConfig(vocab=WIDE, dim=16, heads=4, kv_heads=2, hidden=24, layers=stages)
        return Llama(config, stages=stages).double(), cross_entropy
    config = LlamaConfig(vocab=VOCAB, dim=12, heads=2, hidden=10, layers=stages, tied=True)
    return Llama(config, stages=stages).double(), cross_entropy


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(name: str, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Different data in every row and step."""
    draw = torch.Generator().manual_seed(11)
    if name == "uneven":
        size = (rows, FEATURES)
        rand = partial(torch.randn, size, generator=draw, dtype=torch.float64)
    elif name.startswith("moe"):
        size = (rows, LENGTH, experts.WIDTH)
        rand = partial(torch.randn, size, generator=draw, dtype=torch.float64)
    elif name == "wide":
        rand = partial(torch.randint, 0, WIDE, (rows, 8), generator=draw)
    else:
        rand = partial(torch.randint, 0, VOCAB, (rows, LENGTH), generator=draw)
    return [(rand(), rand()) for _ in range(STEPS)]


@cache
def plain(name: str, stages: int, rows: int, parts: int, max_norm: float | None = None) -> Run:
    """Plain autograd in one process, on the batch of all replicas."""
    model, loss_fn = build(name, stages)
    optimizer = ADAMW(p for p in model.parameters() if p.requires_grad)
    run = Run()
    for x, y in batches(name, rows):
        optimizer.zero_grad()
        losses = {}
        for part, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            loss = loss_fn(model(a), b)
            (loss / parts).backward()
            losses[part] = loss.item()
        named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
        limit = float("inf") if max_norm is None else max_norm
        run.norms.append(nn.utils.clip_grad_norm_([p for _, p in named], limit).item())
        run.grads.append([part_of(n, p.grad.clone()) for n, p in named])
        run.losses.append(losses)
        run.loss.append(sum(losses.values()) / parts)
        optimizer.step()
    run.parameters = [part_of(n, p.detach()) for n, p in model.named_parameters()]
    for name_, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            run.optimizer.setdefault(key, []).append(part_of(name_, value))
    return run


def part_of(name: str, tensor: Tensor) -> Part:
    return Part(name, 0, tuple(tensor.shape), tensor.flatten())


@cache
def captured(name: str, stages: int, size: int) -> tuple[nn.Module, Any, Captured]:
    """Models that differ in values only are captured once."""
    alike = experts.ALIKE.get(name.removeprefix("moe "))
    if name.startswith("moe") and alike:
        return *build(name, stages), captured(f"moe {alike}", stages, size)[2]
    model, loss_fn = build(name, stages)
    return model, loss_fn, capture(model, loss_fn, batches(name, size)[0])


@cache
def uncaptured(name: str, stages: int) -> tuple[nn.Module, Any, None]:
    return *build(name, stages), None


def known(rank: int, name: str, stages: int, size: int) -> tuple[nn.Module, Any, Captured | None]:
    """Only the first device captures."""
    return captured(name, stages, size) if rank == 0 else uncaptured(name, stages)


def train_all(
    rank: int,
    name: str,
    stages: int,
    rows: int,
    texts: Sequence[str],
    max_norm: float | None = None,
) -> list[Run]:
    return [train(rank, name, stages, rows, text, max_norm) for text in texts]


def train(
    rank: int, name: str, stages: int, rows: int, text: str, max_norm: float | None = None
) -> Run:
    """One device; `rows` are those of all replicas together, of which it feeds its own."""
    strategy = Strategy.from_json(text)
    feeds = feeds_of(strategy)
    parts = strategy.microbatches * len(feeds.teams)
    model, loss_fn, found = known(rank, name, stages, rows // parts)
    mine = [tuple(t.chunk(len(feeds.feeds))[feeds.feed(rank)] for t in batch)
            for batch in batches(name, rows)]  # fmt: skip
    with using(found):
        trainer = Trainer(
            model, loss_fn, strategy, optimizer=ADAMW, example=mine[0], max_norm=max_norm
        )
    assert (trainer.replica, trainer.replicas) == (feeds.feed(rank), len(feeds.feeds))
    run, grads = Run(), []
    for program in trainer._programs.ready.values():
        program.watch = lambda bucket: grads.extend(  # type: ignore[method-assign]
            Part(name, first, tuple(shape), parameter.grad.flatten().clone(), order)
            for name, first, shape, parameter, order in bucket.parts()
        )
    for batch in mine:
        grads.clear()
        metrics = trainer.step(*batch)
        first = trainer.replica * trainer._job.microbatches
        run.losses.append({first + part: loss for part, loss in metrics.losses.items()})
        run.norms.append(metrics.grad_norm)
        run.loss.append(metrics.loss)
        run.grads.append(list(grads))
        run.digests.append(digests(trainer))
    run.parameters = [
        Part(p.name, p.first, p.shape, p.values.clone(), p.order)
        for p in trainer._programs.state.parts()
    ]
    run.optimizer = optimizer_parts(trainer._programs.state)
    run.whole = trainer.state_dict()
    trainer.close()
    return run


def digests(trainer: Trainer) -> dict[str, str]:
    """The exact bits of every parameter here."""
    return {
        f"{part.name}[{part.first}:]{part.order}": hashlib.sha256(
            part.values.numpy().tobytes()
        ).hexdigest()
        for part in trainer._programs.state.parts()
    }


def assert_same(runs: Sequence[Run], reference: Run) -> None:
    """Losses, gradients, norm, parameters, optimizer state; replicas equal to the bit."""
    for step in range(STEPS):
        losses = {part: loss for run in runs for part, loss in run.losses[step].items()}
        close(losses, reference.losses[step], f"losses of step {step}")
        compare([run.grads[step] for run in runs], reference.grads[step], f"gradient, step {step}")
        for run in runs:
            assert abs(run.norms[step] / reference.norms[step] - 1) < TOLERANCE, "norm"
            assert abs(run.loss[step] / reference.loss[step] - 1) < TOLERANCE, "loss"
        assert_bitwise(runs, step)
    compare([run.parameters for run in runs], reference.parameters, "parameter")
    for key, parts in reference.optimizer.items():
        compare([run.optimizer[key] for run in runs if key in run.optimizer], parts, key)
    whole = dict(runs[0].whole or {})
    for part in reference.parameters:
        close_tensors(whole[part.name].flatten(), part.values, f"state dict, {part.name}")


def assert_bitwise(runs: Sequence[Run], step: int) -> None:
    found: dict[str, str] = {}
    for run in runs:
        for name, digest in run.digests[step].items():
            assert found.setdefault(name, digest) == digest, f"replicas differ in {name}"


def compare(parts: Sequence[Sequence[Part]], reference: Sequence[Part], what: str) -> None:
    """All parts together cover every element, and every part is right by itself."""
    wanted = {part.name: part.values for part in reference}
    for part in (part for row in parts for part in row):
        there = wanted[part.name][place_of(part)]
        close_tensors(part.values, there, f"{what} of {part.name}")
    names = {part.name for row in parts for part in row}
    assert names == set(wanted), f"{what}: {set(wanted) ^ names}"
    whole = assembled(filled(parts))
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"{what} of {name} is not whole"


def filled(parts: Sequence[Sequence[Part]]) -> list[Part]:
    """Parts on a ground of NaNs, which shows what no part covers."""
    flat = [part for row in parts for part in row]
    ground = {part.name: torch.full(part.shape, float("nan")).flatten().double() for part in flat}
    like = {part.name: part for part in flat}
    empty = (Part(name, 0, like[name].shape, t, like[name].order) for name, t in ground.items())
    return [*empty, *flat]


def close(found: dict[int, float], wanted: dict[int, float], what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for part, loss in wanted.items():
        assert abs(found[part] / loss - 1) < TOLERANCE, f"{what}: {part}"


def close_tensors(found: Tensor, wanted: Tensor, what: str) -> None:
    error = (found.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-30)
    assert error < TOLERANCE, f"{what}: relative error {error:.2e}"


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def data(rows: int = 24, width: int = 6, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    draw = partial(torch.randn, rows, width, generator=generator, dtype=torch.float64)
    return [(draw(), draw()) for _ in range(steps)]


class Net(nn.Module):
    """Two regions; what is between them is up to the test."""

    def __init__(self, *middle: nn.Module, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.middle = nn.Sequential(*middle)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.middle(torch.tanh(self.first(x)))
        with annotate("PP"):
            return self.last(x)


def masked(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the rows that count: different numbers of them in every microbatch."""
    counts = (target[:, 0] > -0.7).double()
    return ((output - target).square().mean(1) * counts).sum() / counts.sum()


def train_weighed(rank: int, text: str) -> tuple[list[float], dict[str, Tensor] | None]:
    """One device of two whose batches weigh differently."""
    mine = [tuple(t.chunk(2)[rank] for t in batch) for batch in data()]
    trainer = Trainer(
        Net(), masked, Strategy.from_json(text), example=mine[0], optimizer=SGD,
        loss_weight=lambda x, y: (y[:, 0] > -0.7).sum(),
    )  # fmt: skip
    losses = [trainer.step(*batch).loss for batch in mine]
    whole = trainer.state_dict()
    trainer.close()
    return losses, whole


def train_differently(rank: int, case: str) -> str:
    """Two replicas with batches of different lengths, or two stages with different data."""
    x, y = data()[0]
    if case == "shapes":
        strategy = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)])
        later = (x[: 8 - 4 * rank], y[: 8 - 4 * rank])
    else:
        strategy = Strategy([Place(where(PP=0), [0]), Place(where(PP=1), [1]), Split("MB", 2)])
        later = (x[8 * rank : 8 + 8 * rank], y[8 * rank : 8 + 8 * rank])
    example = (x[:8], y[:8])
    trainer = Trainer(Net(), functional.mse_loss, strategy, example=example, optimizer=SGD)
    try:
        for batch in [example, later] if "later" in case else [later]:
            trainer.step(*batch)
    except PiperError as error:
        return str(error)
    finally:
        trainer.close()
    return "nothing was said"


def train_on_the_same(rank: int) -> list[str]:
    """What is said to two replicas that have the same batches in two steps, and then others."""
    (x, y), log = data()[0], logging.getLogger("piper")
    strategy = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)])
    texts = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    trainer = Trainer(Net(), functional.mse_loss, strategy, example=(x[:8], y[:8]), optimizer=SGD)
    for first in (0, 0, 8 * rank):
        trainer.step(x[first : first + 8], y[first : first + 8])
    trainer.close()
    log.removeHandler(handler)
    return texts


class Growing(nn.Module):
    """Large batches use one more layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.more = nn.Linear(6, 6), nn.Linear(6, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = torch.tanh(self.first(x))
        with annotate("PP"):
            return self.more(x) if x.shape[0] > 4 else x * 2


def train_growing(rank: int) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
    """The second kind of batch brings in parameters, and a stream, that the first had not."""
    x, y = data()[0]
    keep = [Replicate(where(PP=0), [0, 1], zero=1)]
    keep += [Replicate(where(PP=1), [0, 1], zero=2, reduce_stream="other")]
    strategy = Strategy([Place(where(), [0, 1]), *keep])
    trainer = Trainer(
        Growing(), functional.mse_loss, strategy, example=(x[:4], y[:4]), optimizer=SGD
    )
    for rows in (4, 8, 8):
        trainer.step(x[:rows], y[:rows])
    mine = [
        Part(p.name, p.first, p.shape, p.values.clone(), p.order)
        for p in trainer._programs.state.parts()
    ]
    everyone: list[list[Part]] = [[], []]
    torch.distributed.all_gather_object(everyone, mine)
    whole = trainer.state_dict()
    trainer.close()
    return whole, assembled(part for parts in everyone for part in parts)


def optimizer_parts(state: DeviceState) -> dict[str, list[Part]]:
    """By the name of a state ("exp_avg"), what optimizers here hold of it."""
    found: dict[str, list[Part]] = {}
    for bucket in state.buckets.values():
        if bucket.optimizer is not None:
            for name, first, shape, parameter, order in bucket.parts():
                for key, value in bucket.optimizer.state.get(parameter, {}).items():
                    whole = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                    flat = value.flatten() if whole else torch.as_tensor(value).reshape(1)
                    part = Part(name, first, tuple(shape), flat, order) if whole else None
                    found.setdefault(key, []).append(part or Part(name, 0, (), flat))
    return found
