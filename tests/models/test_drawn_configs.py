"""The whole engine against Transformers in float32 on configs that nobody chose: drawn within what each family allows, run in
drawn chunks, again over the prefix cache, and once more with what was generated as the beginning of a longer prompt."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from tests.models.drawn_configs import SHORTEST, class_of, draw_config
from tests.oracles.float64 import SOURCE, inputs_of, logprobs_in_float64
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire import LLM, SamplingParams
from quire.models.registry import ModelRegistry

TOLERANCE = 1e-3
TIE = 1e-4
"""Tokens whose logprobs are closer than this may change places."""
ILL_CONDITIONED = 2e-2
"""A draw of which float32 says less than this is not to be drawn."""
DRAWS = 20
NEW_TOKENS = 8
NO_MODEL = (
    StrictDataclassError,
    RuntimeError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    NameError,
    ZeroDivisionError,
)
"""What Transformers raises for a draw that it can make no model of, or run none."""
SAMPLE = (
    ("LlamaForCausalLM", 3), ("Gemma2ForCausalLM", 1), ("DeepseekV3ForCausalLM", 0), ("GptOssForCausalLM", 1),
    ("Qwen3NextForCausalLM", 1), ("PegasusForConditionalGeneration", 0),
)  # fmt: skip


COMMON = sorted({*ModelRegistry.get_supported_archs()} & {*dir(transformers)})
"""Architectures that are Transformers' too, by name alone: their classes are not loaded whenever tests are collected."""


def is_decoder(name: str) -> bool:
    """Whether it is a decoder of its own, maybe behind an encoder that reads text. A class around a text model, or with an eye,
    is not: its config has parts, which tiny values do not reach."""
    module = ModelRegistry.resolve(name).load().__module__
    parts = getattr(getattr(transformers, name).config_class, "sub_configs", {})
    is_whole = not any(part in module for part in ("pooling", "text_part", "whisper"))
    return is_whole and not {"text_config", "vision_config"} & {*parts}


def architectures() -> list[str]:
    """Decoders of which Transformers has a class, alone or behind an encoder that reads text."""
    return [*filter(is_decoder, COMMON)]


@pytest.fixture
def decoder(request: pytest.FixtureRequest) -> str:
    """One of COMMON; what is no decoder is skipped."""
    if not is_decoder(request.param):
        pytest.skip("no decoder of its own")
    return request.param


def make_prompts(draw: random.Random, vocab: int) -> list[list[int]]:
    """Mixed lengths; the last three begin alike."""
    shared = [draw.randrange(4, vocab) for _ in range(60)]
    alone = [[draw.randrange(4, vocab) for _ in range(length)] for length in (SHORTEST, 17, 33, 40, 90)]
    return alone + [[*shared[:length], draw.randrange(4, vocab)] for length in (20, 32, 48)]


def make_oracle(path: Path) -> Any:
    """Transformers' model; None where the draw is no model for it."""
    try:
        oracle = load_oracle(path)
        if hasattr(oracle, "set_experts_implementation"):
            oracle.set_experts_implementation("eager")  # its grouped product wants sizes that are multiples of four
        return oracle if bool(torch.isfinite(logprobs_of(oracle, list(range(4, 60)))).all()) else None
    except NO_MODEL:
        return None


@torch.no_grad()
def logprobs_of(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    return oracle(**inputs_of(oracle, token_ids), use_cache=False).logits[0].float().log_softmax(-1)


def assert_close(oracle: Any, outputs: list[Any]) -> None:
    for output in outputs:
        completion = output.outputs[0]
        chosen = torch.tensor(list(completion.token_ids))
        token_ids = [*output.prompt_token_ids, *chosen.tolist()]
        ours = torch.tensor(
            [row[token].logprob for row, token in zip(completion.logprobs, chosen.tolist(), strict=True)]
        )
        logprobs = logprobs_of(oracle, token_ids)
        off, behind = distances(ours, chosen, logprobs)
        if off <= TOLERANCE and behind < TIE:
            continue
        # Some draws blow up the last bit: a norm over one number is its sign. There, against float64, we may be off by no more
        # than twice what Transformers' float32 is somewhere in the request.
        exact = logprobs_in_float64(oracle, token_ids)
        theirs = float((logprobs - exact).abs().max())
        off, behind = distances(ours, chosen, exact)
        assert theirs < ILL_CONDITIONED
        assert off <= max(TOLERANCE, 2 * theirs), f"{off:.1e} from float64, Transformers' float32 {theirs:.1e}"
        assert behind < max(TIE, 2 * theirs), (
            f"a token {behind:.1e} behind the best, which float32 is off by {theirs:.1e}"
        )


def distances(ours: torch.Tensor, chosen: torch.Tensor, logprobs: torch.Tensor) -> tuple[float, float]:
    """How far the chosen tokens' logprobs are from those in the last rows but one, and they from the best there."""
    rows = logprobs[-len(chosen) - 1 : -1]
    expected = rows.gather(1, chosen[:, None])[:, 0]
    return float((ours - expected).abs().max()), float((rows.amax(1) - expected).max())


def check(architecture: str, seed: int, folder: Path) -> bool:
    """Whether the draw is a model; raises AssertionError where it gives something else than Transformers."""
    overrides, draw = draw_config(architecture, seed), random.Random(seed)
    try:
        path = make_tiny_model(architecture, folder, tokenizer=False, seed=seed, **overrides)
    except NO_MODEL:
        return False
    if (oracle := make_oracle(path)) is None:
        return False
    settings: dict[str, Any] = {
        "max_num_seqs": draw.choice((2, 4, 8)),
        "max_num_batched_tokens": draw.choice((16, 23, 48, 64)),
    }
    assert_equal(oracle, path, turns=3, draw=draw, **settings)
    return True


def assert_equal(oracle: Any, path: Path, turns: int, draw: random.Random | None = None, **settings: Any) -> None:
    """The checkpoint gives the oracle's tokens and logprobs, also in further turns that begin with what came before."""
    prompts = make_prompts(draw or random.Random(1), oracle.config.get_text_config().vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    source = {"encoder_prompt": {"prompt_token_ids": list(SOURCE)}} if oracle.config.is_encoder_decoder else None
    settings |= {"max_model_len": 200, "num_gpu_blocks_override": 200, "skip_tokenizer_init": True, "dtype": "float32"}
    with LLM(str(path), **settings) as llm:
        for turn in range(turns):
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            halves = [source | {"decoder_prompt": each} for each in asked] if source else asked
            outputs = llm.generate(halves, params, use_tqdm=False)
            assert_close(oracle, outputs)
            if turn == 0:
                prompts = prompts[::-1]
            else:
                prompts = [
                    [*ids, *output.outputs[0].token_ids, 7, 9] for ids, output in zip(prompts, outputs, strict=True)
                ]


@pytest.mark.parametrize(("architecture", "seed"), SAMPLE)
def test_a_drawn_config_gives_transformers_tokens_and_logprobs(architecture, seed, tmp_path):
    assert check(architecture, seed, tmp_path)


@pytest.mark.parametrize(("architecture", "seed"), [("JambaForCausalLM", 8), ("Zamba2ForCausalLM", 2)])
def test_an_ill_conditioned_draw_is_as_near_to_float64_as_transformers_float32(
    architecture, seed, tmp_path, monkeypatch
):
    monkeypatch.setitem(globals(), "TOLERANCE", 0.0)
    assert check(architecture, seed, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("decoder", COMMON, indirect=True)
def test_many_drawn_configs_give_transformers_tokens_and_logprobs(decoder, tmp_path):
    models = sum(check(decoder, seed, tmp_path / str(seed)) for seed in range(DRAWS))
    assert models >= DRAWS // 4


def test_families_are_drawn_what_their_config_classes_have():
    fields = {name for seed in range(30) for name in draw_config("LlamaForCausalLM", seed)}
    assert {"head_dim", "rope_parameters", "attention_bias", "mlp_bias", "tie_word_embeddings"} <= fields
    assert fields <= {*class_of("LlamaForCausalLM").config_class().to_dict(), "rope_parameters"}
