"""The host emulation of CUDA: right kernels give right results in every order, and each wrong one is reported."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulation.cuda_host import EmulationError, compile_kernels, launch, settings
from tests.emulation.cuda_host.compiler import CompileError, Mode, compiler
from tests.emulation.cuda_host.launcher import extent

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ 12 or later on the PATH")

SOURCE = Path(__file__).parent / "test_kernels.cu"
NAMES = ["block_sum", "reverse", "votes", "last_block", "shared_atomics", "pipeline", "bulk", "multiply", "multiply8"]
NAMES += ["wrong", "named", "deep", "scoped<int>", "scoped<float>"]
MODES: list[Mode] = ["plain", "checked"]
ORDERS = ["forward", "backward", "2", "3", "4"]


def run(name: str, *args: Any, threads: int = 32, blocks: int = 1, shared: int = 0, mode: Mode = "plain") -> None:
    """Launch a kernel of SOURCE; tensors are passed as pointers, numbers as int."""
    kernel = compile_kernels(SOURCE, NAMES, mode=mode)[name]
    arrays = [a for a in args if isinstance(a, torch.Tensor)]
    values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in args]
    launch(kernel, (blocks, 1, 1), (threads, 1, 1), shared, values, [extent(a) for a in arrays])


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest.fixture(params=ORDERS, autouse=True)
def order(request: pytest.FixtureRequest) -> Any:
    with settings(order=request.param):
        yield request.param


def any_order(test: Any) -> Any:
    """Runs once: it goes through the orders by itself, or none matters."""
    return pytest.mark.parametrize("order", ["forward"], indirect=True)(test)


@pytest.mark.parametrize("threads", [32, 128, 1024])
def test_sum_over_a_block(mode: Mode, threads: int) -> None:
    x, s = torch.arange(777).float(), torch.zeros(1)
    run("block_sum", x, 777, s, threads=threads, mode=mode)
    assert s.item() == 777 * 776 / 2


@any_order
def test_portable_fibers() -> None:
    test_sum_over_a_block("portable", 1024)
    with pytest.raises(EmulationError, match="bytes of stack"):
        run("deep", torch.zeros(1, dtype=torch.int32), mode="portable")
    test_barriers_order_shared_memory("portable")


def test_barriers_order_shared_memory(mode: Mode) -> None:
    x, y = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    run("reverse", x, y, 0, threads=128, mode=mode)
    assert torch.equal(y, (2 * x.flip(0) + 1).view(64, 2).flip(1).flatten())


def test_votes(mode: Mode) -> None:
    ballots, block = torch.zeros(96, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    run("votes", ballots, block, threads=96, mode=mode)
    words = [sum((32 * w + i) % 3 == 0 and 1 << i for i in range(32)) for w in range(3)]
    expected = torch.tensor(words).repeat_interleave(32)
    expected[:8] ^= torch.tensor([0x55, 0xAA] * 4)
    assert torch.equal(ballots, expected.to(torch.int32))
    assert block[:3].tolist() == [1, 0, 48]
    assert block[3].item() == 2 or block[3].item() == 3  # each warp writes what it saw
    assert block[4].item() == 31 + 3200


def test_last_block_sees_all(mode: Mode) -> None:
    counter, sums, total = torch.zeros(1, dtype=torch.int32), torch.zeros(9), torch.zeros(1)
    run("last_block", counter, sums, total, blocks=9, threads=64, mode=mode)
    assert total.item() == 45


def test_shared_atomics(mode: Mode) -> None:
    out = torch.zeros(4, dtype=torch.int32)
    run("shared_atomics", out, threads=128, mode=mode)
    assert out.tolist() == [256, 127, 256, 9]


def test_named_barriers(mode: Mode) -> None:
    x, y = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    run("named", x, y, 0, threads=64, mode=mode)
    assert torch.equal(y, x.flip(0))


@pytest.mark.parametrize("name", ["scoped<int>", "scoped<float>"])
def test_shared_variables_of_templates(mode: Mode, name: str) -> None:
    """Each instance has its own, and each block finds it uninitialised."""
    x = torch.zeros(64, dtype=torch.int32 if name == "scoped<int>" else torch.float32)
    run(name, x, threads=32, blocks=2, mode=mode)
    assert torch.equal(x, torch.arange(64).view(2, 32).roll(1, 1).flatten().to(x.dtype))


# ---- copies that arrive late


def pipeline(name: str, threads: int, faults: int, mode: Mode, tiles: int = 7) -> bool:
    """Whether the results are right."""
    x, y = torch.arange(tiles * 128, dtype=torch.int32), torch.full((tiles * 128,), -7, dtype=torch.int32)
    run(name, x, y, tiles, faults, threads=threads, shared=3 * 512, mode=mode)
    expected = 2 * x
    if name == "pipeline":
        expected.view(tiles, 128)[:, -2:] = 0  # lane 31 fetches 8 bytes of its 16
    return torch.equal(y, expected)


@pytest.mark.parametrize(("name", "threads"), [("pipeline", 32), ("bulk", 64)])
def test_pipeline(mode: Mode, name: str, threads: int) -> None:
    assert pipeline(name, threads, 0, mode)


@any_order
@pytest.mark.parametrize(
    ("name", "threads", "faults"),
    [("pipeline", 32, f) for f in (1, 2, 4, 8, 16)] + [("bulk", 64, f) for f in (1, 2, 4, 8, 16, 32)],
)
def test_broken_pipeline(mode: Mode, name: str, threads: int, faults: int) -> None:
    """A missing or wrong wait gives wrong results, a deadlock or a report in at least one order."""
    assert not right(name, threads, faults, mode)


def right(name: str, threads: int, faults: int, mode: Mode) -> bool:
    for order in ORDERS:
        try:
            with settings(order=order):
                if not pipeline(name, threads, faults, mode):
                    return False
        except EmulationError:
            return False
    return True


@any_order
def test_tile_in_flight_is_named() -> None:
    with pytest.raises(
        EmulationError, match=r"reads byte \d+ of dynamic.*test_kernels\.cu:\d+.*copy to it is in flight"
    ):
        pipeline("pipeline", 32, 1, "checked")


@any_order
def test_deadlock_names_threads_and_places() -> None:
    with pytest.raises(EmulationError, match=r"deadlock: .*threads .* wait at an mbarrier"):
        pipeline("bulk", 64, 8, "plain")


# ---- missing barriers


@any_order
@pytest.mark.parametrize("fault", [1, 2, 4])
def test_missing_barrier_shows_in_some_order(fault: int) -> None:
    x = torch.arange(128, dtype=torch.int32)
    wrong = set()
    for order in ("forward", "backward"):
        y = torch.zeros(128, dtype=torch.int32)
        with settings(order=order):
            run("reverse", x, y, fault, threads=128)
        if not torch.equal(y, (2 * x.flip(0) + 1).view(64, 2).flip(1).flatten()):
            wrong.add(order)
    assert wrong


@pytest.mark.parametrize("fault", [1, 2, 4])
def test_missing_barrier_is_a_data_race_in_every_order(fault: int) -> None:
    x, y = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    with pytest.raises(
        EmulationError, match=r"data race: thread \d+ \w+ byte \d+ of static.*at test_kernels.cu:\d+|not init"
    ):
        run("reverse", x, y, fault, threads=128, mode="checked")


def test_missing_named_barrier_is_a_data_race() -> None:
    x, y = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    with pytest.raises(EmulationError, match=r"data race|not initialised"):
        run("named", x, y, 1, threads=64, mode="checked")


@any_order
def test_uninitialised_memory_changes_with_the_poison() -> None:
    results = []
    for poison in (0xFF, 0x3F):
        x = torch.zeros(64, dtype=torch.int32)
        with settings(poison=poison):
            run("wrong", x, 7, threads=64, shared=256)
        results.append(x)
    assert not torch.equal(*results)


@any_order
def test_uninitialised_registers_are_not_left_to_chance() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    run("wrong", x, 24, threads=64)
    assert x.unique().tolist() == [-0x01010102]  # 0xFE in every byte


# ---- reports

REPORTS = {
    0: r"returns, but threads? .* at the barrier at test_kernels.cu|is at the barrier at .*, but threads? .* returned",
    1: r"is at the barrier at test_kernels.cu:\d+, but threads? .* at that at test_kernels.cu:\d+",
    2: r"warp collective at .*, but threads? .* at a different one",
    3: r"warp collective at .* with mask 0000000f, which leaves it out",
    4: r"returns, but threads? .* wait for it|lanes 00000002 do not exist or returned",
    5: r"lane \d+ reads lane 20, not in its mask",
    6: r"deadlock: .*|returns, but .* wait for it|do not exist or returned",
    11: r"dynamic shared memory were written",
    13: r"divides an integer by zero",
    14: r"touches memory at 0x8",
    15: r"assertion failed at .*test_kernels.cu:\d+: i < 50",
    16: r"deadlock: threads 0-63 wait at a named barrier",
    17: r"cp.async: destination .* not aligned to 16",
    18: r"cp.async: .* is not in shared memory",
    19: r"ldmatrix: the row of lane \d+, .*, is not aligned",
}
CHECKED_REPORTS = {
    7: r"reads byte \d+ of static shared memory at test_kernels.cu:\d+, which is not initialised",
    8: r"reads byte 0 of dynamic shared memory at test_kernels.cu:\d+, which is not initialised",
    9: r"thread 63 .*writes 4 bytes at .* at test_kernels.cu:\d+, outside .*, 0 bytes after array 0 of 256 bytes",
    10: r"thread 0 .*reads 4 bytes at .*, outside .*, 4 bytes before array 0",
    11: r"writes 4 bytes at .* outside of the arrays",
    12: r"an address that is not aligned to its type at test_kernels.cu:\d+",
    20: r"overflows a signed integer by addition at test_kernels.cu:\d+",
    21: r"indexes an array out of its bounds at test_kernels.cu:\d+",
    22: r"shifts by too many bits, .* at test_kernels.cu:\d+",
}


@pytest.mark.parametrize("fault", REPORTS)
def test_report(fault: int) -> None:
    with pytest.raises(EmulationError, match=REPORTS[fault]):
        run("wrong", torch.zeros(64, dtype=torch.int32), fault, threads=64, shared=256)


@pytest.mark.parametrize("fault", CHECKED_REPORTS)
def test_report_of_the_checked_mode(fault: int) -> None:
    with pytest.raises(EmulationError, match=CHECKED_REPORTS[fault]):
        run("wrong", torch.zeros(64, dtype=torch.int32), fault, threads=64, shared=256, mode="checked")


@any_order
def test_stack_overflow_is_reported_and_survived(mode: Mode) -> None:
    with pytest.raises(EmulationError, match="bytes of stack"):
        run("deep", torch.zeros(1, dtype=torch.int32), mode=mode)
    test_sum_over_a_block(mode, 64)


@any_order
def test_compile_error_shows_the_message(tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void f() { undeclared(); }')
    with pytest.raises(CompileError, match="undeclared"):
        compile_kernels(tmp_path / "bad.cu", ["f"])


@any_order
def test_address_sanitizer_names_the_line() -> None:
    """In a process of its own, which has to load its library first; memory of torch then has red zones around it."""
    library = subprocess.run(
        [str(compiler()), "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("g++ comes without libasan")
    code = """if True:
        import ctypes
        from pathlib import Path
        from tests.emulation.cuda_host import compile_kernels, launch
        kernel = compile_kernels(Path("tests/emulation/cuda_host/test_kernels.cu"), ["wrong"], mode="address")["wrong"]
        array = (ctypes.c_int * 64)()
        for fault in 23, 9:
            print("fault", fault, flush=True)
            arguments = [ctypes.c_void_p(ctypes.addressof(array)), ctypes.c_int(fault)]
            launch(kernel, (1, 1, 1), (64, 1, 1), 256, arguments)
    """
    # Python's own small allocations go through malloc too, so that each has red zones
    env = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "fault 23\nfault 9\n"
    assert "heap-buffer-overflow" in done.stderr
    assert "test_kernels.cu" in done.stderr


# ---- matrices and numbers

DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", [0, 1])
def test_mma(mode: Mode, kind: int) -> None:
    torch.manual_seed(kind)
    a, b = torch.randn(16, 48).to(DTYPES[kind]), torch.randn(48, 8).to(DTYPES[kind])
    d = torch.full((16, 8), torch.nan)
    run("multiply", a, b, d, 48, kind, mode=mode)
    torch.testing.assert_close(d.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_mma_of_k_8(kind: int) -> None:
    torch.manual_seed(kind)
    dtype = [*DTYPES, torch.float32][kind]
    a, b = torch.randn(16, 8).to(dtype), torch.randn(8, 8).to(dtype)
    d = torch.full((16, 8), torch.nan)
    run("multiply8", a, b.T.contiguous(), d, kind)
    if kind == 2:
        a, b = ((x.view(torch.int32) & -8192).view(torch.float32) for x in (a, b))
    torch.testing.assert_close(d.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
