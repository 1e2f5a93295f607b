"""A run with experts whose device 1 is killed or stopped while tokens are on their way.

piper run -n 2 tests/scripts/faulty_experts.py kill          (or: -n 2 --share-gpu ... stop)
"""

import os
import signal
import sys
import threading

import torch

import piper
from piper.models.qwen3_moe import PRESETS, Qwen3Moe, moe_loss

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STEPS = 100_000  # more than there is time for


def main() -> None:
    torch.manual_seed(0)
    config = PRESETS["tiny"]
    tokens = torch.randint(config.vocab, (4, 9))
    trainer = piper.Trainer(
        Qwen3Moe(config), moe_loss,
        lambda n: piper.strategies.gpipe(pp=1, dp=n, ep=n, zero=1, microbatches=2),
        example=(tokens[:, :-1], tokens[:, 1:]), optimizer=torch.optim.AdamW, timeout=60.0,
    )  # fmt: skip
    for step in range(STEPS):
        if step == 3 and trainer.rank == 1:
            fault = os.getpid(), SIGNALS[sys.argv[1]]
            threading.Timer(0.2, os.kill, fault).start()
        _ = trainer.step(tokens[:, :-1], tokens[:, 1:]).loss


if __name__ == "__main__":
    main()
