"""The package `vllm` as the cases import it: faces for parsers and protocol types, plain constants from the distribution's
sources, and stand-ins for everything else, which end a case that uses them."""

import ast
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.vllm_faces import protocol
from tools.vllm_faces.outcomes import internal
from tools.vllm_faces.parsers import Delegating, Face, extract_required_tool_call_streaming
from tools.vllm_faces.tokenizer import detokenize_incrementally, stand_in_tokenizer

from quire.parsers.formats import Reasoning

COMBINED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "DeepSeekV32Parser": (("deepseek_v3",), ("deepseek_v32",)),
    "DeepSeekV4Parser": (("deepseek_v4",), ("deepseek_v4",)),
    "DeepSeekV41Parser": (("deepseek_v41",), ("deepseek_v41",)),
    "Gemma4Parser": (("gemma4",), ("gemma4",)),
    "Glm47MoeParser": (("glm47", "glm45"), ("glm47", "glm45")),
    "GraniteParser": ((), ("granite",)),
    "GraniteThinkingParser": (("granite_thinking_parser",), ("granite4", "hermes")),
    "InklingParser": (("inkling",), ("inkling",)),
    "KimiK2Parser": (("kimi_k2",), ("kimi_k2",)),
    "KimiK3Parser": (("kimi_k3",), ("kimi_k3",)),
    "Ling3Parser": (("ling3",), ("ling3",)),
    "MiMoParser": (("mimo",), ("mimo",)),
    "MiniCPMVParser": (("minicpmv",), ("qwen3_coder",)),
    "MinimaxM2Parser": (("minimax_m2",), ("minimax_m2",)),
    "MinimaxM3Parser": (("minimax_m3",), ("minimax_m3",)),
    "MistralParser": (("mistral",), ("mistral",)),
    "NemotronV3Parser": (("nemotron_v3",), ("qwen3_coder",)),
    "Plamo3Parser": (("plamo3",), ("plamo3",)),
    "Qwen3Parser": (("qwen3",), ("qwen3_coder",)),
    "SeedOssParser": (("seed_oss",), ("seed_oss",)),
    "Step3p5Parser": (("step3p5",), ("step3p5",)),
    "HarmonyParser": (("openai_gptoss",), ("openai",)),
    "BeamParser": (("beam",), ("beam",)),
    "CohereCommandParser": (("cohere_command3",), ("cohere_command3",)),
    "CohereCommand3ReasoningParser": (("cohere_command3",), ("cohere_command3",)),
    "CohereCommand4ReasoningParser": (("cohere_command4",), ("cohere_command4",)),
    "ResponseTemplateParser": (("hf",), ("hf",)),
}
"""Parsers of reasoning and calls together: their names in the two registries."""


WHOLE_CALLS = ("MuseToolParser", "MuseGlimmerToolParser", "KimiK3ToolParser")
"""Tool parsers whose cases count a call's parts in a stream."""


_SERVERS_ONLY = ("pytest_asyncio",)
"""What only cases need that start servers, and others import with them."""


class ThinkingBetween(Face):
    """vLLM's base of reasoning parsers that have two markers."""

    start_token = ""
    end_token = ""

    def __init__(self, tokenizer: Any = None, *args: Any, **kwargs: Any) -> None:
        del args
        super().__init__(tokenizer, None, **kwargs)
        self.formats = type(self.formats)("markers", reasoning=self.markers(tokenizer))

    @classmethod
    def markers(cls, tokenizer: Any) -> Reasoning:
        """The format that a subclass's two properties give."""
        blank = object.__new__(cls)
        blank.__dict__["model_tokenizer"] = tokenizer
        return Reasoning((blank.start_token,), (blank.end_token,), implied=True)

    @classmethod
    def _may_be_nothing(cls) -> bool:
        return True


class Registry:
    """vLLM's registry of tool parsers or of reasoning parsers: name → class."""

    def __init__(self, faces: dict[str, type[Face]]) -> None:
        self._faces = faces

    def _get(self, name: str) -> type[Face]:
        if name not in self._faces:
            raise KeyError(name)
        return self._faces[name]

    get_tool_parser = get_reasoning_parser = _get

    def list_registered(self) -> list[str]:
        """All names."""
        return list(self._faces)


class Combiner:
    """vLLM's `ParserManager`."""

    def __init__(self, tools: Registry, reasoning: Registry) -> None:
        self._tools, self._reasoning = tools, reasoning

    def get_parser(
        self,
        tool_parser_name: str | None = None,
        reasoning_parser_name: str | None = None,
        enable_auto_tools: bool = False,
        model_name: str | None = None,
        is_harmony: bool = False,
        **others: Any,
    ) -> type[Face] | None:
        """A class that reads reasoning and calls."""
        del model_name, others
        if not tool_parser_name and not reasoning_parser_name:
            return None
        if is_harmony:
            tool_parser_name, reasoning_parser_name, enable_auto_tools = "openai", "openai_gptoss", True
        tools = self._tools._get(tool_parser_name) if tool_parser_name and enable_auto_tools else None
        reasoning = self._reasoning._get(reasoning_parser_name) if reasoning_parser_name else None
        return type("Combined", (Delegating,), {"tool_parser_cls": tools, "reasoning_parser_cls": reasoning})

    def get_tool_parser(
        self, tool_parser_name: str | None = None, enable_auto_tools: bool = False, model_name: str | None = None
    ) -> type[Face] | None:
        """The class of a name."""
        del model_name
        return self._tools._get(tool_parser_name) if tool_parser_name and enable_auto_tools else None

    def get_reasoning_parser(self, reasoning_parser_name: str | None) -> type[Face] | None:
        """The class of a name."""
        return self._reasoning._get(reasoning_parser_name) if reasoning_parser_name else None


def install(root: Path) -> dict[str, Any]:
    """From here on `import vllm…` gives what this file says, for the cases under `root`: these names, to which others may be
    added."""
    finder = _Finder(root)
    sys.meta_path.insert(0, finder)
    return finder.names


def _face(name: str, reasoning: Sequence[str], tools: Sequence[str], base: type[Face] = Face) -> type[Face]:
    return type(name, (base,), {"reasoning_names": tuple(reasoning), "tools_names": tuple(tools)})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path) -> None:
        self._root = root
        tools = _registered(root / "vllm/tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER")
        reasoning = _registered(root / "vllm/reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER")
        faces: dict[str, type[Face]] = {}
        for name in dict.fromkeys((*tools.values(), *reasoning.values())):
            thinking, calling = ([key for key, of in registry.items() if of == name] for registry in (reasoning, tools))
            faces[name] = _face(name, thinking, calling)
            faces[name].gives_whole_calls = name in WHOLE_CALLS
        for name, (thinking, calling) in COMBINED.items():
            faces[name] = _face(name, thinking, calling)
            faces[name].looks_for_calls = True
            faces.setdefault(f"{name}ReasoningAdapter", _face(f"{name}ReasoningAdapter", thinking, ()))
            adapter = faces.setdefault(f"{name}ToolAdapter", _face(f"{name}ToolAdapter", (), calling))
            adapter.looks_for_calls = True
        registries = [Registry({key: faces[of] for key, of in registry.items()}) for registry in (tools, reasoning)]
        self.names: dict[str, Any] = {
            **faces,
            "ToolParserManager": registries[0],
            "ReasoningParserManager": registries[1],
            "ParserManager": Combiner(*registries),
            "DelegatingParser": Delegating,
            "Parser": Delegating,
            "ToolParser": Face,
            "ReasoningParser": Face,
            "BaseThinkingReasoningParser": ThinkingBetween,
            "IdentityReasoningParser": _face("IdentityReasoningParser", (), (), Delegating),
            "get_tokenizer": stand_in_tokenizer,
            "cached_get_tokenizer": stand_in_tokenizer,
            "extract_required_tool_call_streaming": extract_required_tool_call_streaming,
            "detokenize_incrementally": detokenize_incrementally,
            "TokenizerLike": Any,
            "VLLMValidationError": type("VLLMValidationError", (ValueError,), {}),
        }
        for name in dir(protocol):
            if isinstance(getattr(protocol, name), type):
                self.names.setdefault(name, getattr(protocol, name))

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname in _SERVERS_ONLY:
            return importlib.machinery.ModuleSpec(fullname, self)
        if fullname != "vllm" and not fullname.startswith("vllm."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name, self.names, self._root)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    """A module of vLLM's whose names are made when they are asked for."""

    def __init__(self, name: str, names: dict[str, Any], root: Path) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._quire_names, self._quire_root = names, root

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        found = self._quire_names.get(name)
        if found is None:
            found = _constants(self._quire_root, self.__name__).get(name)
        return internal(f"{self.__name__}.{name}") if found is None else found


def _registered(path: Path, variable: str) -> dict[str, str]:
    """A registry in a source: name → class name."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == variable:
            return {name: of for name, (_, of) in ast.literal_eval(node.value).items()}
    raise ValueError(f"{path} has no {variable}: is it the source distribution of another version?")


_READ: dict[str, dict[str, Any]] = {}
"""Modules' constants; a module that is being read has those that were found so far."""


def _constants(root: Path, module: str) -> dict[str, Any]:
    """The plain constants of a module's source: markers and numbers, which the cases put into texts."""
    if module in _READ:
        return _READ[module]
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    found = _READ[module] = {}
    if not path.is_file():
        return found
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm."):
            imported = _constants(root, node.module)
            found |= {each.asname or each.name: imported[each.name] for each in node.names if each.name in imported}
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and value is not None:
            try:
                found[target.id] = _value(value, found)
            except (ValueError, KeyError):
                continue
    return found


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """Texts and numbers, put together from each other."""
    match node:
        case ast.Name():
            return known[node.id]
        case ast.JoinedStr():
            parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
            return "".join(str(_value(part, known)) for part in parts)
        case ast.BinOp(op=ast.Add()):
            return _value(node.left, known) + _value(node.right, known)
        case ast.Tuple():
            return tuple(_value(part, known) for part in node.elts)
        case ast.Call(func=ast.Name(id="frozenset"), args=[inner]):
            return frozenset(_value(inner, known))
        case _:
            return ast.literal_eval(node)
