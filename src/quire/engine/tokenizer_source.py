"""The engine's tokenizer: read in a thread while the weights load, or absent; and those that adapters bring."""

import threading

from quire.adapters import LoRARequest
from quire.config import ModelConfig
from quire.engine.adapter_folders import AdapterFolder, AdapterFolders
from quire.engine.caller import CALLER
from quire.errors import QuireError
from quire.logger import init_logger
from quire.tokenizers.chat_template import read_template
from quire.tokenizers.interface import Tokenizer
from quire.tokenizers.loader import get_tokenizer, has_tokenizer

logger = init_logger(__name__)

_LEAST_TEXT = 1 << 20
_CHARS_A_TOKEN = 64
"""A text may have so many characters for each token of `max_model_len`, and `_LEAST_TEXT` in any case. Real texts have about four
a token; tokens of a hundred spaces are the longest of common vocabularies."""


class TokenizerSource:
    """Where the engine gets its tokenizer from.

    Without tokenizer files the engine works on token ids alone, as with `skip_tokenizer_init`, and the log says so.

    Args:
        for_server: use it once, too, so that no request waits for what is made at the first use.

    Attributes:
        why_absent: why there is no tokenizer; None where there is one.
        folders: of adapters.

    Raises:
        ConfigError: the setting `chat_template` is no readable file and no valid template.
    """

    def __init__(self, model: ModelConfig, *, for_server: bool = False) -> None:
        if model.chat_template:
            read_template(model.chat_template)  # what is wrong is said before the weights are read
        self._model, self._for_server = model, for_server
        self.folders = AdapterFolders(model)
        self._tokenizer: Tokenizer | None = None
        self._error: QuireError | None = None
        self._thread: threading.Thread | None = None
        self.why_absent: str | None = None
        if model.skip_tokenizer_init or not model.tokenizer_path:
            self.why_absent = "skip_tokenizer_init is set"
        elif not has_tokenizer(model.tokenizer_path):
            self.why_absent = f"{model.tokenizer_path} has no tokenizer files"
            logger.warning("%s: token ids in, token ids out; nothing is detokenized", self.why_absent)
        else:
            self._thread = threading.Thread(target=self._load, name="tokenizer-loader", daemon=True)
            self._thread.start()

    def _load(self) -> None:
        model = self._model
        try:
            tokenizer = get_tokenizer(model.tokenizer_path, model.tokenizer_mode, chat_template=model.chat_template)
            tokenizer.content_format = model.chat_template_content_format
            tokenizer.max_text = max(_LEAST_TEXT, _CHARS_A_TOKEN * model.max_model_len)
            self._tokenizer = tokenizer
        except QuireError as error:
            self._error = error
            return
        if self._for_server:
            _use(tokenizer)

    def get(self) -> Tokenizer | None:
        """The tokenizer of what the caller asks for: the adapter's own if it has one, or the model's; None where there is none
        (see `why_absent`). Raises ConfigError: its files are broken."""
        adapter = CALLER.get().adapter
        found = self.folders.tokenizer(adapter) if isinstance(adapter, LoRARequest) else None
        return self.of_model() if found is None else found

    def own(self, adapter: LoRARequest | None) -> LoRARequest | None:
        """The adapter, if it has a tokenizer or tokens of its own."""
        return None if self._own_folder(adapter) is None else adapter

    def num_tokens(self) -> int:
        """Ids that requests of the caller may have."""
        folder = self._own_folder(CALLER.get().adapter)
        return self._model.own_vocab_size if folder is None else folder.num_tokens

    def _own_folder(self, adapter: object) -> AdapterFolder | None:
        """What is known of an adapter that has a tokenizer or tokens of its own."""
        folder = self.folders.read(adapter) if isinstance(adapter, LoRARequest) else None
        has_own = folder is not None and (folder.has_tokenizer or folder.num_tokens > self._model.own_vocab_size)
        return folder if has_own else None

    def of_model(self) -> Tokenizer | None:
        """The model's tokenizer, or None where there is none. Waits until it is read.
        Raises ConfigError: its files are broken."""
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        return self._tokenizer


def _use(tokenizer: Tokenizer) -> None:
    """Compile the chat template, and make the tables of the first text and of the first answer."""
    tokenizer.decode(tokenizer.encode("a"))
    _ = tokenizer.max_token_id, tokenizer.token_bytes
    if tokenizer.chat_template is None:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)
    except QuireError as error:  # a client that asks in this way gets the error
        logger.debug("the chat template was not used ahead: %s", error)
