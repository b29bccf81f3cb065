"""(c) Greedy tokens of the engine against references: SmolLM2's, where its file is here, and a random model's."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.request import SamplingParams
from pagedjax.models.config import ModelConfig
from pagedjax.models.stack import init_caches
from pagedjax.weights import store
from pallas_kernels.ragged_attention import Ragged, reference
from scripts.gpu_check.checks import Check, Figures, Skipped
from scripts.gpu_check.models import make_engine, random_model
from scripts.gpu_check.shapes import SMOLLM2, TINY

MODEL = "smollm2-135m"
GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "smollm2_135m_q4_1_f32.json"
# Between the best two: below it, sums in another order may choose the other.
NEAR_TIE = 2e-3


def checks(*, stand_in: bool) -> Iterator[Check]:
    yield Check("random weights, float32, against the host", partial(random_weights, stand_in), 150.0)
    yield Check("SmolLM2, float32", partial(smollm2, stand_in), 150.0)


def random_weights(stand_in: bool) -> Figures:
    """The engine's tokens, batched and chunked, are those of whole contexts computed anew on the host."""
    config, num_tokens = (TINY, 6) if stand_in else (SMOLLM2, 24)
    sizes = {"token_sizes": (4, 16) if stand_in else (8, 64), "max_num_batched_tokens": 16 if stand_in else 64}
    limits = {"max_num_seqs": 4 if stand_in else 8, "max_model_len": 128, "num_gpu_blocks_override": 128}
    scale = 0.2 if stand_in else 0.06
    engine = make_engine(config, dtype="float32", scale=scale, **sizes, **limits).engine
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in ((5, 20) if stand_in else (1, 5, 16, 40, 70))]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(engine.prepare(prompt, params, request_id=str(i)))
    found: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    while engine.has_work:
        for update in engine.step():
            if update.error is not None:
                raise update.error
            found[int(update.request_id)] += update.delta.token_ids
    weights = random_model(config, jnp.float32, reference.BACKEND, scale)
    num_same = sum(_num_same(config, weights, prompt, found[i]) for i, prompt in enumerate(prompts))
    return {"tokens": num_same, "prompts": len(prompts)}


def _num_same(config: ModelConfig, model: Any, prompt: list[int], ids: list[int]) -> int:
    """Tokens up to the first near tie, each the likeliest after those before it; computed on the host's CPU."""
    cpu = jax.devices("cpu")[0]
    known = [*prompt, *ids]
    with jax.default_device(cpu):
        logits = np.asarray(jax.jit(partial(_dense, config))(jax.device_put(model, cpu), jnp.asarray(known, jnp.int32)))
    for i, token in enumerate(ids):
        scores = logits[len(prompt) + i - 1]
        second, best = np.sort(scores)[-2:]
        if best - second < NEAR_TIE:
            return i
        assert token == int(scores.argmax()), f"token {i} is {token}, but {int(scores.argmax())} is likelier"
    return len(ids)


def _dense(config: ModelConfig, model: Any, ids: jax.Array) -> jax.Array:
    """Logits after each token of one sequence, as one chunk in a fresh cache."""
    num_tokens, block_size = ids.shape[0], 16
    num_blocks = -(-num_tokens // block_size)
    caches = init_caches(config, reference.BACKEND, num_blocks=num_blocks, block_size=block_size, dtype=jnp.float32)
    positions = jnp.arange(num_tokens, dtype=jnp.int32)
    starts, lens = jnp.array([0, num_tokens], jnp.int32), jnp.array([num_tokens], jnp.int32)
    ragged = Ragged(jnp.arange(num_blocks, dtype=jnp.int32)[None], starts, lens, positions, jnp.int32(0))
    hidden, _ = model(ids, positions, caches, ragged)
    return model.logits(hidden)


def smollm2(stand_in: bool) -> Figures:
    """The bundled model's file may have been too large to travel with the checkout."""
    path = store.cached_path(MODEL)
    if stand_in:
        raise Skipped("the stand-in does not run a real model")
    if not path.exists():
        raise Skipped(f"{path.name} (94 MiB) is not on this machine; put it into PAGEDJAX_HOME/models")
    from pagedjax import LLM

    cases = json.loads(GOLDEN.read_text())
    limits = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 512}
    llm = LLM(str(path), dtype="float32", show_progress_bars=False, **limits)
    params = SamplingParams(temperature=0, max_tokens=48)
    outputs = llm.generate([case["prompt_ids"] for case in cases], params)
    num_tokens = 0
    for case, output in zip(cases, outputs, strict=True):
        margins = case["margins"]
        certain = next((i for i, margin in enumerate(margins) if margin < NEAR_TIE), len(margins))
        ids = list(output.outputs[0].token_ids)[:certain]
        assert ids == case["greedy_ids"][:certain], (
            f"{case['prompt_ids'][:5]}…: {ids} for {case['greedy_ids'][:certain]}"
        )
        num_tokens += certain
    return {"tokens": num_tokens, "prompts": len(cases)}
