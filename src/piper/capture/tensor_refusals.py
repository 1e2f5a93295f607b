"""Errors about tensors that a graph may not read as constants, or that do not keep their shape."""

from torch import Tensor, fx

from piper.capture.fx_nodes import line
from piper.capture.python_state.code_search import line_that_changes
from piper.capture.python_state.reach import Reach
from piper.capture.refusals import refusal
from piper.errors import CaptureError


def foreign_tensor(node: fx.Node) -> CaptureError:
    return refusal(
        line(node),
        "the model uses a tensor that is not an argument, a parameter or a buffer of the model",
        "register it with register_buffer or as a parameter, or pass it as an argument",
    )


def registered_tensor(node: fx.Node, name: str) -> CaptureError:
    return refusal(
        line(node),
        f"the loss or the model reads {name} of the model by another path than the module that "
        "has it, and would always see its first values",
        "read it in the forward, as an attribute of its module, and return what the loss needs of "
        "it beside the output, one value for each row (`penalty.expand(len(x))`); for a penalty of "
        "all weights, give the optimizer weight_decay; what a backward of your own reads: give it "
        "to `apply` as an argument, and keep it with ctx.save_for_backward",
    )


def foreign_parameter(node: fx.Node) -> CaptureError:
    return refusal(
        line(node),
        "the loss or the model uses a parameter that is not one of the model, so nothing would "
        "train it",
        "if nothing shall train it, as a teacher, write teacher.requires_grad_(False); otherwise "
        "make it a parameter of the model: put a loss with its own parameters into the model, give "
        "the labels to the model, too, and return the loss (loss_fn=None)",
    )


def resized(name: str, reach: Reach, before: Tensor, after: Tensor) -> CaptureError:
    attribute = name.rpartition(".")[2]
    return refusal(
        line_that_changes(attribute, reach.codes),
        f"the forward gives the buffer {name} another shape, {list(after.shape)} instead of "
        f"{list(before.shape)}, and it would not fit where the Trainer keeps it",
        "let it have its largest shape from the start, and use a part of it "
        f"(self.{attribute}[:length]); or compute it in each forward, without keeping it",
    )


def written_by_memory(where: str) -> CaptureError:
    return refusal(
        where,
        "what as_strided returns is written to in place: gradients of that would be wrong",
        "write to slices of the tensor, or compute a new tensor",
    )


def mean_of_nothing(where: str) -> CaptureError:
    return refusal(
        where,
        "a mean in this region, or after it, is over no element for the rows of a microbatch",
        "use microbatches of more rows; or choose rows by a mask that comes with the batch, and "
        "divide by how many it has",
    )
