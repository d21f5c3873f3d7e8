"""The table of optional packages, and how messages name them."""

import sys
import tomllib
from pathlib import Path

from quire.extras import EXTRAS, install_command

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_the_table_is_that_of_the_package() -> None:
    extras = PROJECT["optional-dependencies"].items()
    declared = {name: tuple(packages) for name, packages in extras if name not in ("dev", "docs")}
    assert declared == EXTRAS


def test_a_message_names_the_packages_and_the_interpreter_that_runs() -> None:
    assert install_command("xgrammar") == f"{sys.executable} -m pip install 'xgrammar>=0.2'"


def test_structured_outputs_are_part_of_every_installation() -> None:
    assert any(package.startswith("llguidance") for package in PROJECT["dependencies"])


def test_no_text_names_a_package_index_s_other_quire() -> None:
    root = Path(__file__).parents[1]
    files = [*root.glob("src/**/*.py"), *root.glob("docs/*.md"), root / "README.md", root / "Makefile"]
    assert not [
        file.name for file in files if "install quire" in file.read_text() or "install 'quire[" in file.read_text()
    ]
