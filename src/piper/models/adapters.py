"""LoRA adapters of peft around a model that has no memory for its weights."""

from __future__ import annotations

import copy
import hashlib
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piper.errors import InputError
from piper.models.hugging_face_build import parameters_on_meta
from piper.models.transformers_private import with_children

NAME = "default"  # of the one adapter
CONFIG = "adapter_config.json"
# Options whose other values change more than what is added to a layer.
USUAL = {"bias": "none", "target_parameters": None, "layer_replication": None}
Fill = Callable[[str, Tensor], None]


def adapter_config(given: Any) -> tuple[Any, Path | None]:
    """A configuration of peft, and the folder of trained adapters, if there is one."""
    peft = library()
    folder = Path(given) if isinstance(given, str | Path) else None
    if folder is not None and not (folder / CONFIG).is_file():
        raise _refused(f"{folder} is not a folder with an {CONFIG}", "give one that peft wrote")
    config = peft.PeftConfig.from_pretrained(str(folder)) if folder else given
    if not isinstance(config, peft.LoraConfig):
        raise _refused(f"it is a {type(config).__name__}", "give a peft.LoraConfig(...)")
    if config.init_lora_weights not in (True, False, "gaussian"):
        what = f"init_lora_weights={config.init_lora_weights!r} needs the weights of the model"
        raise _refused(what, "write init_lora_weights=True, or build the model with peft")
    for option, usual in USUAL.items():
        if getattr(config, option, usual) not in (usual, None, False):
            what = f"{option}={getattr(config, option)!r} is not supported"
            raise _refused(what, f"leave out {option}, or build the model with peft")
    return config, folder


def with_adapters(model: nn.Module, config: Any) -> nn.Module:
    """The model of peft. What it adds has no memory either."""
    given = copy.copy(config)
    given.inference_mode = False
    with parameters_on_meta():
        found = library().get_peft_model(model, given)
    if any(getattr(one, "lora_variant", None) for one in found.modules()):
        what = "DoRA and other variants of LoRA start from the weights of the model"
        raise _refused(what, "use plain LoRA, or build the model with peft, and give it to Trainer")
    for name, one in found.named_parameters():
        if one.requires_grad and not is_adapter(name) or ".parametrizations." in name:
            what = f"it trains {name}, which is not a part of an adapter"
            raise _refused(what, 'write bias="none" and target_modules=[...]')
    return found


def adapter_values(model: nn.Module, start: Any, base: Fill, seed: int = 0) -> Fill:
    """Fills adapters as peft initialises them, the same in every process, and others by `base`."""
    known = weakref.ref(model)

    def fill(name: str, tensor: Tensor) -> None:
        model = known()
        assert model is not None, "the Trainer keeps it"
        if "lora_" not in name:
            base(name.removeprefix("base_model.model."), tensor)
            return
        path = layer_of(model, name)
        digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            layer = started(model.get_submodule(path), start)
        tensor.copy_(dict(layer.named_parameters())[name[len(path) + 1 :]])

    return fill


def layer_of(model: nn.Module, name: str) -> str:
    """The path of the layer with adapters that has a parameter."""
    path = name
    while not hasattr(model.get_submodule(path.rpartition(".")[0]), "reset_lora_parameters"):
        path = path.rpartition(".")[0]
    return path.rpartition(".")[0]


def started(layer: nn.Module, start: Any) -> nn.Module:
    """A copy of a layer whose adapters have memory and their first values."""
    fresh = {
        name: copy.deepcopy(one).to_empty(device="cpu")
        for name, one in layer.named_children()
        if name.startswith("lora_")
    }
    for one in (inner for outer in fresh.values() for inner in outer.modules()):
        if isinstance(one, nn.Linear):
            one.reset_parameters()
    for one in (p for outer in fresh.values() for p in outer.parameters(recurse=False)):
        nn.init.normal_(one)  # an embedding's
    real: Any = with_children(layer, fresh)
    real.reset_lora_parameters(NAME, start)
    return real


def is_adapter(name: str) -> bool:
    """Whether a parameter is trained, and saved with the adapters."""
    return "lora_" in name or ".modules_to_save." in name


def is_pretrained(name: str) -> bool:
    """Whether a parameter begins with a value of the pretrained model."""
    return "lora_" not in name


def pretrained_name(name: str, tied: Mapping[str, str] | None = None) -> str:
    """The name of a parameter without adapters.

    A layer in `modules_to_save` has a copy of what was `tied`, which files have under one name.

    >>> pretrained_name("base_model.model.layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    >>> pretrained_name("base_model.model.head.modules_to_save.default.weight")
    'head.weight'
    """
    bare = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    bare = bare.replace(f".modules_to_save.{NAME}.", ".").replace(".original_module.", ".")
    return (tied or {}).get(bare, bare) if ".modules_to_save." in name else bare


def saved_name(name: str) -> str:
    """The name of an adapter in files of peft.

    >>> saved_name("base_model.model.layers.0.q_proj.lora_A.default.weight")
    'base_model.model.layers.0.q_proj.lora_A.weight'
    """
    name = name.replace(f".modules_to_save.{NAME}.", ".")
    return re.sub(rf"(\.lora_\w+)\.{NAME}\b", r"\1", name)


def save_config(config: Any, base: Path | None, folder: str | Path) -> None:
    """For peft's own `from_pretrained`."""
    written = copy.copy(config)
    written.inference_mode = True
    if base is not None:
        written.base_model_name_or_path = str(base)
    written.save_pretrained(str(folder))


def library() -> Any:
    """peft, which is optional."""
    try:
        import peft
    except ImportError:
        raise _refused("it needs peft", "pip install peft") from None
    return peft


def _refused(what: str, fix: str) -> InputError:
    return InputError.of("adapter", what, fix)
