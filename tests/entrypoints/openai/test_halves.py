"""`/v1/completions` of a model with an encoder beside its decoder, as OpenAI's client sends them."""

import openai
import pytest
from tests.oracles.server_process import SERVE, ServerProcess
from tests.oracles.tiny_encoder_decoder import START, EncoderDecoderOracle, make_tiny_encoder_decoder


def test_the_encoder_reads_the_prompt(tmp_path):
    path = make_tiny_encoder_decoder("T5ForConditionalGeneration", tmp_path / "model")
    oracle, ids = EncoderDecoderOracle(path), [30, 31, 32, 33, 34]
    server = ServerProcess(
        *SERVE, "--model", str(path), "--port", "0", "--cpu-threads", "1", "--kv-cache-memory-bytes", "16M"
    )
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        extra = {"return_token_ids": True, "ignore_eos": True}
        answer = client.completions.create(
            model=str(path), prompt=ids, max_tokens=4, temperature=0, logprobs=1, extra_body=extra
        )
    finally:
        server.kill()
    choice = answer.choices[0]
    assert choice.prompt_token_ids == [START] and choice.logprobs is not None
    logprobs = oracle.logprobs([START, *choice.token_ids], ids=ids)[:-1]
    assert choice.token_ids == logprobs.argmax(-1).tolist()
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs.max(-1).values.tolist(), abs=1e-3)
