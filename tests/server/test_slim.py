"""Stubs in the place of CUDA's libraries, as the loader and torch see them."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvline_image import elf
from kvline_image.elf import Symbol
from kvline_image.stub import NO_DEVICE, OBJECT, stub

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="stubs are for x86-64"
)
FUNCTION = 2
GIL = "_ZN4c10d15get_gil_checkerEv"
VERSION = ("libgone.so.1", "libgone.so.1")
SYMBOLS = [
    Symbol("_ZTIN4gone5ClassE", OBJECT),
    Symbol("_ZTVN4gone5ClassE", OBJECT),
    Symbol(GIL, FUNCTION),
    Symbol("_ZN4gone4callEv", FUNCTION),
    Symbol("goneGetErrorString", FUNCTION, *VERSION),
    Symbol("goneMalloc", FUNCTION, *VERSION),
]
LIBRARIES = Path(torch.__file__).parent / "lib"


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    path = tmp_path / "libgone.so.1"
    path.write_bytes(stub(path.name, SYMBOLS))
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)


def test_a_stub_reads_as_a_library_that_gives_these_symbols(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(stub("libgone.so.1", SYMBOLS))
    found = elf.read(path)
    assert elf.is_library(path)
    assert found.name == "libgone.so.1" and found.needs == ("libstdc++.so.6",)
    assert found.gives == {s.name for s in SYMBOLS}
    assert {s.name for s in found.takes} == {"_ZTVN10__cxxabiv117__class_type_infoE"}


def test_a_c_function_reports_that_there_is_no_device(library: ctypes.CDLL) -> None:
    assert library.goneMalloc(None, 8) == NO_DEVICE
    library.goneGetErrorString.restype = ctypes.c_char_p
    assert b"no device" in library.goneGetErrorString(NO_DEVICE)


def test_what_a_variable_s_function_returns_can_be_written(library: ctypes.CDLL) -> None:
    function = library[GIL]
    function.restype = ctypes.POINTER(ctypes.c_uint64)
    function()[0] = 7
    assert function()[0] == 7


def test_a_class_has_its_name(library: ctypes.CDLL) -> None:
    pointers = (ctypes.c_void_p * 2).in_dll(library, "_ZTIN4gone5ClassE")
    assert pointers[0] and ctypes.string_at(pointers[1] or 0) == b"N4gone5ClassE"


def test_other_c_plus_plus_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "libgone.so.1"
    path.write_bytes(stub(path.name, SYMBOLS))
    code = f"import ctypes; ctypes.CDLL({str(path)!r})['_ZN4gone4callEv']()"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == -4  # SIGILL


def test_a_version_is_found_by_the_libraries_that_ask_for_it(tmp_path: Path) -> None:
    """libc10_cuda.so takes symbols of libcudart.so.13, by version."""
    c10 = elf.read(LIBRARIES / "libc10_cuda.so")
    taken = sorted(s for s in c10.takes if s.library == "libcudart.so.13")
    assert taken and all(s.version == "libcudart.so.13" for s in taken)
    for name in ("libc10.so", "libc10_cuda.so"):
        shutil.copy(LIBRARIES / name, tmp_path)
        elf.strip(tmp_path / name)
        assert elf.read(tmp_path / name) == elf.read(LIBRARIES / name)
        assert (tmp_path / name).stat().st_size < (LIBRARIES / name).stat().st_size
    (tmp_path / "libcudart.so.13").write_bytes(stub("libcudart.so.13", taken))
    code = f"import ctypes; ctypes.CDLL({str(tmp_path / 'libc10_cuda.so')!r})"
    code += "; print([line.split()[-1] for line in open('/proc/self/maps') if 'cudart' in line][0])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "libcudart.so.13")


def test_an_unexpected_library_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "torch/lib").mkdir(parents=True)
    shutil.copy(LIBRARIES / "libc10_cuda.so", tmp_path / "torch/lib")
    shutil.copy(LIBRARIES / "libc10.so", tmp_path / "torch/lib")
    # In a process of its own: this one has torch's libraries loaded.
    command = [sys.executable, "-m", "kvline_image.slim", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == "slim: ['libcudart.so.13'] are missing, [] are expected"
