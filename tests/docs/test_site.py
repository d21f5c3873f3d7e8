"""The documentation site: it builds without a warning, and its tables have what the code has."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import ROOT

import quire
from quire.entrypoints.cli.main import build_parser
from quire.envs import VARIABLES


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site. A warning, for example of a broken link, ends the build."""
    folder = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


def text_of(page: Path) -> str:
    """The text of a page of the site, without its menus."""
    article = page.read_text(encoding="utf-8").partition("<article")[2].partition("</article")[0]
    return html.unescape(re.sub(r"<[^>]+>", " ", article))


def test_the_reference_has_every_flag_variable_and_public_name(site: Path) -> None:
    flags = text_of(site / "reference/flags/index.html")
    assert not [flag for flag in build_parser("serve")._option_string_actions if flag not in flags and flag != "--help"]
    variables = text_of(site / "reference/environment/index.html")
    assert not [name for name in VARIABLES if name not in variables]
    names = text_of(site / "reference/api/index.html")
    assert not [name for name in quire.__all__ if name in quire._WHERE and f"quire.{name}" not in names]
    assert "time_to_first_token_seconds" in text_of(site / "reference/metrics/index.html")


def test_no_marker_of_a_table_is_left(site: Path) -> None:
    assert not [page for page in site.rglob("*.html") if "made from the code:" in page.read_text(encoding="utf-8")]


def test_the_site_asks_no_other_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)', page.read_text(encoding="utf-8")
        )
        assert not loaded, f"{page}: {loaded}"


def test_a_linked_line_of_a_source_file_is_there(site: Path) -> None:
    for page in site.rglob("*.html"):
        for target in re.findall(r'href="([^"]*\.page/?#__codelineno-0-\d+)"', page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            copy = (page.parent / path).resolve() / "index.html"
            assert f'id="{anchor}"' in copy.read_text(encoding="utf-8"), f"{page}: {target}"
