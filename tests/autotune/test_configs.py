"""Models by their folders: `config.json` as transformers writes it, weights as safetensors; refusals, by name."""

from __future__ import annotations

import json
import random
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import pagedkern
from pagedkern.autotune import workloads
from pagedkern.autotune.cli import main
from pagedkern.errors import InvalidArgument

LLAMA = {
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "num_hidden_layers": 32, "torch_dtype": "bfloat16", "intermediate_size": 14336, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip


def folder(path: Path, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A folder with a configuration: Llama's with changes, without those that are None."""
    made = {k: v for k, v in {**(LLAMA if config is None else config), **changes}.items() if v is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(made))
    return path


def safetensors(path: Path, sizes: dict[str, tuple[str, int]]) -> None:
    """A file as safetensors are, of tensors with dtype and bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, count) in sizes.items():
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [offset, offset + count]}
        offset += count
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def test_a_folder_a_file_and_a_preset_are_the_same_model(tmp_path: Path) -> None:
    path = folder(tmp_path / "Meta-Llama-3-8B")
    preset = workloads.model("llama-3-8b")
    for spec in (path, str(path), path / "config.json", str(path / "config.json")):
        found = workloads.model(spec)
        assert (found.num_heads, found.num_kv_heads, found.head_dim, found.num_layers, found.dtype) == (
            preset.num_heads, preset.num_kv_heads, preset.head_dim, preset.num_layers, preset.dtype,
        )  # fmt: skip
        assert found.weight_bytes == pytest.approx(preset.weight_bytes, rel=0.001)
        assert found.name == "Meta-Llama-3-8B"
        assert found.windows == (None,)
    changed = workloads.model(f"{path},kv_dtype=int8,weight_bytes=1e9")
    assert (changed.cache_dtype, changed.weight_bytes) == ("int8", 10**9)
    other = tmp_path / "mine.json"
    other.write_text((path / "config.json").read_text())
    assert workloads.model(other).name == "mine"


FAMILIES = {  # model type: changes, and the layers that have a window
    "llama": ({}, 0), "mistral": ({}, 32), "qwen2": ({}, 0), "qwen3": ({"head_dim": 128, "hidden_size": 2048}, 0),
    "gemma": ({}, 0), "gemma2": ({}, 13), "gemma3_text": ({}, 22), "phi3": ({"sliding_window": 2047}, 32),
    "cohere2": ({"num_key_value_heads": 8}, 30), "gpt2": ({}, 0), "gpt_neox": ({}, 0), "falcon": ({}, 0),
    "stablelm": ({}, 0), "olmo2": ({}, 0), "mixtral": ({"num_hidden_layers": 4}, 0), "granite": ({}, 0),
    "starcoder2": ({}, 0), "opt": ({}, 0), "gptj": ({}, 0), "glm4": ({}, 0), "smollm3": ({}, 0),
    "qwen3_moe": ({"num_hidden_layers": 4}, 0), "gpt_oss": ({"num_hidden_layers": 4}, 2), "phimoe": ({}, 0),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    """Heads and head_dim against the layers that transformers makes, and the number of weights, all of it on no device.

    Both as it is saved, without what is usual, and with every key.
    """
    changes, window_layers = FAMILIES[family]
    config = CONFIG_MAPPING[family](**changes, dtype="bfloat16")
    config.save_pretrained(tmp_path / "saved")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps({**config.to_dict(), "dtype": "bfloat16"}, default=str))
    whole = workloads.model(tmp_path / "whole")
    assert (whole.num_layers, whole.dtype) == (config.num_hidden_layers, "bfloat16")
    assert whole.num_heads == config.num_attention_heads
    assert whole.num_kv_heads == kv_heads_of(config)
    assert whole.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert whole.window_layers == window_layers
    assert (whole.sliding_window is not None) == bool(window_layers)
    assert whole.softcap == (getattr(config, "attn_logit_softcapping", None) or None)
    if family not in ("phimoe", "gpt_oss"):
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config)
        weights = sum(p.numel() for p in made.parameters())
        assert whole.num_weights == pytest.approx(weights, rel=0.07)
    saved = None
    with suppress(Missing):  # what is usual for a family is not in the file: then it is named
        saved = read_or_missing(tmp_path / "saved")
    if saved is not None:
        assert (saved.num_heads, saved.num_kv_heads, saved.head_dim) == (
            whole.num_heads, whole.num_kv_heads, whole.head_dim,
        )  # fmt: skip


class Missing(Exception):
    """A configuration lacks a key, and the error says so."""


def read_or_missing(path: Path) -> workloads.Model:
    try:
        return workloads.model(path)
    except InvalidArgument as error:
        if " is missing: got " in str(error):
            raise Missing from error
        raise


def kv_heads_of(config: Any) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    heads = getattr(config, "num_attention_heads", None) or config.attention_heads
    return int(getattr(config, "num_key_value_heads", None) or heads)


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon"])
def test_heads_are_those_of_the_layers(family: str, tmp_path: Path) -> None:
    """Of a small model, by the shape of what it caches."""
    changes: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4}
    changes |= {"intermediate_size": 32} if family != "falcon" else {}
    changes |= {"num_key_value_heads": 2, "head_dim": 24} if family == "gemma2" else {}
    config = CONFIG_MAPPING[family](**changes)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    cached = made(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    made.save_pretrained(tmp_path / "model")
    found = workloads.model(tmp_path / "model")
    keys = cached.layers[0].keys
    assert (found.num_kv_heads, found.head_dim) == (keys.shape[1], keys.shape[3])
    assert found.dtype == str(keys.dtype).removeprefix("torch.")
    assert found.weight_bytes == pytest.approx(sum(p.numel() * 4 for p in made.parameters()), rel=0.05)


# Weights and dtypes


def test_weights_are_those_of_the_files(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    safetensors(path / "model.safetensors", {"a": ("BF16", 4000), "b": ("F32", 8)})
    assert workloads.model(path).weight_bytes == (path / "model.safetensors").stat().st_size
    for i in (1, 2):
        safetensors(path / f"model-{i}.safetensors", {"a": ("BF16", 100)})
    assert workloads.model(path).weight_bytes == sum(p.stat().st_size for p in path.glob("*.safetensors"))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345678}}))
    assert workloads.model(path).weight_bytes == 12345678
    assert workloads.model(path / "config.json").weight_bytes == 12345678
    for broken in ({}, {"metadata": {}}, {"metadata": {"total_size": "many"}}, {"metadata": {"total_size": -1}}):
        (path / "model.safetensors.index.json").write_text(json.dumps(broken))
        assert workloads.model(path).weight_bytes == sum(p.stat().st_size for p in path.glob("*.safetensors"))
    old = folder(tmp_path / "b")
    (old / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {"total_size": 777.0}}))
    assert workloads.model(old).weight_bytes == 777


@pytest.mark.parametrize(
    ("changes", "stored", "dtype"),
    [
        ({"torch_dtype": "float16"}, None, "float16"),
        ({"torch_dtype": None, "dtype": "bfloat16"}, None, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, None, "float16"),
        ({"torch_dtype": None}, "BF16", "bfloat16"),
        ({"torch_dtype": "auto"}, "F16", "float16"),
        ({"torch_dtype": None}, None, "float32"),
        ({"torch_dtype": None}, "I8", "float32"),
    ],
)
def test_the_dtype_is_the_configurations_or_that_of_the_weights(
    changes: dict[str, Any], stored: str | None, dtype: str, tmp_path: Path
) -> None:
    path = folder(tmp_path / "model", **changes)
    if stored:
        safetensors(path / "model.safetensors", {"a": (stored, 4000), "b": ("F32", 8)})
    assert workloads.model(path).dtype == dtype


def test_a_model_that_sees_or_hears_keeps_its_text_apart(tmp_path: Path) -> None:
    text = {**LLAMA, "torch_dtype": None}
    whole = {
        "model_type": "pixtral",
        "torch_dtype": "float16",
        "text_config": text,
        "vision_config": {"hidden_size": 3},
    }
    found = workloads.model(folder(tmp_path / "a", whole))
    assert (found.num_heads, found.num_kv_heads, found.dtype) == (32, 8, "float16")
    deeper = {"model_type": "omni", "thinker_config": whole}
    assert workloads.model(folder(tmp_path / "b", deeper)).num_layers == 32


@pytest.mark.parametrize(
    ("changes", "window", "layers"),
    [
        ({"sliding_window": 4096}, 4096, 32),
        ({"sliding_window": 4096, "use_sliding_window": False}, None, 0),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, 4096, 4),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 32}, None, 0),
        ({"sliding_window": 512, "sliding_window_pattern": 6}, 512, 27),
        ({"sliding_window": 512, "sliding_window_pattern": "LLLG"}, 512, 24),
        ({"sliding_window": 512, "model_type": "gemma2"}, 512, 16),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}, 512, 16),
        ({"sliding_window": 512, "layer_types": ["full_attention"] * 32}, None, 0),
    ],
)
def test_windows(changes: dict[str, Any], window: int | None, layers: int, tmp_path: Path) -> None:
    found = workloads.model(folder(tmp_path / "model", **changes))
    assert (found.sliding_window, found.window_layers) == (window, layers)


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_lora_rank": 512, "model_type": "deepseek_v3"},
            "multi-head latent attention (MLA, kv_lora_rank=512) of deep",
        ),
        ({"is_encoder_decoder": True}, "an encoder beside the decoder"),
        ({"layer_types": ["linear_attention", "full_attention"] * 16}, "layers of kind 'linear_attention'"),
        ({"layer_types": ["chunked_attention"] * 32}, "layers of kind 'chunked_attention'"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers of kind 'mamba'"),
        ({"num_key_value_heads": [8] * 31 + [4]}, "num_key_value_heads=[8, 8"),
        ({"head_dim": [128, 64]}, "head_dim=[128, 64]"),
        ({"v_head_dim": 128, "head_dim": 192}, "v_head_dim=128 beside 192"),
        ({"global_head_dim": 512, "head_dim": 256}, "global_head_dim=512 beside 256"),
        ({"swa_num_key_value_heads": 8, "num_key_value_heads": 4}, "swa_num_key_value_heads=8 beside 4"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers=15"),
        ({"attn_layer_period": 8}, "attn_layer_period=8"),
        ({"head_dim": 128, "per_layer_config": {"05": {"head_dim": 512}}}, "head_dim=512 in layer 05, 128 in others"),
        ({"attention_k_eq_v": True}, "attention_k_eq_v=True"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"block_configs": [{}]}, "block_configs"),
    ],
)
def test_models_that_have_no_one_cache_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = folder(tmp_path / "model", **changes)
    with pytest.raises(InvalidArgument) as error:
        workloads.model(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "expected" in str(error.value)


@pytest.mark.parametrize(
    "family", ["deepseek_v2", "deepseek_v3", "qwen3_next", "llama4_text", "gemma3n_text", "jamba", "t5",
               "mimo_v2_flash", "nemotron_h", "minimax", "falcon_h1", "mamba", "rwkv"],
)  # fmt: skip
def test_families_of_transformers_that_are_refused(family: str, tmp_path: Path) -> None:
    try:
        config = CONFIG_MAPPING[family]()
    except KeyError:
        pytest.skip(f"this transformers has no {family}")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    with pytest.raises(InvalidArgument, match="model: "):
        workloads.model(tmp_path)


def test_every_family_of_transformers_is_read_right_or_refused(tmp_path: Path) -> None:
    """All that generate text: what is read is what transformers calls so, and the error says what is in the way."""
    read, refused = [], []
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[family]()
        except Exception:  # of those that need arguments, or packages
            continue
        made = config.to_dict()
        (tmp_path / "config.json").write_text(json.dumps(made, default=str))
        try:
            found = workloads.model(tmp_path)
        except InvalidArgument as error:
            refused.append(f"{family}: {error}")
            continue
        read.append(family)
        text = config.get_text_config(decoder=True)
        heads = getattr(text, "num_attention_heads", None) or text.attention_heads
        assert found.num_heads == heads, family
        assert found.num_layers == text.num_hidden_layers, family
        assert found.num_kv_heads == kv_heads_of(text), family
        expected = getattr(text, "head_dim", None) or text.hidden_size // heads
        assert found.head_dim == expected, family
    assert len(read) > 50
    assert all("expected" in text for text in refused)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a JSON object"),
        ("[]", "got no JSON object"),
        ("{", "expected a JSON object"),
        ("\x00", "expected a JSON object"),
        ("[" * 100_000, "expected a JSON object"),
        ("{}", "num_attention_heads is missing: got nothing"),
        (json.dumps({**LLAMA, "num_attention_heads": "32"}), "num_attention_heads: got '32'"),
        (json.dumps({**LLAMA, "num_attention_heads": 0}), "num_attention_heads: got 0"),
        (json.dumps({**LLAMA, "num_attention_heads": True}), "num_attention_heads: got True"),
        (json.dumps({**LLAMA, "num_hidden_layers": 1e3}), "num_hidden_layers: got 1000.0"),
        (json.dumps({**LLAMA, "num_key_value_heads": 7}), "multiple of 7"),
        (json.dumps({**LLAMA, "torch_dtype": "float8_e4m3fn"}), "dtype: got 'float8_e4m3fn'"),
        (json.dumps({**LLAMA, "attn_logit_softcapping": "high"}), "softcap"),
        (json.dumps({k: v for k, v in LLAMA.items() if k != "vocab_size"}), "weight_bytes"),
        (json.dumps({"num_attention_heads": 4, "num_hidden_layers": 2}), "hidden_size is missing"),
    ],
)
def test_a_configuration_that_is_none(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidArgument) as error:
        workloads.model(tmp_path)
    assert message in str(error.value)


def test_what_there_is_not(tmp_path: Path) -> None:
    for spec in (tmp_path, str(tmp_path), tmp_path / "no.json", f"{tmp_path}/nothing", "no/such/folder", "config.json"):
        with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
            workloads.model(spec)
    for spec in ("no-such-preset", "x" * 5000, "\0", "a,b"):
        with pytest.raises(InvalidArgument, match="a folder with a config"):
            workloads.model(spec)


@pytest.mark.parametrize("seed", range(40))
def test_a_configuration_with_anything_in_it_is_read_or_refused(seed: int, tmp_path: Path) -> None:
    """Any values under any of the names: a model whose numbers are numbers, or an error that names the file."""
    rng = random.Random(seed)
    names = [
        "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers", "torch_dtype",
        "dtype",
        "sliding_window", "layer_types", "text_config", "attn_logit_softcapping", "vocab_size", "intermediate_size",
        "num_experts", "v_head_dim", "sliding_window_pattern", "max_window_layers", "use_sliding_window", "multi_query",
    ]  # fmt: skip
    values = [None, 0, -1, 1, 3, 8, 64, 1 << 70, 1.5, "", "bfloat16", [], [1, 2], [8, 8], {}, True, float("nan")]
    for i in range(30):
        made = {**LLAMA, **{rng.choice(names): rng.choice(values) for _ in range(rng.randrange(1, 5))}}
        path = folder(tmp_path / str(i), {})
        (path / "config.json").write_text(json.dumps(made))
        error = ""
        try:
            found = workloads.model(path)
        except InvalidArgument as refusal:
            error = str(refusal)
        if error:
            assert str(path) in error
        else:
            assert found.num_heads % found.num_kv_heads == 0
            assert found.token_bytes > 0
            assert found.window_layers <= found.num_layers


def test_everything_that_takes_a_model_takes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path / "Mine")
    assert pagedkern.recommend("chat", "24GB", model=path).num_blocks == 24 * 10**9 // (16 * 131072)
    for arguments in (["explain", "--memory", "24GB"], ["--dry-run", "--device", "cpu"]):
        assert main([*arguments, "--model", str(path)]) == 0
        assert "32 query heads, 8 KV heads" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "w.toml").write_text(
        f'name = "w"\nlimit = 100\nshares = [0, 1]\nmodel = "{path}"\n'
        "[prompt]\ntokens = [5, 9]\n[output]\ntokens = [5, 9]\n"
    )
    assert workloads.load(tmp_path / "w.toml").model == workloads.model(path)
    with pytest.raises(SystemExit):
        main(["explain", "--memory", "24GB", "--model", str(folder(tmp_path / "mla", kv_lora_rank=512))])
    assert "multi-head latent attention" in capsys.readouterr().err
