"""The library of kernels.cpp: compiled once for this processor and compiler, kept in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from services.engine.cache import cache_folder

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_LIMIT_S = 120.0


def library() -> Path | None:
    """Path of the compiled library, compiling it first where that was not done yet. None: it cannot be had here, and
    a warning says why.
    """
    compiler = _compiler()
    if compiler is None:
        log.warning("no C++ compiler (set CXX, or install g++): decode steps run on torch's slower kernels")
        return None
    file = cache_folder("native") / f"kernels-{_key(compiler)}.so"
    if file.is_file():
        return file
    log.info("compiling the native kernels, once, into %s", file)
    error = _compile(compiler, file)
    if error:
        log.warning("the native kernels do not compile (%s): decode steps run on torch's slower kernels", error)
        return None
    return file


def _compiler() -> str | None:
    """CXX wins, also where it names nothing: that is how the kernels are turned off."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named is not None else next(filter(None, map(shutil.which, _COMPILERS)), None)


def _key(compiler: str) -> str:
    """Changes with everything that the library depends on: -march=native is this processor's."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    stat = Path(compiler).resolve().stat()
    digest.update(repr((compiler, stat.st_size, stat.st_mtime_ns, _FLAGS, platform.machine())).encode())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        kept = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
        digest.update("\n".join(sorted(kept)).encode())
    return digest.hexdigest()[:24]


def _compile(compiler: str, file: Path) -> str | None:
    """Writes `file` whole or not at all; returns why it could not, in a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        try:
            done = subprocess.run(
                [compiler, *_FLAGS, str(SOURCE), "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"{compiler} ended with {done.returncode}"])[0]
        made.rename(file)
    return None
