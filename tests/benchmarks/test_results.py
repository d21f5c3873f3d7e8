"""Result files read again, compared and drawn."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from quire.benchmarks import plot
from quire.benchmarks.compare_results import compare, different_work
from quire.benchmarks.plot import curves_of, first_varying
from quire.benchmarks.results import direction, flatten, read_rows
from quire.entrypoints.cli.main import main
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("output_throughput", 1),
        ("output_tokens_per_second", 1),
        ("max_output_tokens_per_s", 1),
        ("request_goodput", 1),
        ("completed", 1),
        ("tasks.chat.accuracy", 1),
        ("median_ttft_ms", -1),
        ("batch_seconds.p50", -1),
        ("duration", -1),
        ("failed", -1),
        ("peak_rss_mib.p50", -1),
        ("std_ttft_ms", 0),
        ("request_rate", 0),
        ("num_prompts", 0),
        ("max_step_ms", 0),
    ],
)
def test_names_tell_which_way_is_better(name, sign):
    assert direction(name) == sign


def test_nested_results_become_rows_without_lists_and_machines():
    figures = {"a": 1, "b": {"p50": 2.5, "deep": {"x": "y"}}, "ttfts": [1, 2], "machine": {"cores": 4}, "none": None}
    assert flatten(figures) == {"a": 1, "b.p50": 2.5, "b.deep.x": "y", "none": None}


def test_results_are_read_from_one_several_lines_and_folders(tmp_path):
    (tmp_path / "a.json").write_text('{"v": 1}')
    (tmp_path / "b.jsonl").write_text('{"v": 2}\n{"v": 3}\n')
    (tmp_path / "c.json").write_text('[{"v": 4}]')
    (tmp_path / "other.log").write_text("nothing")
    assert [row["v"] for row in read_rows(str(tmp_path))] == [1, 2, 3, 4]
    for content in ("{broken", "[1]", "[]"):
        (tmp_path / "d.json").write_text(content)
        with pytest.raises(ConfigError, match="results"):
            read_rows(str(tmp_path / "d.json"))


def verdicts(base: list[dict], new: list[dict], margin: float = 0.03) -> dict[str, str]:
    return {row["figure"]: row["verdict"] for row in compare(base, new, margin)}


def test_a_difference_within_the_margin_is_noise():
    base = [{"output_throughput": 100.0, "median_ttft_ms": 10.0, "num_prompts": 5}]
    assert verdicts(base, [{"output_throughput": 102.0, "median_ttft_ms": 10.2, "num_prompts": 5}]) == {
        "output_throughput": "same",
        "median_ttft_ms": "same",
    }
    assert verdicts(base, [{"output_throughput": 110.0, "median_ttft_ms": 11.0}]) == {
        "output_throughput": "better",
        "median_ttft_ms": "worse",
    }


def test_the_margin_is_as_wide_as_the_runs_of_a_side_lie_apart():
    base = [{"duration": value} for value in (9.0, 10.0, 11.0)]
    (row,) = compare(base, [{"duration": 11.5}], 0.03)
    assert row["noise"] == pytest.approx(0.2) and row["change"] == pytest.approx(0.15) and row["verdict"] == "same"
    assert verdicts(base, [{"duration": 12.5}]) == {"duration": "worse"}


def test_figures_of_nothing_are_compared_without_dividing_by_it():
    assert verdicts([{"failed": 0}], [{"failed": 0}]) == {}
    assert verdicts([{"failed": 0}], [{"failed": 2}]) == {"failed": "worse"}


def test_other_work_is_told():
    base = [{"num_prompts": 5, "seed": 0, "duration": 1.0}, {"num_prompts": 5, "seed": 1}]
    assert different_work(base, [{"num_prompts": 9, "seed": 0}]) == {"num_prompts": (5, 9), "seed": ([0, 1], 0)}


def test_the_command_prints_writes_and_fails_when_asked(tmp_path, capsys):
    for name, rate in (("base", 100.0), ("new", 80.0)):
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"output_throughput": rate, "median_ttft_ms": 5.0, "seed": 0})
        )
    sides = [str(tmp_path / "base.json"), str(tmp_path / "new.json")]
    report = tmp_path / "report.json"
    assert main(["bench", "compare-results", *sides, "--json", str(report)]) == 0
    output = capsys.readouterr().out
    assert "worse" in output and "-20.0%" in output and "Not the same work" not in output
    assert [row["verdict"] for row in json.loads(report.read_text())["figures"]] == ["worse", "same"]
    assert main(["bench", "compare-results", *sides, "--fail-if-worse"]) == 1
    assert main(["bench", "compare-results", *sides, "--fail-if-worse", "--margin", "25"]) == 0
    assert main(["bench", "compare-results", *sides, "--fail-if-worse", "--metrics", "ttft"]) == 0


def test_ticks_are_round_and_cover_the_values():
    assert plot.nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert plot.nice_ticks(3.1, 17.9) == [0, 5, 10, 15, 20]
    assert plot.nice_ticks(5, 5)[0] <= 5 < plot.nice_ticks(5, 5)[-1]
    assert plot.nice_ticks(-0.013, 0.02)[0] <= -0.013 and len(plot.nice_ticks(0, 0.0007)) <= 9
    assert [plot.number_text(value) for value in (0.25, 1500, 25000, 3e6)] == ["0.25", "1500", "25k", "3M"]


ROWS = [
    {"rate": rate, "batch": batch, "output_throughput": rate * batch + run, "same": 1}
    for rate in (4, 1, 16)
    for batch in (8, 32)
    for run in (0, 1, 5)
]


def test_curves_are_medians_over_the_first_setting_that_varies():
    assert first_varying(ROWS) == "rate"
    small, large = curves_of(ROWS, "rate", "output_throughput", ["batch"])
    assert small.name == "batch=8" and list(small.points) == [(1, 9), (4, 33), (16, 129)]
    assert list(large.spread) == [(32, 37), (128, 133), (512, 517)]


def test_charts_are_svg_with_a_point_a_value(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    command = ["bench", "plot", str(tmp_path / "rows.json"), "--y", "output_throughput", "--curve-by", "batch"]
    assert main([*command, "-o", str(tmp_path / "deep" / "c.svg")]) == 0
    root = ElementTree.parse(tmp_path / "deep" / "c.svg").getroot()
    circles = [part for part in root if part.tag.endswith("circle")]
    texts = [part.text for part in root if part.tag.endswith("text")]
    assert len(circles) == 6 and {"rate", "output_throughput", "batch=8", "batch=32"} <= set(texts)
    for circle in circles:
        assert plot.LEFT <= float(circle.get("cx")) <= plot.WIDTH and 0 <= float(circle.get("cy")) <= plot.HEIGHT


def test_names_are_escaped_in_charts():
    chart = plot.line_chart([plot.Curve("<a> & b", [(1, 2)])], "x < y", "a", "b")
    assert ElementTree.fromstring(chart) is not None and "<a>" not in chart


@pytest.mark.parametrize("flags", [["--x", "nothing"], ["--y", "nothing"], ["-o", "x.svg"], ["--curve-by", "nothing"]])
def test_what_cannot_be_drawn_is_refused_by_name(tmp_path, flags, capsys):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    assert main(["bench", "plot", str(tmp_path / "rows.json"), *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1
