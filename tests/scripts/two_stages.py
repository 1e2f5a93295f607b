"""Two stages on two devices, for tests of launchers: says the loss of every step.

`plain` is the same without Piper. --fail R: after the last step, device R raises.
"""

import argparse

import torch
from torch import nn

STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.stages = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        import piper

        x = tokens
        for index, stage in enumerate(self.stages):
            with piper.annotate("PP"):
                x = self.embedding(x) if index == 0 else x
                x = torch.tanh(stage(x))
        return x


def model_and_batches() -> tuple[Net, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    return Net(), [(torch.randint(0, 16, (4, 3)), torch.randn(4, 3, 8)) for _ in range(STEPS)]


def optimizer(named: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.1)


def plain() -> list[float]:
    """The losses of one process and plain autograd."""
    model, batches = model_and_batches()
    updates = optimizer(model.parameters())
    found = []
    for tokens, target in batches:
        loss = nn.functional.mse_loss(model(tokens), target)
        loss.backward()
        updates.step()
        updates.zero_grad()
        found.append(loss.item())
    return found


def main() -> None:
    import piper

    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", type=int, default=-1)
    chosen = parser.parse_args()
    model, batches = model_and_batches()
    trainer = piper.Trainer(
        model, nn.functional.mse_loss, piper.strategies.one_f_one_b(pp=2, microbatches=2),
        optimizer=optimizer, example=batches[0],
    )  # fmt: skip
    for step, batch in enumerate(batches, 1):
        print(f"step {step} loss {trainer.step(*batch).loss:.9f}\n", end="", flush=True)
    if trainer.rank == chosen.fail:
        raise ValueError("this device has had enough")
    while chosen.fail >= 0:
        trainer.step(*batches[0])


if __name__ == "__main__":
    main()
