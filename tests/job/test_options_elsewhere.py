"""Options that other systems give a trainer get an answer of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.errors import InputError

X = torch.ones(4, 4)
ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({"max_epochs": 3}, "write a loop over your batches that calls trainer.step(batch); "),
    ({"max_iters": 3}, "write a loop over your batches that calls trainer.step(batch); "),
    ({"devices": 2}, "`piper run -n 2` starts 2 processes, and the strategy says what each"),
    ({"devices": [0, 1]}, "`piper run -n 2` starts 2 processes"),
    ({"num_gpus": "auto"}, "`piper run -n N` starts the processes"),
    ({"accelerator": "gpu"}, 'write device="cuda"'),
    ({"accelerator": "cpu"}, 'write device="cpu"'),
    ({"use_cuda": False}, 'write device="cpu"'),
    ({"zero_stage": 3}, "write zero=3 in the strategy, such as strategies.one_f_one_b(pp=1, dp=2,"),
    ({"tensor_parallel_size": 2}, "strategies.one_f_one_b(pp=1, tp=2, ...)"),
    ({"pp": 2}, "strategies.one_f_one_b(pp=2, ...)"),
    ({"batch_size": 8}, "your own loop reads the loader"),
    ({"output_dir": "out"}, "write trainer.save(folder) in your loop"),
    ({"torch_compile": True}, "write compiled=..."),
]


@pytest.mark.parametrize(("option", "answer"), ANSWERS, ids=lambda one: str(one)[:24])
def test_an_option_of_another_system_gets_what_to_write(
    option: dict[str, Any], answer: str
) -> None:
    with pytest.raises(InputError) as error:
        piper.Trainer(nn.Linear(4, 4), nn.functional.mse_loss, None, example=(X, X), **option)

    (name,) = option
    assert str(error.value).startswith(f"Trainer: it has no option {name}\n  fix: ")
    assert answer in str(error.value)


OF_HUGGING_FACE = {
    "torch_dtype": "write dtype=...",
    "device_map": "leave it out: the strategy says which device has which layers",
    "attn_implementation": "or load the model with transformers, and give it to piper.Trainer(",
    "quantization_config": "give a folder with weights that are not quantized",
    "peft_config": "write adapter=...",
    "precison": "write precision=...",
    "colour": "it may have model_class, dtype, adapter, loss_fn, example, folder_or_config, "
    "strategy, optimizer, ",
}


@pytest.mark.parametrize("name", OF_HUGGING_FACE)
def test_from_pretrained_knows_its_own_options_and_those_of_transformers(name: str) -> None:
    options: dict[str, Any] = {name: "auto"}

    with pytest.raises(InputError) as error:
        piper.from_pretrained("nowhere", example={"input_ids": X}, **options)

    assert str(error.value).startswith(f"from_pretrained: it has no option {name}\n  fix: ")
    assert OF_HUGGING_FACE[name] in str(error.value)
