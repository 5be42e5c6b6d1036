"""KVCache: the tensors that hold keys and values, their layout, and the carrying out of the allocator's plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pagedkern import _arguments as check
from pagedkern._arguments import ArrayLike
from pagedkern.errors import BlockIndexError, InvalidArgument, InvalidType
from pagedkern.ops import copy_blocks

LAYOUTS = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}
"""Order in memory of [num_blocks, block_size, num_kv_heads, head_dim]; a permutation that is its own inverse."""
MOST = 2**31 - 1  # block ids are int32


class Plan(Protocol):
    """What `apply` carries out: a `Step` or a swap plan of the allocator."""

    @property
    def moves(self) -> Iterable[tuple[str, Any, Any]]:
        """(kind, src, dst) in order; kind is "copy" (device to device), "swap_out" (device to host) or "swap_in" (host
        to device); src and dst are int64 buffers of equal length. No destination occurs twice in one move."""


class PlannedStep(Plan, Protocol):
    """What `inputs` describes: a `Step` of the allocator, whose arrays are buffers."""

    @property
    def block_table(self) -> Any: ...  # int32 [S, W]
    @property
    def seq_lens(self) -> Any: ...  # int32 [S]
    @property
    def cu_seqlens_q(self) -> Any: ...  # int32 [S+1]
    @property
    def max_seqlen_q(self) -> int: ...
    @property
    def slot_mapping(self) -> Any: ...  # int64 [T]


class StepInputs(NamedTuple):
    """A step's arrays on the device of the cache, named as `paged_attention` and `write_kv` name them."""

    block_table: Tensor  # int32 [S, W]
    seq_lens: Tensor  # int32 [S]
    cu_seqlens_q: Tensor  # int32 [S+1]
    max_seqlen_q: int
    slot_mapping: Tensor  # int64 [T]


class KVCache:
    """The paged keys and values of every layer of a model.

    HND, the default, keeps a block's tokens of one KV head together, which is what GPU kernels stream; NHD keeps a
    token's heads together. Both are handed out in the logical shape [num_blocks, block_size, num_kv_heads, head_dim]
    that every operation takes. Memory is not initialised: no kernel reads a slot that was not written.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: integers >= 1; block_size in tokens.
        dtype: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8, as a torch dtype.
        device: where the blocks live, as torch understands it.
        layout: "HND" or "NHD".
        head_dim_v: head_dim of V; None is `head_dim`.
        num_host_blocks: blocks of the host pool that sequences are swapped to (pinned memory for a GPU), >= 0.

    Raises:
        InvalidArgument (InvalidType): an argument that is not accepted.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        layout: str = "HND",
        head_dim_v: int | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        if not isinstance(layout, str) or layout not in LAYOUTS:
            check.refuse("layout", repr(layout), " or ".join(map(repr, LAYOUTS)))
        if not isinstance(dtype, torch.dtype):
            raise InvalidType(f"dtype: got {type(dtype).__name__} {dtype!r}, accepted is a torch.dtype")
        if dtype not in check.DTYPE_NAMES:
            check.refuse("dtype", dtype, " or ".join(map(str, check.DTYPE_NAMES)))

        def count(name: str, value: object, minimum: int = 1) -> int:
            return check.integer(name, value, minimum, f"an integer >= {minimum}", MOST)

        layers, blocks = count("num_layers", num_layers), count("num_blocks", num_blocks)
        heads, size = count("num_kv_heads", num_kv_heads), count("block_size", block_size)
        dims = [count("head_dim", head_dim)]
        dims.append(dims[0] if head_dim_v is None else count("head_dim_v", head_dim_v))
        host_blocks = count("num_host_blocks", num_host_blocks, 0)
        try:
            where = torch.device(device)
            torch.empty(0, device=where)
        except (AssertionError, RuntimeError, TypeError) as error:
            raise InvalidArgument(
                f"device: got {device!r}, accepted is a torch device of this machine: {error}"
            ) from None

        def pool(count: int, on: torch.device, pinned: bool) -> list[Tensor]:
            """K and V of every layer, logical [num_layers, count, block_size, num_kv_heads, head_dim]."""
            order = LAYOUTS[layout]
            result = []
            for dim in dims:
                memory = [(count, size, heads, dim)[axis] for axis in order]
                with torch.inference_mode(False):  # else it could not be written outside of inference mode later
                    tensor = torch.empty(layers, *memory, dtype=dtype, device=on, pin_memory=pinned)
                result.append(tensor.permute(0, *(axis + 1 for axis in order)))
            return result

        k, v = pool(blocks, where, False)
        self._layers = [(k[i], v[i]) for i in range(layers)]
        self._blocks = [x.transpose(0, 1) for x in (k, v)]  # blocks first: one copy moves all layers
        self._host = [x.transpose(0, 1) for x in pool(host_blocks, torch.device("cpu"), where.type == "cuda")]

    @classmethod
    def from_layers(cls, layers: Sequence[tuple[ArrayLike, ArrayLike]]) -> KVCache:
        """A cache over an engine's own tensors, without a copy: (k_cache, v_cache) of each layer in the logical shape.

        Layers must agree in blocks, block size, dtype and device, and may differ in heads and head_dim. There is no
        host pool.
        """
        self = cls.__new__(cls)
        pairs: list[tuple[Tensor, Tensor]] = []
        if isinstance(layers, Tensor) or not isinstance(layers, Sequence):
            raise InvalidType(f"layers: got {type(layers).__name__}, accepted is a list of (k_cache, v_cache)")
        for i, layer in enumerate(layers):
            if not isinstance(layer, (tuple, list)) or len(layer) != 2:
                raise InvalidType(f"layers[{i}]: got {type(layer).__name__}, accepted is a pair (k_cache, v_cache)")
            try:
                pair = check.caches(*layer, write=True)
            except InvalidArgument as error:
                raise type(error)(f"layers[{i}]: {error}") from None
            first = pairs[0][0] if pairs else pair[0]
            if pair[0].shape[:2] != first.shape[:2] or pair[0].dtype != first.dtype or pair[0].device != first.device:
                check.refuse(
                    f"layers[{i}]",
                    f"{list(pair[0].shape[:2])} blocks and block size, {pair[0].dtype}, {pair[0].device}",
                    f"those of layer 0: {list(first.shape[:2])}, {first.dtype}, {first.device}",
                )
            pairs.append(pair)
        if not pairs:
            check.refuse("layers", "no layer", "at least one (k_cache, v_cache)")
        self._layers = pairs
        tensors = [x for pair in pairs for x in pair]
        self._blocks = list({(x.data_ptr(), x.shape, x.stride()): x for x in tensors}.values())  # layers may share one
        self._host = []
        return self

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k_cache, v_cache) of one layer, views of shape [num_blocks, block_size, num_kv_heads, head_dim]."""
        accepted = f"an integer in 0 .. {self.num_layers - 1}"
        if check.integer("index", index, 0, accepted) >= self.num_layers:
            check.refuse("index", index, accepted)
        return self._layers[index]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_blocks(self) -> int:
        return self._layers[0][0].shape[0]

    @property
    def num_host_blocks(self) -> int:
        return self._host[0].shape[0] if self._host else 0

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self._layers[0][0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._layers[0][0].dtype

    @property
    def device(self) -> torch.device:
        return self._layers[0][0].device

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in K and V of all layers."""
        return sum(x[0].numel() * x.element_size() for x in self._blocks)

    def __repr__(self) -> str:
        k, v = self._layers[0]
        return (
            f"KVCache(num_layers={self.num_layers}, num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"num_kv_heads={k.shape[2]}, head_dim={k.shape[3]}, head_dim_v={v.shape[3]}, dtype={self.dtype}, "
            f"device={self.device}, num_host_blocks={self.num_host_blocks})"
        )

    def apply(self, plan: Plan) -> None:
        """Carry out the moves of a step or plan, in order, on every layer; to be called before the step's kernels.

        Raises:
            InvalidArgument (BlockIndexError): a move of unknown kind, with lists of unequal length, or with a block id
                outside its pool. All moves are checked before the first is carried out.
        """
        if not hasattr(plan, "moves"):
            raise InvalidType(f"plan: got {type(plan).__name__}, accepted is a Step or Plan of the allocator")
        moves = [(kind, _ids(kind, "src", src), _ids(kind, "dst", dst)) for kind, src, dst in plan.moves]
        for kind, src, dst in moves:
            self._check_move(kind, src, dst)
        for kind, src, dst in moves:
            if not len(src):
                continue
            if kind == "copy":
                copy_blocks(self._blocks, src.to(self.device), dst.to(self.device))
            elif kind == "swap_out":
                for device_pool, host_pool in zip(self._blocks, self._host, strict=True):
                    for s, d in zip(src.tolist(), dst.tolist(), strict=True):
                        host_pool[d].copy_(device_pool[s], non_blocking=True)
            else:
                for device_pool, host_pool in zip(self._blocks, self._host, strict=True):
                    for s, d in zip(src.tolist(), dst.tolist(), strict=True):
                        device_pool[d].copy_(host_pool[s], non_blocking=True)

    def inputs(self, step: PlannedStep) -> StepInputs:
        """What the operations need to know of a step, as tensors: on a CPU over the step's own buffers, else copied.

        The copies are made on the current stream, without a synchronisation if the device allows it.
        """
        num_seqs = memoryview(step.seq_lens).nbytes // 4
        arrays = {
            "block_table": _tensor(step.block_table, torch.int32).view(num_seqs, -1 if num_seqs else 0),
            "seq_lens": _tensor(step.seq_lens, torch.int32),
            "cu_seqlens_q": _tensor(step.cu_seqlens_q, torch.int32),
            "slot_mapping": _tensor(step.slot_mapping, torch.int64),
        }
        on_device = {name: array.to(self.device, non_blocking=True) for name, array in arrays.items()}
        return StepInputs(max_seqlen_q=step.max_seqlen_q, **on_device)

    def _check_move(self, kind: str, src: Tensor, dst: Tensor) -> None:
        pools = {
            "copy": (self.num_blocks, self.num_blocks),
            "swap_out": (self.num_blocks, self.num_host_blocks),
            "swap_in": (self.num_host_blocks, self.num_blocks),
        }
        if not isinstance(kind, str) or kind not in pools:
            check.refuse("plan", f"a move of kind {kind!r}", " or ".join(map(repr, pools)))
        if len(src) != len(dst):
            check.refuse("plan", f"a {kind} move of {len(src)} sources and {len(dst)} destinations", "as many of both")
        for name, ids, count in (("source", src, pools[kind][0]), ("destination", dst, pools[kind][1])):
            if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < count):
                at = int(((ids < 0) | (ids >= count)).nonzero()[0])
                accepted = f"0 .. {count - 1}" if count else "none: the host pool is empty (num_host_blocks=0)"
                raise BlockIndexError(
                    f"plan: got {name} block {int(ids[at])} at place {at} of a {kind} move, accepted is {accepted}"
                )


def _ids(kind: str, name: str, buffer: Any) -> Tensor:
    """An int64 buffer (array, memoryview) of a plan as a tensor on the host, without a copy."""
    if isinstance(buffer, Tensor):
        check.dtype(f"plan, {name} of a {kind} move", buffer, torch.int64)
        return buffer.cpu()
    try:
        view = memoryview(buffer)
    except TypeError:
        raise InvalidType(
            f"plan: got a {kind} move whose {name} is a {type(buffer).__name__}, accepted is an int64 buffer"
        ) from None
    if view.itemsize != 8 or view.format not in ("q", "l") or view.ndim != 1 or not view.contiguous:
        got = f"format {view.format!r}, {view.ndim} dimensions{'' if view.contiguous else ', strided'}"
        check.refuse("plan", f"a {kind} move whose {name} has {got}", "a contiguous int64 vector ('q')")
    return _tensor(view, torch.int64)


def _tensor(buffer: Any, dtype: torch.dtype) -> Tensor:
    """A flat tensor over a buffer, without a copy; torch itself refuses empty ones."""
    return torch.frombuffer(buffer, dtype=dtype) if memoryview(buffer).nbytes else torch.empty(0, dtype=dtype)
