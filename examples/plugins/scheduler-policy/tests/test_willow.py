"""Of requests that wait together the shortest starts first; an engine serves all of them."""

from quire import LLM, SamplingParams
from quire.config import SchedulerConfig
from quire.core.policies import policy_class
from quire.plugins import load_general_plugins
from quire.request import EngineRequest


def test_short_prompts_come_first_and_long_ones_do_not_wait_for_ever() -> None:
    load_general_plugins("core")
    policy = policy_class("willow")(SchedulerConfig())
    long = policy.rank(EngineRequest("a", [1] * 900, arrival_time=10.0), 0)
    assert policy.rank(EngineRequest("b", [1] * 5, arrival_time=10.0), 1) < long
    assert long < policy.rank(EngineRequest("c", [1] * 5, arrival_time=11.0), 2)


def test_an_engine_serves_all_under_the_policy() -> None:
    llm = LLM(max_model_len=512, scheduling_policy="willow", max_num_seqs=1)
    prompts = ["word " * count for count in (40, 2, 20)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
    assert [output.finished for output in outputs] == [True] * 3
