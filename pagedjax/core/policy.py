"""Who goes first, who must give way, and how much room a sequence needs: the rules that planning applies."""

from collections.abc import Sequence as Rows

from pagedjax.core.blocks import BlockPool, num_given_free
from pagedjax.core.config import num_blocks_for
from pagedjax.core.state import Phase, Sequence


def can_run(sequence: Sequence) -> bool:
    """Whether a running sequence has a token to compute. One that has sampled its last token only awaits it."""
    num_sampled = sequence.num_expected - sequence.request.prompt_len
    return sequence.phase is Phase.RUNNING and num_sampled < sequence.request.max_tokens


def victim_index(running: Rows[Sequence], beneficiary: int) -> int | None:
    """Who gives up its blocks for `running[beneficiary]` (best rank first in `running`): the lowest rank that still
    runs, the beneficiary itself if nobody ranks below it, and never the top."""
    for index in range(len(running) - 1, max(beneficiary, 1) - 1, -1):
        if running[index].phase is Phase.RUNNING:
            return index
    return None


def num_blocks_coming(running: Rows[Sequence], pool: BlockPool) -> int:
    """Blocks that sequences on their way out will free when the steps in flight are done."""
    return sum(num_given_free(pool, s.blocks) for s in running if s.phase is not Phase.RUNNING)


def num_blocks_to_admit(sequence: Sequence, block_size: int) -> int:
    """Blocks that must be there before a sequence is (re)admitted: its whole context and one block of headroom, so
    that it is not preempted again at its next token; never more than it can use."""
    return num_blocks_for(min(sequence.num_tokens + block_size, max(sequence.max_len, sequence.num_tokens)), block_size)


def num_blocks_promised(running: Rows[Sequence], block_size: int) -> int:
    """Blocks that admitted prompts still lack because their later chunks have not been planned yet."""
    return sum(
        max(0, num_blocks_for(s.num_expected, block_size) - len(s.blocks))
        for s in running
        if s.phase is Phase.RUNNING and s.num_expected - s.num_planned > 1
    )
