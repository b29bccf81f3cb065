"""What is slow to make and serves several files of tests."""

import jax.numpy as jnp
import pytest

from pagedjax.core.plan import Tier
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.engine import Engine
from pagedjax.runtime import kv_cache
from pagedjax.runtime.disk import DiskPool, SwapFile
from pagedjax.runtime.host import HostPool
from pallas_kernels.ragged_attention import xla
from tests.engine.fakes import TinyTokenizer
from tests.runtime import tiny

NUM_LOWER_BLOCKS = 64


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory):
    """A real runner with a tiny model and both lower tiers; whoever uses it begins with `forcing.use`."""
    block_bytes = kv_cache.block_bytes(tiny.CONFIG, xla.BACKEND, tiny.SCHEDULER.block_size, jnp.float32)
    file = SwapFile(tmp_path_factory.mktemp("swap"), NUM_LOWER_BLOCKS * block_bytes)
    pools = {
        Tier.HOST: HostPool(NUM_LOWER_BLOCKS, block_bytes),
        Tier.DISK: DiskPool(file, NUM_LOWER_BLOCKS, block_bytes),
    }
    runner = tiny.make_runner(pools=pools)
    runner.warm_up()
    return Engine(EngineConfig(model="tiny"), tiny.SCHEDULER, runner, TinyTokenizer())
