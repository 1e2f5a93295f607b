"""Metrics of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from piper.errors import NoAttribute
from piper.runtime.no_number import NO_BACKWARD, NoNumber


@dataclass(frozen=True, slots=True)
class Readings:
    """The numbers of a step, known once it is over."""

    loss: float
    grad_norm: float
    seconds: float
    memory_gib: float
    losses: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slowest:
    """The device that the others wait for, step after step, and where it loses its time.

    >>> print(Slowest(1, 0.045, 0.03, "PP0:F", 0.0142))
    device 1 works 45.0 ms of each step, the others 30.0 ms: 15.0 ms more, of which 14.2 ms in PP0:F
    """

    device: int
    seconds: float  # of work in each step
    others: float
    where: str = ""  # a region and phase, another instruction, or "between steps"
    lost: float = 0.0  # seconds there

    def __str__(self) -> str:
        own, others, lost = map(milliseconds, (self.seconds, self.others, self.lost))
        more = milliseconds(self.seconds - self.others)
        text = f"device {self.device} works {own} of each step, the others {others}"
        part = "" if lost == more else f", of which {lost}"
        return f"{text}: {more} more{part} {self.place}" if self.where else text

    @property
    def place(self) -> str:
        return self.where if self.where == BETWEEN else f"in {self.where}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


BETWEEN = "between steps"
NAMES = (
    "step", "loss", "grad_norm", "lr", "samples", "tokens", "seconds", "samples_per_second",
    "tokens_per_second", "memory_gib", "mfu",
)  # fmt: skip

OTHERS = {  # what other systems return from a step, and what to write here
    "trainer.predict(*inputs), the output of the model, and compute it from that": (
        "acc", "accuracy", "logits", "output", "outputs", "preds", "predictions", "f1", "top1",
    ),
    ".loss, which is a number of Python": (
        "item", "detach", "cpu", "mean", "numpy", "tolist", "total_loss", "train_loss", "val_loss",
        "mean_loss", "value",
    ),
    "math.exp(metrics.loss), or trainer.evaluate(batches).perplexity": ("perplexity", "ppl"),
    ".grad_norm": ("norm", "gradient_norm", "gnorm", "total_norm", "max_norm"),
    ".lr": ("learning_rate", "rate"),
    ".seconds": ("time", "step_time", "duration", "elapsed", "iter_time", "ms"),
    ".memory_gib": ("memory", "peak_memory", "max_memory", "memory_gb", "mem"),
    ".tokens_per_second or .samples_per_second": ("throughput", "tps", "tokens_per_sec", "speed"),
}  # fmt: skip


class Metrics(NoNumber):
    """The metrics of a step. `for name, value in metrics` and `asdict()` leave out the unknown.

    Reading a metric waits for its step to finish. If you do not read it, the next step starts
    right away.

    >>> found = Metrics(3, 2, 1024, lambda: Readings(2.5, 1.25, 0.5, 1.0), lr=3e-4)
    >>> found
    step: 3  loss: 2.50000  grad_norm: 1.2500  lr: 3.00e-04  memory: 1.00 GiB  tokens/s: 2,048
    >>> dict(found)["tokens_per_second"], found.mfu
    (2048.0, None)
    """

    def __init__(
        self,
        step: int,
        samples: int,
        tokens: int | None,
        read: Callable[[], Readings],
        lr: float | None = None,
        best_seconds: float | None = None,
        slowest: Slowest | None = None,
    ) -> None:
        self.step, self.read = step, read
        self.samples, self.tokens = samples, tokens  # of all replicas; None: it has no token ids
        self.lr = lr  # of the first parameter group on this process, if it has one
        self.slowest = slowest  # None if no device is persistently slower than the others
        self.best_seconds = best_seconds  # at the peak of all devices, where that is known

    @cached_property
    def readings(self) -> Readings:
        return self.read()

    @property
    def loss(self) -> float:
        return self.readings.loss

    @property
    def grad_norm(self) -> float:
        return self.readings.grad_norm

    @property
    def seconds(self) -> float:
        return self.readings.seconds

    @property
    def memory_gib(self) -> float:
        return self.readings.memory_gib

    @property
    def losses(self) -> Mapping[int, float]:
        """The losses of the microbatches whose last stage is on this device."""
        return self.readings.losses

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the share of the peak of all devices, on the first process.

        None where the peak is not known. What is recomputed does not count.
        """
        return None if self.best_seconds is None else self.best_seconds / self.seconds

    if not TYPE_CHECKING:  # a type checker would allow any name

        def __getattr__(self, name: str) -> Any:
            if name == "backward":
                raise NoAttribute.of("metrics", "a step has no backward", NO_BACKWARD)
            fix = next((fix for fix, names in OTHERS.items() if name in names), None)
            if fix is None:
                return object.__getattribute__(self, name)  # with Python's own error
            raise NoAttribute.of("metrics", f"a step has no {name}", f"write {fix}")

    def __getitem__(self, name: str) -> float | None:
        """
        >>> Metrics(3, 2, None, lambda: Readings(2.5, 1.25, 0.5, 1.0))["loss"]
        2.5
        """
        if name not in NAMES:
            raise KeyError(f"there is no {name!r}, only {', '.join(NAMES)}")
        found: float | None = getattr(self, name)
        return found

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for name in NAMES:
            value = getattr(self, name)
            if value is not None:
                yield name, value

    def asdict(self) -> dict[str, float]:
        return dict(self)

    def __str__(self) -> str:
        return "  ".join(self.fields())

    def fields(self) -> list[str]:
        """Of a printed line."""
        lr = [] if self.lr is None else [f"lr: {self.lr:.2e}"]
        rate = rate_text(self.samples, self.tokens, self.seconds)
        mfu = [] if self.mfu is None else [f"mfu: {self.mfu:.1%}"]
        step, memory = f"step: {self.step}", f"memory: {self.memory_gib:.2f} GiB"
        first = [step, f"loss: {self.loss:.5f}", f"grad_norm: {self.grad_norm:.4f}"]
        return [*first, *lr, memory, rate, *mfu]

    __repr__ = __str__


def rate_text(samples: int, tokens: int | None, seconds: float) -> str:
    """
    >>> rate_text(8, 4096, 0.5), rate_text(8, None, 0.5)
    ('tokens/s: 8,192', 'samples/s: 16')
    """
    if tokens is None:
        return f"samples/s: {samples / seconds:,.0f}"
    return f"tokens/s: {tokens / seconds:,.0f}"
