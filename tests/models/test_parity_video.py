"""Models that see videos against Transformers in float32, in the whole engine: in chunks, in batches, from caches, preempted.

Prompts have a video, two of several lengths, or a video and images; others have an image or no item.
"""

import pytest
from tests.oracles.media_parity import CHUNKS, COMMON, FEW_PAGES, SETTINGS, assert_parity
from tests.oracles.tiny_video import (
    ARCHITECTURES,
    GEMMA4,
    GLM,
    QWEN2,
    QWEN3,
    SMOL,
    SQUARES,
    VIDEO,
    Film,
    VideoOracle,
    draw_film,
)
from tests.oracles.tiny_vision import IMAGE, draw_image, make_tiny_vision

from quire import LLM, SamplingParams

ITEMS = {
    "short": draw_film(1, 2, 24, 30, 2.0),
    "odd": draw_film(2, 5, 30, 40),
    "long": draw_film(3, 8, 16, 24, 1.5),
    "still": draw_film(4, 1, 40, 24, 2.0),
    "picture": draw_image(5, 30, 41),
}
PROMPTS = [
    ([5, 6, 7, 8], []),
    ([5, VIDEO, 9, 10], ["odd"]),
    ([VIDEO, 14, VIDEO, 8], ["long", "short"]),
    ([5, VIDEO, 9, IMAGE, 7], ["short", "picture"]),
    ([IMAGE, 4, VIDEO, 9, VIDEO, 11, IMAGE, 3], ["picture", "still", "odd", "picture"]),
    ([5, IMAGE, 6], ["picture"]),
    ([5, VIDEO, 9, 11], ["odd"]),
    ([31 + number for number in range(40)], []),
]
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1, detokenize=False, allowed_token_ids=list(range(IMAGE))
)
LONG = {"max_model_len": 512, "num_gpu_blocks_override": 400}
OWN_SETTINGS = {FEW_PAGES: {"max_model_len": 256, "num_gpu_blocks_override": 34}}
OWN = {key: {"max_model_len": 1024, "num_gpu_blocks_override": 145, "max_num_batched_tokens": 90} for key in GEMMA4}
OWN[SMOL] = {"max_model_len": 512, "num_gpu_blocks_override": 70}
"""Of those whose frames make seventy embeddings, of which some layers see all at once, and where there are words around them."""


DEFAULT = {
    QWEN2[1]: [CHUNKS, "roomy"],
    QWEN3[0]: [CHUNKS],
    GLM[0]: [CHUNKS],
    SQUARES[0]: [CHUNKS],
    SQUARES[1]: [CHUNKS],
    GEMMA4[0]: [CHUNKS],
    SMOL: [CHUNKS],
}
CASES = [
    pytest.param(name, setting, marks=() if setting in DEFAULT.get(name, ()) else pytest.mark.exhaustive)
    for name in ARCHITECTURES
    for setting in SETTINGS
]


def request(token_ids, names, marker=VIDEO):
    data = {"image": [], "video": []}
    for item in map(ITEMS.get, names):
        data["video" if isinstance(item, Film) else "image"].append(item.given if isinstance(item, Film) else item)
    ids = [marker if token == VIDEO else token for token in token_ids]
    return {"prompt_token_ids": ids, "multi_modal_data": {name: items for name, items in data.items() if items}}


def marker_of(llm, architecture):
    """The configs of InternVL and SmolVLM name none."""
    return llm.get_tokenizer().token_to_id("<video>") if architecture in (SQUARES[0], SMOL) else VIDEO


@pytest.mark.parametrize(("architecture", "setting"), CASES)
def test_the_engine_sees_the_videos_that_transformers_sees(architecture, setting, tmp_path):
    path = make_tiny_vision(architecture, tmp_path)
    llm, oracle = (
        LLM(
            model=str(path),
            **(COMMON | LONG | SETTINGS[setting] | OWN_SETTINGS.get(setting, {}) | OWN.get(architecture, {})),
        ),
        VideoOracle(path),
    )
    marker = marker_of(llm, architecture)
    for order in (1, -1):  # the second time, from the other end, with whatever was kept
        prompts = PROMPTS[::order]
        outputs = llm.generate([request(*each, marker) for each in prompts], PARAMS, use_tqdm=False)
        for (_, names), output in zip(prompts, outputs, strict=True):
            assert_parity(oracle, IMAGE, [ITEMS[name] for name in names], output)
