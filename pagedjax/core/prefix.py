"""Prefix caching: blocks with equal contents after equal prefixes are computed once and shared.

A block's name is a hash chain, sha256(parent's name, the block's token ids), so equal names mean equal whole prefixes.
The last token of a context is never taken from the cache: its logits are needed to sample the next one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

from pagedjax.core.blocks import BlockPool
from pagedjax.core.errors import SchedulerError
from pagedjax.core.tenants import DEFAULT_TENANT

ROOT_HASH = b"pagedjax"


@dataclass(frozen=True, slots=True)
class Filled(Mapping[bytes, int]):
    """The named blocks that a plan in flight fills: name -> block id.

    It never changes, so it is a dict that compares, hashes and travels. (An `immutables.Map` takes 0.8 us a name to
    make: half of the time of planning a long prompt.)
    """

    block_ids: dict[bytes, int]

    def __len__(self) -> int:
        return len(self.block_ids)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.block_ids)

    def __getitem__(self, name: bytes) -> int:
        return self.block_ids[name]

    def __contains__(self, name: object) -> bool:
        return name in self.block_ids

    def __hash__(self) -> int:
        return hash(frozenset(self.block_ids.items()))


def root_hash(tenant: str, salt: str = "") -> bytes:
    """What a tenant's chains of names begin with: no tenant finds, or learns of, the prompts of another. Nor does one
    who gives another `salt`."""
    root = ROOT_HASH if tenant == DEFAULT_TENANT else sha256(ROOT_HASH + b" tenant " + tenant.encode()).digest()
    return sha256(root + b" salt " + salt.encode("utf-8", "surrogatepass")).digest() if salt else root


def hash_block(parent: bytes, token_bytes: bytes) -> bytes:
    """The name of a full block: `parent` names the block before it (`root_hash` for the first);
    `token_bytes` are its token ids as little-endian int32."""
    return sha256(parent + token_bytes).digest()


def check_names(sequence_id: int, names: tuple[bytes, ...], num_tokens: int, block_size: int) -> None:
    """Raise SchedulerError unless every full block of so many tokens has a name, or none has."""
    num_full = num_tokens // block_size
    if names and len(names) != num_full:
        raise SchedulerError(f"sequence {sequence_id} has {num_full} full blocks and {len(names)} names")


def max_prefix_blocks(num_tokens: int, block_size: int) -> int:
    """How many leading blocks a context of `num_tokens` may take from the cache."""
    return (num_tokens - 1) // block_size


def longest_prefix(pool: BlockPool, pending: tuple[Filled, ...], names: tuple[bytes, ...]) -> tuple[int, ...]:
    """The blocks of the longest run of leading `names` that are cached, or that a plan in flight is computing."""
    known = (pool.cached, *pending)
    found: list[int] = []
    for name in names:
        for blocks in known:
            if name in blocks:
                found.append(blocks[name])
                break
        else:
            break
    return tuple(found)
