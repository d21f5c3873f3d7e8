"""Notes what keeps a server's processes from going on: with this folder on PYTHONPATH, each process of it writes a file.

    WATCH_DIR=DIR PYTHONPATH=tools/gpu/watch:… quire serve …

Of each process DIR/PID.jsonl has, one a line and in seconds of `time.perf_counter()` (which all processes share): steps of the
core that took long and what they consisted of (planning, submitting a size for the first time, capturing it, waiting), kernels
that were compiled or loaded, features that were used for the first time, modules that were imported, collections of garbage,
and moments in which no thread got the interpreter. DIR/PID.stacks has the stacks at such moments and in long steps.
"""

import atexit
import faulthandler
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path

LONG_S = float(os.environ.get("WATCH_MS", "8")) / 1e3
"""What takes longer is noted."""
PULSE_S = 0.004
STUCK_S = 0.02
"""After this long without the interpreter, or in one step, stacks are written."""

_METHODS = {
    "quire.worker.step_graphs": (("StepGraphs._capture", "capture"), ("StepGraphs.run", "submit")),
    "quire.worker.feature_uses": (("FeatureUses._use", "first use"),),
    "quire.worker.prompt_logprobs": (("PromptLogprobs.compute", "prompt logprobs"),),
    "quire.engine.core": (
        ("EngineCore.step", "step"),
        ("EngineCore.idle", "idle"),
        ("EngineCore._take_in", "take in"),
        ("EngineCore.add_requests", "add"),
    ),
    "quire.core.scheduler": (("Scheduler.schedule", "schedule"),),
    "quire.worker.worker": (("Worker.execute", "execute"),),
    "quire.sample.sampler": (("Sampler.sample", "sample"), ("Sampler.compute_prompt_logprobs", "position logprobs")),
    "quire.kernels.triton.runtime.variants": (("Recorder.compile", "kernel"),),
    "quire.kernels.triton.runtime.driver": (("Utils.load_binary", "load kernel"),),
    "quire.structured_output.grammars": (("Grammars._build", "grammar"), ("Grammars._read", "vocabulary")),
    "quire.structured_output.trial": (("Trials.check", "trial"), ("Trials.begin", "trial's process")),
    "quire.engine.request_record": (("RequestRecord.append_prompt_logprobs", "texts of prompt logprobs"),),
    "quire.engine.output_processor": (("OutputProcessor.process", "outputs"),),
}
"""By module: methods that are timed, and how they are called in the file."""


class Watch:
    """What one process writes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._stacks = (folder / f"{os.getpid()}.stacks").open("a", buffering=1)
        self.steps: dict[int, float] = {}
        self._collecting = 0.0
        self.is_serving = False

    def note(self, kind: str, began: float, seconds: float, **more: object) -> None:
        line = {"t": round(began, 5), "ms": round(seconds * 1e3, 2), "what": kind, **more}
        self._file.write(json.dumps(line, default=str) + "\n")

    def wrap(self, owner: type, name: str, kind: str) -> None:
        plain = getattr(owner, name)
        is_step, note = kind == "step", self.note

        def timed(*args, **named):
            began = time.perf_counter()
            if is_step:
                self.steps[threading.get_ident()] = began
                self.is_serving = True
            try:
                return plain(*args, **named)
            finally:
                took = time.perf_counter() - began
                if is_step:
                    self.steps.pop(threading.get_ident(), None)
                if took > LONG_S:
                    about = " ".join(str(value)[:300] for value in args[1:2])
                    note(kind, began, took, thread=threading.current_thread().name, about=about)

        setattr(owner, name, timed)

    def collected(self, phase: str, info: dict) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        elif (took := time.perf_counter() - self._collecting) > LONG_S / 2:
            self.note("collection", self._collecting, took, generation=info["generation"])

    def pulse(self) -> None:
        """In a thread: writes stacks of the moments in which it does not get the interpreter, and of long steps."""
        while True:
            faulthandler.dump_traceback_later(STUCK_S, file=self._stacks)
            began = time.perf_counter()
            time.sleep(PULSE_S)
            late = time.perf_counter() - began - PULSE_S
            faulthandler.cancel_dump_traceback_later()
            if late > LONG_S:
                self.note("no interpreter", began, late)
                if late > STUCK_S:
                    self._stacks.write(f"^^^ no interpreter at {began:.4f} for {late * 1e3:.0f} ms\n")
            for thread, since in list(self.steps.items()):
                if began - since > STUCK_S and (frame := sys._current_frames().get(thread)) is not None:
                    names = []
                    while frame is not None and len(names) < 12:
                        names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}")
                        frame = frame.f_back
                    self.note("inside a step", since, began - since, stack=" < ".join(names))


class Finder(importlib.abc.MetaPathFinder):
    """Wraps methods of modules as they are imported."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._busy = watch, threading.local()

    def find_spec(self, name, path=None, target=None):
        if self._watch.is_serving:
            self._watch.note("import", time.perf_counter(), 0.0, module=name)
        if name not in _METHODS or getattr(self._busy, "name", None) == name:
            return None
        self._busy.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.name = None
        if spec is None or spec.loader is None:
            return None
        plain = spec.loader.exec_module

        def exec_module(module):
            plain(module)
            for place, kind in _METHODS[name]:
                owner_name, method = place.split(".")
                owner = getattr(module, owner_name, None)
                if owner is not None and hasattr(owner, method):
                    self._watch.wrap(owner, method, kind)

        spec.loader.exec_module = exec_module
        return spec


def begin() -> None:
    folder = os.environ.get("WATCH_DIR")
    if not folder:
        return
    watch = Watch(Path(folder))
    watch.note("process", time.perf_counter(), 0.0, command=" ".join(sys.orig_argv)[:400])
    sys.meta_path.insert(0, Finder(watch))
    gc.callbacks.append(watch.collected)
    threading.Thread(target=watch.pulse, name="watch", daemon=True).start()
    atexit.register(lambda: faulthandler.cancel_dump_traceback_later())


begin()
