"""What verified steps draw follows the model's distribution, whoever guesses: chi-square over whole continuations.

A model of six tokens, whose logits depend on the token before, is sampled three tokens far for thousands of requests. All seeds
are fixed, so each test passes always or never.

Legend: V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.oracles import sampler_reference as oracle
from tests.sample.helpers import add, columns_of, make_sampler

from quire.config.speculative import SpeculativeConfig
from quire.kernels import ops
from quire.sample.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.spec_decode.rejection import Rejection, accept_or_redraw
from quire.spec_decode.verification import Acceptance, Draws, Verified

VOCAB, LENGTH, ROWS = 6, 3, 3000
PROMPT = [5, 0, 3]
LOGITS_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11)) * 1.5
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.85},
    "min-p": {"temperature": 1.3, "min_p": 0.15},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.6,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.4,
    },
    "logit bias": {"temperature": 1.0, "logit_bias": {1: 1.5, 4: -2.0}},
}
Guess = Callable[[list[list[int]], np.random.Generator], list[list[int]]]


def right(streams: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
    return [stream[:2] for stream in streams]


def wrong(streams: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
    return [[(token + 1) % VOCAB for token in stream[:2]] for stream in streams]


def at_random(streams: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
    return rng.integers(0, VOCAB, (len(streams), 2)).tolist()


def adversarial(streams: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
    """Knows what will be drawn, and is right about odd tokens only, or has nothing to say."""
    return [[token if token % 2 else (token + 3) % VOCAB for token in stream[: stream[0] % 3]] for stream in streams]


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels() -> None:
    ops.select("cpu")


def joint(params: SamplingParams) -> np.ndarray:
    """Of every continuation, by the slow sampler."""
    chances = np.zeros((VOCAB,) * LENGTH)
    for first in range(VOCAB):
        for second in range(VOCAB):
            outputs = [[], [first], [first, second]]
            p = [
                oracle.probabilities(LOGITS_VV[[*PROMPT, *output][-1]].numpy(), params, PROMPT, output)
                for output in outputs
            ]
            chances[first, second] = p[0][first] * p[1][second] * p[2]
    return chances


def p_value(streams: list[list[int]], chances: np.ndarray) -> float:
    """Of the continuations against the distribution; rare ones are counted together."""
    counts = np.zeros(chances.shape)
    for stream in streams:
        counts[tuple(stream[:LENGTH])] += 1
    assert counts[chances == 0].sum() == 0
    expected = chances.ravel() * len(streams)
    rare, observed = expected < 5, counts.ravel()
    kept = np.append(observed[~rare], observed[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    many = kept[1] > 0
    return float(stats.chisquare(kept[0][many], kept[1][many] * len(streams) / kept[1][many].sum()).pvalue)


class Requests:
    """Many requests, and a sampler that draws for them."""

    def __init__(self, params: dict[str, Any], acceptance: Acceptance | None = None) -> None:
        self.sampler: Sampler = make_sampler(vocab=VOCAB, rows=ROWS)
        self.acceptance = acceptance or Acceptance(None)
        self.streams: list[list[int]] = [[] for _ in range(ROWS)]
        self.num_accepted = self.num_judged = 0
        for row in range(ROWS):
            add(self.sampler, row, prompt=PROMPT, seed=7919 * row, **params)

    def draw(self, logits_NV: torch.Tensor, rows_N: np.ndarray, positions_N: np.ndarray) -> Draws:
        """As a runner draws."""
        sampler, out_N = self.sampler, torch.zeros(len(rows_N), dtype=torch.int32)
        wanted, columns = sampler.wanted(rows_N, positions_N), columns_of(sampler, rows_N, positions_N)
        sampler.sample(logits_NV.clone(), columns, rows_N, positions_N, wanted, out_N)
        tokens_N = out_N.numpy().copy()
        sampler.append_tokens(rows_N, tokens_N, positions_N)
        return Draws(tokens_N)

    def step(self, drafts: dict[int, list[int]]) -> None:
        """One step of those that have not all of their tokens."""
        rows: list[int] = []
        before: list[int] = []
        positions: list[int] = []
        first: list[int] = []
        for row, stream in enumerate(self.streams):
            if len(stream) < LENGTH:
                first.append(len(rows))
                tokens = [[*PROMPT, *stream][-1], *drafts.get(row, ())]
                rows += [row] * len(tokens)
                before += tokens
                positions += range(len(PROMPT) + len(stream), len(PROMPT) + len(stream) + len(tokens))
        logits_SV = LOGITS_VV[before]
        rows_S, positions_S, first_B = (np.array(values, dtype=np.int32) for values in (rows, positions, first))
        if redraw := self.sampler.redraw:
            assert isinstance(redraw, Rejection)
            redraw.begin(drafts, dict(zip(rows_S[first_B].tolist(), positions_S[first_B].tolist(), strict=True)))
        self.take(self.verify(logits_SV, rows_S, positions_S, first_B, drafts), drafts)

    def verify(self, logits_SV: torch.Tensor, *where: Any) -> Verified:
        rows_S, positions_S, first_B, drafts = where
        if self.sampler.needs_rounds(rows_S):
            return self.acceptance.in_rounds(logits_SV, rows_S, positions_S, first_B, drafts, self.draw)
        tokens_S = self.draw(logits_SV, rows_S, positions_S).token_ids
        return self.acceptance.count(rows_S, positions_S, first_B, tokens_S, drafts)

    def take(self, verified: Verified, drafts: dict[int, list[int]]) -> None:
        for row, token in zip(verified.rows.tolist(), verified.first.token_ids.tolist(), strict=True):
            accepted = verified.accepted.get(row, [])
            self.streams[row] += [token, *accepted]
            self.num_accepted += len(accepted)
            self.num_judged += min(len(accepted) + 1, len(drafts.get(row, ())))

    def run(self, drafts: dict[int, list[int]]) -> list[list[int]]:
        """All continuations; the first step verifies drafts."""
        self.step(drafts)
        while any(len(stream) < LENGTH for stream in self.streams):
            self.step({})
        return [stream[:LENGTH] for stream in self.streams]


def drafts_of(guess: Guess, streams: list[list[int]]) -> dict[int, list[int]]:
    guesses = guess(streams, np.random.default_rng(2))
    return {row: drafts for row, drafts in enumerate(guesses) if drafts}


@pytest.mark.parametrize("name", CASES)
def test_tokens_follow_the_models_distribution_whatever_is_guessed(name: str) -> None:
    plain = Requests(CASES[name]).run({})
    chances = joint(SamplingParams(**CASES[name]))
    for guess in (right, wrong, at_random, adversarial):
        requests = Requests(CASES[name])
        streams = requests.run(drafts_of(guess, plain))
        assert p_value(streams, chances) > 1e-3
        assert streams == plain
        assert (requests.num_accepted > 0) == (guess is not wrong)


class Drafter:
    """Draws drafts from distributions of its own: half way from the model's to an even one, with another temperature."""

    def __init__(self) -> None:
        even = torch.full((VOCAB, VOCAB), 1 / VOCAB)
        self.q_VV = 0.5 * torch.softmax(LOGITS_VV / 0.6, -1) + 0.5 * even
        rng, self.drafts, self._q = np.random.default_rng(5), dict[int, list[int]](), dict[int, torch.Tensor]()
        for row in range(ROWS):
            before, drafts, q = PROMPT[-1], list[int](), list[torch.Tensor]()
            for _ in range(2):
                q.append(self.q_VV[before])
                weights = q[-1].double().numpy()
                before = int(rng.choice(VOCAB, p=weights / weights.sum()))
                drafts.append(before)
            self.drafts[row], self._q[row] = drafts, torch.stack(q)

    def probabilities(self, row: int, count: int) -> torch.Tensor:
        return self._q[row][:count]


def rejecting(params: dict[str, Any], drafter: Drafter) -> Requests:
    requests = Requests(params, Acceptance(SpeculativeConfig(rejection_sample_method="rejection")))
    rejection = Rejection()
    rejection.probabilities = drafter.probabilities
    requests.sampler.redraw = rejection
    return requests


@pytest.mark.parametrize("name", CASES)
def test_rejection_sampling_follows_the_models_distribution_and_accepts_more(name: str) -> None:
    drafter, params = Drafter(), CASES[name]
    requests, by_equality = rejecting(params, drafter), Requests(params)
    assert p_value(requests.run(drafter.drafts), joint(SamplingParams(**params))) > 1e-3
    by_equality.run(drafter.drafts)
    assert requests.num_accepted > 1.2 * by_equality.num_accepted


def test_a_first_draft_is_accepted_with_the_most_that_is_possible() -> None:
    drafter, before = Drafter(), PROMPT[-1]
    p_V = oracle.probabilities(LOGITS_VV[before].numpy(), SamplingParams(temperature=0.8), PROMPT, [])
    q_V = drafter.q_VV[before].double().numpy()
    for requests, chance in (
        (rejecting({"temperature": 0.8}, drafter), np.minimum(p_V, q_V).sum()),
        (Requests({"temperature": 0.8}), (p_V * q_V).sum()),
    ):
        streams = requests.run(drafter.drafts)
        share = np.mean([stream[0] == drafter.drafts[row][0] for row, stream in enumerate(streams)])
        # A draft that is not accepted is never drawn again, so equal first tokens are accepted ones.
        assert abs(share - chance) < 4 * np.sqrt(chance * (1 - chance) / ROWS)


def certain_drafts() -> Iterator[tuple[int, float]]:
    p_V = oracle.probabilities(LOGITS_VV[PROMPT[-1]].numpy(), SamplingParams(temperature=1.0), PROMPT, [])
    yield from enumerate(p_V.tolist())


@pytest.mark.parametrize(("draft", "chance"), certain_drafts())
def test_a_draft_without_probabilities_is_accepted_equally_often_by_both_methods(draft: int, chance: float) -> None:
    p_NV = torch.softmax(LOGITS_VV[PROMPT[-1]], -1).expand(ROWS, -1)
    q_NV = torch.nn.functional.one_hot(torch.tensor(draft), VOCAB).float().expand(ROWS, -1)
    seeds, positions = torch.arange(ROWS) * 7919, torch.full((ROWS,), 3)
    tokens = accept_or_redraw(p_NV, q_NV, torch.full((ROWS,), draft), seeds, positions).numpy()
    equal = np.array(
        [stream[0] for stream in Requests({"temperature": 1.0}).run({row: [draft] for row in range(ROWS)})]
    )
    for found in (tokens, equal):
        assert abs(np.mean(found == draft) - chance) < 4 * np.sqrt(chance * (1 - chance) / ROWS)
        counts = np.bincount(found, minlength=VOCAB)
        assert stats.chisquare(counts, p_NV[0].double().numpy() * ROWS / p_NV[0].double().sum().item()).pvalue > 1e-3


def test_without_probabilities_rejection_is_equality() -> None:
    plain = Requests({"temperature": 0.8}).run({})
    requests = Requests({"temperature": 0.8})
    requests.sampler.redraw = Rejection()
    assert requests.run(drafts_of(adversarial, plain)) == plain


def test_the_chi_square_test_would_notice_drafts_that_are_always_accepted() -> None:
    class Believing(Acceptance):
        def token(self, drawn: int, draft: int, index: int, row: int, position: int) -> int:
            return draft

    drafter = Drafter()
    streams = Requests({"temperature": 0.8}, Believing(None)).run(drafter.drafts)
    assert p_value(streams, joint(SamplingParams(temperature=0.8))) < 1e-6


def test_the_chi_square_test_would_notice_probabilities_of_another_drafter() -> None:
    drafter = Drafter()
    requests = rejecting({"temperature": 0.8}, drafter)
    assert isinstance(requests.sampler.redraw, Rejection)
    requests.sampler.redraw.probabilities = lambda row, count: torch.full((count, VOCAB), 1 / VOCAB)
    assert p_value(requests.run(drafter.drafts), joint(SamplingParams(temperature=0.8))) < 1e-6


def test_greedy_rows_keep_their_tokens_under_rejection() -> None:
    plain = Requests({"temperature": 0.0}).run({})
    assert rejecting({"temperature": 0.0}, Drafter()).run(Drafter().drafts) == plain
