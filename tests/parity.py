"""Train under a strategy, and train plainly: the two sides of the one law."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from shared_capture import using
from small_models import Skips, squared_error
from torch import Tensor, nn

from piper.capture import Captured, capture
from piper.directives import Place, Replicate, Split, Strategy
from piper.errors import PiperError
from piper.ir.filters import where
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.runtime.state import replica_digests
from piper.runtime.state.device_state import assembled
from piper.trainer import Trainer

STEPS, LENGTH, VOCAB, FEATURES = 3, 6, 32, 8
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)


@dataclass
class Result:
    """What a run gave, step by step, and the parameters at the end."""

    losses: list[dict[int, float]]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    loss: list[float]
    whole: dict[str, Tensor] | None = None  # the state dict of the whole model, on device 0


def build(name: str, stages: int) -> tuple[nn.Module, Any]:
    """A model and its loss; the same weights in every process."""
    torch.manual_seed(1)
    if name == "llama":
        config = LlamaConfig(vocab=VOCAB, dim=16, heads=2, layers=stages, tied=True)
        return Llama(config, stages=stages), cross_entropy
    if name == "skips":
        return Skips(dim=FEATURES, depth=stages // 2), squared_error
    if name == "hf":
        return hugging_face(stages), hf_loss
    raise KeyError(name)


def hugging_face(stages: int) -> nn.Module:
    import transformers

    from piper.capture import tag

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=stages,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    groups = [[f"model.layers.{layer}"] for layer in range(stages)]
    groups[0].insert(0, "model.embed_tokens")
    groups[-1] += ["model.norm", "lm_head"]
    tag(model, "PP", groups)
    return model


def hf_loss(output: Any, labels: Tensor) -> Tensor:
    return cross_entropy(output.logits, labels)


def batches(name: str, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Different data in every row and step."""
    generator = torch.Generator().manual_seed(7)

    def one() -> tuple[Tensor, Tensor]:
        if name == "skips":
            size = (rows, FEATURES)
            return torch.randn(size, generator=generator), torch.randn(size, generator=generator)
        size = (rows, LENGTH)
        draw = partial(torch.randint, 0, VOCAB, size, generator=generator)
        return draw(), draw()

    return [one() for _ in range(STEPS)]


@cache
def plain(name: str, stages: int, rows: int, parts: int, max_norm: float | None = None) -> Result:
    """Plain autograd in one process, microbatch after microbatch."""
    model, loss_fn = build(name, stages)
    model.train()
    optimizer = ADAMW(model.parameters())
    result = Result([], [], [], {}, [])
    for x, y in batches(name, rows):
        optimizer.zero_grad()
        losses = {}
        for part, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            loss = loss_fn(model(a), b)
            (loss / parts).backward()
            losses[part] = loss.item()
        named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
        result.norms.append(norm([p for _, p in named], max_norm))
        result.grads.append({n: p.grad.clone() for n, p in named})
        result.losses.append(losses)
        result.loss.append(sum(losses.values()) / parts)
        optimizer.step()
    named = [*model.named_parameters(), *model.named_buffers()]
    result.parameters = {name: tensor.detach().clone() for name, tensor in named}
    return result


def norm(parameters: list[nn.Parameter], max_norm: float | None) -> float:
    limit = float("inf") if max_norm is None else max_norm
    return float(torch.nn.utils.clip_grad_norm_(parameters, limit))


@cache
def captured(name: str, stages: int, size: int) -> tuple[nn.Module, Any, Captured]:
    """Capture once per shape, on the device that captures for all."""
    model, loss_fn = build(name, stages)
    x, y = batches(name, size)[0]
    return model, loss_fn, capture(model, loss_fn, (x, y))


@cache
def uncaptured(name: str, stages: int) -> tuple[nn.Module, Any, None]:
    return *build(name, stages), None


def train(
    rank: int, name: str, stages: int, rows: int, text: str, max_norm: float | None = None
) -> Result:
    """One device of a run under a strategy (as JSON)."""
    strategy = Strategy.from_json(text)
    size = rows // strategy.microbatches
    model, loss_fn, found = captured(name, stages, size) if rank == 0 else uncaptured(name, stages)
    data = batches(name, rows)
    with using(found):
        trainer = Trainer(
            model, loss_fn, strategy, optimizer=ADAMW, example=data[0], max_norm=max_norm
        )
    result = Result([], [], [], {}, [])
    grads: dict[str, Tensor] = {}
    for program in trainer._programs.ready.values():
        program.watch = lambda bucket: grads.update(  # type: ignore[method-assign]
            (name, parameter.grad.clone()) for name, _, _, parameter, _ in bucket.parts()
        )
    for batch in data:
        grads.clear()
        metrics = trainer.step(*batch)
        result.losses.append(dict(metrics.losses))
        result.norms.append(metrics.grad_norm)
        result.loss.append(metrics.loss)
        result.grads.append(dict(grads))
    result.parameters = assembled(trainer._programs.state.parts())
    result.whole = trainer.state_dict()
    trainer.close()
    return result


def assert_same(results: list[Result], reference: Result) -> None:
    """Losses of microbatches bitwise while the parameters are; all else to 1e-6, relative."""
    bitwise = True
    for step in range(STEPS):
        losses: dict[int, float] = {}
        grads: dict[str, Tensor] = {}
        for result in results:
            losses.update(result.losses[step])
            assert not grads.keys() & result.grads[step].keys(), "a gradient on two devices"
            grads.update(result.grads[step])
        assert losses.keys() == reference.losses[step].keys()
        if bitwise:
            assert losses == reference.losses[step]
        assert grads.keys() == reference.grads[step].keys(), "a parameter without its gradient"
        for name, grad in grads.items():
            close(grad, reference.grads[step][name], f"gradient of {name}, step {step}")
            bitwise &= torch.equal(grad, reference.grads[step][name])
        for result in results:
            close(torch.tensor(result.norms[step]), torch.tensor(reference.norms[step]), "norm")
            close(torch.tensor(result.loss[step]), torch.tensor(reference.loss[step]), "loss")
    for result in results:
        for name, tensor in result.parameters.items():
            close(tensor, reference.parameters[name], f"parameter {name}")
    for name, tensor in (results[0].whole or {}).items():
        close(tensor, reference.parameters.get(name, tensor), f"state {name}")
    everywhere = set().union(*(result.parameters for result in results))
    assert set(reference.grads[-1]) <= everywhere, "a parameter that no device has"


def close(found: Tensor, wanted: Tensor, what: str) -> None:
    """Relative to the size of the whole tensor, as sums in another order differ."""
    error = (found.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-30)
    assert error < 1e-6, f"{what}: relative error {error:.2e}"


CASES = (
    "seed",
    "parts",
    "rows",
    "max_norm",
    "model",
    "dropout",
)  # what the second device has otherwise
TABLES = ("trained", "frozen", "buffer", "swapped")  # of which one row differs


def call_alone(rank: int, call: str, folder: str) -> str:
    """What is said when the first process saves, or looks at the weights, for itself."""
    torch.manual_seed(0)
    devices, rows = [0, 1], torch.zeros(4, 4)
    strategy = [Place(where(), devices), Replicate(where(), devices), Split("MB", 2)]
    loss = nn.functional.mse_loss
    trainer = Trainer(nn.Linear(4, 4), loss, strategy, example=(rows, rows), optimizer=ADAMW)
    given = {"save": (folder,), "resume": (folder,), "record": (folder,), "tune": (rows, rows)}
    try:
        if rank == 0:
            getattr(trainer, call)(*given.get(call, ()))
        trainer.step(rows, rows)
    except PiperError as error:
        return str(error)
    finally:
        trainer.close()
    return "nothing"


def scaled(by: float) -> Any:
    return lambda y, target: (y - target).square().mean() * by


def shifted(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target - 1).square().mean()


def squared(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def weighed(*batch: torch.Tensor) -> float:
    return 1.0


def weighed_more(*batch: torch.Tensor) -> float:
    return 2.0


ADAM, SGD, STEP = torch.optim.Adam, torch.optim.SGD, torch.optim.lr_scheduler.StepLR
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lr": ({"optimizer": partial(SGD, lr=0.1)}, {"optimizer": partial(SGD, lr=0.2)}),
    "class": ({"optimizer": partial(SGD, lr=0.1)}, {"optimizer": partial(ADAM, lr=0.1)}),
    "betas": (
        {"optimizer": partial(ADAM, betas=(0.9, 0.99))},
        {"optimizer": partial(ADAM, betas=(0.9, 0.95))},
    ),
    "lambda": (
        {"optimizer": lambda named: SGD(named, lr=0.1)},
        {"optimizer": lambda named: SGD(named, lr=0.3)},
    ),
    "scheduler": (
        {"lr_scheduler": partial(STEP, step_size=1)}, {"lr_scheduler": partial(STEP, step_size=2)}
    ),
    "no scheduler": ({"lr_scheduler": partial(STEP, step_size=1)}, {"lr_scheduler": None}),
    "loss": ({"loss_fn": squared}, {"loss_fn": shifted}),
    "loss of torch": ({"loss_fn": nn.functional.mse_loss}, {"loss_fn": nn.functional.l1_loss}),
    "closure": ({"loss_fn": scaled(1.0)}, {"loss_fn": scaled(2.0)}),
    "loss module": ({"loss_fn": nn.HuberLoss(delta=1.0)}, {"loss_fn": nn.HuberLoss(delta=2.0)}),
    "weight": ({"loss_weight": weighed}, {"loss_weight": weighed_more}),
}  # fmt: skip


def compare_options(rank: int) -> dict[str, str]:
    """What a device says when each of these options differs on the other one."""
    return {name: _message({**given[rank]}) for name, given in OPTIONS.items()}


def _message(options: dict[str, Any]) -> str:
    loss = options.pop("loss_fn", squared)
    strategy = [Place(where(), [0, 1]), Replicate(where(), [0, 1])]
    torch.manual_seed(0)
    rows = torch.zeros(6, 4)
    try:
        Trainer(nn.Linear(4, 4), loss, strategy, example=(rows, rows), **options).close()
    except PiperError as error:
        return str(error).partition("\n")[0]
    return "fine"


def drift(rank: int, zero: int, folder: str, frozen: bool = False) -> tuple[str, str]:
    """What devices say of their replicas: while they are equal, and after one has changed."""
    torch.manual_seed(0)
    model, devices = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [0, 1]
    model[1].requires_grad_(not frozen)
    strategy = [Place(where(), devices), Replicate(where(), devices, zero=zero)]
    rows = torch.randn(6, 4) + rank
    trainer = Trainer(model, squared, strategy, example=(rows, rows), optimizer=ADAMW)
    said = []
    replica_digests.EVERY = 2
    try:
        for spoiled in (False, True):
            try:
                if spoiled and rank == 1:
                    spoil(trainer, "1.weight")
                for _ in range(2):
                    trainer.step(rows, rows)
                trainer.save(folder)
            except PiperError as error:
                said.append(str(error))
            else:
                said.append("fine")
    finally:
        replica_digests.EVERY = 100
        trainer.close()
    return said[0], said[1]


def spoil(trainer: Trainer, wanted: str) -> None:
    """Flip the last bit of one number, as hardware might."""
    for bucket in trainer._programs.state.buckets.values():
        for part in bucket.parts():
            if part.name == wanted:
                part.parameter.data.view(-1).view(torch.int32)[0] ^= 1


class Table(nn.Module):
    """The second device has another number in it, such as one that was drawn without a seed."""

    def __init__(self, case: str, rank: int) -> None:
        super().__init__()
        values = torch.zeros(100_000, 4)  # more than is compared in each step
        values[1234, 3 if case == "swapped" and rank else 0] = 1.0
        values[4711] = 1e-6 * (rank if case != "swapped" else 1)
        if case == "buffer":
            self.register_buffer("values", values)
        else:
            self.values = nn.Parameter(values, requires_grad=case != "frozen")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.values[0]


def compare_notes(rank: int, case: str = "") -> str:
    """What a device says when the other one was given something else."""
    other = {name: rank * (name == case) for name in CASES}
    torch.manual_seed(other["seed"])
    middle = nn.Tanh() if other["model"] else nn.Dropout(0.1 + 0.1 * other["dropout"])
    model = nn.Sequential(nn.Linear(4, 4), middle)
    if case in TABLES:
        model.append(Table(case, rank))
    devices = [0, 1]
    strategy = [
        Place(where(), devices), Replicate(where(), devices), Split("MB", 2 + other["parts"])
    ]  # fmt: skip
    rows = torch.zeros(6 + 6 * other["rows"], 4)
    options = {"max_norm": 1.0 + other["max_norm"], "optimizer": ADAMW}
    try:
        Trainer(model, nn.functional.mse_loss, strategy, example=(rows, rows), **options).close()
    except PiperError as error:
        return str(error)
    return "fine"
