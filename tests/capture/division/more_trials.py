"""Trials of operators that work along some dimensions, of convolutions, losses and lookups."""

from __future__ import annotations

import torch
from capture.division.draws import buffer, flags, index, signed, trial, x

aten = torch.ops.aten
UNARY = [
    aten.acosh.default, aten.asinh.default, aten.atan.default, aten.bitwise_not.default,
    aten.ceil.default, aten.celu.default, aten.cosh.default, aten.digamma.default,
    aten.erfc.default, aten.exp2.default, aten.expm1.default, aten.floor.default,
    aten.frac.default, aten.hardshrink.default, aten.hardsigmoid.default, aten.hardswish.default,
    aten.isfinite.default, aten.lgamma.default, aten.log10.default, aten.log2.default,
    aten.log_sigmoid.default, aten.nan_to_num.default, aten.relu6.default, aten.round.default,
    aten.selu.default, aten.sgn.default, aten.sinc.default, aten.sinh.default,
    aten.softshrink.default, aten.special_expit.default, aten.trunc.default,
]  # fmt: skip
BENT = [
    aten.celu.default, aten.hardshrink.default, aten.hardswish.default, aten.log_sigmoid.default,
    aten.selu.default, aten.softshrink.default,
]  # fmt: skip
BELOW_ONE = [
    aten.acos.default, aten.asin.default, aten.atanh.default, aten.erfinv.default,
    aten.logit.default, aten.tan.default,
]  # fmt: skip
BINARY = [
    aten.atan2.default, aten.fmax.default, aten.fmin.default, aten.fmod.Tensor,
    aten.hypot.default, aten.logaddexp.default,
    aten.max.other, aten.min.other, aten.remainder.Tensor, aten.xlogy.Tensor,
]  # fmt: skip
LOGICAL = [
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor,
    aten.logical_xor.default, aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor,
]  # fmt: skip
ELEMENTS = [
    *(trial(target, x(12, 5) + 1.2) for target in UNARY if target != aten.bitwise_not.default),
    *(trial(target, signed(12, 5)) for target in BENT),
    *(trial(target, x(12, 5) / 2) for target in BELOW_ONE),
    *(trial(target, x(12, 5), x(5)) for target in BINARY),
    *(trial(target, flags(12, 5), flags(12, 1)) for target in LOGICAL),
    trial(aten.bitwise_not.default, flags(12, 5)),
    trial(aten.floor_divide.default, index(9, 12, 5), index(9, 5) + 1),
    trial(aten.heaviside.default, index(3, 12, 5) - 1, index(9, 5)),
    trial(aten.addcmul.default, x(12, 5), x(5), x(12, 1), value=0.5),
    trial(aten.addcdiv.default, x(12, 5), x(12, 5), x(5), value=2),
    trial(aten.full_like.default, x(12, 5), 3.0),
    trial(aten.lerp.Scalar, x(12, 5), x(12, 5), 0.3),
    trial(aten.lerp.Tensor, x(12, 5), x(5), x(12, 1)),
    trial(aten.threshold.default, x(12, 5), 0.5, 0.0),
    trial(aten.prelu.default, signed(5, 12, 12), x(12), blocks=(1, 2)),
    trial(aten.prelu.default, signed(12, 5), x(1)),
    trial(aten.one_hot.default, index(7, 12, 12), 7),
]
REDUCTIONS = [
    trial(aten.all.dim, flags(12, 5, 12), 1),
    trial(aten.any.dim, flags(12, 5, 12), -2, True),
    trial(aten.argmax.default, x(12, 5, 12), 1),
    trial(aten.argmin.default, x(12, 5, 12), 1, True),
    trial(aten.aminmax.default, x(12, 5), dim=1),
    trial(aten.linalg_vector_norm.default, x(12, 5, 12), 2, [1]),
    trial(aten.linalg_vector_norm.default, x(12, 5, 12), 1, [-2], True, blocks=(1, 2)),
    trial(aten.linalg_vector_norm.default, x(12, 5), 2),
    trial(aten.nansum.default, x(12, 5, 12), [0]),
    trial(aten.prod.dim_int, x(12, 5, 12), 1),
    trial(aten.std.correction, x(12, 5, 12), [1]),
    trial(aten.std_mean.correction, x(12, 5, 12), [1], correction=0),
    trial(aten.var_mean.correction, x(12, 5, 12), [-1], keepdim=True),
    trial(aten.max.dim, x(12, 5, 12), 1),
    trial(aten.min.dim, x(12, 5, 24), -2, True, blocks=(1, 2)),
    trial(aten.max.default, x(12, 5)),
    trial(aten.cosine_similarity.default, x(12, 5, 12), x(12, 5, 12)),
    trial(aten.cosine_similarity.default, x(12, 1, 5), x(1, 12, 5), -1),
    trial(aten.pairwise_distance.default, x(12, 5), x(12, 5)),
    *(
        trial(target, x(12, 5) / 2, x(12, 5) / 2, reduction)
        for target in (
            aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default,
            aten.huber_loss.default, aten.kl_div.default,
        )
        for reduction in (0, 1, 2)
    ),
    *(
        trial(target, x(12, 5) / 2, x(12, 5) / 2, reduction=reduction)
        for target in (
            aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
        )
        for reduction in (0, 1, 2)
    ),
]  # fmt: skip
ROWS = [
    trial(aten.cumprod.default, x(12, 5, 12), 1),
    trial(aten.logcumsumexp.default, x(12, 5, 12), -2),
    trial(aten.argsort.default, x(12, 5)),
    trial(aten.sort.default, x(12, 5, 12), 1, True),
    trial(aten.topk.default, x(12, 24, 5), 2, blocks=(1, 2)),
    trial(aten.cummax.default, x(12, 5, 12), 1),
    trial(aten.cummin.default, x(12, 5, 12), 1),
    trial(aten.cumsum.default, x(12, 5, 12), 1),
    trial(aten.flip.default, x(12, 5, 12), [1]),
    trial(aten.roll.default, x(12, 5, 12), [2], [1]),
    trial(aten.roll.default, x(12, 5), [2]),
    trial(aten.diff.default, x(12, 5)),
    trial(aten.tril.default, x(12, 5, 5)),
    trial(aten.triu.default, x(12, 5, 5), 1),
    trial(aten.pad.default, x(12, 5, 12), [0, 0, 1, 2]),
    trial(aten.pad.default, x(12, 5, 12), [0, 0, 1, 2], "constant", 3.0),
    *(
        trial(aten.pad.default, x(*shape), around, mode)
        for mode in ("reflect", "replicate", "circular")
        for shape, around in (
            ((12, 12, 5), [2, 1]),
            ((12, 12), [2, 1]),
            ((12, 12, 12), [0, 0, 2, 0]),
            ((12, 12, 12, 5), [1, 1, 0, 2]),
            ((12, 12, 12), [1, 0, 0, 0]),
        )
    ),
    *(
        trial(aten.div.Tensor_mode, signed(12, 5), by, rounding_mode=mode)
        for by in (0.1, x(5))
        for mode in ("floor", "trunc", None)
    ),
    trial(aten.constant_pad_nd.default, x(12, 12), [0, 0, 1, 0]),
    trial(aten.repeat.default, x(12, 5), [2, 1, 3]),
    trial(aten.tile.default, x(12, 5, 12), [2, 1]),
    trial(aten.repeat_interleave.self_int, x(12, 24, 5), 3, 1, blocks=(1, 2)),
    trial(aten.repeat_interleave.self_int, x(12, 5), 2),
    trial(aten.unfold.default, x(12, 5, 12), 1, 3, 1),
    trial(aten.diagonal.default, x(12, 5, 12, 5), 1, 1, 3),
    trial(aten.max_pool1d.default, x(12, 12, 5), 2),
    trial(aten.max_pool2d.default, x(12, 12, 4, 4), [2]),
    trial(aten.max_pool3d.default, x(12, 12, 2, 2, 2), [2]),
    trial(aten.avg_pool1d.default, x(12, 12, 5), 2),
    trial(aten.avg_pool2d.default, x(2, 24, 4, 4), [2], blocks=(1, 2)),
    trial(aten.avg_pool3d.default, x(12, 12, 2, 2, 2), [2]),
    trial(aten.adaptive_avg_pool1d.default, x(12, 12, 5), [2]),
    trial(aten.adaptive_avg_pool2d.default, x(12, 12, 4, 4), [1, 1]),
    trial(aten.adaptive_avg_pool3d.default, x(12, 12, 2, 2, 2), [1, 1, 1]),
    trial(aten.upsample_nearest1d.vec, x(12, 12, 3), None, [2.0]),
    trial(aten.upsample_nearest2d.vec, x(12, 12, 3, 3), None, [2.0, 2.0]),
    trial(aten.upsample_nearest3d.vec, x(12, 12, 2, 2, 2), None, [2.0, 2.0, 2.0]),
    trial(aten.upsample_linear1d.vec, x(12, 12, 3), None, False, [2.0]),
    trial(aten.upsample_bilinear2d.vec, x(12, 12, 3, 3), None, False, [2.0, 2.0]),
    trial(aten.upsample_bicubic2d.vec, x(12, 12, 3, 3), None, True, [2.0, 2.0]),
    trial(aten.upsample_trilinear3d.vec, x(12, 12, 2, 2, 2), None, False, [2.0, 2.0, 2.0]),
    trial(aten.pixel_shuffle.default, x(12, 48, 2, 2), 2),
    trial(aten.pixel_unshuffle.default, x(12, 12, 4, 4), 2),
    trial(aten.view_as_complex.default, x(12, 12, 2)),
    trial(aten.view_as_real.default, torch.complex(x(12, 12), x(12, 12))),
    trial(aten.cdist.default, x(12, 12, 5), x(12, 24, 5)),
]
CHANNELS = [
    trial(aten.conv1d.default, x(2, 24, 5), x(24, 24, 3), None, [1], [1], blocks=(1, 2)),
    trial(aten.conv1d.default, x(2, 24, 5), x(24, 1, 3), None, [1], [2], [1], 24),
    trial(aten.conv1d.default, x(2, 24, 5), x(12, 2, 3), None, groups=12),
    trial(aten.conv1d.padding, x(2, 24, 5), x(24, 12, 3), None, [1], "same", [1], 2),
    trial(aten.conv2d.default, x(2, 12, 4, 4), x(24, 12, 3, 3)),
    trial(aten.conv2d.padding, x(2, 12, 4, 4), x(24, 12, 3, 3), None, [1], "same"),
    trial(aten.conv3d.default, x(2, 12, 3, 3, 3), x(12, 12, 2, 2, 2)),
    trial(aten.conv1d.default, x(12, 6, 5), x(4, 3, 3), None, [1], [1], [1], 2),
    trial(aten.conv2d.default, x(12, 5, 4, 4), x(7, 5, 3, 3)),
    trial(aten.conv_transpose1d.default, x(2, 24, 5), x(24, 12, 4), None, [2], [1],
          blocks=(1, 2)),
    trial(aten.conv_transpose1d.default, x(2, 24, 5), x(24, 2, 3), None, [2], [1], [1], 12, [2]),
    trial(aten.conv_transpose1d.default, x(12, 6, 5), x(6, 2, 3), None, [2], [1], [1], 2),
    trial(aten.conv_transpose2d.input, x(12, 12, 3, 3), x(12, 24, 2, 2), None, [2]),
    trial(aten.conv_transpose3d.input, x(2, 12, 2, 2, 2), x(12, 12, 2, 2, 2)),
    trial(aten.group_norm.default, x(2, 24, 3), 12, x(24), x(24)),
    trial(aten.group_norm.default, x(2, 24, 3), 3),
    trial(aten.batch_norm.default, x(4, 24, 3), x(24), x(24), buffer(24), buffer(24), False,
          0.1, 1e-5, False, blocks=(1, 2)),
    trial(aten.batch_norm.default, x(4, 12), None, None, None, None, True, 0.1, 1e-5, False),
]  # fmt: skip
PRODUCTS = [
    trial(aten.einsum.default, "bld,ed->ble", [x(2, 12, 24), x(24, 24)], blocks=(1, 2)),
    trial(aten.einsum.default, "blhd, bmhd -> bhlm", [x(2, 12, 12, 3), x(2, 12, 12, 3)]),
    trial(aten.einsum.default, "bi,bj", [x(12, 12), x(12, 12)]),
    trial(aten.einsum.default, "bi,ij,bj->b", [x(12, 12), x(12, 12), x(12, 12)]),
    trial(aten.einsum.default, "bld->bd", [x(12, 12, 5)]),
    trial(aten.einsum.default, "bi,bi->i", [x(1, 12), x(12, 12)]),
    trial(aten.einsum.default, "...i,ij->...j", [x(12, 12), x(12, 12)]),
    trial(aten.matmul.default, x(5, 12, 24), x(24), blocks=(1, 2)),
    trial(aten.matmul.default, x(12), x(12)),
    trial(aten.matmul.default, x(12), x(12, 12)),
]
LOOKUPS = [
    trial(aten.index.Tensor, x(12, 7, 12), [None, index(7, 24)]),
    trial(aten.index.Tensor, x(7, 24, 12), [index(7, 12, 3)], blocks=(1, 2)),
    trial(aten.index.Tensor, x(7, 5, 12), [index(7, 3), index(5, 2, 3)]),
    trial(aten.index.Tensor, x(12, 5, 7, 12), [None, index(5, 3), index(7, 3), None]),
    trial(aten.index.Tensor, x(7, 12, 5), [index(7, 3), None, index(5, 3)]),
    trial(aten.take_along_dim.default, x(12, 7, 12), index(7, 12, 3, 12), 1),
    trial(aten.take_along_dim.default, x(12, 7), index(7, 12)),
    trial(aten.scatter.src, x(12, 7), 1, index(7, 12, 2), x(12, 2)),
    trial(aten.scatter.value, x(12, 7, 12), 1, index(7, 12, 2, 12), 3.0),
    trial(aten.scatter_add.default, x(12, 7), 1, index(7, 12, 9), x(12, 9)),
    trial(aten.scatter_add.default, x(12, 12), 0, index(12, 6, 3), x(6, 3)),
    trial(aten.index_add.default, x(12, 7, 12), 1, index(7, 9), x(12, 9, 12), alpha=2),
    trial(aten.index_copy.default, x(7, 12), 0, torch.tensor([3, 1]), x(2, 12)),
]
MORE = [*ELEMENTS, *REDUCTIONS, *ROWS, *CHANNELS, *PRODUCTS, *LOOKUPS]
