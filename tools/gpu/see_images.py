"""Models that see, on a device: tiny ones against Transformers in float32, then what images cost in Qwen2.5-VL-7B's shape.

`python tools/gpu/see_images.py --output see.json`: logprobs of every tiny architecture, to images and to videos, in steps of 48
tokens and in large ones; then, with random weights (`--shape 7b`, or `tiny` for a machine without a GPU), the time to the first
token of one request with an image of 1,024 x 1,024, tokens a second of `--requests` requests with an image each, all different
and each ten times, and what the host's image processor alone takes. Prints a table, writes JSON.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from each import differences

WHOLE_PROMPTS = {"PaliGemmaForConditionalGeneration": 96}
"""Where a prompt is one step: tokens of such a step."""
SHAPES: dict[str, dict[str, Any]] = {
    "7b": {
        "text_config": {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "num_heads": 16,
            "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "image_token_id": 151655,
    },
    "tiny": {
        "text_config": {
            "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 8192, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        },
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 128, "num_heads": 2, "patch_size": 14,
            "window_size": 112, "fullatt_block_indexes": [1],
        },
        "image_token_id": 1000,
    },
}  # fmt: skip
PIXELS = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
}  # fmt: skip


def check(kind: str, architecture: str, tokens: int) -> float:
    """The largest difference of any logprob from Transformers': to `images` or `videos`, in steps of so many tokens."""
    if kind == "borrowed":
        return check_borrowed(architecture)
    from tests.models.test_parity_video import LONG, OWN
    from tests.oracles.media_parity import COMMON, expected_logprobs, largest_difference
    from tests.oracles.tiny_video import VideoOracle
    from tests.oracles.tiny_vision import VisionOracle, make_tiny_vision

    from quire import LLM

    settings: dict[str, Any] = COMMON | {"max_num_batched_tokens": tokens, "max_num_seqs": 4}
    settings |= (LONG if kind == "videos" else {}) | OWN.get(architecture, {})
    settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], WHOLE_PROMPTS.get(architecture, 0))
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_vision(architecture, folder)
        with LLM(model=str(path), dtype="float32", **settings) as llm:
            seen, outputs = (ask_of_videos if kind == "videos" else ask_of_images)(llm, architecture)
        oracle = (VideoOracle if kind == "videos" else VisionOracle)(path)
        return max(
            largest_difference(expected_logprobs(oracle, items, output), output)
            for items, output in zip(seen, outputs, strict=True)
        )


def check_borrowed(architecture: str) -> float:
    """The same of a model that sees through Transformers' modules, in small steps."""
    from tests.models.test_parity_borrowed import PROMPTS, ask_and_compare, settings_of
    from tests.oracles.media_parity import CHUNKS, largest_difference
    from tests.oracles.tiny_borrowed import OPTIONS, BorrowedOracle, make_tiny_borrowed

    from quire import LLM

    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_borrowed(architecture, Path(folder))
        with LLM(model=str(path), dtype="float32", **settings_of(architecture, CHUNKS)) as llm:
            oracle = BorrowedOracle(path, OPTIONS.get(architecture))
            found = ask_and_compare(llm, oracle, PROMPTS, max_tokens=6)
            return max(largest_difference(expected, output) for _, output, expected in found)


def ask_of_images(llm: Any, _: str) -> tuple[list[list[Any]], list[Any]]:
    """What the requests see, and the answers."""
    from tests.models.test_parity_vision import IMAGES, PROMPTS
    from tests.oracles.media_parity import ask
    from tests.oracles.tiny_vision import IMAGE

    asked = [(ids, [IMAGES[name] for name in names]) for ids, names in PROMPTS]
    return [items for _, items in asked], ask(llm, "image", IMAGE, asked, max_tokens=6)


def ask_of_videos(llm: Any, architecture: str) -> tuple[list[list[Any]], list[Any]]:
    """The same with videos beside images."""
    from tests.models.test_parity_video import ITEMS, PARAMS, PROMPTS, marker_of, request

    marker = marker_of(llm, architecture)
    outputs = llm.generate([request(*each, marker) for each in PROMPTS], PARAMS, use_tqdm=False)
    return [[ITEMS[name] for name in names] for _, names in PROMPTS], outputs


def make_folder(path: Path, shape: str) -> Path:
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", **SHAPES[shape]}
    config["text_config"] = {"model_type": "qwen2_5_vl_text", **config["text_config"]}
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(
        json.dumps(PIXELS | {"image_mean": [0.5] * 3, "image_std": [0.3] * 3})
    )
    return path


def draw(seed: int, side: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Seconds and tokens a second with random weights."""
    from quire import LLM, SamplingParams

    marker, vocabulary = SHAPES[args.shape]["image_token_id"], SHAPES[args.shape]["text_config"]["vocab_size"] - 100
    source, figures = random.Random(1), dict[str, float]()

    def tell(name: str, value: float) -> None:
        figures[name] = value
        print(f"{name:<45} {value:10.3f}", flush=True)

    def request(image: Any) -> dict[str, Any]:
        text = [source.randrange(10, min(vocabulary, marker)) for _ in range(args.input_len)]
        return {"prompt_token_ids": [*text[:4], marker, *text[4:]], "multi_modal_data": {"image": image}}

    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    with tempfile.TemporaryDirectory() as folder:
        path = make_folder(Path(folder), args.shape)
        begin = time.perf_counter()
        llm = LLM(
            str(path),
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=args.rows,
        )
        processor = llm.llm_engine.input_processor.media
        assert processor is not None
        tell("start, s", time.perf_counter() - begin)
        begin = time.perf_counter()
        processor.apply([marker], {"image": draw(999, args.side)})
        tell("processor, first image, s", time.perf_counter() - begin)
        begin = time.perf_counter()
        for seed in range(4):
            processor.apply([marker], {"image": draw(1000 + seed, args.side)})
        tell("processor, s an image", (time.perf_counter() - begin) / 4)
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        times: list[float] = []
        for seed in range(6):
            begin = time.perf_counter()
            llm.generate(request(draw(2000 + seed, args.side)), one, use_tqdm=False)
            times.append(time.perf_counter() - begin)
        tell("first token, s, median of 5", sorted(times[1:])[2])
        for name, repeats in (("different", 1), ("each ten times", 10)):
            images = [draw(3000 * repeats + seed, args.side) for seed in range(-(-args.requests // repeats))]
            requests = [request(images[number // repeats]) for number in range(args.requests)]
            begin = time.perf_counter()
            outputs = llm.generate(requests, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            total = sum(len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids) for output in outputs)
            tell(f"tokens a second, images {name}", total / seconds)
            tell(f"requests a second, images {name}", args.requests / seconds)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--tolerance", type=float, default=2e-2)
    parser.add_argument(
        "--kind", choices=("images", "videos", "borrowed"), help="check these alone, and measure nothing"
    )
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"shape": args.shape, "requests": args.requests, "side": args.side}
    if not args.no_check:
        from tests.oracles import tiny_borrowed
        from tests.oracles.tiny_video import ARCHITECTURES
        from tests.oracles.tiny_vision import CONFIGS

        of_kinds = [("images", name) for name in CONFIGS] + [("videos", name) for name in ARCHITECTURES]
        whole = {"PaliGemmaForConditionalGeneration": 128, "Molmo2ForConditionalGeneration": 128}  # items are one step
        small = dict.fromkeys(CONFIGS, 48) | whole
        jobs = [(*each, tokens) for each in of_kinds for tokens in (small[each[1]], 512)]
        jobs += [("borrowed", name, 9) for name in tiny_borrowed.CONFIGS if not tiny_borrowed.lacks(name)]
        jobs = [job for job in jobs if args.kind in (None, job[0])]
        report["differences"] = differences(check, jobs, args.tolerance)
    if args.kind is None:
        report["figures"] = measure(args)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1))
    if any(value >= args.tolerance for value in report.get("differences", {}).values()):
        sys.exit("logprobs differ from Transformers'")


if __name__ == "__main__":
    main()
