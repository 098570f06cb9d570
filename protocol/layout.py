"""How the tensors of an update become bytes: one flat space, cut into buckets; and the digest over it.

Tensor after tensor of the manifest stands at the next multiple of ALIGNMENT; gaps are zeros. Bucket k is the bytes from
k × bucket_bytes on, at most bucket_bytes of them: a tensor larger than a bucket is cut without further ado, and a receiver that
puts each bucket where it belongs holds every tensor whole and aligned.

The digest: the space, which is a whole number of words, as little-endian int32 x[0], x[1], …; two sums modulo 2^64,
Σ x[i] and Σ x[i] × (i + 1), as 32 hex digits, the second one first. It is a checksum against errors and mix-ups, not against an
attacker. Both sums are sums over buckets too, so that each side computes it as the bytes pass.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from enginepool.protocol.manifest import Manifest

ALIGNMENT = 256
_MASK = 2**64 - 1


class Layout(NamedTuple):
    """`offsets`: of each tensor, in the manifest's order. `nbytes`: the whole space."""

    offsets: list[int]
    nbytes: int


class Piece(NamedTuple):
    """Bytes of one tensor in a bucket: `nbytes` from `tensor_at` on stand at `bucket_at`."""

    tensor: int
    tensor_at: int
    bucket_at: int
    nbytes: int


class Bucket(NamedTuple):
    """Bytes `at` to `at + nbytes` of the space."""

    at: int
    nbytes: int
    pieces: list[Piece]


def layout(manifest: Manifest) -> Layout:
    """Where each tensor stands."""
    offsets: list[int] = []
    at = 0
    for tensor in manifest:
        offsets.append(at)
        at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return Layout(offsets, at)


def buckets(manifest: Manifest, bucket_bytes: int) -> Iterator[Bucket]:
    """The buckets in their order. `bucket_bytes` is a positive multiple of ALIGNMENT.

    Raises:
        ValueError: `bucket_bytes` is not.
    """
    if bucket_bytes <= 0 or bucket_bytes % ALIGNMENT:
        raise ValueError(f"bucket_bytes = {bucket_bytes}: a positive multiple of {ALIGNMENT}")
    where = layout(manifest)
    index = 0
    for at in range(0, where.nbytes, bucket_bytes):
        end = min(at + bucket_bytes, where.nbytes)
        pieces: list[Piece] = []
        while index < len(manifest) and where.offsets[index] < end:
            start, size = where.offsets[index], manifest[index].nbytes
            first, last = max(start, at), min(start + size, end)
            if last > first:
                pieces.append(Piece(index, first - start, first - at, last - first))
            if start + size > end:
                break
            index += 1
        yield Bucket(at, end - at, pieces)


def layered(before: str, part: str) -> str:
    """The digest of weights of which an update brought only a part: the part's, over that of what was there before."""
    return blake2b(f"{before}+{part}".encode(), digest_size=16).hexdigest()


def joined_digest(parts: Iterable[tuple[int, int, int]]) -> str:
    """The digest of a space, of (number of the first word, both sums of the words from there on) for each of its parts."""
    plain = weighted = 0
    for first, own, from_one in parts:
        plain += own
        weighted += from_one + first * own
    return digest_text(plain, weighted)


def digest_sums(digest: str) -> tuple[int, int]:
    """Both sums of a digest, modulo 2^64."""
    return int(digest[16:], 16), int(digest[:16], 16)


def digest_text(plain: int, weighted: int) -> str:
    """The digest of the two sums, which may be signed or beyond 64 bits."""
    return f"{weighted & _MASK:016x}{plain & _MASK:016x}"
