"""Models of any size as pure data: what capture would find, without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from piper.ir.model import Bucket, Model, Parameter, Region
from piper.ir.values import Role, TensorSpec, Value
from piper.names import BI, BW, B, BucketId, F, RegionId, ValueId


@dataclass(frozen=True)
class DeepSeekLike:
    """61 layers of width 7168: three dense, the others with 256 experts, eight per token.

    A microbatch is one sequence of 4096 tokens.
    """

    stages: int
    layers: int = 61
    dense: int = 3
    width: int = 7168
    experts: int = 256
    top: int = 8
    inner: int = 2048
    dense_inner: int = 18432
    attention: int = 187_000_000  # parameters of a layer without its experts
    vocabulary: int = 129_280
    tokens: int = 4096
    dtype: str = "bfloat16"

    def model(self) -> Model:
        regions = [one for stage in range(self.stages) for one in self.stage(stage)]
        values = {ValueId(n): Value((self.ids,), Role.BATCH, index=k) for k, n in enumerate("xy")}
        specs = {"h": self.hidden, "l": TensorSpec(()), "r": self.rows, "b": self.rows}
        specs["c"] = TensorSpec((self.experts,), "int64")
        values |= {out: Value((specs[out[0]],)) for one in regions for out in one.outputs}
        buckets = {BucketId(one.id): self.bucket(one) for one in regions}
        return Model(regions=tuple(regions), values=values, buckets=buckets, loss=ValueId("loss"))

    @property
    def head(self) -> int:
        return self.width * self.vocabulary

    @property
    def ids(self) -> TensorSpec:
        return TensorSpec((1, self.tokens), "int64")

    @property
    def hidden(self) -> TensorSpec:
        return TensorSpec((self.tokens, self.width), self.dtype)

    @property
    def rows(self) -> TensorSpec:
        return TensorSpec((self.tokens * self.top, self.width), self.dtype)

    def layers_of(self, stage: int) -> range:
        """The expert layers of a stage. The first stage has the embedding and the dense layers."""
        count, stages = self.layers - self.dense, self.stages - 1
        if not stage:
            return range(0)
        return range(count * (stage - 1) // stages, count * stage // stages)

    def stage(self, s: int) -> Iterator[Region]:
        layers = self.layers_of(s)
        for number, layer in enumerate(layers):
            yield self.around(s, number, layer, sorts=True)
            yield self.of_experts(s, layer)
        yield self.around(s, len(layers), layers.stop, sorts=False)

    def around(self, s: int, number: int, layer: int, sorts: bool) -> Region:
        """Attention and router of a layer; the last region of a stage sums the combined rows."""
        last = s == self.stages - 1 and not sorts
        came = [f"h{s}.{number - 1}", f"b{layer - 1}"] if number else [f"h{s - 1}"] if s else []
        inputs = [*came, *(() if s or number else ("x",)), *(("y",) if last else ())]
        outputs = ["loss"] if last else [f"h{s}.{number}", f"r{layer}"] if sorts else [f"h{s}"]
        return self.region(
            f"PP{s}#{number}" if number else f"PP{s}", (("PP", s),), inputs,
            [*outputs, *([f"c{layer}"] if sorts else [])], len(came), len(outputs),
        )  # fmt: skip

    def of_experts(self, s: int, layer: int) -> Region:
        tags = (("PP", s), ("EP", layer))
        return self.region(
            f"PP{s}.EP{layer}", tags, [f"r{layer}", f"c{layer}"], [f"b{layer}"], 1, 1
        )

    def region(
        self, name: str, tags: tuple[tuple[str, int], ...], inputs: list[str],
        outputs: list[str], came: int, left: int,
    ) -> Region:  # fmt: skip
        kept = self.rows if "EP" in name else self.hidden
        flops = self.flops(name)
        return Region(
            id=RegionId(name), tags=tags, code=name.partition("#")[0].rstrip("0123456789"),
            inputs=tuple(map(ValueId, inputs)), outputs=tuple(map(ValueId, outputs)),
            buckets=(BucketId(name),), input_grads=tuple(range(came)),
            output_grads=tuple(range(left)), backward_inputs=tuple(range(len(inputs))),
            backward_buckets=(0,), saved=(kept, kept), weight_inputs=(0,),
            weight_output_grads=(left - 1,), carry=(kept,),
            flops={F: flops, B: 2 * flops, BI: flops, BW: flops},
        )  # fmt: skip

    def flops(self, name: str) -> float:
        return 2.0 * self.tokens * self.active(name)

    def active(self, name: str) -> float:
        """Active parameters of a region: those that a token uses."""
        if "EP" in name:
            return 3.0 * self.width * self.inner * self.top
        if name == "PP0":
            return float(self.dense * (self.attention + 3 * self.width * self.dense_inner))
        if "#" in name and self.is_last(name):
            return float(self.head if name.startswith(f"PP{self.stages - 1}#") else 0)
        return float(self.attention)

    def is_last(self, name: str) -> bool:
        stage, _, number = name.removeprefix("PP").partition("#")
        return int(number) == len(self.layers_of(int(stage)))

    def bucket(self, region: Region) -> Bucket:
        if "EP" in dict(region.tags):
            up = TensorSpec((self.experts, 2 * self.inner, self.width), self.dtype)
            down = TensorSpec((self.experts, self.width, self.inner), self.dtype)
            named = [("up", up), ("down", down)]
        else:
            count = int(self.active(region.id)) + (region.id == "PP0") * self.head
            named = [("weight", TensorSpec((max(1, count // self.width), self.width), self.dtype))]
        parameters = tuple(Parameter(f"{region.id}.{name}", spec) for name, spec in named)
        return Bucket(BucketId(region.id), parameters)
