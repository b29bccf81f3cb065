"""The device that is checked."""

import jax

from pallas_kernels import dispatch


def platform() -> str:
    return jax.default_backend()


def capability() -> tuple[int, int] | None:
    return dispatch.capability_of(jax.devices()[0])
