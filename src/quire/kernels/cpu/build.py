"""Compiles the CPU kernels into one shared library beside this file. Run as a module, or by the package's build.

Needs a C++17 compiler and nothing else; imports nothing of Quire, so that `setup.py` can load it by path. Each instruction set is
a compilation of its own; one that the compiler does not know is left out. Which one runs is decided when the library is loaded.
"""

import concurrent.futures
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).resolve().parent
LIBRARY = "_quire_cpu.so"

_COMMON = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wno-maybe-uninitialized"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]


class BuildError(Exception):
    """The library could not be built; the message says why and what to do."""


def instruction_sets(machine: str) -> dict[str, list[str]]:
    """The compilations for a machine, by name, with the flags of each."""
    if machine in ("x86_64", "amd64", "AMD64"):
        return {
            "generic": [],
            "avx2": _AVX2,
            "avx512": _AVX512,
            "avx512_vnni": [*_AVX512, "-mavx512vnni"],
            "avx512_bf16": [*_AVX512, "-mavx512vnni", "-mavx512bf16"],
        }
    if machine in ("aarch64", "arm64"):
        return {"neon": []}
    return {"generic": []}


def source_hash() -> str:
    """What the library is made from, in short: its sources and this file."""
    digest = hashlib.blake2b(digest_size=8)
    for path in (*sorted((FOLDER / "csrc").iterdir()), pathlib.Path(__file__)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def find_compiler() -> str:
    """The C++ compiler: $CXX if set, else the first of g++, clang++, c++."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):  # a build-time convention, like make's
        path = shutil.which(name.split()[0]) if name else None
        if path is not None:
            return path
    raise BuildError("no C++ compiler found (looked for $CXX, g++, clang++, c++): install g++ and run the build again")


def _run(command: list[str]) -> str | None:
    """None, or the compiler's complaint."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip()[-2000:]


def build(target_folder: pathlib.Path = FOLDER) -> tuple[pathlib.Path, list[str], dict[str, str]]:
    """Compile and link.

    Returns:
        The library's path, the instruction sets in it, and those left out with the compiler's complaint.

    Raises:
        BuildError: no compiler, or not even one instruction set compiles.
    """
    compiler = find_compiler()
    sources = FOLDER / "csrc"
    with tempfile.TemporaryDirectory() as folder:
        objects = {name: os.path.join(folder, f"{name}.o") for name in instruction_sets(platform.machine())}

        def compile_one(name: str) -> str | None:
            flags = [*_COMMON, *instruction_sets(platform.machine())[name], f"-DQUIRE_ISA={name}"]
            return _run([compiler, *flags, "-c", str(sources / "kernels.cpp"), "-o", objects[name]])

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as executor:
            complaints = dict(zip(objects, executor.map(compile_one, objects), strict=True))
        failed = {name: complaint for name, complaint in complaints.items() if complaint is not None}
        built = [name for name in objects if name not in failed]
        if not built:
            raise BuildError(f"{compiler} could not compile the CPU kernels:\n{next(iter(failed.values()))}")
        have = [f"-DQUIRE_HAVE_{name.upper()}" for name in built]
        linked = os.path.join(folder, LIBRARY)
        complaint = _run(
            [
                compiler,
                *_COMMON,
                *have,
                f'-DQUIRE_SOURCES="{source_hash()}"',
                "-shared",
                str(sources / "pool.cpp"),
                *(objects[name] for name in built),
                "-o",
                linked,
            ]
        )
        if complaint is not None:
            raise BuildError(f"{compiler} could not link the CPU kernels:\n{complaint}")
        target_folder.mkdir(parents=True, exist_ok=True)
        target = target_folder / LIBRARY
        # A running process may have the old file mapped: replace the name, never the contents.
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        shutil.copyfile(linked, partial)
        os.replace(partial, target)
    return target, built, failed


def main() -> int:
    """Build in place and say what came of it."""
    try:
        path, built, failed = build()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"built {path.name} with {', '.join(built)}")
    for name, complaint in failed.items():
        print(f"left out {name}: {complaint.splitlines()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
