"""A client in a process of its own that asks little: what it times is the server's doing, whatever the client of a flood does.

    python -m bench.light_client refusals PORT                  asks until its input ends
    python -m bench.light_client first-tokens PORT COUNT WORDS  one request after another, as the tenant `quiet`

Writes the seconds of each as JSON.
"""

import http.client
import itertools
import json
import random
import select
import sys
import time
from typing import Any

WORDS = ("apple", "river", "stone", "seven", "blue", "house", "twelve", "paper", "window", "green", "night", "garden")
BETWEEN_S = 0.02
"""Between an answer and the next request."""


def _ask(link: http.client.HTTPConnection, body: dict[str, Any], tenant: str = "") -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json", **({"X-Tenant": tenant} if tenant else {})}
    link.request("POST", "/v1/completions", json.dumps(body), headers)
    return link.getresponse()


def refusals(port: int, connections: int = 4) -> list[float]:
    """Seconds from a request to the head of its refusal, of those that are refused because the queue is full."""
    links = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(connections)]
    found: list[float] = []
    for turn in itertools.count():
        if select.select([sys.stdin], [], [], BETWEEN_S)[0]:
            return found
        began = time.perf_counter()
        answer = _ask(links[turn % connections], {"prompt": "apple river", "max_tokens": 1, "timeout": 0.5})
        seconds = time.perf_counter() - began
        if b"the queue is full" in answer.read():
            found.append(seconds)
    return found


def first_tokens(port: int, count: int, num_words: int) -> list[float]:
    """Seconds from a request to the first event of its stream."""
    link, draw = http.client.HTTPConnection("127.0.0.1", port), random.Random(2)
    found: list[float] = []
    for _ in range(count):
        prompt = " ".join(draw.choices(WORDS, k=num_words))
        began = time.perf_counter()
        answer = _ask(link, {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": True}, "quiet")
        if answer.status != 200:
            raise RuntimeError(f"the quiet tenant was refused ({answer.status})")
        answer.readline()
        found.append(time.perf_counter() - began)
        answer.read()
        time.sleep(BETWEEN_S)
    return found


if __name__ == "__main__":
    what, *numbers = sys.argv[1:]
    print(json.dumps({"refusals": refusals, "first-tokens": first_tokens}[what](*map(int, numbers))))
