"""The C header: what compilers make of it equals the ctypes mirror, in both directions, in C, C++ and CUDA."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
from array import array
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from benchmarks import nvrtc
from pagedkern import abi
from tests.abi.makers import int_table

EXAMPLE = Path(__file__).resolve().parents[2] / "reference" / "abi_example"
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{abi.include_dir()}"]
MIRRORS = {"batch": abi.BatchStruct, "params": abi.AttentionParamsStruct}


def compiler(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no compiler {name!r} on PATH")
    return path


def compile_(command: list[str], **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    assert done.stderr == ""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the C program says of the structs that it fills."""
    program = tmp_path_factory.mktemp("abi") / "batch"
    compile_([compiler("cc"), "-std=c99", *STRICT, str(EXAMPLE / "batch.c"), "-o", str(program)])
    result: dict[str, Any] = json.loads(subprocess.run([program], capture_output=True, check=True, timeout=60).stdout)
    return result


def test_paths() -> None:
    assert abi.header_path().parent == abi.include_dir()
    assert abi.header_path().read_text().startswith("/*\n * The pagedkern block-table ABI, version 1.0.")


@pytest.mark.parametrize("name", MIRRORS)
def test_layout(printed: dict[str, Any], name: str) -> None:
    mirror, c = MIRRORS[name], printed[name]
    assert c["size"] == ctypes.sizeof(mirror)
    fields = {field: getattr(mirror, field) for field, *_ in mirror._fields_}
    assert {f: (d.offset, d.size) for f, d in fields.items()} == {
        f: (c["fields"][f]["offset"], c["fields"][f]["size"]) for f in c["fields"]
    }
    end = 0
    for descriptor in fields.values():  # no gap that a writer could leave unset
        assert descriptor.offset == end
        end += descriptor.size
    assert end == c["size"]


@pytest.mark.parametrize(("struct", "name"), [("pagedkern_batch", "batch"), ("pagedkern_attention_params", "params")])
def test_types_of_fields(struct: str, name: str) -> None:
    """Read from the header's text: ctypes types and order, which offsets alone do not tell (signed, float, pointer)."""
    text = re.sub(r"/\*.*?\*/", "", abi.header_path().read_text(), flags=re.DOTALL)
    match = re.search(rf"typedef struct {struct} \{{(.*?)\}} {struct};", text, flags=re.DOTALL)
    assert match is not None
    scalars = {"pagedkern_u32": ctypes.c_uint32, "pagedkern_i32": ctypes.c_int32, "pagedkern_i64": ctypes.c_int64}
    scalars["float"] = ctypes.c_float
    declared = []
    for declaration in filter(None, map(str.strip, match[1].split(";"))):
        kind, _, field = declaration.rpartition(" ")
        declared.append((field.lstrip("*"), ctypes.c_void_p if field.startswith("*") else scalars[kind]))
    assert declared == list(MIRRORS[name]._fields_)


def test_every_field_says_what_it_means() -> None:
    for line in abi.header_path().read_text().splitlines():
        if re.match(r"  (const )?(pagedkern_\w+|float|void) \*?\w+;", line):
            assert "/*" in line or re.match(r"  pagedkern_i64 (v|out)_stride_\w+;", line), line


def test_codes(printed: dict[str, Any]) -> None:
    devices = ("cpu", "cuda", "cuda_host", "rocm", "rocm_host", "cuda_managed")
    assert printed["codes"] == {
        **abi.DTYPE_CODES,
        **{name: getattr(abi, f"DEVICE_{name.upper()}") for name in devices},
    }
    assert printed["batch"]["fields"]["version"]["value"] == abi.ABI_VERSION == 0x10000


def test_values_from_c_are_those_that_python_computes(printed: dict[str, Any]) -> None:
    """The same step, described from Python over the arrays that the program printed."""
    tokens, shape = len(printed["slot_mapping"]), (8, 2, 4, 24)  # [N, G, B, D + E]: K and V of a block side by side
    memory = array("f", bytes(4 * 8 * 2 * 4 * 24))
    kv = abi.describe(memory, "kv")._replace(shape=shape, strides=(192, 96, 24, 1))
    nhd = kv._replace(strides=(192, 24, 96, 1))
    rows = [printed["block_table"][4 * i : 4 * i + 4] for i in range(3)]
    batch = abi.validate(
        block_table=int_table(rows, 4),
        seq_lens=array("i", printed["seq_lens"]),
        cu_seqlens_q=array("i", printed["cu_seqlens_q"]),
        slot_mapping=array("q", printed["slot_mapping"]),
        k_cache=nhd._replace(shape=(8, 4, 2, 16)),
        v_cache=nhd._replace(shape=(8, 4, 2, 8), ptr=kv.ptr + 4 * 16),
        q=abi.describe(memory, "q")._replace(shape=(tokens, 6, 16), strides=(96, 16, 1)),
        out=abi.describe(memory, "out")._replace(shape=(tokens, 6, 8), strides=(48, 8, 1)),
        max_seqlen_q=5,
    )
    abi.validate_contents(batch)
    # The program's table, worked out by hand: blocks are handed out from 7 down as sequences of 9 and 5 tokens grow.
    assert rows == [[7, 6, 5, -1], [4, 3, -1, -1], [-1, -1, -1, -1]]
    assert printed["slot_mapping"] == [5 * 4 + 0, 4 * 4 + 0, 4 * 4 + 1, 4 * 4 + 2, 4 * 4 + 3, 3 * 4 + 0]
    assert abi.to_csr(batch.block_table, batch.seq_lens, 4).last_page_len.tolist() == [1, 1, 0]
    params = abi.to_params(batch, softcap=30.0, sliding_window=6, sinks=array("f", [0.0] * 6))
    for struct, name in ((abi.to_struct(batch), "batch"), (params, "params")):
        for field, kind in struct._fields_:
            value = getattr(struct, field)
            expected = value is not None if kind is ctypes.c_void_p else value
            assert printed[name]["fields"][field]["value"] == expected, field


@pytest.fixture(scope="module")
def gather(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The C function that reads a struct made by Python."""
    library = tmp_path_factory.mktemp("abi") / "libgather.so"
    source = str(EXAMPLE / "gather.c")
    compile_([compiler("cc"), "-std=c99", *STRICT, "-shared", "-fPIC", source, "-o", str(library)])
    function = ctypes.CDLL(str(library)).gather_keys
    function.argtypes = (ctypes.POINTER(abi.BatchStruct), ctypes.c_int64, ctypes.c_void_p)
    function.restype = ctypes.c_int64
    return function


def paged_keys() -> tuple[abi.Batch, list[list[float]]]:
    """Two sequences, 5 and 2 tokens in blocks of 2, in a cache [G, N, B, D] seen as [N, B, G, D]; and their keys."""
    n, b, g, d = 6, 2, 3, 4
    memory = array("f", [float("nan")] * (n * b * g * d))
    rows, lens, keys = [[4, 0, 3], [5, 2**31 - 1, -1]], [5, 2], []
    for i, row in enumerate(rows):
        keys.append(
            [float(1000 * i + 100 * j + 10 * h + x) for j in range(lens[i]) for h in range(g) for x in range(d)]
        )
        for j in range(lens[i]):
            for h in range(g):
                start = ((h * n + row[j // b]) * b + j % b) * d
                memory[start : start + d] = array("f", keys[i][(j * g + h) * d : (j * g + h + 1) * d])
    cache = abi.describe(memory, "k_cache")._replace(shape=(n, b, g, d), strides=(b * d, d, n * b * d, 1))
    batch = abi.validate(
        block_table=int_table(rows, 3, stride=7), seq_lens=array("i", lens), k_cache=cache, v_cache=cache
    )
    return batch, keys


def test_c_reads_what_python_filled(gather: Any) -> None:
    batch, keys = paged_keys()
    struct = abi.to_struct(batch)
    for i, expected in enumerate(keys):
        got = (ctypes.c_float * len(expected))(*[float("nan")] * len(expected))
        assert gather(struct, i, got) == len(expected) // 12
        assert list(got) == expected


def test_c_refuses_what_it_does_not_know(gather: Any) -> None:
    batch, _ = paged_keys()
    for field, value, answer in (
        ("version", 2 << 16, -1),
        ("struct_size", ctypes.sizeof(abi.BatchStruct) - 8, -2),
        ("kv_dtype", abi.DTYPE_CODES["bfloat16"], -3),
        ("device_type", abi.DEVICE_CUDA, -3),
    ):
        struct = abi.to_struct(batch)
        setattr(struct, field, value)
        assert gather(struct, 0, None) == answer


@pytest.mark.parametrize("standard", ["c99", "c11", "c17"])
def test_c(tmp_path: Path, standard: str) -> None:
    source = tmp_path / "include.c"
    source.write_text("#include <pagedkern_abi.h>\n#include <pagedkern_abi.h>\nint main(void) { return 0; }\n")
    compile_([compiler("cc"), f"-std={standard}", *STRICT, "-fsyntax-only", str(source)])


@pytest.mark.parametrize("standard", ["c++11", "c++17", "c++20"])
def test_cpp(tmp_path: Path, standard: str) -> None:
    source = tmp_path / "include.cpp"
    source.write_text(
        "#include <pagedkern_abi.h>\n#include <pagedkern_abi.h>\nint main() { return pagedkern_batch().q_dtype; }\n"
    )
    compile_([compiler("g++"), f"-std={standard}", *STRICT, "-fsyntax-only", str(source)])


def test_a_changed_layout_does_not_compile(tmp_path: Path) -> None:
    text = abi.header_path().read_text()
    source = tmp_path / "include.c"
    source.write_text('#include "pagedkern_abi.h"\nint main(void) { return 0; }\n')
    for old, new in (
        ("pagedkern_i32 q_dtype;", "pagedkern_i64 q_dtype;"),
        ("  float softcap;", "  double softcap;"),
    ):
        assert text.count(old) == 1
        (tmp_path / "pagedkern_abi.h").write_text(text.replace(old, new))
        for standard in ("c99", "c11"):
            done = subprocess.run(
                [compiler("cc"), f"-std={standard}", "-fsyntax-only", str(source)], capture_output=True, timeout=60
            )
            assert done.returncode != 0


KERNEL = b"""#include "pagedkern_abi.h"
extern "C" __global__ void first_key(const pagedkern_batch b, const pagedkern_attention_params p, float *out) {
  pagedkern_i64 block = b.block_table[threadIdx.x * b.block_table_stride];
  *out = p.scale * static_cast<const float *>(b.k_cache)[block * b.k_stride_block];
}
"""


def test_nvcc(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_bytes(KERNEL)
    nvcc = compiler("nvcc")
    compile_([nvcc, "-Werror", "all-warnings", f"-I{abi.include_dir()}", "-cubin", "-o", os.devnull, str(source)])


def compiled_by_nvrtc(cuda: int, standard: bytes) -> str:
    """The PTX. In a process of its own, where CuPy does not meet this NVRTC."""
    nvrtc.load_builtins(cuda)
    lib, program = nvrtc.load(cuda), ctypes.c_void_p()
    headers = (ctypes.c_char_p * 1)(abi.header_path().read_bytes())
    names = (ctypes.c_char_p * 1)(b"pagedkern_abi.h")
    assert lib.nvrtcCreateProgram(ctypes.byref(program), KERNEL, b"kernel.cu", 1, headers, names) == 0
    options = [b"--gpu-architecture=compute_80", b"--std=" + standard]
    status = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    assert lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert lib.nvrtcGetProgramLog(program, log) == 0
    assert (status, log.value) == (0, b"")
    assert lib.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
    ptx = ctypes.create_string_buffer(size.value)
    assert lib.nvrtcGetPTX(program, ptx) == 0
    return ptx.value.decode()


@pytest.mark.parametrize("standard", [b"c++11", b"c++17"])
@pytest.mark.parametrize("cuda", nvrtc.PACKAGES, ids="NVRTC {}".format)
def test_nvrtc(cuda: int, standard: bytes, record_property: Callable[[str, object], None]) -> None:
    """Compiled at run time with no header but this one: no include path is given, and there is no <stdint.h>."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        ptx = process.submit(compiled_by_nvrtc, cuda, standard).result()
    version = nvrtc.signature(ptx)
    assert version.startswith(f"{cuda}.")
    record_property("compiled by", f"NVRTC {version}")
    assert f".b8 first_key_param_0[{ctypes.sizeof(abi.BatchStruct)}]" in ptx
    assert f".b8 first_key_param_1[{ctypes.sizeof(abi.AttentionParamsStruct)}]" in ptx
