"""Newlines where texts meet are one token, as in one text."""

from quire.multimodal.newlines import Newlines


def encode(text):
    """One token for up to three newlines in a row, one for each other character."""
    token_ids, run = [], 0
    for character in [*text, ""]:
        if character == "\n" and run < 3:
            run += 1
            continue
        token_ids += [run] if run else []
        run = int(character == "\n")
        token_ids += [ord(character)] if character and not run else []
    return token_ids


def test_newlines_that_meet_become_one_token_where_there_is_one():
    join = Newlines(encode).join
    for left, right in (("a\n", "\n\nb"), ("a\n\n", "\nb"), ("a", "\nb"), ("a\n", "b"), ("", "\nb"), ("a\n", "")):
        assert join(encode(left), encode(right)) == encode(left + right)
    assert join(encode("a\n\n"), encode("\n\nb")) == [*encode("a\n\n"), *encode("\n\nb")]  # no token for four
