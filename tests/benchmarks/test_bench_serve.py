"""`quire bench serve` from its flags to its files, against a source of streams and against a real server."""

import json

import pytest
from bench.client import started_source

from quire.benchmarks.serve_metrics import COARSE_EVENTS
from quire.entrypoints.cli.main import main


@pytest.fixture(scope="module")
def url():
    with started_source() as address:
        yield address


def bench(*words: str) -> int:
    return main(["bench", "serve", "--disable-tqdm", "--num-prompts", "8", "--output-len", "5", *words])


TABLE = (
    "Successful requests:",
    "Failed requests:",
    "Benchmark duration (s):",
    "Total input tokens:",
    "Total generated tokens:",
    "Request throughput (req/s):",
    "Output token throughput (tok/s):",
    "Peak output token throughput (tok/s):",
    "Peak concurrent requests:",
    "Total token throughput (tok/s):",
    *(f"{kind} {name} (ms):" for name in ("TTFT", "TPOT", "ITL", "E2EL") for kind in ("Mean", "Median", "P99")),
)


def test_the_table_has_vllms_lines(url, capsys):
    assert bench("--base-url", url + "/v1", "--input-len", "16") == 0
    lines = capsys.readouterr().out.splitlines()
    values = {line[:40].strip(): line[40:].strip() for line in lines if ":" in line}
    assert set(TABLE) <= set(values)
    assert values["Total input tokens:"] == "128" and values["Total generated tokens:"] == "40"


def test_host_and_port_are_another_way_to_say_where(url, capsys):
    assert bench("--port", url.rsplit(":", 1)[1], "--model", "source", "--endpoint-type", "vllm") == 0
    assert "Successful requests:                     8" in capsys.readouterr().out


def test_the_result_file_has_vllms_keys_and_name(url, tmp_path, capsys):
    flags = ["--request-rate", "400", "--burstiness", "2", "--max-concurrency", "3", "--metric-percentiles", "50,99.9"]
    flags += ["--goodput", "ttft:10000", "tpot:10000", "e2el:10000", "--metadata", "commit=abc"]
    assert bench("--base-url", url, *flags, "--save-detailed", "--result-dir", str(tmp_path)) == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("openai-400qps-concurrency3-source-") and str(path) in capsys.readouterr().out
    figures = json.loads(path.read_text())
    keys = {"date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"}
    keys |= {"burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "commit"}
    keys |= {"total_output_tokens", "request_throughput", "request_goodput", "output_throughput"}
    keys |= {
        "total_token_throughput",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
        "input_lens",
        "output_lens",
    }
    keys |= {"start_times", "ttfts", "itls", "generated_texts", "errors"}
    statistics = ("mean", "median", "std", "p50", "p99.9")
    keys |= {f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in statistics}
    assert keys <= set(figures)
    assert figures["request_goodput"] == figures["request_throughput"] > 0
    assert figures["generated_texts"] == [" word" * 5] * 8 and len(figures["itls"][0]) == 4
    assert figures["max_concurrent_requests"] <= 3 and figures["start_times"] == sorted(figures["start_times"])


def test_latencies_are_at_least_what_the_server_takes(tmp_path):
    report = tmp_path / "figures.json"
    with started_source(0.01) as slow:
        flags = ["--base-url", slow, "--endpoint", "/v1/completions?first_ms=30", "--json", str(report)]
        assert bench(*flags) == 0
    figures = json.loads(report.read_text())
    assert figures["median_ttft_ms"] >= 30 and figures["mean_tpot_ms"] >= 5
    assert figures["median_e2el_ms"] >= figures["median_ttft_ms"] + 20
    assert figures["duration"] * 1000 >= figures["median_e2el_ms"]


def test_results_can_be_appended_line_by_line(url, tmp_path):
    flags = ["--base-url", url, "--append-result", "--result-filename", "all.jsonl", "--result-dir", str(tmp_path)]
    assert bench(*flags) == 0 == bench(*flags, "--label", "again")
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == [None, "again"] and "ttfts" not in lines[0]


def test_several_clients_see_the_same_tokens_as_one(url, tmp_path):
    report = tmp_path / "figures.json"
    assert bench("--base-url", url, "--num-clients", "3", "--num-prompts", "50", "--json", str(report)) == 0
    figures = json.loads(report.read_text())
    assert figures["completed"] == 50 and figures["total_output_tokens"] == 250
    assert figures["client"]["processes"] == 3 and figures["max_concurrent_requests"] > 3


def test_a_timeline_is_drawn(url, tmp_path):
    import xml.etree.ElementTree as ElementTree

    assert bench("--base-url", url, "--plot-timeline", str(tmp_path / "t.svg")) == 0
    root = ElementTree.parse(tmp_path / "t.svg").getroot()
    assert root.tag.endswith("svg")
    assert len([part for part in root if part.get("stroke") == "#0072b2"]) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base-url", "http://127.0.0.1:1"], "base_url: cannot use http://127.0.0.1:1: Connection refused"),
        (["--request-rate", "0"], "request_rate"),
        (["--goodput", "speed:3"], "goodput: 'speed:3'"),
        (["--percentile-metrics", "ttft,abc"], "percentile_metrics: 'abc'"),
        (["--metric-percentiles", "101"], "metric_percentiles"),
        (["--header", "X"], "header: 'X'"),
        (["--header", "X=a\nb"], "header: 'X'"),
        (["--start-server", "--base-url", "http://h"], "base_url"),
        (["--dataset-name", "hf"], "--dataset-name"),
        (["--max-concurency", "3"], "did you mean --max-concurrency"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(flags, message, capsys):
    assert bench(*flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_server_that_starts_is_waited_for(capsys):
    """It answers 503 twice, then lists its model."""
    import http.server
    import threading

    answers = [(503, b"{}"), (503, b"{}"), (200, b'{"data": []}')]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert bench("--base-url", address, "--ready-check-timeout-sec", "60") == 2
        captured = capsys.readouterr()
        assert "Waiting for" in captured.out and "lists no model" in captured.err
        answers += [(503, b"loading"), (401, b"key?")]
        assert bench("--base-url", address) == 2 and "answers 503: loading" in capsys.readouterr().err
        assert bench("--base-url", address) == 2 and "answers 401: key?" in capsys.readouterr().err
        server.shutdown()


def test_models_are_drawn_from_the_adapters(url, tmp_path):
    report = tmp_path / "figures.json"
    flags = ["--lora-modules", "source", "other", "--num-prompts", "30", "--num-warmups", "0", "--json", str(report)]
    assert bench("--base-url", url, *flags) == 0
    figures = json.loads(report.read_text())
    assert 5 <= figures["completed"] <= 25 and "there is no 'other'" in figures["first_error"]


def test_a_model_that_the_server_does_not_have_fails_the_warm_up(url, capsys):
    assert bench("--base-url", url, "--model", "other") == 1
    assert "A warm-up request failed: status 404" in capsys.readouterr().err


def test_messages_need_the_chat_route(url, tmp_path, capsys):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    assert bench("--base-url", url, "--dataset-name", "custom", "--dataset-path", str(path)) == 2
    assert "openai-chat" in capsys.readouterr().err


SMALL = "--kv-cache-memory-bytes 64M --max-model-len 1024 --max-num-seqs 16 --disable-log-stats --port {port}"


@pytest.fixture(scope="module")
def demo_url():
    from quire.benchmarks.own_server import started_server

    with started_server(SMALL.removesuffix(" --port {port}").split()) as address:
        yield address


def figures_of(tmp_path, *words: str) -> dict:
    report = tmp_path / "figures.json"
    assert bench(*words, "--json", str(report)) == 0
    return json.loads(report.read_text())


@pytest.mark.parametrize("flag", ["--save-result", "--save-detailed", "--append-result"])
def test_a_folder_that_cannot_take_results_is_told_before_any_server_is_asked(tmp_path, flag, capsys):
    (tmp_path / "file").write_text("in the way")
    folder = str(tmp_path / "file" / "results")
    assert bench("--base-url", "http://127.0.0.1:1", flag, "--result-dir", folder) == 2
    error = capsys.readouterr().err
    assert "result_dir" in error and folder in error and "127.0.0.1" not in error


def test_a_folder_for_results_is_made_where_it_is_missing(url, tmp_path):
    folder = tmp_path / "new" / "results"
    assert bench("--base-url", url, "--save-result", "--result-dir", str(folder)) == 0
    assert len(list(folder.glob("*.json"))) == 1


def test_a_real_server_counts_as_the_client_asked(demo_url, tmp_path):
    figures = figures_of(tmp_path, "--base-url", demo_url, "--input-len", "40")
    assert (figures["completed"], figures["failed"], figures["first_error"]) == (8, 0, None)
    assert figures["total_input_tokens"] == 320 and figures["total_output_tokens"] == 40
    assert 0 < figures["median_ttft_ms"] <= figures["median_e2el_ms"] <= figures["duration"] * 1000


def test_a_real_server_answers_chats_of_a_file(demo_url, tmp_path, capsys):
    path = tmp_path / "own.jsonl"
    lines = [{"messages": [{"role": "user", "content": "What is 17 + 25?"}]}, {"prompt": "What is 3 + 4?"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--backend", "openai-chat", "--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle"]
    flags += ["--no-oversample", "--output-len", "64", "--save-detailed", "--result-dir", str(tmp_path / "results")]
    figures = figures_of(tmp_path, "--base-url", demo_url, *flags)
    assert figures["completed"] == 2
    assert "42" in figures["generated_texts"][0] and "7" in figures["generated_texts"][1]


def test_a_servers_own_tokenizer_counts_the_lengths_of_sharegpt(demo_url, tmp_path):
    path = tmp_path / "talks.json"
    question = "Please tell me how many legs three spiders have together."
    path.write_text(json.dumps([{"conversations": [{"value": question}, {"value": "Three spiders have 24 legs."}]}]))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--no-oversample", "--ignore-eos"]
    figures = figures_of(tmp_path, "--base-url", demo_url, *flags)
    assert figures["completed"] == 1 and figures["total_output_tokens"] == 5
    assert 10 <= figures["total_input_tokens"] < len(question)


def test_the_prefix_cache_is_emptied_on_demand_and_profiling_is_asked_for(demo_url, tmp_path, capsys):
    assert bench("--base-url", demo_url, "--input-len", "20", "--reset-prefix-cache") == 0
    capsys.readouterr()
    assert bench("--base-url", demo_url, "--input-len", "20", "--endpoint", "/v1/nothing") == 1
    assert "A warm-up request failed: status 404" in capsys.readouterr().err


def test_a_server_without_a_tokenizer_is_measured_by_token_ids(tmp_path, capsys):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 1200,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    server = f"{tmp_path / 'model'} --load-format dummy --skip-tokenizer-init --disable-log-stats"
    flags = ["--server-args", server, "--input-len", "20", "--output-len", "16"]
    figures = figures_of(tmp_path, *flags, "--extra-body", '{"return_token_ids": true}')
    assert figures["completed"] == 8 and figures["total_output_tokens"] == 128
    assert figures["median_tpot_ms"] > 0  # a busy machine sends several tokens in an event all the same
    assert ("--extra-body" in capsys.readouterr().out) == (figures["tokens_per_event"] > COARSE_EVENTS)


def test_a_server_is_started_and_ended_for_the_run(tmp_path):
    figures = figures_of(tmp_path, "--server-args", SMALL.format(port=0), "--input-len", "20")
    assert figures["completed"] == 8
