"""What importing the package does to the process environment. Each case has a process of its own."""

import json
import os
import subprocess
import sys

NAMES = ("NCCL_CUMEM_ENABLE", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_COMPILE_THREADS")


def environment_after_import(before: dict[str, str], prepare: str = "") -> tuple[dict[str, str], str]:
    """The variables after `import quire`, and what was logged."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES and not name.startswith("QUIRE_")}
    code = (
        f"import os\n{prepare}\nimport quire, json, sys\n"
        f"print('\\n' + json.dumps({{n: os.environ.get(n) for n in {NAMES!r}}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **before}, capture_output=True, text=True, check=True
    )
    *log, last = done.stdout.strip().splitlines()
    return json.loads(last), "\n".join(log)


WITHOUT_IMEX = "real = os.path.exists\nos.path.exists = lambda p: False if 'imex' in str(p) else real(p)"
WITH_IMEX = WITHOUT_IMEX.replace("False", "True")


def test_the_three_variables_are_set_on_import() -> None:
    values, log = environment_after_import({}, WITHOUT_IMEX)
    assert values == dict(zip(NAMES, ("0", "1", "1"), strict=True))
    assert log == ""


def test_a_users_choice_of_nccl_allocator_is_kept_with_a_warning() -> None:
    values, log = environment_after_import({"NCCL_CUMEM_ENABLE": "1"}, WITHOUT_IMEX)
    assert values["NCCL_CUMEM_ENABLE"] == "1"
    assert "WARNING" in log and "NCCL_CUMEM_ENABLE is set to 1" in log and "memory" in log


def test_a_users_zero_is_kept_silently() -> None:
    values, log = environment_after_import({"NCCL_CUMEM_ENABLE": "0"}, WITH_IMEX)
    assert values["NCCL_CUMEM_ENABLE"] == "0"
    assert log == ""


def test_nvlink_over_several_hosts_leaves_the_allocator_alone() -> None:
    values, _ = environment_after_import({}, WITH_IMEX)
    assert values["NCCL_CUMEM_ENABLE"] is None


def test_compile_threads_are_one_whatever_was_set() -> None:
    values, _ = environment_after_import({"TORCHINDUCTOR_COMPILE_THREADS": "8"}, WITHOUT_IMEX)
    assert values["TORCHINDUCTOR_COMPILE_THREADS"] == "1"


def test_children_inherit_it() -> None:
    code = (
        "import quire, subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"PYTORCH_NVML_BASED_CUDA_CHECK\"])'],"
        " capture_output=True, text=True).stdout.strip())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
