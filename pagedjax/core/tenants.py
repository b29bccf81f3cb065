"""Tenants: who has been served how much, and whose turn it is.

Fair sharing after VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI'24). *Service* is measured in
service tokens: a prompt token costs 1 when its computation is planned, a sampled or forced token 2. What a sequence has
computed before costs nothing when it is computed again, and a sampled token that is thrown away is refunded. A tenant's
*counter* grows by service / weight, so the tenant with the least counter has the next turn.

A tenant is *backlogged* while it has somebody in line. Whoever becomes backlogged starts at no less than the least
backlogged counter (the last tenant's to leave the line, if nobody is), so idle time earns no credit. A tenant of which
somebody runs was not idle, its line was only short: it may start below that by a *credit* of about one request. Else
one with a single request in line would lose, each time that it is admitted, what it is behind by then.
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from immutables import Map

DEFAULT_TENANT = "default"
PROMPT_COST, SAMPLE_COST = 1, 2
# Counters are integers, so that they compare and hash alike everywhere: service times this over the weight.
SCALE = 1 << 20
WINDOW = 100_000
MIN_SAMPLE = 1_000
NUM_OUTPUTS, MIN_OUTPUTS, GUESSED_OUTPUT = 100, 20, 256
MAX_TENANTS = 256

_NAME = re.compile(r"[\w.:@/-]{1,64}", re.ASCII)

Weights = tuple[tuple[str, int], ...]


class Mark(NamedTuple):
    """A moment, told in service tokens: those of all tenants, and this tenant's."""

    total: int = 0
    own: int = 0


class Tenant(NamedTuple):
    """One tenant's account. `since` and `halfway` are where its share is measured from: see `share`. `outputs` are the
    lengths of its latest finished outputs, in tokens."""

    weight: int = 1
    counter: int = 0
    service: int = 0
    since: Mark = Mark()
    halfway: Mark = Mark()
    last_backlogged: int = 0
    outputs: tuple[int, ...] = ()


class Tenants(NamedTuple):
    """All accounts, the service of all together, and the counter of the tenant that left the line last."""

    accounts: Map[str, Tenant] = Map()
    total: int = 0
    last_counter: int = 0


def is_tenant_name(name: object) -> bool:
    """Whether it is 1 to 64 letters, digits and _ . : @ / -"""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def account(tenants: Tenants, name: str) -> Tenant:
    """The tenant's account; one that is not known has the weight 1 and no service."""
    return tenants.accounts.get(name, _NEW)


def counter(tenants: Tenants, name: str, num_planned: int = 0) -> int:
    """Its virtual counter, as it will be with another `num_planned` service tokens."""
    tenant = tenants.accounts.get(name, _NEW)
    return tenant.counter + num_planned * SCALE // tenant.weight


def enter(tenants: Tenants, name: str, backlogged: Collection[str], weights: Weights, credit: int = 0) -> Tenants:
    """Somebody of this tenant gets in line; `backlogged` are those who have somebody there already. It may be behind by
    `credit` service tokens."""
    if name in backlogged:
        return tenants
    accounts, total = tenants.accounts, tenants.total
    if name not in accounts:
        accounts = _forget_idle(tenants, backlogged, dict(weights))
    tenant = accounts.get(name) or Tenant(dict(weights).get(name, 1))
    least = min((accounts[other].counter for other in backlogged), default=tenants.last_counter)
    least -= credit * SCALE // tenant.weight
    start = Mark(total, tenant.service)
    tenant = tenant._replace(counter=max(tenant.counter, least), since=start, halfway=start, last_backlogged=total)
    return tenants._replace(accounts=accounts.set(name, tenant))


def leave(tenants: Tenants, before: Collection[str], after: Collection[str]) -> Tenants:
    """Of the tenants that were backlogged before, some may have nobody in line any more."""
    if len(before) == len(after):
        return tenants
    leavers = [(name, tenants.accounts[name]) for name in before if name not in after]
    accounts = tenants.accounts.mutate()
    for name, tenant in leavers:
        accounts[name] = tenant._replace(last_backlogged=tenants.total)
    return tenants._replace(accounts=accounts.finish(), last_counter=min(tenant.counter for _, tenant in leavers))


def charge(tenants: Tenants, service: Mapping[str, int]) -> Tenants:
    """Book the service tokens of one step, by tenant. Negative ones are refunds: of sampled tokens thrown away."""
    accounts = tenants.accounts.mutate()
    total = tenants.total + sum(service.values())
    for name, num_tokens in service.items():
        accounts[name] = _booked(accounts.get(name, _NEW), num_tokens, total)
    return tenants._replace(accounts=accounts.finish(), total=total)


def share(tenants: Tenants, name: str) -> tuple[int, int]:
    """The tenant's service and that of all, over the last 50,000 to 100,000 service tokens in which it was backlogged.

    Counted from a moment that moves on by half a window, and never from before the tenant last entered the line:
    what others got while it was idle is not owed to it.
    """
    tenant = account(tenants, name)
    return tenant.service - tenant.since.own, tenants.total - tenant.since.total


def is_owed(tenants: Tenants, name: str, total_weight: int, threshold: float) -> bool:
    """Whether the tenant's share is more than `threshold` below the fair one, which is its weight's part of the
    `total_weight` in use. A share of less than MIN_SAMPLE service tokens tells nothing."""
    own, total = share(tenants, name)
    if total < MIN_SAMPLE:
        return False
    return own * total_weight < (1 - threshold) * account(tenants, name).weight * total


def weight_in_use(tenants: Tenants, backlogged: Collection[str]) -> int:
    """The sum of the weights of all tenants that were backlogged within the last WINDOW service tokens."""
    return sum(
        tenant.weight
        for name, tenant in tenants.accounts.items()
        if name in backlogged or tenants.total - tenant.last_backlogged < WINDOW
    )


def ended(tenants: Tenants, name: str, output_len: int) -> Tenants:
    """An output of the tenant has come to its end."""
    tenant = account(tenants, name)
    tenant = tenant._replace(outputs=(*tenant.outputs[1 - NUM_OUTPUTS :], output_len))
    return tenants._replace(accounts=tenants.accounts.set(name, tenant))


def expected_output(tenants: Tenants, name: str) -> int:
    """Tokens within which nine of ten of the tenant's outputs end; a guess until there are enough of them."""
    outputs = account(tenants, name).outputs
    if len(outputs) < MIN_OUTPUTS:
        return GUESSED_OUTPUT
    return sorted(outputs)[-(-9 * len(outputs) // 10) - 1]


def reweighted(tenants: Tenants, weights: Weights) -> Tenants:
    """The same accounts under new weights. What has been counted stays as it is."""
    accounts = tenants.accounts.mutate()
    for name, tenant in tenants.accounts.items():
        accounts[name] = tenant._replace(weight=dict(weights).get(name, 1))
    return tenants._replace(accounts=accounts.finish())


def _booked(tenant: Tenant, num_tokens: int, total: int) -> Tenant:
    service, since, halfway = tenant.service + num_tokens, tenant.since, tenant.halfway
    if total - halfway.total >= WINDOW // 2:
        since, halfway = halfway, Mark(total, service)
    return tenant._replace(
        counter=tenant.counter + num_tokens * SCALE // tenant.weight, service=service, since=since, halfway=halfway
    )


def _forget_idle(tenants: Tenants, backlogged: Collection[str], weights: Mapping[str, int]) -> Map[str, Tenant]:
    """Keep the accounts bounded, whatever names callers think of: drop those idle for a whole window."""
    if len(tenants.accounts) < MAX_TENANTS:
        return tenants.accounts
    accounts = tenants.accounts.mutate()
    for name, tenant in tenants.accounts.items():
        if name not in weights and name not in backlogged and tenants.total - tenant.last_backlogged >= WINDOW:
            del accounts[name]
    return accounts.finish()


_NEW = Tenant()
