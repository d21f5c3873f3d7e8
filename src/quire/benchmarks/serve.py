"""`quire bench serve`: a load on any server that speaks the OpenAI protocol; flags, measures and result files are vLLM's.

Each request is streamed; its first token, its gaps and its end are timed. The client needs no tokenizer for synthetic
prompts: they are token ids.
"""

import argparse
import json
import random
import shlex
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from quire.benchmarks import arrivals, common, datasets, serve_metrics
from quire.benchmarks.datasets import CountTokens, Sample
from quire.benchmarks.load import LoadJob, LoadResult, run_load
from quire.engine.arg_parser import Flags, add_flags, json_object, positive
from quire.entrypoints.http_client import Target, ask, control
from quire.errors import ConfigError, EngineError

BACKENDS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "quire": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
"""Kinds of servers and their routes. vLLM's other kinds are not measured here."""

SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
    "logprobs": int,
}
STARTING = 503
"""The status of a server that is not ready, or that is not there yet."""
FALLBACK_VOCAB_SIZE = 1000
"""Ids below this are in every model's vocabulary, where the server does not tell its own."""


SERVER: Flags = (
    ("--backend --endpoint-type", "openai", "protocol of the server", {"choices": tuple(BACKENDS)}),
    ("--base-url", None, "the server; else http://HOST:PORT", {"metavar": "URL"}),
    ("--host", "127.0.0.1", "the server's host"),
    ("--port", 8000, "its port"),
    ("--endpoint", None, "the route; else that of the backend", {"metavar": "PATH"}),
    ("--model", None, "the model's name; else the first that the server lists"),
    ("--served-model-name", None, "the name in requests, where it is not --model"),
    ("--tokenizer", None, "its folder or hub id, where prompts are text and lengths matter", {"metavar": "NAME"}),
    ("--tokenizer-mode", "auto", "auto, hf or slow"),
    ("--skip-tokenizer-init", False, "never load a tokenizer here"),
    ("--lora-modules", None, "each request takes its model at random from these", {"nargs": "+", "metavar": "NAME"}),
    ("--api-key", None, "the server's key (else QUIRE_API_KEY)"),
    ("--header", [], "further headers", {"nargs": "+", "action": "extend", "metavar": "NAME=VALUE"}),
    ("--insecure", False, "accept any certificate"),
    ("--ready-check-timeout-sec", 0, "wait this long until the server is ready (0: do not wait)", {"type": float}),
    ("--start-server", False, "start `quire serve` for this run, and end it"),
    ("--server-args", None, "flags for the server that is started", {"metavar": "TEXT"}),
)
BODY: Flags = (
    ("--temperature", 0.0, "0 is greedy (0)"),
    *(
        (f"--{name.replace('_', '-')}", None, "as in the protocol", {"type": kind})
        for name, kind in list(SAMPLING.items())[1:]
    ),
    (
        "--ignore-eos",
        None,
        "answers have exactly their length (on for random and prefix_repetition)",
        {"action": argparse.BooleanOptionalAction},
    ),
    ("--extra-body", {}, "further fields of every request", {"type": json_object, "metavar": "JSON"}),
    (
        "--chat-template-kwargs",
        None,
        "variables of the chat template, in every request",
        {"type": json_object, "metavar": "JSON"},
    ),
)
MEASURES: Flags = (
    ("--seed --bench-seed", 0, "seed of prompts, lengths and arrivals"),
    ("--num-warmups", 1, "requests before measuring, one after another", {"type": int}),
    ("--num-clients", 1, "processes that send the requests"),
    ("--vocab-size", None, "random ids are below it; else the server is asked", {"type": positive}),
    ("--goodput", [], "service levels: ttft, tpot, e2el", {"nargs": "+", "metavar": "NAME:MS"}),
    ("--percentile-metrics", "ttft,tpot,itl,e2el", "latencies to show (all)"),
    ("--metric-percentiles", "99", "percentiles of them, with commas between"),
    ("--profile", False, "tell the server to profile the measured part"),
    ("--reset-prefix-cache", False, "empty the server's prefix cache before measuring"),
    ("--disable-tqdm", False, "show no progress"),
)
RESULT: Flags = (
    ("--save-result", False, "write the figures as JSON"),
    ("--save-detailed", False, "with every request's times and text"),
    ("--append-result", False, "add a line to the file"),
    ("--result-dir", None, "where (the current folder)", {"metavar": "PATH"}),
    ("--result-filename", None, "its name; else made of backend, rate, model and time", {"metavar": "NAME"}),
    ("--label", None, "begins the file's name, in place of the backend"),
    ("--metadata", [], "further keys of the result", {"nargs": "*", "metavar": "NAME=VALUE"}),
    ("--plot-timeline", None, "plot every request's time as SVG", {"metavar": "PATH"}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = datasets.flags(num_prompts=1000, input_len=1024, output_len=128)
    rest = {"Arrival": arrivals.FLAGS, "Body of a request": BODY, "Measures": MEASURES, "Result": RESULT}
    add_flags(parser, {"Server": SERVER, **data, **rest})


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    plan = arrivals.from_arguments(args)  # what is wrong is said before anything is started
    levels = serve_metrics.parse_goodput(args.goodput)
    metrics = serve_metrics.parse_metrics(args.percentile_metrics)
    shares = serve_metrics.parse_shares(args.metric_percentiles)
    headers, metadata = _headers(args), _pairs(args.metadata, "metadata")
    if args.save_result or args.save_detailed or args.append_result:
        common.check_folder(args.result_dir or ".", "result_dir")
    is_own = args.start_server or args.server_args is not None
    with _own_server(args) if is_own else nullcontext(args.base_url or f"http://{args.host}:{args.port}") as url:
        target = Target.parse(url, headers, args.insecure)
        model = _await_model(target, args)
        samples = datasets.load_samples(
            args, args.seed, args.vocab_size or _vocab_size(target), _token_counter(target, args, model)
        )
        times = plan.times(len(samples), args.seed)
        figures, details = _measure(args, target, model, samples, times, shares, levels)
    figures |= metadata
    serve_metrics.print_report(figures, metrics, shares)
    if args.plot_timeline:
        from quire.benchmarks.plot import timeline

        common.write_text(args.plot_timeline, timeline(details, figures["duration"]), "plot")
    if args.save_detailed:
        figures |= details
    if args.save_result or args.save_detailed or args.append_result:
        path = serve_metrics.result_path(args.result_dir, args.result_filename, figures)
        serve_metrics.write_result(path, figures, args.append_result)
        print(f"Written to {path}")
    return figures


def _measure(
    args: argparse.Namespace,
    target: Target,
    model: str,
    samples: list[Sample],
    times: list[float],
    shares: list[float],
    levels: dict[str, float],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of a load, and what each request saw."""
    result = _send(args, target, model, samples, times)
    planned = [sample.prompt_len for sample in samples]
    figures: dict[str, Any] = {
        "date": serve_metrics.timestamp(),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": args.tokenizer,
        "num_prompts": len(samples),
        "dataset_name": args.dataset_name,
        "seed": args.seed,
        **arrivals.describe(args),
        **serve_metrics.build_figures(result.records, planned, result.began, shares, levels),
        "goodput_slo": levels or None,
        "first_error": next((record.error for record in result.records if record.error), None),
        "client": {
            "processes": args.num_clients,
            "cpu_share": round(result.cpu_share, 4),
            "max_lag_ms": round(result.max_lag_s * 1000, 3),
        },
        "machine": common.machine(),
    }
    return figures, serve_metrics.detailed(result.records, planned, result.began)


def _send(
    args: argparse.Namespace, target: Target, model: str, samples: list[Sample], times: list[float]
) -> LoadResult:
    """Warm the server up, and send the load.
    Raises EngineError: a request of the warm-up failed."""
    path = args.endpoint or BACKENDS[args.backend]
    is_chat = path.rstrip("/").endswith("/chat/completions")
    make_body = _body_maker(args, model, is_chat, datasets.has_fixed_lengths(args))
    for number in range(args.num_warmups):
        warm = samples[number % len(samples)].altered(number)
        warmed = run_load(LoadJob(target, path, [make_body(warm)], [0.0]))
        if warmed.records[0].error:
            raise EngineError(f"A warm-up request failed: {warmed.records[0].error}")
    if args.reset_prefix_cache:
        control(target, "POST", "/reset_prefix_cache")
    job = LoadJob(
        target,
        path,
        bodies=[make_body(sample) for sample in samples],
        times=times,
        max_concurrency=args.max_concurrency or 0,
        keep_text=args.save_detailed,
        show_progress=not args.disable_tqdm,
    )
    if args.profile:
        control(target, "POST", "/start_profile")
    result = run_load(job, args.num_clients)
    if args.profile:
        control(target, "POST", "/stop_profile")
    return result


def _body_maker(args: argparse.Namespace, model: str, is_chat: bool, is_fixed: bool) -> Callable[[Sample], bytes]:
    """What makes a request's JSON."""
    common_fields: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    for name in SAMPLING:
        if getattr(args, name) is not None:
            common_fields[name] = getattr(args, name)
    if args.ignore_eos or (args.ignore_eos is None and is_fixed):
        common_fields["ignore_eos"] = True
    if args.chat_template_kwargs is not None:
        common_fields["chat_template_kwargs"] = args.chat_template_kwargs
    if is_chat and args.logprobs is not None:
        common_fields |= {"logprobs": True, "top_logprobs": args.logprobs}
    tokenizer = _tokenizer(args)
    adapters = random.Random(args.seed)

    def text_of(prompt: list[int]) -> str:
        return tokenizer.decode(prompt) if tokenizer is not None else " ".join(map(str, prompt))

    def make(sample: Sample) -> bytes:
        body = dict(common_fields)
        prompt: Any = sample.prompt
        if args.lora_modules:
            body["model"] = adapters.choice(args.lora_modules)
        if is_chat:
            if sample.kind != "messages":
                prompt = [{"role": "user", "content": prompt if sample.kind == "text" else text_of(prompt)}]
            body |= {"messages": prompt, "max_completion_tokens": sample.output_len}
        elif sample.kind == "messages":
            raise ConfigError.of("backend", "the data set has `messages`, which only --backend openai-chat can send.")
        else:
            body |= {"prompt": prompt, "max_tokens": sample.output_len}
        return json.dumps(body | args.extra_body, separators=(",", ":")).encode()

    return make


def _headers(args: argparse.Namespace) -> dict[str, str]:
    from quire import envs

    headers = _pairs(args.header, "header")
    key = args.api_key or envs.QUIRE_API_KEY
    if key and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {key}"
    for name, value in headers.items():
        if any(letter in name + value for letter in "\r\n") or ":" in name:
            raise ConfigError.of("header", f"{name!r} is not a header's name, or its value has line ends.")
    return headers


def _pairs(words: list[str], setting: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise ConfigError.of(setting, f"{word!r} must be NAME=VALUE.")
        pairs[name.strip()] = value.strip()
    return pairs


def _own_server(args: argparse.Namespace) -> Any:
    from quire.benchmarks.own_server import started_server

    if args.base_url:
        message = f"{args.base_url!r} is a running server, and --start-server starts one; give one of them."
        raise ConfigError.of("base_url", message)
    return started_server([*([args.model] if args.model else []), *shlex.split(args.server_args or "")])


def _await_model(target: Target, args: argparse.Namespace) -> str:
    """The model's name in requests, once the server lists its models.
    Raises ConfigError: no server answers there in time, or the server lists nothing."""
    given = args.served_model_name or (args.model if not (args.start_server or args.server_args is not None) else None)
    last = time.monotonic() + args.ready_check_timeout_sec
    told = False
    while True:
        try:
            status, body = ask(target, "GET", "/v1/models")
            reason = f"/v1/models answers {status}: {body[:300].decode('utf-8', 'replace')}"
        except OSError as error:
            status, body = STARTING, b""
            reason = f"{error.strerror or error}. Is a server running there? `quire serve` starts one."
        if status != STARTING or time.monotonic() >= last:
            break
        if not told:
            print(f"Waiting for {target.url} for up to {args.ready_check_timeout_sec:.0f} s ...", flush=True)
            told = True
        time.sleep(0.5)
    if given and status in (200, 404, 405):  # a server without this route may serve the others
        return given
    if status != 200:
        raise ConfigError.of("base_url", f"cannot use {target.url}: {reason}")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError.of("model", f"{target.url} lists no model; name it with --model.") from None


def _vocab_size(target: Target) -> int:
    """The vocabulary that the server tells of, or one that is in every model's."""
    try:
        size = control(target, "GET", "/tokenizer_info").get("vocab_size")
    except (OSError, EngineError, AttributeError):
        return FALLBACK_VOCAB_SIZE
    return size if isinstance(size, int) and size > 0 else FALLBACK_VOCAB_SIZE


def _tokenizer(args: argparse.Namespace) -> Any:
    if not args.tokenizer or args.skip_tokenizer_init:
        return None
    from quire.config.hub import find_tokenizer
    from quire.config.hub.listing import HubSettings
    from quire.tokenizers.loader import get_tokenizer

    return get_tokenizer(find_tokenizer(args.tokenizer, HubSettings()), args.tokenizer_mode)


def _token_counter(target: Target, args: argparse.Namespace, model: str) -> CountTokens:
    """Counts a text's tokens: with the tokenizer that was named, else with the server's own route."""
    tokenizer = _tokenizer(args)
    if tokenizer is not None:
        return lambda text: len(tokenizer.encode(text))

    def count(text: str) -> int:
        try:
            return int(control(target, "POST", "/tokenize", {"model": model, "prompt": text})["count"])
        except (OSError, EngineError, KeyError, TypeError) as error:
            message = f"lengths in tokens are needed, and the server does not count them ({error}); give --tokenizer."
            raise ConfigError.of("tokenizer", message) from None

    return count
