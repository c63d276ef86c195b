"""Another program on the GPU: python demo/gpu_neighbour.py MIB takes so much of its memory as soon
as it is free, prints «held», and keeps it until its input is closed. Needs the driver alone. Of
several GPUs CUDA_VISIBLE_DEVICES names the one."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable


def until_done(call: Callable[[], int], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while code := call():
        if time.monotonic() > end:
            raise SystemExit(f"the driver still answers {code} after {seconds:.0f} s")
        time.sleep(0.005)


def main(mib: int) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    until_done(lambda: int(cuda.cuInit(0)))
    until_done(lambda: int(cuda.cuDeviceGet(ctypes.byref(device), 0)))
    print("waits", flush=True)
    until_done(lambda: int(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)))
    until_done(lambda: int(cuda.cuCtxSetCurrent(context)))
    size = ctypes.c_size_t(mib << 20)
    until_done(lambda: int(cuda.cuMemAlloc_v2(ctypes.byref(memory), size)))
    print("held", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
