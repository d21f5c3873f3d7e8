"""Where the seconds of a start on a GPU go: imports, context, compilers, launches, weights. Prints a table, writes JSON.

Each measurement that needs a fresh process runs in one: this file with the name of a part. `--cold` numbers are taken after
the files concerned were dropped from the page cache.
"""

import ctypes
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = Path(os.environ.get("OUT", "/tmp"))
GB = 1e9
DEADLINE = time.monotonic() + float(os.environ.get("STARTUP_SECONDS", "78"))


# --- in fresh processes ---


def part_torch() -> dict:
    """Import, context, first work."""
    marks, last = {}, time.perf_counter()

    def mark(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        marks[name] = round(now - last, 4)
        last = now

    import torch

    mark("import torch")
    torch.cuda.init()
    torch.cuda.set_device(0)
    mark("cuda init")
    x = torch.empty(1 << 20, device="cuda")
    torch.cuda.synchronize()
    mark("context, first allocation")
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    mark("stream")
    x.zero_()
    torch.cuda.synchronize()
    mark("first kernel (fill)")
    a = torch.empty(256, 256, device="cuda", dtype=torch.bfloat16)
    mark("empty bf16")
    torch.mm(a, a)
    torch.cuda.synchronize()
    mark("first product (cuBLAS handle)")
    torch.nn.functional.linear(
        torch.empty(2048, 4096, device="cuda", dtype=torch.bfloat16),
        torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16),
    )
    torch.cuda.synchronize()
    mark("large product")
    torch.arange(10, device="cuda").cumsum(0)
    torch.cuda.synchronize()
    mark("arange cumsum")
    torch.cuda.mem_get_info()
    mark("mem_get_info")
    for mib in (16, 64, 256):
        torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True)
        mark(f"pin {mib} MiB")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(200):
            x.add_(1)
    mark("first graph of 200 kernels")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(200):
            x.add_(1)
    mark("second graph")
    big = torch.empty(60 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    mark("allocate 60 GiB")
    big[: 1 << 30].zero_()
    torch.cuda.synchronize()
    mark("fill 1 GiB of it")
    marks["modules"] = len(sys.modules)
    marks["dynamo"] = [
        name for name in ("torch._dynamo", "torch._inductor", "sympy", "transformers") if name in sys.modules
    ]
    return marks


def part_maps() -> dict:
    """Which files an import of torch maps, and how much of each is in memory afterwards."""
    begin = time.perf_counter()
    import torch

    imported = time.perf_counter() - begin
    torch.cuda.init()
    torch.empty(1, device="cuda")
    ready = time.perf_counter() - begin
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5].strip() for line in lines if "/" in line}
    rows = []
    for file in files:
        if not os.path.isfile(file) or file.startswith("/dev"):
            continue
        size = os.path.getsize(file)
        rows.append((file, size, resident(file)))
    rows.sort(key=lambda row: -row[2])
    return {
        "files": [(os.path.basename(f), round(s / 1e6, 1), round(r / 1e6, 1)) for f, s, r in rows[:16]],
        "total_mb": sum(r for *_, r in rows) / 1e6,
        "import torch": round(imported, 3),
        "with context": round(ready, 3),
    }


def part_launch() -> dict:
    """Our launcher beside Triton's: equal results, microseconds a launch."""
    import torch
    import triton

    sys.path.insert(0, str(HERE))
    from startup_kernels import described, device_described, empty, norm
    from triton.tools.tensor_descriptor import TensorDescriptor

    from quire.kernels.triton.runtime import door

    def run(label: str, fresh) -> dict:
        x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1))
        y = torch.empty_like(x)
        norm[(64,)](x, x[0], y, 1024, 1e-6, BLOCK=1024)
        want = torch.nn.functional.rms_norm(x.float(), (1024,), x[0].float(), 1e-6)
        notes = {"norm_error": float((y.float() - want).abs().max())}
        norm[(64,)](x, x[0], y.zero_(), 1024, 1e-6, BLOCK=1024, launch_pdl=True, num_warps=2)
        notes["norm_error_pdl"] = float((y.float() - want).abs().max())
        norm[(64,)](x, x[0], y.zero_(), 1024, 1e-6, BLOCK=1024, num_warps=1, num_stages=4)
        for name, launch in (
            (
                "described",
                lambda out: described[(4, 16)](TensorDescriptor.from_tensor(x, [16, 64]), out, 1024, BM=16, BN=64),
            ),
            ("device_described", lambda out: device_described[(4, 16)](x, out, 64, 1024, BM=16, BN=64)),
        ):
            out = torch.zeros_like(x)
            try:
                triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
                launch(out)
                notes[name] = bool(torch.equal(out, x))
            except Exception as error:
                notes[name] = f"{type(error).__name__}: {error}"[:160]
        args = (x, y, x, y, x, y, 3, 64, 0.5)
        for pdl in (False, True):
            for _ in range(50):
                empty[(1,)](*args, BLOCK=64, launch_pdl=pdl)
            torch.cuda.synchronize()
            best = 1e9
            for _ in range(7):
                begin = time.perf_counter()
                for _ in range(300):
                    empty[(1,)](*args, BLOCK=64, launch_pdl=pdl)
                best = min(best, (time.perf_counter() - begin) / 300)
                torch.cuda.synchronize()
            notes[f"us_a_launch{'_pdl' if pdl else ''}"] = round(best * 1e6, 2)
        graph = torch.cuda.CUDAGraph()
        y.zero_()
        with torch.cuda.graph(graph):
            norm[(64,)](x, x[0], y, 1024, 1e-6, BLOCK=1024, launch_pdl=True, num_warps=2)
        graph.replay()
        torch.cuda.synchronize()
        notes["graph_error"] = float((y.float() - want).abs().max())
        return notes

    result = {"stock": run("stock", None)}
    for kernel in (norm, described, device_described, empty):
        kernel.device_caches.clear()
    door.install_driver()
    result["ours"] = run("ours", None)
    return result


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "num_key_value_heads": 8,
}
MODELS = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "mlp_bias": False,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
    },
}


def model_folder(name: str, **changes) -> str:
    """A folder with a config.json."""
    folder = Path(tempfile.gettempdir()) / f"startup-{name}-{len(changes)}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3 | MODELS[name] | changes))
    return str(folder)


def part_engine(folder: str, settings: str = "{}") -> dict:
    """Process start to first token, with the engine's own account. Settings: engine arguments, and `read_ahead`."""
    from quire.timeline import process_age
    from quire.worker import startup

    chosen = {"load_format": "dummy", **json.loads(settings)}
    if not chosen.pop("read_ahead", True):
        startup.read_ahead = lambda: 0
    from quire import LLM, SamplingParams

    llm = LLM(model=folder, **chosen)
    prompt = {"prompt_token_ids": [i % 7 + 10 for i in range(128)]}
    begin = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), use_tqdm=False)
    first, age = time.perf_counter() - begin, process_age()
    begin = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=16, temperature=0.6, ignore_eos=True), use_tqdm=False)
    report = llm.llm_engine.explain()["startup"]
    again = time.perf_counter() - begin
    llm.llm_engine.shutdown()
    return {
        "START TO FIRST TOKEN": round(age, 2),
        "first token": round(first, 3),
        "16 more": round(again, 3),
        "line": report["line"],
        "phases": report["phases"],
    }


def part_checkpoint(name: str, layers: str) -> dict:
    """Write a checkpoint of a few layers, then read it as an engine does: from memory, and from the disk."""
    import torch
    from safetensors.torch import save_file

    from quire.engine.arg_utils import EngineArgs
    from quire.model_loader.loader import load_model
    from quire.platforms.cuda import CudaPlatform

    folder = model_folder(name, num_hidden_layers=int(layers))
    config = EngineArgs(model=folder).create_engine_config()
    platform = CudaPlatform()
    runtime = platform.runtime(config)
    platform.select_kernels()
    from quire.model_loader.loader import build_model

    sources = build_model(config, platform, torch.device("meta"), 64, 16)[0].sources
    begin, file, count, total = time.perf_counter(), {}, 0, 0
    for source in sources.values():
        file[source.name] = torch.full(source.shape, 0.01, dtype=torch.bfloat16)
        total += file[source.name].nbytes
        if sum(tensor.nbytes for tensor in file.values()) > 1 << 30:
            save_file(file, f"{folder}/model-{count}.safetensors")
            file, count = {}, count + 1
    save_file(file, f"{folder}/model-{count}.safetensors")
    result = {"GB": round(total / 1e9, 2), "files": count + 1, "write, s": round(time.perf_counter() - begin, 2)}
    for label in ("from memory", "from memory again", "from the disk"):
        if label == "from the disk":
            os.sync()
            for path in Path(folder).glob("*.safetensors"):
                with open(path, "rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        load_model(config, platform, runtime.device(), 64, 16)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        result[label] = {"s": round(seconds, 3), "GB/s": round(total / 1e9 / seconds, 1)}
    for path in Path(folder).glob("*.safetensors"):
        path.unlink()
    return result


# --- helpers ---


def resident(file: str) -> int:
    """Bytes of a file that are in the page cache."""
    size = os.path.getsize(file)
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fd = os.open(file, os.O_RDONLY)
    try:
        at = libc.mmap(None, size, 1, 1, fd, 0)
        pages = (size + 4095) // 4096
        flags = (ctypes.c_ubyte * pages)()
        if libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), flags):
            return -1
        libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))
        return sum(flag & 1 for flag in bytes(flags)) * 4096
    finally:
        os.close(fd)


def evict(*packages: str) -> float:
    """Drop a package's files from the page cache; returns the megabytes that were there and are not now (of large files)."""
    roots = [Path(sysconfig.get_paths()["purelib"]), Path(sysconfig.get_paths()["platlib"])]
    import importlib.util

    for package in packages:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or []) if spec else []
        for root in places or [str(r / package) for r in roots]:
            for file in Path(root).rglob("*"):
                if file.is_file():
                    try:
                        fd = os.open(file, os.O_RDONLY)
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                        os.close(fd)
                    except OSError:
                        pass
    return 0.0


def child(
    part: str,
    *arguments: str,
    fresh_cache: str | None = None,
    our_cache: str | None = None,
    flags: tuple[str, ...] = (),
) -> dict:
    """Run a part in a fresh process; its figures with the process's wall time."""
    environment = dict(os.environ)
    if fresh_cache:
        environment["TRITON_CACHE_DIR"] = fresh_cache
        environment["QUIRE_CACHE_ROOT"] = fresh_cache
    if our_cache:
        environment["QUIRE_CACHE_ROOT"] = our_cache
    begin = time.perf_counter()
    left = max(5.0, DEADLINE - time.monotonic())
    done = subprocess.run(
        [sys.executable, *flags, __file__, part, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=left,
    )
    wall = time.perf_counter() - begin
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return {"wall": round(wall, 3), **json.loads(line), **({"stderr": done.stderr} if flags else {})}
    return {"wall": round(wall, 3), "error": done.stderr[-600:]}


def import_times(text: str, count: int = 14) -> list[str]:
    """The lines of `-X importtime` with the largest own times."""
    rows = []
    for line in text.splitlines():
        if line.startswith("import time:") and line.count("|") == 2:
            own, total, name = line.removeprefix("import time:").split("|")
            if own.strip().isdigit():
                rows.append((int(own), int(total), name.strip()))
    rows.sort(reverse=True)
    return [f"{name} own {own / 1e3:.0f} ms, in all {total / 1e3:.0f}" for own, total, name in rows[:count]]


def main() -> None:
    report: dict = {}

    def step(name: str, function) -> None:
        if time.monotonic() > DEADLINE:
            report[name] = "no time left"
            return
        begin = time.monotonic()
        try:
            report[name] = function()
        except Exception as error:
            report[name] = f"{type(error).__name__}: {error}"[:400]
        print(f"# {name}: {time.monotonic() - begin:.1f} s", flush=True)
        (OUT / "startup.json").write_text(json.dumps(report, indent=1, default=str))

    import importlib.metadata as metadata
    import shutil

    report["machine"] = {
        "python": sys.version.split()[0],
        "cpus": len(os.sched_getaffinity(0)),
        "torch": metadata.version("torch"),
        "triton": metadata.version("triton"),
        "gcc": shutil.which("gcc"),
        "site": sysconfig.get_paths()["purelib"],
    }
    caches = {name: tempfile.mkdtemp() for name in MODELS}

    def engine(name: str, **settings) -> dict:
        figures = child("engine", model_folder(name), json.dumps(settings), our_cache=caches[name])
        for file in Path(caches[name]).rglob("lists/*.json"):
            (OUT / "startup-lists").mkdir(exist_ok=True)
            (OUT / "startup-lists" / file.name).write_bytes(file.read_bytes())
        return figures

    def without_kernels(name: str, **settings) -> dict:
        for pattern in ("*.cubin", "done-*"):
            for file in Path(caches[name]).rglob(pattern):
                file.unlink()
        return engine(name, **settings)

    def dropped(run, *arguments, **settings) -> dict:
        evict("torch", "nvidia", "triton", "quire")
        return run(*arguments, **settings)

    def timed_import() -> list[str]:
        got = child("torch", flags=("-X", "importtime"))
        (OUT / "startup-importtime.txt").write_text(got.get("stderr", ""))
        return import_times(got.get("stderr", ""))

    def shipped() -> dict:
        folder = tempfile.mkdtemp()
        environment = {**os.environ, "QUIRE_CACHE_ROOT": caches["llama-3.1-8b"]}
        command = [sys.executable, "-m", "quire.entrypoints.cli.main", "compile-cache", "--output", folder]
        begin = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
        os.environ["QUIRE_KERNEL_CACHE"] = folder
        try:
            figures = child("engine", model_folder("llama-3.1-8b"), our_cache=tempfile.mkdtemp())
        finally:
            del os.environ["QUIRE_KERNEL_CACHE"]
        figures.pop("phases", None)
        return {"compile-cache, s": round(seconds, 2), "said": (done.stdout + done.stderr)[-400:], "then": figures}

    step("0.6B, fresh machine", lambda: engine("qwen3-0.6b"))
    step("0.6B, warm", lambda: engine("qwen3-0.6b"))
    step("8B, no caches", lambda: engine("llama-3.1-8b"))
    step("8B, warm", lambda: engine("llama-3.1-8b"))
    step("30B-A3B, no caches", lambda: engine("qwen3-30b-a3b"))
    step("0.6B, no caches, files dropped", lambda: dropped(without_kernels, "qwen3-0.6b"))
    step(
        "0.6B, no caches, files dropped, no reading ahead",
        lambda: dropped(without_kernels, "qwen3-0.6b", read_ahead=False),
    )
    step("0.6B, nothing known (pages of 32)", lambda: engine("qwen3-0.6b", block_size=32))
    step("8B, kernels shipped", shipped)
    step("checkpoint of 8B's shape, 4 layers", lambda: child("checkpoint", "llama-3.1-8b", "4"))
    step("largest imports", timed_import)
    step("launcher", lambda: child("launch", fresh_cache=tempfile.mkdtemp()))
    (OUT / "startup.json").write_text(json.dumps(report, indent=1, default=str))
    for name, figures in report.items():
        print(f"{name}: {json.dumps(figures, default=str)[:1500]}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        name, *rest = sys.argv[1:]
        print(json.dumps({} if name == "nothing" else globals()[f"part_{name}"](*rest)))
    else:
        main()
