"""The numbers of the ABI: versions, dtype codes and device codes, as in pagedkern_abi.h."""

from __future__ import annotations

ABI_VERSION_MAJOR = 1
ABI_VERSION_MINOR = 0
ABI_VERSION = ABI_VERSION_MAJOR << 16 | ABI_VERSION_MINOR

DTYPE_CODES = {"float32": 1, "float16": 2, "bfloat16": 3, "float8_e4m3fn": 4, "float8_e5m2": 5, "int8": 6}
"""Codes of the dtypes that q, out and the caches may have; 0 stands for arrays that are null."""

DEVICE_CPU = 1
DEVICE_CUDA = 2
DEVICE_CUDA_HOST = 3
DEVICE_ROCM = 10
DEVICE_ROCM_HOST = 11
DEVICE_CUDA_MANAGED = 13

DEVICE_NAMES = {
    DEVICE_CPU: "cpu",
    DEVICE_CUDA: "cuda",
    DEVICE_CUDA_HOST: "cuda_host",
    4: "opencl",
    7: "vulkan",
    8: "metal",
    DEVICE_ROCM: "rocm",
    DEVICE_ROCM_HOST: "rocm_host",
    DEVICE_CUDA_MANAGED: "cuda_managed",
    14: "oneapi",
}
"""DLPack's device types, by number (https://dmlc.github.io/dlpack/latest/c_api.html)."""

HOST_DEVICES = frozenset({DEVICE_CPU, DEVICE_CUDA_HOST, DEVICE_ROCM_HOST})
"""Device types whose memory this process may read at any time."""

ITEMSIZE = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
"""Bytes of one element of every dtype that `describe` knows. Which of them an argument accepts is checked later."""


def device_name(device_type: int, device_id: int) -> str:
    """The device for a message: "cpu", "cuda:0", or "cuda" if the index is not known."""
    name = DEVICE_NAMES.get(device_type, f"DLPack device type {device_type}")
    return name if device_type in HOST_DEVICES or device_id < 0 else f"{name}:{device_id}"
