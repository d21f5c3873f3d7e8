"""The file of several models: what it may say, and who makes room."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.cli.serve_several import models_words
from quire.entrypoints.several.host import Occupant, make_room
from quire.entrypoints.several.models_file import flag_words, read_bytes, read_models_file
from quire.errors import ConfigError


def read(tmp_path, text):
    path = tmp_path / "models.yaml"
    path.write_text(text)
    return read_models_file(str(path))


def test_a_file_names_models_flags_and_memory(tmp_path):
    text = "memory: 20 GB\nmodels:\n- model: a/b\n- {model: c, name: [x, y], memory: 6G, flags: {max-num-seqs: 4}, load: start}\n"
    file = read(tmp_path, text)
    assert [entry.names for entry in file.models] == [("a/b",), ("x", "y")]
    assert read_bytes(file.memory, "memory") == 20 * 2**30 and read_bytes("6g", "memory") == 6 * 10**9
    assert flag_words(file.models[1].flags) == ["--max-num-seqs", "4"]


def test_flags_are_a_mapping_words_or_a_line():
    given = {"enable_lora": True, "enable-prefix-caching": False, "middleware": ["a", "b"], "override": {"x": 1}}
    assert flag_words(given) == [
        *("--enable-lora", "--no-enable-prefix-caching", "--middleware", "a", "b", "--override", '{"x":1}')
    ]
    assert flag_words("--a 'b c'") == flag_words(["--a", "'b c'"]) == ["--a", "b c"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("models: []", "no model"),
        ("models: [{name: a}]", "model"),
        ("models: [{model: a}, {model: b, name: a}]", "'a' is empty or there twice"),
        ("models: [{model: a, memory: much}]", "much"),
        ("memory: 1G\nmodels: [{model: a, memory: 2G}]", "'a' takes 2.1 GB"),
        ("models: [{model: a, size: 1}]", "size"),
        ("models: [", "YAML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, why):
    with pytest.raises(ConfigError, match=why):
        read(tmp_path, text)


def test_flags_of_the_port_are_not_the_models():
    words = ["--models", "m.yaml", "--port", "80", "--host=::", "--api-key", "k", "--max-num-seqs", "4"]
    assert models_words(words) == ["--api-key", "k", "--max-num-seqs", "4"]


OCCUPANTS = st.lists(
    st.builds(
        lambda state, sizes, used: Occupant("", state, max(sizes), min(sizes), used),
        st.sampled_from(["off", "asleep", "awake", "moving"]),
        st.tuples(st.integers(0, 10), st.integers(0, 10)),
        st.floats(0, 10),
    ),
    max_size=6,
)


@given(OCCUPANTS, st.integers(0, 10), st.integers(1, 40))
def test_whoever_was_used_least_recently_makes_room(others, size, budget):
    named = [Occupant(str(n), each.state, each.awake, each.asleep, each.last_used) for n, each in enumerate(others)]
    wanted = Occupant("wanted", "off", size, 0, 0.0)
    deeds = make_room([*named, wanted], wanted, budget)
    moving = sum(each.size for each in named if each.state == "moving")
    if deeds is None:
        assert moving and moving + size > budget
        return
    done = dict(deeds)
    assert len(done) == len(deeds) and all(named[int(name)].state in ("awake", "asleep") for name in done)
    left = {"sleep": "asleep", "stop": "off"}
    after = [dataclasses.replace(each, state=left[done[each.name]]) if each.name in done else each for each in named]
    total = sum(each.size for each in after)
    assert total + size <= budget or (total == moving and not moving)
    if sum(each.size for each in named) + size <= budget:
        assert not deeds, "nobody goes without need"
    for each in named:  # one that was used earlier and could have slept in its place does not stay awake
        if done.get(each.name) == "sleep":
            older = [o for o in named if o.state == "awake" and o.last_used < each.last_used and o.asleep < o.awake]
            assert all(o.name in done for o in older)


def test_a_form_names_its_model():
    from quire.entrypoints.several.front import _of_form

    part = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    assert _of_form(part % (b"file", b"name=model") + part % (b"model", b"two") + b"--x--").model == "two"
    assert _of_form(part % (b"file", b"x")).model is None
