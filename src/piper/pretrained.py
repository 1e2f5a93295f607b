"""`from_pretrained`: train a Hugging Face model under a strategy."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from piper.capture import tag_unannotated
from piper.directives import Strategy
from piper.errors import InputError
from piper.job.arguments import names_options
from piper.job.batch.batch_arguments import example_of
from piper.job.batch.failed_calls import failures_explained
from piper.job.inspecting import is_inspecting
from piper.job.loop.forward_prints import prints_shown_once
from piper.job.options import Loss
from piper.job.trainer_options import TrainerOptions
from piper.models.adapters import (
    adapter_config,
    adapter_values,
    is_adapter,
    is_pretrained,
    pretrained_name,
    save_config,
    saved_name,
    with_adapters,
)
from piper.models.hugging_face import adapt_experts, has_experts
from piper.models.hugging_face_build import (
    build_on_meta,
    config_of,
    first_values,
    model_class,
    zeros,
)
from piper.models.weight_boxes import Boxed
from piper.models.weight_conversion import Conversion
from piper.runtime.checkpoint.checkpoints import path_of
from piper.runtime.checkpoint.layout import Arrange, Layout, Segment, Shapes, Stored, Written
from piper.runtime.checkpoint.load import layout_at, misfit, misfits
from piper.runtime.checkpoint.model_names import ModelTensor, Names, model_tensors
from piper.runtime.checkpoint.weights import Rename
from piper.trainer import Trainer

LOG = logging.getLogger("piper")
MAX_FILE_GIB = 5.0
TEXTS = (  # what lies beside the weights, and training does not change
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "*.model", "chat_template*", "generation_config.json", "*processor_config.json",
)  # fmt: skip


class PretrainedTrainer(Trainer):
    """A Trainer of a Hugging Face model, which it writes back with `save_pretrained`."""

    config: Any
    folder: Path | None = None
    adapter: Any = None  # its configuration
    conversion: Conversion
    layout: Layout  # of the tensors in the folder

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights, configuration and tokenizer for transformers' own `from_pretrained`.

        With adapters, only these are written, for peft's own `from_pretrained`. Every process calls
        it, and writes the weights that it holds. Weights that are in the folder stay until the new
        ones are complete, which then replace them.
        """
        if self.adapter is None:
            self._write(folder)
            if self.folder is not None and Path(folder).resolve() == self.folder.resolve():
                self.layout = layout_in(self.folder, self.conversion)
        else:
            self.export(folder, only=is_adapter, rename=saved_name, file="adapter_model")
        if self.rank == 0:
            if self.adapter is None:
                self.config.save_pretrained(folder)
            else:
                save_config(self.adapter, self.folder, folder)
            for file in texts_in(self.folder):
                if file.resolve() != (Path(folder) / file.name).resolve():
                    shutil.copy(file, Path(folder) / file.name)

    def load(
        self, path: str | Path, *, rename: Rename | None = None, strict: bool = True,
        only: Names | None = None,
    ) -> None:  # fmt: skip
        """As that of `Trainer`. Files may also have the tensors and names that the hub has."""
        self._enter("load")
        model = self._job.model
        given = self._run, self._programs.state, model_tensors(model, only), model
        arrange = self._arrange(path_of(path), rename is not None)
        self._checkpoints.load(path, *given, rename, strict, arrange)

    def _arrange(self, path: Path, renamed: bool) -> Arrange | None:
        if path == self.folder:
            return lambda _: self.layout
        own = renamed or self.adapter is not None  # adapters have names of their own
        return None if own else partial(as_the_hub, self.conversion)

    def _write(self, folder: str | Path) -> None:
        """As transformers writes the model."""
        self._enter("save_pretrained")
        tensors, state = model_tensors(self._job.model), self._programs.state
        given = state, self._programs.turns, tensors, self._job.initial, MAX_FILE_GIB, str, "model"
        written = as_transformers(self.conversion, tensors)
        self._checkpoints.export(folder, *given, written, "save_pretrained")


@names_options
def from_pretrained(
    folder_or_config: Any,
    strategy: Strategy | Sequence[Any] | None = None,
    *,
    example: Any,
    model_class: str | None = None,
    dtype: torch.dtype | None = None,
    adapter: Any = None,
    loss_fn: Loss | None = None,
    **options: Unpack[TrainerOptions],
) -> PretrainedTrainer:
    """A Trainer for a Hugging Face model: from a folder with its weights, or a configuration.

    The model is built without memory for weights, its layers are found, and every process reads
    only the weights that it holds. Its own loss is used, unless you give `loss_fn`. A configuration
    gives random weights. `model_class` names the class if the configuration does not; `dtype` is
    that of the weights, by default float32. With `adapter`, a `peft.LoraConfig` or a folder with
    trained adapters, only adapters are trained and saved. Other options are those of `Trainer`.

        trainer = piper.from_pretrained("llama", strategy, example=batch)
        for batch in loader:
            trainer.step(batch)
        trainer.save_pretrained("tuned")
    """
    refuse_wrong_type(dtype)
    given, folder = config_of(folder_or_config)
    config = copy.deepcopy(given)
    chosen, trained = adapter_config(adapter) if adapter is not None else (None, None)
    model = built(config, model_class, dtype)
    seed = options.get("seed", 0)
    unread = folder is None or is_inspecting()
    init = first_values(model, seed) if unread else zeros
    tied = tied_names(model)
    conversion = Conversion(model)
    layout = {} if folder is None or unread else layout_in(folder, conversion)
    if chosen is not None:
        model, base = with_adapters(model, chosen).train(), init
        init = adapter_values(model, chosen.init_lora_weights, base, seed)
    options.setdefault("init", init)
    batch = example_of(model, loss_fn, example)
    with prints_shown_once(), failures_explained(model, loss_fn, batch):
        tag_unannotated(model, batch.arguments if loss_fn is None else batch.arguments[:-1])
    trainer = PretrainedTrainer(model, loss_fn, strategy, example=example, **options)
    trainer.config, trainer.folder, trainer.adapter = as_given(config, given), folder, chosen
    trainer.conversion, trainer.layout = conversion, layout
    read(trainer, trained, tied)
    return trainer


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """The first name of a parameter, for each of its others."""
    return {other: one.name for one in model_tensors(model) for other in one.names[1:]}


def read(trainer: PretrainedTrainer, adapters: Path | None, tied: Mapping[str, str]) -> None:
    """The weights of the model, and those of adapters that were trained before."""
    if trainer.folder is not None and trainer.adapter is None:
        trainer.load(trainer.folder)
    elif trainer.folder is not None:
        rename = partial(pretrained_name, tied=tied)
        trainer.load(trainer.folder, only=is_pretrained, rename=rename)
    if adapters is not None:
        trainer.load(adapters, only=is_adapter, rename=saved_name)


def layout_in(folder: Path, conversion: Conversion) -> Layout:
    """Where the tensors of the model lie. What does not fit is refused before the capture."""
    tensors = model_tensors(conversion.model)
    layout = layout_at(folder, partial(as_the_hub, conversion))
    if notes := misfits(folder, layout, tensors, None):
        name = type(conversion.model).__name__
        fix = f"give a folder with all weights of {name}, and no others; or load the model with "
        fix += "transformers, and give it to piper.Trainer(model, None, strategy, example=batch)"
        raise misfit(folder, notes, fix)
    return layout


def as_the_hub(conversion: Conversion, shapes: Shapes) -> Layout:
    """Tensors of the model, put together of those in files."""
    return {name: stored(one) for name, one in conversion.read(shapes).items()}


def stored(tensor: Boxed) -> Stored:
    return Stored(tensor.shape, tuple(Segment(*run) for run in tensor.runs()))


def as_transformers(conversion: Conversion, tensors: Sequence[ModelTensor]) -> Written | None:
    """The files that transformers would write; None: those with the names of the model."""
    own = {one.name: one.shape for one in tensors}
    try:
        shapes, found = conversion.written(own)
    except InputError as error:
        LOG.info("weights are written under the names of the model: %s", error)
        return None
    written = Written(shapes, {name: stored(one) for name, one in found.items()})
    return written if written.is_complete(own) else None


def built(config: Any, name: str | None, dtype: torch.dtype | None) -> torch.nn.Module:
    """On meta, in training mode, with experts that can be divided."""
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache is for generation
    model = build_on_meta(model_class(config, name), config)
    if dtype is not None:
        model.to(dtype)
    if has_experts(model):
        try:
            adapt_experts(model)
        except InputError as error:
            LOG.info("experts stay as transformers has them, and cannot be divided: %s", error)
    return model.train()


def refuse_wrong_type(dtype: Any) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        fix = 'write dtype=torch.bfloat16, for weights in it, or precision="bf16" to compute in it'
        raise InputError.of("dtype", f"{dtype!r} is not a type of torch", fix)


def as_given(used: Any, given: Any) -> Any:
    """The configuration to save. Others may generate with it, so it keeps its cache."""
    found = copy.deepcopy(used)
    if hasattr(given, "use_cache"):
        found.use_cache = given.use_cache
    return found


def texts_in(folder: Path | None) -> list[Path]:
    """Of the tokenizer or processor, and how to generate."""
    found = () if folder is None else (file for one in TEXTS for file in folder.glob(one))
    return list(dict.fromkeys(file for file in found if file.is_file()))
