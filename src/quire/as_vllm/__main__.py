"""`python -m quire.as_vllm script.py …`: becomes a Python, or another program, for which `vllm` is Quire.

Knows the environment that makes it so. Knows nothing of names.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from quire import envs

PATH = str(Path(__file__).parent / "path")
"""The folder that has the package `vllm`."""
USAGE = f"""usage: python -m quire.as_vllm SCRIPT.py [arguments]
       python -m quire.as_vllm -m MODULE | -c TEXT [arguments]
       python -m quire.as_vllm PROGRAM [arguments]

Runs a program in which `import vllm` gives Quire, and so in its children. For a program that another one starts:
  export PYTHONPATH={PATH} QUIRE_AS_VLLM=1"""


def command_of(words: Sequence[str]) -> list[str]:
    """The command that `words` mean: a script or Python's own options are Python's, the rest is a program."""
    is_program = not (words[0].startswith("-") or words[0].endswith(".py")) and shutil.which(words[0])
    return [*words] if is_program else [sys.executable, *words]


def environment() -> dict[str, str]:
    """This process's environment, in which `vllm` is Quire."""
    path = os.pathsep.join(filter(None, (PATH, envs.foreign("PYTHONPATH"))))
    return envs.changed_environment({"PYTHONPATH": path, "QUIRE_AS_VLLM": "1"})


def main(words: Sequence[str]) -> NoReturn:
    """Become the program; without one, print the usage."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if words else 2)
    sys.stdout.flush()
    command = command_of(words)
    os.execvpe(command[0], command, environment())


if __name__ == "__main__":
    main(sys.argv[1:])
