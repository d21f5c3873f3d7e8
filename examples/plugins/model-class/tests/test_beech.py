"""A checkpoint of the architecture gives the tokens that plain PyTorch gives, whatever the chunks."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams

VOCAB, HIDDEN, HEADS = 50, 32, 4


def expected(weights: dict[str, torch.Tensor], prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each from the whole sequence."""
    tokens = list(prompt)
    for _ in range(count):
        x = weights["embed.weight"][tokens]
        q, k, v = (x @ weights["qkv.weight"].T).view(len(tokens), 3, HEADS, -1).permute(1, 2, 0, 3)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(0, 1).reshape(len(tokens), HIDDEN) @ weights["out.weight"].T
        tokens.append(int((x[-1] @ weights["head.weight"].T).argmax()))
    return tokens[len(prompt) :]


def test_tokens_equal_those_of_plain_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(3)
    shapes = {"embed": (VOCAB, HIDDEN), "qkv": (3 * HIDDEN, HIDDEN), "out": (HIDDEN, HIDDEN), "head": (VOCAB, HIDDEN)}
    weights = {f"{name}.weight": torch.randn(shape) * 0.4 for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    config = {
        "architectures": ["BeechForCausalLM"],
        "model_type": "beech",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=16, max_num_seqs=4)
    prompts = [[number * 7 % VOCAB for number in range(length)] for length in (1, 5, 40)]
    params = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert list(output.outputs[0].token_ids) == expected(weights, prompt, 12)
