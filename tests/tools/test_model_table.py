"""The table of architectures in docs/models.md: it says what the specs say, and a check writes only its own rows."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.oracles import tiny_models
from tools.model_table import BEGIN, END, NOT_CHECKED, Result, check, features, read_table, write_table

from quire.errors import ConfigError
from quire.models.registry import CLASSES_OF_OTHERS, ModelRegistry, packaged_features
from tools import model_table

ROOT = Path(__file__).resolve().parents[2]
REPAIR = "python -m tools.model_table --no-check (without it, for rows that were not checked)"
pytest.importorskip("transformers")


def find_stale(text: str) -> list[str]:
    """What a document's table says otherwise than the specs, as sentences; nothing when it is right."""
    table, cells = read_table(text), model_table.feature_cells()
    stale = [f"{name} is not in the table" for name in cells if name not in table.features]
    stale += [f"{name} is no architecture any more" for name in table.features if name not in cells]
    stale += [
        f"{name} has {' | '.join(cells[name])}, not {' | '.join(said)}"
        for name, said in table.features.items()
        if name in cells and cells[name] != said
    ]
    stale += [f"{name} was not checked" for name, found in table.checks.items() if found == NOT_CHECKED]
    return [f"{line}: {REPAIR}" for line in stale]


def test_the_document_says_what_the_specs_say() -> None:
    assert find_stale((ROOT / "docs/models.md").read_text(encoding="utf-8")) == []


def test_the_package_says_what_the_specs_say() -> None:
    """For installations without Transformers."""
    answers = {name: features(name) for name in model_table.feature_cells()}
    known = {name: dataclasses.asdict(answer) for name, answer in answers.items() if not isinstance(answer, str)}
    assert packaged_features() == json.loads(json.dumps(known)), REPAIR


def test_the_table_is_printed_without_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['transformers'] = None; from quire.entrypoints.cli.main import main; "
        "sys.exit(main(['models', 'Llama*', 'Jamba*', 'Bert*']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not known" not in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("JambaForCausalLM"))
    assert row.split()[1:] == ["yes", "yes", "-", "yes", "yes", "-", "Mamba,", "attention", "+", "experts"]


def test_every_row_that_was_checked_is_equal_and_no_row_lacks_a_comparison() -> None:
    checks = read_table((ROOT / "docs/models.md").read_text(encoding="utf-8")).checks
    assert {cells[0] for cells in checks.values()} == {"equal", "-"}
    assert all(compared_with not in ("", "nothing") for *_, compared_with in checks.values())
    assert all(float(difference) < 1e-3 for verdict, difference, _ in checks.values() if verdict == "equal")


def test_tables_that_are_compared_elsewhere_are_named_in_the_tests() -> None:
    checks = read_table((ROOT / "docs/models.md").read_text(encoding="utf-8")).checks
    places = [*(ROOT / "tests/models").glob("*.py"), ROOT / "tests/oracles/converted_models.py"]
    tested = "\n".join(path.read_text(encoding="utf-8") for path in places)
    tested += "".join(f'"{name}"' for kind, name in CLASSES_OF_OTHERS.items() if f'"{kind}"' in tested)
    elsewhere = [name for name, (*_, compared_with) in checks.items() if "tests/models" in compared_with]
    assert len(elsewhere) > 10
    for name in elsewhere:
        source = ModelRegistry.resolve(name).load()
        kin = [other for other in ModelRegistry.get_supported_archs() if ModelRegistry.resolve(other).load() is source]
        assert any(f'"{other}"' in tested for other in kin), name


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of two architectures, both checked."""
    cells = {"A": ("attention", "yes", "-", "-", "yes", "yes", "-"), "B": ("MLA", "yes", "-", "-", "yes", "yes", "-")}
    monkeypatch.setattr(model_table, "feature_cells", lambda: dict(cells))
    path = tmp_path / "models.md"
    path.write_text(f"above\n{BEGIN}\n{END}\nbelow\n")
    write_table(path, [Result("A", "equal", "", 2e-6), Result("B", "skipped", "", compared_with="A's")])
    return path


def test_a_table_is_read_as_it_was_written(document: Path) -> None:
    text = document.read_text()
    assert text.startswith(f"above\n{BEGIN}\nChecked with quire ") and text.endswith(f"|\n{END}\nbelow\n")
    table = read_table(text)
    assert table.checks == {"A": ("equal", "2.0e-06", "Transformers"), "B": ("-", "-", "A's")}
    assert find_stale(text) == []
    write_table(document, [])
    assert document.read_text() == text


def test_a_check_of_some_rows_keeps_the_others(document: Path) -> None:
    write_table(document, [Result("B", "FAILED", "greedy tokens differ")])
    assert read_table(document.read_text()).checks == {
        "A": ("equal", "2.0e-06", "Transformers"),
        "B": ("FAILED", "-", "Transformers"),
    }


def test_results_of_other_versions_are_not_mixed(document: Path) -> None:
    document.write_text(document.read_text().replace("transformers ", "transformers 0."))
    with pytest.raises(ConfigError, match=r"was checked with quire .*transformers 0.*check every architecture"):
        write_table(document, [Result("B", "equal", "", 1e-6)])
    write_table(document, [Result("A", "equal", "", 1e-6), Result("B", "equal", "", 1e-6)])
    assert "transformers 0." not in document.read_text()


def test_what_is_stale_is_told_with_the_command_that_repairs_it(
    document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = {"A": ("attention", "-", "-", "-", "yes", "yes", "-"), "C": ("Mamba", "yes", "-", "-", "yes", "yes", "-")}
    monkeypatch.setattr(model_table, "feature_cells", lambda: dict(new))
    stale = find_stale(document.read_text())
    assert [line.split(":")[0] for line in stale] == [
        "C is not in the table",
        "B is no architecture any more",
        "A has attention | - | - | - | yes | yes | -, not attention | yes | - | - | yes | yes | -",
    ]
    assert all("tools.model_table" in line for line in stale)
    write_table(document, [])
    assert [line.split(":")[0] for line in find_stale(document.read_text())] == ["C was not checked"]


@pytest.mark.parametrize("content", [None, ""])
def test_a_new_document_is_made(
    content: str | None, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new.md"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(model_table, "DOCUMENT", path)
    monkeypatch.setattr(model_table, "PACKAGED", tmp_path / "new.json")
    assert model_table.main(["--no-check"]) == 0
    assert path.read_text().startswith("# Architectures\n\n<!-- quire models: begin -->\n| architecture |")
    assert dict(read_table(path.read_text()).checks) == {"A": NOT_CHECKED, "B": NOT_CHECKED}
    assert (tmp_path / "new.json").is_file()


def test_a_document_that_cannot_be_written_is_refused_before_anything_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_table, "check", lambda name: pytest.fail("a check ran"))
    monkeypatch.setattr(model_table, "DOCUMENT", tmp_path / "none" / "new.md")
    assert model_table.main(["Llama*"]) == 2
    assert capsys.readouterr().err.startswith("write: cannot write ")


def test_a_document_without_markers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "empty.md"
    path.write_text("nothing\n")
    monkeypatch.setattr(model_table, "DOCUMENT", path)
    assert model_table.main(["--no-check"]) == 2
    assert BEGIN in capsys.readouterr().err


@pytest.mark.parametrize(
    ("architecture", "what"),
    [("LlamaForCausalLM", "logprobs"), ("BertModel", "vectors"), ("LlavaForConditionalGeneration", "logprobs")],
)
def test_a_check_compares_tokens_vectors_and_the_text_of_models_that_see(architecture: str, what: str) -> None:
    result = check(architecture)
    assert result.verdict == "equal" and result.detail.startswith(f"{what} within "), result
    assert result.difference is not None and 0 < result.difference < 1e-3


def test_a_model_that_computes_something_else_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    load_oracle = tiny_models.load_oracle

    def load_other(path):
        oracle = load_oracle(path)
        oracle.model.norm.weight.data *= 1.01
        return oracle

    monkeypatch.setattr(tiny_models, "load_oracle", load_other)
    assert check("LlamaForCausalLM").verdict == "FAILED"
