"""What `generate` gives back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """One sample of one prompt."""

    prompt: int  # index of its prompt
    tokens: list[int]  # the new ones, the end-of-text token included
    text: str | None  # None without a tokenizer
    finish_reason: str  # "stop": an end-of-text token; "length": max_new_tokens


@dataclass(frozen=True)
class GenerationResult:
    """The completions of all prompts, what they took, and what they would have taken without paging.

    `bytes_contiguous` is what a contiguous cache reserves for the same batch: one rectangle of as many rows as samples,
    each as long as the longest prompt and `max_new_tokens`, as `transformers.StaticCache` does.
    """

    completions: list[list[Completion]]  # `[prompt][sample]`
    prompt_tokens: int  # of all prompts; each is computed once for all of its samples, but for preemptions
    new_tokens: int  # of all samples
    prefill_seconds: float  # forward passes that computed prompts, or computed tokens again
    decode_seconds: float  # those that computed one new token for each sample, and nothing else
    decode_tokens: int  # tokens that came out of the latter
    block_size: int  # tokens
    blocks_used: int  # most blocks in use at one time
    blocks_shared: int  # most blocks that more than one sample owned at one time, while writing
    blocks_saved: int  # how many more blocks the samples would have owned at one time without sharing, at most
    bytes_per_block: int  # K and V of all layers
    bytes_contiguous: int
    preempted_by_swap: int  # how often a prompt with its samples had to go to host memory
    preempted_by_recomputation: int  # how often one had to give its blocks up
    tokens_recomputed: int  # tokens computed again for that reason

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all samples a second, prefill included."""
        return self.new_tokens / (self.prefill_seconds + self.decode_seconds)

    @property
    def bytes_used(self) -> int:
        """Bytes of `blocks_used` blocks."""
        return self.blocks_used * self.bytes_per_block

    @property
    def tokens(self) -> list[list[list[int]]]:
        """The new token ids: `[prompt][sample][token]`."""
        return [[completion.tokens for completion in samples] for samples in self.completions]

    @property
    def texts(self) -> list[list[str]]:
        """The new text: `[prompt][sample]`. Empty strings without a tokenizer."""
        return [[completion.text or "" for completion in samples] for samples in self.completions]
