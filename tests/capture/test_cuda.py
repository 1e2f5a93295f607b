"""The same on a GPU."""

import pytest
import torch
from capture.interpreter import Interpreter, assert_parity, state

from piper.capture import capture, dropout_mask
from piper.capture.kernels.attention_block import ATTEND
from piper.capture.kernels.overwriting import INTO
from piper.capture.kernels.scaled_linear import SCALED_LINEAR
from piper.capture.trace.float8 import ABLE
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


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < ABLE, reason="an older GPU"
)
def test_products_in_float8_are_those_of_the_cpu() -> None:
    """Rows of different sizes. A GPU adds with fewer digits."""
    draw = torch.Generator().manual_seed(0)
    size = torch.logspace(-6, 6, 40)[:, None]
    x, weight = size * torch.randn(40, 64, generator=draw), torch.randn(48, 64, generator=draw)
    grad = torch.randn(40, 48, generator=draw) / size
    found = []
    for device in ("cpu", "cuda"):
        given = [t.to(device, torch.bfloat16).requires_grad_() for t in (x, weight)]
        result = SCALED_LINEAR(*given)
        result.backward(grad.to(device, torch.bfloat16))
        found.append([t.detach().cpu().double() for t in (result, *(g.grad for g in given))])

    for here, there in zip(*found, strict=True):
        assert ((here - there).norm(dim=1) <= 2**-6 * here.norm(dim=1)).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_block_of_a_ring_is_what_slices_of_scores_give(causal: bool, groups: int) -> None:
    """Flash attention, beside float64, through both results of a block."""
    draw = torch.Generator("cuda").manual_seed(1)
    shapes = (2, 4, 256, 64), *[(2, 4 // groups, 256, 64)] * 2
    given = [torch.randn(s, generator=draw, device="cuda").bfloat16() for s in shapes]
    others = [torch.randn(s, generator=draw, device="cuda").bfloat16() for s in shapes[1:]]

    short, wide = (both_blocks(dtype, given, others, causal) for dtype in (given[0].dtype, None))

    for one, other in zip(short, wide, strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < 0.01


def both_blocks(dtype, given, others, causal) -> list[torch.Tensor]:
    """Attention to two blocks of keys, and its gradients; in float64 without a dtype."""
    every = (tensor.detach().clone() for tensor in (*given, *others))
    leaves = [tensor.to(dtype or torch.float64).requires_grad_() for tensor in every]
    query, key, value, key2, value2 = leaves
    one = ATTEND(query, key, value, None, causal, 0.125)
    other = ATTEND(query, key2, value2, None, False, 0.125)
    (a, m), (b, n) = ((sums[..., :-1], sums[..., -1:].detach()) for sums in (one, other))
    most = torch.maximum(m, n)
    total = a * (m - most).exp() + b * (n - most).exp()
    found = total[..., :-1] / total[..., -1:]
    found.backward(torch.ones_like(found) * torch.arange(64, device="cuda"))
    return [found.detach(), *(leaf.grad for leaf in leaves)]


def test_dropout_masks_are_those_of_the_cpu() -> None:
    masks = [
        dropout_mask(torch.tensor([2**40 + 1, 3, 1], device=device), 5, (64, 1024), 0.3).cpu()
        for device in ("cpu", "cuda")
    ]

    assert torch.equal(*masks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("words", [1, 7, 1000, 1024, 1025, 8192, 32000, 50257, 200_003])
def test_logarithms_of_softmax_that_overwrite_have_the_bits_of_torch(
    words: int, dtype: torch.dtype
) -> None:
    """Each size has its own kernel: of a warp, in registers, in shared memory, of a block."""
    draw = torch.Generator(device="cuda").manual_seed(words)
    logits, grad = torch.randn(2, 37, words, generator=draw, device="cuda").to(dtype)
    expected = torch.log_softmax(logits, -1)
    back = torch.ops.aten._log_softmax_backward_data(grad, expected, 1, dtype)

    forward, backward = (INTO[name] for name in INTO)
    forward(logits, 1, False, out=logits)
    backward(grad, logits, 1, dtype, out=grad)

    assert torch.equal(logits, expected) and torch.equal(grad, back)
