"""What a user asks of the Trainer, each against plain PyTorch."""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from small_training import SGD, TWO, Net, assert_equal, data, plainly
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Split, Trainer, rehearse, where
from piper.cli.target import inspect
from piper.errors import CaptureError, InputError, StrategyError
from piper.runtime.processes.world import how_to_start


def test_a_sum_divided_by_the_total_weight_allows_empty_microbatches() -> None:
    labels = torch.tensor([-100, -100, -100, 1, 2, -100])
    batches = [(x, labels) for x, _ in data(rows=6)]

    result = rehearse(
        Net(), partial(functional.cross_entropy, reduction="sum"), [*TWO, Split("MB", 2)], batches,
        optimizer=SGD, reduction="sum", loss_weight=lambda x, y: (y != -100).sum(),
    )  # fmt: skip

    assert_equal(result, plainly(Net(), functional.cross_entropy, batches))


def test_a_loss_that_is_a_sum_adds_up() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return 0.01 * (output - target).square().sum()

    result = rehearse(
        Net(), loss_fn, [*TWO, Split("MB", 3)], data(), optimizer=SGD, reduction="sum"
    )

    assert_equal(result, plainly(Net(), loss_fn, data()))


def test_batch_norm_sees_its_microbatches_in_order() -> None:
    make = partial(Net, nn.BatchNorm1d(6))

    result = rehearse(make(), functional.mse_loss, [*TWO, Split("MB", 3)], data(), optimizer=SGD)

    assert_equal(result, plainly(make(), functional.mse_loss, data(), parts=3))


def test_dropout_is_the_same_for_every_strategy() -> None:
    make = partial(Net, nn.Dropout(0.5))
    strategies = [
        [Place(where(), [0])],
        [Place(where(), [0]), Split("MB", 4)],
        [*TWO, Split("MB", 2)],
        [*TWO, Split("MB", 6)],
    ]

    runs = [rehearse(make(), functional.mse_loss, s, data(), optimizer=SGD) for s in strategies]

    for run in runs[1:]:
        torch.testing.assert_close(run.losses, runs[0].losses, rtol=1e-6, atol=0)
    assert runs[0].losses != plainly(make().eval(), functional.mse_loss, data())[0]


def test_the_same_dropout_seed_repeats_a_run_and_another_does_not() -> None:
    run = partial(
        rehearse, loss_fn=functional.mse_loss, strategy=TWO, batches=data(), optimizer=SGD
    )

    first, again = run(Net(nn.Dropout(0.5))), run(Net(nn.Dropout(0.5)))
    other = run(Net(nn.Dropout(0.5)), seed=1)

    assert first.losses == again.losses != other.losses


def test_numbers_among_the_inputs_are_constants_of_the_step() -> None:
    batches = [(x, 0.5, y) for x, y in data()]

    result = rehearse(Net(), functional.mse_loss, [*TWO, Split("MB", 2)], batches, optimizer=SGD)

    assert_equal(result, plainly(Net(), functional.mse_loss, batches))


def test_a_model_on_meta_starts_the_same_under_every_strategy() -> None:
    def on_meta() -> Net:
        with torch.device("meta"):
            return Net()

    one = rehearse(on_meta(), functional.mse_loss, [Place(where(), [0])], data(), optimizer=SGD)
    two = rehearse(on_meta(), functional.mse_loss, [*TWO, Split("MB", 3)], data(), optimizer=SGD)

    torch.testing.assert_close(one.losses, two.losses, rtol=1e-6, atol=0)


def test_parameters_that_nothing_can_initialise_are_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    with torch.device("meta"):
        model = Scale()

    with pytest.raises(CaptureError) as refused:
        rehearse(model, functional.mse_loss, [Place(where(), [0])], data())

    assert str(refused.value) == (
        "parameter factor: it has no value, and Scale has no reset_parameters()\n"
        "  fix: build the model on the CPU, or give Trainer init=function(name, tensor)"
    )


def test_batches_of_another_shape_compile_another_program_on_the_same_parameters() -> None:
    short, long = data(rows=4), data(rows=8)
    batches = [short[0], long[0], short[1]]
    trainer = Trainer(
        Net(), functional.mse_loss, [Place(where(), [0]), Split("MB", 2)],
        example=short[0], optimizer=SGD,
    )  # fmt: skip

    losses = [trainer.step(*batch).loss for batch in batches]

    torch.testing.assert_close(
        losses, plainly(Net(), functional.mse_loss, batches)[0], rtol=1e-6, atol=0
    )
    assert len(trainer._programs.ready) == 2


def test_no_strategy_is_one_device() -> None:
    trainer = Trainer(Net(), functional.mse_loss, example=data()[0], optimizer=SGD)

    losses = [trainer.step(*batch).loss for batch in data()]

    torch.testing.assert_close(
        losses, plainly(Net(), functional.mse_loss, data())[0], rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (torch.zeros(3, 6), torch.zeros(3, 6)),
            "batch: it has 3 rows, too few for 4 microbatches\n"
            "  fix: use a batch of at least 4 rows",
        ),
        (
            (torch.zeros(8, 6), torch.zeros(4, 6)),
            "batch: its tensors have different numbers of rows: [8, 4]\n"
            "  fix: give every tensor, labels too, the rows of one batch as its first dimension, "
            'or name those that every microbatch gets whole: whole=["mask"]',
        ),
        (
            (1.0, 2.0),
            "batch: it has no tensor with rows, only float\n"
            "  fix: give tensors: torch.as_tensor(...)",
        ),
    ],
    ids=["uneven", "different", "no tensors"],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch: tuple, message: str) -> None:
    with pytest.raises(InputError) as refused:
        Trainer(Net(), functional.mse_loss, [Place(where(), [0]), Split("MB", 4)], example=batch)

    assert str(refused.value) == message


def test_too_few_processes_are_refused_with_the_command_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the capture: the model never runs."""
    monkeypatch.setattr("sys.argv", ["pytest"])
    net = Net()
    net.register_forward_pre_hook(lambda *_: pytest.fail("captured"))
    with pytest.raises(StrategyError) as refused:
        Trainer(net, functional.mse_loss, TWO, example=data()[0])

    assert str(refused.value) == (
        "strategy: it uses devices [0, 1], but the run has 1 process\n"
        "  fix: start it with `piper run SCRIPT -n 2`, or in a notebook with piper.launch(fn, 2)"
    )
    lines = traceback.extract_tb(refused.value.__traceback__)
    assert {line.filename for line in lines} == {__file__}  # none of Piper's own


@pytest.mark.parametrize(
    ("started", "words"),
    [
        (["runs/tune.py"], "start it with `piper run tune.py -n 2`"),
        (
            ["tune.py", "--pp", "4", "--name", "a b"],
            "start it with `piper run tune.py -n 2 --pp 4 --name 'a b'`",
        ),
        (
            ["a/ipykernel_launcher.py"],
            "start it with `piper run SCRIPT -n 2`, or in a notebook with piper.launch(fn, 2)",
        ),
    ],
)  # fmt: skip
def test_the_command_names_the_script(
    started: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", started)

    assert how_to_start(2) == words


EXAMPLES = sorted((Path(__file__).parent.parent.parent / "examples").glob("*.py"))
SHORT = "own_schedule"  # others are in the recipes, and on pages of the docs
NEEDED = {"pretrain": ["--config", str(EXAMPLES[0].parent / "pretrain_llama.toml")]}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem == SHORT else pytest.mark.soak)
        for path in EXAMPLES
    ],
)
def test_every_example_is_short_and_compiles(script: Path) -> None:
    if "transformers" in script.read_text():
        pytest.importorskip("transformers")

    found = inspect(script, NEEDED.get(script.stem, []))

    assert found.compiled.plans
    assert len(script.read_text().splitlines()) <= 130


class Straight(Net):
    """A straight-through estimator: `.data` means detach."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h + (self.last(h) - h).data


class Branches(Net):
    """Which parameters are used is chosen by a number."""

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        return self.first(x) if flag else self.last(self.first(x))


def on_one_device(model: nn.Module, batches: list, parts: int = 1, **options) -> list[float]:
    strategy = [Place(where(), [0]), Split("MB", parts)]
    trainer = Trainer(
        model, functional.mse_loss, strategy, example=batches[0], optimizer=SGD, **options
    )
    return [trainer.step(*batch).loss for batch in batches]


def test_data_is_detached() -> None:
    losses, _ = plainly(Straight(), functional.mse_loss, data())

    torch.testing.assert_close(on_one_device(Straight(), data()), losses, rtol=1e-6, atol=0)


def test_batches_that_use_other_parameters_are_refused() -> None:
    batches = [(x, step == 0, y) for step, (x, y) in enumerate(data(steps=2))]

    with pytest.raises(InputError) as refused:
        on_one_device(Branches(), batches)

    assert "last.bias and last.weight, which no step before has used" in str(refused.value)


def test_batches_that_are_not_contiguous_are_fine() -> None:
    wide = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    batches = [(wide[:, :-2], wide[:, 2:])] * 3

    found = on_one_device(Net(), batches, parts=2)

    torch.testing.assert_close(found, plainly(Net(), functional.mse_loss, batches)[0])


def test_compiled_regions_train_as_plain_pytorch() -> None:
    found = on_one_device(Net(), data(), parts=2, compiled=True)

    torch.testing.assert_close(found, plainly(Net(), functional.mse_loss, data())[0])


def test_weights_that_are_loaded_too_late_are_refused() -> None:
    model, other = Net(), {name: tensor + 1 for name, tensor in Net().state_dict().items()}
    trainer = Trainer(model, functional.mse_loss, example=data()[0], optimizer=SGD)

    model.load_state_dict(other)
    with pytest.raises(InputError, match="was changed after the Trainer was made") as error:
        trainer.step(*data()[0])
    with pytest.raises(InputError, match="was changed after the Trainer was made"):
        trainer.tune(*data()[0])
    model.load_state_dict(trainer.state_dict())
    trainer.step(*data()[0])
    model.load_state_dict(other)
    with pytest.raises(InputError, match="was changed after the Trainer was made"):
        trainer.step(*data()[1])

    assert "load the weights before you make the Trainer, or use trainer.resume" in str(error.value)


def test_weights_of_a_resumed_run_may_be_looked_at(tmp_path: Path) -> None:
    def made(model: nn.Module) -> Trainer:
        return Trainer(model, functional.mse_loss, example=data()[0], optimizer=SGD)

    first, model = made(Net()), Net()
    first.step(*data()[0])
    first.save(tmp_path / "run")
    second = made(model)
    second.resume(tmp_path / "run")
    model.load_state_dict(second.state_dict())

    assert second.step(*data()[1]).loss == first.step(*data()[1]).loss


@pytest.mark.parametrize("whole", [True, False])
def test_memory_of_the_model_may_be_given_back(whole: bool) -> None:
    model = Net()
    trainer = Trainer(model, functional.mse_loss, example=data()[0], optimizer=SGD)
    for parameter in model.parameters():
        if whole:
            parameter.data = torch.empty(0)
        else:
            parameter.untyped_storage().resize_(0)

    found = trainer.step(*data()[0]).loss

    assert found == pytest.approx(functional.mse_loss(Net()(data()[0][0]), data()[0][1]).item())


def test_eval_after_the_first_step_is_noticed() -> None:
    model = Net(nn.Dropout(0.9))
    trainer = Trainer(model, functional.mse_loss, example=data()[0], optimizer=SGD)
    reference = Net()

    model.eval()
    found = [trainer.step(*batch).loss for batch in data()]

    torch.testing.assert_close(found, plainly(reference, functional.mse_loss, data())[0])


def test_a_rehearsal_of_different_batches_is_refused() -> None:
    batches = [(x, float(step), y) for step, (x, y) in enumerate(data())]

    with pytest.raises(InputError) as refused:
        rehearse(Net(), functional.mse_loss, TWO, batches)

    assert str(refused.value) == (
        "batch 1: its shapes or numbers differ from those of the first one\n"
        "  fix: rehearse batches of one shape, with the same numbers among their inputs"
    )


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_need_more_than_gradients_are_refused_before_the_first_step(kind) -> None:
    with pytest.raises(StrategyError, match=f"{kind.__name__} .*\n  fix: use an optimizer that"):
        Trainer(Net(), functional.mse_loss, example=data()[0], optimizer=lambda p: kind(p))
