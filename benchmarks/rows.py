"""The rows of an attention group: every backend and configuration, every peer, on one problem."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import pagedkern
from benchmarks import peers, shapes
from benchmarks.meter import Meter
from benchmarks.timer import Timer
from pagedkern.backends import base, names, probe
from pagedkern.backends import load as load_backend
from pagedkern.gpucheck.problems import CallShape, CallTensors


@dataclass(frozen=True)
class Row:
    """Who computes which problem, and how."""

    shape: CallShape
    contender: str  # a backend or a peer
    config: str | None = None  # of a backend, its fields as JSON; None: its default

    @property
    def name(self) -> str:
        fields = json.loads(self.config or "{}")
        return " ".join([self.contender, *(f"{key}={value}" for key, value in fields.items())])

    @contextmanager
    def timer(self, problem: CallTensors, meter: Meter) -> Iterator[Timer]:
        """One call of the contender; the test is skipped, with the reason, if it cannot take part."""
        try:
            timer = self._peer(problem, meter) if self.contender in peers.NAMES else self._backend(problem, meter)
        except peers.Missing as why:
            pytest.skip(f"{self.contender}: {why}")
        yield timer
        getattr(timer, "close", lambda: None)()

    def _peer(self, problem: CallTensors, meter: Meter) -> Timer:
        return peers.attention(self.contender, problem, meter)

    def _backend(self, problem: CallTensors, meter: Meter) -> Timer:
        require_backend(self.contender)
        if (reason := load_backend(self.contender).supports(as_asked(self.shape, meter.device))) is not None:
            raise peers.Missing(reason)
        q, options = problem.args["q"], {"backend": self.contender, "config": json.loads(self.config or "null")}
        out = q.new_empty(*q.shape[:2], self.shape.dim_v)
        return meter.timer(partial(pagedkern.paged_attention, **problem.args, **options, out=out))


def require_backend(name: str) -> None:
    """Raise `Missing` if a backend cannot run here, or would be emulated."""
    found = probe(name)
    if not found.available or found.emulated:
        raise peers.Missing(found.reason if not found.available else "emulated on this machine")


def of(shape: CallShape, device: str, configs: str) -> list[Any]:
    """The rows of one problem as parameters of a test. `configs`: "default", or "all" of each backend."""
    rows = [Row(shape, name) for name in names()]
    if configs == "all":
        rows += [Row(shape, name, config) for name in names() for config in _others(name, shape, device)]
    rows += [Row(shape, name) for name in peers.NAMES]
    return [pytest.param(row, id=f"{shapes.title(shape)}-{row.name}") for row in rows]


def _others(name: str, shape: CallShape, device: str) -> list[str]:
    """The configurations that are not the default, as JSON."""
    backend, problem = load_backend(name), as_asked(shape, device)
    if not probe(name).available or probe(name).emulated or backend.supports(problem) is not None:
        return []
    default = backend.default_config(problem)
    return [json.dumps(config.to_dict()) for config in backend.configs(problem) if config != default]


def as_asked(shape: CallShape, device: str) -> base.Problem:
    """The problem as a backend sees it."""
    queries = shape.query_lens or (1,) * len(shape.seq_lens)
    return base.Problem(
        device=device, q_dtype=shape.q_dtype, kv_dtype=shape.kv_dtype or shape.q_dtype, num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, head_dim_v=shape.dim_v, block_size=shape.block_size,
        num_seqs=len(shape.seq_lens), num_tokens=sum(queries), max_seqlen_q=max(queries),
        max_seqlen_k=-(-max(shape.seq_lens) // shape.block_size) * shape.block_size,
    )  # fmt: skip


class Problems:
    """The tensors of the problem that was asked for last: rows of one group follow each other."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._last: CallTensors | None = None

    def __call__(self, shape: CallShape) -> CallTensors:
        if self._last is None or self._last.shape != shape:
            self._last = None  # its memory first
            if self._device == "cuda":
                torch.cuda.empty_cache()
            self._last = CallTensors(shape, self._device)
        return self._last
