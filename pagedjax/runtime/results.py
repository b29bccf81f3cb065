"""What a step gives: device values while it runs, then arrays on the host."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from pagedjax.runtime import sampler
from pagedjax.runtime.batch import DeviceBatch
from pagedjax.runtime.sampler import FAULTY, Scores


class PromptScores(NamedTuple):
    """Log-probabilities of the prompt tokens at positions `start` and on."""

    start: int
    scores: Scores


class StepResult(NamedTuple):
    """What a step gave, by the plan's rows. (NamedTuple, as is the handle: one of each is made per step.)

    `ids` are -1 where a row does not sample, and where it is `faulty`: its logits were not finite, and only that
    sequence is lost.

    `logprobs` is there when a sampling row asks (rows that do not sample hold -1 and 0), under the model's raw
    distribution; column 0 is the sampled token. `prompt_logprobs` maps rows to what this step scored of their prompts,
    `pooled` to hidden states [hidden], float32: the last token's where it samples, or the sum over the row's tokens.
    """

    plan_id: int
    ids: list[int]
    faulty: list[bool]
    logprobs: Scores | None
    prompt_logprobs: Mapping[int, PromptScores]
    pooled: Mapping[int, np.ndarray] = MappingProxyType({})


class PooledRow(NamedTuple):
    """A row whose hidden states are wanted: those of its last token, or the sum over its new ones, are
    `values[index]`."""

    row: int
    values: jax.Array
    index: int


class StepHandle(NamedTuple):
    """A step that was dispatched: device values that nobody has waited for yet."""

    plan_id: int
    num_rows: int
    batch: DeviceBatch
    picked: jax.Array
    ids: jax.Array | None
    scores: jax.Array | None
    prompt_scores: tuple[jax.Array, ...]
    pooled: tuple[PooledRow, ...] = ()


def bring(handle: StepHandle) -> StepResult:
    """Wait for a step and bring what it gave to the host. Raises what the device raised."""
    rows = handle.batch.sampling_rows
    ids, faulty = [FAULTY] * handle.num_rows, [False] * handle.num_rows
    if handle.ids is None:
        handle.picked.block_until_ready()
    else:
        for row, token_id in zip(rows, np.asarray(handle.ids).tolist()):
            ids[row], faulty[row] = token_id, token_id == FAULTY
    return StepResult(handle.plan_id, ids, faulty, _row_scores(handle, ids), _prompt_scores(handle), _pooled(handle))


def _pooled(handle: StepHandle) -> dict[int, np.ndarray]:
    return {one.row: np.asarray(one.values)[one.index].astype(np.float32) for one in handle.pooled}


def _row_scores(handle: StepHandle, ids: list[int]) -> Scores | None:
    if handle.scores is None:
        return None
    rows = handle.batch.sampling_rows
    sampled_ids = np.array([ids[row] for row in rows], np.int32)
    sampled = sampler.unpack_scores(np.asarray(handle.scores)[: len(rows)], sampled_ids)
    scores = Scores(*(np.zeros((handle.num_rows, *part.shape[1:]), part.dtype) for part in sampled))
    scores.ids[:] = FAULTY
    for whole, part in zip(scores, sampled):
        whole[rows] = part
    return scores


def _prompt_scores(handle: StepHandle) -> dict[int, PromptScores]:
    if not handle.prompt_scores:
        return {}
    packed = np.concatenate([np.asarray(part) for part in handle.prompt_scores])
    found, first = {}, 0
    for part in handle.batch.prompt_scoring:
        past = first + len(part.targets)
        found[part.row] = PromptScores(part.start, sampler.unpack_scores(packed[first:past], part.targets))
        first = past
    return found
