"""Evaluation and prediction give what plain PyTorch gives with the trained parameters."""

from __future__ import annotations

import copy
from contextlib import closing
from functools import cache, partial

import pytest
import torch
from draws import every, one_of
from evaluations import SGD, Blocks, Threads, block_loss, close, held_out
from experts import WIDTH, Mixed
from experts import loss as mixed_loss
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.directives.strategy import as_strategy
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.options import Options
from piper.strategies import (
    dualpipev,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    zb_h1,
    zbv,
)

ROWS, STEPS = 8, 2


class Text(nn.Module):
    """Attention layers, with the embedding as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("L"):
            x = self.embed(tokens)
        for layer in self.layers:
            with piper.annotate("L"):
                x = layer(x)
        with piper.annotate("L"):
            return x @ self.embed.weight.T


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.into(self.norm(x)).unflatten(-1, (3, 2, 4))
        q, k, v = (one.transpose(1, 2) for one in heads.unbind(2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@cache
def base(name: str) -> tuple[Job, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    options = Options(optimizer=SGD, device="cpu")
    draw = partial(torch.randint, 0, 32, (ROWS, 6))
    if name == "text":
        model: nn.Module = Text().double()
        data = [(draw(), draw()) for _ in range(STEPS + 1)]
        return Job(model, token_loss, as_strategy(None), options), data
    width = (ROWS, 6) if name.startswith("blocks") else (ROWS, 3, WIDTH)
    data = [(torch.randn(width).double(), torch.randn(width).double()) for _ in range(STEPS + 1)]
    if name == "experts":
        return Job(Mixed(2, "spread").double(), mixed_loss, as_strategy(None), options), data
    model = Blocks(norm=name == "blocks with batch norm").double()
    return Job(model, block_loss, as_strategy(None), options), data


STRATEGIES = {
    "one device": ("text", None),
    "1f1b": ("text", one_f_one_b(pp=2, microbatches=4)),
    "1f1b, zero 1": ("text", one_f_one_b(pp=2, microbatches=2, dp=2, zero=1)),
    "gpipe, zero 2": ("text", gpipe(pp=2, microbatches=2, dp=2, zero=2)),
    "interleaved, zero 3": (
        "text", interleaved_one_f_one_b(pp=2, microbatches=2, dp=2, zero=3, virtual=2)
    ),
    "tensor parallel": ("text", one_f_one_b(pp=1, microbatches=2, tp=2)),
    "context parallel": ("text", one_f_one_b(pp=1, microbatches=2, cp=2)),
    "tensor parallel, zero 3": ("text", gpipe(pp=1, microbatches=1, dp=2, tp=2, zero=3)),
    "recomputed": ("text", one_f_one_b(pp=2, microbatches=2, remat=True)),
    "split backward": ("blocks", zb_h1(pp=2, microbatches=4)),
    "zbv": ("blocks", zbv(pp=2, microbatches=4)),
    "dualpipev": ("blocks", dualpipev(pp=2, microbatches=4, dp=2)),
    "batch norm": ("blocks with batch norm", one_f_one_b(pp=2, microbatches=2)),
    "experts": ("experts", one_f_one_b(pp=2, microbatches=2, dp=2, ep=2)),
    "experts, zero 3": ("experts", dualpipev(pp=1, microbatches=2, dp=2, ep=2, zero=3)),
    "several replicas on a device": (
        "blocks", [piper.Place(piper.where(), [0, 0, 1, 1]), piper.Replicate(piper.where(), [0, 1])]
    ),
    "passes on other streams": (
        "blocks",
        [
            piper.Place(piper.where(), [0, 1]), piper.Replicate(piper.where(), [0, 1], zero=2),
            piper.Stream("dp", sms=8), piper.Split("MB", 2),
            piper.Order([[piper.where(MB=0, PASS="F")], [piper.where(MB=0, PASS="B")]]),
            piper.Order([[piper.where(MB=1, PASS="F")], [piper.where(MB=1, PASS="B")]]),
        ],
    ),
}  # fmt: skip


USUAL = ("interleaved, zero 3", "batch norm")


@one_of(2)
@pytest.mark.parametrize("name", USUAL)
def test_a_strategy_evaluates_what_it_has_trained(name: str) -> None:
    check(name)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in USUAL])
def test_other_strategies_do_so_too(name: str) -> None:
    check(name)


def check(name: str) -> None:
    kind, strategy = STRATEGIES[name]
    first, data = base(kind)
    job = first.under(as_strategy(strategy))
    devices = Threads(job, [Batch.of(one) for one in data[:STEPS]])

    trained = devices.train()

    model = copy.deepcopy(job.model)
    before = job.loss_fn(model(data[-1][0]), data[-1][1])  # type: ignore[misc]
    model.load_state_dict({**model.state_dict(), **trained}, strict=True)
    model.eval()
    with torch.no_grad():
        wanted = model(data[-1][0])
        loss = job.loss_fn(wanted, data[-1][1])  # type: ignore[misc]
    assert abs(loss - before) > 1e-6 * abs(before), "training must have changed something"
    for found in devices.forward(Batch.of(data[-1]), "loss"):
        assert found == pytest.approx(loss.item(), rel=1e-12)
    outputs = devices.forward(Batch.of(data[-1][:1]), "outputs")
    close(outputs, wanted)


def test_evaluation_is_over_all_rows_together() -> None:
    torch.manual_seed(0)
    model, data = Blocks().double(), held_out()
    strategy = [piper.Place(piper.where(), [0]), piper.Split("MB", 4)]
    trainer = piper.Trainer(model, block_loss, strategy, example=data[0], optimizer=SGD)
    trainer.step(*data[0])
    model.blocks[1].eval()  # one that the user has frozen

    found = trainer.evaluate(data)

    assert model.training and model.blocks[0].training and not model.blocks[1].training
    weights = trainer.state_dict()
    assert weights is not None
    own = copy.deepcopy(model)
    own.load_state_dict(weights)
    own.eval()
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        assert found.loss == pytest.approx(block_loss(own(x), y).item(), rel=1e-12)
        close(trainer.predict(x), own(x))
        close(trainer.predict(x=data[2][0]), own(data[2][0]))
    assert (found.batches, found.samples) == (3, 22)
    assert trainer.step(*data[0]).step == 2
    trainer.close()


def detection(output: Tensor, labels: Tensor) -> Tensor:
    """Means over all labels, over those that count, and over at least one of them."""
    mask = (labels >= 0).to(output.dtype)
    scores = functional.binary_cross_entropy_with_logits(output.mean(1), mask)
    boxes = (output.square().sum(1) * mask).sum() / mask.sum().clamp(min=1)
    return scores + functional.cross_entropy(output, labels, ignore_index=-1) + boxes


def two_heads(output: Tensor, labels: Tensor) -> Tensor:
    """Means over different labels."""
    first = functional.cross_entropy(output, labels.clamp(min=0), ignore_index=3)
    return first + functional.cross_entropy(-output, labels, ignore_index=-1)


@pytest.mark.parametrize("loss_fn", [detection, two_heads])
def test_losses_that_train_whole_are_evaluated_whole(loss_fn: object) -> None:
    """The average over batches, in which rows count equally, also in a smaller last one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 5, 1)).double()
    draw = torch.Generator().manual_seed(1)
    data = [
        (
            torch.randn(rows, 2, 4, 4, generator=draw, dtype=torch.float64),
            torch.randint(-1, 5, (rows, 4, 4), generator=draw),
        )
        for rows in (6, 6, 2)
    ]
    wanted = sum(len(x) * loss_fn(model(x), y).item() for x, y in data) / 14  # type: ignore[operator]
    trainer = piper.Trainer(model, loss_fn, example=data[0], device="cpu")  # type: ignore[arg-type]

    with closing(trainer):
        assert trainer.evaluate(data).loss == pytest.approx(wanted, rel=1e-12)


def test_weights_count_in_evaluation_as_they_do_in_steps() -> None:
    """A mean over labels that count, and a sum of them divided by their number, are the same."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(4, 6, generator=draw), torch.randint(-1, 6, (4,), generator=draw).abs())
        for _ in range(3)
    ]
    data = [(x, y.masked_fill(torch.arange(4) >= 1 + k, -100)) for k, (x, y) in enumerate(data)]
    model = nn.Linear(6, 6)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    wanted = functional.cross_entropy(model(x), y).item()
    count = lambda x, y: (y != -100).sum()  # noqa: E731
    total = partial(functional.cross_entropy, reduction="sum")
    for loss_fn, reduction in ((functional.cross_entropy, "mean"), (total, "sum")):
        trainer = piper.Trainer(
            model, loss_fn, example=data[0], loss_weight=count, reduction=reduction
        )  # fmt: skip
        assert trainer.evaluate(data).loss == pytest.approx(wanted, rel=1e-6)
        trainer.close()


def test_an_empty_data_set_is_an_error() -> None:
    trainer = piper.Trainer(nn.Linear(3, 3), functional.mse_loss, example=[torch.ones(2, 3)] * 2)
    with pytest.raises(InputError, match="there are no batches"):
        trainer.evaluate([])
    trainer.close()


def test_calling_the_model_after_a_step_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.ones(2, 3)
    model = nn.Linear(3, 3)
    trainer = piper.Trainer(model, functional.mse_loss, example=(x, x))
    model(x)
    copied = copy.deepcopy(model)
    trainer.step(x, x)
    trainer.evaluate([(x, x)])
    trainer.step(torch.ones(4, 3), torch.ones(4, 3))  # captures again
    copied(x)
    assert not list(recwarn)

    with pytest.warns(UserWarning, match="trainer.predict") as found:
        model(x)
        model(x)

    assert len(found) == 1 and found[0].filename == __file__
    trainer.close()
    assert not model._forward_pre_hooks and not model._state_dict_pre_hooks


def test_saving_the_model_after_a_step_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    """It would save the weights of before the training."""
    x = torch.ones(2, 3)
    model = nn.Linear(3, 3)
    trainer = piper.Trainer(model, functional.mse_loss, example=(x, x))
    model.state_dict()
    copied = copy.deepcopy(model)
    trainer.step(x, x)
    trained = trainer.state_dict()
    copied.state_dict()
    nn.Sequential(copied).state_dict()
    assert not list(recwarn)

    with pytest.warns(UserWarning, match=r"trainer.state_dict\(\)") as found:
        nn.Sequential(model).state_dict()
        model.state_dict()

    assert len(found) == 1 and found[0].filename == __file__
    model.load_state_dict(trained)
    trainer.step(x, x)
    trainer.close()


def test_a_model_with_loaded_weights_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.ones(2, 3)
    model = nn.Linear(3, 3)
    trainer = piper.Trainer(model, functional.mse_loss, example=(x, x))
    trainer.step(x, x)

    weights = trainer.state_dict()
    assert weights is not None
    model.load_state_dict(weights)
    model(x)

    assert not list(recwarn)
    trainer.close()


def test_labels_that_count_are_counted_over_all_batches() -> None:
    """Also with one microbatch: a mean of means would be another number."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    x, labels = torch.randn(6, 4), torch.tensor([-100, -100, 1, 0, 2, 1])
    loss_fn = torch.nn.functional.cross_entropy
    trainer = piper.Trainer(model, loss_fn, example=(x[:2], labels[2:4]), device="cpu")

    found = trainer.evaluate([(x[k : k + 2], labels[k : k + 2]) for k in (0, 2, 4)]).loss

    assert found == pytest.approx(loss_fn(model(x), labels).item())


class TwoInputs(nn.Module):
    """Both are floating-point tensors: without labels, none of them is the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.one(x)) * self.other(y)


@pytest.mark.parametrize("precision", every(2, ["bf16", "fp16"]))
def test_predictions_are_computed_in_the_type_of_training(precision: str) -> None:
    torch.manual_seed(0)
    model, (x, y, z) = TwoInputs(), (torch.randn(4, n) for n in (6, 3, 4))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    trainer = piper.Trainer(
        model, functional.mse_loss, None, example=(x, y, z), precision=precision, device="cpu"
    )
    with closing(trainer):
        trainer.step(x, y, z)
        found, trained = trainer.predict(x, y), trainer.state_dict()

    plain = TwoInputs()
    plain.load_state_dict(trained)
    with torch.no_grad():
        wanted = plain.to(dtype)(x.to(dtype), y.to(dtype))
    torch.testing.assert_close(found.to(dtype), wanted, rtol=0, atol=0)


class Asking(nn.Module):
    """Code that is written for training and evaluation asks in which of them it is."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y = self.other(y) if torch.is_grad_enabled() else y * 3
        y = y * 2 if y.requires_grad else y + 1
        with torch.enable_grad():
            y = y * 5 if torch.is_grad_enabled() else y
        return y if self.training else y - 1


def asking_loss(output: Tensor, target: Tensor) -> Tensor:
    found = functional.mse_loss(output, target)
    return found if torch.is_grad_enabled() else 2 * found


def test_a_forward_that_asks_for_gradients_gets_the_answer_of_its_mode() -> None:
    torch.manual_seed(0)
    model, (x, y) = Asking().double(), torch.randn(2, 4, 6).double()
    with closing(
        piper.Trainer(model, asking_loss, None, example=(x, y), optimizer=SGD, device="cpu")
    ) as trainer:
        step = trainer.step(x, y).loss
        found, output = trainer.evaluate([(x, y)]).loss, trainer.predict(x)
        trained = trainer.state_dict()

    assert step == pytest.approx(asking_loss(model(x), y).item(), rel=1e-12)
    plain = Asking().double().eval()
    plain.load_state_dict(trained)
    with torch.no_grad():
        torch.testing.assert_close(output, plain(x), rtol=1e-12, atol=1e-14)
        assert found == pytest.approx(asking_loss(plain(x), y).item(), rel=1e-12)


class Shaped(nn.Module):
    """Outputs that have their rows in different places, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.a(x)
        return {
            "first": y, "second": torch.stack([y, 2 * y]), "last": y.sum(-1)[None, None],
            "time first": y[:, None].expand(-1, 2, -1).transpose(0, 1), "none": self.a.weight[:2],
        }  # fmt: skip


@pytest.mark.parametrize("microbatches", every(2, [1, 2, 4]))
def test_outputs_are_joined_where_they_have_rows(microbatches: int) -> None:
    """Two rows in a microbatch, two outputs in a stack: only what grows is rows."""
    torch.manual_seed(0)
    model, x = Shaped().double(), torch.randn(2 * microbatches, 3).double()
    strategy = one_f_one_b(pp=1, microbatches=microbatches)
    given = {"example": (x, x), "optimizer": SGD, "device": "cpu"}

    def loss(output: dict[str, Tensor], y: Tensor) -> Tensor:
        return functional.mse_loss(output["first"], y)

    with closing(piper.Trainer(model, loss, strategy, **given)) as trainer:
        found = trainer.predict(x)

    wanted = Shaped().double()
    wanted.load_state_dict(model.state_dict())
    expected = wanted(x)
    for name in ("first", "second", "last", "time first"):
        torch.testing.assert_close(found[name], expected[name])
    constant = [expected["none"]] * microbatches
    torch.testing.assert_close(
        found["none"], constant[0] if microbatches == 1 else torch.stack(constant)
    )


def test_predictions_need_no_labels() -> None:
    x = torch.randn(4, 3)
    given = {"example": (x, x), "optimizer": SGD, "device": "cpu"}
    with (
        closing(piper.Trainer(nn.Linear(3, 3), functional.mse_loss, None, **given)) as trainer,
        pytest.raises(InputError, match="takes 1 input, and got 2") as refused,
    ):
        trainer.predict(x, x)

    assert "leave out the labels" in str(refused.value)


class Summed(nn.Module):
    """Its only input is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, several: list[Tensor]) -> Tensor:
        return torch.stack([self.layer(one) for one in several]).sum(0)


def test_a_list_may_be_the_only_input() -> None:
    several = [torch.randn(4, 3), torch.randn(4, 3)]
    given = {"example": (several, several[0]), "optimizer": SGD, "device": "cpu"}
    model = Summed()
    with closing(piper.Trainer(model, functional.mse_loss, None, **given)) as trainer:
        found = [
            trainer.predict(several), trainer.predict((several,)), trainer.predict(several=several),
            trainer.predict([several[0]]),
        ]  # fmt: skip

    wanted = model(several)
    assert all(one.allclose(wanted) for one in found[:3])
    assert found[3].allclose(model(several[:1]))


def without_zeros(o: Tensor, y: Tensor) -> Tensor:
    """A mean over labels, which the graph does not show."""
    each = functional.cross_entropy(o, y, reduction="none")
    return torch.where(y != 0, each, torch.nan).nanmean()


def test_an_average_of_batches_is_said(caplog: pytest.LogCaptureFixture) -> None:
    net, draw = nn.Linear(6, 4).double(), torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(n, 6, generator=draw).double(), torch.randint(4, (n,), generator=draw))
        for n in (8, 8, 5)
    ]
    with (
        caplog.at_level("WARNING", "piper"),
        piper.Trainer(net, without_zeros, None, example=batches[0], device="cpu") as trainer,
    ):
        trainer.evaluate(batches)

    assert caplog.text.count("evaluate averages the losses of batches by their rows") == 1
