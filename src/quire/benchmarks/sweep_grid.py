"""What a sweep runs: parameters from a file or from the command line, their combinations, their flags and folders.

Knows names and values. Starts nothing.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ConfigError

Parameters = dict[str, Any]
"""Setting to value, as flags have them: `{"max_num_seqs": 64}` is `--max-num-seqs 64`."""


def read_parameters(text: str | None, setting: str) -> list[Parameters]:
    """Combinations from a JSON file, or from JSON itself.

    An object whose values are lists is a grid: every combination of them. A list has one object a combination. An object of
    objects names each combination. Nothing is one combination without parameters.

    Raises:
        ConfigError: no such file, or none of these forms.
    """
    if text is None:
        return [{}]
    try:
        if os.path.isfile(text):
            with open(text, encoding="utf-8") as file:
                given: Any = json.load(file)
        else:
            given = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError.of(setting, f"{text!r} is neither a file nor JSON: {error}.") from None
    if isinstance(given, Mapping) and given and all(isinstance(value, Mapping) for value in given.values()):
        given = list(given.values())
    if isinstance(given, Mapping):
        columns = [value if isinstance(value, list) else [value] for value in given.values()]
        return [dict(zip(given, values, strict=True)) for values in itertools.product(*columns)]
    if isinstance(given, list) and given and all(isinstance(one, Mapping) for one in given):
        return [{name: value for name, value in one.items() if name != "_benchmark_name"} for one in given]
    raise ConfigError.of(setting, f"{text!r} must be an object of lists (a grid) or a list of objects (combinations).")


def parse_links(text: str) -> list[tuple[str, str]]:
    """`max_num_seqs=max_concurrency,…`: a server's and a benchmark's parameter that must be equal.
    Raises ConfigError: another form."""
    pairs = [tuple(part.strip() for part in pair.split("=")) for pair in text.split(",") if pair.strip()]
    for pair in pairs:
        if len(pair) != 2 or not all(pair):
            raise ConfigError.of("link_vars", f"{text!r} must be SERVER_NAME=BENCH_NAME, with commas between.")
    return [(pair[0], pair[1]) for pair in pairs]


def combine(
    serve: Sequence[Parameters], bench: Sequence[Parameters], links: Sequence[tuple[str, str]]
) -> list[tuple[Parameters, list[Parameters]]]:
    """For each server the benchmarks that run against it.
    Raises ConfigError: the links leave nothing, or name a parameter that there is not."""
    for server_name, bench_name in links:
        if not any(server_name in one for one in serve) or not any(bench_name in one for one in bench):
            message = f"{server_name}={bench_name} names a parameter that the sweep does not have."
            raise ConfigError.of("link_vars", message)
    combined: list[tuple[Parameters, list[Parameters]]] = []
    for server in serve:
        fitting = [one for one in bench if all(server.get(left) == one.get(right) for left, right in links)]
        if fitting:
            combined.append((server, fitting))
    if not combined:
        raise ConfigError.of("link_vars", "no combination has equal values; nothing is left to run.")
    return combined


def flags(parameters: Parameters) -> list[str]:
    """Words of a command line; true and false are `--name` and `--no-name`, null leaves the flag out."""
    words: list[str] = []
    for name, value in parameters.items():
        flag = name.lstrip("-").replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | dict):
            words += [f"--{flag}", json.dumps(value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def folder_name(parameters: Parameters) -> str:
    """A combination as a folder: readable, and short and unlike any other's."""
    if not parameters:
        return "default"
    text = ",".join(
        f"{name}={json.dumps(value) if isinstance(value, list | dict) else value}" for name, value in parameters.items()
    )
    safe = re.sub(r"[^A-Za-z0-9_.,=+-]", "_", text)
    if safe == text and len(safe) <= 100:
        return safe
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{safe[:90]}~{digest}"
