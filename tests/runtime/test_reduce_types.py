"""Gradients of some modules are added up in another type than those of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import levels_of
from mixed_precision import ADAMW, STEPS, TIGHT, batches, build, by_hand, captured
from replicas import Uneven
from runtime.test_precision import ONE, assert_close
from runtime.test_replicate import LEVELS, legal
from shared_capture import using
from torch import nn
from torch.nn import functional

from piper import Place, Precision, Replicate, Strategy, Trainer, rehearse, where
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.options import Options
from piper.plan.instructions import Reduce

WAYS = {
    "norm coarser": ({"norm": "bf16"}, {"norm": "bfloat16"}),
    "all but the norm coarser": (
        {"*": torch.bfloat16, "norm": "fp32"}, {"": "bfloat16", "norm": "float32"},
    ),
    "by class": ({nn.Linear: "bfloat16"}, {"first": "bfloat16", "last": "bfloat16"}),
}  # fmt: skip


@pytest.mark.parametrize(("given", "by_name"), WAYS.values(), ids=WAYS)
def test_one_device_is_bitwise_the_loop(given: Any, by_name: dict[str, str]) -> None:
    precision, data = Precision(reduce_in=given), batches("normed", 4)
    model, loss, known = captured("normed", 2, precision)

    with using(known):
        found = rehearse(
            model, loss, ONE, data, optimizer=ADAMW, precision=precision, max_norm=0.05
        )

    wanted = by_hand(model, loss, [precision] * STEPS, data, 4, 0.05, reduced=[by_name] * STEPS)
    plain = by_hand(model, loss, [precision] * STEPS, data, 4, 0.05)
    assert [dict(parts) for parts in found.parts] == wanted.losses
    for name, master in wanted.masters.items():
        assert torch.equal(found.parameters[name], master), name
    assert any(not torch.equal(plain.masters[n], m) for n, m in wanted.masters.items())


@pytest.mark.parametrize(("schedule", "zero"), levels_of(["1f1b", "zbv", "dualpipev"], LEVELS, 2))
def test_schedules_with_every_level(schedule: str, zero: int) -> None:
    """A region has buckets of both types, and a tied parameter of two regions is in one of them."""
    strategy = legal(schedule, 2, dp=2, zero=zero)
    precision = replace(TIGHT, reduce_in={Uneven: "float32", "wide.*": "float64"})
    parts, stages = 2 * strategy.microbatches, 2 if schedule == "1f1b" else 4
    model, loss, known = captured("uneven", stages, precision)
    data = batches("uneven", parts)

    with using(known):
        found = rehearse(model, loss, strategy, data, optimizer=ADAMW, precision=precision)

    wanted = by_hand(
        model,
        loss,
        [precision] * STEPS,
        data,
        parts,
        reduced=[{"": "float32", "wide.": "float64"}] * STEPS,
    )
    assert_close(found, wanted, 1e-6)


def test_messages_have_the_types() -> None:
    """Bytes of gradients on the wire: four and two for each parameter, around a ring."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    strategy = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=1)])
    precision = Precision(reduce_in={"1": "bfloat16"})
    job = Job(model, functional.mse_loss, strategy, Options(precision=precision, device="cpu"))

    _, compiled = job.compile(Batch.of((torch.zeros(4, 8), torch.zeros(4, 4))))

    reduces = [one for one in compiled.plan(0).instructions if isinstance(one, Reduce)]
    assert sorted(one.messages[0][0] for one in reduces) == ["bfloat16", "float32"]
    assert sum(one.sent for one in reduces) == (4 * 64 + 2 * 32) // 2


def test_a_run_goes_on_with_other_types(tmp_path: Path) -> None:
    model, loss = build("normed", 2)
    data, ways = batches("normed", 4), ({"norm": "bfloat16"}, {"last": "bfloat16"})
    losses = []
    for done, given in ((0, ways[0]), (2, ways[1])):
        trainer = Trainer(
            model, loss, ONE, example=data[0], optimizer=ADAMW, device="cpu",
            precision=Precision(reduce_in=given),
        )  # fmt: skip
        assert trainer.resume(tmp_path / "run", missing_ok=True) == done
        losses += [dict(trainer.step(*batch).losses) for batch in data[done:][:2]]
        trainer.save(tmp_path / "run")

    types = [ways[0], ways[0], ways[1]]
    wanted = by_hand(model, loss, [Precision()] * STEPS, data, 4, reduced=types)
    assert losses == wanted.losses
    whole = trainer.state_dict()
    assert whole is not None
    for name, master in whole.items():
        assert torch.equal(master, wanted.masters[name]), name


def test_a_shared_parameter_has_one_type() -> None:
    """Whichever of its modules is named: there is one sum of its gradients."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    types = []
    for name in ("0", "2"):
        options = Options(precision=Precision(reduce_in={name: "bfloat16"}), device="cpu")
        known, _ = Job(model, functional.mse_loss, ONE, options).compile(Batch.of((x, x)))
        types += [bucket.gradient for bucket in known.model.buckets.values()]
    assert types == ["bfloat16", "bfloat16"]


BAD: dict[str, Any] = {
    "no type": {"norm": "int8"},
    "a name alone": "norm",
    "a list of names": ["norm"],
    "no module": {3: "float32"},
}


@pytest.mark.parametrize("given", BAD.values(), ids=BAD)
def test_what_is_no_type_of_a_module_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="reduce_in"):
        Precision(reduce_in=given)


def test_an_unknown_module_is_refused() -> None:
    model, loss = build("normed", 2)
    with pytest.raises(InputError, match=r"reduce_in: the model has no module nrom"):
        Trainer(
            model, loss, ONE, example=batches("normed", 4)[0], device="cpu",
            precision=Precision(reduce_in={"nrom": "float32"}),
        )  # fmt: skip
