"""What newcomers wrote, and what they were told."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn

import piper
from piper import Order, Place, Split, Trainer, where
from piper.errors import CaptureError, PiperError
from piper.strategies import from_csv, from_orders, gpipe, one_f_one_b

X = torch.ones(4, 4)
LOSS = nn.functional.mse_loss


def trained(*arguments: Any, **options: Any) -> float:
    with Trainer(*arguments, example=(X, X), device="cpu", **options) as trainer:
        return trainer.step(X, X).loss


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def by_pairs(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for name, parameter in named if "bias" in name], lr=0.1)


def set_rate() -> None:
    with Trainer(linear(), LOSS, None, example=(X, X), device="cpu") as trainer:
        trainer.lr = 0.1  # type: ignore[misc]


def evaluated() -> None:
    with Trainer(linear(), LOSS, None, example=(X, X), device="cpu") as trainer:
        trainer.evaluate(X, X)  # type: ignore[call-arg]


class Marked(nn.Module):
    def __init__(self, *mark: Any) -> None:
        super().__init__()
        self.layer, self.mark = nn.Linear(4, 4), mark

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate(*self.mark):
            found: Tensor = self.layer(x)
        return found


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a loss and a strategy swapped": (
        lambda: trained(linear(), [Place(where(), [0])], LOSS),
        "strategy: mse_loss is a function that needs input and target\n"
        "  fix: give loss_fn before strategy, or call a builder: ",
    ),
    "a builder that is not called": (
        lambda: trained(linear(), LOSS, one_f_one_b),
        "strategy: one_f_one_b is a function that needs pp and microbatches\n",
    ),
    "a directive that is not called": (
        lambda: trained(linear(), LOSS, [Place]),
        "strategy: it has the class Place\n  fix: write Place(...), with the parentheses",
    ),
    "a size and a name swapped": (
        lambda: Split(4, "MB"),  # type: ignore[arg-type]
        "'MB' is not a number of microbatches\n  fix: write Split('MB', 4)",
    ),
    "slots without a list": (
        lambda: Order(where(PP=0)),  # type: ignore[arg-type]
        'is not a list of slots\n  fix: write one list: Order([where(PP=0, MB=0, PASS="F"), ...])',
    ),
    "an option of others": (
        lambda: gpipe(pp=2, microbatches=4, virtual=2),
        "gpipe has no option virtual\n  fix: leave it out, or take interleaved-1f1b",
    ),
    "stages of orders": (
        lambda: from_orders([], pp=1),  # type: ignore[call-arg]
        "it was given pp\n  fix: leave it out: its orders or tables say how many there are",
    ),
    "a file in place of its text": (
        lambda: from_csv("schedule.csv"),
        "'schedule.csv' is the name of a file\n  fix: give its text, Path(",
    ),
    "a file in place of JSON": (
        lambda: piper.Strategy.from_json("st.json"),
        "'st.json' is the name of a file\n  fix: give its text, Path('st.json').read_text()",
    ),
    "stages as text": (
        lambda: gpipe(pp=2, microbatches=2, stages="1,2"),  # type: ignore[arg-type]
        "stages='1,2' is not a list\n  fix: write a list, such as stages=[1, 1]",
    ),
    "a class in place of a name": (
        lambda: trained(Marked(nn.Linear), LOSS),
        "it takes a name, and then a number",
    ),
    "text in place of a number": (
        lambda: trained(Marked("PP", "0"), LOSS),
        "annotate('PP', '0'): its index is not a number\n  fix: write annotate(\"PP\")",
    ),
    "two ways to group": (
        lambda: trained(linear(), LOSS, None, optimizer=by_pairs, no_decay=["bias"]),
        "no_decay: the optimizer function fails on two groups of parameters",
    ),
    "a weight below zero": (
        lambda: trained(linear(), LOSS, gpipe(1, 2), loss_weight=lambda x, y: -1.0),
        "microbatch 0 has weight -1, which is negative\n  fix: let loss_weight return 0 or more",
    ),
    "a rate that is set": (
        set_rate,
        "trainer: it has no lr, which may be set\n  fix: give ",
    ),
    "a batch in place of batches": (evaluated, "write trainer.evaluate([(x, y)])"),
    "no example": (
        lambda: piper.draw(linear(), LOSS, None),  # type: ignore[call-arg]
        "draw: missing a required argument: 'example'",
    ),
    "steps for rehearse": (
        lambda: piper.rehearse(linear(), LOSS, None, [(X, X)], steps=3),  # type: ignore[call-arg]
        "it has no option steps\n  fix: write a loop over your batches that calls "
        "trainer.step(batch); for rehearse, give a batch for each step",
    ),
}


@one_of(3)
@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_says_what_to_write(name: str) -> None:
    call, message = MISTAKES[name]

    with pytest.raises(PiperError) as error:
        call()

    assert message in str(error.value)


def test_models_are_imported_when_they_are_needed() -> None:
    assert piper.models.qwen3_moe.Qwen3Moe and piper.models.llama.Llama
    with pytest.raises(AttributeError, match="has no attribute 'gpt'"):
        _ = piper.models.gpt  # type: ignore[attr-defined]


def test_a_builder_is_named_with_its_module() -> None:
    with pytest.raises(AttributeError, match="'gpipe'; it is piper.strategies.gpipe$"):
        _ = piper.gpipe  # type: ignore[attr-defined]


def test_a_batch_of_another_form_than_the_example_is_told_so() -> None:
    """By position, the labels of a Hugging Face model are its attention mask."""

    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, mask: Any = None, labels: Any = None) -> dict[str, Any]:
            out = self.layer(x) if mask is None else self.layer(x) * mask
            return {"loss": None if labels is None else (out - labels).square().mean()}

    x = torch.randn(4, 3)
    given: dict[str, Any] = {"x": x, "labels": x}
    sgd = partial(torch.optim.SGD, lr=0.1)
    with piper.Trainer(OwnLoss(), None, example=given, optimizer=sgd) as trainer:
        trainer.step(given)
        with pytest.raises(CaptureError) as found:
            trainer.step(x, x)
        with pytest.raises(CaptureError) as less:
            trainer.step({"x": x})

    what = "model: this batch gives the model mask, which the example does not and has no labels"
    assert what in str(found.value)
    assert "this batch has no labels, as the example has" in str(less.value)


@pytest.mark.parametrize("column", ["output", "labels"])
def test_a_column_beside_a_row_is_named(column: str) -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0) if column == "labels" else nn.Identity())
    strategy = one_f_one_b(pp=1, microbatches=2)
    labels = y if column == "labels" else y[:, 0]
    loss = lambda a, b: nn.functional.mse_loss(a, b)  # noqa: E731
    seen = pytest.warns(UserWarning, match="Using a target size")
    with seen as warned, pytest.raises(PiperError) as found:
        piper.rehearse(model, loss, strategy, [(x, labels)])

    assert "give output and labels one shape: [4" in str(found.value)
    assert "write output.squeeze(1), or labels.squeeze(1)" in str(found.value)
    assert {one.filename for one in warned} == {__file__}


def test_a_step_has_no_backward() -> None:
    with Trainer(linear(), LOSS, None, example=(X, X), device="cpu") as trainer:
        metrics = trainer.step(X, X)
        with pytest.raises(PiperError, match="fix: leave it out: a step of the Trainer includes"):
            metrics.backward()  # type: ignore[attr-defined]
        assert not hasattr(metrics, "backward")


def test_a_loss_is_a_float_that_torch_compares() -> None:
    with Trainer(linear(), LOSS, None, example=(X, X), device="cpu") as trainer:
        assert type(trainer.step(X, X).loss) is float
        assert type(trainer.evaluate([(X, X)]).loss) is float


def numbers(model: nn.Module) -> None:
    with Trainer(model, LOSS, None, example=(X, X), device="cpu") as trainer:
        sum([trainer.step(X, X)])  # type: ignore[list-item]


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "launch with a name": (lambda: piper.launch(linear, n=2), "piper.launch(fn, 2)"),  # type: ignore
    "launch as torchrun": (
        lambda: piper.launch(linear, nproc_per_node=2),  # type: ignore[call-arg]
        "piper.launch(fn, 2)",
    ),
    "types of FSDP2": (
        lambda: piper.Precision(param_dtype="bfloat16"),
        "compute=...",  # type: ignore[call-arg]
    ),
    "sums of FSDP2": (
        lambda: piper.Precision(reduce_dtype="float32"),
        "reduce=...",  # type: ignore[call-arg]
    ),
    "a scale of GradScaler": (
        lambda: piper.LossScale(init_scale=2.0),
        "init=...",  # type: ignore[call-arg]
    ),
    "a positional type": (lambda: piper.Precision("bf16"), "Precision(compute="),  # type: ignore
    "microbatches of a Split": (lambda: Split("MB", microbatches=2), "n=..."),  # type: ignore
    "a stage of DeepSpeed": (
        lambda: piper.Replicate(where(), [0, 1], stage=3),
        "zero=...",  # type: ignore[call-arg]
    ),
    "a file of a schedule": (lambda: from_csv(io.StringIO("0F0,0B0")), "open(path).read()"),  # type: ignore
    "a device twice": (lambda: piper.Replicate(where(), [0, 0]), "list each device once"),
    "a step as a number": (lambda: numbers(linear()), "write .loss"),
    "a schedule without its numbers": (
        lambda: trained(linear(), LOSS, None, lr_scheduler=warmup),
        "write lr_scheduler=partial(warmup, num_warmup_steps=...)",
    ),
}


def warmup(optimizer: Any, num_warmup_steps: int, last_epoch: int = -1) -> Any: ...


@pytest.mark.parametrize("name", CALLS)
def test_calls_as_elsewhere_say_what_to_write(name: str) -> None:
    call, fix = CALLS[name]

    with pytest.raises(PiperError) as told:
        call()
    assert "fix: " in str(told.value) and fix in str(told.value).partition("fix: ")[2]


@pytest.mark.parametrize("use", [float, lambda m: m + 1, lambda m: 1 - m, lambda m: f"{m:.3f}"])
def test_a_step_is_no_number(use: Any) -> None:
    with Trainer(linear(), LOSS, None, example=(X, X), device="cpu") as trainer:
        metrics = trainer.step(X, X)
        with pytest.raises(PiperError, match="fix: write .loss"):
            use(metrics)
        assert f"{metrics}" == str(metrics)
