"""One layer of an LSTM in one direction: a loop over time in one operator.

torch's own kernels keep a workspace that only autograd can pass to the backward. And a traced loop
would have nodes for every step in time.
"""

from typing import Any

import torch
from torch import Tensor

from piper.capture.kernels.derivatives import computed, differentiated

Three = tuple[Tensor, Tensor, Tensor]


def _forward(x: Tensor, h: Tensor, c: Tensor, weight: Tensor, projection: Tensor | None) -> Three:
    """Outputs, cells and gates of all times. `x` [time, rows, 4 * cells]: what gates get from the
    input, with both biases."""
    outputs, cells, gates = [], [], []
    for now in x.unbind(0):
        i, f, g, o = (now + h @ weight.t()).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = o * c.tanh()
        h = h if projection is None else h @ projection.t()
        outputs.append(h)
        cells.append(c)
        gates.append(torch.cat([i, f, g, o], -1))
    return torch.stack(outputs), torch.stack(cells), torch.stack(gates)


def _forward_fake(
    x: Tensor, h: Tensor, c: Tensor, weight: Tensor, projection: Tensor | None
) -> Three:
    times, rows, _ = x.shape
    return (
        x.new_empty(times, rows, h.shape[-1]),
        x.new_empty(times, rows, c.shape[-1]),
        torch.empty_like(x, memory_format=torch.contiguous_format),
    )


def _backward(
    output_grads: Tensor, cell_grads: Tensor, gates: Tensor, cells: Tensor, c: Tensor,
    weight: Tensor, projection: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, of the first state and cell, and of the outputs of all times in total."""
    dh, dc = output_grads.new_zeros(output_grads.shape[1:]), torch.zeros_like(c)
    before = torch.cat([c.unsqueeze(0), cells[:-1]])
    found, totals = [], []
    for t in reversed(range(len(gates))):
        i, f, g, o = gates[t].chunk(4, -1)
        dh = dh + output_grads[t]
        totals.append(dh)
        dm, squashed = dh if projection is None else dh @ projection, cells[t].tanh()
        dc = dc + cell_grads[t] + dm * o * (1 - squashed * squashed)
        grads = [
            dc * g * i * (1 - i), dc * before[t] * f * (1 - f), dc * i * (1 - g * g),
            dm * squashed * o * (1 - o),
        ]  # fmt: skip
        found.append(torch.cat(grads, -1))
        dh, dc = found[-1] @ weight, dc * f
    return torch.stack(found[::-1]), dh, dc, torch.stack(totals[::-1])


def _backward_fake(
    output_grads: Tensor, cell_grads: Tensor, gates: Tensor, cells: Tensor, c: Tensor,
    weight: Tensor, projection: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    first = output_grads.new_empty(output_grads.shape[1:])
    return (
        gates.new_empty(gates.shape),
        first,
        c.new_empty(c.shape),
        output_grads.new_empty(output_grads.shape),
    )


_FORWARD = computed(
    "lstm_forward(Tensor x, Tensor h, Tensor c, Tensor weight, Tensor? projection) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_BACKWARD = computed(
    "lstm_backward(Tensor output_grads, Tensor cell_grads, Tensor gates, Tensor cells, Tensor c, "
    "Tensor weight, Tensor? projection) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h: Tensor, c: Tensor, weight: Tensor, projection: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        outputs, cells, gates = _FORWARD(x, h, c, weight, projection)
        ctx.save_for_backward(h, c, weight, projection, outputs, cells, gates)
        return outputs, cells

    @staticmethod
    def backward(ctx: Any, output_grads: Tensor, cell_grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of weights are products apart from the loop, so they can wait (BW)."""
        h, c, weight, projection, outputs, cells, gates = ctx.saved_tensors
        dx, dh, dc, totals = _BACKWARD(
            output_grads, cell_grads, gates, cells, c, weight, projection
        )
        before = torch.cat([h.unsqueeze(0), outputs[:-1]])
        dprojection = None
        if projection is not None:
            squashed = gates[..., 3 * c.shape[-1] :] * cells.tanh()
            dprojection = totals.flatten(0, 1).t() @ squashed.flatten(0, 1)
        return dx, dh, dc, dx.flatten(0, 1).t() @ before.flatten(0, 1), dprojection


LSTM = differentiated(
    "lstm(Tensor x, Tensor h, Tensor c, Tensor weight, Tensor? projection) -> (Tensor, Tensor)",
    _Lstm,
)
