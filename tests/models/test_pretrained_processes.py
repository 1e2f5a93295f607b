"""Each process reads only its part of a folder, and writes its part back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool import run_on
from pretrained import SGD, batches, tune_on, write_model

transformers = pytest.importorskip("transformers")


def test_processes_read_and_write_their_parts(tmp_path: Path) -> None:
    """Also in place of weights that are there, in other files."""
    model = write_model(tmp_path / "a").train()
    model.save_pretrained(tmp_path / "b", max_shard_size="1KB")

    results = run_on(4, tune_on, str(tmp_path / "a"), str(tmp_path / "b"))

    optimizer = SGD(model.parameters())
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        assert [losses[step] for losses in results] == pytest.approx([loss.item()] * 4, rel=1e-5)
    assert [one.name for one in (tmp_path / "b").glob("*.safetensors*")] == ["model.safetensors"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    for name, wanted in model.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), wanted, rtol=1e-5, atol=1e-6)
