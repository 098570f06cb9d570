"""How the space of an update is cut into shards, one on each GPU of an engine, and how their digests and findings are joined.

Shards follow each other in the space, and are cut at multiples of ALIGNMENT, also inside a tensor. GPU 0 receives all bytes and
holds the last shard. Until its own bytes arrive, its memory has room for the buffers of the other shards. No torch here.
"""

from collections.abc import Sequence
from typing import NamedTuple

from enginepool.protocol.layout import ALIGNMENT, digest_sums, joined_digest, layout
from enginepool.protocol.manifest import SIZES, Manifest, Tensor
from enginepool.protocol.messages.weight_reports import Finding


class Shard(NamedTuple):
    """Bytes `begin` to `end` of a space, and the tensors in them, or their parts.

    A part is flat. `layout(manifest)` says where in the shard each of them stands. `places`: of each, its tensor.
    """

    begin: int
    end: int
    manifest: list[Tensor]
    places: list[int]


def shard_sizes(nbytes: int, gpus: int, least: int) -> dict[int, int]:
    """Bytes on each GPU, in the order of their shards: equal shares, but `least` on GPU 0, where the space has as many."""
    whole = _aligned(nbytes)
    last = min(whole, max(_aligned(-(-whole // gpus)), _aligned(least)))
    rest = whole - last
    share = _aligned(-(-rest // (gpus - 1))) if gpus > 1 else 0
    sizes: dict[int, int] = {}
    for gpu in range(1, gpus):
        sizes[gpu] = min(share, rest)
        rest -= sizes[gpu]
    return {gpu: size for gpu, size in (sizes | {0: last}).items() if size}


def cut_space(manifest: Manifest, sizes: Sequence[int]) -> list[Shard]:
    """The shards of a space, of at most these sizes: multiples of ALIGNMENT. Shards that are not needed are empty.

    Raises:
        ValueError: the sizes are too small.
    """
    offsets, nbytes = layout(manifest)
    if nbytes > sum(sizes):
        raise ValueError(f"shards of {sum(sizes)} bytes for {nbytes}")
    cut: list[Shard] = []
    begin = place = 0
    for size in sizes:
        end = min(begin + size, nbytes)
        tensors: list[Tensor] = []
        places: list[int] = []
        while begin < end and place < len(manifest):
            tensor, at = manifest[place], offsets[place]
            first, last = max(begin, at), min(end, at + tensor.nbytes)
            if last > first:
                tensors.append(Tensor(tensor.name, tensor.dtype, ((last - first) // SIZES[tensor.dtype],)))
                places.append(place)
            if at + tensor.nbytes > end:
                break  # its rest is in the next shard
            place += 1
        cut.append(Shard(begin, end, tensors, places))
        begin = end
    return cut


def whole_digest(parts: Sequence[tuple[int, str]]) -> str:
    """The digest of a space, of (where a shard begins, the digest of its bytes as if they were a space)."""
    return joined_digest((begin // 4, *digest_sums(digest)) for begin, digest in parts)


def whole_findings(manifest: Manifest, parts: Sequence[Sequence[Finding]]) -> list[Finding]:
    """The findings of whole tensors, from those of their parts in each shard. A tensor is zero only if all its parts are."""
    counts: dict[tuple[str, str], int] = {}
    for finding in (finding for findings in parts for finding in findings):
        key = finding.name, finding.kind
        counts[key] = counts.get(key, 0) + finding.count
    found: list[Finding] = []
    for tensor in manifest:
        elements = tensor.nbytes // SIZES[tensor.dtype]
        for kind in ("zero", "nan", "infinity", "overflow"):
            count = counts.get((tensor.name, kind), 0)
            if count and (kind != "zero" or count == elements):
                found.append(Finding(tensor.name, kind, count))
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
