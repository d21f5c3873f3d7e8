"""Logits processors of vLLM's second runner: they find each slot's tokens, and edit the rows of their own requests only."""

from typing import Any

import pytest
import torch
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.as_vllm.slot_logits import LogitsContext, LogitsProcessor, LogitsProcRequestState

PROMPTS = [[5, 6, 7], [9] * 20, [11], [12, 13]]


class NothingTwice(LogitsProcessor):
    """Forbids every token that the sequence has, where a request asks for it."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        super().__init__(vllm_config, req_states)
        self.states = req_states

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("fresh", True) is not True:
            raise ValueError("fresh must be true")

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return "fresh" in (sampling_params.extra_args or {})

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        lengths = self.states.total_len.gpu[ctx.idx_mapping].tolist()
        assert (ctx.pos + 1).tolist() == ctx.seq_lens_upper_bound_np.tolist() == lengths
        for index, (slot, length) in enumerate(zip(ctx.idx_mapping_np.tolist(), lengths, strict=True)):
            tokens = self.states.all_token_ids.gpu[slot, :length]
            assert int(tokens[-1]) == int(ctx.input_ids[index])
            assert int(self.states.prompt_len.gpu[slot]) <= length
            logits[index, tokens.long()] = -torch.inf
        return logits


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("slots"))
    settings = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "skip_tokenizer_init": True}
    with LLM(str(path), logits_processors=[NothingTwice], **settings) as llm:
        yield llm


def test_rows_that_ask_for_it_are_edited_and_slots_are_used_again(llm: Any) -> None:
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in range(2)]
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, repetition_penalty=0.5)
    fresh = plain.clone()
    fresh.extra_args = {"fresh": True}
    outputs = llm.generate(given, [plain, fresh] * len(PROMPTS), use_tqdm=False)
    alone = llm.generate(given[::2], plain, use_tqdm=False)
    for prompt, one, other, by_itself in zip(PROMPTS, outputs[::2], outputs[1::2], alone, strict=True):
        tokens = [*prompt[:1], *other.outputs[0].token_ids]
        assert len(set(tokens)) == 13 and not set(prompt) & set(tokens[1:])
        assert one.outputs[0].token_ids == by_itself.outputs[0].token_ids
        assert len(set(one.outputs[0].token_ids)) < 12


def test_what_the_processor_refuses_ends_its_request_alone(llm: Any) -> None:
    many = [SamplingParams(max_tokens=2, detokenize=False, extra_args=extra) for extra in ({"fresh": 3}, {})]
    wrong, right = llm.generate([{"prompt_token_ids": [3, 4]}] * 2, many, use_tqdm=False)
    assert "fresh must be true" in str(wrong.error) and len(right.outputs[0].token_ids) == 2
