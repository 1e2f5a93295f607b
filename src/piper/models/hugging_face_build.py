"""Build a Hugging Face model without memory for its weights, and know how they start."""

from __future__ import annotations

import hashlib
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from piper.errors import InputError, did_you_mean, nearest
from piper.models.transformers_private import (
    initialise,
    initialiser,
    real_parameters,
    usual_model_class,
)
from piper.names import with_article

LOG = logging.getLogger("piper")
LOCK = threading.Lock()  # devices may be threads, which share a model
LARGEST = 2**33  # bytes of a model that is made for a few of its parameters


def config_of(given: Any) -> tuple[Any, Path | None]:
    """A configuration, and the folder of the weights, if there is one."""
    transformers = library()
    if isinstance(given, str | Path):
        folder = Path(given)
        if not (folder / "config.json").is_file():
            what = f"{folder} is not a folder with a config.json"
            fix = "give a folder that save_pretrained wrote, or download one: hf download NAME"
            raise _refused(what, f"{fix} --local-dir FOLDER")
        return transformers.AutoConfig.from_pretrained(folder), folder
    if isinstance(given, transformers.PretrainedConfig):
        return given, None
    what = f"it is given {with_article(type(given).__name__)}"
    fix = "give a folder, or a configuration such as transformers.LlamaConfig(...)"
    if isinstance(given, nn.Module):
        fix += "; a model that is there trains by piper.Trainer(model, None, strategy, example=...)"
    raise _refused(what, fix)


def model_class(config: Any, name: str | None = None) -> type[nn.Module]:
    """The class that the configuration names, or a language model: that of an encoder and a decoder
    if it has both, or else a causal one."""
    transformers = library()
    named = name or next(iter(config.architectures or ()), None)
    if named is not None and not isinstance(named, str):
        shown = getattr(named, "__name__", "LlamaForCausalLM")
        what = f"model_class={named!r} is not the name of a class"
        raise _refused(what, f'write model_class="{shown}"')
    if named is not None:
        found = getattr(transformers, named, None)
        if found is None:
            what = f"transformers has no model {named}"
            near = did_you_mean(nearest(named, dir(transformers)))
            raise _refused(what, f'write model_class="..." with one of its classes{near}')
        return found
    usual = usual_model_class(transformers, config)
    if usual is None:
        kind = type(config).__name__.removesuffix("Config")
        some = [one for one in dir(transformers) if one.startswith(f"{kind}For")]
        what = f"{type(config).__name__} does not say which model to build"
        said = f"; there are {', '.join(some)}" if some[1:] else ""
        example = next(iter(some), "ViTForImageClassification")
        raise _refused(what, f'write model_class="{example}" or the like{said}')
    LOG.info("building %s; model_class= chooses another", usual.__name__)
    return usual


def build_on_meta(make: type[nn.Module], config: Any) -> nn.Module:
    """The model with parameters on `meta`. Buffers have their values, such as rotary tables."""
    with parameters_on_meta():
        return make(config)


def first_values(model: nn.Module, seed: int = 0) -> Callable[[str, Tensor], None]:
    """Fills a parameter as transformers initialises it, the same in every process.

    The seeds are those of modules, so the order does not matter. A weak reference: processes
    compare what options hold, and models of transformers hold hashes that differ between processes.
    """
    known, made = weakref.ref(model), Constructed(seed)

    def fill(name: str, tensor: Tensor) -> None:
        model = known()
        assert model is not None, "the Trainer keeps it"
        path, _, leaf = name.rpartition(".")
        with LOCK, torch.no_grad(), torch.random.fork_rng(devices=[]):
            with real_parameters(module := model.get_submodule(path)) as parameters:
                torch.manual_seed(number_of(seed, path))
                if callable(getattr(module, "reset_parameters", None)):
                    module.reset_parameters()
                for above in modules_above(path):
                    if above != path:
                        torch.manual_seed(number_of(seed, above, path))
                    initialise(initialiser(model, above), model.get_submodule(above))
            found = parameters[leaf]
            if found.is_floating_point() and found.isnan().any():  # nobody has filled it
                found = made.parameter(model, name)
            tensor.copy_(found)

    return fill


class Constructed:
    """A model as transformers itself makes it, for what only constructors of modules fill."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.model: nn.Module | None = None

    def parameter(self, like: nn.Module, name: str) -> Tensor:
        if self.model is None:
            size = sum(one.nbytes for one in like.parameters())
            if size > LARGEST:
                what = f"transformers fills {name} while it makes the model, which is large"
                raise _refused(what, "give a folder that the model's save_pretrained wrote")
            torch.manual_seed(number_of(self.seed, "constructed"))
            self.model = type(like)(like.config)
        return self.model.get_parameter(name)


def number_of(*what: object) -> int:
    text = ":".join(map(str, what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def modules_above(path: str) -> Iterator[str]:
    """A module, and those around it, from the innermost: they may initialise it once more, as
    attention does with its projections.

    >>> list(modules_above("layers.0")), list(modules_above(""))
    (['layers.0', 'layers', ''], [''])
    """
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def zeros(name: str, tensor: Tensor) -> None:
    """For parameters that are read from files before the first step."""
    tensor.zero_()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """New parameters lose their memory at once, and nothing fills them before."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, one: nn.Parameter | None) -> None:
        if one is not None and not one.is_meta:
            one = nn.Parameter(one.detach().to("meta"), requires_grad=one.requires_grad)
        register(module, name, one)

    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "register_parameter", on_meta))
        for name, function in vars(nn.init).items():
            if name.endswith("_") and not name.startswith("_") and inspect.isfunction(function):
                stack.enter_context(patch.object(nn.init, name, _unchanged))
        yield


def _unchanged(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


def library() -> Any:
    """transformers, an optional extra."""
    try:
        import transformers
    except ImportError:
        fix = "pip install 'transformers>=5'"
        raise _refused("it needs transformers 5 or later", fix) from None
    return transformers


def _refused(what: str, fix: str) -> InputError:
    return InputError.of("from_pretrained", what, fix)
