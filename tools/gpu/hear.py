"""Models that hear, and those with an encoder beside their decoder, on a device: tiny ones against Transformers in float32, then
Whisper's speed.

`python tools/gpu/hear.py --output hear.json`: logprobs of every tiny architecture, in steps of 8 tokens and in large ones; then,
with random weights (`--shape turbo`: large-v3-turbo's; `tiny` for a machine without a GPU), the time to the first token of one
sound of 30 seconds, and seconds of sound a second for `--requests` different ones of `--output-len` tokens each. Prints a table,
writes JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from each import differences

COMMON: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "decoder_start_token_id": 50258,
    "eos_token_id": 50257, "is_encoder_decoder": True, "max_source_positions": 1500, "max_target_positions": 448,
    "num_mel_bins": 128, "vocab_size": 51866,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "turbo": {
        "d_model": 1280, "encoder_layers": 32, "decoder_layers": 4, "encoder_attention_heads": 20,
        "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
    },
    "tiny": {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    },
}  # fmt: skip
FRAMES = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "chunk_length": 30, "hop_length": 160,
    "n_fft": 400, "sampling_rate": 16000, "nb_max_frames": 3000, "n_samples": 480000, "padding_value": 0.0,
}  # fmt: skip
SECONDS = 30


def check_encoder_decoder(architecture: str, tokens: int) -> float:
    """The largest difference of any logprob from Transformers', in steps of so many tokens."""
    from tests.models import test_parity_encoder_decoder as cases
    from tests.oracles.tiny_encoder_decoder import EncoderDecoderOracle, make_tiny_encoder_decoder

    from quire import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=1, detokenize=False)
    largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_encoder_decoder(architecture, folder)
        prompts: list[Any] = [cases.request_of(architecture, *request) for request in cases.REQUESTS]
        settings: dict[str, Any] = cases.COMMON | {"max_num_batched_tokens": tokens, "max_num_seqs": 4}
        with LLM(model=str(path), dtype="float32", **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        oracle = EncoderDecoderOracle(path)
        for (half, prompt), output in zip(cases.REQUESTS, outputs, strict=True):
            token_ids, ours = list(output.outputs[0].token_ids), output.outputs[0].logprobs or ()
            beside: Any = cases.beside(architecture, half)
            expected = oracle.logprobs([*prompt, *token_ids], **beside)
            for row, token, own in zip(expected[len(prompt) - 1 : -1], token_ids, ours, strict=True):
                largest = max(largest, abs(float(row[token]) - own[token].logprob))
    return largest


def check_listener(architecture: str, tokens: int) -> float:
    """The same of a model with sounds in its prompts."""
    from tests.models.test_parity_hearing import PROMPTS, SOUNDS
    from tests.oracles.media_parity import COMMON, ask, expected_logprobs, largest_difference
    from tests.oracles.tiny_listeners import AUDIO, HearingOracle, make_tiny_listener

    from quire import LLM

    asked = [(ids, [SOUNDS[name] for name in names]) for ids, names in PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_listener(architecture, folder)
        settings: dict[str, Any] = COMMON | {"max_num_batched_tokens": tokens, "max_num_seqs": 4}
        with LLM(model=str(path), dtype="float32", **settings) as llm:
            outputs = ask(llm, "audio", AUDIO, asked, max_tokens=6)
        oracle = HearingOracle(path)
        return max(
            largest_difference(expected_logprobs(oracle, heard, output), output)
            for (_, heard), output in zip(asked, outputs, strict=True)
        )


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Seconds, and seconds of sound a second, with random weights."""
    from quire import LLM, SamplingParams

    figures = dict[str, float]()

    def tell(name: str, value: float) -> None:
        figures[name] = value
        print(f"{name:<45} {value:10.3f}", flush=True)

    def request(seed: int) -> Any:
        sound = np.random.default_rng(seed).standard_normal(SECONDS * 16000).astype(np.float32) * 0.1
        return {"prompt_token_ids": [50258, 50259, 50360, 50364], "multi_modal_data": {"audio": (sound, 16000)}}

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(COMMON | SHAPES[args.shape]))
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(FRAMES))
        begin = time.perf_counter()
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=args.rows)
        tell("start, s", time.perf_counter() - begin)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        times: list[float] = []
        for seed in range(4):
            begin = time.perf_counter()
            llm.generate(request(seed), params, use_tqdm=False)
            times.append(time.perf_counter() - begin)
        tell("first token, s, median of 3", sorted(times[1:])[1])
        params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
        requests = [request(100 + seed) for seed in range(args.requests)]
        begin = time.perf_counter()
        llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tell("seconds of sound a second", args.requests * SECONDS / seconds)
        begin = time.perf_counter()
        llm.generate(requests, params, use_tqdm=False)
        tell("the same once more, frames kept", args.requests * SECONDS / (time.perf_counter() - begin))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="turbo")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=100)
    parser.add_argument("--output", help="write the figures to this file")
    args = parser.parse_args()
    from tests.oracles import tiny_encoder_decoder, tiny_listeners

    found: dict[str, float] = {}
    for check, module in ((check_encoder_decoder, tiny_encoder_decoder), (check_listener, tiny_listeners)):
        jobs = [(architecture, tokens) for architecture in module.CONFIGS for tokens in (8, 128)]
        found |= differences(check, jobs, 1e-2)
    figures = measure(args)
    if args.output:
        Path(args.output).write_text(json.dumps({"args": vars(args), "differences": found, "figures": figures}))
    if max(found.values()) >= 1e-2:
        sys.exit("logprobs differ from Transformers'")


if __name__ == "__main__":
    main()
