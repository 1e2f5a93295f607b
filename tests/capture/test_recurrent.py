"""Recurrent layers and the CTC loss, as plain PyTorch computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capture.interpreter import assert_close
from draws import every
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Split, rehearse, where
from piper.capture import annotate, capture
from piper.errors import CaptureError


class Net(nn.Module):
    """A recurrent layer between two linear ones. Its last states are used, too."""

    def __init__(self, layer: nn.RNNBase, states: bool = False) -> None:
        super().__init__()
        self.first, self.layer, self.states = nn.Linear(3, 4), layer, states
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.first(x).tanh()
        with annotate("PP"):
            given = self.start(x) if self.states else None
            out, last = self.layer(x, given)
            last = last if isinstance(last, tuple) else (last,)
            return out.square().mean() + sum((one * one).sum() for one in last)

    def start(self, x: Tensor) -> Any:
        """The first states, from a value with a gradient."""
        layer = self.layer
        rows = x.shape[0] if layer.batch_first else x.shape[1]
        count = layer.num_layers * (1 + layer.bidirectional)
        size = layer.proj_size or layer.hidden_size
        h = x.mean().expand(count, rows, size).contiguous()
        c = x.std().expand(count, rows, layer.hidden_size).contiguous()
        return (h, c) if isinstance(layer, nn.LSTM) else h


LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "plain": (nn.LSTM, {}),
    "two layers": (nn.LSTM, {"num_layers": 2, "batch_first": True}),
    "both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "without a bias": (nn.LSTM, {"bias": False}),
    "projected": (nn.LSTM, {"proj_size": 2}),
    "all": (nn.LSTM, {"num_layers": 2, "proj_size": 2, "bidirectional": True, "batch_first": True}),
    "no bias, projected": (nn.LSTM, {"bias": False, "proj_size": 2, "bidirectional": True}),
    "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "rnn": (nn.RNN, {"nonlinearity": "relu"}),
}
CASES = [(name, states) for name in LAYERS for states in (False, True)]


@pytest.mark.parametrize(("name", "states"), every(6, CASES, map(str, CASES)))
def test_a_recurrent_layer_trains_as_in_pytorch(name: str, states: bool) -> None:
    kind, options = LAYERS[name]
    torch.manual_seed(0)
    model, batch = Net(kind(4, 5, **options), states), (torch.randn(3, 2, 3).double(),)

    assert_close(capture(model, None, batch), model, batch)


def test_a_long_sequence_is_one_operator() -> None:
    model = Net(nn.LSTM(4, 5))

    captured = capture(model, None, (torch.randn(200, 2, 3).double(),))

    graph = captured.kernels.graphs[captured.model.regions[1].code]
    assert str(graph).count("lstm") < 20


KINDS = [(kind, first) for kind in (nn.RNN, nn.LSTM, nn.GRU) for first in (True, False)]


@pytest.mark.parametrize(("kind", "batch_first"), every(6, KINDS, map(str, KINDS)))
def test_dropout_between_layers_depends_on_the_sample_only(
    kind: type[nn.RNNBase], batch_first: bool
) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(3, 3, num_layers=2, dropout=0.5, batch_first=batch_first)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0] if batch_first else self.layer(x.transpose(0, 1))[0][-1]

    torch.manual_seed(0)
    model = Sum()
    x = torch.randn(4, 2, 3).double()
    y = x if batch_first else x[:, 0]

    def trained(parts: int) -> Any:
        strategy = [Place(where(), [0]), Split("MB", parts)]
        return rehearse(model, functional.mse_loss, strategy, [(x, y), (x, -y)])

    whole, split = trained(1), trained(2)

    assert whole.losses == pytest.approx(split.losses, rel=1e-12)
    model.layer.dropout = 0.0
    assert trained(1).losses[0] != pytest.approx(whole.losses[0], rel=1e-6)


def test_packed_sequences() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
            return self.layer(packed)[0].data.mean()

    with pytest.raises(CaptureError, match="fix: "):
        capture(Packed(), None, (torch.randn(3, 2, 3),))


class Spoken(nn.Module):
    """Scores of 5 symbols at 7 times; the loss is the model's own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(3, 5).double(), options

    def forward(self, x: Tensor, labels: Tensor, inputs: Tensor, lengths: Tensor) -> Tensor:
        scores = self.layer(x).log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(scores, labels, inputs, lengths, **self.options).mean()


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "blank": 4},
    "each": {"reduction": "none", "zero_infinity": True},
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_ctc_loss_trains_as_in_pytorch(name: str) -> None:
    torch.manual_seed(0)
    model = Spoken(**LOSSES[name])
    x, labels = (
        torch.randn(3, 7, 3).double(),
        torch.tensor([[1, 2, 3, 1], [2, 1, 1, 1], [3, 1, 2, 1]]),
    )
    lengths = torch.tensor([4, 1, 2 if name != "each" else 4])
    batch = x, labels, torch.tensor([7, 5, 4]), lengths

    assert_close(capture(model, None, batch), model, batch)
