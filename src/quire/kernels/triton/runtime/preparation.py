"""What a start does about its kernels: compile them beside everything else, or find them compiled.

A start leaves a list of what it launched. The next one of the same model compiles that list, in processes of its own, from its
first moment; if all of it is in a cache, as on every later start, nothing is compiled. A model without a list of these very
sources is rehearsed when its buffers are there: every step size, and then every feature of a request, is launched once with
launches that only tell what they would need. The processes go on after the start, until every feature has been used once.
Knows lists and configuration; imports neither torch nor Triton until `install`.
"""

import atexit
import hashlib
import json
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.kernels.triton.runtime import likeness, places
from quire.kernels.triton.runtime.ahead import FIRST, LATER, PERHAPS, SOON, CompilingProcess
from quire.kernels.triton.runtime.places import Variant
from quire.logger import init_logger
from quire.timeline import STARTUP

if TYPE_CHECKING:
    from quire.kernels.triton.runtime.variants import Recorder

logger = init_logger(__name__)

_SHAPE_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "n_embd", "n_head"),
)
"""What of a config.json decides which kernels run; a list of a model that differs elsewhere serves as well."""


class KernelPreparation:
    """The kernels of one engine's start, in this order: `begin`, `install`, `rehearse`, `await_steps`, `save`, `finish`.

    Args:
        capability: compute capability, 90 for 9.0.
        processes: compilers that may run at a time.
    """

    def __init__(self, config: EngineConfig, capability: int, processes: int) -> None:
        self.name, self._config = list_name(config, capability), config
        self._guessed: list[Variant] = []
        self._capability, self._processes = capability, processes
        self._known: list[Variant] = []
        self._is_current = False
        self._rehearsed: list[Variant] = []
        self._by_feature: dict[str, list[Variant]] = {}
        self._compiling: CompilingProcess | None = None
        self._recorder: Recorder | None = None

    def begin(self) -> None:
        """Start compiling what this model is known to need, unless a cache has it all."""
        self._known, self._is_current = places.find_list(self.name), places.is_current(self.name)
        if self._known and self._is_current and places.is_compiled(self._known, self._capability):
            return
        self._compiling = CompilingProcess(self._capability, self._processes)
        self._compiling.add([variant for variant in self._known if not likeness.is_of_feature(variant)])
        self._compiling.add([variant for variant in self._known if likeness.is_of_feature(variant)], LATER)
        if not self._known:
            self._guessed = likeness.guess(self._config, self._capability)
            self._compiling.add(self._guessed, PERHAPS)

    def install(self) -> None:
        """Put the caches, the driver and the recorder in place; torch and Triton are imported now."""
        from quire.kernels.triton.runtime import door

        self._recorder = door.install(self._wait_for)
        # A process that runs one model after another cannot tell whose kernels are whose: the first one's list is kept.
        self._recorder.owner = self._recorder.owner or self.name
        atexit.register(self.close)

    def _wait_for(self, variant: Variant) -> None:
        if self._compiling is not None:
            self._compiling.wait_for(variant)

    def rehearse(self, launch_all: Callable[[], Any], *, feature: str = "") -> None:
        """Have everything compiled that `launch_all` would launch; it is called only where no list says that already.

        Args:
            feature: what needs these; empty for steps, which come first.
        """
        if self._is_current or self._compiling is None or self._recorder is None:
            return
        with STARTUP.phase("rehearsal") as phase, self._recorder.collecting() as collected:
            try:
                launch_all()
            except Exception as error:  # whoever needs what a launch returns; what is missing is compiled later
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{place.filename}:{place.lineno}"
                logger.warning("The rehearsal of kernels ended early (%s: %s; %s)", type(error).__name__, error, where)
        self._rehearsed = places.merge(self._rehearsed, collected)
        phase.note = f"{len(self._rehearsed)} kernels"
        self._compiling.add(collected, LATER if feature else SOON)
        if not feature:
            self._compiling.drop_guesses()
        self._by_feature[feature] = collected

    def await_steps(self) -> None:
        """Wait until all that was known or rehearsed for steps is compiled: a step then waits for nothing."""
        if self._compiling is not None:
            with STARTUP.phase("waiting for kernels"):
                for variant in self._by_feature.get("", self._known):
                    if not likeness.is_of_feature(variant):
                        self._compiling.wait_for(variant)

    def is_compiled(self, feature: str) -> bool:
        """Whether a feature's kernels are, as far as a rehearsal or the list has told."""
        return self._compiling is None or self._compiling.has(self._by_feature.get(feature, self._known))

    def hasten(self, feature: str) -> None:
        """A request waits for this feature."""
        if self._compiling is not None:
            known = [variant for variant in self._known if likeness.is_of_feature(variant)]
            self._compiling.add(self._by_feature.get(feature, known), FIRST)

    def save(self) -> None:
        """The engine is ready: keep the list. May be called again."""
        if self._recorder is None or self._recorder.owner != self.name:
            return
        compiling = self._compiling
        errors = {} if compiling is None else compiling.errors
        used = places.merge(self._known, self._rehearsed, self._recorder.variants())
        used = [variant for variant in used if places.identity(variant) not in errors]
        if compiling is not None:  # the next time the slowest begins first
            used.sort(key=lambda variant: -compiling.seconds.get(places.identity(variant), 0.0))
        try:
            if used != self._known or not self._is_current:
                places.write_list(places.list_folders()[0] / f"{self.name}.json", used)
                self._known, self._is_current = used, True
            is_complete = compiling is None or (compiling.has(used) and compiling.was_complete)
            if is_complete and not places.is_compiled(used, self._capability):
                (places.writable_folder() / places.stamp_name(used, self._capability)).touch()
        except OSError as error:
            logger.warning("The list of kernels cannot be kept, the next start compiles again: %s", error)

    def finish(self) -> None:
        """Every feature has been used: note what is compiled, and end the processes."""
        self.save()
        if self._compiling is not None:
            self._compiling.close()  # what is left are guesses

    def close(self) -> None:
        """The engine ends; may be called twice."""
        self.save()
        atexit.unregister(self.close)
        if self._compiling is not None:
            self._compiling.close()
            self._compiling = None


def list_name(config: EngineConfig, capability: int) -> str:
    """What starts have in common that need the same kernels, as a file's name."""
    hf_config = config.model.hf_config
    shape = {field: hf_config.get(field) for field in _SHAPE_FIELDS if hf_config.get(field) is not None}
    if "head_dim" not in shape and {"hidden_size", "num_attention_heads"} <= shape.keys():
        shape["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    settings = (
        shape,
        config.model.quantization,
        config.cache.cache_dtype,
        config.cache.block_size,
        config.parallel.tensor_parallel_size,
        config.model.deterministic,
        config.attention.backend,
    )
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{config.model.architecture}-{config.model.dtype}-sm{capability}-{digest}"
