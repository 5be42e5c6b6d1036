"""The models that a cache is laid out for: the presets of `models.toml`, or a shape of your own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pagedkern.autotune.workloads import configs
from pagedkern.backends.base import ITEMSIZE
from pagedkern.errors import InvalidArgument, InvalidType

FILE = Path(__file__).parent / "models.toml"
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model decides about its cache and the time of a step."""

    name: str
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    num_layers: int
    dtype: str  # of weights and activations
    weight_bytes: int
    kv_dtype: str = ""  # of the cache; "" as `dtype`
    sliding_window: int | None = None  # tokens seen in the layers that have a window
    window_layers: int = 0  # layers that have one
    softcap: float | None = None  # of attention scores
    source: str = ""

    @property
    def cache_dtype(self) -> str:
        """dtype of K and V."""
        return self.kv_dtype or self.dtype

    @property
    def layer_bytes(self) -> int:
        """K and V of one token in one layer, in bytes."""
        return 2 * self.num_kv_heads * self.head_dim * ITEMSIZE[self.cache_dtype]

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers, in bytes."""
        return self.num_layers * self.layer_bytes

    @property
    def num_weights(self) -> int:
        """Parameters of the model."""
        return self.weight_bytes // ITEMSIZE[self.dtype]

    def read_tokens(self, context: int) -> float:
        """Tokens of K and V that a query at the end of `context` tokens reads: a mean over layers, fewer where there is
        a window."""
        if self.sliding_window is None or context <= self.sliding_window:
            return context
        part = self.window_layers / self.num_layers
        return part * self.sliding_window + (1 - part) * context

    def pairs(self, start: int, end: int) -> float:
        """`causal_pairs` of queries at positions `start .. end-1`, a mean over layers."""
        if self.sliding_window is None or end <= self.sliding_window:
            return causal_pairs(start, end)
        part = self.window_layers / self.num_layers
        return part * causal_pairs(start, end, self.sliding_window) + (1 - part) * causal_pairs(start, end)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of its layers, None that of layers without one: each is a problem of its own to a kernel."""
        with_window = self.window_layers if self.sliding_window is not None else 0
        return ((None,) if with_window < self.num_layers else ()) + ((self.sliding_window,) if with_window else ())

    def __str__(self) -> str:
        window = "" if self.windows == (None,) else f", window {self.sliding_window:,}"
        window += f" in {self.window_layers} of them" if len(self.windows) > 1 else ""
        cache = "" if self.cache_dtype == self.dtype else f", cache {self.cache_dtype}"
        softcap = "" if self.softcap is None else f", softcap {self.softcap:g}"
        return (
            f"{self.name}: {self.num_layers} layers{window}, {self.num_heads} query heads, {self.num_kv_heads} KV "
            f"heads, head dim {self.head_dim}{softcap}, {self.dtype}{cache}, "
            f"{self.weight_bytes / 1e9:.1f} GB of weights"
        )


def causal_pairs(start: int, end: int, window: int | None = None) -> int:
    """Pairs of a query at positions `start .. end-1` and a key that it sees, itself and those before; with a window the
    last so many of them."""
    growing = end if window is None else min(max(window, start), end)  # positions from here on see a whole window
    return (growing * (growing + 1) - start * (start + 1)) // 2 + (window or 0) * (end - growing)


_KEYS: dict[str, type | tuple[type, ...]] = {
    "heads": int, "kv_heads": int, "head_dim": int, "layers": int, "dtype": str, "weight_bytes": int,
    "kv_dtype": str, "sliding_window": int, "window_layers": int, "softcap": (int, float), "source": str, "name": str,
}  # fmt: skip
_REQUIRED = ("heads", "kv_heads", "head_dim", "layers", "dtype", "weight_bytes")


def model_names() -> tuple[str, ...]:
    """The presets, the default first."""
    return tuple(_presets())


def default_model() -> Model:
    """What is served where nobody says."""
    return model(model_names()[0])


def model(spec: str | Path | Model) -> Model:
    """A model by what names it.

    Args:
        spec: a preset; a folder with a `config.json` as Hugging Face models have it, or such a file: its weights take
            as many bytes as the files beside it, else as their number in the dtype of the configuration; either with
            changes, as `llama-3-8b,dtype=float32` (the weights of a preset then take as many bytes as in that dtype);
            or a shape, as `heads=32,kv_heads=8,head_dim=128,layers=32,dtype=bfloat16,weight_bytes=16e9`. A `Model` is
            returned as it is.

    Raises:
        InvalidArgument: no such preset or file, a key that there is not, a value that is not accepted, or a model whose
            layers do not all keep K and V of one shape, as those with multi-head latent attention.
    """
    if isinstance(spec, Model):
        return spec
    if not isinstance(spec, str | Path):
        raise InvalidType(f"model: got {type(spec).__name__}, expected a name, a path or a Model")
    if isinstance(spec, Path) or _is_path(spec):
        return from_table(configs.read(Path(spec)), f"model: {spec}", str(spec))
    if spec in _presets():
        return _presets()[spec]
    parts = [part.partition("=") for part in spec.split(",")]
    changes = {key.strip(): _number(value.strip()) for key, equals, value in parts if equals}
    if len(changes) == len(parts):
        return from_table(changes, "model", spec)
    name = parts[0][0].strip()
    if len(changes) == len(parts) - 1 and _is_path(name):
        return from_table({**configs.read(Path(name)), **changes}, f"model: {name}", spec)
    if name not in _presets() or len(changes) != len(parts) - 1:
        raise InvalidArgument(
            f"model: got {spec!r}, expected one of {', '.join(model_names())}, one with changes such as "
            f"{model_names()[0]},dtype=float32, a folder with a config.json, or a shape such as "
            "heads=32,kv_heads=8,head_dim=128,layers=32,dtype=bfloat16,weight_bytes=16e9"
        )
    preset = _presets()[name]
    size = ITEMSIZE.get(str(changes.get("dtype")), ITEMSIZE[preset.dtype])
    return from_table({**_tables()[name], "weight_bytes": preset.num_weights * size, **changes}, "model", spec)


def _is_path(text: str) -> bool:
    """Whether a text names a file or folder, perhaps one that there is not, rather than a preset or a shape."""
    if text in _presets() or not text.strip():
        return False
    try:
        return Path(text).exists() or text.endswith(".json") or ("/" in text and "," not in text and "=" not in text)
    except (OSError, ValueError):  # a name too long for one, a zero byte in it
        return False


def from_table(table: Mapping[str, object], where: str, name: str) -> Model:
    """A model from the keys of a TOML table; `where` names it in errors."""
    for key in table:
        if key not in _KEYS:
            raise InvalidArgument(f"{where}: got an unknown key {key!r}, expected {', '.join(_KEYS)}")
    for key in _REQUIRED:
        if key not in table:
            raise InvalidArgument(f"{where}: {key} is missing, required are {', '.join(_REQUIRED)}")
    for key, value in table.items():
        kinds = _KEYS[key]
        if not isinstance(value, kinds) or isinstance(value, bool):
            wanted = "a string" if kinds is str else "a whole number" if kinds is int else "a number"
            raise InvalidArgument(f"{where}: {key}: got {value!r}, expected {wanted}")
        if not isinstance(value, str) and not 0 < value < 2**63:  # type: ignore[operator]
            raise InvalidArgument(f"{where}: {key}: got {value!r}, expected a number above 0")
    for key, accepted in (("dtype", FLOATS), ("kv_dtype", tuple(ITEMSIZE))):
        if table.get(key, accepted[0]) not in accepted:
            raise InvalidArgument(f"{where}: {key}: got {table[key]!r}, expected one of {', '.join(accepted)}")
    fields: dict[str, object] = {
        {"heads": "num_heads", "kv_heads": "num_kv_heads", "layers": "num_layers"}.get(key, key): value
        for key, value in table.items()
    }
    fields.setdefault("name", name)
    if "sliding_window" in fields:
        fields.setdefault("window_layers", fields["num_layers"])
    made = Model(**fields)  # type: ignore[arg-type]
    if made.num_heads % made.num_kv_heads:
        raise InvalidArgument(f"{where}: heads: got {made.num_heads}, expected a multiple of {made.num_kv_heads}")
    if made.window_layers > made.num_layers:
        raise InvalidArgument(f"{where}: window_layers: got {made.window_layers}, expected 1 to {made.num_layers}")
    return made


@cache
def _tables() -> dict[str, dict[str, object]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


@cache
def _presets() -> dict[str, Model]:
    return {name: from_table(table, f"models.toml: {name}", name) for name, table in _tables().items()}


def _number(text: str) -> object:
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value
