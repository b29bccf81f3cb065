"""Bugs to plant in the scheduler on purpose: (module, name, what takes its place there).

The checks of the random worlds must catch all of MUTANTS, and the search of all orders of events those that its small
instances can express; MUTANTS_FOR_SEARCH are seen by the search alone, of the instance that they name. Run as a
program, this says who catches which: `make mutants`.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pagedjax.core import (
    admission,
    arriving,
    choosing,
    confirming,
    failing,
    forking,
    leaving,
    parking,
    planning,
    resuming,
    scheduler,
    transfers,
    waiting,
    yielding,
)
from pagedjax.core.blocks import register, take
from pagedjax.core.config import num_blocks_for
from pagedjax.core.events import TransferDone
from pagedjax.core.phases import Cause, Phase, next_phase
from pagedjax.core.tenants import account
from pagedjax.core.tiers import Copy, give_copies
from tests.core.instances import SMALL
from tests.core.search import search
from tests.core.world import random_world

NUM_WORLDS = 60


def leak_all(give):
    return lambda pool, blocks, names: pool


def leak_one_block(give):
    return lambda pool, blocks, names: give(pool, blocks[:-1], names)


def free_twice(give):
    return lambda pool, blocks, names: give(give(pool, blocks, names), blocks[:1], names[:1])


def forget_names(give):
    return lambda pool, blocks, names: give(pool, blocks, ())


def share_without_counting(share):
    return lambda pool, blocks: pool


def share_without_leaving_the_idle_queue(share):
    return lambda pool, blocks: share(pool, blocks)._replace(idle=pool.idle, idle_tickets=pool.idle_tickets)


def take_one_block_too_few(take):
    return lambda pool, num_blocks: take(pool, max(0, num_blocks - 1))


def take_the_same_block_twice(take):
    def mutant(pool, num_blocks):
        pool, blocks = take(pool, num_blocks)
        return pool, blocks[:1] * len(blocks)

    return mutant


def wrong_victim(victim_index):
    return lambda running, beneficiary, excess: next(
        (i for i, s in enumerate(running) if s.phase is Phase.RUNNING), None
    )


def victim_is_always_the_beneficiary(victim_index):
    return lambda running, beneficiary, excess: beneficiary if running[beneficiary].phase is Phase.RUNNING else None


def free_a_victim_in_flight_at_once(preempt):
    def mutant(batch, running, index, pool, tiers):
        pool, tiers = preempt(batch, running, index, pool, tiers)
        if running[index].blocks:
            pool, tiers, effects = parking.park(pool, tiers, running[index], batch.order.config)
            batch.effects.extend(effects)
            running[index] = running[index]._replace(blocks=())
        return pool, tiers

    return mutant


def admit_without_headroom(num_blocks_to_admit):
    return lambda sequence, order: num_blocks_for(sequence.num_tokens, order.config.block_size)


def reuse_the_last_token(max_prefix_blocks):
    return lambda num_tokens, block_size: num_tokens // block_size


def wrong_prefix(longest_prefix):
    return lambda pool, pending, names: tuple(reversed(longest_prefix(pool, pending, names)))


def stale_prefix(longest_prefix):
    def mutant(pool, pending, names):
        found = longest_prefix(pool, pending, names)
        return (*found, *pool.idle_tickets)[: len(names)] if found else found

    return mutant


def share_too_short_a_prefix_of_names(longest_prefix):
    return lambda pool, pending, names: longest_prefix(pool, pending, names[1:])


def register_before_done(plan_step):
    def mutant(state):
        state, effects = plan_step(state)
        if effects and state.pending:
            state = state._replace(pool=register(state.pool, state.pending[-1].items()))
        return state, effects

    return mutant


def register_under_a_neighbour_s_name(filled_blocks):
    def mutant(*args):
        named = filled_blocks(*args)
        return list(zip([name for name, _ in named], [block_id for _, block_id in named[1:] + named[:1]]))

    return mutant


def lose_the_preempted(park):
    return lambda line, sequence: line


def stale_length_after_preemption(back_in_line):
    return lambda sequence, now_us: back_in_line(sequence, now_us)._replace(num_tokens=sequence.request.prompt_len)


def last_in_line_after_preemption(park):
    return waiting.enqueue


def admit_and_leave_in_line(remove):
    return lambda line, sequence: line


def drop_accepted_tokens(accept):
    return lambda s, row, result, config: accept(s, row, result, config)._replace(num_tokens=s.num_tokens)


def count_one_step_too_many_in_flight(accept):
    return lambda s, row, result, config: accept(s, row, result, config)._replace(num_in_flight=s.num_in_flight)


def compute_what_is_computed_already(plan_row):
    def mutant(batch, sequence, *args):
        back = max(0, sequence.num_planned - 1)
        return plan_row(batch, sequence._replace(num_planned=back), *args)

    return mutant


def finish_at_once_though_in_flight(drain):
    def mutant(state, **options):
        leaves = [s for s in state.running if s.phase is Phase.ABORTING]
        running = tuple(s._replace(num_in_flight=0) if s in leaves else s for s in state.running)
        return drain(state._replace(running=running), **options)

    return mutant


def forget_the_abort(abort):
    return lambda sequence: sequence


def plan_the_aborted(abort):
    return lambda s: s._replace(phase=next_phase(next_phase(Phase.WAITING, Cause.ADMIT), Cause.PREEMPT))


def never(question):
    return lambda *args: False


def move_to_each_other_s_blocks(swap_out):
    def mutant(*args):
        tiers, effects = swap_out(*args)
        return tiers, tuple(
            e._replace(moves=tuple(zip([d for d, _ in e.moves][::-1], [b for _, b in e.moves]))) for e in effects
        )

    return mutant


def gather_nothing(swap_out):
    return lambda *args: (swap_out(*args)[0], ())


def discard_nothing(cancel_fetch):
    return lambda *args: (cancel_fetch(*args)[0], ())


def keep_all_copies(give_up_copies):
    return lambda tiers, parked: tiers


def forget_nothing(forget):
    return lambda pool, names: pool


def keep_in_transfer(end_transfer):
    return lambda tiers, transfer_id: tiers._replace(transfers=tiers.transfers.delete(transfer_id))


def trust_what_is_lost(give_up_lost):
    return lambda tiers, *args: tiers


def take_a_failure_for_success(failed):
    return lambda state, transfer_id, transfer: transfers.transfer_done(
        state, TransferDone(transfer_id, True, state.now_us)
    )


def scatter_nothing(land):
    return lambda state, rows: (land(state, rows)[0], ())


def scatter_to_each_other_s_blocks(start_fetch):
    def mutant(*args):
        pool, tiers, sequence, effects = start_fetch(*args)
        parked = tiers.parked[sequence.sequence_id]
        scatters = tuple(
            s._replace(pairs=tuple((i, b) for (i, _), (_, b) in zip(s.pairs, s.pairs[::-1]))) for s in parked.scatters
        )
        parked = parked._replace(scatters=scatters)
        return pool, tiers._replace(parked=tiers.parked.set(sequence.sequence_id, parked)), sequence, effects

    return mutant


def count_partial_blocks_as_full(num_tokens_in):
    return lambda num_blocks, parked, block_size: num_blocks * block_size


def copy_the_other_way(with_own_tail):
    def mutant(*args):
        pool, sequence, (source, target) = with_own_tail(*args)
        return pool, sequence, (target, source)

    return mutant


def write_a_shared_prompt(start_of_fork):
    return lambda *args: start_of_fork(*args)._replace(writes=True)


def keep_the_lost_cache(make_pool):
    def mutant(num_blocks):
        return take(make_pool(num_blocks), 1)[0]

    return mutant


def go_on_as_if_nothing_had_happened(marked):
    return lambda sequence, guilty: sequence


def free_what_is_in_transfer(start_transfer):
    def mutant(tiers, transfer):
        tiers, transfer_id = start_transfer(tiers, transfer)
        copies = [Copy(transfer.tier, block_id) for block_id in transfer.block_ids]
        return give_copies(tiers, copies, transfer.names), transfer_id

    return mutant


def ignore_the_transfer(transfer_done):
    return lambda state, event: (state, ())


def drop_a_dirty_block(reserve_copies):
    def mutant(tiers, names):
        tiers, copies, moves = reserve_copies(tiers, names)
        return tiers, copies, moves[:-1]

    return mutant


def charge_twice(charge):
    return lambda tenants, service: charge(charge(tenants, service), service)


def refund_nothing(charged):
    return lambda state, plan, results: state.tenants


def sample_known_tokens_too(is_due):
    return lambda sequence, row: row.samples


def forget_who_pays_for_forced_tokens(charged):
    return lambda state, plan, results: charged(state, plan, tuple([r._replace(num_accepted=1) for r in results]))


def break_reservations(num_blocks_reserved):
    return lambda running, block_size: 0


def charge_somebody_else(charge):
    def mutant(tenants, service):
        names = sorted(tenants.accounts)
        return charge(tenants, {names[names.index(name) - 1]: num for name, num in service.items()})

    return mutant


def bank_credit(enter):
    def mutant(tenants, name, *args):
        after = enter(tenants, name, *args)
        own = account(tenants, name).counter
        return after._replace(accounts=after.accounts.set(name, after.accounts[name]._replace(counter=own)))

    return mutant


def forget_who_was_in_line(leave):
    return lambda tenants, before, after: leave(tenants, before, after)._replace(last_counter=0)


def hold_without_counting(hold_copies):
    return lambda tiers, names: (tiers, hold_copies(tiers, names)[1])


def await_nothing(await_writes):
    return lambda tiers, sequence_id, copies: tiers


def settle_nothing(settle):
    return lambda state, sequence_id: state


def share_no_tails(add_children):
    return lambda *args: add_children(*args)._replace(shared_tails=frozenset())


def keep_all_forks(leave_for_slots):
    return lambda state, results: (state, ())


def fork_too_long(child_of):
    def mutant(*args):
        one = child_of(*args)
        return one._replace(num_tokens=one.num_tokens + 1, num_expected=one.num_expected + 1)

    return mutant


def reserve_for_forks(child_of):
    return lambda parent, *args: child_of(parent, *args)._replace(stay=parent.stay._replace(reserved=True))


def lose_forks_in_line(with_child_in_line):
    return lambda state, parent, fork: state


def choose_for_the_running_only(choose):
    def mutant(state, choices):
        running = {s.sequence_id for s in state.running}
        return choose(state, tuple(choice for choice in choices if choice.sequence_id in running))

    return mutant


def preempt_the_reserved(candidates):
    def mutant(running, order, best):
        return candidates([s._replace(stay=s.stay._replace(reserved=False)) for s in running], order, best)

    return mutant


def preempt_impatiently(may_preempt):
    return lambda waiter, grade, order: True


def preempt_who_is_owed(candidates):
    def mutant(running, order, best):
        blind = order._replace(config=replace(order.config, preemption_strategy="priority"), protected={})
        return candidates(running, blind, (True, *best[1:]))

    return mutant


MUTANTS = [
    (leaving, "give", leak_all),
    (leaving, "give", leak_one_block),
    (leaving, "give", free_twice),
    (leaving, "give", forget_names),
    (parking, "give", leak_one_block),
    (parking, "give", free_twice),
    (parking, "give", leak_all),
    (admission, "share", share_without_counting),
    (admission, "share", share_without_leaving_the_idle_queue),
    (planning, "take", take_one_block_too_few),
    (planning, "take", take_the_same_block_twice),
    (planning, "victim_index", wrong_victim),
    (planning, "victim_index", victim_is_always_the_beneficiary),
    (planning, "_preempt", free_a_victim_in_flight_at_once),
    (admission, "num_blocks_to_admit", admit_without_headroom),
    (resuming, "max_prefix_blocks", reuse_the_last_token),
    (resuming, "longest_prefix", wrong_prefix),
    (resuming, "longest_prefix", stale_prefix),
    (resuming, "longest_prefix", share_too_short_a_prefix_of_names),
    (scheduler, "plan_step", register_before_done),
    (confirming, "_filled_blocks", register_under_a_neighbour_s_name),
    (waiting, "park", lose_the_preempted),
    (waiting, "park", last_in_line_after_preemption),
    (waiting, "remove", admit_and_leave_in_line),
    (leaving, "back_in_line", stale_length_after_preemption),
    (confirming, "_accept", drop_accepted_tokens),
    (confirming, "_accept", count_one_step_too_many_in_flight),
    (planning, "plan_row", compute_what_is_computed_already),
    (confirming, "drain", finish_at_once_though_in_flight),
    (scheduler, "_abort", forget_the_abort),
    (scheduler, "_abort", plan_the_aborted),
    (resuming, "share", share_without_counting),
    (parking, "is_being_written", never),
    (parking, "_swap_out", move_to_each_other_s_blocks),
    (parking, "_swap_out", gather_nothing),
    (parking, "_give_up_copies", keep_all_copies),
    (parking, "forget", forget_nothing),
    (transfers, "end_transfer", keep_in_transfer),
    (transfers, "_give_up_lost", trust_what_is_lost),
    (transfers, "_failed", take_a_failure_for_success),
    (planning, "land", scatter_nothing),
    (admission, "start_fetch", scatter_to_each_other_s_blocks),
    (resuming, "_num_tokens_in", count_partial_blocks_as_full),
    (planning, "writes_shared_tail", never),
    (planning, "with_own_tail", copy_the_other_way),
    (admission, "awaits_parent", never),
    (admission, "start_of_fork", write_a_shared_prompt),
    (forking, "share", share_without_counting),
    (failing, "make_pool", keep_the_lost_cache),
    (failing, "_marked", go_on_as_if_nothing_had_happened),
    (parking, "start_transfer", free_what_is_in_transfer),
    (resuming, "start_transfer", free_what_is_in_transfer),
    (scheduler, "transfer_done", ignore_the_transfer),
    (parking, "reserve_copies", drop_a_dirty_block),
    (planning, "num_blocks_reserved", break_reservations),
    (yielding, "is_shielded", never),
    (yielding, "_candidates", preempt_the_reserved),
    (yielding, "_may_preempt", preempt_impatiently),
    (transfers, "settle", settle_nothing),
    (confirming, "add_children", share_no_tails),
    (confirming, "leave_for_slots", keep_all_forks),
    (forking, "child_of", fork_too_long),
    (forking, "child_of", reserve_for_forks),
    (leaving, "enter", bank_credit),
]
MUTANTS_FOR_SEARCH = [
    (planning, "charge", charge_twice, "way"),
    (planning, "charge", charge_somebody_else, "way"),
    (parking, "hold_copies", hold_without_counting, "slot"),
    (parking, "await_writes", await_nothing, "slot"),
    (transfers, "forget", forget_nothing, "failure"),
    (parking, "_cancel_fetch", discard_nothing, "failure"),
    (arriving, "enter", bank_credit, "turns"),
    (planning, "leave", forget_who_was_in_line, "turns"),
    (confirming, "_charged", refund_nothing, "way"),
    (confirming, "_charged", forget_who_pays_for_forced_tokens, "forced"),
    (confirming, "_is_due", sample_known_tokens_too, "forced"),
    (yielding, "_candidates", preempt_who_is_owed, "owed three"),
    (planning, "is_stuck", never, "beams"),
    (choosing, "_with_child_in_line", lose_forks_in_line, "beams in turn"),
    (confirming, "choose", choose_for_the_running_only, "beams"),
]


@contextmanager
def planted(module: Any, name: str, mutate: Any) -> Iterator[None]:
    right = getattr(module, name)
    setattr(module, name, mutate(right))
    try:
        yield
    finally:
        setattr(module, name, right)


def run_worlds() -> None:
    for seed in range(NUM_WORLDS):
        random_world(seed, num_events=120)


def run_search() -> None:
    for instance in SMALL:
        search(instance)


DETECTORS = {"random worlds": run_worlds, "search": run_search}


def who_catches(module: Any, name: str, mutate: Any) -> dict[str, str]:
    """Each detector that catches the planted bug, and how."""
    caught = {}
    for detector, run in DETECTORS.items():
        with planted(module, name, mutate):
            try:
                run()
            except Exception as error:  # whatever a planted bug comes to
                caught[detector] = str(error).splitlines()[0] if str(error) else type(error).__name__
    return caught


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of mutants (default: all)")
    args = parser.parse_args()
    num_missed, start = 0, time.monotonic()
    for module, name, mutate in [*MUTANTS, *(mutant[:3] for mutant in MUTANTS_FOR_SEARCH)]:
        if args.names and mutate.__name__ not in args.names:
            continue
        caught = who_catches(module, name, mutate)
        num_missed += not caught
        where = f"{module.__name__.rpartition('.')[2]}.{name}"
        told = "; ".join(f"{detector}: {how}" for detector, how in caught.items()) or "CAUGHT BY NOBODY"
        print(f"{mutate.__name__} ({where}): {told}", flush=True)
    print(f"{num_missed} caught by nobody, {time.monotonic() - start:.0f} s")
    sys.exit(num_missed > 0)


if __name__ == "__main__":
    main()
