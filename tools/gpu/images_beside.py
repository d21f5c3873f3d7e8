"""What requests that decode wait for while images arrive: with encoders beside the steps, and with encoders in them.

`python tools/gpu/images_beside.py --output beside.json`: first a tiny model in float32, whose tokens must be the same both ways;
then, in Qwen2.5-VL-7B's shape with random weights (`--shape 7b`, or `tiny` for a machine without a GPU), the time between two
tokens of `--streams` requests of text while `--images` requests with an image each arrive, one every `--every` seconds, and the
time to the images' first tokens. Both ways twice, in opposite orders. Prints a table, writes JSON.
"""

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from neighbours import shares
from see_images import SHAPES, draw, make_folder

os.environ["QUIRE_ENABLE_MULTIPROCESSING"] = "0"


class Subject:
    """A model of a shape, whose encoders can be told to work beside the steps.

    Attributes:
        most: tokens of an image's answer. longest: of a stream.
    """

    most, longest, number = 8, 3900, 0

    def __init__(self, shape: str, folder: Path, **settings: Any) -> None:
        from quire import LLM

        common = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096, "max_num_seqs": 64}
        self.llm = LLM(str(make_folder(folder, shape)), **(common | settings))
        self.marker = SHAPES[shape]["image_token_id"]
        self.core: Any = self.llm.llm_engine._client.core
        self.encoding = self.core._scheduler.encoding
        if not self.encoding.goes_ahead:
            print("the encoders of this device never work beside the steps: both ways are one", flush=True)
        self.can = self.encoding.goes_ahead

    def begin(self, *, beside: bool) -> None:
        """Forget what was computed."""
        from quire.core import encoding

        self.encoding.goes_ahead = beside and self.can
        encoding.MOST_WITHIN = 0
        self.core.reset_encoder_cache()
        self.core.reset_prefix_cache()

    def make(self, seeds: list[int], side: int | None, length: int, output: int) -> list[Any]:
        """Requests, processed, so that what follows is the engine's time alone."""
        from quire import SamplingParams
        from quire.engine.tokenization import Tokenization

        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        engine, requests = self.llm.llm_engine, list[Any]()
        for seed in seeds:
            source = random.Random(seed)
            text = [source.randrange(10, min(self.marker, 1000)) for _ in range(length)]
            prompt: Any = {"prompt_token_ids": text}
            if side is not None:
                prompt["prompt_token_ids"] = [*text[:4], self.marker, *text[4:]]
                prompt["multi_modal_data"] = {"image": draw(seed, side)}
            self.number += 1
            tokenization = Tokenization.of(None)
            tokenized = engine.tokenize(prompt, params, tokenization)
            requests.append(engine.process(str(self.number), tokenized, params, tokenization))
        return requests

    def run(self, streams: list[Any], images: list[Any], every: float, least: int) -> dict[str, Any]:
        """Have streams decode, and images arrive when each has `least` tokens; ends with the last image's last token."""
        engine, waiting, added, begin = self.llm.llm_engine, list(images), dict[str, float](), 0.0
        names = [one.request_id for one in streams]
        tokens: dict[str, list[int]] = {one.request_id: [] for one in (*streams, *images)}
        times: dict[str, list[float]] = {name: [] for name in tokens}
        engine.add_processed(streams)
        while waiting or any(len(tokens[name]) < self.most for name in added):
            now = time.perf_counter()
            if waiting and min(len(times[name]) for name in names) >= least and now - begin >= every * len(added):
                begin = begin or now
                added[waiting[0].request_id] = now
                for request in waiting[0].engine_requests:
                    request.arrival_time = time.monotonic()
                engine.add_processed([waiting.pop(0)])
            for output in engine.step():
                times[output.request_id].append(time.perf_counter())
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        end = time.perf_counter()
        if any(len(tokens[name]) == self.longest for name in names):
            raise RuntimeError("a stream ended before the images did: use fewer images")
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        gaps = [(b, 1e3 * (b - a)) for name in names for a, b in itertools.pairwise(times[name])]
        return {
            "quiet": [gap for at, gap in gaps if at < begin],
            "within": [gap for at, gap in gaps if begin <= at <= end],
            "first": [1e3 * (times[name][0] - at) for name, at in added.items()],
            "tokens": list(tokens.values()),
            "seconds": end - begin,
        }


def check(args: argparse.Namespace) -> int:
    """How many requests of a tiny model have other tokens when its encoder works beside the steps."""
    with tempfile.TemporaryDirectory() as folder:
        small = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 30}  # the other model needs the device's memory
        subject, drawn = Subject("tiny", Path(folder), **small), list[list[list[int]]]()
        for beside in (False, True):
            subject.begin(beside=beside)
            streams = subject.make(list(range(8)), None, 24, subject.longest)
            images = subject.make(list(range(100, 112)), 224, 24, subject.most)
            drawn.append(subject.run(streams, images, 0.0, 4)["tokens"])
        subject.llm.shutdown()
        return sum(a[: len(b)] != b[: len(a)] for a, b in zip(*drawn, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--every", type=float, default=0.15)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    different = check(args)
    print(f"requests of a tiny model with other tokens: {different}", flush=True)
    report: dict[str, Any] = {"different": different, "shape": args.shape, "streams": args.streams, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(args.shape, Path(folder), dtype="bfloat16")
        sizes = (subject.longest, subject.most)
        for number, beside in enumerate(
            (True, False, False, True, True, False)
        ):  # the first two make kernels and graphs ready
            subject.begin(beside=beside)
            count = args.images if number > 1 else 3
            streams = subject.make([1000 * number + seed for seed in range(args.streams)], None, 128, sizes[0])
            images = subject.make([9000 + 1000 * number + seed for seed in range(count)], args.side, 64, sizes[1])
            found = subject.run(streams, images, args.every, 48)
            if number < 2:
                continue
            figures = {name: shares(found[name]) for name in ("quiet", "within", "first")}
            report["runs"].append({"beside": beside, "seconds": round(found["seconds"], 3), **figures})
            print(f"encoders {'beside' if beside else 'within'} the steps, images for {found['seconds']:.2f} s; ms:")
            told = {"quiet": "before images", "within": "while they come", "first": "images' first tokens"}
            for name, text in told.items():
                print(f"  {text:<22}", *(f"{key} {value:9.3f}" for key, value in figures[name].items()), flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1))
    if different:
        sys.exit("tokens differ")


if __name__ == "__main__":
    main()
