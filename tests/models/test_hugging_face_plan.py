"""Hugging Face's own plan for tensor parallelism, as `plan` of a `Shard`."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Shard, Split, Strategy, where
from piper.ir.placement.placements import Cut
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.rehearsal import rehearsed

transformers = pytest.importorskip("transformers")

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def gpt_neox() -> nn.Module:
    """With one product for queries, keys and values, and norms that compute in float64."""
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config).double()


def next_token(output, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


@pytest.mark.soak
def test_hugging_faces_plan_says_how_parameters_are_cut() -> None:
    model = gpt_neox()
    given = model.config.base_model_tp_plan  # names as in the base model
    plan = {f"{model.base_model_prefix}.{name}": how for name, how in given.items()}
    batches = [(torch.randint(32, (4, 6)), torch.randint(32, (4, 6))) for _ in range(3)]
    alone = copy.deepcopy(model)
    wanted = plain_losses(
        SGD(alone.parameters()), batches, lambda x, labels: next_token(alone(x), labels)
    )

    strategy = Strategy(
        [Place(where(), [0, 1]), Shard(where(), [0, 1], what="weights", plan=plan), Split("MB", 2)]
    )
    job = Job(model, next_token, strategy, Options(optimizer=SGD))
    found = rehearsed(job, [Batch.of(batch) for batch in batches])

    assert found.losses == pytest.approx(wanted, rel=1e-12)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach())
    buckets = job.capture(Batch.of(batches[0])).model.buckets.values()
    cut = {p.name: bucket.placement for bucket in buckets for p in bucket.parameters}
    assert len(plan) == 4
    for name in plan:
        assert cut[f"{name}.weight".replace("*", "0")] is Cut
