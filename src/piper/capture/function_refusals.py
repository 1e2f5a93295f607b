"""Refusals of autograd.Functions, of the user's own backwards, and of errors that are caught."""

from piper.capture.refusals import refusal
from piper.capture.source_lines import current_line, line_of
from piper.errors import CaptureError


def custom_function(name: str, part: str, error: Exception) -> CaptureError:
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return refusal(
        line_of(error.__traceback__),
        f"the {part} of {name} cannot be traced ({reason})",
        "write it with operators of torch, or make it an operator with torch.library.custom_op "
        "and register_autograd",
    )


def function_of_modules(name: str, part: str, error: Exception) -> CaptureError:
    return refusal(
        line_of(error.__traceback__),
        f"the {part} of {name} computes with tensors that are not among its arguments, such as the "
        "parameters of a module that it was given: a trace sees the derivatives of arguments only",
        "if it only saves memory, as a checkpoint or a reversible layer does, call the module "
        "itself and give the strategy remat=True; otherwise give such tensors to `apply`",
    )


def function_in_place(name: str) -> CaptureError:
    return refusal(
        current_line(),
        f"{name} is an autograd.Function that writes to its arguments, which a trace would miss",
        "return new tensors instead",
    )


def written_in_backward(name: str) -> CaptureError:
    return refusal(
        current_line(),
        f"the backward of {name} writes to a tensor that it has not made, which a captured step "
        "would not repeat",
        "compute with new tensors; update buffers in the forward",
    )


def changed_in_backward(where: str, path: str) -> CaptureError:
    return refusal(
        where,
        f"a backward of your own changes {path}, which a captured step would not repeat",
        "change it in your training loop: Piper reads it in each step; or compute it in the "
        "forward and keep it in a buffer",
    )


def caught_error(where: str, name: str) -> CaptureError:
    return refusal(
        where,
        f"it catches an error of {name}, which only values decide: a captured step always goes on "
        "as if there was none",
        "decide by values: `factor, info = torch.linalg.cholesky_ex(k)` and "
        "`torch.where(info == 0, ...)`; clamp indices",
    )
