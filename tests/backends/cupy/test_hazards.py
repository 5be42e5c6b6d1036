"""What a right result does not tell: the kernels keep within their arrays, read nothing uninitialised and have no data
races, and neither the order of threads nor what memory held before changes a bit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pagedkern
from pagedkern.backends import probe
from tests.contract.cache_checks import check_copy, check_write
from tests.contract.checks import assert_exact, assert_same
from tests.contract.problems import Spec, build
from tests.contract.targets import EMULATED_CONFIG, Target
from tests.contract.test_clauses import SPECS
from tests.emulation.cuda_host import settings
from tests.emulation.cuda_host.compiler import Mode, compiler

pytestmark = pytest.mark.skipif(not probe("cupy").emulated, reason="the CUDA kernels are not emulated here")

TARGET = Target("cupy", "cpu", EMULATED_CONFIG["cupy"], emulated=True)
COPIES = ("auto", "async", "bulk", "plain")


def each_target() -> list[Target]:
    """Every way to shared memory, two and three stages deep."""
    ways = [{"copy": copy, "stages": stages} for copy, stages in zip(COPIES, (2, 3, 3, 2), strict=True)]
    return [replace(TARGET, config={**EMULATED_CONFIG["cupy"], **way}) for way in ways]


each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@each_spec
def test_attention_under_all_checks(spec: Spec) -> None:
    call = build(spec)
    with settings(mode="checked"):
        for order, target in zip(("forward", "backward", "2", "3"), each_target(), strict=True):
            with settings(order=order):
                assert_exact(call, target.attend(call))


@each_spec
def test_order_and_poison_change_nothing(spec: Spec) -> None:
    call = build(spec)
    want = TARGET.attend(call)
    for order, poison in (("forward", 0), ("backward", 0x3F), ("5", 0x7B), ("6", 0xFF)):
        with settings(order=order, poison=poison):
            assert_same(TARGET.attend(call), want, f"order {order}, poison {poison}: {spec}")


@pytest.mark.parametrize("mode", ["plain", "checked"])
@pytest.mark.parametrize("order", ["forward", "backward", "2"])
def test_small_operations_under_all_checks(mode: Mode, order: str) -> None:
    with settings(mode=mode, order=order):
        for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int8"):
            scales = {} if dtype in ("float32", "bfloat16") else {"k_scale": 0.5, "v_scale": 0.25}
            for layout in ("NHD", "HND", "odd"):
                spec = Spec(kv_dtype=dtype, head_dim=24, layout=layout)
                check_write(TARGET, spec, [5, -1, 17, 40], 4, **scales)
        caches = [torch.arange(1200.0).view(4, 300), torch.arange(56, dtype=torch.int8).view(8, 7)[::2]]
        check_copy(TARGET, caches, [0, 1, 2], [1, 2, 0])


def test_address_sanitizer_finds_nothing() -> None:
    """Every array of torch has red zones around it then."""
    command = [str(compiler()), "-print-file-name=libasan.so"]
    library = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("g++ comes without libasan")
    env = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "PAGEDKERN_HOST_MODE": "address"}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == list(SPECS)
    assert "AddressSanitizer" not in done.stderr


def main() -> None:
    """What runs under AddressSanitizer."""
    for name, spec in SPECS.items():
        for target in each_target():
            target.attend(build(spec))
        print(name, flush=True)  # noqa: T201
    pagedkern.copy_blocks([torch.ones(4, 300)], torch.tensor([0, 1]), torch.tensor([1, 0]), backend="cupy")
    check_write(TARGET, Spec(kv_dtype="int8"), [5, -1, 17, 40], 4, k_scale=0.5, v_scale=0.25)


if __name__ == "__main__":
    main()
