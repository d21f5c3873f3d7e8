"""What the engine and users ask of a tokenizer. The names are those that users of Hugging Face tokenizers know.

Knows text and token ids. Knows nothing of requests or models.
"""

import abc
import contextlib
import functools
import inspect
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from quire.errors import RequestError
from quire.tokenizers.chat_template import ChatTemplate
from quire.tokenizers.content_format import ContentFormat
from quire.tokenizers.token_bytes import TokenBytes

Conversation = Sequence[dict[str, Any]]

NO_LIMIT = int(1e30)
"""`model_max_length` of a tokenizer that states none (Hugging Face's own value)."""


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask`, as entries and as attributes."""

    @property
    def input_ids(self) -> Any:
        """Token ids: of one text, or a list for each text."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """A 1 for each token."""
        return self["attention_mask"]


@contextlib.contextmanager
def reading(*texts: str, most: int | None = None) -> Generator[None, None, None]:
    """Around a library's work on texts. Whatever it raises about them, a panic of its native code included, is a RequestError,
    and so is a text of more than `most` characters: some libraries work on such a text for minutes."""
    for text in texts:
        if most is not None and len(text) > most:
            raise RequestError(
                f"a text of {len(text)} characters is not tokenized; with this model at most {most} may be given",
                param="prompt",
            )
    try:
        yield
    except RequestError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"the text cannot be tokenized: {error}", param="prompt") from None


def check_template_variables(variables: dict[str, Any]) -> None:
    """Raises RequestError if a name of `chat_template_kwargs` is one of `apply_chat_template`'s own parameters."""
    if taken := sorted(_TEMPLATE_PARAMETERS & variables.keys()):
        raise RequestError(
            f"chat_template_kwargs: {taken[0]!r} is no variable of a template: it has a field of its own",
            param="chat_template_kwargs",
        )


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    Attributes:
        name_or_path: the folder it came from.
        special_tokens: `bos_token`, `eos_token`, … → the token's string, as far as the tokenizer has them.
        additional_special_tokens: further strings that count as special.
        chat_template: the template of conversations, None where there is none.
        special_ids: ids that `skip_special_tokens` leaves out.
        token_bytes: each token's bytes, None where tokens are not plain runs of bytes.
        writes_tokens: `apply_chat_template` must be asked for tokens: encoding its text would not give them.
        content_format: whether templates get contents as text or as parts.
        max_text: characters of the longest text that is encoded; None: there is no bound.
    """

    is_fast = True
    writes_tokens = False
    content_format: ContentFormat = "auto"
    max_text: int | None = None
    truncation_side = "left"
    padding_side = "left"

    name_or_path: str
    model_max_length: int
    special_tokens: dict[str, str]
    additional_special_tokens: list[str]
    special_ids: frozenset[int]
    template: ChatTemplate | None
    token_bytes: TokenBytes | None

    # --- what each kind of tokenizer does in its own way ---

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    @abc.abstractmethod
    def encode_pair(self, first: str, second: str, max_length: int | None = None) -> tuple[list[int], list[int]]:
        """Two texts joined as the model's pairs are, special tokens included: token ids, and each token's segment (0 or 1).

        Args:
            max_length: drop tokens from the end of the longer text, one at a time, until so many are left.
        """

    def encode_spans(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text, and which of its characters each of them is; none, as (n, n), of a special token.
        Raises RequestError: the tokenizer does not say."""
        raise RequestError(f"{type(self).__name__} does not tell which characters a token is", param="prompt")

    @abc.abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """The id of a token's string, None where it is unknown."""

    @abc.abstractmethod
    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's string of an id, None for an id without one."""

    @abc.abstractmethod
    def get_vocab(self) -> dict[str, int]:
        """Every token's string → id, added tokens included."""

    @abc.abstractmethod
    def get_added_vocab(self) -> dict[str, int]:
        """Added tokens' strings → ids."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Tokens without the added ones."""

    def decode_tokens(
        self, token_ids: list[int], skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> str:
        """The text of token ids, of a tokenizer without a table of bytes."""
        raise NotImplementedError(f"{type(self).__name__} decodes through its table of bytes")

    # --- what follows from it ---

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts, in parallel where the library can."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(
        self,
        token_ids: int | Iterable[int],
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of token ids: equal to the streamed pieces of its tokens, joined."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(token_id) for token_id in token_ids]
        if self.token_bytes is None:
            return self.decode_tokens(ids, skip_special_tokens, spaces_between_special_tokens)
        return self.token_bytes.join(ids, skip_special_tokens, at_start=True).decode("utf-8", "replace")

    def __len__(self) -> int:
        return len(self.get_vocab())

    @property
    def max_token_id(self) -> int:
        """The highest id that has a token."""
        return self._max_token_id

    @functools.cached_property
    def _max_token_id(self) -> int:
        return max(self.get_vocab().values(), default=-1)  # a tenth of a second of the interpreter's time, all at once

    def __call__(
        self,
        text: str | list[str],
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> Encoding:
        """`input_ids` and `attention_mask` of one text or several; with `truncation` at most `max_length` tokens of each."""
        single = isinstance(text, str)
        batch = self.encode_batch([text] if isinstance(text, str) else list(text), add_special_tokens)
        if truncation and max_length is not None:
            batch = [ids[-max_length:] if self.truncation_side == "left" else ids[:max_length] for ids in batch]
        masks = [[1] * len(ids) for ids in batch]
        return Encoding(input_ids=batch[0] if single else batch, attention_mask=masks[0] if single else masks)

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """The vocabulary's strings of a text's tokens."""
        return [self.id_to_token(token_id) or "" for token_id in self.encode(text, add_special_tokens)]

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """`decode` of each sequence."""
        return [self.decode(token_ids, skip_special_tokens) for token_ids in sequences]

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """The vocabulary's string of one id, or a list of them for a list."""
        if isinstance(ids, int):
            return self.id_to_token(ids)
        special = self.special_ids if skip_special_tokens else frozenset[int]()
        return [self.id_to_token(token_id) for token_id in ids if token_id not in special]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of one token's string, or a list for a list; unknown ones become the unknown token's id (or None)."""
        if isinstance(tokens, str):
            token_id = self.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of vocabulary strings."""
        return self.decode([self.convert_tokens_to_ids(token) for token in tokens])

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    @property
    def bos_token(self) -> str | None:
        """Begin of sequence."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """End of sequence."""
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """Padding."""
        return self.special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        """Unknown."""
        return self.special_tokens.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        """Begin of sequence."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """End of sequence."""
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Padding."""
        return self._special_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        """Unknown."""
        return self._special_id("unk_token")

    @property
    def all_special_tokens(self) -> list[str]:
        """Every special token's string, each once."""
        return list(dict.fromkeys([*self.special_tokens.values(), *self.additional_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        """Their ids."""
        ids = (self.token_to_id(token) for token in self.all_special_tokens)
        return [token_id for token_id in ids if token_id is not None]

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        """Named special tokens, and the additional ones under `additional_special_tokens`."""
        values: dict[str, Any] = dict(self.special_tokens)
        if self.additional_special_tokens:
            values["additional_special_tokens"] = list(self.additional_special_tokens)
        return values

    @property
    def chat_template(self) -> str | None:
        """The default chat template's source."""
        return self.template.source() if self.template is not None else None

    def apply_chat_template(
        self,
        conversation: Conversation,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        content_format: ContentFormat = "auto",
        **kwargs: Any,
    ) -> str | list[int]:
        """A conversation as the model's prompt: token ids, or text with `tokenize=False`.

        Args:
            chat_template: the name of one of the tokenizer's templates, or a template's source.
            add_generation_prompt: end with what opens the assistant's turn.
            continue_final_message: leave the last message open, so that the model continues it.
            content_format: whether the template gets contents as text or as parts; `auto`: as the attribute says.
            kwargs: variables for the template (for example `enable_thinking`).

        Raises:
            RequestError: there is no template, or the template refuses the conversation.
        """
        template = ChatTemplate.choose(self.template, chat_template)
        text = template.render(
            conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens_map, **kwargs},
            content_format=self.content_format if content_format == "auto" else content_format,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


_TEMPLATE_PARAMETERS = {"messages", *inspect.signature(Tokenizer.apply_chat_template).parameters} - {"kwargs"}
