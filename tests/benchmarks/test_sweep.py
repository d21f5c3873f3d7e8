"""`quire bench sweep`: combinations, commands, going on, failures, files."""

import csv
import json
import shlex
import sys
from pathlib import Path

import pytest
from tests.oracles.server_process import held_port

from quire.benchmarks import sweep as sweep_command
from quire.entrypoints.cli.main import main
from quire.errors import ConfigError


def test_a_grid_is_every_combination_and_a_list_is_itself(tmp_path):
    grid = sweep_command.read_parameters('{"a": [1, 2], "b": ["x", "y"], "c": 3}', "p")
    assert grid == [{"a": a, "b": b, "c": 3} for a in (1, 2) for b in ("x", "y")]
    path = tmp_path / "p.json"
    path.write_text('[{"a": 1, "_benchmark_name": "one"}, {"b": true}]')
    assert sweep_command.read_parameters(str(path), "p") == [{"a": 1}, {"b": True}]
    assert sweep_command.read_parameters('{"small": {"a": 1}, "large": {"a": 9}}', "p") == [{"a": 1}, {"a": 9}]
    assert sweep_command.read_parameters(None, "p") == [{}]
    for text in ("no file", "[]", "[1]", "3"):
        with pytest.raises(ConfigError, match=r"^p: "):
            sweep_command.read_parameters(text, "p")


def test_links_keep_what_is_equal():
    serve, bench = [{"s": 1}, {"s": 2}, {"s": 3}], [{"b": 1}, {"b": 2}]
    links = sweep_command.parse_links("s=b")
    assert sweep_command.combine(serve, bench, links) == [({"s": 1}, [{"b": 1}]), ({"s": 2}, [{"b": 2}])]
    assert sweep_command.combine(serve[:1], bench, []) == [({"s": 1}, bench)]
    with pytest.raises(ConfigError, match="nothing is left"):
        sweep_command.combine([{"s": 7}], bench, links)
    with pytest.raises(ConfigError, match="does not have"):
        sweep_command.combine(serve, bench, [("s", "other")])
    with pytest.raises(ConfigError, match="link_vars"):
        sweep_command.parse_links("s")


def test_parameters_become_flags():
    parameters = {"max_num_seqs": 8, "eager": True, "cache": False, "none": None, "x.y": 1.5, "j": {"a": [1]}}
    expected = ["--max-num-seqs", "8", "--eager", "--no-cache", "--x.y", "1.5", "--j", '{"a": [1]}']
    assert sweep_command.flags(parameters) == expected


def test_folders_are_readable_safe_and_different():
    names = [
        sweep_command.folder_name(one) for one in ({}, {"a": 1}, {"a": "x/../y"}, {"a": "x:..:y"}, {"a": "z" * 300})
    ]
    assert names[:2] == ["default", "a=1"] and len(set(names)) == 5
    assert all("/" not in name and len(name) <= 110 for name in names)


BENCH = """
import json, sys
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
size = int(flags["--size"])
log = open(sys.argv[1], "a"); log.write(f"{size}\\n"); log.close()
if size == 13:
    sys.exit("unlucky size")
json.dump({"output_throughput": size * 10.0, "runs": [1]}, open(flags["--output-json"], "w"))
"""


@pytest.fixture
def sweep(tmp_path):
    """Runs a sweep over a small program; `.ran` tells the sizes that it was called with."""
    program = tmp_path / "bench.py"
    program.write_text(BENCH)
    log = tmp_path / "calls"
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(program))} {shlex.quote(str(log))}"

    def run(*flags: str) -> int:
        return main(["bench", "sweep", "--bench-cmd", command, "-o", str(tmp_path / "out"), "--num-runs", "2", *flags])

    run.out = tmp_path / "out" / "one"
    run.ran = lambda: [int(line) for line in log.read_text().splitlines()] if log.exists() else []
    return run


def test_a_sweep_runs_all_and_keeps_json_csv_and_plots(sweep, capsys):
    flags = ["--bench-params", '{"size": [4, 2], "mode": ["a", "b"]}', "-e", "one", "--plot"]
    assert sweep(*flags, "--x", "size", "--curve-by", "mode") == 0
    assert sweep.ran() == [4, 4, 4, 4, 2, 2, 2, 2]
    rows = json.loads((sweep.out / "summary.json").read_text())
    assert len(rows) == 8 and rows[0] == {"output_throughput": 40.0, "size": 4, "mode": "a", "run_number": 0}
    with open(sweep.out / "summary.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["size"] for row in table] == ["4"] * 4 + ["2"] * 4 and table[3]["mode"] == "b"
    assert (sweep.out / "output_throughput.svg").read_text().count("<circle") == 4
    assert (sweep.out / "default" / "size=4,mode=a" / "run=0.json").is_file()
    assert "8 results" in capsys.readouterr().out


def test_a_sweep_goes_on_where_it_stopped(sweep, capsys):
    flags = ["--bench-params", '{"size": [4, 2]}']
    assert sweep(*flags, "-e", "one") == 0
    (sweep.out / "default" / "size=2" / "run=1.json").write_text("{half of a res")
    assert sweep(*flags, "--resume", "one") == 0
    assert sweep.ran() == [4, 4, 2, 2, 2]
    assert sweep(*flags, "-e", "one") == 2 and "--resume" in capsys.readouterr().err
    assert (
        sweep("--bench-params", '{"size": [5]}', "--resume", "one") == 2 and "another plan" in capsys.readouterr().err
    )
    assert sweep(*flags, "--resume", "two") == 2 and "no sweep" in capsys.readouterr().err


def test_a_failure_is_told_and_the_rest_goes_on(sweep, capsys):
    assert sweep("--bench-params", '{"size": [13, 2]}', "-e", "one") == 1
    output = capsys.readouterr().out
    assert output.count("Failed") == 2 and "unlucky size" in output
    assert [row["size"] for row in json.loads((sweep.out / "summary.json").read_text())] == [2, 2]


def test_a_dry_run_only_prints(sweep, capsys):
    assert sweep("--bench-params", '{"size": [4]}', "--dry-run", "--serve-cmd", "serve it", "-e", "one") == 0
    output = capsys.readouterr().out
    assert "server: serve it" in output and output.count("--size 4 --output-json") == 2
    assert sweep.ran() == [] and not sweep.out.exists()


def test_a_server_that_does_not_start_is_told(sweep, tmp_path, capsys):
    broken = f"{shlex.quote(sys.executable)} -c 'raise SystemExit(3)' --port 1"
    assert sweep("--serve-cmd", broken, "--bench-params", '{"size": [4]}', "-e", "one") == 1
    assert "ended with code 3" in capsys.readouterr().out and sweep.ran() == []


def test_parameters_of_a_server_need_a_server(sweep, capsys):
    assert sweep("--serve-params", '{"a": 1}') == 2 and "--serve-cmd" in capsys.readouterr().err
    assert main(["bench", "sweep"]) == 2 and "bench_cmd" in capsys.readouterr().err


@pytest.fixture
def port():
    with held_port() as port:
        yield port


SERVER = """
import http.server, sys
port, name = int(sys.argv[sys.argv.index("--port") + 1]), sys.argv[sys.argv.index("--name") + 1]
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        open(sys.argv[1], "a").write(f"{name} {self.command} {self.path}\\n")
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    do_GET = do_POST = answer
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_each_server_is_started_once_and_its_cache_emptied_between_runs(sweep, tmp_path, port):
    program, calls = tmp_path / "server.py", tmp_path / "server-calls"
    program.write_text(SERVER)
    command = shlex.join([sys.executable, str(program), str(calls), "--port", str(port)])
    flags = ["--serve-cmd", command, "--serve-params", '{"name": ["first", "second"]}']
    assert sweep(*flags, "--bench-params", '{"size": [4, 2]}', "-e", "one") == 0
    resets = [line.split()[0] for line in calls.read_text().splitlines() if "POST /reset_prefix_cache" in line]
    assert resets == ["first"] * 4 + ["second"] * 4
    rows = json.loads((sweep.out / "summary.json").read_text())
    assert [(row["name"], row["size"]) for row in rows[::2]] == [
        ("first", 4),
        ("first", 2),
        ("second", 4),
        ("second", 2),
    ]
    assert Path(sweep.out / "name=first" / "server.log").is_file()


def test_bench_serve_itself_is_swept_against_a_running_server(tmp_path):
    from bench.client import started_source

    with started_source() as url:
        words = [sys.executable, "-m", "quire.entrypoints.cli.main", "bench", "serve", "--base-url", url]
        command = shlex.join([*words, "--num-prompts", "4", "--output-len", "3"])
        flags = ["--bench-params", '{"max_concurrency": [1, 2]}', "--num-runs", "1", "-o", str(tmp_path), "-e", "s"]
        assert main(["bench", "sweep", "serve", "--bench-cmd", command, *flags, "--plot"]) == 0
    rows = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert [(row["max_concurrency"], row["completed"]) for row in rows] == [(1, 4), (2, 4)]
    assert {path.name for path in (tmp_path / "s").glob("*.svg")} == {
        "output_throughput.svg",
        "median_ttft_ms.svg",
        "median_tpot_ms.svg",
    }
