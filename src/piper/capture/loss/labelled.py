"""What torch's own losses do to rows."""

from piper.capture.fx_nodes import value
from piper.capture.loss.calls import Call, shape
from piper.capture.loss.domain import FIXED, MIXED, Known, Labels, Reduced, Rows
from piper.capture.loss.rules import MEANS, NONE, elementwise, reduced, rule


@rule(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div",
    "binary_cross_entropy_with_logits", "poisson_nll_loss", "soft_margin_loss",
    "hinge_embedding_loss", "margin_ranking_loss",
)  # fmt: skip
def elementwise_loss(call: Call) -> Known:
    return reduced(elementwise(call), call.given.get("reduction", MEANS))


@rule(
    "cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
    "pairwise_distance",
)  # fmt: skip
def rowwise_loss(call: Call) -> Known:
    kinds = {call.of(name) for name in call.given} - {FIXED}
    if kinds != {Rows(0)}:
        return MIXED
    default = NONE if call.name == "pairwise_distance" else MEANS
    return reduced(Rows(0), call.given.get("reduction", default))


@rule("piper.ctc")
def ctc(call: Call) -> Known:
    """The loss of each row. Targets one after the other are no rows: lengths say whose they are."""
    padded = len(shape(call.given["targets"])) == 2
    own = all(call.of(n) == Rows(0) for n in ("targets", "input_lengths", "target_lengths"))
    return call.checked(Rows(0)) if call.of("log_probs") == Rows(1) and padded and own else MIXED


@rule("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
def labelled_loss(call: Call) -> Known:
    labels, kind = call.given["target"], call.given.get("reduction", MEANS)
    output, target = call.of("self"), call.of("target")
    if call.of("weight") != FIXED or not isinstance(output, Rows) or output != target:
        return MIXED
    if output.dim != 0 or output.over is not None:
        return MIXED
    if kind != MEANS or value(labels).is_floating_point():
        return reduced(output, kind)
    if not call.is_own("target"):
        return MIXED
    weight = call.tensors.get("weight")
    return Reduced((Labels(labels, call.given.get("ignore_index", -100), weight),))
