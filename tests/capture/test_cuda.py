"""The same on a GPU."""

import pytest
import torch
from capture.interpreter import Interpreter, assert_parity, state

from piper.capture import capture, dropout_mask
from piper.models.llama import Llama, LlamaConfig, cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randint(128, (2, 16), device="cuda") for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama(dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = Llama(LlamaConfig(tied=True, kv_heads=2), stages=4).to("cuda", dtype)
    example = batch()

    captured = capture(model, cross_entropy, example, device="cuda")

    assert_parity(captured, model, cross_entropy, example)


def test_compiled_llama() -> None:
    model = Llama(LlamaConfig(), stages=2).cuda()
    example = batch()
    captured = capture(model, cross_entropy, example, device="cuda")

    plain = Interpreter(captured, state(model)).step(example)
    compiled = Interpreter(captured, state(model), compiled=True).step(example)

    torch.testing.assert_close(compiled, plain)


def test_dropout_masks_are_those_of_the_cpu() -> None:
    masks = [
        dropout_mask(torch.tensor([2**40 + 1, 3, 1], device=device), 5, (64, 1024), 0.3).cpu()
        for device in ("cpu", "cuda")
    ]

    assert torch.equal(*masks)
