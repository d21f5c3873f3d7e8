"""nanochat: norms without weights, one behind the embeddings too; heads are normed after a rotation that goes backwards."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import MLP, DecoderSpec

NAMES = LLAMA_NAMES.but(("gate_up", "q_norm", "k_norm"), up="mlp.fc1", down="mlp.fc2")


@register("NanoChatForCausalLM")
def nanochat(hf: HFConfig) -> DecoderSpec:
    """nanochat d20 to d34."""
    spec, norm = llama(hf), RMSNorm(hf.get("rms_norm_eps", 1e-6), weight=False)
    head_dim = spec.attentions()[0].head_dim
    rope = dataclasses.replace(Rope.from_hf(hf, head_dim), backwards=True)
    spec = spec.with_attention(rope=rope, qk_norm=norm, qk_norm_after_rope=True)
    return dataclasses.replace(
        spec,
        mlp=MLP(hf.intermediate_size, hf.get("hidden_act", "relu2")),
        norm=norm,
        embedding_norm=norm,
        logits_soft_cap=hf.get("final_logit_softcapping") or 0.0,
        weights=NAMES,
    )
