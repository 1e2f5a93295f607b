"""How long a run takes to go on after a kill, beside starts of the same processes.

    python bench/restart_time.py --repeats 5

Each start is timed from the launcher to the end of the first step:

- `empty cache` and `full cache`: `piper run`, with derivatives that are traced, or read from disk.
- `capture-free`: the same processes, libraries, model, optimizer and process group, and one step of
  plain PyTorch. Nothing is captured or compiled.
- `after a kill`: `piper run --restarts 1`, from the SIGKILL of a process to the end of the next
  step. It resumes from a checkpoint.

The goal is at most three times a capture-free start.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

SIZES = {"layers": 8, "dim": 64, "rows": 8, "length": 64, "vocab": 256}
LAUNCH = [sys.executable, "-m", "piper", "run", "--quiet"]
GOAL = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in {**SIZES, "processes": 2, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--role", choices=("piper", "plain"), help="a process of a run")
    parser.add_argument("--folder", type=Path, help="for the checkpoint of a process")
    given = parser.parse_args()
    match given.role:
        case "piper":
            under_piper(given)
        case "plain":
            plain(given)
        case _:
            report(given)


def report(given: argparse.Namespace) -> None:
    """Starts take turns, so that a busy moment of the host hits all of them."""
    with tempfile.TemporaryDirectory(prefix="restart-time-") as name:
        folder = Path(name)
        started(given, "piper", folder / "full", [])
        kinds: dict[str, Callable[[int], float]] = {
            "empty cache": lambda turn: started(given, "piper", folder / f"empty-{turn}", []),
            "full cache": lambda _: started(given, "piper", folder / "full", []),
            "capture-free": lambda _: started(given, "plain", folder / "full", []),
            "after a kill": lambda turn: killed(given, folder / "full", folder / f"kept-{turn}"),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(given.repeats):
            for kind, measure in kinds.items():
                seconds[kind].append(measure(turn))
    pairs = zip(seconds["after a kill"], seconds["capture-free"], strict=True)
    for kind, found in seconds.items():
        print(f"{kind:14} median {median(found):6.2f} s, {min(found):.2f} to {max(found):.2f} s")
    ratio = median(kill / free for kill, free in pairs)
    print(f"after a kill: {ratio:.2f} times a capture-free start (goal {GOAL:.0f})")


def started(given: argparse.Namespace, role: str, cache: Path, more: list[str]) -> float:
    began = time.time()
    return first(r"step 1 (\S+)", launched(given, role, cache, [], more)) - began


def killed(given: argparse.Namespace, cache: Path, folder: Path) -> float:
    text = launched(given, "piper", cache, ["--restarts", "1"], ["--folder", str(folder)])
    return first(r"step 3 (\S+)", text) - first(r"killed (\S+)", text)


def first(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


def launched(
    given: argparse.Namespace, role: str, cache: Path, options: list[str], more: list[str]
) -> str:
    """What the processes of a run printed."""
    sizes = [word for name in SIZES for word in (f"--{name}", str(getattr(given, name)))]
    command = [*LAUNCH, "-n", str(given.processes), *options, __file__, "--role", role]
    environment = {**os.environ, "PIPER_CACHE": str(cache)}
    text = subprocess.run(
        [*command, *sizes, *more], env=environment, capture_output=True, text=True, check=True
    )
    return text.stdout


def under_piper(given: argparse.Namespace) -> None:
    import piper
    from piper.models.llama import Llama, LlamaConfig

    torch, tokens, loss = prepared(given)
    config = LlamaConfig(vocab=given.vocab, dim=given.dim, layers=given.layers, heads=4)
    trainer = piper.Trainer(
        Llama(config, stages=given.layers), loss,
        lambda n: piper.strategies.one_f_one_b(pp=n, microbatches=4),
        example=(tokens, tokens), optimizer=torch.optim.AdamW,
    )  # fmt: skip
    if given.folder:
        trainer.resume(given.folder, missing_ok=True)
    while trainer.steps < (4 if given.folder else 1):
        if trainer.steps == 2 and trainer.rank == 1 and os.environ["PIPER_RESTART"] == "0":
            say(f"killed {time.time()}")
            os.kill(os.getpid(), signal.SIGKILL)
        _ = trainer.step(tokens, tokens).loss
        if trainer.rank == 0:
            say(f"step {trainer.steps} {time.time()}")
        if given.folder:
            trainer.save(given.folder)


def plain(given: argparse.Namespace) -> None:
    """The same libraries and process group, and a step of plain PyTorch."""
    import piper
    from piper.models.llama import Llama, LlamaConfig

    assert piper.Trainer  # loads all of Piper
    torch, tokens, loss = prepared(given)
    config = LlamaConfig(vocab=given.vocab, dim=given.dim, layers=given.layers, heads=4)
    model = Llama(config, stages=given.layers)
    torch.distributed.init_process_group("gloo")
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model(tokens), tokens).backward()
    optimizer.step()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        say(f"step 1 {time.time()}")


def prepared(given: argparse.Namespace):  # noqa: ANN201
    import torch

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    return torch, torch.randint(0, given.vocab, (given.rows, given.length)), loss


def say(text: str) -> None:
    print(f"{text}\n", end="", flush=True)


if __name__ == "__main__":
    main()
