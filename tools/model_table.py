"""The table of architectures in docs/models.md: what each can do, from its spec, and how its check ended.

    python -m tools.model_table                       check every architecture against Transformers
    python -m tools.model_table 'Qwen3*' --no-write   check these, and write nothing
    python -m tools.model_table --no-check            write what the specs say now; results stay

Knows markdown and the two markers that the table stands between. What a check found is kept for rows that were not checked
now; features are always made anew. A check compares a tiny random checkpoint with Transformers, in float32: greedy tokens
must be equal and logprobs close, for prompts of mixed lengths in chunks, and again over the prefix cache; of encoders, each
token's vector.
"""

import argparse
import dataclasses
import fnmatch
import functools
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.oracles import tiny_deepseek_vl2, tiny_models, tiny_molmo
from tests.oracles.tiny_encoder_decoder import (
    CONFIGS,
    PROCESSORS,
    EncoderDecoderOracle,
    draw_sound,
    make_tiny_encoder_decoder,
)
from tests.oracles.tiny_vision import draw_image

from quire.config.hf_config import HFConfig
from quire.entrypoints.cli.models import COLUMNS, feature_words, layer_words
from quire.errors import ConfigError
from quire.models.features import Features, features_of
from quire.models.registry import ModelRegistry
from quire.models.text_part import ARCHITECTURES as TEXT_PARTS
from quire.models.text_part import text_part
from quire.multimodal.encoder_half import HALVES
from quire.version import __version__

ROOT = Path(__file__).parents[1]
PACKAGED = ROOT / "src" / "quire" / "assets" / "architectures.json"
"""What each architecture can do, for `quire models`; written with the document's table."""
DOCUMENT = ROOT / "docs" / "models.md"
TOLERANCE = 1e-3
NEW_TOKENS = 8
LENGTHS = (1, 5, 17, 40, 70)
SETTINGS: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 120,
    "skip_tokenizer_init": True, "dtype": "float32",
}  # fmt: skip
# Sizes in the words of configs that Transformers has no class for: enough to tell features.
OTHER_WORDS: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_experts": 6, "num_experts_per_tok": 2,
    "num_shared_experts": 1, "moe_intermediate_size": 40, "norm_topk_prob": True, "first_k_dense_replace": 1,
    "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}}] * 3,
}  # fmt: skip

ELSEWHERE = dict.fromkeys(("CLIPModel", "SiglipModel"), "Transformers (`tests/pooling/test_images.py`)")
ELSEWHERE |= dict.fromkeys(
    ("ColPaliForRetrieval", "ColQwen2ForRetrieval"), "Transformers (`tests/pooling/test_retrievers.py`)"
)
CLASSIFIERS = ("ViTForImageClassification", "ViTModel")
ELSEWHERE |= dict.fromkeys(CLASSIFIERS, "Transformers (`tests/pooling/test_image_classes.py`)")
ELSEWHERE[tiny_molmo.ARCHITECTURE] = "Transformers (`tests/models/test_parity_vision.py`)"
DEEPSEEK2 = tiny_deepseek_vl2.ARCHITECTURE
ELSEWHERE |= dict.fromkeys(
    (DEEPSEEK2, "DeepseekForCausalLM"), "Transformers' parts (`tests/models/test_parity_vision.py`)"
)
ELSEWHERE["UltravoxModel"] = "Transformers' parts (`tests/models/test_parity_hearing.py`)"
OMNI = "Qwen2_5OmniThinkerForConditionalGeneration"
SPEAKS = ("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration")
OMNI3, SPEAKS3 = "Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"
ELSEWHERE |= dict.fromkeys((*SPEAKS, SPEAKS3), "Transformers (`tests/models/test_parity_hearing.py`)")
"""Whose comparison has a test of its own."""

LIKE = {
    "ColPaliForRetrieval": "PaliGemmaForConditionalGeneration",
    "ColQwen2ForRetrieval": "Qwen2VLForConditionalGeneration",
    "UltravoxModel": "LlavaForConditionalGeneration",
    **dict.fromkeys(CLASSIFIERS, "BertModel"),
    **dict.fromkeys(SPEAKS, OMNI),
    SPEAKS3: OMNI3,
}
"""Of which Transformers has no config, or one that wraps another, and whose config stands for it."""

OWN_CONFIGS = {name: CONFIGS[name] for name in PROCESSORS}
OWN_CONFIGS[tiny_molmo.ARCHITECTURE] = tiny_molmo.config(tiny_models.TEXT, tiny_models.VOCAB_SIZE)
OWN_CONFIGS[DEEPSEEK2] = tiny_deepseek_vl2.CONFIG | {
    "text_config": tiny_deepseek_vl2.LANGUAGES["DeepseekV2ForCausalLM"] | {"model_type": "deepseek_v2"}
}
OWN_CONFIGS["DeepseekForCausalLM"] = tiny_deepseek_vl2.LANGUAGES["DeepseekForCausalLM"] | {"hidden_act": "silu"}
"""Configs of models whose encoder sees, beside a decoder; and of some whose classes have other ones, or are not there."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One architecture's verdict: `equal`, `FAILED`, or `skipped`, with the figures or the reason.

    Attributes:
        difference: the largest of any logprob (of an encoder: of any number of a vector); None where none was computed.
        compared_with: whose answers they were, or where else the comparison is made.
    """

    architecture: str
    verdict: str
    detail: str
    difference: float | None = None
    compared_with: str = "Transformers"


@functools.cache
def _transformers_config(architecture: str) -> HFConfig | None:
    """The config of a tiny checkpoint of Transformers; None where it has no class of this name, or one around a text model that
    is not one of `TEXT_PARTS`, of which tiny values make nothing tiny."""
    import transformers

    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, architecture, None)
    if model_class is None and architecture in OWN_CONFIGS:
        return HFConfig(OWN_CONFIGS[architecture] | {"architectures": [architecture]})
    if model_class is None or architecture in LIKE:
        return None
    is_whole = ModelRegistry.resolve(architecture).load() is text_part
    if architecture in OWN_CONFIGS:
        return HFConfig(
            model_class.config_class(**OWN_CONFIGS[architecture]).to_dict() | {"architectures": [architecture]}
        )
    if "text_config" in getattr(model_class.config_class, "sub_configs", {}) and not is_whole:
        return None
    values = model_class.config_class(**tiny_models.tiny_values(architecture)).to_dict()
    eyes = getattr(model_class.config_class, "sub_configs", {}).get("vision_config")
    if eyes is not None and values.get("vision_config") is None:
        values["vision_config"] = eyes().to_dict()
    return HFConfig({**values, "architectures": [architecture]})


def _kin(architecture: str) -> str | None:
    """The first architecture of Transformers that the same function makes the spec of: for Yi, Llama."""
    if architecture in LIKE:
        return LIKE[architecture]
    source = ModelRegistry.resolve(architecture).load()
    names = (name for name in ModelRegistry.get_supported_archs() if ModelRegistry.resolve(name).load() is source)
    return next((name for name in names if _transformers_config(name)), None)


def features(architecture: str) -> Features | str:
    """What it can do, or why that is not known here."""
    source = ModelRegistry.resolve(architecture).load()
    if isinstance(source, type):
        return "a class of its own"
    config = _transformers_config(architecture) or _transformers_config(_kin(architecture) or "")
    try:
        spec = source(
            config
            or HFConfig({**tiny_models.tiny_values(architecture), **OTHER_WORDS, "architectures": [architecture]})
        )
        if "lm_head" not in spec.weights.modules:  # an encoder
            spec = dataclasses.replace(spec, tied_embeddings=True)
        return features_of(spec)
    except (ConfigError, AttributeError, TypeError, ValueError) as error:
        return f"not known: {error}"


def _write_packaged() -> None:
    answers = {name: features(name) for name in _own_names()}
    rows = [
        f"{json.dumps(name)}: {json.dumps(dataclasses.asdict(answer))}"
        for name, answer in answers.items()
        if not isinstance(answer, str)
    ]
    PACKAGED.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")  # a line each: changes are easy to see


def _own_names() -> list[str]:
    return [name for name in ModelRegistry.get_supported_archs() if ModelRegistry.resolve(name).owner == "quire"]


def check(architecture: str) -> Result:
    """Compare one architecture with Transformers."""
    answer = features(architecture)
    if isinstance(answer, str):
        return Result(architecture, "skipped", answer, compared_with="nothing")
    if architecture in ELSEWHERE or _transformers_config(architecture) is None:
        kin = _kin(architecture)
        where = f"the table is {kin}'s" if kin else "a model that computes the same (`tests/models/`)"
        where = ELSEWHERE.get(architecture, where)
        return Result(architecture, "skipped", f"not checked here; {where}", compared_with=where)
    begin = time.perf_counter()
    compare = _largest_difference if answer.generates else _largest_difference_of_vectors
    compare = _largest_difference_of_halves if architecture in HALVES else compare
    try:
        difference = compare(architecture)
    except Exception as error:  # whatever goes wrong with one row must not end the table
        return Result(architecture, "FAILED", f"{type(error).__name__}: {error}".splitlines()[0])
    seconds = time.perf_counter() - begin
    verdict = "equal" if difference is not None and difference < TOLERANCE else "FAILED"
    what = "logprobs" if answer.generates else "vectors"
    figures = "greedy tokens differ" if difference is None else f"{what} within {difference:.1e}"
    text = _text_of(architecture)
    return Result(
        architecture, verdict, f"{figures} ({', '.join(answer.mixers)}; {seconds:.1f} s)", difference,
        f"Transformers' {text} (its text)" if text else "Transformers",
    )  # fmt: skip


def _text_of(architecture: str) -> str | None:
    """The architecture of the text part, where a model also sees."""
    config = _transformers_config(architecture)
    is_whole = config is not None and ModelRegistry.resolve(architecture).load() is text_part
    return TEXT_PARTS[config.text_config.model_type] if config is not None and is_whole else None


def _make_checkpoint(architecture: str, folder: str) -> tuple[Path, Any]:
    """A tiny checkpoint, and Transformers' model of it; of one that also sees, both have its text alone."""
    from safetensors.torch import load_file, save_file

    text = _text_of(architecture)
    path = tiny_models.make_tiny_model(text or architecture, folder, tokenizer=False)
    oracle = tiny_models.load_oracle(path)
    if text:
        config, weights = path / "config.json", path / "model.safetensors"
        whole = {"architectures": [architecture], "text_config": json.loads(config.read_bytes())}
        config.write_text(json.dumps(whole), encoding="utf-8")
        save_file({f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}, weights)
    return path, oracle


def _make_prompts(architecture: str) -> list[list[int]]:
    """Token ids of mixed lengths; the last begins like the one before."""
    draw = random.Random(architecture)
    prompts = [[draw.randrange(4, tiny_models.VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    return [*prompts, [*prompts[-1][:48], *prompts[0]]]


def _largest_difference_of_vectors(architecture: str) -> float:
    """Of any number of an encoder's last hidden states, which are about 1."""
    import numpy as np
    import torch

    from quire import LLM, PoolingParams

    prompts = _make_prompts(architecture)
    params = PoolingParams(task="token_embed", use_activation=False)
    largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path, oracle = _make_checkpoint(architecture, folder)
        with LLM(model=str(path), **(SETTINGS | {"max_num_batched_tokens": 160})) as llm:
            outputs = llm.encode([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            with torch.no_grad():
                expected = oracle(input_ids=torch.tensor([prompt])).last_hidden_state[0]
            largest = max(largest, float(np.abs(output.outputs.data - expected.numpy()).max()))
    return largest


def _largest_difference(architecture: str) -> float | None:
    """Of any logprob; None where some token differs."""
    import torch

    from quire import LLM, SamplingParams

    prompts = _make_prompts(architecture)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path, oracle = _make_checkpoint(architecture, folder)
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


def _largest_difference_of_halves(architecture: str) -> float | None:
    """As `_largest_difference`, with an encoder beside the decoder."""
    from quire import LLM, SamplingParams

    kind = HALVES[architecture]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    halves: list[dict[str, Any]] = [
        ({"sound": draw_sound(n, 4000 * n)} if kind.modality == "audio" else {})
        | ({"image": draw_image(n, 40, 20 * n)} if kind.modality == "image" else {})
        | ({"ids": [*range(30, 35 + 9 * n)]} if kind.reads_text else {})
        for n in (1, 2, 3)
    ]
    prompts = [(half, [300, *range(20, 20 + count)]) for half in halves for count in (0, 30)]
    settings = {name: value for name, value in SETTINGS.items() if name != "max_model_len"}
    largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_encoder_decoder(architecture, folder)
        oracle = EncoderDecoderOracle(path)
        with LLM(model=str(path), **settings) as llm:
            given: list[Any] = [
                {
                    "encoder_prompt": {
                        "prompt_token_ids": half.get("ids"),
                        "multi_modal_data": {
                            name: half[own] for name, own in (("audio", "sound"), ("image", "image")) if own in half
                        },
                    },
                    "decoder_prompt": ids,
                }
                for half, ids in prompts
            ]
            for (half, ids), output in zip(prompts, llm.generate(given, params, use_tqdm=False), strict=True):
                completion = output.outputs[0]
                token_ids = list(completion.token_ids)
                logprobs = oracle.logprobs(ids + token_ids, **half)[len(ids) - 1 : -1]
                if token_ids != logprobs.argmax(-1).tolist():
                    return None
                for row, token, ours in zip(logprobs, token_ids, completion.logprobs or (), strict=True):
                    largest = max(largest, abs(float(row[token]) - ours[token].logprob))
    return largest


BEGIN, END = "<!-- quire models: begin -->", "<!-- quire models: end -->"
NEW_DOCUMENT = f"# Architectures\n\n{BEGIN}\n{END}\n"
_HEADER = ("architecture", "layers", *COLUMNS, "check", "largest difference", "compared with")
NOT_CHECKED = ("not checked", "", "")
_VERSIONS = re.compile(r"^Checked with (.*)\.$", re.MULTILINE)

Cells = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """The document's table.

    Attributes:
        features: cells of each architecture: its layers, then `COLUMNS`.
        checks: of each: the verdict, the largest difference, whose answers it was compared with.
        versions: of what the checks ran with.
    """

    features: Mapping[str, Cells]
    checks: Mapping[str, Cells]
    versions: str

    def as_markdown(self) -> str:
        """Versions, then a row an architecture."""
        rows = [(name, *cells, *self.checks.get(name, NOT_CHECKED)) for name, cells in self.features.items()]
        lines = [_row(_HEADER), _row(("---",) * len(_HEADER)), *map(_row, rows)]
        return (f"Checked with {self.versions}.\n\n" if self.versions else "") + "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def feature_cells() -> dict[str, Cells]:
    """Of every architecture of Quire's own."""
    answers = {name: features(name) for name in _own_names()}
    return {
        name: (answer, *("?",) * len(COLUMNS)) if isinstance(answer, str) else _feature_cells(answer)
        for name, answer in answers.items()
    }


def _feature_cells(answer: Features) -> Cells:
    row = dataclasses.asdict(answer)
    return layer_words(row), *feature_words(row)


def _check_cells(result: Result) -> Cells:
    if result.verdict == "skipped":
        return "-", "-", result.compared_with
    difference = "-" if result.difference is None else f"{result.difference:.1e}"
    return result.verdict, difference, result.compared_with


def _installed_versions() -> str:
    return ", ".join(
        [f"quire {__version__}", *(f"{name} {metadata.version(name)}" for name in ("transformers", "torch"))]
    )


def read_table(text: str) -> Table:
    """The table of a document. Raises ConfigError: not both markers stand in it, in order."""
    inside = _split(text)[1]
    versions = _VERSIONS.search(inside)
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in inside.splitlines() if line[:1] == "|"]
    rows = [row for row in rows[2:] if len(row) == len(_HEADER)]
    checked = 2 + len(COLUMNS)
    return Table(
        {row[0]: row[1:checked] for row in rows},
        {row[0]: row[checked:] for row in rows},
        versions.group(1) if versions else "",
    )


def _split(text: str) -> tuple[str, str, str]:
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the file has no table: it needs the lines {BEGIN} and {END}", setting="write")
    return before, inside, after


def read_document(path: Path) -> str:
    """A document's text; of a file that is not there or empty, that of a new one.
    Raises ConfigError: it cannot be read or written, or lacks a marker."""
    is_new = not path.exists()
    try:
        with path.open("a+", encoding="utf-8") as file:
            file.seek(0)
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("write", f"cannot write {str(path)!r}: {error}.") from None
    if is_new:
        path.unlink()
    text = text or NEW_DOCUMENT
    read_table(text)
    return text


def write_table(path: Path, results: Iterable[Result]) -> None:
    """Put the table between the markers of a document, which is made where there is none; with the project's own document, what
    the package says of architectures is written too. `results`: of the checks that ran; other rows keep what they had.
    Raises ConfigError: the file lacks a marker, or rows that keep their result were checked with other versions."""
    text = read_document(path)
    old, cells = read_table(text), feature_cells()
    new = {result.architecture: _check_cells(result) for result in results}
    kept = {name: found for name, found in old.checks.items() if name in cells and name not in new}
    if new and kept and old.versions != _installed_versions():
        raise ConfigError(
            f"{path} was checked with {old.versions}, and this is {_installed_versions()}: check every architecture "
            "(no pattern)", setting="write",
        )  # fmt: skip
    table = Table(cells, kept | new, _installed_versions() if new else old.versions)
    before, _, after = _split(text)
    path.write_text(f"{before}{BEGIN}\n{table.as_markdown()}\n{END}{after}", encoding="utf-8")
    if path.resolve() == DOCUMENT:
        _write_packaged()


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="*", default=["*"], help="names of architectures, with shell wildcards (all)")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare with Transformers"
    )
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="write the document")
    args = parser.parse_args(given)
    try:
        if args.write:
            read_document(DOCUMENT)  # refused before the checks, which take minutes
        chosen = [name for name in _own_names() if any(fnmatch.fnmatch(name, each) for each in args.pattern)]
        results = [_told(check(name)) for name in chosen] if args.check else []
        if args.write:
            write_table(DOCUMENT, results)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return int(any(result.verdict == "FAILED" for result in results))


def _told(result: Result) -> Result:
    print(f"{result.architecture:<44}  {result.verdict:<7}  {result.detail}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
