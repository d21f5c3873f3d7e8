"""Patches: where each kind takes effect, what keeps one out, and what a process says of them."""

import asyncio
import datetime
import importlib
import pickle  # noqa: TID251
import sys
from typing import Any

import pytest
from tests.patch.conftest import patch, target

from quire.errors import ConfigError
from quire.patch.holders import rebind
from quire.patch.plan import is_for_version
from quire.patch.targets import describe_signature, hash_signature


def engine(name: str) -> Any:
    return importlib.import_module(f"lab_engine.{name}")


def only(process: Any) -> dict[str, Any]:
    (state,) = process.describe()
    return state


# --- the kinds of patches ---


def test_a_wrapped_function_is_patched_before_anyone_can_copy_its_name(start) -> None:
    process = start(patch(target("core:double", "wrap", "more")))
    assert only(process)["state"] == "waiting" and "lab_engine.core" not in sys.modules
    assert engine("user").use(5) == (11,) * 6
    assert only(process) == {
        "id": "a-patch",
        "package": "vendor 1.0",
        "state": "applied",
        "why": "",
        "doubts": [],
        "late": [],
    }


def test_a_replaced_function_may_call_the_original_by_a_name_of_its_own(start) -> None:
    start(patch(target("core:double", "replace", "with_old")))
    assert engine("user").use(5) == (1010,) * 6


def test_a_constant_reaches_those_that_import_it_and_no_equal_number_elsewhere(start) -> None:
    one = patch(target("core:SIZE", "constant", "SIZE"))
    user = engine("user")
    process = start(one)
    assert (engine("core").SIZE, user.SIZE, user.SIXTEEN) == (128, 128, 16)
    assert "lab_engine.user:SIZE" in only(process)["late"][0]
    process.remove("a-patch")
    assert (engine("core").SIZE, user.SIZE, user.SIXTEEN) == (16, 16, 16)


def test_a_name_is_added_only_where_there_is_none(start) -> None:
    process = start(patch(target("core:extra", "add", "extra"), target("core:Counter.extra", "add", "extra")))
    assert engine("core").extra() == "extra" and engine("core").Counter.extra() == "extra"
    process.remove("a-patch")
    assert not hasattr(engine("core"), "extra") and not hasattr(engine("core").Counter, "extra")


def test_an_added_name_that_exists_by_now_is_refused(start) -> None:
    process = start(patch(target("core:double", "add", "extra")))
    assert engine("core").double(4) == 8
    assert only(process)["state"] == "refused" and "exists already" in only(process)["why"]


def test_methods_of_every_kind_are_wrapped_as_what_they_are(start) -> None:
    names = ("add", "half", "named", "shown")
    targets = [target(f"core:Counter.{name}", "wrap", name) for name in names]
    process = start(patch(*targets))
    counter = engine("core").Counter(1)
    assert counter.add(2) == 21 and counter.half(8) == 5 and counter.shown == "<21>"
    assert engine("core").Special.named("x") == "Special x!"
    process.remove("a-patch")
    assert counter.add(2) == 23 and counter.half(8) == 4 and counter.shown == "23"


def test_a_wrapped_coroutine_function_is_one_still(start) -> None:
    start(patch(target("core:later", "wrap", "later")))
    assert asyncio.iscoroutinefunction(engine("core").later)
    assert asyncio.run(engine("core").later(1)) == 2


def test_a_class_is_replaced_by_a_class_that_inherits_from_it(start) -> None:
    start(patch(target("core:Counter", "replace", "Counter")))
    assert engine("user").Counter(3).unit == "pages" and engine("user").Counter(3).add(1) == 4


# --- late ---


def test_an_imported_target_is_rebound_in_every_holder_and_told_as_late(start) -> None:
    one = patch(target("core:double", "wrap", "more"))
    user = engine("user")
    process = start(one)
    assert user.use(5) == (11,) * 6
    (late,) = only(process)["late"]
    for place in ("lab_engine.user:double", "a dict ('double')", "a list", "Entry.function", "Holder.tool"):
        assert place in late
    process.remove("a-patch")
    assert user.use(5) == (10,) * 6


def test_a_holder_that_cannot_be_changed_is_told(start) -> None:
    one = patch(target("core:double", "wrap", "more"))
    engine("stuck")
    assert "still held by a tuple" in only(start(one))["doubts"][0]


def test_a_subclass_of_a_class_that_is_replaced_late_is_told(start) -> None:
    one = patch(target("core:Counter", "replace", "Counter"))
    engine("user")
    process = start(one)
    assert engine("user").Counter.unit == "pages"
    assert any("the subclass Special" in doubt for doubt in only(process)["doubts"])


def test_a_reloaded_module_is_patched_again(start) -> None:
    start(patch(target("core:double", "wrap", "more")))
    core = engine("core")
    assert core.double(5) == 11
    assert importlib.reload(core).double(5) == 11


def test_rebinding_changes_a_closure_and_a_frozen_object() -> None:
    def original() -> int:
        return 1

    def substitute() -> int:
        return 2

    def outer() -> Any:
        kept = original
        return lambda: kept()

    inner = outer()
    rebind(original, substitute, [])
    assert inner() == 2


# --- idempotent, removable, many ---


def test_a_process_that_begins_twice_applies_once(start) -> None:
    process = start(patch(target("core:double", "wrap", "more")))
    core = engine("core")
    process.begin("core")
    process.begin("worker")
    process.settle("any")
    assert core.double(5) == 11


def test_two_wrappers_in_an_order_are_both_there_and_each_can_go_alone(start) -> None:
    first = patch(target("core:double", "wrap", "more"), id="first")
    second = patch(target("core:double", "wrap", "still_more"), id="aa-second", after=("first",))
    process = start(second, first, strict=True)
    core, user = engine("core"), engine("user")
    assert core.double(5) == 111
    process.remove("first")
    assert core.double(5) == 110 == user.use(5)[0]
    process.remove("aa-second")
    assert core.double(5) == 10 == user.use(5)[0]


def test_a_patch_for_another_kind_of_process_leaves_the_original_alone(start) -> None:
    process = start(patch(target("core:double", "wrap", "more"), processes=("worker",)), kinds=("frontend",))
    assert engine("core").double(5) == 10
    assert only(process)["state"] == "off" and "frontend" in only(process)["why"]
    assert len(process.marks()) == 1  # the other processes have it


def test_a_process_of_two_kinds_has_the_union_and_says_so(start, capsys) -> None:
    start(patch(target("core:double", "wrap", "more"), processes=("worker",)), kinds=("core", "worker"))
    assert engine("core").double(5) == 11
    assert "is for the process kinds worker; this process is also core" in capsys.readouterr().out


# --- what keeps a patch out ---

SOMETHING: Any = object()
MISSING = "0" * 12
REFUSED = {
    "a target that was renamed": (lambda: [target("core:twice", "replace", "triple", MISSING)], {}, "does not exist"),
    "a module that was renamed": (lambda: [target("heart:double", "replace", "triple", MISSING)], {}, "no module"),
    "a class that was renamed": (
        lambda: [target("core:Meter.add", "replace", "triple", MISSING)],
        {},
        "does not exist",
    ),
    "an inherited method": (lambda: [target("core:Special.add", "replace", "triple", MISSING)], {}, "does not exist"),
    "a target with another signature": (
        lambda: [target("core:double", "replace", "triple", MISSING)],
        {},
        "has changed",
    ),
    "a constant with another value": (lambda: [target("core:SIZE", "constant", "SIZE", MISSING)], {}, "int 16"),
    "a lambda": (lambda: [target("core:double", "replace", "a_lambda")], {}, "plain function"),
    "a function in another's clothes": (lambda: [target("core:double", "replace", "disguised")], {}, "plain function"),
    "a function in place of a class": (lambda: [target("core:Counter", "replace", "triple")], {}, "is a class"),
    "a class in place of a function": (lambda: [target("core:double", "replace", "Counter")], {}, "must be a function"),
    "a constant that is wrapped": (lambda: [target("core:SIZE", "replace", "triple")], {}, "kind='constant'"),
    "nothing in the place": (lambda: [target("core:double", "replace", "nothing")], {}, "nothing does not exist"),
    "a day after its last": (
        lambda: [target("core:double", "replace", "triple")],
        {"expires": datetime.date(2026, 10, 31)},
        "expired on 2026-10-31",
    ),
    "a declaration without a reason": (lambda: [target("core:double", "wrap", "more")], {"why": " "}, "why is empty"),
    "an unknown kind of process": (
        lambda: [target("core:double", "wrap", "more")],
        {"processes": ("cor",)},
        "processes=",
    ),
    "a wrong specifier": (lambda: [target("core:double", "wrap", "more")], {"versions": "new"}, "versions="),
    "a patch after itself": (lambda: [target("core:double", "wrap", "more")], {"after": ("a-patch",)}, "after itself"),
    "a condition that fails": (
        lambda: [target("core:double", "wrap", "more")],
        {"condition": "lab_vendor.by:nothing"},
        "nothing does not exist",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_patch_is_refused_and_nothing_is_changed(start, case: str, capsys) -> None:
    targets, changes, why = REFUSED[case]
    process = start(patch(*targets(), **changes))
    process.settle("big")
    core = engine("core")
    process.settle("big")
    assert (core.double(5), core.SIZE, core.Special().add(1)) == (10, 16, 1)
    assert only(process)["state"] == "refused" and why in only(process)["why"]
    log = capsys.readouterr().out
    assert "ERROR" in log and "a-patch" in log and log.count("refused") == 1


@pytest.mark.parametrize("case", REFUSED)
def test_where_patches_are_strict_the_same_is_an_error(start, case: str) -> None:
    targets, changes, why = REFUSED[case]
    with pytest.raises(ConfigError, match="a-patch") as caught:
        start(patch(*targets(), **changes), strict=True).settle("big")
        engine("core")
    assert why in str(caught.value)


def test_no_half_of_a_refused_patch_stays(start) -> None:
    good, bad = target("core:double", "wrap", "more"), target("core:twice", "replace", "triple", MISSING)
    process = start(patch(good, bad))
    assert engine("user").use(5) == (10,) * 6
    assert only(process)["state"] == "refused"


def test_a_wrapper_with_a_doubt_is_applied_and_the_doubt_is_told(start, capsys) -> None:
    one = target("core:double", "wrap", "more", MISSING)
    process = start(patch(one, expires=datetime.date(2026, 10, 31)))
    assert engine("core").double(5) == 11
    assert len(only(process)["doubts"]) == 2 and only(process)["state"] == "applied"
    assert capsys.readouterr().out.count("WARNING") == 2


def test_a_wrapper_of_a_missing_target_assigns_nothing(start) -> None:
    process = start(patch(target("core:twice", "wrap", "more", MISSING)))
    assert not hasattr(engine("core"), "twice")
    assert "does not exist" in only(process)["doubts"][0] and only(process)["state"] == "waiting"


def test_two_patches_on_one_name_without_an_order_are_refused_or_doubted(start) -> None:
    wrap = patch(target("core:Counter.add", "wrap", "add"), id="wraps")
    replace = patch(target("core:Counter", "replace", "Counter"), id="replaces")
    process = start(wrap, replace)
    states = {state["id"]: state for state in process.describe()}
    assert states["replaces"]["state"] == "refused" and "core:Counter" in states["replaces"]["why"]
    assert engine("core").Counter().add(1) == 10 and states["wraps"]["doubts"]


def test_patches_that_do_not_work_together_are_refused(start) -> None:
    one = patch(target("core:double", "replace", "triple"), id="one", conflicts=("other",))
    other = patch(target("core:SIZE", "constant", "SIZE"), id="other")
    assert {state["state"] for state in start(one, other).describe()} == {"refused"}
    assert [state["state"] for state in start(one).describe()] == ["waiting"]


def test_two_packages_with_one_id_are_both_refused(start) -> None:
    one = patch(target("core:double", "wrap", "more"))
    assert {state["state"] for state in start(one, one).describe()} == {"refused"}


# --- versions, machines, engines ---


@pytest.mark.parametrize(
    "versions, version, is_for",
    [
        ("==0.27.1", "0.27.1+cu129", True),
        (">=0.28", "0.28.0.dev5+gabc", True),
        ("<0.28", "0.28.0rc1", False),
        ("<0.28", "0.27.9.dev1", True),
        ("==0.27.*", "0.27.1.post1", True),
        ("==0.27.1", "0.27.1.post1", False),
        (">=0.1,<0.3", "0.3.0", False),
    ],
)
def test_development_and_local_versions_count_as_the_release_whose_code_they_have(
    versions: str, version: str, is_for: bool
) -> None:
    assert is_for_version(versions, version) is is_for


def test_quire_version_overrides_the_installed_one(start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = patch(target("core:double", "wrap", "more"), versions=">=9")
    assert only(start(one))["state"] == "off"
    monkeypatch.setenv("QUIRE_VERSION", "9.1.dev3")
    assert only(start(one))["state"] == "waiting"
    monkeypatch.setenv("QUIRE_VERSION", "main")
    with pytest.raises(ConfigError, match="QUIRE_VERSION"):
        start(one)


@pytest.mark.parametrize("answer, state", [("yes", "waiting"), ("no", "off"), ("nothing", "off")])
def test_a_machine_is_asked_once_and_before_anything(start, answer: str, state: str) -> None:
    one = patch(target("core:double", "wrap", "more"), on_platform=f"lab_vendor.asked:{answer}")
    assert only(start(one))["state"] == state


def test_a_condition_waits_for_the_configuration(start) -> None:
    one = patch(target("core:double", "wrap", "more"), condition="lab_vendor.asked:is_big")
    process, user = start(one), engine("user")
    assert user.use(5) == (10,) * 6
    process.settle("small")
    assert user.use(5) == (10,) * 6 and only(process)["state"] == "off" and process.marks() == []
    process = start(one)
    process.settle("big")
    assert user.use(5) == (11,) * 6 and only(process)["late"]
    process.begin("worker")  # one that comes later knows the configuration too


def test_the_first_settled_condition_decides_before_targets_are_imported(start) -> None:
    process = start(patch(target("core:double", "wrap", "more"), condition="lab_vendor.asked:is_big"))
    process.settle("big")
    assert "lab_engine.core" not in sys.modules
    assert engine("user").use(5) == (11,) * 6


# --- pickling ---


def test_a_wrapper_cannot_be_pickled_under_the_originals_name(start) -> None:
    start(patch(target("core:double", "wrap", "more")))
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(engine("core").double)


def test_a_replacement_is_pickled_as_itself(start) -> None:
    start(patch(target("core:double", "replace", "triple")))
    data = pickle.dumps(engine("core").double)
    assert b"lab_vendor.by" in data and b"lab_engine" not in data


def test_a_wrapper_travels_by_value_as_ray_sends_functions(start) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    start(patch(target("core:double", "wrap", "more")))
    data = cloudpickle.dumps(engine("core").double)
    assert pickle.loads(data)(5) == 11  # noqa: S301


# --- signatures ---


def test_a_signature_tells_names_kinds_and_defaults_and_no_annotations() -> None:
    def one(a: int, *b: int, c: str = "x", d: Any = SOMETHING, **e: Any) -> None: ...
    def two(a, *b, c="x", d=SOMETHING, **e): ...

    assert describe_signature(one) == describe_signature(two) == "(a, *b, --c='x', --d=…, **e)"


def test_a_changed_default_and_a_changed_method_change_the_hash() -> None:
    def one(a=1): ...
    def two(a=2): ...

    class First:
        def f(self, a): ...

    class Second:
        def f(self, b): ...

    assert hash_signature(one) != hash_signature(two) and hash_signature(First) != hash_signature(Second)
    assert describe_signature((1, [2.5], "x")) == "tuple [1, [2.5], 'x']"


# --- between processes ---


def test_what_processes_compare_does_not_depend_on_what_each_has_imported(start) -> None:
    bad = patch(target("core:twice", "replace", "triple", MISSING))
    frontend, core = start(bad, kinds=("frontend", "core")), start(bad, kinds=("worker",))
    engine("core")
    assert only(frontend)["state"] == "refused" and only(core)["state"] == "off"
    assert frontend.marks() == core.marks() != []


def test_a_declaration_that_says_something_else_has_another_mark(start) -> None:
    one = patch(target("core:double", "wrap", "more"))
    other = patch(target("core:double", "wrap", "still_more"))
    assert start(one).marks() != start(other).marks()


def test_processes_with_other_patches_refuse_to_work_together(start, monkeypatch: pytest.MonkeyPatch) -> None:
    import quire.patch

    process = start(patch(target("core:double", "wrap", "more")))
    monkeypatch.setattr(quire.patch, "_patches", lambda: process)
    quire.patch.check_same(process.marks(), "the core")
    with pytest.raises(ConfigError, match="the core has none, and this process has a-patch:"):
        quire.patch.check_same([], "the core")
