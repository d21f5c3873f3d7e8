"""What pooling requests and settings may be, and what is said of those that may not."""

import json

import numpy as np
import pytest
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, PoolingParams, SamplingParams
from quire.config.hf_config import HFConfig
from quire.config.pooling import resolve_pooling, split_architecture
from quire.config.wire import config_from_plain, config_to_plain
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError, RequestError

from .conftest import SETTINGS, as_dicts

PROMPT = {"prompt_token_ids": [5, 6, 7]}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    path = make_tiny_model("Qwen3Model", tmp_path_factory.mktemp("embedder"))
    with LLM(str(path), hf_overrides={"matryoshka_dimensions": [16, 32]}, **SETTINGS) as llm:
        yield llm


def test_dimensions_cut_the_vector_before_it_is_normalised(embedder):
    (whole,) = embedder.encode(PROMPT, PoolingParams(use_activation=False), use_tqdm=False)
    (short,) = embedder.embed(PROMPT, pooling_params=PoolingParams(dimensions=16), use_tqdm=False)
    expected = whole.outputs.data[:16] / np.linalg.norm(whole.outputs.data[:16])
    np.testing.assert_allclose(short.outputs.embedding, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("params", "message", "param"),
    [
        (PoolingParams(dimensions=17), "not one of the model's: 16, 32", "dimensions"),
        (PoolingParams(task="classify"), "allowed: embed, token_embed", "task"),
        (PoolingParams(truncate_prompt_tokens=1000), "1 to max_model_len", "truncate_prompt_tokens"),
        (
            PoolingParams(task="token_embed", returned_token_ids=[3, 64]),
            "has 64, but the model gives 64",
            "returned_token_ids",
        ),
        (PoolingParams(token_type_ids=[0, 1]), "2 entries for 3 prompt tokens", "token_type_ids"),
    ],
)
def test_what_the_model_cannot_do_is_refused(params, message, param, embedder):
    with pytest.raises(RequestError, match=message) as error:
        embedder.encode(PROMPT, params, use_tqdm=False)
    assert error.value.param == param


def test_prompts_of_the_wrong_length_are_refused(embedder):
    with pytest.raises(RequestError, match="maximum context length is 128 tokens, and the prompt has 129"):
        embedder.embed({"prompt_token_ids": [5] * 129}, use_tqdm=False)
    with pytest.raises(RequestError, match="is empty"):
        embedder.embed({"prompt_token_ids": []}, use_tqdm=False)
    assert len(embedder.embed({"prompt_token_ids": [5] * 128}, use_tqdm=False)) == 1


def test_params_are_one_for_all_or_one_for_each(embedder):
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        embedder.embed(PROMPT, pooling_params=[PoolingParams()] * 2, use_tqdm=False)
    with pytest.raises(RequestError, match="the call asks for 'embed'"):
        embedder.embed(PROMPT, pooling_params=PoolingParams(task="token_embed"), use_tqdm=False)


def test_a_pooling_model_refuses_to_generate(embedder):
    with pytest.raises(RequestError, match="runs as a pooling model"):
        embedder.generate(PROMPT, SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("runner", ["auto", "generate"])
@pytest.mark.parametrize(
    ("architecture", "field"),
    [("Gemma3ForCausalLM", {"use_bidirectional_attention": True}), ("Qwen2ForCausalLM", {"is_causal": False})],
)
def test_what_sees_later_tokens_refuses_to_generate(architecture, field, runner, tiny):
    (name,) = field
    with pytest.raises(ConfigError, match=rf"{name}=\w+ in config\.json: tokens see later ones.*runner='pooling'"):
        LLM(str(tiny(architecture)), runner=runner, hf_overrides=field, **SETTINGS)


def test_a_generating_model_refuses_to_pool(tiny):
    with LLM(str(tiny("LlamaForCausalLM")), **SETTINGS) as llm:
        for call in (llm.embed, llm.classify, llm.reward, llm.encode):
            with pytest.raises(RequestError, match="runner='pooling'"):
                call(PROMPT, use_tqdm=False)
        with pytest.raises(RequestError, match="runner='pooling'"):
            llm.score("a", "b", use_tqdm=False)


def test_a_classifier_refuses_to_embed(tiny):
    path = str(tiny("LlamaForSequenceClassification", num_labels=3))
    with LLM(path, **SETTINGS) as llm, pytest.raises(RequestError, match="allowed: classify, token_classify"):
        llm.embed(PROMPT, use_tqdm=False)


def test_equal_beginnings_are_read_from_the_cache_where_the_last_token_counts(tiny, prompts):
    long = [7] * 60
    for kind, cached in (("LAST", 48), ("MEAN", 0)):
        config = {"seq_pooling_type": kind}
        with LLM(str(tiny("LlamaForCausalLM")), runner="pooling", pooler_config=config, **SETTINGS) as llm:
            (first,) = llm.embed({"prompt_token_ids": long}, use_tqdm=False)
            (second,) = llm.embed({"prompt_token_ids": long}, use_tqdm=False)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
        np.testing.assert_allclose(first.outputs.embedding, second.outputs.embedding, atol=1e-5)


def test_half_precision_embeds_about_the_same(tiny, prompts):
    path = tiny("BertModel")
    vectors = {}
    for dtype in ("float32", "bfloat16"):
        with LLM(str(path), dtype=dtype, **(SETTINGS | {"max_num_batched_tokens": 128})) as llm:
            vectors[dtype] = np.array(
                [output.outputs.embedding for output in llm.embed(as_dicts(prompts), use_tqdm=False)]
            )
    assert (vectors["float32"] * vectors["bfloat16"]).sum(-1).min() > 0.99


# Settings.


@pytest.mark.parametrize(
    ("architecture", "family", "convert"),
    [
        ("Qwen3ForCausalLM", "Qwen3", None),
        ("GPT2LMHeadModel", "GPT2", None),
        ("LlamaModel", "Llama", "embed"),
        ("Gemma3TextModel", "Gemma3", "embed"),
        ("Gemma3TextForSequenceClassification", "Gemma3", "classify"),
        ("BertForMaskedLM", "Bert", "embed"),
        ("LlamaBidirectionalModel", "Llama", "embed"),
        ("Qwen2ForProcessRewardModel", "Qwen2", "reward"),
        ("XLMRobertaForSequenceClassification", "XLMRoberta", "classify"),
        ("ModernBertForTokenClassification", "ModernBert", "token_classify"),
    ],
)
def test_an_architectures_name_says_what_it_gives(architecture, family, convert):
    assert split_architecture(architecture) == (family, convert)


@pytest.mark.parametrize(
    ("architecture", "settings", "setting"),
    [
        ("LlamaModel", {"runner": "generate"}, "runner"),
        ("LlamaForCausalLM", {"runner": "generate", "convert": "embed"}, "convert"),
        ("LlamaForCausalLM", {"runner": "pooling", "convert": "none"}, "convert"),
        ("LlamaForCausalLM", {"pooler_config": {"pooling_type": "MEAN"}}, "pooler_config"),
        ("LlamaModel", {"pooler_config": {"pooling": "MEAN"}}, "pooler_config"),
        ("LlamaModel", {"pooler_config": {"pooling_type": "MEDIAN"}}, "pooler_config"),
        ("LlamaModel", {"pooler_config": {"use_activation": "yes"}}, "pooler_config"),
    ],
)
def test_settings_that_contradict_are_refused(architecture, settings, setting, tmp_path):
    with pytest.raises(ConfigError) as error:
        resolve_pooling(str(tmp_path), HFConfig({}), architecture, **settings)
    assert error.value.setting == setting


def test_a_generating_checkpoint_beside_module_files_embeds(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules])
    )
    pooling = resolve_pooling(str(tmp_path), HFConfig({}), "Qwen3ForCausalLM")
    assert pooling is not None and (pooling.kinds, pooling.activation) == (("last",), "normalize")
    assert resolve_pooling(str(tmp_path), HFConfig({}), "Qwen3ForCausalLM", runner="generate") is None


def test_the_older_setting_task_still_works(tiny):
    path = str(tiny("LlamaForCausalLM"))
    config = EngineArgs(model=path, task="embed", skip_tokenizer_init=True).create_engine_config()
    assert config.model.runner == "pooling" and config.model.pooling is not None and config.model.pooling.embeds


def test_encoders_compute_a_prompt_in_one_step_and_cache_no_prefixes(tiny):
    config = EngineArgs(model=str(tiny("BertModel")), skip_tokenizer_init=True).create_engine_config()
    assert not config.scheduler.enable_chunked_prefill and not config.cache.enable_prefix_caching
    assert config.scheduler.max_num_batched_tokens >= config.model.max_model_len


def test_a_roberta_has_fewer_positions_than_rows(tiny):
    path = tiny("RobertaModel", pad_token_id=1, max_position_embeddings=130)
    assert EngineArgs(model=str(path), skip_tokenizer_init=True).create_engine_config().model.max_model_len == 128


def test_swapping_is_refused(tiny):
    with pytest.raises(ConfigError) as error:
        EngineArgs(model=str(tiny("LlamaModel")), preemption_mode="swap", swap_space=1).create_engine_config()
    assert error.value.setting == "preemption_mode"


def test_a_pooling_configuration_goes_to_another_process_and_back(tmp_path):
    path = make_tiny_model("Qwen3Model", tmp_path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (path / "2_Dense").mkdir()
    (path / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 64, "out_features": 8}))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    (path / "modules.json").write_text(
        json.dumps([{"path": p, "type": f"sentence_transformers.{k}"} for p, k in kinds])
    )
    config = EngineArgs(model=str(path), skip_tokenizer_init=True).create_engine_config()
    assert config.model.pooling is not None and config.model.pooling.dense[0].outputs == 8
    assert config_from_plain(config_to_plain(config)) == config


def test_labels_are_found_by_their_numbers():
    config = HFConfig({"id2label": {"0": "no", "1": "yes"}, "nested": {"a": {"b": 1}}})
    assert config.id2label[1] == config["id2label"]["1"] == "yes" and config["nested"]["a"].b == 1
    with pytest.raises(KeyError):
        config.id2label[2]


def test_a_model_that_embeds_tokens_scores_by_the_best_partner_of_each_token(tmp_path_factory):
    path = make_tiny_model("Qwen3Model", tmp_path_factory.mktemp("tokens"))
    texts = ["a quire", "has pages", "and more pages than one"]
    with LLM(str(path), pooler_config={"task": "token_embed"}, **SETTINGS | {"skip_tokenizer_init": False}) as llm:
        scores = [output.outputs.score for output in llm.score(texts[0], texts[1:], use_tqdm=False)]
        query, *documents = (output.outputs.data for output in llm.encode(texts, use_tqdm=False))
    expected = [sum(max(float(a @ b) for b in document) for a in query) for document in documents]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
