"""What users rely on beside schedules, for on_gpus.py: each against plain PyTorch, eagerly.

Every feature trains a small model on one device, a pipeline of two, or two replicas of it with
sharded parameters, whatever the number of processes is.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared_capture import using
from small_models import Sifted, Skips, squared_error
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.capture import Captured, capture
from piper.models.llama import Llama, LlamaConfig, cross_entropy

PARTS, ROWS, VOCAB, DIM = 4, 2, 64, 32
IGNORED = -100
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
Data = list[tuple[Tensor, Tensor]]
Before = Callable[[piper.Trainer, int, tuple[Tensor, ...]], None]


@dataclass(frozen=True)
class Feature:
    """A model with its data, and what of the Trainer is used."""

    model: Callable[[], nn.Module]
    data: Callable[[int], Data]  # of so many rows
    loss_fn: Callable[..., Tensor] = cross_entropy
    schedule: str = "1f1b"
    zero: int = 3  # where there are replicas
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
    options: dict[str, Any] = field(default_factory=dict)  # of the Trainer
    share: Callable[[Tensor, float], float] | None = None  # of a microbatch: labels, whole batch
    whole: Callable[[Data], list[float]] | None = None  # what shares are parts of, step by step
    before: Before | None = None  # each step
    start: Callable[[], nn.Module] | None = None  # of the plain side, if not `model`
    resumed: bool = False  # saved after two steps, and gone on with by a new Trainer


def strategy_of(feature: Feature, world: int) -> piper.Strategy:
    if world == 1:
        return piper.Strategy([piper.Place(piper.where(), [0]), piper.Split("MB", PARTS)])
    dp = world // 2
    keep = {"zero": feature.zero} if dp > 1 else {}
    return piper.strategies.BUILDERS[feature.schedule](pp=2, microbatches=PARTS, dp=dp, **keep)


@functools.cache
def captured(model: Any, data: Any, loss_fn: Any, device: str) -> Captured:
    """Once for all features with this model: it takes seconds."""
    return capture(model(), loss_fn, tuple(data(ROWS)[0]), device)


def trained(feature: Feature, strategy: piper.Strategy, device: str, **how: Any) -> Any:
    """Losses and norms of every step, parameters on the first device, all data."""
    rows = PARTS * ROWS
    first = os.environ.get("RANK", "0") == "0"  # which captures for all
    known = captured(feature.model, feature.data, feature.loss_fn, device) if first else None

    def made() -> piper.Trainer:
        with using(known):
            return piper.Trainer(
                feature.model(), feature.loss_fn, strategy, optimizer=feature.optimizer,
                device=device, example=tuple(feature.data(rows)[0]), **feature.options, **how,
            )  # fmt: skip

    trainer = made()
    data = feature.data(rows * trainer.replicas)
    start = rows * trainer.replica
    seen = []
    for step, batch in enumerate(data):
        mine = tuple(tensor[start : start + rows] for tensor in batch)
        if feature.before:
            feature.before(trainer, step, mine)
        if feature.resumed and step == 2:
            folder = common_folder()
            trainer.save(folder)
            trainer.close()
            trainer = made()
            assert trainer.resume(folder) == 2
        metrics = trainer.step(*mine)
        seen.append((metrics.loss, metrics.grad_norm))
    whole = trainer.state_dict()
    trainer.close()
    return seen, whole, data, PARTS * trainer.replicas


def common_folder() -> str:
    """For all processes of this host."""
    folder = [tempfile.mkdtemp() + "/run"]
    if dist.is_initialized():
        dist.broadcast_object_list(folder)
    return folder[0]


def plainly(feature: Feature, data: Data, parts: int, device: str) -> Any:
    """Autograd in one process, microbatch after microbatch."""
    model = (feature.start or feature.model)().to(device)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer, found = feature.optimizer(named), []
    scheduler = feature.options.get("lr_scheduler", lambda _: None)(optimizer)
    totals = feature.whole(data) if feature.whole else [float(parts)] * len(data)
    for (inputs, labels), total in zip(data, totals, strict=True):
        loss = 0.0
        for some, wanted in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
            one = feature.loss_fn(model(some.to(device)), wanted.to(device))
            one = one * (feature.share(wanted, total) if feature.share else 1 / total)
            one.backward()
            loss += one.item()
        grads = [p.grad for _, p in named if p.grad is not None]
        norm = torch.stack([grad.double().norm() for grad in grads]).norm().item()
        clip(grads, norm, feature.options.get("max_norm"))
        found.append((loss, norm))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return found, {name: value.cpu() for name, value in model.state_dict().items()}


def clip(grads: list[Tensor], norm: float, limit: float | None) -> None:
    if limit is not None and norm > limit:
        for grad in grads:
            grad.mul_(limit / norm)


def compared(name: str, world: int, device: str, **how: Any) -> dict[str, float]:
    """How far Piper is from plain PyTorch, in parts of it."""
    feature = FEATURES[name]
    strategy = STRATEGIES.get((name, world)) or strategy_of(feature, world)
    seen, whole, data, parts = trained(feature, strategy, device, **how)
    wanted, parameters = REFERENCES.get(name, plainly)(feature, data, parts, device)
    errors = {
        what: max(far(a[k], b[k]) for a, b in zip(seen, wanted, strict=True))
        for k, what in enumerate(("loss", "norm"))
    }
    if whole is not None:
        pairs = [(whole[n].double(), p.double()) for n, p in parameters.items()]
        errors["parameters"] = max(
            ((a - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in pairs
        )
    return errors


def far(found: float, wanted: float) -> float:
    return abs(found - wanted) / max(abs(wanted), 1e-9)


def llama(tied: bool = False) -> nn.Module:
    torch.manual_seed(1)
    return Llama(LlamaConfig(vocab=VOCAB, dim=DIM, heads=2, layers=4, tied=tied), stages=2)


def frozen() -> nn.Module:
    model = llama()
    for parameter in next(iter(model.children())).parameters():
        parameter.requires_grad_(False)
    return model


def tokens(rows: int, lengths: tuple[int, ...] = (16, 16, 16)) -> Data:
    generator = torch.Generator().manual_seed(3)
    cuts = [torch.randint(VOCAB, (rows, length + 1), generator=generator) for length in lengths]
    return [(cut[:, :-1].contiguous(), cut[:, 1:].contiguous()) for cut in cuts]


def padded(rows: int) -> Data:
    """The further down a row, the fewer of its labels count."""
    data = tokens(rows)
    for _, labels in data:
        for row, label in enumerate(labels):
            label[16 - row % 12 :] = IGNORED
    return data


def counting(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        output.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED
    )


def summed(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def count(inputs: Tensor, labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def counts(data: Data) -> list[float]:
    return [float(count(*batch)) for batch in data]


def by_name(named: Any) -> torch.optim.Optimizer:
    """No decay of what is no matrix, and momentum: groups made from names and shapes."""
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in named:
        groups[parameter.dim() > 1 and "embed" not in name].append(parameter)
    made = [{"params": ps, "weight_decay": 0.1 * decay} for decay, ps in groups.items() if ps]
    return torch.optim.SGD(made, lr=0.05, momentum=0.9)


def from_name(name: str, empty: Tensor) -> None:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    empty.copy_(torch.randn(empty.shape, generator=generator) * 0.1)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Llama(LlamaConfig(vocab=VOCAB, dim=DIM, heads=2, layers=4), stages=2)


def filled() -> nn.Module:
    model = on_meta().to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            from_name(name, parameter)
    return model


class Dropped(nn.Module):
    """Two regions, a dropout in each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.drop(torch.tanh(self.first(x)))
        with piper.annotate("PP"):
            return self.drop(self.second(x))


def on_the_host(feature: Feature, data: Data, parts: int, device: str) -> Any:
    """Piper's masks are those of no generator: the same model on one device, a CPU, has them."""
    one = [piper.Place(piper.where(), [0]), piper.Split("MB", parts)]
    found = piper.rehearse(
        feature.model(), feature.loss_fn, one, data, optimizer=feature.optimizer, **feature.options
    )
    return list(zip(found.losses, found.grad_norms, strict=True)), found.parameters


def skips() -> nn.Module:
    torch.manual_seed(1)
    return Skips(dim=DIM, depth=2)


def numbers(rows: int) -> Data:
    generator = torch.Generator().manual_seed(3)
    draw = functools.partial(torch.randn, rows, DIM, generator=generator)
    return [(draw(), draw()) for _ in range(3)]


def tuning(trainer: piper.Trainer, step: int, batch: tuple[Tensor, ...]) -> None:
    if step == 1:
        trainer.tune(*batch)


def recording(trainer: piper.Trainer, step: int, batch: tuple[Tensor, ...]) -> None:
    """In a folder of each process, though the first one alone writes the file."""
    if step == 1:
        folder = Path(tempfile.mkdtemp())
        trainer.record(folder / "run.json", steps=1, profile=True)


def hugging_face() -> nn.Module:
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=DIM, intermediate_size=2 * DIM, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        tie_word_embeddings=False, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    first, second = ["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.norm"]
    piper.tag(model, "PP", [first, [*second, "lm_head"]])
    return model


def of_logits(output: Any, labels: Tensor) -> Tensor:
    return cross_entropy(output.logits, labels)


def its_own(output: Tensor, labels: Tensor) -> Tensor:
    return output + labels.sum()


SUM = {"reduction": "sum"}
RATES = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=3e-3, total_steps=9)
FEATURES: dict[str, Feature] = {
    "clipping": Feature(llama, tokens, options={"max_norm": 0.2}),
    "weights": Feature(
        llama, padded, counting, options={"loss_weight": count},
        share=lambda labels, total: float((labels != IGNORED).sum()) / total, whole=counts,
    ),
    "a sum": Feature(llama, tokens, summed, options=SUM, share=lambda labels, total: 1.0),
    "frozen": Feature(frozen, tokens),
    "tied, groups of parameters": Feature(lambda: llama(tied=True), tokens, optimizer=by_name),
    "other shapes": Feature(llama, functools.partial(tokens, lengths=(16, 24, 16, 24))),
    "on meta": Feature(on_meta, tokens, options={"init": from_name}, start=filled),
    "dropout": Feature(Dropped, numbers, squared_error, options={"seed": 5}),
    "skips": Feature(skips, numbers, squared_error, schedule="interleaved-1f1b", zero=1),
    "tuned": Feature(llama, tokens, before=tuning),
    "recorded": Feature(llama, tokens, before=recording),
    "hybrid": Feature(llama, tokens),
    "learning rates": Feature(llama, tokens, options={"lr_scheduler": RATES}),
    "resumed": Feature(llama, tokens, options={"lr_scheduler": RATES}, resumed=True),
    "hugging face": Feature(hugging_face, tokens, of_logits, zero=2),
    "unknown sizes": Feature(
        functools.partial(Sifted, DIM), numbers, its_own, options=SUM, zero=2,
        share=lambda labels, total: 1.0,
    ),
}  # fmt: skip
PAIRS = [[0, 1], [2, 3]]
STRATEGIES: dict[tuple[str, int], piper.Strategy] = {
    ("hybrid", 4): piper.Strategy([
        piper.Place(piper.where(), [0, 1, 2, 3]), piper.Split("MB", PARTS),
        piper.Replicate(piper.where(), PAIRS, zero=2),
    ]),
}  # fmt: skip
REFERENCES = {"dropout": on_the_host}


def wanted(world: int) -> list[str]:
    """Those with a strategy of their own are for so many processes only."""
    special = {name for name, _ in STRATEGIES}
    return [name for name in FEATURES if name not in special or (name, world) in STRATEGIES]
