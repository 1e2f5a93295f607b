"""A run in which devices meet faults, for tests of launchers.

--strategy NAME: one of STRATEGIES, on as many devices as there are. --faults JSON: a list with a
fault for each attempt: its kind (one of FAULTS), its device, its step of this attempt (0: before
the Trainer is made), and after how many seconds of it. --checkpoint FOLDER: resume from there, and
save after every step. Device 0 prints the loss of each step, and every line its time.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

if __name__ == "__main__":  # before torch, which takes seconds
    print(f"began {time.time()}\n", end="", flush=True)

import torch
from torch import nn

import piper
from piper import strategies

STRATEGIES = {
    "1f1b": lambda n: strategies.one_f_one_b(pp=n, microbatches=4),
    "zb-h1": lambda n: strategies.zb_h1(pp=n, microbatches=4),
    "dp": lambda n: strategies.one_f_one_b(pp=1, dp=n, microbatches=2),
    "zero3": lambda n: strategies.one_f_one_b(pp=1, dp=n, zero=3, microbatches=2),
    "pp x dp": lambda n: strategies.one_f_one_b(pp=2, dp=n // 2, zero=1, microbatches=2),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.double()  # a hundred steps at this rate make much of a rounding error

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens
        for index, layer in enumerate(self.layers):
            with piper.annotate("PP"):
                x = self.embedding(x) if index == 0 else x
                x = torch.tanh(layer(x))
        return x


def batch(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(0, 16, (4, 3), generator=generator)
    return tokens, torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)


def optimizer(named: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.1)


def plain(replicas: int, steps: int) -> list[float]:
    """The losses of one process and plain autograd."""
    torch.manual_seed(0)
    model = Net()
    updates, found = optimizer(model.parameters()), []
    for step in range(1, steps + 1):
        batches = [batch(step, replica) for replica in range(replicas)]
        tokens, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = nn.functional.mse_loss(model(tokens), target)
        loss.backward()
        updates.step()
        updates.zero_grad()
        found.append(loss.item())
    return found


FAULTS = (
    "kill", "term", "stop", "segv", "os._exit",  # at any moment
    "hang", "exit 0", "exit 3", "exception", "memory", "nan",  # between two steps
)  # fmt: skip
ANY_MOMENT = FAULTS[:5]


def fail(kind: str, after: float = 0.0) -> None:
    """Meet a fault now, or in so many seconds, wherever the main thread is then."""
    if after and kind in ANY_MOMENT:
        threading.Timer(after, fail, [kind]).start()
        return
    print(f"fault {time.time()}\n", end="", flush=True)
    match kind:
        case "kill" | "term" | "stop" | "segv":
            number = {
                "kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP,
                "segv": signal.SIGSEGV,
            }[kind]  # fmt: skip
            os.kill(os.getpid(), number)
            time.sleep(1)
        case "nan":
            pass  # see `spoiled`
        case "exit 0" | "exit 3":
            sys.exit(int(kind[-1]))
        case "os._exit":
            os._exit(0)
        case "exception":
            raise ValueError("this device has had enough")
        case "memory":
            torch.empty(2**60, dtype=torch.uint8)  # more than any host has
        case "hang":
            time.sleep(600)  # a data loader that waits for a file system
        case "interrupt":
            raise KeyboardInterrupt
        case _:
            raise AssertionError(f"there is no fault {kind!r}")


def spoiled(given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return given[0], given[1] * float("nan")


def fault_of_attempt(faults: list[tuple[str, int, int, float]]) -> tuple[str, int, int, float]:
    """Piper's launchers and torchrun count restarts."""
    names = ("PIPER_RESTART", "TORCHELASTIC_RESTART_COUNT")
    attempt = max(int(os.environ.get(name, "0")) for name in names)
    return faults[attempt] if attempt < len(faults) else ("", -1, -1, 0.0)


def sockets() -> list[str]:
    """The addresses on which this process listens, in the kernel's words."""
    mine = {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.exists()}
    rows = [
        row.split()
        for file in ("tcp", "tcp6")
        for row in Path(f"/proc/self/net/{file}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="1f1b", choices=STRATEGIES)
    parser.add_argument("--faults", type=json.loads, default=[])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--checkpoint")
    parser.add_argument("--pids", help="a folder for process ids")
    parser.add_argument("--sockets", action="store_true")
    chosen = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    if chosen.pids:
        (Path(chosen.pids) / f"{os.getpid()} of device {rank}").touch()
    fault, at, number, after = fault_of_attempt(chosen.faults)
    if rank == at and number == 0:
        fail(fault, after)
    torch.manual_seed(0)
    trainer = piper.Trainer(
        Net(), nn.functional.mse_loss, STRATEGIES[chosen.strategy], optimizer=optimizer,
        example=batch(0, 0), timeout=chosen.timeout, on_nan="stop" if fault == "nan" else None,
    )  # fmt: skip
    if chosen.checkpoint:
        trainer.resume(chosen.checkpoint, missing_ok=True)
    first = trainer.steps
    while trainer.steps < chosen.steps:
        step = trainer.steps + 1
        now = step == first + number
        if now and rank == at:
            fail(fault, after)
        given = batch(step, trainer.replica)
        metrics = trainer.step(*(spoiled(given) if now and fault == "nan" else given))
        if rank == 0:
            print(f"step {step} loss {metrics.loss:.9f} {time.time()}\n", end="", flush=True)
        if chosen.checkpoint:
            trainer.save(chosen.checkpoint)
    if rank == at:
        time.sleep(60)  # until the fault comes
    if chosen.sockets:
        print(f"listens {' '.join(sockets())}\n", end="", flush=True)


if __name__ == "__main__":
    main()
