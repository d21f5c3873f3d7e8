"""Beam search over a real tiny model gives the hypotheses of Transformers' `generate(num_beams=…)`, with their scores."""

import pytest

from quire.entrypoints.llm import LLM
from quire.sampling_params import BeamSearchParams

EOS = list(range(1, 30))
"""Many ids end a sequence, so that hypotheses end at different lengths."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    pytest.importorskip("transformers")
    from tests.oracles.tiny_models import load_oracle, make_tiny_model

    path = make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("beam"))
    llm = LLM(
        str(path),
        dtype="float32",
        max_model_len=128,
        num_gpu_blocks_override=128,
        override_generation_config={"eos_token_id": EOS},
    )
    yield llm, load_oracle(path)
    llm.shutdown()


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("text", ["hello world, the quick brown fox", "one two"])
def test_hypotheses_and_scores_equal_those_of_transformers(tiny, width, length_penalty, text):
    import torch

    llm, oracle = tiny
    ids = llm.get_tokenizer().encode(text)
    params = BeamSearchParams(
        beam_width=width, max_tokens=10, length_penalty=length_penalty, include_stop_str_in_output=True
    )
    (ours,) = llm.beam_search([ids], params)
    theirs = oracle.generate(
        torch.tensor([ids]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=10,
        do_sample=False,
        length_penalty=length_penalty,
        early_stopping=False,
        eos_token_id=sorted({*EOS, llm.get_tokenizer().eos_token_id}),
        pad_token_id=299,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = [sequence.tokens[len(ids) :] for sequence in ours.sequences]
    expected = [row[len(ids) :].tolist() for row in theirs.sequences]
    assert found == [row[: len(tokens)] for row, tokens in zip(expected, found, strict=True)]
    assert all(token == 299 for row, tokens in zip(expected, found, strict=True) for token in row[len(tokens) :])
    if width > 1:
        scores = [s.cum_logprob / len(t) ** length_penalty for s, t in zip(ours.sequences, found, strict=True)]
        assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)


def test_the_end_of_sequence_is_left_out_unless_asked_for(tiny):
    llm, _ = tiny
    kept, left = (
        llm.beam_search(["one two"], BeamSearchParams(beam_width=2, max_tokens=10, include_stop_str_in_output=keep))[0]
        for keep in (True, False)
    )
    for with_eos, without in zip(kept.sequences, left.sequences, strict=True):
        if with_eos.finish_reason == "stop":
            assert with_eos.tokens[:-1] == without.tokens
            assert len(without.logprobs) == len(with_eos.logprobs) - 1
