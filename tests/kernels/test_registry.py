"""Operations are declared once, by their references; what is registered for a platform keeps to the declaration."""

import dataclasses
import inspect

import pytest
import torch

from quire.kernels import cpu, ops, registry
from quire.kernels.types import LinearWeight

pytest.importorskip("triton")

from quire.kernels import triton

cpu.register()
triton.register()


@pytest.fixture(autouse=True)
def restored(kept_selection):
    """The selection of other tests stays theirs."""


def parameters(function, own=()):
    """Names, kinds and defaults, without keywords of an implementation's own."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values() if p.name not in own]


@pytest.mark.parametrize("op", registry.operations())
def test_every_implementation_has_the_signature_of_the_declaration(op):
    declared = getattr(ops, op)
    for entry in registry.implementations(op):
        own = {
            name
            for name, parameter in inspect.signature(entry.function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
        }
        assert parameters(entry.function, own) == parameters(declared), entry


@pytest.mark.parametrize("op", registry.operations())
def test_an_operation_has_types_a_docstring_and_a_reference(op):
    declared = getattr(ops, op)
    assert declared.__doc__
    signature = inspect.signature(declared)
    assert all(p.annotation is not p.empty for p in signature.parameters.values())
    assert signature.return_annotation is not signature.empty
    references = [entry for entry in registry.implementations(op) if entry.platform == "any"]
    assert [entry.function for entry in references] == [registry.reference(declared)]


def test_ops_names_every_operation():
    assert set(registry.operations()) <= set(ops.__all__)


def test_an_operation_calls_its_reference_until_another_is_chosen():
    registry.use({})
    weight = LinearWeight(2, 2, torch.float32, torch.eye(2))
    out = torch.zeros(1, 2)
    ops.linear(torch.ones(1, 2), weight, out)
    assert out.tolist() == [[1.0, 1.0]]
    ops.select("any")
    calls = []
    choices = ops.choices()
    counted = dataclasses.replace(choices["linear"].chosen, function=lambda *args: calls.append(args))
    registry.use({**choices, "linear": registry.Choice(counted, [])})
    ops.linear(out, weight, out)
    assert calls == [(out, weight, out)]
    registry.use(choices)
    ops.linear(torch.zeros(1, 2), weight, out_TN=out)
    assert out.tolist() == [[0.0, 0.0]] and len(calls) == 1


def test_two_implementations_of_one_priority_are_refused():
    with pytest.raises(ValueError, match="'linear' for platform 'cuda' with priority 10 is registered by both"):
        registry.kernel("linear", platform="cuda", priority=10, owner="another")(lambda: None)


def test_a_reason_is_given_for_each_implementation_that_was_passed_over():
    choice = registry.choose("linear", "cuda", deterministic=True)
    assert choice.chosen.invariant
    reasons = {entry.priority: why for entry, why in choice.passed_over}
    assert "deterministic" in reasons[10] and "below" in reasons[0]
