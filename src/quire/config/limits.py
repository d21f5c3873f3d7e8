"""Every bound on what a client or an operator may ask for, in one place. Plain numbers; nothing is checked here.

A limit is generous for honest use and keeps one request from taking the engine's memory or time from the others.
"""

MAX_N = 16384
"""Sequences of one request (`n`)."""
MAX_BEAM_WIDTH = 128
"""Hypotheses of one beam search; each step asks for 2 * beam_width logprobs of each of them."""
MAX_PROMPTS = 1024
"""Prompts in one HTTP completion request."""
MAX_TOKENS = 1 << 31
"""`max_tokens` and its like; the model's length is what really bounds them."""
MAX_STOP_STRINGS = 64
"""Stop strings of one request."""
MAX_STOP_STRING_CHARS = 1024
"""Characters of one stop string; the detokeniser holds back as many of a stream."""
MAX_STOP_TOKEN_IDS = 1024
"""Stop token ids of one request."""
MAX_BAD_WORDS = 128
"""`bad_words` of one request, and token sequences that they become."""
MAX_BAD_WORD_CHARS = 1024
"""Characters of one bad word."""
MAX_BAD_WORDS_TOKENS = 1024
"""Tokens of all bad words of one request together."""
MAX_LOGIT_BIAS = 1024
"""Entries of `logit_bias`."""
LOGIT_BIAS_RANGE = (-100.0, 100.0)
"""Biases outside are clamped to it."""
MAX_ALLOWED_TOKEN_IDS = 1 << 20
"""Entries of `allowed_token_ids`: no vocabulary is larger."""
MAX_LOGPROB_COST = 1 << 26
"""tokens * n * logprobs of one request: the number of entries that it may make the engine return."""
MAX_PROMPT_LOGPROBS = 1 << 21
"""Entries of `prompt_logprobs` in one answer of the server, over all of its prompts: about 500 MB while it is written."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Entries of `logprob_token_ids`."""
MAX_STREAM_INTERVAL = 1 << 20
"""Tokens of a stream that may be sent together."""
MAX_PATTERN_SIZE = 4096
"""Tokens of a pattern that `repetition_detection` looks for: each of its requests compares as many at every token."""
MAX_EXTRA_ARGS = 256
"""Entries of `extra_args`."""
MAX_CACHE_SALT_CHARS = 1024
"""Characters of `cache_salt`."""
MAX_REQUEST_ID_CHARS = 1024
"""Characters of a request id."""
SAMPLE_RATES = (1000, 768_000)
"""Samples a second that sound may have."""
MAX_AUDIO_CHANNELS = 64
MAX_AUDIO_SECONDS = 4 * 3600.0
"""Of one sound; as samples at 16 kHz that is 0.9 GB."""
MAX_AUDIO_SAMPLES = 1 << 28
"""Of one file before its rate is changed, of one channel."""
MAX_JSON_DEPTH = 64
"""Nesting of a request's body, and of JSON texts inside of it (a schema, a tool call's arguments)."""
MAX_GRAMMAR_BYTES = 1 << 20
"""Bytes of a JSON schema, grammar or structural tag."""
MAX_REGEX_CHARS = 1 << 16
"""Characters of a regular expression."""
MAX_CHOICES = 8192
"""Entries of a `choice` constraint."""
MAX_CHAT_MESSAGES = 16384
"""Messages of one chat request."""
DEFAULT_MAX_NUM_WAITING = 65536
"""Requests that may wait, where the setting is 0."""
DEFAULT_MAX_WAITING_TOKENS = 1 << 28
"""Prompt tokens that may wait, where the setting is 0: about 2 GiB as Python integers."""
MIN_NUM_WAITING = 1024
WAITING_BATCHES = 16
"""By default a server's queue holds as many requests as run in so many full batches, and at least the number before."""
WAITING_MEMORY_SHARE = 0.05
BYTES_PER_WAITING_TOKEN = 64
"""By default a server's queue holds as many prompt tokens as fit into this share of the host's memory: a prompt's text, its
token ids as a list of integers in the frontend, and twice as 32-bit integers."""
MAX_REQUEST_TIMEOUT_S = 7 * 24 * 3600.0
"""Seconds that a request may name as its `timeout`."""
MAX_MODEL_LEN = 1 << 24
"""Tokens that a request may have in all: positions stay exact in float32."""
MAX_CONFIG_FILE_BYTES = 64 << 20
"""Bytes of a JSON file of a checkpoint that is read whole."""
MAX_GRAMMAR_SECONDS = 10.0
"""How long the compilation of one grammar is waited for."""
MAX_GRAMMAR_MEMORY_BYTES = 1 << 30
"""Memory that the compilation of one grammar may take, in the process that tries it."""

MAX_BATCH_FILE_BYTES = 200_000_000
"""The default size of a file that may be uploaded for batches."""
MAX_MEDIA_BYTES = 32 << 20
"""Of one image in a request, as a file."""
MAX_VIDEO_BYTES = 128 << 20
"""Of one video in a request, as a file that is fetched."""
MAX_VIDEO_PACKETS = 1 << 20
"""Of a video's file: frames that it may have, of which some are read."""
MAX_VIDEO_FRAMES = 2048
"""Frames of one video that are read."""
MAX_VIDEO_SECONDS = 30.0
"""How long the frames of one video may be decoded."""
MAX_IMAGE_PIXELS = 1 << 26
"""Of one image, before a processor makes it smaller: 8,192 x 8,192."""
MAX_REQUEST_PIXELS = 1 << 28
"""Of all images and frames in one request: 768 MiB while they are processed."""
MAX_IMAGE_ASPECT = 200
"""The longer side of an image by the shorter one: a processor that brings the shorter side to its size makes the other so much
longer."""
MAX_MEDIA_ITEMS = 256
"""Images in one request."""
MAX_MEDIA_REDIRECTS = 5
"""Redirects between a URL that a request names and its file."""
MAX_URL_CHARS = 8192
"""Of a URL that is fetched."""
