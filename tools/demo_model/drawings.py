"""Pictures that the demo model learns to see, and questions about them: a digit, shapes of several colours, a chart of bars.

`draw(kind, seed, split)` gives one scene, the same on every machine with one Pillow. What is in a picture (`key`) decides its
split: what is asked for the card was never seen in training. Knows no model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from .tasks.base import Split, phrase, split_of

COLOURS = {
    "red": (215, 35, 35),
    "orange": (245, 140, 20),
    "yellow": (240, 215, 30),
    "green": (40, 160, 60),
    "blue": (40, 80, 215),
    "purple": (130, 50, 160),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle")
MOST_SHAPES = 5
FACTS = (
    "kind", "digit", "digit's colour", "count",
    *(f"{shape}s" for shape in SHAPES), *(f"{shape}'s colour" for shape in SHAPES), *(f"{colour} shape" for colour in COLOURS),
    "highest bar", "lowest bar",
)  # fmt: skip
"""What there is to know of a picture, at most."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Asked:
    """A question and its answer; `task` is its row in the card."""

    task: str
    user: str
    answer: str


@dataclass(frozen=True)
class Scene:
    """A picture, what is in it, and all that is asked about it.

    Attributes:
        facts: what is known of it, of `FACTS`: a number or a word each.
        marks: where things are, as shares of the width and the height, their colours and what they are.
    """

    key: str
    image: Image.Image
    asked: list[Asked]
    facts: dict[str, str]
    marks: list[tuple[float, float, str, str]]


def _ask(rng: random.Random, task: str, patterns: tuple[str, ...], answer: str, **slots: str) -> Asked:
    return Asked(task, phrase(rng, patterns, **slots), answer)


def _near(rng: random.Random, colour: tuple[int, ...]) -> tuple[int, ...]:
    """A colour as a screen or a camera may show it."""
    return tuple(min(255, max(0, part + rng.randint(-18, 18))) for part in colour)


def _canvas(rng: random.Random) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """An empty picture of some size on a light ground."""
    width = rng.randint(96, 224)
    height = int(width * rng.uniform(0.8, 1.25))
    ground = (255, 255, 255) if rng.random() < 0.4 else tuple(rng.randint(225, 255) for _ in range(3))
    image = Image.new("RGB", (width, height), ground)
    return image, ImageDraw.Draw(image)


def _corners(rng: random.Random, centre: Point, radius: float, count: int, turn: float) -> list[Point]:
    """The corners of a regular shape that stands on a side, turned a little."""
    start = math.pi / 2 + math.pi / count + rng.uniform(-turn, turn)
    angles = [start + 2 * math.pi * corner / count for corner in range(count)]
    return [(centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)) for angle in angles]


def _shape(pen: ImageDraw.ImageDraw, rng: random.Random, shape: str, colour: str, centre: Point, radius: float) -> None:
    fill = _near(rng, COLOURS[colour])
    if shape == "circle":
        x, y = centre
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    else:
        count = 4 if shape == "square" else 3
        pen.polygon(_corners(rng, centre, radius * 1.15, count, 0.12), fill=fill)


def digit(rng: random.Random) -> Scene:
    """One large digit."""
    value, colour = rng.randrange(10), rng.choice(list(COLOURS))
    image, _ = _canvas(rng)
    size = min(image.size) * rng.uniform(0.5, 1.0)
    layer = Image.new("L", image.size, 0)
    place = (image.width * rng.uniform(0.42, 0.58), image.height * rng.uniform(0.45, 0.55))
    font = ImageFont.load_default(size)
    ImageDraw.Draw(layer).text(place, str(value), 255, font, anchor="mm", stroke_width=rng.randint(0, int(size / 20)))
    layer = layer.rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC, center=place)
    image.paste(_near(rng, COLOURS[colour]), (0, 0), layer)
    which = ("{What does the digit say|Which digit is this|What digit is this|Which digit do you see}?",
             "{Which|What} {number|digit} is {in the picture|shown|drawn here}?", "Read the digit.")  # fmt: skip
    painted = ("{What|Which} {colour|color} is the {digit|number}?",)
    asked = [
        _ask(rng, "digit", which, str(value)),
        _ask(rng, "colour of a digit", painted, f"It is {colour}."),
        _ask(rng, "what is shown", SEEN, f"I see the digit {value}."),
    ]
    facts = {"kind": "digit", "digit": str(value), "digit's colour": colour}
    marks = [(place[0] / image.width, place[1] / image.height, colour, "digit")]
    return Scene(f"digit {value} {colour} {image.width % 8}", image, asked, facts, marks)


SEEN = (
    "{What do you see|What is this|What is in the picture|What does the picture show}?",
    "Describe the {picture|image}.",
)


def _asked_of_shapes(rng: random.Random, things: list[tuple[str, str]]) -> list[Asked]:
    counts = {shape: sum(each == shape for each, _ in things) for shape in SHAPES}
    many = ("How many $ns {are there|are in the picture|do you see|can you see}?", "How many $ns?", "Count the $ns.")
    asked = [_ask(rng, "counting shapes", many, str(counts[shape]), n=shape) for shape in SHAPES]
    asked.append(_ask(rng, "counting shapes", many, str(len(things)), n="shape"))
    for shape, colour in things:
        if counts[shape] == 1:
            painted = ("{What|Which} {colour|color} is the $s?", "Tell me the {colour|color} of the $s.")
            asked.append(_ask(rng, "colour of a shape", painted, f"It is {colour}.", s=shape))
        if sum(each == colour for _, each in things) == 1:
            which = ("{What|Which} shape is $c?", "{What is $c|What is the $c shape}?")
            asked.append(_ask(rng, "shape of a colour", which, f"It is a {shape}.", c=colour))
    asked.append(_ask(rng, "what is shown", SEEN, f"I see {len(things)} shape{'s' * (len(things) > 1)}."))
    return asked


def shapes(rng: random.Random) -> Scene:
    """One to five shapes, each somewhere in a cell of a grid."""
    things = [(rng.choice(SHAPES), rng.choice(list(COLOURS))) for _ in range(rng.randint(1, MOST_SHAPES))]
    image, pen = _canvas(rng)
    grid = rng.choice([size for size in (1, 2, 3) if size**2 >= len(things)])
    wide, high, marks = image.width / grid, image.height / grid, []
    cells = rng.sample(range(grid**2), len(things))
    for cell, (shape, colour) in zip(cells, things, strict=True):
        radius = min(wide, high) * rng.uniform(0.28, 0.4)
        x = (cell % grid + 0.5) * wide + rng.uniform(-1, 1) * (wide / 2 - radius) * 0.8
        y = (cell // grid + 0.5) * high + rng.uniform(-1, 1) * (high / 2 - radius) * 0.8
        _shape(pen, rng, shape, colour, (x, y), radius)
        marks.append((x / image.width, y / image.height, colour, shape))
    key = " ".join(sorted(f"{colour} {shape}" for shape, colour in things))
    return Scene(key, image, _asked_of_shapes(rng, things), _facts_of_shapes(things), marks)


def _facts_of_shapes(things: list[tuple[str, str]]) -> dict[str, str]:
    """How many there are of each shape, and the colours and the shapes that there are once."""
    facts = {"kind": "shapes", "count": str(len(things))}
    for shape in SHAPES:
        painted = [colour for each, colour in things if each == shape]
        facts[f"{shape}s"] = str(len(painted))
        if len(painted) == 1:
            facts[f"{shape}'s colour"] = painted[0]
    for colour in COLOURS:
        shaped = [shape for shape, each in things if each == colour]
        if len(shaped) == 1:
            facts[f"{colour} shape"] = shaped[0]
    return facts


def bars(rng: random.Random) -> Scene:
    """A chart of three to five bars, each of another colour and another height."""
    colours = rng.sample(list(COLOURS), rng.randint(3, 5))
    image, pen = _canvas(rng)
    steps = rng.sample(range(2, 12), len(colours))
    floor, left = image.height * rng.uniform(0.88, 0.96), image.width * 0.08
    pitch, width = (image.width * 0.88) / len(colours), rng.uniform(0.5, 0.85)
    scale = image.height * rng.uniform(0.65, 0.8) / max(steps)
    marks = []
    for place, (colour, step) in enumerate(zip(colours, steps, strict=True)):
        start = left + place * pitch
        pen.rectangle((start, floor - step * scale, start + pitch * width, floor), fill=_near(rng, COLOURS[colour]))
        top = (floor - step * scale) / image.height
        marks.append(((start + pitch * width / 2) / image.width, top, colour, "bar"))
    pen.line((left * 0.6, floor, image.width * 0.97, floor), fill=(90, 90, 90), width=max(1, image.width // 100))
    highest, lowest = (colours[steps.index(pick(steps))] for pick in (max, min))
    high = ("{Which|What} bar is {the highest|highest|the tallest|tallest}?", "Which bar is the {highest|tallest} one?")
    low = ("{Which|What} bar is {the lowest|lowest|the shortest|shortest}?", "Which bar is the {lowest|shortest} one?")
    many = (
        "How many bars {are there|are in the chart|do you see|does the chart have}?",
        "How many bars?",
        "Count the bars.",
    )
    asked = [
        _ask(rng, "highest bar", high, f"The {highest} one."),
        _ask(rng, "lowest bar", low, f"The {lowest} one."),
        _ask(rng, "counting bars", many, str(len(colours))),
        _ask(rng, "what is shown", SEEN, f"I see {len(colours)} bars."),
    ]
    key = " ".join(f"{colour} {step}" for colour, step in zip(colours, steps, strict=True))
    facts = {"kind": "bars", "count": str(len(colours)), "highest bar": highest, "lowest bar": lowest}
    return Scene(key, image, asked, facts, marks)


KINDS: dict[str, Callable[[random.Random], Scene]] = {"digit": digit, "shapes": shapes, "bars": bars}


def draw(kind: str, seed: int, split: Split = "train") -> Scene:
    """The scene of a seed; the next one after it that belongs to the split."""
    rng = random.Random(f"{kind} {seed}")
    while True:
        scene = KINDS[kind](rng)
        if split_of(scene.key) == split:
            return scene
