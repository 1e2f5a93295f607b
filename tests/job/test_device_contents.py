"""Tensors in attributes that a host does not read in each step: writes that no version counts.

A CPU stands in for a GPU: its tensors are treated as memory that the host cannot read at once.
"""

from collections.abc import Callable

import pytest
import torch
from draws import one_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import piper
from piper.capture.python_state import leaves, watch
from piper.capture.python_state.device_contents import AHEAD, Answer, DeviceContents, sample
from piper.capture.torch_private import memory_of
from piper.errors import InputError

ON = "cuda" if torch.cuda.is_available() else "cpu"
SECRET = "written through `.data`"
WRITES: dict[str, Callable[[Tensor], object]] = {
    "mul": lambda t: t.data.mul_(2),
    "index": lambda t: t.data.__setitem__(0, 3.0),
    "last": lambda t: t.data.view(-1)[-1:].fill_(7),
    "copy": lambda t: t.data.copy_(torch.arange(4.0)),
    "view": lambda t: t.data[1:3].neg_(),
    "detached": lambda t: torch.from_numpy(t.numpy()).add_(1) if ON == "cpu" else t.data.add_(1),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex64]


@pytest.fixture(autouse=True)
def distant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, the host acts as if it could not read its own memory."""
    if ON == "cpu":
        for module in (leaves, watch):
            monkeypatch.setattr(module, "memory_of", lambda tensor: (memory_of(tensor)[0], 0))


class Scaled(nn.Module):
    """One tensor in an attribute, one in a list, one in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = torch.ones(4, device=ON)
        self.held = {"list": [torch.ones(4, device=ON)]}

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x * self.scale) * self.held["list"][0]
        return scaled.square().mean()


def trainer(model: nn.Module) -> piper.Trainer:
    return piper.Trainer(
        model, None, [piper.Place(piper.where(), [0])], example=torch.zeros(2, 4), device=ON,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )  # fmt: skip


@one_of(3)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("held", [False, True])
def test_a_secret_write_is_an_error(write: str, held: bool) -> None:
    model = Scaled()
    tensor = model.held["list"][0] if held else model.scale

    with pytest.raises(InputError, match=SECRET) as seen, trainer(model) as one:  # noqa: PT012
        one.step(torch.ones(2, 4))
        WRITES[write](tensor)
        for _ in range(AHEAD + 2):
            one.step(torch.ones(2, 4))

    assert ("held" if held else "scale") in str(seen.value)


@one_of(2)
@pytest.mark.parametrize("end", ["close", "evaluate", "predict", "state_dict"])
def test_the_last_step_is_not_forgotten(end: str) -> None:
    model = Scaled()
    calls = {"evaluate": ([torch.ones(2, 4)],), "predict": (torch.ones(2, 4),)}
    with pytest.raises(InputError, match=SECRET), trainer(model) as one:
        one.step(torch.ones(2, 4))
        model.scale.data.mul_(2)
        one.step(torch.ones(2, 4))
        getattr(one, end)(*calls.get(end, ()))


def test_other_writes_are_read_in_the_next_step() -> None:
    model, plain = Scaled(), Scaled()
    plain.load_state_dict(model.state_dict())
    plain.to(ON)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(0)
    with trainer(model) as one:
        for step in range(6):
            x = torch.randn(2, 4, generator=draw)
            optimizer.zero_grad()
            expected = plain(x.to(ON))
            expected.backward()
            optimizer.step()
            assert float(one.step(x).loss) == pytest.approx(float(expected), rel=1e-5)
            for net in (model, plain):
                if step % 2:
                    net.scale.mul_(0.9)
                else:
                    net.scale = net.scale + 0.5


@given(st.sampled_from(DTYPES), st.sampled_from([1, 5, 4096, 2**19 + 7]), st.data())
def test_bytes_that_differ_are_seen(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """In contiguous tensors, views and transposed ones: any byte of small ones, parts of others."""
    whole = torch.zeros(2, size, device=ON).to(dtype)
    kinds = {"whole": whole, "row": whole[1], "turned": whole.T, "part": whole[:, ::2]}
    tensor = kinds[data.draw(st.sampled_from(sorted(kinds)))]
    contents = DeviceContents([("x", tensor), ("other", torch.ones(3, device=ON))])
    contents.ask()
    contents.refuse_written(wait=True)
    small = tensor.numel() * tensor.element_size() <= 2**19
    at = data.draw(st.integers(0, tensor.numel() - 1)) if small else 0

    tensor.data[tuple(int(one) for one in torch.unravel_index(torch.tensor(at), tensor.shape))] = 1
    contents.ask()

    with pytest.raises(InputError, match="^.*x was written"):
        contents.refuse_written(wait=True)


def test_nothing_is_copied_but_parts_of_a_large_tensor() -> None:
    assert sample(torch.zeros(2**22, device=ON)).numel() == 2**20


def test_a_host_far_ahead_waits() -> None:
    """Answers that are not known yet are left alone, but not too many of them."""
    contents = DeviceContents([("x", torch.zeros(3, device=ON))])

    class Never:
        waited = 0

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            Never.waited += 1

    for _ in range(AHEAD + 2):
        contents.answers.append(Answer(torch.tensor(False), Never()))  # type: ignore[arg-type]
        contents.refuse_written()

    assert (Never.waited, len(contents.answers)) == (2, AHEAD)
