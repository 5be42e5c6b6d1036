"""Models by their files as Hugging Face keeps them: a folder with a `config.json`, or such a file alone.

Of the configuration only what a KV cache depends on is read, under the names that families of models give it. A model
whose layers do not all keep K and V of one shape, or keep something else, is refused, and the message names what it is:
one block size for a cache of one kind of layer is all that is tuned here.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedkern.backends.base import ITEMSIZE
from pagedkern.errors import InvalidArgument

MOST_BYTES = 64 << 20  # of a file that is read whole
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")  # where models that see or hear keep it
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "n_kv_heads", "kv_n_heads",
    "num_query_groups", "num_attention_groups",
)  # fmt: skip
ATTENTION = "attn_config"  # where some families keep what attention alone needs
HEAD_DIM = ("head_dim", "kv_channels")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
INNER = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
VOCABULARY = ("vocab_size", "padded_vocab_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
OTHER_STATE = (  # how names begin of what layers have that keep something else
    "mamba_", "ssm_", "rwkv_", "time_mix_", "time_step", "state_size", "linear_num_", "conv_L_", "chunkwise_",
)  # fmt: skip
WINDOW, FULL = "sliding_attention", ("full_attention", "attention", "global")
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # dtypes of safetensors
UNGATED = {"gpt2", "gpt_neox", "gptj", "gpt_bigcode", "falcon", "phi", "starcoder2", "bloom", "mpt", "opt", "codegen"}
ASK_FOR_WINDOW = ("qwen2", "qwen3")  # how families begin that use a window only if `use_sliding_window` says so
ALTERNATE = {"gemma2"}  # families whose configuration leaves out that every other layer has the window


def read(path: Path) -> dict[str, object]:
    """The keys of `models.from_table` for a model. Raises `InvalidArgument`."""
    where = f"model: {path}"
    file = path / "config.json" if path.is_dir() else path
    whole = _json(file, where)
    config = whole
    while nested := next((config[key] for key in NESTED if isinstance(config.get(key), dict)), None):
        config = nested
    if isinstance(own := config.get(ATTENTION), dict):
        config = {**own, **config}
    _refuse(config, where)
    heads = _count(config, HEADS, where)
    layers = _count(config, LAYERS, where)
    head_dim = _count(config, HEAD_DIM, where, optional=True) or _count(config, HIDDEN, where) // heads
    window, window_layers = _window(config, layers, where)
    kept = _weights(file.parent, where)
    dtype = _dtype(config, whole) or kept[1] or "float32"
    table: dict[str, object] = {
        "name": _name(path, file, whole), "heads": heads, "kv_heads": _kv_heads(config, heads, where),
        "head_dim": head_dim, "layers": layers, "dtype": dtype, "source": str(file),
        "weight_bytes": kept[0] or _estimate(config, heads, head_dim, layers, where) * ITEMSIZE.get(dtype, 2),
    }  # fmt: skip
    if window is not None:
        table |= {"sliding_window": window, "window_layers": window_layers}
    if (softcap := config.get("attn_logit_softcapping")) is not None:
        table["softcap"] = softcap
    return table


def _json(file: Path, where: str) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"longer than {MOST_BYTES} bytes")
        found = json.loads(content)
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise InvalidArgument(
            f"{where}: {file.name} {what}, expected a configuration as transformers writes"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: {file.name}: got {error}, expected a JSON object") from error
    return found


def _count(config: Mapping[str, Any], names: tuple[str, ...], where: str, optional: bool = False) -> int:
    """The first of several keys that there is, a number above 0; 0 if it is optional and missing.

    A number for each layer is taken if all are equal.
    """
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        if optional:
            return 0
        got = ", ".join(sorted(map(str, config))[:12]) or "nothing"
        raise InvalidArgument(f"{where}: {names[0]} is missing: got {got}, expected {' or '.join(names)}")
    value = config[name]
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    elif isinstance(value, list):
        raise _unequal(where, f"{name}={value!s:.40}", config)
    if type(value) is not int or not 0 < value < 1 << 40:
        raise InvalidArgument(f"{where}: {name}: got {value!r:.40}, expected a whole number above 0")
    return value


def _kv_heads(config: Mapping[str, Any], heads: int, where: str) -> int:
    one = bool(config.get("multi_query")) and not config.get("new_decoder_architecture")
    if one or (config.get("multi_query_attention") is False):  # of one head, whatever else is said; or of all
        return 1 if one else heads
    return _count(config, KV_HEADS, where, optional=True) or heads


def _refuse(config: Mapping[str, Any], where: str) -> None:
    """Raise for a model whose layers do not all keep K and V of one shape."""
    for name in ("kv_lora_rank", "q_lora_rank"):
        if config.get(name) is not None:
            what = f"multi-head latent attention (MLA, {name}={config[name]!r:.20})"
            raise InvalidArgument(f"{where}: got {what}{_family(config)}, expected layers that keep K and V")
    if config.get("is_encoder_decoder"):
        raise InvalidArgument(f"{where}: got an encoder beside the decoder{_family(config)}, expected a decoder alone")
    for name in ("attn_layer_period", "hybrid_override_pattern", "full_attention_interval", "attn_type_list"):
        if config.get(name) is not None:
            raise _unequal(where, f"{name}={config[name]!r:.40}", config)
    for name in config:
        if str(name).startswith(OTHER_STATE) and config[name] is not None:
            raise _unequal(where, str(name), config)
    for name in ("block_configs", "cross_attention_layers", "num_kv_shared_layers", "attention_k_eq_v", "use_cla"):
        if config.get(name):
            raise _unequal(where, f"{name}={config[name]!s:.40}", config)
    for name, usual in (
        ("v_head_dim", HEAD_DIM), ("swa_v_head_dim", HEAD_DIM), ("global_head_dim", HEAD_DIM),
        ("swa_head_dim", HEAD_DIM), ("swa_num_attention_heads", HEADS), ("swa_num_key_value_heads", KV_HEADS),
        ("num_global_key_value_heads", KV_HEADS),
    ):  # fmt: skip
        expected = next((config[key] for key in usual if config.get(key) is not None), None)
        if config.get(name) is not None and config[name] != expected:
            raise _unequal(where, f"{name}={config[name]!r:.20} beside {expected}", config)
    layers = config.get("per_layer_config")
    for number, own in layers.items() if isinstance(layers, dict) else ():
        for name in (*HEADS, *KV_HEADS, *HEAD_DIM, "v_head_dim", "sliding_window"):
            if isinstance(own, dict) and name in own and own[name] != config.get(name):
                what = f"{name}={own[name]!r:.20} in layer {number}, {config.get(name)!r:.20} in others"
                raise _unequal(where, what, config)
    for kind in _kinds(config):
        if kind != WINDOW and kind not in FULL:
            raise _unequal(where, f"layers of kind {kind!r:.40}", config)


def _unequal(where: str, what: str, config: Mapping[str, Any]) -> InvalidArgument:
    return InvalidArgument(
        f"{where}: got layers that are unequal ({what}){_family(config)}, expected layers that all keep K and V of the "
        "same heads and head_dim; give a shape such as heads=32,kv_heads=8,head_dim=128,layers=32,dtype=bfloat16,"
        "weight_bytes=16e9 for those of one kind"
    )


def _family(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    return f" of {kind}" if isinstance(kind, str) and kind.isprintable() else ""


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """What each layer is, where the configuration has a list of it."""
    for name in ("layer_types", "layers_block_type", "block_types"):
        if isinstance(found := config.get(name), list):
            return [str(kind) for kind in found]
    return []


def _window(config: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, int]:
    """The sliding window, and how many layers have it."""
    window = config.get("sliding_window")
    if window is not None and type(window) is not int:
        raise InvalidArgument(f"{where}: sliding_window: got {window!r:.40}, expected a whole number or null")
    used = config.get("use_sliding_window", not str(config.get("model_type")).startswith(ASK_FOR_WINDOW))
    if window is None or window < 1 or used is False:
        return None, 0
    kinds, pattern, every = _kinds(config)[:layers], config.get("sliding_window_pattern"), 0
    if kinds:
        count = kinds.count(WINDOW)
    elif isinstance(pattern, str) and pattern:
        count = sum(pattern[i % len(pattern)] == "L" for i in range(layers))
    elif (every := _every(config)) > 1:
        count = layers - layers // every
    elif config.get("use_sliding_window") and type(first := config.get("max_window_layers")) is int:
        count = max(0, layers - first)
    else:
        count = layers
    return (window, count) if count else (None, 0)


def _every(config: Mapping[str, Any]) -> int:
    """Every so many layers one has no window; 0 where nothing says so."""
    for name in ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"):
        if type(value := config.get(name)) is int:
            return value
    return 2 if config.get("model_type") in ALTERNATE else 0


def _dtype(config: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    for place in (config, whole):
        for name in ("dtype", "torch_dtype"):
            if isinstance(value := place.get(name), str) and value != "auto":
                return value.removeprefix("torch.")
    return ""


def _name(path: Path, file: Path, whole: Mapping[str, Any]) -> str:
    if path.is_dir() or file.name == "config.json":
        return file.absolute().parent.name or "model"
    return file.stem


def _weights(folder: Path, where: str) -> tuple[int, str]:
    """Bytes of the weights beside a configuration, and the dtype that most of them have; 0 and "" if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    dtype = _stored_dtype(files[0]) if files else ""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            metadata = _json(folder / index, where).get("metadata")
            size = metadata.get("total_size") if isinstance(metadata, dict) else None
            if isinstance(size, int | float) and not isinstance(size, bool) and 0 < size < 2**60:
                return int(size), dtype
    files = files or sorted(folder.glob("pytorch_model*.bin"))
    return sum(file.stat().st_size for file in files), dtype


def _stored_dtype(file: Path) -> str:
    """The dtype of most elements of a safetensors file; "" where it cannot be read or is none of ours."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length)) if length <= MOST_BYTES else {}
        sizes: Counter[str] = Counter()
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                sizes[tensor["dtype"]] += end - begin
        return STORED.get(sizes.most_common(1)[0][0], "") if sizes else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return ""


def _estimate(config: Mapping[str, Any], heads: int, head_dim: int, layers: int, where: str) -> int:
    """Weights of a model of which there is only the configuration: embeddings, attention, and a feed-forward network of
    three matrices, or two in older families, for each expert."""
    try:
        hidden, words = _count(config, HIDDEN, where), _count(config, VOCABULARY, where)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}; or give weight_bytes, as PATH,weight_bytes=16e9") from error
    inner = _count(config, INNER, where, optional=True) or 4 * hidden
    experts = _count(config, EXPERTS, where, optional=True) or 1
    if experts > 1:
        inner = _count(config, ("moe_intermediate_size",), where, optional=True) or inner
    attention = 2 * hidden * head_dim * (heads + _kv_heads(config, heads, where))
    network = (2 if config.get("model_type") in UNGATED else 3) * hidden * inner * experts
    tied = config.get("tie_word_embeddings", True)
    return layers * (attention + network + 2 * hidden) + words * hidden * (1 if tied else 2) + hidden
