"""A device and a vocabulary simple enough to reason about: 64 tokens, the next token follows from the last one."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from pagedjax.core.effects import CopyBlocks, Discard, Fetch, SwapOut
from pagedjax.core.invariants import check
from pagedjax.core.plan import StepPlan, Tier
from pagedjax.engine.chat_template import ChatTemplate
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.engine import Engine
from pagedjax.engine.outputs import add_update, empty_output
from pagedjax.runtime.results import StepResult
from pagedjax.runtime.sampler import Scores
from pagedjax.runtime.swap import Completion
from pagedjax.runtime.tokens import TokenTable
from tests.runtime import tiny

VOCAB_SIZE = 64
EOS = 63
POISON = 40  # a prompt that begins with it makes logits that are not finite
CRASH = 41  # a prompt that begins with it makes each of its steps fail


class LetterTokenizer:
    """Token i is the i-th of these characters; 63 ends a sequence and has no text."""

    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "
    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset({EOS})
    chat_template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})

    def encode(self, text: str, add_special_tokens: bool = True, *, max_len: int | None = None) -> list[int]:
        return [self.letters.index(letter) for letter in text]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.token_text(token_id) for token_id in token_ids if token_id != EOS)

    chat_template_text = chat_template.text

    def apply_chat_template(self, messages: Sequence, **_options: bool) -> str:
        return self.chat_template.render(messages, add_generation_prompt=True)

    def token_text(self, token_id: int) -> str:
        return "<eos>" if token_id == EOS else self.letters[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


class TinyTokenizer(LetterTokenizer):
    """For the tiny model: its ids have letters too, not each its own, and none ends a sequence."""

    vocab_size = tiny.CONFIG.vocab_size
    eos_token_ids = frozenset()

    def token_text(self, token_id: int) -> str:
        return self.letters[token_id % len(self.letters)]


class CountingRunner:
    """The next token is the last one plus one, so "a" goes on "bcdef…" and "0123456789 " ends with EOS.

    Blocks hold the tokens that were computed into them, and a row reads its context from its blocks: who loses,
    overwrites or mixes up a block gets a wrong output. Ids are worked out at dispatch, as on a device.

    Faults: `fail_at_plan` cannot start; from `die_at_plan` on nothing does, an empty cache neither; steps with a
    sequence whose prompt begins with CRASH fail when collected. Transfers end at the `transfer_polls`-th poll, those of
    which `fails_transfer` says so badly.
    """

    recompiles = 0

    def __init__(self, num_slots: int, block_size: int = 4) -> None:
        self.tokens = TokenTable()
        self.num_slots, self.block_size, self.slots = num_slots, block_size, set()
        self.fail_at_plan: int | None = None
        self.die_at_plan: int | None = None
        self.is_dead = False
        self.transfer_polls = 1
        self.fails_transfer: Callable[[int], bool] = lambda transfer_id: False
        self.num_resets = 0
        self.lower: dict[tuple[Tier, int], dict[int, int]] = {}
        self._under_way: dict[int, tuple[int, Fetch | SwapOut, list[dict[int, int]]]] = {}
        self.staged: dict[int, list[dict[int, int]]] = {}
        self.reset()

    def reset(self) -> None:
        if self.is_dead:
            raise RuntimeError("the device is gone")
        self.blocks: dict[int, dict[int, int]] = {}  # block -> offset -> token
        self.sampled: dict[int, tuple[int, int]] = {}  # sequence -> position and value of its newest token
        self.slots.clear()
        self.num_resets += 1

    def dispatch(self, plan: StepPlan) -> StepResult | Exception:
        self.is_dead = self.die_at_plan is not None and plan.plan_id >= self.die_at_plan
        if self.is_dead or plan.plan_id == self.fail_at_plan:
            for scatter in plan.scatters:
                self.staged.pop(scatter.transfer_id)
            raise RuntimeError("the device fell over")
        for scatter in plan.scatters:
            staged = self.staged.pop(scatter.transfer_id)
            self.blocks |= {block_id: dict(staged[index]) for index, block_id in scatter.pairs}
        self.slots |= {row.sequence_id for row in plan.rows}
        assert len(self.slots) <= self.num_slots
        crashes = any(self.tokens.get(row.sequence_id).ids[0] == CRASH for row in plan.rows)
        ids = [self._run(row) for row in plan.rows]
        faulty = [row.samples and token_id < 0 for row, token_id in zip(plan.rows, ids)]
        result = StepResult(plan.plan_id, ids, faulty, self._scores(plan, np.array(ids, np.int32)), {})
        return RuntimeError("the step crashed") if crashes else result

    def collect(self, handle: StepResult | Exception) -> StepResult:
        if isinstance(handle, Exception):
            raise handle
        return handle

    def release(self, sequence_id: int) -> None:
        self.sampled.pop(sequence_id, None)
        self.slots.discard(sequence_id)

    def copy_blocks(self, effect: CopyBlocks) -> None:
        self.blocks |= {target: dict(self.blocks[source]) for source, target in effect.pairs}

    def swap_out(self, effect: SwapOut) -> None:
        gathered = [dict(self.blocks.get(block_id, {})) for block_id, _ in effect.moves]
        self._under_way[effect.transfer_id] = self.transfer_polls, effect, gathered

    def fetch(self, effect: Fetch) -> None:
        self._under_way[effect.transfer_id] = self.transfer_polls, effect, []

    def discard(self, effect: Discard) -> None:
        del self.staged[effect.transfer_id]

    def poll_transfers(self, timeout_s: float = 0.0) -> list[Completion]:
        self._under_way = {
            i: (min(left, self.transfer_polls) - 1, *rest) for i, (left, *rest) in self._under_way.items()
        }
        return [self._end(i) for i, (left, *_) in list(self._under_way.items()) if left <= 0]

    def _end(self, transfer_id: int) -> Completion:
        _, effect, gathered = self._under_way.pop(transfer_id)
        error = "the disk fell over" if self.fails_transfer(transfer_id) else None
        is_fetch = isinstance(effect, Fetch)
        if is_fetch and error is None:
            self.staged[transfer_id] = [self.lower[effect.tier, block_id] for block_id in effect.block_ids]
        elif error is None:
            self.lower |= {(effect.tier, target): x for (_, target), x in zip(effect.moves, gathered)}
        return Completion(transfer_id, effect.tier, is_fetch, 1, 0.001, error)

    def _scores(self, plan: StepPlan, ids: np.ndarray) -> Scores | None:
        """Whoever came later is less likely, if anybody wants to know."""
        if all(self.tokens.get(row.sequence_id).params.logprobs is None for row in plan.rows):
            return None
        ones = np.ones(len(ids), np.int32)
        if any(self.tokens.get(row.sequence_id).params.beam_width for row in plan.rows):
            alternatives = (ids[:, None] + np.arange(3)) % VOCAB_SIZE  # the next letter, and the two behind it
            logprobs = np.tile(np.array([-0.1, -0.1, -2.5, -3.5], np.float32), (len(ids), 1))
            return Scores(np.concatenate([ids[:, None], alternatives], 1), logprobs, ones)
        logprobs = np.array([[-0.1 * row.sequence_id] for row in plan.rows], np.float32)
        return Scores(ids[:, None], logprobs, ones)

    def _run(self, row) -> int:
        """Write the row's tokens to its blocks, read its context from them, and sample."""
        known = self.tokens.tokens(row.sequence_id).tolist()
        end = row.start + row.length
        for position in range(row.start, end):
            index, offset = divmod(position, self.block_size)
            block = self.blocks.setdefault(row.blocks[index], {})
            if position < len(known):
                token = known[position]
            else:
                at, token = self.sampled[row.sequence_id]
                assert at == position
            if row.writes:
                block[offset] = token
        if not row.samples:
            return -1
        context = [self.blocks[row.blocks[i // self.block_size]][i % self.block_size] for i in range(end)]
        assert context[: len(known)] == known[:end]
        sampled = -1 if context[0] == POISON else (context[-1] + 1) % VOCAB_SIZE
        self.sampled[row.sequence_id] = end, sampled
        return sampled


def make_engine(
    *, num_host_blocks: int = 0, num_disk_blocks: int = 0, preemption_method: str = "auto", **options
) -> Engine:
    limits = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    config = EngineConfig(model="counting", **{**limits, "num_gpu_blocks_override": 64, **options})
    tiers = {"num_host_blocks": num_host_blocks, "num_disk_blocks": num_disk_blocks}
    scheduler = replace(config.scheduler(config.num_gpu_blocks_override), **tiers, preemption_method=preemption_method)
    runner = CountingRunner(num_slots=config.max_num_seqs, block_size=config.block_size)
    return Engine(config, scheduler, runner, LetterTokenizer())


def texts(engine: Engine, requests: Sequence) -> list[str]:
    """Run requests to the end; the text of each (request, index), in order."""
    found: dict[tuple[str, int], str] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for update in engine.step():
            key = update.request_id, update.delta.index
            found[key] = found.get(key, "") + update.delta.text
    return [found[key] for key in sorted(found)]


def num_preemptions(engine, **labels) -> int:
    """Those with these labels."""
    (family,) = engine.metrics.preemptions.collect()
    samples = [sample for sample in family.samples if sample.name.endswith("_total")]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def run(engine, prompt, sampling, request_id="r"):
    """One request to its end, as a RequestOutput; and the most blocks that its sequences held."""
    request = engine.prepare(prompt, sampling, request_id=request_id)
    output, most = empty_output(request), 0
    engine.add(request)
    while engine.has_work:
        for update in engine.step():
            add_update(output, update)
        check(engine.state)
        most = max(most, len(engine.state.pool.counts))
    assert not engine.state.pool.counts and not engine.runner.tokens
    return output, most


def build_counting(config: EngineConfig, **options) -> Engine:
    """The counting engine, for a process of its own: `functools.partial(build_counting, step_s=0.05)` can be sent."""
    step_s = options.pop("step_s", 0.0)
    crash_at, die_at = options.pop("crash_at_plan", None), options.pop("die_at_plan", None)
    engine = make_engine(**options)
    collect = engine.runner.collect
    engine.runner.die_at_plan = die_at

    def slow_collect(handle):
        if crash_at is not None and engine.state.in_flight[0].plan_id >= crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(step_s)
        return collect(handle)

    engine.runner.collect = slow_collect
    return engine


def build_tiny(config: EngineConfig) -> Engine:
    """A real runner with the tiny model, for a process of its own."""
    runner = tiny.make_runner()
    runner.warm_up()
    return Engine(config, tiny.SCHEDULER, runner, TinyTokenizer())
