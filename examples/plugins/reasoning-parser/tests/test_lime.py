"""What stands between the markers is the reasoning, the rest is the answer."""

from quire.parsers.choice import choose_formats
from quire.parsers.stream import parse_answer
from quire.plugins import load_general_plugins


def test_reasoning_and_content_are_divided() -> None:
    load_general_plugins("frontend")
    reasoning = choose_formats("lime", "none", None).reasoning
    answer = parse_answer("<lime>Let me see.</lime>It is 42.", reasoning=reasoning)
    assert (answer.reasoning, answer.content) == ("Let me see.", "It is 42.")
