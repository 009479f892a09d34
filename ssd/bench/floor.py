"""The floor of decoding: a step reads every weight once, and cannot be faster than memory delivers these bytes."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ssd.layers.experts import Experts
from ssd.layers.formats.gguf import Blocks
from ssd.layers.linear import Linear
from ssd.models.decoder import Decoder


@dataclass(frozen=True)
class Floor:
    """Of plain decoding at batch 1, and what was measured (`decoded`: tokens/s)."""

    num_bytes: float  # of weights, a token on one device
    bandwidth: float  # bytes/s of that device
    decoded: float

    @property
    def tokens_per_second(self) -> float:
        return self.bandwidth / self.num_bytes

    @property
    def share(self) -> float:
        return self.decoded / self.tokens_per_second

    def as_dict(self) -> dict[str, float]:
        most = {"tokens_per_second": self.tokens_per_second, "share": self.share}
        return {"weight_bytes": self.num_bytes, "bytes_per_second": self.bandwidth, **most}

    def __str__(self) -> str:
        read, speed = f"{self.num_bytes / 1e9:.3g} GB", f"{self.bandwidth / 1e9:.4g} GB/s"
        most = f"{self.tokens_per_second:.1f} tokens/s"
        return f"a token reads {read} of weights, at {speed} (measured) at most {most}: ar has {self.share:.2f} of that"


def streamed_bytes(decoder: Decoder, rows: int = 1) -> float:
    """Stored weights that a step of so many rows reads, on all ranks: those of the layers and the head, not rows of
    the embedding that are looked up. Of experts those that random choices of all rows hit, and shared ones."""
    total = float(_stored_bytes(decoder.head, decoder.dtype))
    for layer in decoder.layers:
        linear = [each for each in layer.parameters() if isinstance(each, Linear)]
        for each in linear:
            mlp, hit = layer.mlp, 1.0
            if isinstance(mlp, Experts) and each.use.experts:
                spec, shared = mlp.spec, mlp.rule.shared
                chosen = spec.num_experts * (1 - (1 - spec.experts_per_token / spec.num_experts) ** rows)
                hit = (chosen + shared) / (spec.num_experts + shared)
            total += hit * _stored_bytes(each, decoder.dtype)
    return total


def _stored_bytes(linear: Linear, dtype: torch.dtype) -> int:
    """Of a product's weight. GGUF's blocks count as in the file, whatever memory has them in."""
    use, total = replace(linear.use, embedding=False), 0
    for part, rows in linear.parts.items():
        form = linear.formats[part]
        if isinstance(form, Blocks):
            total += math.prod(form.shapes(rows, linear.in_features)["weight"])
        else:
            total += form.num_bytes(rows, linear.in_features, dtype, use)
    return total


@functools.cache
def bandwidth(device: torch.device) -> float:
    """Bytes per second of the device's memory, the best of several runs: on a GPU those that a copy reads and writes,
    on a CPU those that torch's threads read. Measured once in a process."""
    if device.type == "cuda":
        source = torch.empty(1 << 29, dtype=torch.bfloat16, device=device).normal_()
        target = torch.empty_like(source)
        moved, best = 2 * source.nbytes, min(device_seconds(lambda: target.copy_(source)) for _ in range(12))
        del source, target
        torch.cuda.empty_cache()  # for the model
        return moved / best
    numbers = torch.ones(1 << 27, dtype=torch.float32, device=device)
    return numbers.nbytes / min(host_seconds(numbers.sum) for _ in range(12))


def device_seconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def host_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
