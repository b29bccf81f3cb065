"""From a caller's prompt and parameters to what the engine queues: token ids, limits and block hashes.

Pure and safe on any thread, so that tokenising and hashing stay off the step loop.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Literal, NamedTuple

import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.errors import RequestError
from pagedjax.core.prefix import ROOT_HASH, hash_block, root_hash
from pagedjax.core.request import MAX_PRIORITY, MIN_PRIORITY, Request, SamplingParams
from pagedjax.core.tenants import DEFAULT_TENANT, is_tenant_name
from pagedjax.engine.grammar import GrammarState
from pagedjax.engine.tokenizer import Tokenizer

Pooling = Literal["last", "mean"]


class Submission(NamedTuple):
    """One request, checked and tokenised. `params.max_tokens` is set; `block_hashes` names the prompt's full blocks;
    `grammar` is where structured output begins. With `pooling` the prompt's hidden states are wanted, and no text."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    block_hashes: tuple[bytes, ...]
    tenant: str = DEFAULT_TENANT
    preemptible: bool = True
    cache_salt: str = ""
    grammar: GrammarState | None = None
    pooling: Pooling | None = None

    @property
    def root_hash(self) -> bytes:
        """What the names of its blocks begin with."""
        return root_hash(self.tenant, self.cache_salt)

    def for_scheduler(self, sequence_id: int, fork_of: int | None = None) -> Request:
        """The part that the scheduler sees of one sequence: of the first, or of another that shares its blocks."""
        return Request(
            sequence_id,
            len(self.prompt_token_ids),
            self.params.max_tokens or 1,
            self.priority,
            fork_of,
            needs_confirmation=self.params.beam_width is not None,
            tenant=self.tenant,
            preemptible=self.preemptible,
        )


def submission(
    tokenizer: Tokenizer,
    config: SchedulerConfig,
    prompt: str | list[int],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int = 0,
    tenant: str = DEFAULT_TENANT,
    preemptible: bool = True,
    cache_salt: str = "",
    pooling: Pooling | None = None,
) -> Submission:
    """Check and tokenise one request.

    Without `params.max_tokens` the output may fill the context, or the KV cache if that is smaller. Raises
    RequestError for an empty prompt, token ids outside the vocabulary, a priority outside -8..7 and a tenant's name
    that is none.
    """
    if isinstance(priority, bool) or not isinstance(priority, int) or not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise RequestError(f"priority must be an integer from {MIN_PRIORITY} to {MAX_PRIORITY}", param="priority")
    if not is_tenant_name(tenant):
        raise RequestError("tenant must be a name of 1 to 64 letters, digits and _ . : @ / -", param="tenant")
    if params.beam_width is not None and not preemptible:
        raise RequestError("preemptible false cannot be combined with beam search", param="preemptible")
    if isinstance(prompt, str):
        token_ids, text = tokenizer.encode(prompt, max_len=config.max_model_len), prompt
    else:
        token_ids, text = list(prompt), None
    _check_token_ids(token_ids, params, tokenizer.vocab_size)
    request = Submission(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=token_ids,
        params=params,
        priority=priority,
        block_hashes=hash_blocks(token_ids, config.block_size, root_hash(tenant, cache_salt)),
        tenant=tenant,
        preemptible=preemptible,
        cache_salt=cache_salt,
        pooling=pooling,
    )
    return request if params.max_tokens is not None else within_room(request, config)


def within_room(request: Submission, config: SchedulerConfig) -> Submission:
    """The request with `max_tokens` at most what the context and the KV cache leave behind its prompt, 1 at least."""
    params, prompt_len = request.params, len(request.prompt_token_ids)
    room = max(min(config.max_model_len, config.num_blocks * config.block_size + 1) - prompt_len, 1)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    params = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
    return request._replace(params=params)


def check_queue(requests: Sequence[Submission], config: SchedulerConfig) -> None:
    """Raise RequestError for requests that even an empty queue could not take together: they would wait for ever."""
    _check_share(requests, config.max_queued_requests, config.max_queued_tokens)
    for tenant in {request.tenant for request in requests}:
        _check_share([request for request in requests if request.tenant == tenant], *config.queue_share(tenant))


def _check_share(requests: Sequence[Submission], max_sequences: int, max_tokens: int) -> None:
    num_sequences = sum(request.params.num_samples for request in requests)
    num_tokens = sum(request.params.num_samples * len(request.prompt_token_ids) for request in requests)
    if num_sequences > max_sequences:
        raise RequestError(
            f"You asked for {num_sequences} sequences ({_shape(requests)}), and at most {max_sequences} of yours may "
            "wait (--max-queued-requests); ask for fewer at a time.",
            param="prompt" if len(requests) > 1 else "n",
            code="prompt_exceeds_queue",
        )
    if num_tokens > max_tokens:
        raise RequestError(
            f"You asked for {num_tokens} prompt tokens ({_shape(requests)}), and at most {max_tokens} of yours may "
            "wait (--max-queued-tokens); ask for fewer at a time.",
            param="prompt",
            code="prompt_exceeds_queue",
        )


def hash_blocks(token_ids: list[int], block_size: int, root: bytes = ROOT_HASH) -> tuple[bytes, ...]:
    """The names of a prompt's full blocks, each hashed over the one before it, the first over `root`."""
    data = np.asarray(token_ids, "<i4").tobytes()
    hashes, parent, stride = [], root, 4 * block_size
    for end in range(stride, len(data) + 1, stride):
        parent = hash_block(parent, data[end - stride : end])
        hashes.append(parent)
    return tuple(hashes)


def seed_for(params: SamplingParams, index: int, engine_seed: int, sequence_id: int) -> int:
    """The 64-bit seed of sequence `index` of a request: its own if it has one, else drawn from the engine's."""
    if params.seed is not None:
        return (params.seed + index) % 2**64
    return int.from_bytes(sha256(f"{engine_seed}/{sequence_id}".encode()).digest()[:8], "little")


def _shape(requests: Sequence[Submission]) -> str:
    num_prompts = len(requests)
    most = max((request.params for request in requests), key=lambda params: params.num_samples)
    name = "n" if most.num_samples == most.n else "best_of"
    return f"{num_prompts} prompt{'s' * (num_prompts > 1)} with {name}={most.num_samples}"


def _check_token_ids(token_ids: list[int], params: SamplingParams, vocab_size: int) -> None:
    if not token_ids:
        raise RequestError("the prompt is empty: it must hold at least one token", param="prompt")
    # The whole list in a fifth of the time; what is wrong, or no plain int, is looked at one by one.
    are_sound = set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size
    for token_id in () if are_sound else token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise RequestError(f"{token_id!r} is not a token id; they lie in 0..{vocab_size - 1}", param="prompt")
    for name in ("logit_bias", "stop_token_ids"):
        for token_id in getattr(params, name) or ():
            if token_id >= vocab_size:
                raise RequestError(f"{name}: {token_id} is not a token id below {vocab_size}", param=name)
