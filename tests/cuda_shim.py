"""The CUDA kernels without a GPU: run on this CPU by way of cuda_shim.h, and compiled by NVRTC."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from lmtier.copy.cuda import kernels
from lmtier.copy.cuda.kernels import Launch

HERE = Path(__file__).parent
FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]


class Cpu:
    """Runs launches one thread after another; an access that a GPU would not allow fails the test."""

    _current: Cpu | None = None

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.launch.restype = ctypes.c_char_p
        for name in ("size_of", "traced"):
            getattr(library, name).restype = ctypes.c_uint64
        self._allowed: list[tuple[int, int]] = []

    def allow(self, *arrays: np.ndarray) -> None:
        """From now on, kernels may touch these too."""
        for array in arrays:
            assert array.flags.c_contiguous
            self._allowed.append((array.ctypes.data, array.nbytes))
        Cpu._current = None

    def forbid(self, addresses: Collection[int]) -> None:
        """The memory that begins there, no more."""
        self._allowed = [each for each in self._allowed if each[0] not in addresses]
        Cpu._current = None

    def name_memory(self) -> None:
        """The library knows one machine at a time."""
        if Cpu._current is not self:
            self.library.forget_memory()
            for address, nbytes in self._allowed:
                self.library.add_memory(ctypes.c_uint64(address), ctypes.c_uint64(nbytes))
            Cpu._current = self

    def size_of(self, struct: str) -> int:
        return int(self.library.size_of(struct.encode()))

    def run(self, launch: Launch, *, backwards: bool = False) -> None:
        self.name_memory()
        held = [np.asarray(each) for each in launch.arguments]
        pointers = (ctypes.c_void_p * len(held))(*[each.ctypes.data for each in held])
        grid = [ctypes.c_uint(each) for each in (launch.x, launch.y, launch.threads)]
        trouble = self.library.launch(launch.kernel.encode(), *grid, pointers, ctypes.c_int(backwards))
        assert not trouble, f"{launch.kernel}: {trouble.decode()}"

    def traced(self, launch: Launch) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Run it; the ranges of addresses that it read, and those that it wrote."""
        self.library.trace(1)
        try:
            self.run(launch)
            return self._ranges(0), self._ranges(1)
        finally:
            self.library.trace(0)

    def _ranges(self, writes: int) -> list[tuple[int, int]]:
        count = self.library.traced(writes, None, ctypes.c_uint64(0))
        out = np.empty((count, 2), np.uint64)
        self.library.traced(writes, out.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(count))
        return [(int(begin), int(end)) for begin, end in out.tolist()]


@cache
def _library() -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.fail("this test compiles the CUDA kernels for the CPU: apt-get install g++")
    with TemporaryDirectory() as folder, kernels.source_file() as source:
        out = Path(folder) / "kernels.so"
        where = ["-x", "c++", f'-DKERNELS="{source}"', str(HERE / "cuda_shim.h"), "-o", str(out)]
        done = subprocess.run(["g++", *FLAGS, "-fPIC", "-shared", *where], capture_output=True, text=True)
        if done.returncode:
            pytest.fail(done.stderr)
        return ctypes.CDLL(str(out))


def cpu() -> Cpu:
    """With no memory allowed yet."""
    return Cpu(_library())


class Nvrtc:
    """NVIDIA's compiler, which needs no GPU."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
        places = list(spec.submodule_search_locations or []) if spec else []
        found = [path for place in places for path in sorted(Path(place, "lib").glob("libnvrtc.so.*"))]
        if not found:
            pytest.fail("this test compiles the CUDA kernels: pip install nvidia-cuda-nvrtc-cu12")
        self.library = ctypes.CDLL(str(found[0]))

    def compile(self, source: str, options: Sequence[str]) -> tuple[str, bytes]:
        """What the compiler had to say, and the machine code: nothing, if it failed."""
        library, program = self.library, ctypes.c_void_p()
        assert not library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
        )
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = library.nvrtcCompileProgram(program, len(options), given)
        log = self._text(program, "ProgramLog").rstrip(b"\0").decode().strip()
        code = b"" if failed else self._text(program, "CUBIN")
        library.nvrtcDestroyProgram(ctypes.byref(program))
        return log, code

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        assert not getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        out = ctypes.create_string_buffer(size.value)
        assert not getattr(self.library, f"nvrtcGet{what}")(program, out)
        return out.raw
