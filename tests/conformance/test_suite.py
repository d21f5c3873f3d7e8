"""The conformance suite: it passes on the CPU, and it finds what is wrong on a platform that is broken on purpose."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quire.conformance import contract, oracle_platform, report
from quire.conformance.contract import Check, Failed, NotClaimed, Outcome, Subject, select_checks
from quire.conformance.suite import Plan, Result, run_check, run_checks
from quire.entrypoints.cli.main import main
from quire.errors import ConfigError

QUICK = ["capabilities", "device", "kernels/registered", "kernels/rms_norm", "kernels/paged_attention"]


@pytest.fixture
def subject(kept_selection):
    oracle_platform.install()
    subject = Subject("cpu", is_quick=True)
    yield subject
    subject.close()


def test_the_cpu_passes_the_quick_checks_of_its_parts_and_says_so_in_three_forms(tmp_path: Path, capsys: Any) -> None:
    paths = tmp_path / "report.json", tmp_path / "report.html"
    words = ["--platform", "cpu", "--quick", "--jobs", "1", "--json", str(paths[0]), "--html", str(paths[1])]
    groups = {each.group for each in select_checks()} - {"engine", "ranks"}  # which the made-up device's tests run
    code = main(["conformance", *words, "--only", *sorted(groups)])
    told = json.loads(paths[0].read_text())
    assert [each for each in told["checks"] if each["outcome"] in ("fail", "error")] == []
    assert code == 0 and told["passed"] and told["platform"] == "cpu" and told["counts"]["pass"] > 80
    lines = capsys.readouterr().out
    for each in told["checks"]:
        assert each["name"] in lines and each["name"] in paths[1].read_text()


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)  # four minutes beside other tests
def test_the_cpu_passes_the_whole_suite() -> None:
    assert main(["conformance", "--platform", "cpu", "--jobs", "1"]) == 0


def test_a_check_that_fails_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def answer(plan: Plan, chosen: list[Check], on_result: Any) -> list[Result]:
        results = [Result(chosen[0].name, "", Outcome.FAIL, "no", "seven", "eight")]
        on_result(results[0])
        return results

    monkeypatch.setattr("quire.entrypoints.cli.conformance.run_checks", answer)
    assert main(["conformance", "--platform", "cpu", "--only", "device/device"]) == 1
    assert "expected: seven" in capsys.readouterr().out


def test_outcomes_are_told_apart(subject: Subject) -> None:
    def raising(error: Exception) -> Any:
        def function(_: Subject) -> str:
            raise error

        return function

    errors = (NotClaimed("why not"), Failed("wrong", 1, 2), ValueError("broken"))
    found = [run_check(Check("a/b", "", raising(error)), subject) for error in errors]
    assert [each.outcome for each in found] == [Outcome.NOT_CLAIMED, Outcome.FAIL, Outcome.ERROR]
    assert (found[1].expected, found[1].got) == ("1", "2") and "ValueError: broken" in found[2].message
    assert [each.is_good for each in found] == [True, False, False]


def die(_: Subject) -> str:
    os._exit(7)


def test_a_check_that_ends_its_process_is_an_error_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = select_checks(["device/device", "device/threads"])
    # The child has no such check: asking for it ends the child, as a crash does.
    chosen = [checks[0], Check("device/unheard-of", "", die), checks[1]]
    results = run_checks(Plan("cpu", is_quick=True), chosen)
    assert [each.outcome for each in results] == [Outcome.PASS, Outcome.ERROR, Outcome.PASS]
    assert "its process ended with code 1" in results[1].message


def test_a_check_that_takes_too_long_is_an_error() -> None:
    (result,) = run_checks(Plan("cpu", is_quick=True, patience_s=0.01), select_checks(["device/threads"]))
    assert result.outcome is Outcome.ERROR and "no result after" in result.message


def test_a_wrong_kernel_is_found_with_its_case(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import registry

    assert run_check(contract.checks["kernels/clip"], subject).outcome is Outcome.PASS
    broken = next(entry for entry in registry.implementations("clip") if entry.platform == "cpu")
    monkeypatch.setitem(vars(broken), "function", lambda x_TC, limit: x_TC.clamp_(-1.1 * limit, 1.1 * limit))
    result = run_check(contract.checks["kernels/clip"], subject)
    assert result.outcome is Outcome.FAIL and "case 0 (float32): off by" in result.got


def test_memory_figures_that_stand_still_are_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.conformance import device_checks

    select_checks()
    monkeypatch.setattr(device_checks, "_LAG_S", 0.0)
    monkeypatch.setattr(subject.runtime, "kv_cache_cap", lambda: None)
    monkeypatch.setattr(subject.runtime, "memory_info", lambda: (5 << 30, 6 << 30))
    result = run_check(contract.checks["device/memory"], subject)
    assert result.outcome is Outcome.FAIL and "(0, 0)" in result.got


def test_capabilities_without_reasons_or_of_a_wrong_kind_are_found(subject: Subject) -> None:
    import dataclasses

    from quire.errors import Explained

    select_checks()
    record = dataclasses.replace(subject.capabilities, graphs=Explained("some", "why"), swap=Explained(True, ""))
    subject.__dict__["capabilities"] = record
    result = run_check(contract.checks["capabilities/record"], subject)
    assert "graphs='some'" in result.got and "swap has no reason" in result.got


def test_checks_are_chosen_by_group_name_and_pattern() -> None:
    assert [each.name for each in select_checks(["kernels/rms_norm"])] == ["kernels/rms_norm"]
    assert {each.group for each in select_checks(["device"])} == {"device"}
    assert len(select_checks(["kernels/packed_*"])) > 3
    with pytest.raises(ConfigError, match="did you mean"):
        select_checks(["devices"])


def test_html_escapes_what_a_platform_says() -> None:
    about = {"platform": "<b>", "capabilities": {"fp8": {"value": "<i>", "why": "<u>"}}}
    page = report.as_html(report.build_report(about, [Result("a/b", "", Outcome.PASS, "<script>")], 1.0))
    assert not {"<b>", "<i>", "<u>", "<script>"} & set(page.replace(">", "> ").split())


def test_a_backend_that_ignores_windows_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from quire.attention.cpu import CpuBackend

    select_checks()
    attend = CpuBackend.attend

    def blind(self: Any, qkv: Any, pages: Any, metadata: Any, params: Any, *others: Any) -> None:
        attend(self, qkv, pages, metadata, dataclasses.replace(params, window=0), *others)

    monkeypatch.setattr(CpuBackend, "attend", blind)
    assert run_check(contract.checks["attention/plain"], subject).outcome is Outcome.PASS
    result = run_check(contract.checks["attention/window"], subject)
    assert result.outcome is Outcome.FAIL and "backend 'cpu' differs in step 0" in result.message


def test_a_sampler_that_draws_by_another_rule_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import registry

    select_checks()
    entry = next(each for each in registry.implementations("filtered_gumbel_argmax") if each.platform == "cpu")
    draw = entry.function
    monkeypatch.setitem(vars(entry), "function", lambda *args: draw(*args[:6], args[6] + 1, *args[7:]))
    assert run_check(contract.checks["sampler/top-k"], subject).outcome is Outcome.FAIL
    assert run_check(contract.checks["sampler/greedy"], subject).outcome is Outcome.PASS


def test_a_model_that_is_off_on_the_device_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import registry

    select_checks()
    assert run_check(contract.checks["engine/llama"], subject).outcome is Outcome.PASS
    entry = next(each for each in registry.implementations("rms_norm") if each.platform == "cpu")
    norm = entry.function
    monkeypatch.setitem(vars(entry), "function", lambda x, weight, eps, *others: norm(x, weight, 0.1, *others))
    result = run_check(contract.checks["engine/llama"], subject)
    assert result.outcome is Outcome.FAIL and "logprob" in result.message
