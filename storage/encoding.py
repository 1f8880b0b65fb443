"""Which codec each tensor of a layer state gets, and how many bytes that comes to."""

from collections.abc import Mapping
from dataclasses import dataclass

from storage.options import CheckpointOptions
from storage.shard_format import CODEC_RAW, DTYPES

_SCALE_BITS = 32


@dataclass(frozen=True)
class Encoding:
    """Codec names by kind of tensor. `needs_base`: parameters are encoded against the base version."""

    by_kind: Mapping[str, str]
    otherwise: str
    needs_base: bool = False

    def codec_of(self, kind: str) -> str:
        """Name of the codec of tensors of this kind."""
        return self.by_kind.get(kind, self.otherwise)


RAW = Encoding({}, CODEC_RAW)


def encoding_of(options: CheckpointOptions) -> Encoding:
    """The encoding that `checkpoint.codec` asks for. With `delta`, `step` and buffers stay raw."""
    delta = options.delta
    match options.codec:
        case "raw":
            return RAW
        case "lossless":
            return Encoding({}, "planes")
        case "delta":
            block = delta.block_elements
            by_kind = {
                "param": f"delta-{delta.weight_bits}x{block}",
                "exp_avg": f"blocks-{delta.exp_avg_bits}x{block}",
                "exp_avg_sq": f"roots-{delta.exp_avg_sq_bits}x{block}",
            }
            return Encoding(by_kind, CODEC_RAW, needs_base=True)


def largest_share(options: CheckpointOptions, dtype: str) -> float:
    """At most this many encoded bytes come of each byte of AdamW's layer state, if all of it is of type `dtype`."""
    if options.codec != "delta":
        return 1.0
    delta = options.delta
    bits = delta.weight_bits + delta.exp_avg_bits + delta.exp_avg_sq_bits + 3 * _SCALE_BITS / delta.block_elements
    return min(1.0, bits / (3 * 8 * DTYPES[dtype].itemsize))
