"""How many clusters of blocks a GPU holds at once, which its data sheet does not say.

A cluster lies in one GPC, and GPCs differ in the multiprocessors that work in them: 132 of them
need not hold 16 clusters of 8 blocks.
"""

import ctypes

from .ptx import HEADER

_DYNAMIC_SHARED, _NONPORTABLE = 8, 13  # CU_FUNC_ATTRIBUTE_..
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
# A block that fills a multiprocessor.
_SHARED_BYTES, _THREADS = 200 << 10, 128
_PTX = HEADER.format(version="8.0", chip="sm_90") + ".visible .entry k() { ret; }\n"


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
                ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint)]


def most_active() -> dict[int, int | str]:
    """By blocks a cluster, one block a multiprocessor: clusters that run at once, or the error."""
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    if (driver.cuModuleLoadData(ctypes.byref(module), _PTX.encode())
            or driver.cuModuleGetFunction(ctypes.byref(function), module, b"k")
            or driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED, _SHARED_BYTES)
            or driver.cuFuncSetAttribute(function, _NONPORTABLE, 1)):
        return {1: "no clusters on this GPU"}
    return {blocks: _active(driver, function, blocks) for blocks in range(1, 9)}


def _active(driver, function, blocks):
    attribute = _Attribute(id=_CLUSTER)
    attribute.value[:3] = (blocks, 1, 1)
    config = _Config((ctypes.c_uint * 3)(64 * blocks, 1, 1), (ctypes.c_uint * 3)(_THREADS, 1, 1),
                     _SHARED_BYTES, None, ctypes.pointer(attribute), 1)
    found = ctypes.c_int()
    error = driver.cuOccupancyMaxActiveClusters(ctypes.byref(found), function, ctypes.byref(config))
    return f"error {error}" if error else found.value
