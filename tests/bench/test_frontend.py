"""`python -m bench frontend` at a tiny size: its figures are there, and no token is lost on the way."""

import argparse

import pytest

from bench import frontend


@pytest.mark.timeout(120)
def test_every_part_is_measured_and_every_stream_is_whole(capsys):
    parser = argparse.ArgumentParser()
    frontend.add_arguments(parser)
    figures = frontend.run_command(parser.parse_args(["--streams", "6", "--output-len", "20", "--step-ms", "1"]))
    assert set(figures["parts_us"]) == set(frontend.PARTS) and all(value > 0 for value in figures["parts_us"].values())
    assert figures["core_token_us"] > 0 and figures["output_tokens_per_second"] > 0
    assert figures["half_load_added_ms"]["p99"] > 0
    assert "a streamed token" in capsys.readouterr().out
