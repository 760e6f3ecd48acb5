"""A launch inside a captured graph whose arguments are set anew before a replay, which takes the host less than a launch."""

import ctypes
from functools import cache
from struct import Struct
from typing import Any

import torch

from graphlin.backends.cuda.graph import QuietGraph

_UINT, _POINTER, _SIZE = ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t
_NEEDED = ("cuStreamGetCaptureInfo_v2", "cuGraphKernelNodeGetParams_v2", "cuGraphExecKernelNodeSetParams_v2",
           "cuGraphNodeSetEnabled", "cuFuncGetParamInfo", "cuKernelGetParamInfo")


class _NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = (("func", _POINTER), *((name, _UINT) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z",
                                                                  "shared")),
                ("params", ctypes.POINTER(_POINTER)), ("extra", _POINTER), ("kern", _POINTER), ("ctx", _POINTER))


@cache
def _driver() -> Any:
    """The driver, if it has all that is asked of it (12.4 has). Calls keep the interpreter's lock, so that no other thread resets
    the graph in the midst of one."""
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if all(hasattr(driver, name) for name in _NEEDED) else None


class UpdatableGraph(QuietGraph):
    """A graph whose launches may be given other arguments. `executable` is null until it is captured and after a reset."""

    def __new__(cls) -> "UpdatableGraph":
        return super().__new__(cls, keep_graph=True)

    def __init__(self) -> None:
        super().__init__(keep_graph=True)
        self.executable = _POINTER()

    def capture_end(self) -> None:
        super().capture_end()
        self.instantiate()
        self.executable.value = self.raw_cuda_graph_exec()

    def reset(self) -> None:
        self.executable.value = None
        super().reset()


def can_update() -> bool:
    """Whether the driver and PyTorch let launches of a graph be given other arguments."""
    return hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec") and _driver() is not None


class NodeLaunch:
    """The last launch that was captured on the current stream. Its first arguments are tensors like those given, aligned to 16
    bytes, then integers of 32 bits.

    What is set holds for replays to come, not for those that are enqueued already.
    """

    def __init__(self, graph: UpdatableGraph, index: int, tensors: tuple[torch.Tensor, ...], num_integers: int) -> None:
        self._graph = graph  # must outlive this
        self._driver, self._executable = _driver(), graph.executable
        self._node = self._last_node(index)
        self._dtypes = [t.dtype for t in tensors]
        format = Struct(f"{len(tensors)}Q{num_integers}i")
        self._values = ctypes.create_string_buffer(format.size)
        self._pack = format.pack_into
        self._is_enabled: bool | None = None
        self._params = _NodeParams()
        _check(self._driver.cuGraphKernelNodeGetParams_v2(self._node, ctypes.byref(self._params)))
        self._arguments = self._own_arguments([8] * len(tensors) + [4] * num_integers)
        self._params.params = ctypes.cast(self._arguments, ctypes.POINTER(_POINTER))
        self._handles = self._executable, self._node, ctypes.byref(self._params)
        self._set = self._driver.cuGraphExecKernelNodeSetParams_v2

    def set(self, tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...]) -> bool:
        """Gives the launch these arguments; False, and no launch, where it was not compiled for them."""
        pointers = []
        for i, tensor in enumerate(tensors):
            pointers.append(pointer := tensor.data_ptr())
            if pointer % 16 or tensor.dtype is not self._dtypes[i]:
                self.enable(False)
                return False
        self._pack(self._values, 0, *pointers, *integers)
        if not self._is_enabled:
            self.enable(True)
        if code := self._set(*self._handles):
            self._fail(code)
        return True

    def enable(self, enabled: bool) -> None:
        """Whether replays do the launch at all."""
        if self._is_enabled is not enabled:
            self._is_enabled = None  # until it is done
            if code := self._driver.cuGraphNodeSetEnabled(self._executable, self._node, int(enabled)):
                self._fail(code)
            self._is_enabled = enabled

    def _fail(self, code: int) -> None:
        if self._executable:  # else the graph was reset meanwhile, which its replay tells
            _check(code)

    def _last_node(self, index: int) -> ctypes.c_void_p:
        status, nodes, count = ctypes.c_int(), ctypes.POINTER(_POINTER)(), _SIZE()
        stream = _POINTER(torch._C._cuda_getCurrentRawStream(index))
        _check(self._driver.cuStreamGetCaptureInfo_v2(stream, ctypes.byref(status), None, None, ctypes.byref(nodes),
                                                      ctypes.byref(count)))
        if count.value != 1:
            raise RuntimeError(f"expected one launch at the end of the captured stream, found {count.value}")
        return _POINTER(nodes[0])

    def _own_arguments(self, sizes: list[int]) -> ctypes.Array:
        """Where each argument of the kernel lies: the first ones in `_values`, the others in copies that are kept."""
        function, info = ((_POINTER(self._params.func), self._driver.cuFuncGetParamInfo) if self._params.func else
                          (_POINTER(self._params.kern), self._driver.cuKernelGetParamInfo))
        offset, size, found = _SIZE(), _SIZE(), []
        while info(function, _SIZE(len(found)), ctypes.byref(offset), ctypes.byref(size)) == 0:
            found.append(size.value)
        if found[:len(sizes)] != sizes:
            raise RuntimeError(f"expected first arguments of {sizes} bytes, found {found}")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._others = [ctypes.create_string_buffer(ctypes.string_at(self._params.params[i], size), size)
                        for i, size in enumerate(found) if i >= len(sizes)]
        base = ctypes.addressof(self._values)
        return (_POINTER * len(found))(*(base + start for start in starts), *map(ctypes.addressof, self._others))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refused to change a launch of a captured graph, with code {code}")
