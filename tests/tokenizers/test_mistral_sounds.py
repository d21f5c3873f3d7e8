"""Sounds in conversations that Mistral's own tokenizer makes prompts of: each one becomes its marker."""

import asyncio
import base64
import json
from pathlib import Path

import numpy as np
import pytest
from tests.oracles.tiny_encoder_decoder import RATE, draw_sound
from tests.oracles.tiny_listeners import HearingOracle, make_tiny_listener

from quire import LLM, SamplingParams
from quire.entrypoints.openai.prompts import chat_prompt
from quire.entrypoints.openai.protocol import ChatCompletionRequest
from quire.errors import RequestError

pytest.importorskip("mistral_common")
AUDIO, BEGIN = 24, 25
NAMES = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "s20", "s21", "s22", "s23", "[AUDIO]", "[BEGIN_AUDIO]", "s26",
    "s27", "s28", "s29", "s30", "s31", "[ARGS]", "[CALL_ID]", "[TRANSCRIBE]",
]  # fmt: skip
SOUND = draw_sound(3, 20000)


def write_tekken(folder: Path) -> Path:
    """Mistral's tokenizer of bytes, for a model that hears as Voxtral does."""
    folder.mkdir()
    config = {"pattern": r"\s|\S+", "num_vocab_tokens": 256, "default_vocab_size": 296, "version": "v13"}
    vocab = [{"rank": b, "token_bytes": base64.b64encode(bytes([b])).decode(), "token_str": None} for b in range(256)]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(NAMES)]
    encoding = {"num_mel_bins": 128, "hop_length": 160, "window_size": 400}
    audio = {"sampling_rate": RATE, "frame_rate": 12.5, "chunk_length_s": 30.0, "audio_encoding_config": encoding}
    whole = {"config": config | {"default_num_special_tokens": 40}, "vocab": vocab}
    (folder / "tekken.json").write_text(json.dumps(whole | {"special_tokens": special, "audio": audio}))
    return folder


def test_a_chat_with_sounds_is_what_transformers_hears_offline_and_in_the_server(tmp_path: Path) -> None:
    path = make_tiny_listener("VoxtralForConditionalGeneration", tmp_path / "model", audio_token_id=AUDIO)
    tokenizer = write_tekken(tmp_path / "tokenizer")
    llm = LLM(str(path), tokenizer=str(tokenizer), tokenizer_mode="mistral", max_model_len=256, dtype="float32")
    text = {"type": "text", "text": "[AUDIO] is"}
    content = [text, *({"type": "audio", "audio": sound} for sound in (SOUND, (SOUND[:9000], RATE)))]
    chat = [{"role": "user", "content": content}]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    (output,) = llm.chat(chat, params, use_tqdm=False)
    prompt, token_ids = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    assert prompt.count(BEGIN) == 2 and prompt.count(AUDIO) == 3 * 13  # two parts, and one
    logprobs = HearingOracle(path).logprobs(prompt + token_ids, [SOUND, SOUND[:9000]])[len(prompt) - 1 : -1]
    assert token_ids == logprobs.argmax(-1).tolist()
    processor = llm.llm_engine.input_processor
    request = ChatCompletionRequest(messages=chat)
    made = asyncio.run(chat_prompt(request, llm.get_tokenizer(), None, 256, processor=processor))
    assert made.token_ids == prompt and len(made.media) == 2
    with pytest.raises(RequestError, match=r"is empty"):
        llm.chat([{"role": "user", "content": [{"type": "audio", "audio": np.zeros(0)}]}], params, use_tqdm=False)
