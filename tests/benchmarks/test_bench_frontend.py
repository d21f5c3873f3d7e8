"""`quire bench frontend` at a tiny size: its figures are there, and no token is lost on the way."""

import pytest

from quire.benchmarks.frontend import PARTS
from quire.entrypoints.cli import bench
from quire.entrypoints.cli.bench import build_parser


@pytest.mark.timeout(120)
def test_every_part_is_measured_and_every_stream_is_whole(capsys):
    args = build_parser("frontend").parse_args(["--streams", "6", "--output-len", "20", "--step-ms", "1"])
    figures = bench._load("frontend").run_command(args)
    assert set(figures["parts_us"]) == set(PARTS) and all(value > 0 for value in figures["parts_us"].values())
    assert figures["core_token_us"] > 0 and figures["output_tokens_per_second"] > 0
    assert figures["half_load_added_ms"]["p99"] > 0
    assert "a streamed token" in capsys.readouterr().out
