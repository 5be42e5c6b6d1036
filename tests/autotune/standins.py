"""Backends for tests of the tuner: the reference with something changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from pagedkern.backends.base import AttentionCall, Config, Probe, Problem
from pagedkern.backends.reference import ReferenceBackend, ReferenceConfig
from pagedkern.errors import InvalidArgument


@dataclass(frozen=True)
class TunableConfig(Config):
    tile: int = 64


class Tunable(ReferenceBackend):
    """Right, and with something to tune."""

    name: ClassVar[str] = "tunable"

    def configs(self, problem: Problem) -> Iterable[Config]:
        return [TunableConfig(32), TunableConfig(64), TunableConfig(128)]

    def default_config(self, problem: Problem) -> Config:
        return TunableConfig()

    def make_config(self, fields: Mapping[str, object]) -> Config:
        if set(fields) - {"tile"}:
            raise InvalidArgument(f"config: got {sorted(fields)}, accepted is tile")
        return TunableConfig(**fields)  # type: ignore[arg-type]

    def attention(self, call: AttentionCall, config: Config) -> None:
        super().attention(call, ReferenceConfig())


class OffByLittle(Tunable):
    """Wrong in one element, by a thousandth."""

    def attention(self, call: AttentionCall, config: Config) -> None:
        super().attention(call, config)
        call.out[-1, -1, -1] += 1e-3


class WritesNothing(Tunable):
    def attention(self, call: AttentionCall, config: Config) -> None:
        pass


class SkipsARow(Tunable):
    """Leaves the last row as it was."""

    def attention(self, call: AttentionCall, config: Config) -> None:
        before = call.out[-1].clone()
        super().attention(call, config)
        call.out[-1] = before


class ReadsPastTheEnd(Tunable):
    """Takes each sequence to end with its last block."""

    def attention(self, call: AttentionCall, config: Config) -> None:
        block_size = call.k_cache.shape[1]
        call.seq_lens = (call.seq_lens + block_size - 1) // block_size * block_size
        super().attention(call, config)


class Raises(Tunable):
    def attention(self, call: AttentionCall, config: Config) -> None:
        raise RuntimeError("illegal memory access\nand more on a second line")


class Picky(Tunable):
    """Refuses small blocks."""

    def supports(self, problem: Problem) -> str | None:
        return "blocks are smaller than 32 tokens" if problem.block_size < 32 else None


class Absent(Tunable):
    def probe(self) -> Probe:
        return Probe(False, "no module named 'absent': pip install pagedkern[absent]")


class Emulated(Tunable):
    def probe(self) -> Probe:
        return Probe(True, "an interpreter", emulated=True)
