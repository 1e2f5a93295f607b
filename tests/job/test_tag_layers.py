"""Unedited models: their layers are found, and train as plain PyTorch trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draws import drawn, draws, every, one_of
from torch import Tensor, nn

import piper
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.numerics import compare
from piper.job.options import Options
from piper.strategies import BUILDERS

transformers = pytest.importorskip("transformers")

CPU = Options(device="cpu")
DIM = 16
TEXT = {
    "vocab_size": 31, "hidden_size": DIM, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
VISION = {
    "hidden_size": DIM, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": 31, "d_model": DIM, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "num_mel_bins": 4, "max_source_positions": 8, "bos_token_id": None,
    "max_target_positions": 8, "decoder_start_token_id": 1, "eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": 31, "d_model": DIM, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "num_decoder_layers": 2, "dropout_rate": 0.0,
}  # fmt: skip
MOE = {**TEXT, "num_local_experts": 2, "num_experts_per_tok": 1}
GPT2 = {"vocab_size": 31, "n_embd": DIM, "n_layer": 2, "n_head": 2, "n_positions": 8}
CLIP = {"text_config": {**TEXT, "eos_token_id": 30}, "vision_config": VISION}
TOKENS, IMAGE = torch.ones(2, 4, dtype=torch.long), torch.ones(2, 3, 8, 8)


def model_of(name: str, config: dict[str, Any]) -> nn.Module:
    family = name.partition("For")[0].partition("LM")[0].partition("Model")[0]
    found = getattr(transformers, f"{family}Config")(**config)
    return getattr(transformers, name)(found)


STACKS = [
    ("LlamaForCausalLM", TEXT, (TOKENS,), ["model.layers"]),
    ("GPT2LMHeadModel", GPT2, (TOKENS,), ["transformer.h"]),
    ("T5ForConditionalGeneration", T5, (TOKENS, None, TOKENS), ["encoder.block", "decoder.block"]),
    ("BertForMaskedLM", TEXT, (TOKENS,), ["bert.encoder.layer"]),
    ("MixtralForCausalLM", MOE, (TOKENS,), ["model.layers"]),
    (
        "WhisperForConditionalGeneration", SEQ2SEQ, (torch.ones(2, 4, 16), None, TOKENS),
        ["model.encoder.layers", "model.decoder.layers"],
    ),
    (
        "CLIPModel", CLIP, (TOKENS, IMAGE),
        ["vision_model.encoder.layers", "text_model.encoder.layers"],
    ),
]  # fmt: skip


@one_of(2)
@pytest.mark.parametrize(
    ("name", "config", "example", "lists"), every(2, STACKS, [name for name, *_ in STACKS])
)
def test_layers_are_found_in_order_of_execution(
    name: str, config: dict[str, Any], example: tuple[Any, ...], lists: list[str]
) -> None:
    found = piper.tag_layers(model_of(name, config), *example)

    assert [path for stack in found.stacks for path in stack.paths] == [
        f"{one}.{k}" for one in lists for k in range(2)
    ]


def test_layers_of_a_vision_model_are_found() -> None:
    model = model_of("ViTForImageClassification", VISION)

    found = piper.tag_layers(model, IMAGE)

    (stack,) = found.stacks
    assert len(found) == 2 and stack.kind == "ViTLayer"
    assert stack.parameters + found.rest == sum(p.numel() for p in model.parameters())


def test_a_shared_layer_is_one_layer_for_each_call() -> None:
    model = model_of("AlbertForMaskedLM", {**TEXT, "embedding_size": 8})

    found = piper.tag_layers(model, TOKENS)

    assert len(found) == 2 and len(set(found.stacks[0].paths)) == 1


class Logits(nn.Module):
    """The scores of a model from Hugging Face, given by position."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *batch: Tensor) -> Tensor:
        return self.call(self.inner, *batch)


def loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())


def agrees(model: nn.Module, batch: tuple[Tensor, ...], strategy: piper.Strategy) -> Job:
    optimizer = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)  # noqa: E731
    job = Job(model, loss, strategy, Options(optimizer=optimizer, device="cpu"))
    example = Batch.of(batch)

    found = compare(job, example, *job.compile(example))

    assert found.agrees, (found.steps, found.wrong)
    assert found.dtype == "float64"
    return job


def tags_of(job: Job) -> list[int]:
    (captured,) = job.captures.values()
    return [dict(region.tags)["L"] for region in captured.model.regions]


@pytest.mark.soak
def test_an_unedited_encoder_and_decoder_train_as_plain_pytorch() -> None:
    torch.manual_seed(0)
    config = {**T5, "num_layers": 1, "num_decoder_layers": 1}
    inner = model_of("T5ForConditionalGeneration", config)
    model = Logits(inner, lambda m, x, y: m(input_ids=x, decoder_input_ids=y).logits)
    tokens = torch.randint(31, (4, 4))

    strategy = BUILDERS["1f1b"](pp=2, microbatches=2)
    job = agrees(model, (tokens, tokens.roll(1, 1), tokens.roll(2, 1)), strategy)

    assert tags_of(job) == [0, 1]


@pytest.mark.soak
def test_two_unedited_towers_train_as_plain_pytorch() -> None:
    torch.manual_seed(0)
    text = {**TEXT, "num_hidden_layers": 1, "eos_token_id": 30}
    vision = {**VISION, "num_hidden_layers": 1}
    inner = model_of("CLIPModel", {"text_config": text, "vision_config": vision})

    def pairs(model: nn.Module, tokens: Tensor, image: Tensor) -> Tensor:
        found = model(tokens, image)
        return found.text_embeds * found.image_embeds

    batch = torch.randint(2, 31, (4, 4)), torch.randn(4, 3, 8, 8), torch.randint(9, (4,))

    job = agrees(Logits(inner, pairs), batch, BUILDERS["1f1b"](pp=2, microbatches=2))

    assert tags_of(job) == [0, 1]


class Plain(nn.Module):
    """Blocks in a list; a norm between them and a head behind have no tag."""

    def __init__(self, annotated: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11)
        self.annotated = annotated

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for k, block in enumerate(self.blocks):
            if not self.annotated:
                x = x + block(x)
                continue
            with piper.annotate(self.annotated, k // 2):
                x = x + block(x)
            if k == 1:
                x = self.norm(x)
        return self.head(x if self.annotated else self.norm(x))


def plain_batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(0))
    return tokens, tokens.roll(1, 1)


@pytest.mark.soak
@drawn
def test_a_model_that_says_nothing_goes_through_every_builder() -> None:
    example = Batch.of(tuple(torch.cat([one, one]) for one in plain_batch()))
    whole = BUILDERS["1f1b"](pp=1, dp=2, microbatches=2)
    job = Job(Plain(), loss, whole, Options(device="cpu"))
    captured, _ = job.compile(example)
    assert [region.id for region in captured.model.regions] == ["all"], "one is enough for pp=1"

    for build in list(BUILDERS.values())[:: draws(4, 1)]:
        other = job.under(build(pp=2, microbatches=4))
        other.compile(example)
        assert all(len(one.model.regions) == 4 for one in other.captures.values())

    agrees(job.model, example.arguments, BUILDERS["zbv"](pp=2, microbatches=4))


@pytest.mark.soak
def test_what_lies_between_and_behind_stages_joins_its_neighbour() -> None:
    places = [piper.Place(piper.where(PP=k), [k]) for k in range(2)]

    job = agrees(Plain("PP"), plain_batch(), piper.Strategy([*places, piper.Split("MB", 2)]))

    (captured,) = job.captures.values()
    assert [region.id for region in captured.model.regions] == ["PP0", "PP1"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).tanh())


class Attributes(nn.Module):
    """Blocks without a list; the last one runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.second(self.first(x))))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Odd(nn.Module):
    """Nothing in it is like anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.norm(x))


@one_of(2)
@pytest.mark.parametrize(
    ("kind", "paths"), [(Attributes, ["first", "second", "second"]), (Mlp, ["first", "second"])]
)
def test_blocks_without_a_list_are_found_by_their_class(
    kind: type[nn.Module], paths: list[str]
) -> None:
    torch.manual_seed(5)
    found = piper.tag_layers(kind(), torch.ones(2, 6))

    assert [path for stack in found.stacks for path in stack.paths] == paths
    batch = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    job = Job(kind().double(), nn.MSELoss(), BUILDERS["1f1b"](pp=2, microbatches=2), CPU)
    assert compare(job, Batch.of(batch), *job.compile(Batch.of(batch)), steps=2).agrees
    assert tags_of(job) == list(range(len(paths)))


class Hourglass(nn.Module):
    """The block in the middle is in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.places = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))
        self.down, self.up = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.middle, self.merge = Block(), nn.ModuleList(nn.Linear(12, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = [x := self.stem(x) + self.places]
        for block in self.down:
            skips.append(x := block(x))
        x = self.middle(x)
        for merge, block in zip(self.merge, self.up, strict=True):
            x = block(merge(torch.cat([x, skips.pop()], -1)))
        return x


def test_a_block_between_lists_of_its_class_is_a_layer() -> None:
    found = piper.tag_layers(Hourglass(), torch.ones(2, 6))

    assert str(found) == (
        "found 5 layers\n"
        "  L=0 to 1: down.0 and down.1 (Block), 220 parameters\n"
        "  L=2: middle (Block), 110 parameters\n"
        "  L=3 to 4: up.0 and up.1 (Block), 220 parameters\n"
        "  outside, joining their neighbours: places, stem, merge, 204 parameters"
    )
    batch = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    job = Job(Hourglass().double(), nn.MSELoss(), BUILDERS["1f1b"](pp=2, microbatches=2), CPU)
    assert compare(job, Batch.of(batch), *job.compile(Batch.of(batch)), steps=2).agrees


class Timed(nn.Module):
    """A U-Net as most write it: blocks are attributes, and the time has a small list of its own."""

    def __init__(self, listed: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.time = nn.Sequential(listed(6, 6), nn.SiLU(), listed(6, 6))
        self.down, self.middle, self.up = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        time = self.time(x.mean(1))[:, None]
        down = self.down(x + time)
        return self.up(self.middle(down) + down)


class Small(nn.Module):
    """A block, and not a single product."""

    def __init__(self, width: int, other: int) -> None:
        super().__init__()
        self.scale = nn.LayerNorm(width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)


@pytest.mark.parametrize("listed", [nn.Linear, Small])
def test_blocks_are_layers_beside_a_small_list(listed: type[nn.Module]) -> None:
    found = piper.tag_layers(Timed(listed), torch.randn(2, 4, 6))

    assert [path for stack in found.stacks for path in stack.paths] == ["down", "middle", "up"]


def test_a_model_without_repeated_blocks_says_what_to_write() -> None:
    with pytest.raises(piper.errors.CaptureError) as error:
        piper.tag_layers(Odd(), torch.ones(2, 6))
    assert str(error.value) == (
        "tag_layers: no module of Odd is a list of blocks that run one by one\n"
        '  fix: write `with piper.annotate("L"):` around each layer, or piper.tag(model, ...)'
    )

    job = Job(Odd(), nn.MSELoss(), BUILDERS["1f1b"](pp=2, microbatches=2), CPU)
    with pytest.raises(piper.errors.DirectiveError, match="the model has 1 layer, too few"):
        job.compile(Batch.of((torch.ones(4, 6), torch.ones(4, 6))))


def test_a_model_that_is_annotated_or_does_not_run_is_refused() -> None:
    with pytest.raises(piper.errors.CaptureError, match="is annotated already, with PP"):
        piper.tag_layers(Plain("PP"), plain_batch()[0])
    with pytest.raises(piper.errors.CaptureError, match="pass what the model is called with"):
        piper.tag_layers(Plain())
