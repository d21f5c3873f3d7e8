"""Whether computing certain tokens of a form together pays: tokens a second with `disable_jump_forward` true and false.

    python tools/gpu/jumps.py --model MODEL [--load-format dummy] [--rows 1,64,256] [--compact]

A model of random weights does: what it says in a form is the grammar's doing. Figures in $OUT/jumps.json.
"""

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"enum": ["programmer", "professor", "baker"]},
        "home_address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 12},
                "postal_code": {"type": "integer", "maximum": 99999},
            },
            "required": ["street", "postal_code"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "occupation", "home_address"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 50}
ROUNDS = 3


def measure(llm: LLM, rows: int, tokens: int, is_compact: bool) -> dict[str, Any]:
    """The best of some rounds."""
    form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=is_compact)
    params = [
        SamplingParams(temperature=0.7, seed=seed, max_tokens=tokens, structured_outputs=form) for seed in range(rows)
    ]
    best: dict[str, Any] = {}
    for _ in range(ROUNDS + 1):  # the first captures what it needs
        metrics = llm.llm_engine.metrics
        assert metrics is not None
        steps, jumped, began = metrics.counts["engine_steps"], metrics.counts["jumped_tokens"], time.perf_counter()
        answers = llm.generate(["Write about people."] * rows, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        count = sum(len(answer.outputs[0].token_ids) for answer in answers)
        if not best or count / seconds > best["tokens_per_second"]:
            best = {
                "tokens_per_second": count / seconds,
                "tokens": count,
                "steps": metrics.counts["engine_steps"] - steps,
            }
            best["jumped"] = metrics.counts["jumped_tokens"] - jumped
    return best


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--compact", action="store_true", help="no whitespace between JSON's parts")
    args = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for is_off in (True, False):
        settings: dict[str, Any] = {"model": args.model, "load_format": args.load_format} if args.model else {}
        llm = LLM(structured_outputs_config={"disable_jump_forward": is_off}, disable_log_stats=False, **settings)
        for rows in map(int, args.rows.split(",")):
            figure = {"rows": rows, "jumps": not is_off, **measure(llm, rows, args.tokens, args.compact)}
            figures.append(figure)
            print(" ".join(f"{name}={value:.6g}" for name, value in figure.items()), flush=True)
        llm.shutdown()
        del llm
        gc.collect()
    out = Path(os.environ.get("OUT", "."))
    (out / "jumps.json").write_text(json.dumps({"compact": args.compact, "figures": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
