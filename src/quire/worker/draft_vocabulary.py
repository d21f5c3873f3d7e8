"""A draft model with another tokenizer: which of its tokens are the model's, and what it reads in the place of those it lacks.

Two tokens are one if they stand for the same bytes, or play the same part (the end of a text, say). Guesses are of such tokens
alone: of what the drafter would draw, the rest is left out (token-level intersection, https://arxiv.org/abs/2502.05202). Both
models count the same places: so a token that the drafter lacks is read as the last one of those into which its own tokenizer
divides the text. Knows tokenizers; knows no rows.

Legend: N rows, V the model's vocabulary, D the drafter's, S tokens that both have.
"""

import torch

from quire.config import ModelConfig
from quire.errors import ConfigError
from quire.tokenizers.interface import Tokenizer
from quire.tokenizers.loader import get_tokenizer

_PARTS = ("bos_token", "eos_token", "pad_token", "unk_token")


class OtherTokens:
    """Tokens of two vocabularies.

    Args:
        drafter, model: whose tokenizers are read.

    Attributes:
        num_shared: S.

    Raises:
        ConfigError: a tokenizer's tokens are not plain runs of bytes, or no token is shared.
    """

    def __init__(self, drafter: ModelConfig, model: ModelConfig, max_rows: int, device: torch.device) -> None:
        theirs, ours = get_tokenizer(drafter.path), get_tokenizer(model.tokenizer_path or model.path)
        their_bytes, our_bytes = _bytes_of(theirs, drafter.vocab_size), _bytes_of(ours, model.own_vocab_size)
        by_bytes = {text: token for token, text in their_bytes.items()}
        own = {token: by_bytes[text] for token, text in our_bytes.items() if text in by_bytes} | _same_parts(
            ours, theirs
        )
        shared = {theirs_id: ours_id for ours_id, theirs_id in own.items()}
        if not shared:
            raise ConfigError(
                f"speculative_config.model={drafter.model!r} cannot be used: its tokenizer has no token of the model's",
                setting="speculative_config",
            )
        own |= _last_pieces({token: text for token, text in our_bytes.items() if token not in own}, theirs)
        own_V = torch.full((model.vocab_size,), theirs.eos_token_id or 0, dtype=torch.int32)
        own_V[list(own)] = torch.tensor(list(own.values()), dtype=torch.int32)
        self._own_V = own_V.to(device)
        self._theirs_S, self._ours_S = (torch.tensor([*ids], device=device) for ids in (shared, shared.values()))
        self._spread_NV = torch.zeros(max_rows, model.vocab_size, device=device)
        self.num_shared = len(shared)

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        """What the drafter reads for tokens of the model, int32."""
        return self._own_V[ids.long()]

    def spread(self, logits_ND: torch.Tensor) -> torch.Tensor:
        """Logits of the model's tokens: minus infinity for those that are not the drafter's."""
        spread_NV = self._spread_NV[: len(logits_ND)].fill_(-torch.inf)
        return spread_NV.index_copy_(1, self._ours_S, logits_ND[:, self._theirs_S].float())


def _bytes_of(tokenizer: Tokenizer, size: int) -> dict[int, bytes]:
    """The bytes of each token that stands for some."""
    if tokenizer.token_bytes is None:
        raise ConfigError(
            f"speculative_config.model cannot be used: it has another tokenizer than the model, and tokens of "
            f"{tokenizer.name_or_path!r} are not plain runs of bytes, by which they could be compared",
            setting="speculative_config",
        )
    table, special = tokenizer.token_bytes.table(False), tokenizer.special_ids
    known = range(min(size, tokenizer.max_token_id + 1))
    return {token: table[token] for token in known if token not in special and table[token]}


def _same_parts(ours: Tokenizer, theirs: Tokenizer) -> dict[int, int]:
    """Special tokens with a part that both vocabularies have, or with the same text."""
    pairs = [(ours.special_tokens.get(part), theirs.special_tokens.get(part)) for part in _PARTS]
    pairs += [(text, text) for token in ours.special_ids if (text := ours.id_to_token(token)) is not None]
    ids = [(ours.token_to_id(one or ""), theirs.token_to_id(other or "")) for one, other in reversed(pairs)]
    return {one: other for one, other in ids if one is not None and other is not None}


def _last_pieces(missing: dict[int, bytes], theirs: Tokenizer) -> dict[int, int]:
    texts = [text.decode("utf-8", "ignore") for text in missing.values()]
    pieces = theirs.encode_batch(texts, add_special_tokens=False)
    return {token: ids[-1] for token, ids in zip(missing, pieces, strict=True) if ids}
