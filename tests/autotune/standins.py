"""Backends for tests of the tuner: the reference with something changed."""

from __future__ import annotations

import os
import signal
import time
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
            raise InvalidArgument(f"config: got {sorted(fields)}, expected tile")
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


class Crashes(Tunable):
    """With a signal, as a kernel that writes where it must not."""

    def attention(self, call: AttentionCall, config: Config) -> None:
        if config == TunableConfig(32):
            os.kill(os.getpid(), signal.SIGSEGV)
        super().attention(call, config)


class Exits(Tunable):
    def attention(self, call: AttentionCall, config: Config) -> None:
        os._exit(3)


class Hangs(Tunable):
    def attention(self, call: AttentionCall, config: Config) -> None:
        if config == TunableConfig(128):
            time.sleep(1000)
        super().attention(call, config)


class HangsLater(Tunable):
    """When it has been right often enough to be trusted."""

    calls: ClassVar[int] = 0

    def attention(self, call: AttentionCall, config: Config) -> None:
        if config == TunableConfig(128):
            HangsLater.calls += 1
            if HangsLater.calls > 4:
                time.sleep(1000)
        super().attention(call, config)


class EatsMemory(Tunable):
    """Takes what it gets, and does not give it back."""

    eaten: ClassVar[list[bytearray]] = []

    def attention(self, call: AttentionCall, config: Config) -> None:
        if config == TunableConfig(32):
            for _ in range(400):
                self.eaten.append(bytearray(1 << 26))
        super().attention(call, config)


class WrongAtFullBlocks(Tunable):
    """Plausible: a value that is off only where a sequence ends with its block."""

    def attention(self, call: AttentionCall, config: Config) -> None:
        super().attention(call, config)
        full = (call.seq_lens % call.k_cache.shape[1] == 0) & (call.seq_lens > 0)
        if call.cu_seqlens_q is None:
            call.out[full] *= 1.01


class Prints(Tunable):
    def attention(self, call: AttentionCall, config: Config) -> None:
        os.write(1, b"a kernel that prints\n")
        super().attention(call, config)


class NoWindow(Tunable):
    """Looks at every token, whatever the window."""

    def attention(self, call: AttentionCall, config: Config) -> None:
        call.sliding_window = None
        super().attention(call, config)


class NoSoftcap(Tunable):
    def attention(self, call: AttentionCall, config: Config) -> None:
        call.softcap = None
        super().attention(call, config)
