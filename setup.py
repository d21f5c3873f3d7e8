"""Builds the CPU kernels with the package: one plain shared library, without torch headers. A compiler is optional: without one,
Quire uses the plain PyTorch references."""

import importlib.util
import pathlib
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = pathlib.Path("src/quire/kernels/cpu")


def load_builder():
    """Load `quire.kernels.cpu.build` by its path: the package cannot be imported before its dependencies are installed."""
    spec = importlib.util.spec_from_file_location(
        "quire_cpu_build", pathlib.Path(__file__).parent / KERNELS / "build.py"
    )
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    return builder


class BuildWithKernels(build_py):
    """Adds the shared library to the usual build: in the source tree for an editable install, otherwise in the build folder."""

    def run(self) -> None:
        super().run()
        folder = pathlib.Path(__file__).parent / KERNELS
        if not self.editable_mode:
            folder = pathlib.Path(self.build_lib).resolve() / "quire" / "kernels" / "cpu"
        builder = load_builder()
        # If the build fails, a stale library (of another machine, of an older version) must not be packaged.
        (folder / builder.LIBRARY).unlink(missing_ok=True)
        try:
            _, built, failed = builder.build(folder)
        except (builder.BuildError, OSError) as error:
            print(f"warning: no native CPU kernels, inference on a CPU will be slow: {error}", file=sys.stderr)
            return
        print(f"native CPU kernels for {', '.join(built)}" + (f"; left out {', '.join(failed)}" if failed else ""))


class PlatformWheel(bdist_wheel):
    """Tags the wheel: the library depends on the machine, not on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, machine = super().get_tag()
        return "py3", "none", machine


class NativeDistribution(Distribution):
    """Marks the wheel as not pure Python."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=NativeDistribution)
