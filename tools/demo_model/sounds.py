"""Sounds that the demo model learns to hear: keys of a telephone, in groups with pauses between them, in noise.

A key sounds as ITU-T Q.23 says: two tones at once, one for its row and one for its column. Knows no model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .tasks.base import Split, split_of

RATE = 16000
SECONDS = 4
MOST_KEYS = 8
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)
KEYS = "123456789*0#"

Samples = npt.NDArray[np.float32]
Span = tuple[float, str, float]


@dataclass(frozen=True)
class Sound:
    """Samples, and what they say: groups of keys, and keys, each with the seconds at which it begins and ends."""

    samples: Samples
    groups: list[Span]
    keys: list[Span]

    @property
    def text(self) -> str:
        return " ".join(keys for _, keys, _ in self.groups)


def tone(key: str, seconds: float, drift: float = 0.0, twist: float = 1.0) -> Samples:
    """One key. `drift`: how far its tones are off, as a share; `twist`: how much louder the higher one is."""
    row, column = divmod(KEYS.index(key), len(COLUMNS))
    time = np.arange(int(seconds * RATE)) / RATE * 2 * np.pi * (1 + drift)
    sound = np.sin(time * ROWS[row]) + twist * np.sin(time * COLUMNS[column])
    edge = np.minimum(1.0, np.minimum(np.arange(len(sound)), np.arange(len(sound))[::-1]) / (0.004 * RATE))
    return (sound * edge / (1 + twist)).astype(np.float32)


def _groups(rng: random.Random, split: Split, most: int) -> list[str]:
    """Keys as people write numbers of telephones: in groups. None at times."""
    while True:
        count = rng.randint(0, most)
        groups: list[str] = []
        while count > 0:
            size = min(count, rng.randint(1, 5))
            groups.append("".join(rng.choice(KEYS if rng.random() < 0.2 else "0123456789") for _ in range(size)))
            count -= size
        if split_of(" ".join(groups) or "train 0") == split:
            return groups


def dial(seed: int, split: Split = "train", most: int = MOST_KEYS) -> Sound:
    """The sound of a seed with up to so many keys, the same on every machine."""
    rng, noise = random.Random(f"dial {seed}"), np.random.default_rng(seed)
    groups = _groups(rng, split, most)
    count = max(1, sum(map(len, groups)))
    room = SECONDS - 0.3 - 0.45 * max(0, len(groups) - 1)
    length, gap = rng.uniform(0.08, min(0.4, 0.6 * room / count)), rng.uniform(0.04, min(0.16, 0.35 * room / count))
    drift, twist, at = rng.uniform(-0.012, 0.012), rng.uniform(0.6, 1.6), rng.uniform(0.0, 0.3)
    samples, told, pressed = np.zeros(SECONDS * RATE, np.float32), list[Span](), list[Span]()
    for keys in groups:
        start = at
        for key in keys:
            sound = tone(key, length, drift, twist)
            place = int(at * RATE)
            samples[place : place + len(sound)] += sound[: len(samples) - place]
            pressed.append((at, key, at + length))
            at += length + gap
        told.append((start, keys, at - gap))
        at += rng.uniform(0.3, 0.45) - gap + 0.05
    end = min(SECONDS, at + rng.uniform(0.0, 1.0)) if rng.random() < 0.7 else SECONDS
    samples = samples[: max(int(end * RATE), RATE // 4)] * 10 ** rng.uniform(-1.5, -0.1)
    hiss = noise.standard_normal(len(samples)) * 10 ** rng.uniform(-4.0, -2.0)
    return Sound((samples + hiss).clip(-1, 1).astype(np.float32), told, pressed)
