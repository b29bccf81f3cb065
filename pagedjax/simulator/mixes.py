"""Committed traffic for questions about preemption: each mix with the device and the limits that make it interesting.

Priorities are vLLM's: a lower one is served earlier.
"""

from dataclasses import dataclass

from pagedjax.core.config import SchedulerConfig
from pagedjax.simulator.cost import H200_LIKE, CostModel
from pagedjax.simulator.workload import SimRequest, Traffic, mix

INTERACTIVE, BATCH = -1, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Traffic, and the scheduler and the device that it meets."""

    about: str
    traffic: tuple[Traffic, ...]
    config: SchedulerConfig
    cost: CostModel = H200_LIKE

    def requests(self) -> tuple[SimRequest, ...]:
        return mix(*self.traffic)


# Both slots and memory are short: sixteen sequences may run, and twelve of the jobs' usual size fill the pool.
EVERYDAY = Mix(
    about="ten questions a second beside three batch jobs a second; slots and memory are short",
    traffic=(
        Traffic(
            num_requests=300,
            rate=10,
            prompt_median=200,
            prompt_sigma=0.8,
            max_prompt_len=2000,
            output_median=60,
            output_sigma=0.6,
            max_output_len=300,
            priority=INTERACTIVE,
        ),
        Traffic(
            num_requests=80,
            rate=3,
            prompt_median=1500,
            prompt_sigma=0.5,
            max_prompt_len=6000,
            output_median=250,
            output_sigma=0.5,
            max_output_len=800,
            priority=BATCH,
            seed=1,
        ),
    ),
    config=SchedulerConfig(num_blocks=1536, max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=8192),
)

# The calls' common prompt takes 62 ms to compute, a job's 45 ms, and there is memory for two jobs or a call and a half.
# So a call drives out the jobs' blocks, and jobs that come back drive out the prompt. At a slice of 50 ms, no more than
# it takes to begin again, that happens so often that the device falls behind; at 150 ms calls come in groups.
CROWDED = Mix(
    about="eleven calls a second with one long system prompt and an answer of one token, over jobs of 1,300 tokens "
    "that answer with eight; memory for two jobs",
    traffic=(
        Traffic(num_requests=220, rate=11, prefix_len=1800, prompt_median=20, output_median=1, priority=INTERACTIVE),
        Traffic(
            num_requests=340,
            rate=17,
            prompt_median=1300,
            prompt_sigma=0.2,
            max_prompt_len=1950,
            output_median=8,
            output_sigma=0.3,
            max_output_len=200,
            priority=BATCH,
            seed=1,
        ),
    ),
    config=SchedulerConfig(num_blocks=180, max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=2880),
)

LONG_PROMPTS = Mix(
    about="documents of 8k to 24k tokens beside questions; memory for two of them",
    traffic=(
        Traffic(
            num_requests=200,
            rate=5,
            prompt_median=200,
            prompt_sigma=0.8,
            max_prompt_len=2000,
            output_median=60,
            output_sigma=0.6,
            max_output_len=300,
            priority=INTERACTIVE,
        ),
        Traffic(
            num_requests=30,
            rate=1.5,
            prompt_median=12_000,
            prompt_sigma=0.3,
            max_prompt_len=24_000,
            output_median=200,
            output_sigma=0.5,
            max_output_len=600,
            priority=BATCH,
            seed=1,
        ),
    ),
    config=SchedulerConfig(num_blocks=1600, max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=32_768),
)
