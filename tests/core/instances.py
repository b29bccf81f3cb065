"""The instances that are searched: small ones to their last state, and large ones as far as time allows."""

from tests.core.model import Asked, Instance

GOLD = Asked((1, 2, 3), 2, 0, "gold")
IRON = Asked((4, 5), 3, -1, "iron")  # of a better priority
BEAM = Asked((1, 2, 3), 3, 0, "gold", is_beam=True)

SMALL = (
    # Hardly room for both: the second takes the blocks of the first, once its slice is over.
    Instance("way", (GOLD._replace(max_tokens=3), IRON), {"num_blocks": 3}, 0, 0),
    Instance("failure", (GOLD, IRON), {"num_blocks": 3}, num_aborts=0),
    # A prefix in common, and one slot: whoever must wait is swapped.
    Instance("slot", (GOLD, Asked((1, 2, 4), 2, -1, "iron")), {"num_blocks": 4, "max_num_seqs": 1}, num_aborts=0),
    Instance("age", (GOLD, Asked((4, 5), 2, 1, "gold")), {"num_blocks": 3}, 0, 0, slices_to_age=2),
    Instance(
        "fork", (Asked((1, 2, 3), 3), Asked((1, 2, 3), 3, is_fork=True)), {"num_host_blocks": 2}, 1, 1, waits=False
    ),
    # Two lower tiers, neither with room for all.
    Instance("disk", (GOLD, IRON), {"num_blocks": 3, "num_host_blocks": 1, "num_disk_blocks": 1}, 0, 1),
    Instance("reserved", (GOLD._replace(preemptible=False), IRON), {"num_blocks": 3}, 0, 2),
    Instance("plain", (GOLD._replace(named=False), IRON), {"num_blocks": 3, "num_host_blocks": 0}, 0, 1),
    # Shares are judged by a few tokens, so that protection comes and goes.
    Instance("owed", (GOLD, Asked((4, 5), 3, 0, "iron")), {"num_blocks": 3}, 0, 0, min_sample=4),
    # While one of a tenant that is owed runs and one is in line, a third of a better priority comes.
    Instance(
        "owed three",
        (
            Asked((1, 2, 6, 7), 1, 0, "gold"),
            Asked((3,), 1, 1, "iron"),
            Asked((4,), 2, 0, "iron"),
            Asked((5,), 1, -1, "iron"),
        ),
        {"max_num_seqs": 1, "async_scheduling": False, "time_slice": 0},
        0,
        0,
        waits=False,
        min_sample=4,
    ),
    # One slot and one priority: the tenants' counters say whose turn it is.
    Instance(
        "turns",
        (
            Asked((1, 2), 1, 0, "gold"),
            Asked((3,), 2, 0, "gold"),
            Asked((4, 5, 6), 1, 0, "iron"),
            Asked((7,), 1, 0, "iron"),
        ),
        {"max_num_seqs": 1, "async_scheduling": False},
        0,
        0,
        waits=False,
    ),
    # A tenant of great weight is far behind when a step fails: it gets back in line, and its credit is a small part.
    Instance(
        "credit",
        (Asked((4,), 1, 0, "iron"), Asked((5,), 1, 0, "iron"), Asked((1, 2), 1, 0, "gold")),
        {"max_num_seqs": 1, "async_scheduling": False, "tenant_weights": (("gold", 10_000),)},
        1,
        0,
        waits=False,
    ),
    Instance("late", (GOLD, IRON), {"num_blocks": 3, "preemption_mode": "conservative"}, 0, 0),
    # Beams, with hardly slots and blocks for two and the other; or with one slot, so that they await choices in line.
    Instance("beams", (BEAM, IRON._replace(max_tokens=2)), {"num_host_blocks": 2}, 0, 0, num_forks=2, waits=False),
    Instance("beams in turn", (BEAM,), {"num_host_blocks": 2, "max_num_seqs": 1}, 1, 0, num_forks=2, waits=False),
    # Tokens are forced behind a sampled one: a step in flight samples what is known, and blocks are short for the run.
    Instance("forced", (GOLD._replace(max_tokens=5), IRON), {"num_blocks": 5}, 0, 1, num_runs=2, waits=False),
    Instance("forced failure", (GOLD._replace(max_tokens=4), IRON), {"num_blocks": 4}, 1, 0, num_runs=1, waits=False),
    # Blocks of four, so that a sample finds its parent's tail with room behind it, and both write there.
    Instance(
        "tail",
        (Asked((1, 2, 3, 4, 5), 3), Asked((1, 2, 3, 4, 5), 3, is_fork=True)),
        {"block_size": 4, "max_num_batched_tokens": 8, "max_model_len": 12},
        0,
        1,
        waits=False,
    ),
    # All of the second prompt is cached, but its last token must be computed.
    Instance("twin", (Asked((1, 2, 3, 4), 2), Asked((1, 2, 3, 4), 2, 0, "iron")), {}, 0, 1, waits=False),
    # The second prompt begins with what the first leaves of a step, and goes on with two blocks at once.
    Instance("chunk", (GOLD, Asked((4, 5, 6, 7, 8), 1)), {"num_blocks": 5}, 0, 0, waits=False),
    # There are slots and blocks for both, but the first prompt takes all tokens of three steps.
    Instance(
        "tokens",
        (Asked((1, 2, 3, 4, 5), 1, 0, "gold"), Asked((6,), 2, -1, "iron")),
        {"max_num_seqs": 2, "max_num_batched_tokens": 2, "async_scheduling": False},
        0,
        1,
    ),
    # Two slots: those who make way for two prompts with one prefix, of which the second awaits the first.
    Instance(
        "burst",
        (Asked((1,), 2, 1, "gold"), Asked((2,), 2, 1, "gold"), Asked((3, 4, 5), 1), Asked((3, 4, 6), 1)),
        {"max_num_seqs": 2, "async_scheduling": False},
        0,
        0,
    ),
    # The first two crowd the third out; when the second stops, it comes back before the first has what it needs.
    Instance(
        "three",
        (Asked((1,), 5), Asked((2,), 3), Asked((3, 4, 5), 2, 1)),
        {"max_num_seqs": 3, "async_scheduling": False},
        0,
        0,
        waits=False,
    ),
)

# Three requests of two tenants, six blocks and three of the host, block size 2, lengths up to three blocks; two begin
# with the same block. `full` takes every transition; the others add to it what would make it too large all at once.
_ASKED = (Asked((1, 2, 3), 3, 0, "gold"), Asked((1, 2, 4, 5), 3, 0, "gold"), Asked((6, 7, 8), 4, -1, "iron"))
_LIMITS = {"num_blocks": 6, "num_host_blocks": 3, "max_num_seqs": 3}
LARGE = (
    Instance("full", _ASKED, _LIMITS, num_aborts=1),
    Instance("full aborts", _ASKED, _LIMITS, num_failures=0),
    Instance("full failures", _ASKED, _LIMITS, num_failures=2, num_aborts=0),
    Instance("full ages", _ASKED, _LIMITS, 0, 1, slices_to_age=1),
    Instance("full disk", _ASKED, _LIMITS | {"num_host_blocks": 2, "num_disk_blocks": 1}, num_aborts=0),
    Instance("full forks", (*_ASKED[:1], _ASKED[0]._replace(is_fork=True), _ASKED[2]), _LIMITS, num_aborts=0),
    Instance("full beams", (BEAM, IRON._replace(max_tokens=2)), {"num_host_blocks": 2}, 1, 1, num_forks=2, waits=False),
    Instance("full forced", _ASKED, _LIMITS, num_failures=0, num_aborts=1, num_runs=2),
    Instance("full fair", tuple([one._replace(priority=0) for one in _ASKED]), _LIMITS, num_aborts=0),
)
INSTANCES = {instance.name: instance for instance in (*SMALL, *LARGE)}
