"""Seeds and clocks in a forward: a captured step has neither."""

from __future__ import annotations

import datetime
import os
import secrets
import time
import uuid
from collections.abc import Callable
from datetime import date as Date
from datetime import datetime as Moment
from random import SystemRandom
from time import perf_counter

import numpy as np
import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn, random
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from piper.capture import capture
from piper.errors import CaptureError

Mix = Callable[[Tensor], Tensor]
SEED = random.manual_seed  # as after `from torch import manual_seed`


class Net(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.a, self.mix = nn.Linear(4, 4), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.a(x))


def captured(mix: Mix) -> None:
    capture(Net(mix), F.mse_loss, (torch.zeros(2, 4), torch.zeros(2, 4)))


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(x, 0.5)


def seeded_by_its_name(x: Tensor) -> Tensor:
    SEED(3)
    return x + torch.randn(4)


def forked(x: Tensor) -> Tensor:
    with random.fork_rng(devices=[]):
        return x + torch.randn(4)


def forked_and_seeded(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(3)
        return x + torch.randn(4)


def same_state_twice(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = F.dropout(x, 0.5)
    torch.set_rng_state(state)
    return first - F.dropout(x, 0.5)


def new_seed(x: Tensor) -> Tensor:
    torch.seed()
    return F.dropout(x, 0.5)


def seeded_on_gpus(x: Tensor) -> Tensor:
    torch.cuda.manual_seed_all(3)
    return F.dropout(x, 0.5)


SEEDS = [seeded, seeded_by_its_name, forked, forked_and_seeded, same_state_twice, new_seed,
         seeded_on_gpus]  # fmt: skip


@pytest.mark.parametrize("mix", SEEDS)
def test_a_seed_in_a_forward_is_refused(mix: Mix) -> None:
    before = torch.initial_seed()

    with pytest.raises(CaptureError, match=r"test_seeds_and_clocks.py:\d+: the forward sets the s"):
        captured(mix)

    assert torch.initial_seed() == before


def test_a_seed_of_the_generator_itself_is_refused() -> None:
    def mix(x: Tensor) -> Tensor:
        torch.default_generator.manual_seed(before + 1)
        return F.dropout(x, 0.5)

    before = torch.initial_seed()
    with pytest.raises(CaptureError, match="the forward sets the seed"):
        captured(mix)
    torch.manual_seed(before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_keep_states_of_their_own(reentrant: bool) -> None:
    captured(lambda x: checkpoint(lambda y: F.dropout(y, 0.5), x, use_reentrant=reentrant))


def test_a_seed_may_be_read() -> None:
    captured(lambda x: x * (1 + torch.initial_seed() % 2))


def clock_imported_inside(x: Tensor) -> Tensor:
    import time as clock

    return x * clock.time()


def tensor_of_a_clock(x: Tensor) -> Tensor:
    return x * torch.tensor(time.time() % 1)


class Held:
    """A clock as an attribute."""

    def __init__(self) -> None:
        self.clock = time.time

    def now(self, x: Tensor) -> Tensor:
        return x * (self.clock() // 60)


def in_a_closure(clock: Callable[[], float]) -> Mix:
    return lambda x: x * (clock() // 60)


HELD, BOUND, DEADLINE = Held(), datetime.datetime.now, time.time() + 3600

CLOCKS: dict[str, Mix] = {
    "time": lambda x: x * time.time(),
    "perf_counter": lambda x: x + perf_counter(),
    "nanoseconds": lambda x: x * (time.monotonic_ns() % 1_000_003),
    "imported inside": clock_imported_inside,
    "as a tensor": tensor_of_a_clock,
    "datetime": lambda x: x * datetime.datetime.now().timestamp(),
    "urandom": lambda x: x * int.from_bytes(os.urandom(6), "big"),
    "uuid": lambda x: x * (uuid.uuid4().int % 2**40),
    "secrets": lambda x: x * secrets.randbelow(2**40),
    "SystemRandom": lambda x: x * SystemRandom().random(),
    "numpy without a seed": lambda x: x * float(np.random.default_rng().random()),
    # Equal in two traces, one after the other:
    "seconds": lambda x: x * int(time.time()),
    "odd seconds": lambda x: x * (int(time.time()) % 2),
    "nanoseconds in hours": lambda x: x * (time.time_ns() // 3_600_000_000_000),
    "day": lambda x: x * datetime.date.today().toordinal(),
    "year": lambda x: x * Date.today().year,
    "hour": lambda x: x * (2.0 if datetime.datetime.now().hour < 12 else 1.0),
    "in another zone": lambda x: x * Moment.now(datetime.UTC).day,
    "weekend": lambda x: x if Moment.utcnow().weekday() >= 5 else -x,
    "since a date": lambda x: x * (datetime.datetime.now() - datetime.datetime(2024, 1, 1)).days,
    "formatted": lambda x: x * float(time.strftime("%Y")),
    "fields": lambda x: x * time.localtime().tm_yday,
    "text": lambda x: x * float(time.ctime()[-4:]),
    "deadline": lambda x: x if time.time() < DEADLINE else -x,
    "minutes of a process": lambda x: x * (perf_counter() // 60),
    "coin": lambda x: x if secrets.randbelow(2) else -x,
    "coin of numpy": lambda x: x * int(np.random.default_rng().integers(2)),
    "held": HELD.now,
    "in a closure": in_a_closure(time.monotonic),
    "bound method": in_a_closure(lambda now=None: BOUND().timestamp() // 3600),
}


@one_of(2)
@pytest.mark.parametrize("mix", every(2, CLOCKS.values(), CLOCKS))
def test_a_clock_that_a_forward_computes_with_is_refused(mix: Mix) -> None:
    with pytest.raises(CaptureError, match=r"test_seeds_and_clocks.py:\d+: the forward computes w"):
        captured(mix)


class Timed(Net):
    """Measures itself, as profilers do."""

    def forward(self, x: Tensor) -> Tensor:
        started = time.perf_counter()
        found = super().forward(x)
        self.took = time.perf_counter() - started
        return found


def test_a_forward_may_measure_itself() -> None:
    capture(Timed(torch.tanh), F.mse_loss, (torch.zeros(2, 4), torch.zeros(2, 4)))


def looks_at_dates(x: Tensor) -> Tensor:
    started = datetime.datetime.now()
    assert isinstance(started, datetime.datetime) and started.year > 2000
    return x * (2 if (datetime.datetime.now() - started).days > 3 else 1)


def test_a_date_that_seems_not_to_matter_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        captured(looks_at_dates)

    assert caplog.text.count("asks for a date") == 1
    assert type(datetime.datetime.now()) is Moment and time.time() < DEADLINE + 3600


def test_numbers_with_a_seed_are_constants() -> None:
    captured(lambda x: x * float(np.random.default_rng(3).random()))
