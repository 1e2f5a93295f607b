"""What options hold is the same text in processes that have different hashes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OF_TORCH = """
from types import SimpleNamespace
import torch.overrides as tables, torch as library

class Net(torch.nn.Linear):
    def forward(self, x):
        return SimpleNamespace(logits=super().forward(x))

model, teacher = (Net(8, 8) for _ in range(2))
for one in (model, teacher):
    one.generation_config = SimpleNamespace(to_dict=dict, names={"p", "q", "r"})
first = None
"""
OF_TRANSFORMERS = """
import transformers as library, transformers.utils.import_utils as tables
from piper.models.hugging_face_build import first_values

sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
config = library.LlamaConfig(vocab_size=8, **sizes)
model, teacher = (library.LlamaForCausalLM(config) for _ in range(2))
first = first_values(model)
"""
PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from piper import Strategy
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.programs import described_functions
{models}
model.tags, teacher.tags = {{"a", "b", "c"}}, frozenset({{"x", "y", "z"}})

def loss_fn(output, labels):
    other = teacher(labels).logits.detach()
    kept = sum(p.square().sum() for p in model.parameters())
    return (output.logits - other).square().mean() + kept + len(teacher.tags & {{"x"}})

class Made:
    library, tables = library, tables

    def __call__(self, named):
        return torch.optim.SGD(named, lr=len(self.library.__name__) + len(self.tables.__name__))

def weight(*microbatch):
    return float(len(model.generation_config.to_dict()) + len(teacher.generation_config.to_dict()))

options = Options(init=first, loss_weight=weight, optimizer=Made())
for path, text in sorted(described_functions(Job(model, loss_fn, Strategy([]), options)).items()):
    print(path, text)
"""


@pytest.mark.parametrize(
    "models", [OF_TORCH, pytest.param(OF_TRANSFORMERS, marks=pytest.mark.soak)], ids=["torch", "hf"]
)
def test_options_are_the_same_whatever_the_hash_seed(models: str) -> None:
    if models is OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    program = [sys.executable, "-c", PROGRAM.format(models=models)]
    paths = [str(TESTS), str(TESTS.parent / "src")]
    runs = [
        subprocess.Popen(
            [*program, *paths], stdout=subprocess.PIPE, text=True, env={"PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2")
    ]

    first, second = (one.communicate()[0].splitlines() for one in runs)

    assert len(first) > 5 and [one.returncode for one in runs] == [0, 0]
    assert [line for line in first if line not in second] == []
