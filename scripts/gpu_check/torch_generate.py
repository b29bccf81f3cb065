"""(d) The peer: Hugging Face transformers generates the same work with a Llama-3-8B of random weights."""

import time
from collections.abc import Iterator
from functools import partial

from scripts.gpu_check.checks import Check, Figures, Skipped
from scripts.gpu_check.shapes import GENERATED, LLAMA_8B, NUM_SEQS, TINY
from scripts.gpu_check.torch_kernels import import_torch

NUM_TOKENS = {False: 64, True: 4}  # fewer than the engine's: tokens a second hardly depend on it


def checks(*, stand_in: bool) -> Iterator[Check]:
    yield Check("transformers, static batch", partial(generate, stand_in), 120.0)


def generate(stand_in: bool) -> Figures:
    torch = import_torch(stand_in)
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise Skipped(f"transformers is not installed: {error}") from error
    model_config = TINY if stand_in else LLAMA_8B
    config = LlamaConfig(
        vocab_size=model_config.vocab_size,
        hidden_size=model_config.hidden_size,
        intermediate_size=model_config.intermediate_size,
        num_hidden_layers=model_config.num_layers,
        num_attention_heads=model_config.num_heads,
        num_key_value_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        max_position_embeddings=model_config.max_position_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    device, dtype = ("cpu", torch.float32) if stand_in else ("cuda", torch.bfloat16)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    length, num_tokens = GENERATED[stand_in][0], NUM_TOKENS[stand_in]
    ids = torch.randint(0, TINY.vocab_size, (NUM_SEQS[stand_in], length), device=device)
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)}

    def run(count: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, min_new_tokens=count, max_new_tokens=count, **options)
        if not stand_in:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    run(2)
    decoding_s = run(num_tokens) - run(1)
    return {"tokens/s": ids.shape[0] * (num_tokens - 1) / decoding_s}
