"""`validate`: a batch checked by its descriptors alone. What only the device knows is left to `validate_contents`."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import NamedTuple

from pagedkern.abi.arrayview import ArrayView
from pagedkern.abi.codes import device_name
from pagedkern.abi.exporters import describe, type_name
from pagedkern.errors import InvalidArgument, InvalidType

Q_DTYPES = ("float32", "float16", "bfloat16")
QUANTIZED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")


class _Rule(NamedTuple):
    """What one array must be: its dtypes, the name of each dimension, whether it is written."""

    dtypes: tuple[str, ...]
    dims: tuple[str, ...]
    written: bool = False


# In the order in which they are checked: of two arrays that disagree, the later one is blamed.
_RULES = {
    "k_cache": _Rule(Q_DTYPES + QUANTIZED_DTYPES, ("num_blocks", "block_size", "num_kv_heads", "head_dim")),
    "v_cache": _Rule(Q_DTYPES + QUANTIZED_DTYPES, ("num_blocks", "block_size", "num_kv_heads", "head_dim_v")),
    "block_table": _Rule(("int32",), ("num_seqs", "width")),
    "seq_lens": _Rule(("int32",), ("num_seqs",)),
    "cu_seqlens_q": _Rule(("int32",), ("num_seqs + 1",)),
    "q": _Rule(Q_DTYPES, ("num_tokens", "num_heads", "head_dim")),
    "slot_mapping": _Rule(("int64",), ("num_tokens",)),
    "out": _Rule(Q_DTYPES, ("num_tokens", "num_heads", "head_dim_v"), written=True),
    "lse": _Rule(("float32",), ("num_tokens", "num_heads"), written=True),
}
_NEEDS = {  # array: the others without which it makes no sense
    "block_table": ("seq_lens",),
    "seq_lens": ("block_table",),
    "cu_seqlens_q": ("block_table",),
    "k_cache": ("v_cache",),
    "v_cache": ("k_cache",),
    "q": ("block_table", "k_cache"),
    "out": ("q",),
    "lse": ("q",),
}
_AT_LEAST_ONE = ("block_size", "num_kv_heads", "head_dim", "head_dim_v", "num_heads")


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch whose descriptors are consistent: made by `validate`, read by `to_struct` and `validate_contents`."""

    block_table: ArrayView | None  # int32 [num_seqs, width]
    seq_lens: ArrayView | None  # int32 [num_seqs]
    cu_seqlens_q: ArrayView | None  # int32 [num_seqs + 1]
    slot_mapping: ArrayView | None  # int64 [num_tokens]
    k_cache: ArrayView | None  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: ArrayView | None  # [num_blocks, block_size, num_kv_heads, head_dim_v]
    q: ArrayView | None  # [num_tokens, num_heads, head_dim]
    out: ArrayView | None  # [num_tokens, num_heads, head_dim_v]
    lse: ArrayView | None  # float32 [num_tokens, num_heads]
    num_seqs: int  # padding rows included
    num_tokens: int  # 0 if not known
    max_seqlen_q: int  # 0 if not known
    width: int  # entries in a row of block_table
    num_blocks: int | None  # None if not known
    block_size: int  # tokens
    num_heads: int  # 0 without q
    num_kv_heads: int  # 0 without caches
    head_dim: int  # 0 without caches
    head_dim_v: int  # 0 without caches
    device_type: int  # DLPack's number: 1 CPU, 2 CUDA, ...
    device_id: int  # from 0; -1 if no array says

    @property
    def quantized(self) -> bool:
        """Whether the caches hold float8 or int8, which need a `k_scale` and a `v_scale`."""
        return self.k_cache is not None and self.k_cache.dtype in QUANTIZED_DTYPES

    @property
    def device(self) -> str:
        """The device of all arrays as text: "cpu", "cuda:0"."""
        return device_name(self.device_type, self.device_id)


def validate(
    *,
    block_table: object = None,
    seq_lens: object = None,
    cu_seqlens_q: object = None,
    slot_mapping: object = None,
    k_cache: object = None,
    v_cache: object = None,
    q: object = None,
    out: object = None,
    lse: object = None,
    block_size: int | None = None,
    num_blocks: int | None = None,
    max_seqlen_q: int | None = None,
) -> Batch:
    """Check a batch as far as it can be known without reading an array: dtypes, shapes, strides, devices, what goes
    together.

    The fields are those of the ABI (see `pagedkern.abi`); each is anything that `describe` takes, or None.

    Args:
        block_table, seq_lens: int32 [num_seqs, width] and [num_seqs]; both or neither.
        cu_seqlens_q: int32 [num_seqs + 1]; None: one query for each sequence.
        slot_mapping: int64 [num_tokens].
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] and [..., head_dim_v], equal dtype (a float
            dtype, float8_e4m3fn, float8_e5m2 or int8); both or neither.
        q: float32, float16 or bfloat16 [num_tokens, num_heads, head_dim]; needs a table and caches.
        out: of q's dtype [num_tokens, num_heads, head_dim_v]; needs q.
        lse: float32 [num_tokens, num_heads]; needs q.
        block_size, num_blocks: in tokens and blocks; taken from the caches, and needed only where there are none
            (bookkeeping of an allocator). Without num_blocks the ids in the arrays have no upper limit.
        max_seqlen_q: an upper bound of the query tokens of one sequence, 0 or None if not known; 1 if cu_seqlens_q is
            None.

    Raises:
        InvalidArgument (InvalidType): names the argument, what was given and what was expected.
    """
    given = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "q": q,
        "slot_mapping": slot_mapping,
        "out": out,
        "lse": lse,
    }
    views = {name: describe(obj, name) for name, obj in given.items() if obj is not None}
    if not views:
        raise InvalidArgument("block_table, slot_mapping, k_cache: got None for every array, expected at least one")
    for name in views:
        for other in _NEEDS.get(name, ()):
            if other not in views:
                raise InvalidArgument(f"{other}: got None although {name} is given, expected an array")
    numbers = {}
    if block_size is not None:
        numbers["block_size"] = count(block_size, "block_size", at_least=1)
    if num_blocks is not None:
        numbers["num_blocks"] = count(num_blocks, "num_blocks", at_most=2**31 - 1)
    for name, view in views.items():
        _check_array(name, view, _RULES[name])
    sizes = _sizes(views, numbers)
    device_type, device_id = _common_device(views)
    _check_together(views, sizes)
    bound = 0 if max_seqlen_q is None else count(max_seqlen_q, "max_seqlen_q")
    if "block_table" in views and "cu_seqlens_q" not in views:  # decode
        bound = 1
        sizes.setdefault("num_tokens", sizes["num_seqs"])
    size = sizes.get
    return Batch(
        **{name: views.get(name) for name in _RULES},
        num_seqs=size("num_seqs", 0),
        num_tokens=size("num_tokens", 0),
        max_seqlen_q=bound,
        width=size("width", 0),
        num_blocks=size("num_blocks"),
        block_size=sizes["block_size"],
        num_heads=size("num_heads", 0),
        num_kv_heads=size("num_kv_heads", 0),
        head_dim=size("head_dim", 0),
        head_dim_v=size("head_dim_v", 0),
        device_type=device_type,
        device_id=device_id,
    )


def check_batch(batch: object) -> None:
    """Raises `InvalidType` for what `validate` has not made."""
    if not isinstance(batch, Batch):
        raise InvalidType(f"batch: got {type_name(batch)}, expected a Batch, which `validate` returns")


def count(value: object, name: str, *, at_least: int = 0, at_most: int = 2**63 - 1) -> int:
    """A host integer in a range. Raises `InvalidType` if it is no integer, `InvalidArgument` if it is out of range."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # its TypeError is what is asked for
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidType(f"{name}: got {type_name(value)} {value!r}, expected an int")
    if not at_least <= number <= at_most:
        raise InvalidArgument(f"{name}: got {number}, expected {at_least} to {at_most}")
    return number


def _check_array(name: str, view: ArrayView, rule: _Rule) -> None:
    """One array by itself."""
    if view.dtype not in rule.dtypes:
        raise InvalidArgument(f"{name}: got dtype {view.dtype}, expected {' or '.join(rule.dtypes)}")
    if len(view.shape) != len(rule.dims):
        raise InvalidArgument(f"{name}: got shape {view.shape}, expected [{', '.join(rule.dims)}]")
    if view.ptr % view.itemsize and 0 not in view.shape:
        raise InvalidArgument(f"{name}: got address {view.ptr:#x}, expected a multiple of {view.itemsize} bytes")
    if rule.written:
        if view.read_only:
            raise InvalidArgument(f"{name}: got read-only memory, expected memory that can be written")
        if overlaps_itself(view):
            raise InvalidArgument(
                f"{name}: got elements that share memory (shape {view.shape}, strides {view.strides}), "
                "expected strides that keep them apart"
            )


def _sizes(views: dict[str, ArrayView], numbers: dict[str, int]) -> dict[str, int]:
    """The size of each dimension, on which all arrays and the given numbers must agree."""
    sizes = dict(numbers)
    for name, view in views.items():
        if name == "cu_seqlens_q":
            sizes["num_seqs + 1"] = sizes["num_seqs"] + 1
        for dim, length in zip(_RULES[name].dims, view.shape, strict=True):
            if length < 1 and dim in _AT_LEAST_ONE:
                raise InvalidArgument(f"{name}: got {dim} {length} (shape {view.shape}), expected at least 1")
            if sizes.setdefault(dim, length) != length:
                source = dim if dim in numbers else _source(dim.removesuffix(" + 1"), views)
                raise InvalidArgument(
                    f"{name}: got {dim} {length} (shape {view.shape}), expected {sizes[dim]} as in {source}"
                )
    return sizes


def overlaps_itself(view: ArrayView) -> bool:
    """Whether elements may share memory: exact for nested dimensions, true in doubt for interleaved ones."""
    extent = 1  # elements that the dimensions of smaller stride span
    for stride, length in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride < extent:
            return 0 not in view.shape
        extent += stride * (length - 1)
    return False


def _common_device(views: dict[str, ArrayView]) -> tuple[int, int]:
    """The one device of all arrays. Exporters that do not say which GPU they use (-1) are taken to use it."""
    first = next(iter(views))
    device_type, device_id = views[first].device_type, views[first].device_id
    for name, view in views.items():
        both_known = view.device_id >= 0 and device_id >= 0
        if view.device_type != device_type or (both_known and view.device_id != device_id):
            raise InvalidArgument(
                f"{name}: got an array on {view.device}, expected {device_name(device_type, device_id)}, "
                f"where {first} is"
            )
        if device_id < 0:
            first, device_id = name, view.device_id
    return device_type, device_id


def _check_together(views: dict[str, ArrayView], sizes: dict[str, int]) -> None:
    """The rules that join several arrays."""
    if "block_size" not in sizes:
        raise InvalidArgument("block_size: got None and no caches to take it from, expected an int of at least 1")
    if sizes.get("num_blocks", 0) > 2**31 - 1:
        raise InvalidArgument(f"k_cache: got {sizes['num_blocks']} blocks, expected at most 2^31 - 1 (ids are int32)")
    if "k_cache" in views and views["v_cache"].dtype != views["k_cache"].dtype:
        raise InvalidArgument(
            f"v_cache: got dtype {views['v_cache'].dtype}, expected that of k_cache, {views['k_cache'].dtype}"
        )
    heads, kv_heads = sizes.get("num_heads", 0), sizes.get("num_kv_heads", 1)
    if heads % kv_heads:
        raise InvalidArgument(f"q: got {heads} heads, expected a multiple of the {kv_heads} KV heads of k_cache")
    if "out" in views and views["out"].dtype != views["q"].dtype:
        raise InvalidArgument(f"out: got dtype {views['out'].dtype}, expected that of q, {views['q'].dtype}")
    if "block_table" in views and "cu_seqlens_q" not in views:
        num_seqs, num_tokens = sizes["num_seqs"], sizes.get("num_tokens")
        if num_tokens not in (None, num_seqs):
            raise InvalidArgument(
                f"{_source('num_tokens', views)}: got {num_tokens} tokens, expected {num_seqs}: one for each "
                "sequence of block_table, as cu_seqlens_q is None"
            )
    if "slot_mapping" in views:  # new tokens are written to the caches
        for name in ("k_cache", "v_cache"):
            if name in views and views[name].read_only:
                raise InvalidArgument(f"{name}: got read-only memory although slot_mapping is given, expected writable")


def _source(dim: str, views: dict[str, ArrayView]) -> str:
    """The first array that has this dimension."""
    return next(name for name in views if dim in _RULES[name].dims)
