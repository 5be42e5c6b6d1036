"""The CPU backend: paged attention compiled by Numba for the processor at hand.

`jit` compiles, `disk` keeps what was compiled, `simd` and `memory` emit vectors and raw accesses, `convert` knows the
dtypes, `micro` holds the inner loops, `plan` cuts a call into work, `kernels` does it in the memory that `scratch`
lays out, `finish` turns sums into results, `states` joins partial ones, `pool` shares the work among threads, `store`
writes and copies, `launch` goes from tensors to all of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import ClassVar

from pagedkern.backends.base import AttentionCall, Config, CopyCall, MergeCall, Probe, Problem, WriteCall, foreign
from pagedkern.environment import compiler
from pagedkern.errors import InvalidArgument

MAX_SPAN = 1 << 30  # tokens; positions are int32, so twice this would be no cut at all


@dataclass(frozen=True)
class CpuConfig(Config):
    """What pays to tune. Results for one value are the same to the bit whatever else changes."""

    span: int = 1024  # tokens of one item of work where keys are split; a multiple of 64, at most MAX_SPAN

    def __post_init__(self) -> None:
        if type(self.span) is not int or not 64 <= self.span <= MAX_SPAN or self.span % 64:
            raise InvalidArgument(f"config.span: got {self.span!r}, expected a multiple of 64 from 64 to {MAX_SPAN}")


class CpuBackend:
    """Compiled kernels for any CPU that Numba compiles for. Stateless; may be used from several threads."""

    name: ClassVar[str] = "cpu"

    def __init__(self, isa: str = "native") -> None:
        """`isa`: a key of `jit.ISAS`; what is not "native" is there to be tested."""
        self._isa = isa

    def probe(self) -> Probe:
        """Import torch, Numba and the launcher: that packages are installed does not say that they run together.

        Takes 0.25 s the first time, and what torch takes if nobody has imported it.
        """
        for package in ("torch", "numba", f"{__name__}.launch"):
            try:
                import_module(package)
                if package == "numba" and (refusal := compiler.refusal()) is not None:
                    return Probe(False, refusal)
            except ModuleNotFoundError as error:
                return Probe(False, f"no module named {error.name!r}: pip install pagedkern[cpu]")
            except Exception as error:  # what a broken installation raises is anybody's guess
                why = f"{type(error).__name__}: {error}"
                return Probe(False, f"{package} cannot be imported ({why}): pip install --upgrade pagedkern[cpu]")
        return Probe(True, "this CPU, compiled by Numba")

    def supports(self, problem: Problem) -> str | None:
        """Everything on the device "cpu"."""
        return foreign(problem, "cpu")

    def configs(self, problem: Problem) -> Iterable[CpuConfig]:
        """Spans that cut the longest context into more than one piece, and the default."""
        spans = [span for span in (256, 512, 1024, 2048, 4096) if span <= max(1024, problem.max_seqlen_k)]
        return [CpuConfig(span) for span in spans]

    def default_config(self, problem: Problem) -> CpuConfig:
        """The same for every problem: results then do not depend on the batch."""
        return CpuConfig()

    def make_config(self, fields: Mapping[str, object]) -> CpuConfig:
        """The config with these fields."""
        return CpuConfig.from_dict(fields)

    def attention(self, call: AttentionCall, config: Config) -> None:
        """Compute what `paged_attention` documents into `call.out` and `call.lse`.

        Lengths are copied before anything else, so another thread may change them at any time. The block table is read
        where it stands, each id checked as it is used: whoever writes it during the call gets undefined numbers or a
        `BlockIndexError`, but no memory outside the cache is touched.

        Raises:
            BlockIndexError: a length or a used entry of the block table is out of range; `out` is then undefined.
        """
        _launch().attention(call, CpuConfig.expect(config).span, self._isa)

    def write_kv(self, call: WriteCall) -> None:
        """Scatter K and V into the slots that `slot_mapping` holds at the start of the call.

        Raises:
            BlockIndexError: a slot is out of range; nothing was written.
        """
        _launch().write_kv(call, self._isa)

    def copy_blocks(self, call: CopyCall) -> None:
        """Copy blocks in every cache.

        Raises:
            BlockIndexError: a block id is out of range, or a destination given twice; nothing was copied.
        """
        _launch().copy_blocks(call)

    def merge_states(self, call: MergeCall) -> None:
        """Join two partial results."""
        _launch().merge_states(call)


def _launch() -> ModuleType:
    from pagedkern.backends.cpu import launch  # imports torch and Numba: only when something is computed

    return launch
