"""A device and a vocabulary simple enough to reason about: 64 tokens, the next token follows from the last one."""

from collections.abc import Iterable, Sequence

import numpy as np

from pagedjax.core.plan import StepPlan
from pagedjax.engine.chat_template import ChatTemplate
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.engine import Engine
from pagedjax.runtime.results import StepResult
from pagedjax.runtime.tokens import TokenTable

VOCAB_SIZE = 64
EOS = 63
POISON = 40  # a prompt that begins with it makes logits that are not finite


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

    def apply_chat_template(self, messages: Sequence, **_options: bool) -> str:
        return self.chat_template.render(messages, add_generation_prompt=True)

    def token_text(self, token_id: int) -> str:
        return "<eos>" if token_id == EOS else self.letters[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


class CountingRunner:
    """The next token is the last one plus one, so "a" goes on "bcdef…" and "0123456789 " ends with EOS.

    Ids are worked out at dispatch, as on a device: from the row's own history, sampled tokens in flight included.
    """

    recompiles = 0

    def __init__(self, num_slots: int) -> None:
        self.tokens = TokenTable()
        self.num_slots, self.slots = num_slots, set()
        self.history: dict[int, list[int]] = {}
        self.fail_at_plan: int | None = None

    def dispatch(self, plan: StepPlan) -> StepResult:
        if plan.plan_id == self.fail_at_plan:
            raise RuntimeError("the device fell over")
        self.slots |= {row.sequence_id for row in plan.rows}
        assert len(self.slots) <= self.num_slots
        ids = np.array([self._sample(row) for row in plan.rows], np.int32)
        faulty = np.array([row.samples for row in plan.rows]) & (ids < 0)
        return StepResult(plan.plan_id, ids, faulty, None, {})

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def release(self, sequence_id: int) -> None:
        self.history.pop(sequence_id, None)
        self.slots.discard(sequence_id)

    def _sample(self, row) -> int:
        if not row.samples:
            return -1
        known = list(self.tokens.tokens(row.sequence_id))
        ahead = self.history.get(row.sequence_id, [])
        context = ahead if len(ahead) == row.start + row.length else known
        assert len(context) == row.start + row.length
        sampled = -1 if context[0] == POISON else (context[-1] + 1) % VOCAB_SIZE
        self.history[row.sequence_id] = [*context, sampled]
        return sampled


def make_engine(**options) -> Engine:
    limits = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    config = EngineConfig(model="counting", **{**limits, "num_gpu_blocks_override": 64, **options})
    runner = CountingRunner(num_slots=config.max_num_seqs)
    return Engine(config, config.scheduler(config.num_gpu_blocks_override), runner, LetterTokenizer())


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
