"""What a plan says is to be moved, checked before anything is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pagedkern import _checks as check
from pagedkern.errors import BlockIndexError, InvalidType

CPU = torch.device("cpu")  # said for each tensor of the host: what torch has for a default is the caller's


class PlanLike(Protocol):
    """What `apply` carries out: a `Step` or a swap plan of the allocator, a `Batch` of the scheduler."""

    @property
    def moves(self) -> Iterable[tuple[str, Any, Any]]:
        """(kind, src, dst) in order; kind is "copy" (device to device), "swap_out" (device to host) or "swap_in" (host
        to device); src and dst are int64 buffers of equal length. No destination occurs twice in one move."""


class Move(NamedTuple):
    """Block src[i] goes to dst[i]; all are read before any is written."""

    kind: str
    src: Tensor  # int64 [n], on the host
    dst: Tensor

    def runs(self) -> list[tuple[int, int, int]]:
        """(src, dst, count): blocks that are adjacent in both pools, together. For moves between different pools."""
        runs: list[tuple[int, int, int]] = []
        for s, d in sorted(zip(self.src.tolist(), self.dst.tolist(), strict=True)):
            if runs and s == runs[-1][0] + runs[-1][2] and d == runs[-1][1] + runs[-1][2]:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((s, d, 1))
        return runs


def same_blocks(name: str, plan: object, block_size: int, num_blocks: int) -> None:
    """Refuse what an allocator of other blocks than the cache's, or of more, made. One made by hand need not say."""
    made_for = getattr(plan, "block_size", None)
    if made_for is not None and made_for != block_size:
        check.refuse(name, f"one for blocks of {made_for} tokens", f"one for blocks of {block_size}, as the cache has")
    pool = getattr(plan, "num_blocks", None)
    if pool is not None and pool > num_blocks:
        check.refuse(name, f"one for a pool of {pool} blocks", f"one for at most {num_blocks}, as the cache has")


def moves_of(plan: object, num_blocks: int, num_host_blocks: int) -> list[Move]:
    """The moves of a plan that move anything.

    Raises:
        InvalidArgument (BlockIndexError): a move of unknown kind, with lists of unequal length, or with a block id
            outside its pool, or with a destination named twice.
    """
    if not hasattr(plan, "moves"):
        raise InvalidType(f"plan: got {type(plan).__name__}, expected a Step or Plan of the allocator")
    try:
        given = [(kind, src, dst) for kind, src, dst in plan.moves]
    except (TypeError, ValueError):
        raise InvalidType("plan: moves: expected tuples (kind, src, dst), several of them") from None
    moves = [Move(kind, _ids(kind, "src", src), _ids(kind, "dst", dst)) for kind, src, dst in given]
    for move in moves:
        _check(move, num_blocks, num_host_blocks)
    return [move for move in moves if len(move.src)]


def _check(move: Move, num_blocks: int, num_host_blocks: int) -> None:
    kind, src, dst = move
    pools = {
        "copy": (num_blocks, num_blocks),
        "swap_out": (num_blocks, num_host_blocks),
        "swap_in": (num_host_blocks, num_blocks),
    }
    if not isinstance(kind, str) or kind not in pools:
        check.refuse("plan", f"a move of kind {kind!r}", " or ".join(map(repr, pools)))
    if len(src) != len(dst):
        check.refuse("plan", f"a {kind} move of {len(src)} sources and {len(dst)} destinations", "as many of both")
    for name, ids, count in (("source", src, pools[kind][0]), ("destination", dst, pools[kind][1])):
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < count):
            at = int(((ids < 0) | (ids >= count)).nonzero()[0])
            accepted = f"0 to {count - 1}" if count else "none: the host pool is empty (num_host_blocks=0)"
            raise BlockIndexError(
                f"plan: got {name} block {int(ids[at])} at place {at} of a {kind} move, expected {accepted}"
            )
    if len(set(dst.tolist())) < len(dst):
        check.refuse("plan", f"a {kind} move that names a destination twice", "each destination once")


def _ids(kind: str, name: str, buffer: Any) -> Tensor:
    """An int64 vector (buffer, or tensor) of a plan as a tensor on the host, without a copy."""
    if isinstance(buffer, Tensor):
        check.dtype(f"plan, {name} of a {kind} move", buffer, torch.int64)
        if buffer.dim() != 1:
            check.refuse("plan", f"a {kind} move whose {name} has {buffer.dim()} dimensions", "an int64 vector")
        return buffer.cpu()
    return host_tensor(f"plan: {name} of a {kind} move", buffer, torch.int64)


def host_tensor(name: str, buffer: Any, dtype: torch.dtype, ndim: int = 1) -> Tensor:
    """A flat tensor over a buffer (array, memoryview) of int32 or int64, without a copy.

    Raises:
        InvalidArgument (InvalidType): no buffer, or one of other numbers, more than `ndim` dimensions, or with gaps.
    """
    accepted = f"a contiguous buffer of {str(dtype).removeprefix('torch.')}, an array or memoryview"
    try:
        view = memoryview(buffer)
    except TypeError:
        raise InvalidType(f"{name}: got {type(buffer).__name__}, expected {accepted}") from None
    if view.format not in ("i", "l", "q") or view.itemsize != dtype.itemsize or not 1 <= view.ndim <= ndim:
        check.refuse(name, f"a buffer of format {view.format!r}, {view.ndim} dimensions", accepted)
    if not view.c_contiguous:
        check.refuse(name, "a strided buffer", accepted)
    if not view.nbytes:
        return torch.empty(0, dtype=dtype, device=CPU)  # torch refuses a buffer of nothing
    return torch.frombuffer(view, dtype=dtype)
