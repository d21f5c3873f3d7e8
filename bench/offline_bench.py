#!/usr/bin/env python3
"""Measure an LLM engine through its offline Python API.

Any package that offers `LLM(model=..., **kwargs)`, `SamplingParams(...)` and
`LLM.generate(prompts, sampling_params, use_tqdm=False)` can be measured:

    python offline_bench.py --engine-module vllm --model models/qwen3-0.6b \
        --llm-kwargs '{"load_format": "dummy"}' --out results.jsonl \
        first mix latency:1:128:256 latency:32:128:256

Workloads, in the order given (one engine start serves all of them):
    first                        one 128-token prompt, one token out; with
                                 start_s, the seconds from process start to then
    mix[:N[:LO[:HI]]]            N requests (256), prompt and output lengths
                                 uniform LO..HI (100..1024), all at once
    fixed:N:IN:OUT               N requests of IN tokens in, OUT tokens out
    latency:B:IN:OUT             B requests at once; TTFT and ms per step
    prefix:N:SHARED:OWN:OUT      N requests that share SHARED prompt tokens
    prefill:IN                   one prompt of IN tokens, one token out
    json:N:IN:OUT                N requests under a JSON schema (engines with
                                 vLLM's StructuredOutputsParams), and without
    jsonmax:N:IN:OUT             the same, with maxLength on the strings
A workload may end in @ and a JSON object of further sampling parameters, for
instance  mix@{"temperature": 0}  or  mix@{"detokenize": false}.

Each workload appends one JSON line to --out as soon as it ends. Prompts are
random token ids, new ones for every repetition, so that no prefix cache helps
(but `prefix`, which means to use it). Lengths come from a fixed seed.
"""

import argparse
import importlib
import json
import os
import random
import statistics
import sys
import time

IMPORTED_AT = time.time()


def process_start():
    """Wall-clock time at which this process was started (10 ms steps)."""
    try:
        with open("/proc/self/stat") as f:
            ticks = int(f.read().rsplit(")", 1)[1].split()[19])
        with open("/proc/uptime") as f:
            up = float(f.read().split()[0])
        return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))
    except Exception:
        return IMPORTED_AT


def schema(bounded):
    """A list of records; 500 of them never end within the output lengths used
    here, so that every step stays constrained. `bounded` limits the lengths of
    strings, which some grammar engines handle far more slowly."""

    def text(n):
        return {"type": "string", **({"maxLength": n} if bounded else {})}

    return {
        "type": "array",
        "minItems": 500,
        "items": {
            "type": "object",
            "properties": {
                "name": text(24),
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "city": {"type": "string", "enum": ["Oslo", "Lima", "Kyoto", "Accra"]},
                "tags": {"type": "array", "maxItems": 3, "items": text(12)},
                "active": {"type": "boolean"},
            },
            "required": ["name", "age", "city", "tags", "active"],
            "additionalProperties": False,
        },
    }


class Bench:
    def __init__(self, a):
        self.a = a
        self.mod = importlib.import_module(a.engine_module)
        with open(os.path.join(a.model, "config.json")) as f:
            vocab = json.load(f)["vocab_size"]
        self.vocab = min(vocab, a.max_token_id)
        self.rng = random.Random(a.seed)  # contents
        self.extra = {}
        t = time.time()
        self.llm = self.mod.LLM(model=a.model, **json.loads(a.llm_kwargs))
        self.init_s = time.time() - t

    def prompt(self, n):
        return self.rng.choices(range(10, self.vocab), k=n)

    def params(self, out, **kw):
        p = {"temperature": self.a.temperature, "max_tokens": out, "ignore_eos": True}
        p.update(json.loads(self.a.sampling_kwargs))
        p.update(self.extra)
        p.update(kw)
        return self.mod.SamplingParams(**p)

    def gen(self, prompts, params):
        if self.a.prompt_form == "dict":
            prompts = [{"prompt_token_ids": p} for p in prompts]
        t = time.perf_counter()
        outs = self.llm.generate(prompts, params, use_tqdm=False)
        dt = time.perf_counter() - t
        n = 0
        for o in outs:
            n += len(o["token_ids"]) if isinstance(o, dict) else len(o.outputs[0].token_ids)
        return dt, n

    def emit(self, **rec):
        rec = dict(label=self.a.label, model=os.path.basename(self.a.model.rstrip("/")), **rec)
        line = json.dumps(rec)
        print("RESULT", line, flush=True)
        if self.a.out:
            with open(self.a.out, "a") as f:
                f.write(line + "\n")

    # -- workloads ---------------------------------------------------------
    def first(self):
        dt, _ = self.gen([self.prompt(128)], [self.params(1)])
        rec = {
            "workload": "first",
            "start_s": round(time.time() - self.t0, 2),
            "import_to_llm_s": round(self.init_s, 2),
            "generate_s": round(dt, 4),
        }
        self.emit(**rec)

    def throughput(self, name, lens, shared=None):
        reps = []
        for _ in range(self.a.reps):
            head = self.prompt(shared) if shared else []
            prompts = [head + self.prompt(i) for i, _ in lens]
            params = [self.params(o) for _, o in lens]
            dt, n = self.gen(prompts, params)
            reps.append((dt, n))
        n_in = sum(i for i, _ in lens) + (shared or 0) * len(lens)
        dt, n = min(reps)
        want = sum(o for _, o in lens)
        self.emit(
            workload=name,
            requests=len(lens),
            in_tokens=n_in,
            out_tokens=n,
            wall_s=round(dt, 3),
            out_tok_s=round(n / dt, 1),
            total_tok_s=round((n + n_in) / dt, 1),
            all_wall_s=[round(d, 3) for d, _ in reps],
            **({} if n == want else {"wanted_out_tokens": want}),
        )

    def latency(self, b, n_in, n_out):
        self.gen([self.prompt(n_in) for _ in range(b)], [self.params(8)] * b)
        one, full = [], []
        for _ in range(self.a.latency_reps if b == 1 else max(2, self.a.latency_reps // 2)):
            one.append(self.gen([self.prompt(n_in) for _ in range(b)], [self.params(1)] * b)[0])
            dt, n = self.gen([self.prompt(n_in) for _ in range(b)], [self.params(n_out)] * b)
            assert n == b * n_out, (n, b, n_out)
            full.append(dt)
        t1, tn = statistics.median(one), statistics.median(full)
        self.emit(
            workload=self.spec,
            ttft_ms=round(t1 * 1e3, 2),
            step_ms=round((tn - t1) / (n_out - 1) * 1e3, 4),
            wall_s=round(tn, 4),
            out_tok_s=round(b * n_out / tn, 1),
            all_ttft_ms=[round(x * 1e3, 2) for x in one],
            all_wall_s=[round(x, 4) for x in full],
        )

    def prefill(self, n_in):
        self.gen([self.prompt(64)], [self.params(1)])
        ts = [self.gen([self.prompt(n_in)], [self.params(1)])[0] for _ in range(3)]
        t = statistics.median(ts)
        self.emit(
            workload=self.spec, wall_s=round(t, 4), in_tok_s=round(n_in / t, 1), all_wall_s=[round(x, 4) for x in ts]
        )

    def json_schema(self, bounded, b, n_in, n_out):
        sp = importlib.import_module(self.a.engine_module + ".sampling_params")
        so = sp.StructuredOutputsParams(json=json.dumps(schema(bounded)))
        rec = {}
        for key, kw in (("plain", {}), ("json", {"structured_outputs": so})):
            t = time.perf_counter()
            self.gen([self.prompt(n_in)], [self.params(4, **kw)])  # compiles the grammar
            rec[key + "_first_s"] = round(time.perf_counter() - t, 4)
            ts = []
            for _ in range(2):
                t1, _ = self.gen([self.prompt(n_in) for _ in range(b)], [self.params(1, **kw)] * b)
                tn, n = self.gen([self.prompt(n_in) for _ in range(b)], [self.params(n_out, **kw)] * b)
                ts.append(((tn - t1) / (n_out - 1) * 1e3, tn, n))
            ms, tn, n = min(ts)
            rec.update({key + "_step_ms": round(ms, 3), key + "_wall_s": round(tn, 3), key + "_out_tokens": n})
        self.emit(workload=self.spec, **rec)

    def run(self, spec):
        self.spec = spec
        base, _, extra = spec.partition("@")
        self.extra = json.loads(extra) if extra else {}
        kind, *rest = base.split(":")
        v = [int(x) for x in rest]
        if kind == "first":
            self.first()
        elif kind == "mix":
            n, lo, hi = v + [256, 100, 1024][len(v) :]
            r = random.Random(self.a.seed)
            self.throughput(spec, [(r.randint(lo, hi), r.randint(lo, hi)) for _ in range(n)])
        elif kind == "fixed":
            self.throughput(spec, [(v[1], v[2])] * v[0])
        elif kind == "prefix":
            self.throughput(spec, [(v[2], v[3])] * v[0], shared=v[1])
        elif kind == "latency":
            self.latency(*v)
        elif kind == "prefill":
            self.prefill(*v)
        elif kind in ("json", "jsonmax"):
            self.json_schema(kind == "jsonmax", *v)
        else:
            raise SystemExit(f"unknown workload {spec}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("workloads", nargs="+")
    p.add_argument("--engine-module", default="vllm")
    p.add_argument("--model", required=True, help="a folder with config.json")
    p.add_argument("--label", default="")
    p.add_argument("--out", default="")
    p.add_argument("--llm-kwargs", default="{}")
    p.add_argument("--sampling-kwargs", default="{}")
    p.add_argument("--temperature", type=float, default=0.6)
    p.add_argument(
        "--prompt-form",
        choices=["dict", "list"],
        default="dict",
        help="dict: {'prompt_token_ids': [...]}; list: bare lists of ids",
    )
    p.add_argument("--max-token-id", type=int, default=100000)
    p.add_argument("--reps", type=int, default=2, help="repetitions of throughput workloads (best is reported)")
    p.add_argument("--latency-reps", type=int, default=5)
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    t0 = process_start()
    b = Bench(a)
    b.t0 = t0
    for w in a.workloads:
        try:
            b.run(w)
        except Exception as e:
            import traceback

            traceback.print_exc()
            b.emit(workload=w, error=f"{type(e).__name__}: {e}"[:500])
    sys.stdout.flush()


if __name__ == "__main__":
    main()
