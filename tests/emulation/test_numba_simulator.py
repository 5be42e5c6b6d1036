"""The extension of Numba's simulator against the definitions of the CUDA C++ Programming Guide."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    pytest.skip("Numba's simulator is off: there is a GPU", allow_module_level=True)

from numba import cuda, float32, int8, int32, int64, types, uint8, uint16, void

from pagedkern.backends.numba_cuda.device import (
    bits_of_float,
    commit_copies,
    copy_async,
    copy_vector,
    float_from_bits,
    float_from_half,
    wait_copies,
    wait_copies_but_last,
)
from tests.emulation.simulated_blocks import DivergentBarrier, running

ALL = 0xFFFFFFFF
P = types.CPointer


def of_each_thread(function: Callable[[int], Any], threads: int = 32, grid: int = 1) -> list[int]:
    """What `function(thread)` returns in each thread of each block."""

    @cuda.jit(void(P(int64)))
    def kernel(out: Any) -> None:
        thread = cuda.threadIdx.x
        out[cuda.blockIdx.x * threads + thread] = function(thread)

    out = torch.full((grid * threads,), -99, dtype=torch.int64)
    kernel[grid, threads](out)
    return out.tolist()


# ---- Warps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shuffle", "operand", "source"),
    [
        ("shfl_sync", 5, lambda lane: 5),
        ("shfl_sync", 37, lambda lane: 5),
        ("shfl_xor_sync", 4, lambda lane: lane ^ 4),
        ("shfl_xor_sync", 31, lambda lane: lane ^ 31),
        ("shfl_up_sync", 3, lambda lane: lane - 3 if lane >= 3 else lane),
        ("shfl_down_sync", 3, lambda lane: lane + 3 if lane + 3 < 32 else lane),
    ],
)
def test_shuffles(shuffle: str, operand: int, source: Callable[[int], int]) -> None:
    """Each lane gets the value of its source lane, in each of two warps."""
    got = of_each_thread(lambda thread: getattr(cuda, shuffle)(ALL, 100 * thread, operand), threads=64)
    assert got == [100 * (32 * (t // 32) + source(t % 32)) for t in range(64)]


def test_a_shuffle_by_lane() -> None:
    got = of_each_thread(lambda thread: cuda.shfl_sync(ALL, thread, (thread * 7) % 32))
    assert got == [t * 7 % 32 for t in range(32)]


def test_votes() -> None:
    assert of_each_thread(lambda t: cuda.ballot_sync(ALL, t % 3 == 0)) == [sum(1 << n for n in range(0, 32, 3))] * 32
    assert of_each_thread(lambda t: int(cuda.any_sync(ALL, t == 40)), 64) == [0] * 32 + [1] * 32
    assert of_each_thread(lambda t: int(cuda.all_sync(ALL, t < 40)), 64) == [1] * 32 + [0] * 32
    assert of_each_thread(lambda t: int(cuda.eq_sync(ALL, t // 32)), 64) == [1] * 64
    assert of_each_thread(lambda t: int(cuda.eq_sync(ALL, t)), 32) == [0] * 32


def test_part_of_a_warp() -> None:
    """Lanes of a mask exchange while others do something else, and a block may end in the middle of a warp."""

    def halves(thread: int) -> Any:
        if thread < 16:
            return cuda.shfl_xor_sync(0xFFFF, thread, 1)
        return cuda.ballot_sync(0xFFFF0000, thread % 2)

    assert of_each_thread(halves) == [t ^ 1 for t in range(16)] + [0xAAAA0000] * 16
    assert of_each_thread(lambda t: cuda.shfl_xor_sync(ALL, t, 1), threads=8) == [t ^ 1 for t in range(8)]


def test_a_reduction_over_a_warp() -> None:
    def total(thread: int) -> int:
        x = thread
        for lanes in (16, 8, 4, 2, 1):
            x += cuda.shfl_xor_sync(ALL, x, lanes)
        return x

    assert of_each_thread(total) == [496] * 32


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: cuda.shfl_xor_sync(0xFF, t, 1),  # most lanes are not in the mask they give
        lambda t: cuda.shfl_xor_sync(ALL, t, 1) if t < 31 else 0,  # one lane of the mask does not come
        lambda t: cuda.shfl_sync(0xFFFF, t, 20) if t < 16 else 0,  # read from a lane that takes no part
        lambda t: cuda.shfl_sync(ALL, t, 0) if t < 16 else cuda.shfl_sync(ALL, t, 0),  # noqa: RUF034
        lambda t: cuda.syncwarp() if t != 3 else 0,
    ],
)
def test_shuffles_that_are_undefined(wrong: Callable[[int], Any]) -> None:
    with pytest.raises(DivergentBarrier):
        of_each_thread(wrong)


# ---- Blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["forward", "backward", "random"])
def test_a_barrier_orders_shared_memory(order: str) -> None:
    def reverse(thread: int) -> Any:
        seen = cuda.shared.array(64, int32)
        for step in range(3):
            seen[thread] = 10 * thread + step
            cuda.syncthreads()
            value = seen[63 - thread]
            cuda.syncthreads()
        return value

    with running(order=order):
        assert of_each_thread(reverse, threads=64, grid=2) == [10 * (63 - t) + 2 for t in range(64)] * 2


def test_without_the_barrier_the_order_shows() -> None:
    def race(thread: int) -> Any:
        seen = cuda.shared.array(32, int32)
        seen[thread] = thread
        return seen[31 - thread]

    results = []
    for order in ("forward", "backward"):
        with running(order=order):
            results.append(of_each_thread(race))
    assert results[0] != results[1]


def test_barriers_with_a_vote() -> None:
    assert of_each_thread(lambda t: cuda.syncthreads_or(t == 50), 64) == [1] * 64
    assert of_each_thread(lambda t: cuda.syncthreads_or(t == 64), 64) == [0] * 64
    assert of_each_thread(lambda t: cuda.syncthreads_and(t < 63), 64) == [0] * 64
    assert of_each_thread(lambda t: cuda.syncthreads_count(t % 4), 64) == [48] * 64


def test_a_barrier_that_one_thread_leaves_out() -> None:
    def leave(thread: int) -> Any:
        if thread == 7:
            return 0
        return cuda.syncthreads()

    with pytest.raises(DivergentBarrier, match="31 of 32 threads wait for a barrier that others have left out"):
        of_each_thread(leave)


def test_threads_at_different_barriers() -> None:
    def split(thread: int) -> None:
        if thread < 16:
            cuda.syncthreads()
        else:
            cuda.syncthreads()

    with pytest.raises(DivergentBarrier, match="different barriers"):
        of_each_thread(split)


def test_after_an_error_kernels_run_again() -> None:
    def fail(thread: int) -> Any:
        cuda.syncthreads()
        raise ZeroDivisionError(thread)

    with pytest.raises(ZeroDivisionError):
        of_each_thread(fail)
    assert of_each_thread(lambda t: cuda.syncthreads_count(True)) == [32] * 32


def test_shared_and_local_memory_begin_as_garbage() -> None:
    seen: list[float] = []

    def look(thread: int) -> int:
        seen.append(cuda.shared.array(4, float32)[0])
        seen.append(cuda.local.array(4, float32)[3])
        return 0

    of_each_thread(look, threads=2)
    assert all(map(math.isnan, seen))


# ---- Memory ----------------------------------------------------------------------------------------------------------


def launch(function: Callable[..., None], kind: Any, tensor: Tensor) -> None:
    cuda.jit(void(P(kind)))(function)[1, 1](tensor)


def test_a_pointer_begins_at_its_tensor_and_ends_with_the_storage() -> None:
    whole = torch.arange(12, dtype=torch.int32)

    def write(x: Any) -> None:
        x[0], x[7] = 100, 107

    launch(write, int32, whole[4:6])
    assert whole.tolist() == [0, 1, 2, 3, 100, 5, 6, 7, 8, 9, 10, 107]

    def beyond(x: Any) -> None:
        x[8] = 0

    with pytest.raises(IndexError):
        launch(beyond, int32, whole[4:6])


def test_vectors() -> None:
    x = torch.arange(32, dtype=torch.int16)
    x = x[-x.data_ptr() // 2 % 8 :]  # aligned

    def move(x: Any) -> None:
        copy_vector(x, 16, x, 8, 8)

    launch(move, uint16, x)
    assert x[16:24].tolist() == x[8:16].tolist()


@pytest.mark.parametrize(("offset", "to", "of", "count"), [(0, 4, 8, 8), (0, 8, 2, 4), (1, 8, 0, 8), (4, 8, 0, 8)])
def test_vectors_must_be_aligned(offset: int, to: int, of: int, count: int) -> None:
    x = torch.zeros(64, dtype=torch.int16)
    x = x[-x.data_ptr() // 2 % 8 + offset :]

    def move(x: Any) -> None:
        copy_vector(x, to, x, of, count)

    with pytest.raises(ValueError, match="a vector of"):
        launch(move, uint16, x)


def test_vectors_end_with_their_array() -> None:
    def move(x: Any) -> None:
        copy_vector(cuda.shared.array(4, float32), 4, x, 0, 4)

    with pytest.raises((IndexError, ValueError)):
        launch(move, float32, torch.zeros(64))


def test_asynchronous_copies_arrive_when_waited_for() -> None:
    seen: list[list[int]] = []

    def kernel(x: Any) -> None:
        near = cuda.shared.array(16, uint8)
        for n in range(16):
            near[n] = 0
        copy_async(near, 0, x, 0, 8)
        commit_copies()
        copy_async(near, 8, x, 8, 8)
        commit_copies()
        seen.append(list(near))
        wait_copies_but_last()
        seen.append(list(near))
        wait_copies()
        seen.append(list(near))

    launch(kernel, uint8, torch.ones(16, dtype=torch.uint8))
    assert [sum(each) for each in seen] == [0, 8, 16]


# ---- Numbers ---------------------------------------------------------------------------------------------------------


def test_bits() -> None:
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    want = codes.view(torch.float16).float()
    got = torch.tensor([float_from_half(code) for code in range(65536)])
    assert torch.equal(got[~want.isnan()], want[~want.isnan()])
    assert got[want.isnan()].isnan().all()
    for x in (1.0, -0.0, math.inf, 2.0**-149, 3.4e38):
        bits = bits_of_float(x)
        assert bits == torch.tensor(x).view(torch.int32).item() & ALL
        assert float_from_bits(bits) == torch.tensor(x).item()
    assert bits_of_float(1e300) == bits_of_float(math.inf)


def test_casts_wrap_around() -> None:
    seen: list[Any] = []

    def cast(thread: int) -> int:
        seen.extend([int8(200), uint8(-1), int32(2**31), int64(2**63), int64(2.9), float32(3)])
        return 0

    of_each_thread(cast, threads=1)
    assert seen == [-56, 255, -(2**31), -(2**63), 2, 3.0]


@pytest.mark.parametrize("single", [False, True])
def test_single_precision(single: bool) -> None:
    """Sums in registers are float32 only where asked for; what is stored always is."""

    def add(x: Any) -> None:
        near = cuda.shared.array(1, float32)
        near[0] = x[0]
        total = near[0] + x[1]
        x[2] = total
        x[3] = float32(total - near[0])

    x = torch.tensor([1.0, 2.0**-30, 0.0, 0.0])
    with running(single_precision=single):
        launch(add, float32, x)
    assert x[2] == 1.0
    assert x[3] == (0.0 if single else 2.0**-30)
