"""Which requests a new core gets: all of them, or suspects one at a time. Messages only; no core runs."""

from collections.abc import Sequence

from quire.engine.messages import AbortRequests, AddRequests, FrontendMessage
from quire.engine.suspects import MAX_FRUITLESS, Suspects
from quire.request import EngineCoreOutput, EngineCoreOutputs, EngineRequest, FinishReason, token_array


def request(request_id: str, num_tokens: int = 0, group: str | None = None) -> EngineRequest:
    return EngineRequest(request_id, token_array([1, 2]), resumed_token_ids=[7] * num_tokens, group_id=group)


def again(*requests: EngineRequest | str) -> AddRequests:
    return AddRequests([request(one) if isinstance(one, str) else one for one in requests], again=True)


def ids(messages: Sequence[FrontendMessage]) -> list[list[str]]:
    return [[one.request_id for one in message.requests] for message in messages if isinstance(message, AddRequests)]


def tokens(*request_ids: str) -> EngineCoreOutputs:
    return EngineCoreOutputs(list(request_ids), [1] * len(request_ids))


def with_suspects(*names: str, group: str | None = None) -> Suspects:
    """Requests under which as many cores have died as make them suspects."""
    suspects = Suspects()
    for _ in range(MAX_FRUITLESS - 1):
        assert suspects.core_died() == []
        assert ids(suspects.let_through(again(*(request(name, group=group) for name in names)))) == [list(names)]
    assert suspects.core_died() == []
    return suspects


def test_without_a_death_messages_go_through_as_they_are() -> None:
    suspects = Suspects()
    message = AddRequests([request("a")])
    assert list(suspects.let_through(message)) == [message] and not suspects.is_watching
    assert not suspects.saw(tokens("a"))


def test_requests_that_go_on_are_no_suspects_however_often_cores_die() -> None:
    suspects = Suspects()
    for number in range(20):
        assert suspects.core_died() == []
        assert ids(suspects.let_through(again(request("a", number), request("b", number)))) == [["a", "b"]]
        suspects.saw(tokens("a", "b"))
        assert not suspects.is_watching


def test_suspects_of_all_frontends_go_on_one_at_a_time_until_each_has_a_token() -> None:
    suspects = with_suspects("a", "b")
    assert suspects.holds_others
    assert ids(suspects.let_through(AddRequests([request("new")]))) == []
    assert ids(suspects.let_through(again(request("c", 4), "b"))) == [["b"]]  # of one frontend
    assert ids(suspects.let_through(again("a", request("d", 2)))) == []  # of another
    assert ids(suspects.saw(tokens("b"))) == [["a"]]
    assert ids(suspects.saw(EngineCoreOutputs(outputs=[EngineCoreOutput("a", finish_reason=FinishReason.STOP)]))) == [
        ["new"],
        ["c"],
        ["d"],
    ]
    assert not suspects.holds_others


def test_the_request_under_which_a_core_dies_alone_is_at_fault_and_others_go_on() -> None:
    suspects = with_suspects("a", "b")
    assert ids(suspects.let_through(again("a", "b"))) == [["a"]]
    assert suspects.core_died() == ["a"]
    assert ids(suspects.let_through(again("b", "c"))) == [["b"]]
    assert ids(suspects.saw(tokens("b"))) == [["c"]]


def test_a_core_that_dies_before_it_was_given_a_request_says_nothing_of_it() -> None:
    suspects = with_suspects("a")
    assert suspects.core_died() == [] and suspects.core_died() == []
    assert ids(suspects.let_through(again("b", "a"))) == [["a"]]
    assert suspects.core_died() == ["a"]
    for _ in range(5):
        assert suspects.core_died() == []
    assert ids(suspects.let_through(again("b"))) == [["b"]] and not suspects.holds_others


def test_siblings_are_one_suspect() -> None:
    suspects = with_suspects("a-0", "a-1", group="a")
    message = again("b", request("a-0", group="a"), request("a-1", group="a"))
    assert ids(suspects.let_through(message)) == [["a-0", "a-1"]]
    assert suspects.core_died() == ["a-0", "a-1"]


def test_suspects_that_are_aborted_hold_nobody() -> None:
    suspects = with_suspects("a", "b", "c")
    assert ids(suspects.let_through(again("b", "d"))) == [["b"]]
    assert ids(suspects.let_through(AbortRequests(["a"]))) == []  # before it came
    assert ids(suspects.let_through(again("c"))) == []
    assert ids(suspects.let_through(AbortRequests(["b"]))) == [["c"]]  # which ran
    assert ids(suspects.let_through(AbortRequests(["d"]))) == []  # which was held
    assert ids(suspects.saw(tokens("c"))) == []
    assert not suspects.holds_others


def test_a_suspect_that_was_given_to_a_core_that_had_died_already_is_given_to_the_next() -> None:
    suspects = with_suspects("a")
    assert ids(suspects.let_through(again("a", "b"))) == [["a"]]
    assert ids(suspects.let_through(again("a", "b"))) == [["a"]]  # its frontend has heard of the second death, too
    assert ids(suspects.saw(tokens("a"))) == [["b"], ["b"]]
