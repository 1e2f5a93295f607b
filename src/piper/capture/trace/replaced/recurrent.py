"""Recurrent layers one by one, with dropout between them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from piper.capture.kernels.lstm import LSTM

Layer = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]


def lstm(func: Any, x: Tensor, hx: Any, weights: Any, *rest: Any) -> Any:
    if isinstance(hx, Tensor):
        return NotImplemented  # packed: the number of rows at each time is data
    biases, layers, dropout, training, both, batch_first = rest

    def layer(
        x: Tensor, state: Sequence[Tensor], given: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        directions = [
            one_direction(x, h, c, own, bool(biases), backwards)
            for h, c, own, backwards in zip(*state, halves(given, both), (0, 1), strict=False)
        ]
        outputs, *last = (list(one) for one in zip(*directions, strict=True))
        return torch.cat(outputs, -1), [torch.stack(one) for one in last]

    x = x.transpose(0, 1) if batch_first else x
    p = dropout if training else 0.0
    x, (h, c) = stacked(layer, x, hx, weights, layers, p, 1 + both, time_first=True)
    return x.transpose(0, 1) if batch_first else x, h, c


def one_direction(
    x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor], biases: bool, backwards: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of all times, the last state and the last cell."""
    into, recurrent = weights[:2]
    bias = weights[2] + weights[3] if biases else None
    projection = weights[-1] if len(weights) % 2 else None
    x = x.flip(0) if backwards else x
    gates = functional.linear(x, into, bias)
    outputs, cells = LSTM(gates, h, c, recurrent, projection)
    return outputs.flip(0) if backwards else outputs, outputs[-1], cells[-1]


def halves(weights: Sequence[Tensor], both: bool) -> list[Sequence[Tensor]]:
    half = len(weights) // (1 + both)
    return [weights[:half], weights[half:]]


def recurrent(func: Any, x: Tensor, hx: Any, weights: Any, *rest: Any) -> Any:
    """With dropout between its layers, each layer is a call of its own."""
    if isinstance(weights, Tensor) or len(rest) != 6:
        return NotImplemented  # packed
    biases, layers, dropout, training, both, batch_first = rest
    if layers == 1 or not training or not dropout:
        return NotImplemented

    def layer(
        x: Tensor, state: Sequence[Tensor], given: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        found, last = func(x, state[0], given, biases, 1, 0.0, training, both, batch_first)
        return found, [last]

    x, (h,) = stacked(layer, x, (hx,), weights, layers, dropout, 1 + both, not batch_first)
    return x, h


def stacked(
    layer: Layer, x: Tensor, states: Sequence[Tensor], weights: Any, layers: int, p: float,
    directions: int, time_first: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Layer after layer, with dropout between them. A state has a row for each direction."""
    each, last = len(weights) // layers, []
    for k in range(layers):
        rows = slice(k * directions, (k + 1) * directions)
        x = dropped(x, p, time_first) if k and p else x
        x, found = layer(x, [state[rows] for state in states], weights[k * each : (k + 1) * each])
        last.append(found)
    return x, [torch.cat(list(one)) for one in zip(*last, strict=True)]


def dropped(x: Tensor, p: float, time_first: bool) -> Tensor:
    """Masks depend on the position in the batch, which is the first dimension."""
    if not time_first:
        return functional.dropout(x, p)
    return functional.dropout(x.transpose(0, 1), p).transpose(0, 1)
