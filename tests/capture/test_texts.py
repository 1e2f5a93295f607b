"""Texts of numbers and tensors that have no values in a trace: printed, or refused."""

from __future__ import annotations

import logging
import numbers
import string
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from piper.capture.trace.forward import trace
from piper.errors import CaptureError

LOG = logging.getLogger("of_a_test")
BY_TEXT = {"0": 1.0, "1": 2.0}
Use = Callable[["Net", Tensor], Any]


@cache
def remembered(text: str) -> float:
    return len(text) + 1.0


def text_of(number: Any) -> str:
    return f"{number:.3f}"


class Shown:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<{self.value}>"


class Net(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use, self.first = use, nn.Linear(3, 3)
        self.l0, self.l1 = nn.Linear(3, 3), nn.Linear(3, 3)
        self.layers = nn.ModuleDict({"0": nn.Linear(3, 3), "1": nn.Linear(3, 3)})

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        found = self.use(self, h)
        return h if found is None else h * found


def traced(use: Use) -> None:
    trace(Net(use), mse_loss, (torch.zeros(2, 3), torch.zeros(2, 3)), "cpu")


def best(h: Tensor) -> Any:
    return h[0].argmax().item()


def branch(net: Net, h: Tensor) -> float:
    text = f"{best(h)}"
    if text == "1":
        return 2.0
    return 1.0


def matched(net: Net, h: Tensor) -> float:
    match str(best(h)):
        case "1":
            return 2.0
    return 1.0


def kept(net: Net, h: Tensor) -> float:
    found = {}
    found[str(best(h))] = 2.0
    return found.get("1", 1.0)


USED: dict[str, Use] = {
    "layer by name": lambda net, h: getattr(net, f"l{best(h)}")(h),
    "layer by name of a tensor": lambda net, h: getattr(net, f"l{h[0].argmax()}")(h),
    "layer by str": lambda net, h: getattr(net, "l" + str(best(h)))(h),
    "layer by percent": lambda net, h: getattr(net, "l%s" % best(h))(h),  # noqa: UP031
    "layer by format": lambda net, h: getattr(net, "l{}".format(best(h)))(h),  # noqa: UP032
    "layer by digits": lambda net, h: getattr(net, f"l{best(h):d}")(h),
    "layer by repr": lambda net, h: getattr(net, f"l{best(h)!r}")(h),
    "submodule": lambda net, h: net.get_submodule(f"l{best(h)}")(h),
    "dict of modules": lambda net, h: net.layers[str(best(h))](h),
    "of a list": lambda net, h: net.layers[str(h[0].argmax().tolist())](h),
    "key": lambda net, h: BY_TEXT.get(str(best(h)), 3.0),
    "set": lambda net, h: 2.0 if str(best(h)) in {"1"} else 1.0,
    "part": lambda net, h: 2.0 if "1" in str(best(h)) else 1.0,
    "start": lambda net, h: 2.0 if "1a".startswith(str(best(h))) else 1.0,
    "length": lambda net, h: len(str(h.sum().item())),
    "length of a tensor": lambda net, h: len(repr(h)),
    "truth": lambda net, h: 2.0 if str((h.sum() > 0).item()) == "True" else 1.0,
    "comparison": lambda net, h: 2.0 if str(best(h) == 1) == "True" else 1.0,
    "number": lambda net, h: float(f"{h.mean().item():.2f}"),
    "number of a tensor": lambda net, h: float(f"{h.mean():.2f}"),
    "joined": lambda net, h: float("".join(["1", str(best(h))])),
    "template": lambda net, h: float(string.Template("$n").substitute(n=best(h))),
    "evaluated": lambda net, h: eval(f"{best(h)} + 1"),  # noqa: S307
    "remembered": lambda net, h: remembered(str(best(h))),
    "of a helper": lambda net, h: BY_TEXT.get(text_of(best(h)), 1.0),
    "of an object": lambda net, h: len(str(Shown(best(h)))),
    "variable": branch,
    "match": matched,
    "own dict": kept,
}


@one_of(3)
@pytest.mark.parametrize("use", every(3, USED.values(), USED))
def test_a_text_that_code_may_decide_by_is_refused_with_its_line(use: Use) -> None:
    with pytest.raises(CaptureError, match=r"test_texts.py:\d+: a text is made of the value"):
        traced(use)


def by_variable(net: Net, h: Tensor) -> None:
    text = f"{best(h)}"
    text += ", " + str(h.mean())
    if net.training:
        print(text)
        LOG.info("%s and %s", text, best(h))


def several(net: Net, h: Tensor) -> None:
    print(", ".join(f"{one.item():.2f}" for one in h[0]))
    print(h, h.mean().item(), {"best": f"{best(h)}"})
    sys.stdout.write(str(best(h)))
    net.training and print(f"{best(h)}")
    print(f"{best(h)}") if net.training else LOG.info(f"{h.mean()}")


def checked(net: Net, h: Tensor) -> None:
    assert h.shape[0] == 2, f"{best(h)}"
    if h.shape[0] == 3:
        raise ValueError(f"{best(h)} of {h}")


def warned(net: Net, h: Tensor) -> None:
    warnings.warn(f"best: {best(h)}", stacklevel=1)
    LOG.warning(f"best: {text_of(h.mean())}")
    print(Shown(best(h)))


@pytest.mark.parametrize("use", [by_variable, several, checked, warned])
def test_a_text_may_be_printed(use: Use) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced(use)


def test_numbers_have_the_classes_of_eager_training() -> None:
    def use(net: Net, h: Tensor) -> None:
        number, whole, truth = h.mean().item(), best(h), (h.sum() > 0).item()
        assert isinstance(number, float) and isinstance(whole, int | str)
        assert isinstance(truth, bool)
        assert not isinstance(number, int) and not isinstance(whole, float | Tensor)
        assert all(isinstance(one, numbers.Number) for one in (number, whole, truth))

    traced(use)
