"""Train an EAGLE-3 head for the demo model: one layer that drafts the next tokens from the model's own features.

    PYTHONPATH=src python -m tools.demo_model.train_eagle --seconds 90 --out examples/demo_drafts/eagle3

After EAGLE-3 (Li et al. 2025, arXiv:2503.01840). The head reads the residual stream at three depths and the embedding of the next
token, and learns the model's own distribution of the token after that. It is unrolled over `STEPS` drafts, each of which reads
what the one before it gave, as in use. The checkpoint has the names that published heads have. Needs one GPU, or patience.

Legend: T tokens of a stream, N query heads, K KV heads, H head size, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .data import BatchSource
from .model import MLP, DemoConfig, DemoModel, RMSNorm, rotate
from .train import ASSETS, learning_rate, to_device

STEPS = 4
DECAY = 0.8
"""Each further draft counts this much less: it is only used if those before it were right."""


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Before which layers the residual stream is read: near the start, in the middle, near the end."""
    return 2, num_layers // 2, num_layers - 3


class HeadAttention(nn.Module):
    """Attention whose queries, keys and values read two vectors of the hidden size."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.group, self.head_dim = config.num_heads // config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each [T, N, H]."""
        q, k, v = (p(x).view(len(x), -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (part.repeat_interleave(self.group, dim=1) for part in (rotate(k, cos, sin), v))
        return rotate(q, cos, sin), k, v


class HeadLayer(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = HeadAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)


class EagleHead(nn.Module):
    """The head; its embedding is the model's."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = HeadLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def unroll(self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, document: Tensor) -> list[Tensor]:
        """The logits [T, V] of each draft. Draft number n at a token reads what number n - 1 gave one token before it; of keys it
        sees the first draft's up to n - 1 tokens before, and one of each later draft."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        place = torch.arange(len(embedded), device=embedded.device)
        is_same = document[:, None] == document[None]
        hidden, logits = self.fc(features), []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(STEPS):
            x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), dim=-1)
            q, k, v = attention.project(x, cos, sin)
            keys.append(k)
            values.append(v)
            scores = torch.einsum("tnh,snh->nts", q, keys[0]) / attention.head_dim**0.5
            is_seen = is_same & (place[None] <= place[:, None] - step)
            parts = [scores.float().masked_fill(~is_seen, -1e9)]
            shifted = [(behind, step - behind) for behind in range(1, step + 1)]
            for number, back in shifted:
                own = (q * keys[number].roll(back, 0)).sum(-1) / attention.head_dim**0.5
                parts.append(own.float().T[..., None])
            weights = torch.cat(parts, dim=-1).softmax(-1).to(v.dtype)
            mixed = torch.einsum("nts,snh->tnh", weights[..., : len(place)], values[0])
            for index, (number, back) in enumerate(shifted):
                mixed = mixed + weights[..., len(place) + index].T[..., None] * values[number].roll(back, 0)
            hidden = hidden + attention.o_proj(mixed.reshape(len(place), -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
            hidden = hidden.roll(1, 0)
        return logits


@torch.no_grad()
def read_model(
    model: DemoModel, tokens: Tensor, positions: Tensor, starts: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """The features [T, 3D] of a stream and the model's distribution of each next token [T, V]."""
    cos, sin = model.cos[positions], model.sin[positions]
    x, read = model.model.embed_tokens(tokens), []
    for number, layer in enumerate(model.model.layers):
        if number in feature_layers(len(model.model.layers)):
            read.append(x)
        x = layer(x, cos, sin, starts, longest)
    logits = F.linear(model.model.norm(x), model.model.embed_tokens.weight)
    return torch.cat(read, dim=-1), logits.float().softmax(-1)


def losses(head: EagleHead, model: DemoModel, stream: tuple[Tensor, ...], longest: int) -> tuple[Tensor, list[Tensor]]:
    """The loss, and how often each draft is the model's likeliest token."""
    tokens, positions, targets, starts = stream
    features, wanted = read_model(model, tokens, positions, starts, longest)
    document = torch.searchsorted(starts.long(), torch.arange(len(tokens), device=tokens.device), right=True)
    embedded = model.model.embed_tokens(tokens.roll(-1)).detach()
    logits = head.unroll(embedded, features, model.cos[positions], model.sin[positions], document)
    wanted, is_asked = wanted.roll(-1, 0), (targets != -100).roll(-1, 0) & (document == document.roll(-1, 0))
    total, right = torch.zeros((), device=tokens.device), []
    for step, step_logits in enumerate(logits):
        counts = is_asked & (positions >= step)
        chosen, asked = step_logits[counts].float(), wanted[counts]
        total = total - DECAY**step * (asked * chosen.log_softmax(-1)).sum(-1).mean()
        right.append((chosen.argmax(-1) == asked.argmax(-1)).float().mean())
    return total, right


def save_head(head: EagleHead, config: DemoConfig, out: Path) -> None:
    """The weights under the names of published heads, and config.json."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    described = config.to_hf() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
    }
    (out / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: let the clock decide)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=6144, help="tokens a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device, config = torch.device(arguments.device), DemoConfig()
    torch.manual_seed(1)
    source = BatchSource(ASSETS / "tokenizer.json", arguments.tokens, arguments.workers, 11 * 10**12)
    model = DemoModel(config).to(device).requires_grad_(False)
    model.load_state_dict({name: value.float() for name, value in load_file(str(ASSETS / "model.safetensors")).items()})
    head = EagleHead(config).to(device)
    head.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=0.01, betas=(0.9, 0.95))
    started, step = 0.0, 0
    while True:
        batch = source.next()
        started = started or time.monotonic()
        progress = (time.monotonic() - started) / arguments.seconds
        if progress >= 1.0 or (arguments.steps and step >= arguments.steps):
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, arguments.rate)
        with torch.autocast(device.type, torch.bfloat16):
            loss, right = losses(head, model, to_device(batch, device), batch.longest)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 200 == 0 or step == arguments.steps:
            shares = " ".join(f"{float(share):.3f}" for share in right)
            print(f"step {step}, loss {float(loss.detach()):.4f}, drafts right: {shares}", flush=True)
    source.close()
    save_head(head, config, arguments.out)
    print(f"{step} steps of {arguments.tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
