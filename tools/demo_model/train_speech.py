"""Train the demo model that hears: a very small Whisper that writes which keys of a telephone were pressed.

    PYTHONPATH=src OMP_NUM_THREADS=1 python -m tools.demo_model.train_speech --checkpoint FILE

Plain Transformers on one core, 6 minutes. `--seconds` ends a run sooner; the next one goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .part_training import PartRun, run_arguments
from .sounds import KEYS, MOST_KEYS, RATE, SECONDS, Sound, dial

OUT = Path(__file__).resolve().parents[2] / "src" / "quire" / "assets" / "demo_speech"
END, START, NO_SPEECH, PREVIOUS, NO_TIMES = (
    f"<|{name}|>" for name in ("endoftext", "startoftranscript", "nospeech", "startofprev", "notimestamps")
)
STEP_S = 0.02
BATCH = 32
ROWS_A_SECOND = 50


def make_tokenizer() -> Tokenizer:
    """Bytes, Whisper's special tokens for English alone, and its times."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    times = [f"<|{step * STEP_S:.2f}|>" for step in range(round(SECONDS / STEP_S) + 1)]
    special = [END, START, PREVIOUS, NO_SPEECH, NO_TIMES]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in times])
    return tokenizer


def make_model(tokenizer: Tokenizer) -> WhisperForConditionalGeneration:
    end, start = tokenizer.token_to_id(END), tokenizer.token_to_id(START)
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=96,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=384,
        decoder_ffn_dim=384,
        max_source_positions=SECONDS * ROWS_A_SECOND,
        max_target_positions=48,
        dropout=0.0,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        attn_implementation="eager",
    )
    return WhisperForConditionalGeneration(config)


def transcript(sound: Sound, has_times: bool) -> str:
    """What the decoder writes of a sound, its prompt included."""
    if not sound.groups:
        return START + NO_SPEECH + END
    if not has_times:
        return START + NO_TIMES + " " + sound.text + END
    # A transcript with times begins at zero, as its prompt does; a group begins where the one before it ended.
    parts, zero = [], "<|0.00|>"
    for place, (_, keys, end) in enumerate(sound.groups):
        until = f"<|{round(end / STEP_S) * STEP_S:.2f}|>"
        begin = zero if place == 0 else f"<|{round(sound.groups[place][0] / STEP_S) * STEP_S:.2f}|>"
        parts.append(f"{begin} {keys}{until}")
    return START + "".join(parts) + END


class Ear(torch.nn.Module):
    """The model, and a head that says which key sounds in each row of the encoder, which only training has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.whisper = make_model(tokenizer)
        self.head = torch.nn.Linear(self.whisper.config.d_model, 1 + len(KEYS))
        self.key_tokens = torch.tensor([tokenizer.token_to_id(key) for key in KEYS])

    def losses(
        self, frames: torch.Tensor, tokens: torch.Tensor, keys: torch.Tensor, order: torch.Tensor
    ) -> tuple[torch.Tensor, str]:
        """The loss of what is written, of which key sounds where, and of where one head of each layer looks for the next key:
        without the last one it takes many more examples until the decoder finds its place."""
        with torch.autocast("cpu", torch.bfloat16):
            read = tokens[:, :-1].clamp(min=0)
            given = self.whisper(input_features=frames, decoder_input_ids=read, output_attentions=True)
            sounding = self.head(given.encoder_last_hidden_state).float()
        logits, wanted = given.logits.float(), tokens[:, 1:]
        written = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        placed = F.cross_entropy(sounding.flatten(0, 1), keys.flatten())
        is_key = torch.isin(wanted, self.key_tokens)
        row, place = is_key.nonzero(as_tuple=True)
        there = order[row] == is_key.cumsum(-1)[row, place][:, None]
        looks = [layer[row, 0, place].float() for layer in given.cross_attentions]
        found = -sum((each * there).sum(-1).clamp(min=1e-6).log().mean() for each in looks) if len(row) else 0.0
        right = (logits.argmax(-1) == wanted) | (wanted == -100)
        told = f"where {placed.detach():.3f}, whole {right.all(-1).float().mean():.2f}"
        return written + placed + 0.3 * found, told


@functools.cache
def _readers() -> tuple[Tokenizer, WhisperFeatureExtractor]:
    return make_tokenizer(), WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS)


def batch_of(step: int) -> tuple[np.ndarray, ...]:
    """Frames [B, 80, frames]; tokens [B, T] with -100 behind the end; which key sounds in each row of the encoder, and the number
    of the key among those of its sound [B, rows], 0 where it is quiet. What attends where is learnt of few keys first."""
    tokenizer, extractor = _readers()
    sounds = [dial(step * BATCH + index, most=min(MOST_KEYS, 2 + step // 60)) for index in range(BATCH)]
    frames = extractor([each.samples for each in sounds], sampling_rate=RATE, return_tensors="np")["input_features"]
    written = [tokenizer.encode(transcript(sound, index % 2 == 1)).ids for index, sound in enumerate(sounds)]
    tokens = np.full((BATCH, max(map(len, written))), -100)
    keys, order = np.zeros((2, BATCH, SECONDS * ROWS_A_SECOND), np.int64)
    for row, (sound, ids) in enumerate(zip(sounds, written, strict=True)):
        tokens[row, : len(ids)] = ids
        for number, (start, key, end) in enumerate(sound.keys, start=1):
            rows = slice(round(start * ROWS_A_SECOND), round(end * ROWS_A_SECOND))
            keys[row, rows], order[row, rows] = 1 + KEYS.index(key), number
    return frames, tokens, keys, order


def save(
    model: WhisperForConditionalGeneration, tokenizer: Tokenizer, extractor: WhisperFeatureExtractor, out: Path
) -> None:
    """The checkpoint in bfloat16, as Transformers writes it."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.to("cpu", torch.bfloat16).contiguous()
        for name, value in model.model.state_dict(prefix="model.").items()
    }
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = model.config.to_dict() | {"architectures": ["WhisperForConditionalGeneration"], "dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    extractor.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "bos_token": END}
    (out / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = run_arguments(argparse.ArgumentParser(description=__doc__), minutes=6.0, out=OUT)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    tokenizer, extractor = _readers()
    ear = Ear(tokenizer)
    run = PartRun(ear, arguments, peak=2e-3)
    for step in run.steps():
        run.learn(*ear.losses(*map(torch.from_numpy, batch_of(step))))
    save(ear.whisper, tokenizer, extractor, arguments.out)


if __name__ == "__main__":
    main()
