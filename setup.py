"""Builds the CPU kernels beside the package: one plain shared library, no torch headers. Optional: without a compiler
the install still works, and the plain PyTorch references serve."""

import importlib.util
import pathlib
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = pathlib.Path("src/quire/kernels/cpu")


def load_builder():
    """`quire.kernels.cpu.build` by path: the package itself cannot be imported before its dependencies are there."""
    spec = importlib.util.spec_from_file_location(
        "quire_cpu_build", pathlib.Path(__file__).parent / KERNELS / "build.py"
    )
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    return builder


class BuildWithKernels(build_py):
    """The usual build, and the shared library: in the source tree for an editable install, else in the build folder."""

    def run(self) -> None:
        super().run()
        folder = pathlib.Path(__file__).parent / KERNELS
        if not self.editable_mode:
            folder = pathlib.Path(self.build_lib).resolve() / "quire" / "kernels" / "cpu"
        builder = load_builder()
        # A stale library (another machine's, an older version's) must not slip in where the build fails.
        (folder / builder.LIBRARY).unlink(missing_ok=True)
        try:
            _, built, failed = builder.build(folder)
        except (builder.BuildError, OSError) as error:
            print(f"warning: no native CPU kernels, inference on a CPU will be slow: {error}", file=sys.stderr)
            return
        print(f"native CPU kernels for {', '.join(built)}" + (f"; left out {', '.join(failed)}" if failed else ""))


class PlatformWheel(bdist_wheel):
    """The library depends on the machine, but on no Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, machine = super().get_tag()
        return "py3", "none", machine


class NativeDistribution(Distribution):
    """Says that the wheel is not pure Python."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=NativeDistribution)
