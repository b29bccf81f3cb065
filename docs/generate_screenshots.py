"""Takes the pictures of the page at / from a running server that is kept busy, with Chromium.

    pagedjax serve smollm2-135m --num-gpu-blocks-override 160 --max-num-seqs 12 --trust-tenant-header \
        --tenant-weights gold=3,silver=2,bronze=1 &
    python docs/generate_screenshots.py http://127.0.0.1:8000
"""

import argparse
import asyncio
from pathlib import Path

import aiohttp

from tests.serving.chromium import page_at

IMAGES = Path(__file__).parent / "images"
QUESTION = "Why does a paged KV cache waste so little memory?"
LOOKS = (
    ("dashboard", 1360, 900, "light"),
    ("dashboard-dark", 1360, 900, "dark"),
    ("dashboard-phone", 390, 844, "light"),
)


async def load(http: aiohttp.ClientSession, url: str, tenant: str, priority: int) -> None:
    body = {
        "model": "smollm2-135m",
        "prompt": f"A long letter from a {tenant} mine to the harbour master about the ships it waits for: " * 4,
        "max_tokens": 200,
        "ignore_eos": True,
        "n": 2,
        "priority": priority,
    }
    async with http.post(f"{url}/v1/completions", json=body, headers={"x-tenant": tenant}) as answer:
        answer.raise_for_status()


async def main(url: str) -> None:
    async with aiohttp.ClientSession() as http, page_at(url) as page:
        await page.wait_for("document.getElementById('model')?.textContent")
        tenants = ["gold", "silver", "bronze"] * 6
        busy = [asyncio.create_task(load(http, url, tenant, i % 3)) for i, tenant in enumerate(tenants)]
        await page.run(f"document.getElementById('prompt').value = {QUESTION!r}; document.getElementById('go').click()")
        for name, width, height, scheme in LOOKS:
            await page.look(width, height, scheme)
            await asyncio.sleep(4)
            if name == "dashboard-phone":
                await page.run("document.querySelector('aside').scrollIntoView()")
            await page.picture(IMAGES / f"{name}.png")
        await asyncio.gather(*busy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    asyncio.run(main(parser.parse_args().url))
