"""An argument that torch loses on its way to a mode, as a trace opens several."""

from collections.abc import Callable
from typing import Any

from torch.nn import functional


def keep_weights() -> None:
    """`l1_loss(..., weight=w)` leaves out `w` when it calls a mode: the loss would have no weights.

    For good, and not only in traces: modes are opened in many places, and without one, torch does
    not come here.
    """
    module: Any = functional
    if not getattr(module.handle_torch_function, "keeps_weights", False):
        module.handle_torch_function = _with_weights(module.handle_torch_function)


def _with_weights(call: Callable[..., Any]) -> Callable[..., Any]:
    def handle_torch_function(function: Any, relevant: Any, *args: Any, **kwargs: Any) -> Any:
        if function is functional.l1_loss:
            kwargs.setdefault("weight", relevant[2])
        return call(function, relevant, *args, **kwargs)

    handle_torch_function.keeps_weights = True  # type: ignore[attr-defined]
    return handle_torch_function
