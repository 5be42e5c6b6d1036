"""Wrong scales of a quantized cache, for `paged_attention` and `write_kv`: as numbers, and in tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagedkern.errors import InvalidType
from tests.contract.wrong import NO_NUMBERS, Arguments, Change, Wrong


def quantized_caches() -> Arguments:
    return {
        "k_cache": torch.zeros(6, 16, 2, 32, dtype=torch.int8),
        "v_cache": torch.zeros(6, 16, 2, 48, dtype=torch.int8),
    }


def scales(*names: str) -> list[Wrong]:
    """Of the cache, for `paged_attention` and `write_kv`."""
    accepted, wrong = "positive number", []

    def on_quantized(name: str, make: Callable[[], object]) -> Change:
        return lambda a: {**quantized_caches(), name: make()}

    for n in names:
        unquantized = ("scale", "float32", "quantized")
        wrong += [
            Wrong(n, "number for an unquantized cache", {n: 0.5}, unquantized),
            Wrong(n, "tensor for an unquantized cache", _ones(n), unquantized),
        ]
        for value in (0.0, -1.0, math.nan, math.inf):
            wrong.append(Wrong(n, repr(value), on_quantized(n, partial(float, value)), (str(value), accepted)))
        tensors: list[tuple[str, Callable[[], Tensor], tuple[str, ...]]] = [
            ("too many", lambda: torch.ones(3), ("[3]", "[2]", "num_kv_heads")),
            ("none", lambda: torch.ones(0), ("[0]", "[2]", "num_kv_heads")),
            ("float64", lambda: torch.ones(2).double(), ("float64", "float32")),
            ("float16", lambda: torch.ones(2).half(), ("float16", "float32")),
            ("bfloat16", lambda: torch.ones(1).bfloat16(), ("bfloat16", "float32")),
            ("a float64 array", lambda: torch.from_dlpack(np.ones(2)), ("float64", "float32")),
            ("2 dimensions", lambda: torch.ones(2, 1), ("[2, 1]", "dimension")),
            ("1 x 1", lambda: torch.ones(1, 1), ("[1, 1]", "dimension")),
            ("bool without dimensions", lambda: torch.tensor(True), ("bool", "float32")),
            ("on another device", lambda: torch.ones(2, device="meta"), ("meta",)),
            ("without dimensions, on another device", lambda: torch.tensor(1.0, device="meta"), ("meta",)),
        ]
        wrong += [Wrong(n, what, on_quantized(n, make), words) for what, make, words in tensors]
        types: list[tuple[object, str]] = [([1.0, 1.0], "list"), ("1", "str"), (True, "bool")]
        types += [(NO_NUMBERS[0], "bool"), (NO_NUMBERS[2], "complex64")]
        for bad, word in types:
            wrong.append(
                Wrong(n, f"a {type(bad).__name__}: {bad!r}", on_quantized(n, partial(_same, bad)), (word,), InvalidType)
            )
        for value in (1e39, 1e-39, 10**400, -5e-324, np.float32(0), np.float64("nan"), np.float16("inf")):
            wrong.append(Wrong(n, f"{value!r:.20}", on_quantized(n, partial(_same, value)), (accepted,)))
        wrong += _bad_scales(n)
    return wrong


def _bad_scales(name: str) -> list[Wrong]:
    """In a tensor, which is looked at on a CPU always and on a GPU to debug: the place and the value are named."""
    cases: list[tuple[str, int, float, Callable[[float], Tensor]]] = []
    for value in (0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e-39, 1e-45):
        cases.append((f"{value} in a tensor", 1, value, lambda x: torch.tensor([0.5, x])))
        cases.append((f"[{value}]", 0, value, lambda x: torch.tensor([x])))
        cases.append((f"{value} without dimensions", 0, value, lambda x: torch.tensor(x)))
    cases.append(("float64 beyond float32", 0, math.inf, lambda x: torch.tensor(1e39, dtype=torch.float64)))
    wrong = []
    for what, place, value, make in cases:
        words = (f"{name}[{place}]", str(torch.tensor(value).item()), "positive number")

        def change(a: Arguments, make: Callable[[float], Tensor] = make, value: float = value) -> Arguments:
            return {**quantized_caches(), name: make(value), "debug": a["k_cache"].is_cuda}

        wrong.append(Wrong(name, what, change, words, in_memory=True))
    return wrong


def _same(x: object) -> object:
    return x


def _ones(name: str) -> Change:
    return lambda a: {name: torch.ones(2)}
