"""Errors of a rank on a CUDA device, to see that test_sanitizer.py would find them."""

from __future__ import annotations

import ctypes

import numpy as np
from cuda_arrays import InterfaceArray, cuda

KERNEL = b"""
.version 8.0
.target sm_60
.address_size 64
.visible .entry store(.param .u64 at)
{
  .reg .b64 %address;
  .reg .b32 %value;
  ld.param.u64 %address, [at];
  cvta.to.global.u64 %address, %address;
  mov.u32 %value, 1;
  st.global.u32 [%address], %value;
  ret;
}
"""


def writes_beyond() -> None:
    """Write behind the end of an array, where the device itself does not notice."""
    cuda().enter()
    array = InterfaceArray(np.zeros(4, np.float32))
    module = ctypes.c_void_p(cuda().made("cuModuleLoadData", ctypes.c_char_p(KERNEL)))
    function = ctypes.c_void_p(cuda().made("cuModuleGetFunction", module, b"store"))
    at = ctypes.c_uint64(array.address + 4096)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(at))
    shape = [ctypes.c_uint(1)] * 6
    cuda().call("cuLaunchKernel", function, *shape, ctypes.c_uint(0), None, parameters, None)
    array.stream.synchronize()
