"""KVCache: the tensors of every layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from pagedkern import _checks as check
from pagedkern._checks import ArrayLike
from pagedkern.backends.forked import safe_after_fork
from pagedkern.cache.inputs import PlannedBatch, PlannedStep, StepInputs, step_inputs, upload
from pagedkern.cache.moves import CPU, Move, PlanLike, host_tensor, moves_of, same_blocks
from pagedkern.cache.queues import IN, OUT, Immediate, Streams
from pagedkern.cache.transfers import Transfers
from pagedkern.errors import InvalidArgument, InvalidType
from pagedkern.ops import copy_blocks

LAYOUTS = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}
"""Order in memory of [num_blocks, block_size, num_kv_heads, head_dim]; a permutation that is its own inverse."""
MOST = 2**31 - 1  # block ids are int32


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
        num_host_blocks: blocks of the host pool that sequences are swapped to, >= 0. For a GPU it is pinned memory,
            which torch may round up to a power of two, for K and V each.

    Raises:
        InvalidArgument (InvalidType): an argument that is not accepted.
    """

    @safe_after_fork
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
            raise InvalidType(f"dtype: got {type(dtype).__name__} {dtype!r}, expected a torch.dtype")
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
            raise InvalidArgument(f"device: got {device!r}, expected a torch device of this machine: {error}") from None

        order = LAYOUTS[layout]

        def pool(count: int, on: torch.device, pinned: bool) -> list[Tensor]:
            """K and V, as in memory: [num_layers, count, ...]."""
            result = []
            for dim in dims:
                memory = [(count, size, heads, dim)[axis] for axis in order]
                with torch.inference_mode(False):  # else it could not be written outside of inference mode later
                    result.append(torch.empty(layers, *memory, dtype=dtype, device=on, pin_memory=pinned))
            return result

        def logical(tensor: Tensor) -> Tensor:
            """[num_layers, count, block_size, num_kv_heads, head_dim]"""
            return tensor.permute(0, *(axis + 1 for axis in order))

        pools = pool(blocks, where, False)
        host = pool(host_blocks, CPU, where.type == "cuda" and host_blocks > 0)
        k, v = map(logical, pools)
        self._layers = [(k[i], v[i]) for i in range(layers)]
        self._blocks = [x.transpose(0, 1) for x in (k, v)]  # blocks first: one copy moves all layers
        self._host = [logical(x).transpose(0, 1) for x in host]
        self._swapped = [
            pair
            for device_pool, host_pool in zip(pools, host, strict=True)
            for pair in zip(device_pool.unbind(0), host_pool.unbind(0), strict=True)
        ]
        self._transfers = Transfers(Streams(pools) if where.type == "cuda" else Immediate())

    @classmethod
    def from_layers(cls, layers: Sequence[tuple[ArrayLike, ArrayLike]]) -> KVCache:
        """A cache over an engine's own tensors, without a copy: (k_cache, v_cache) of each layer in the logical shape.

        There is no host pool.

        Args:
            layers: for each layer [N, B, G, D] and [N, B, G, E], any strides but for the last dimension. They must
                agree in blocks, block size, dtype and device, and may differ in heads and head_dim.

        Raises:
            InvalidArgument (InvalidType): no layer, or one that is not accepted, with its index.
        """
        self = cls.__new__(cls)
        pairs: list[tuple[Tensor, Tensor]] = []
        if isinstance(layers, Tensor) or not isinstance(layers, Sequence):
            raise InvalidType(f"layers: got {type(layers).__name__}, expected a list of (k_cache, v_cache)")
        for i, layer in enumerate(layers):
            if not isinstance(layer, (tuple, list)) or len(layer) != 2:
                raise InvalidType(f"layers[{i}]: got {type(layer).__name__}, expected a pair (k_cache, v_cache)")
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
        self._host, self._swapped = [], []
        self._transfers = Transfers(Immediate())  # nothing to swap, so nothing but the current stream
        return self

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k_cache, v_cache) of one layer, views of shape [num_blocks, block_size, num_kv_heads, head_dim].

        Raises:
            InvalidArgument (InvalidType): an `index` that is no integer in 0 .. num_layers-1.
        """
        accepted = f"an integer from 0 to {self.num_layers - 1}"
        if check.integer("index", index, 0, accepted) >= self.num_layers:
            check.refuse("index", index, accepted)
        return self._layers[index]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @property
    def num_blocks(self) -> int:
        """Blocks on the device, N."""
        return self._layers[0][0].shape[0]

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory, to which sequences are swapped."""
        return self._host[0].shape[0] if self._host else 0

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self._layers[0][0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """dtype of K and V in every layer."""
        return self._layers[0][0].dtype

    @property
    def device(self) -> torch.device:
        """Where the blocks are that kernels read."""
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

    @safe_after_fork
    def apply(self, *plans: PlanLike) -> None:
        """Carry out the moves of steps and plans, in order, on every layer.

        To be called before the kernels of every step, with that step, also if it moves nothing: here earlier swaps are
        waited for. On a GPU everything is put into streams and nothing waits on the host: copies run on the current
        stream, swaps on streams of their own, behind what is on the current stream. What is launched there afterwards
        starts after all that earlier calls moved. It runs beside the swaps out of this call, and beside its swaps in as
        far as no `block_table` among `plans` names their blocks: so give a step together with the plans before it. The
        allocator's `commit` need not wait for the GPU.

        All moves are made before the kernels that follow, so put a step last. What is on another current stream than at
        the call before is to be ordered behind that one, as always with torch (`wait_stream`). Not to be captured in a
        CUDA graph: capture the kernels, and copy what `inputs` gives into the graph's own tensors.

        Args:
            plans: `Step` and `Plan` of the allocator, `Batch` of the scheduler, in the order in which they were made.

        Raises:
            InvalidArgument (BlockIndexError): a plan for blocks of another size or for more blocks; a move of unknown
                kind, with lists of unequal length, with a block id outside its pool, or with a destination named twice.
                All moves are checked before the first is carried out.
        """
        for plan in plans:
            same_blocks("plan", plan, self.block_size, self.num_blocks)
        moves = [move for plan in plans for move in moves_of(plan, self.num_blocks, self.num_host_blocks)]
        brings = any(move.kind == "swap_in" for move in moves)
        tables = _tables(plans) if brings else []
        self._transfers.begin()
        for move in moves:
            if move.kind == "copy":
                self._copy(move)
            else:
                self._swap(move)
        if brings:
            self._transfers.end(lambda blocks: _reads_any(tables, blocks))

    def _copy(self, move: Move) -> None:
        def work() -> None:
            copy_blocks(self._blocks, *upload([move.src, move.dst], self.device))

        self._transfers.compute(work, move.src.tolist(), move.dst.tolist())

    def _swap(self, move: Move) -> None:
        """The blocks of one run and layer are adjacent in memory, on both sides: one plain copy each."""
        out = move.kind == "swap_out"
        src, dst = move.src.tolist(), move.dst.tolist()

        def work() -> None:
            for s, d, count in move.runs():
                for device, host in self._swapped:
                    source, target = (device, host) if out else (host, device)
                    target[d : d + count].copy_(source[s : s + count], non_blocking=True)

        if out:
            self._transfers.transfer(OUT, work, src, [~d for d in dst])
        else:
            self._transfers.transfer(IN, work, [~s for s in src], dst)

    @overload
    def inputs(self, step: PlannedBatch) -> StepInputs[Tensor]: ...
    @overload
    def inputs(self, step: PlannedStep) -> StepInputs[Any]: ...
    @safe_after_fork
    def inputs(self, step: PlannedStep) -> StepInputs[Any]:
        """What the model and the operations need to know of a step, as tensors: on a CPU over the step's own buffers,
        else copied.

        Empty arrays have the dtype of full ones, so a batch without tokens or outputs needs no care: `logits_rows`
        indexes the logits, `token_ids` the embedding, `positions` is derived from the lengths. The copy is made on the
        current stream, one for all arrays; on a GPU it waits for nothing.

        Raises:
            InvalidArgument: the step is of an allocator with another block size or with more blocks, or made by hand
                and not as described.
        """
        same_blocks("step", step, self.block_size, self.num_blocks)
        return step_inputs(step, self.device)


def _tables(plans: Sequence[PlanLike]) -> list[Tensor]:
    """The block tables of those that are steps, flat."""
    tables = [getattr(plan, "block_table", None) for plan in plans]
    return [host_tensor("plan: block_table", t, torch.int32, ndim=2) for t in tables if t is not None]


def _reads_any(tables: list[Tensor], blocks: set[int]) -> bool:
    """Whether the kernels of steps with these tables read or write any of the blocks. Yes, if it cannot be told."""
    ids = torch.tensor(sorted(blocks), dtype=torch.int32, device=CPU)
    return not tables or any(bool(torch.isin(table, ids).any()) for table in tables)
