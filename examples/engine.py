"""An inference engine in a hundred lines: requests arrive while others run, and tokens stream out as they are made.

In each step the scheduler says who computes what: one token for everybody who decodes, and as much of the waiting
prompts as the token budget leaves. The cache carries out the copies that this needs, the model runs over the packed
tokens of all of them, one token is drawn for each output. The two samples of the second request share the blocks of
its prompt.

Prints the steps and the texts. Then every text is computed once more, alone and without a cache, and must come out the
same, token for token.

    pip install 'pagedkern[cpu]'
    python examples/engine.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tiny_model import SYLLABLES, TinyModel, check, decode, draw, encode, new_cache, paged, recompute

from pagedkern import BlockAllocator
from pagedkern.scheduler import Batch, Request, Sample, Scheduler

BLOCK_SIZE, TOKEN_BUDGET = 4, 12
END = encode("ne")[0]  # the token that ends a text


class Arrival(NamedTuple):
    step: int
    prompt: str
    max_tokens: int
    samples: int = 1


ARRIVALS = [
    Arrival(1, "banana", 12),
    Arrival(3, "ta le no so mi re do va fa ze ga hi ke pu ro bu no da", 8, samples=2),
    Arrival(4, "ko li bi", 10),
]


class Engine:
    """Continuous batching of one model. `submit` at any time; `step` for as long as there is work."""

    def __init__(self, model: TinyModel, num_blocks: int, *, num_host_blocks: int = 0, policy: str = "auto") -> None:
        self.model = model
        self.cache = new_cache(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks)  # the memory
        allocator = BlockAllocator(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks)  # whose is which part of it
        self.scheduler = Scheduler(allocator, token_budget=TOKEN_BUDGET, policy=policy)  # who runs

    def submit(self, prompt: str, max_tokens: int, samples: int = 1) -> Request:
        return self.scheduler.add(encode(prompt), max_tokens=max_tokens, n=samples, eos=END)

    def step(self) -> tuple[Batch, list[Sample]]:
        """One forward pass. Returns the batch, each of whose outputs has a new token, and the samples that ended."""
        batch = self.scheduler.schedule()
        self.cache.apply(batch)
        tokens: list[int] = []
        if batch.num_tokens:
            inputs = self.cache.inputs(batch)
            logits = self.model(inputs.token_ids, inputs.positions, paged(self.cache, inputs))
            for row, sample in zip(logits[inputs.logits_rows], batch.outputs, strict=True):
                tokens.append(draw(row, seed_of(sample, len(sample.tokens))))
        return batch, self.scheduler.complete(batch, tokens)


def seed_of(sample: Sample, number: int) -> int:
    """What the sample's token of that number is drawn with, whatever batch it is in."""
    return (sample.request.id * 100 + sample.index) * 1000 + number


def serve(engine: Engine) -> Iterator[Request]:
    """Run until everything that arrives has been answered, and show it as it happens."""
    arrivals, number = list(ARRIVALS), 0
    while arrivals or engine.scheduler.has_work:
        number += 1
        while arrivals and arrivals[0].step <= number:
            _, prompt, max_tokens, samples = arrivals.pop(0)
            yield engine.submit(prompt, max_tokens, samples)
        batch, ended = engine.step()
        streamed = "  ".join(f"{name(s)}:{SYLLABLES[s.tokens[-1]]}" for s in batch.outputs)
        endings = "  ".join(f"{name(s)} ends ({s.finish_reason})" for s in ended)
        print(f"step {number:2}: {batch.num_seqs} rows, {batch.num_tokens:2} tokens | {streamed}  {endings}".rstrip())


def name(sample: Sample) -> str:
    return f"{sample.request.id}{'abc'[sample.index]}"


def expected(model: TinyModel, sample: Sample) -> list[int]:
    """The tokens of a sample by the book: everything from scratch for each of them, and no cache."""
    tokens: list[int] = []
    while len(tokens) < sample.request.max_tokens and END not in tokens:
        logits = recompute(model, [*sample.request.prompt, *tokens])
        tokens.append(draw(logits[-1], seed_of(sample, len(tokens))))
    return tokens


def main() -> None:
    engine = Engine(TinyModel(), num_blocks=32)
    requests = list(serve(engine))
    samples = [sample for request in requests for sample in request.samples]
    print()
    for sample in samples:
        print(f"{name(sample)}: {decode(sample.request.prompt)} > {decode(sample.tokens)}")
    print()
    same = all(sample.tokens == expected(engine.model, sample) for sample in samples)
    count = sum(len(sample.tokens) for sample in samples)
    check(same, f"{count} tokens of {len(samples)} texts equal those of the model without a cache")
    allocator = engine.scheduler.allocator
    check(allocator.num_free_blocks == allocator.num_blocks, "every block is free again")


if __name__ == "__main__":
    main()
