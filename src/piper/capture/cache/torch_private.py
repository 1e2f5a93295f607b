"""Private APIs of PyTorch that the cache uses. The same in 2.11 and 2.13."""

import re
from typing import Any

import torch
from torch import Tensor, library
from torch._functorch import config as aot_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import _config as fx_config
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def intercepts_operators() -> bool:
    """Whether the user's code may take part in any call of an operator."""
    modes = (*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack())
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    names = {name.split("/")[1] for name in library._impls if _is_kernel_of_torchs(name)}
    dumps = "".join(torch._C._dispatch_dump(f"aten::{name}") for name in names)
    files = re.findall(r"registered at (.*?):[0-9]", dumps)
    return bool(modes or hooks) or not all(map(_is_torchs_file, files))


def _is_kernel_of_torchs(name: str) -> bool:
    """Of an operator of torch, made in Python, which does more than say what its results are."""
    return name.startswith("aten/") and not name.endswith("/Meta")


def _is_torchs_file(name: str) -> bool:
    return name.endswith((".cpp", ".h", ".cu", ".mm")) or name.startswith(torch.__path__[0])


def private_settings() -> tuple[Any, ...]:
    """Settings that change how torch traces, without a public way to ask for them."""
    order = torch._C._get_sdp_priority_order()
    return order, torch._C._get_mkldnn_enabled(), aot_config.get_hash(), fx_config.get_hash()


def fake_like(mode: FakeTensorMode, meta: Tensor, device: str) -> Tensor:
    """A fake tensor with the layout and memory of one on the meta device. Much cheaper than ops."""
    kind = torch.device(device)
    index = torch.cuda.current_device() if kind.type == "cuda" else kind.index
    return FakeTensor(mode, meta, torch.device(kind.type, index))
