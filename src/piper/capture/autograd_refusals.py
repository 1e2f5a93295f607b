"""Errors about what a model does to autograd, or between torch and its kernels, while it runs."""

from piper.capture.refusals import refusal
from piper.errors import CaptureError


def hidden_write(where: str) -> CaptureError:
    return refusal(
        where or "model",
        "it writes in place to a tensor that has a gradient, where autograd does not see it (under "
        "no_grad, or by .data or detach()): gradients pass by what is written, which a captured "
        "step would not repeat",
        "write `x = x + (new - x).detach()` to let gradients pass by; write in place outside of "
        "no_grad if they should follow; use a .clone() of what is detached if x keeps its value",
    )


def assigned_data(where: str) -> CaptureError:
    return refusal(
        where or "model",
        "it assigns to .data of a tensor, which a captured step would not repeat",
        "compute with a new tensor, as in `F.linear(x, self.weight.sign())`, or with "
        "`x + (new - x).detach()` to let gradients pass by; change weights between steps",
    )


def inference_mode(where: str) -> CaptureError:
    return refusal(where, "inference_mode is not supported", "use torch.no_grad()")


def saved_tensors(where: str) -> CaptureError:
    return refusal(
        where,
        "saved_tensors_hooks change what a backward reads, which a captured step would not repeat",
        "compute with what it should read, in an autograd.Function of your own; to save memory, "
        "use Remat or Offload in the strategy",
    )


def dispatch_mode(where: str, name: str) -> CaptureError:
    return refusal(
        where,
        f"the forward enters {name}, a TorchDispatchMode: a trace would not see what it changes",
        "change results in the forward itself, or in a TorchFunctionMode",
    )


def changed_requires_grad(where: str) -> CaptureError:
    return refusal(
        where,
        "the forward changes requires_grad of a parameter, which a captured step would not repeat",
        "call the module with detached parameters, as in `torch.func.functional_call(module, "
        "{name: p.detach() for name, p in module.named_parameters()}, x)`; or freeze it before the "
        "Trainer is made",
    )


def tensor_subclass(where: str) -> CaptureError:
    return refusal(
        where,
        "a tensor of a class of its own is made in the forward, which is not supported",
        "compute with plain tensors: leave out `as_subclass`, and call functions for what it does",
    )


def with_in_script(where: str, name: str) -> CaptureError:
    return refusal(
        where,
        f"{name}, a function of torch.jit.script, has a `with` statement, which a trace cannot see",
        "remove @torch.jit.script; or write .detach() where no_grad() leaves gradients out",
    )
