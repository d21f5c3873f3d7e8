"""Whether an architecture computes what Transformers does: a tiny random checkpoint, both ways, in float32.

Greedy tokens must be equal and logprobs close, for prompts of mixed lengths in chunks, and again over the prefix cache.
Knows Transformers as the oracle. What is tested with odder shapes stands in the project's tests.
"""

import dataclasses
import functools
import random
import tempfile
import time
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.features import Features, features_of
from quire.models.registry import ModelRegistry

TOLERANCE = 1e-3
NEW_TOKENS = 8
LENGTHS = (1, 5, 17, 40, 70)
SETTINGS: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 120,
    "skip_tokenizer_init": True, "dtype": "float32",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """One architecture's verdict: `equal`, `FAILED`, or `skipped`, with the figures or the reason."""

    architecture: str
    verdict: str
    detail: str


@functools.cache
def _tiny_config(architecture: str) -> HFConfig | str:
    """The config of a tiny checkpoint, or why there is none."""
    try:
        import transformers

        from quire.benchmarks.tiny_models import tiny_values
    except ImportError:
        return "not known: pip install 'quire[transformers]'"
    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        return "not in the installed Transformers (tests/models compares it under another name)"
    values = model_class.config_class(**tiny_values(architecture)).to_dict()
    return HFConfig({**values, "architectures": [architecture]})


def features(architecture: str) -> Features | str:
    """What it can do, or why that is not known here."""
    source = ModelRegistry.resolve(architecture).load()
    if isinstance(source, type):
        return "a class of its own"
    # Another name of the same function will do: Yi is Llama.
    kin = [name for name in ModelRegistry.get_supported_archs() if ModelRegistry.resolve(name).load() is source]
    configs = [_tiny_config(name) for name in (architecture, *kin)]
    config = next((config for config in configs if isinstance(config, HFConfig)), configs[0])
    if isinstance(config, str):
        return config
    try:
        spec = source(config)
        if "lm_head" not in spec.weights.modules:  # an encoder
            spec = dataclasses.replace(spec, tied_embeddings=True)
        return features_of(spec)
    except (ConfigError, AttributeError, TypeError, ValueError) as error:
        return f"not known: {error}"


def check(architecture: str) -> Result:
    """Compare one architecture with Transformers."""
    answer, config = features(architecture), _tiny_config(architecture)
    if isinstance(answer, str) or isinstance(config, str):
        return Result(architecture, "skipped", config if isinstance(config, str) else str(answer))
    if architecture.endswith("ForConditionalGeneration") or architecture == "FuyuForCausalLM":
        return Result(architecture, "skipped", "its text is another row's model; tests/models compares it")
    if not answer.generates or (architecture.endswith("Model") and not architecture.endswith("LMHeadModel")):
        return Result(architecture, "skipped", "gives no tokens; tests/pooling compares its vectors")
    begin = time.perf_counter()
    try:
        difference = _largest_difference(architecture)
    except Exception as error:  # whatever goes wrong with one row must not end the table
        return Result(architecture, "FAILED", f"{type(error).__name__}: {error}".splitlines()[0])
    seconds = time.perf_counter() - begin
    verdict = "equal" if difference is not None and difference < TOLERANCE else "FAILED"
    figures = "greedy tokens differ" if difference is None else f"logprobs within {difference:.1e}"
    return Result(architecture, verdict, f"{figures} ({', '.join(answer.mixers)}; {seconds:.1f} s)")


def _largest_difference(architecture: str) -> float | None:
    """Of any logprob; None where some token differs."""
    import torch

    from quire import LLM, SamplingParams
    from quire.benchmarks.tiny_models import VOCAB_SIZE, load_oracle, make_tiny_model

    draw = random.Random(architecture)
    prompts = [[draw.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    prompts.append([*prompts[-1][:48], *prompts[0]])
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(architecture, folder, tokenizer=False)
        oracle = load_oracle(path)
        with LLM(model=str(path), **SETTINGS) as llm:
            for batch in (prompts, prompts[::-1]):
                outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
                for prompt, output in zip(batch, outputs, strict=True):
                    completion = output.outputs[0]
                    token_ids = list(completion.token_ids)
                    with torch.no_grad():
                        logits = oracle(torch.tensor([prompt + token_ids])).logits[0]
                    logprobs = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
                    if token_ids != logprobs.argmax(-1).tolist():
                        return None
                    for row, token, ours in zip(logprobs, token_ids, completion.logprobs or (), strict=True):
                        largest = max(largest, abs(float(row[token]) - ours[token].logprob))
    return largest
