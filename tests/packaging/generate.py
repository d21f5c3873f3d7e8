"""Generates text with the installed package, on the native CPU kernels. The test of a built wheel runs this file."""

from pathlib import Path

import quire
from quire import LLM, SamplingParams

KERNELS = Path(quire.__file__).parent / "kernels" / "cpu" / "_quire_cpu.so"


def main() -> None:
    """Raises AssertionError if the kernels are missing or the answer is wrong."""
    assert KERNELS.exists(), f"the wheel has no CPU kernels: {KERNELS} is missing"
    llm = LLM(kv_cache_memory_bytes=64 << 20, max_model_len=512)
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    output = llm.chat(question, SamplingParams(temperature=0, max_tokens=20))[0]
    answer = output.outputs[0].text.strip()
    assert answer == "17 + 25 = 42", answer
    print(f"{quire.__file__}: {answer}")


if __name__ == "__main__":
    main()
