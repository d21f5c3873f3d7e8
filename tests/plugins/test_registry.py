"""Registries: names with owners, of which one may not take another's by accident."""

from collections.abc import Iterator

import pytest
from tests.oracles.installed_plugins import restore

from quire.errors import ConfigError
from quire.plugins import registries, registry
from quire.plugins.registry import Registry, owned_by


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[object]]:
    monkeypatch.setattr(registry, "_registries", dict(registry._registries))
    yield Registry("colour", "colour", {"red": 1, "lazy": "math:pi"})


def test_a_registry_is_a_mapping_whose_paths_are_imported_on_first_use(colours: Registry[object]) -> None:
    colours.register("green", 2)
    colours.register("wrong", "math:no_such_thing", owner="acme")
    assert list(colours) == ["red", "lazy", "green", "wrong"] and len(colours) == 4 and "green" in colours
    assert (colours["red"], colours["lazy"], colours["green"]) == (1, 3.141592653589793, 2)
    with pytest.raises(
        ConfigError, match=r"colour 'wrong' was registered by 'acme' as 'math:no_such_thing', which cannot"
    ):
        colours["wrong"]
    assert colours in registries()


def test_a_duplicate_names_both_owners_unless_it_overrides(colours: Registry[object]) -> None:
    message = r"colour 'red' is already registered by 'quire'; 'acme' must pass override=True"
    with pytest.raises(ConfigError, match=message) as error:
        colours.register("red", 9, owner="acme")
    assert error.value.setting == "colour" and colours["red"] == 1
    colours.register("red", 9, owner="acme", override=True)
    assert colours["red"] == 9 and colours.entry("red").owner == "acme"
    assert colours.owned() == {"acme": ["red"]}
    with pytest.raises(ConfigError, match="by 'acme'; 'the program' must"):
        colours.register("red", 5)


def test_a_plugin_may_register_its_own_again_but_not_anothers(colours: Registry[object]) -> None:
    for target in (3, 4):
        with owned_by("one"):
            colours.register("blue", target)
    assert colours["blue"] == 4
    with owned_by("two"), pytest.raises(ConfigError, match="already registered by 'one'; 'two' must"):
        colours.register("blue", 5)


def test_a_name_can_be_taken_away_and_an_unknown_one_names_its_neighbour(colours: Registry[object]) -> None:
    colours.unregister("lazy")
    colours.unregister("never there")
    with pytest.raises(ConfigError, match=r"colour='rad' is not known \(did you mean 'red'\?\); allowed: red"):
        colours.entry("rad")


def test_a_plugins_architecture_replaces_a_built_in_one_before_and_after_its_family_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quire.models import registry as models

    models.ModelRegistry.get_supported_archs()  # imports the families, which is done once
    restore(monkeypatch, models.MODELS)
    taken = pytest.raises(ConfigError, match="'LlamaForCausalLM' is already registered by 'quire'; 'acme' must")
    for is_imported in (False, True):
        if not is_imported:
            entry = registry.Entry("LlamaForCausalLM", "", registry.BUILT_IN_OWNER)
            models.MODELS._entries["LlamaForCausalLM"] = entry
        with taken:
            models.ModelRegistry.register_model("LlamaForCausalLM", "acme:llama", owner="acme")
        models.ModelRegistry.register_model("LlamaForCausalLM", "acme:llama", owner="acme", override=True)
        models.register_built_in("LlamaForCausalLM", "quire.models.llama:llama")
        assert models.ModelRegistry.resolve("LlamaForCausalLM").owner == "acme"
        models.MODELS.unregister("LlamaForCausalLM")
        models.register_built_in("LlamaForCausalLM", "quire.models.llama:llama")
