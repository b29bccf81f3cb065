"""Make `conv_like.csv`: a small trace in Azure's format with the lengths and the rate of a real one.

    python tests/simulator/traces/make_traces.py

Prompt and output lengths are drawn apart from the 5 % quantiles of the conversation trace of Azure's LLM inference
traces of 2023 (Patel et al., "Splitwise", ISCA 2024; CC-BY), the longest 1 % cut off; arrivals are Poisson at its mean
rate.
"""

from datetime import datetime, timedelta
from pathlib import Path
from random import Random

PROMPT_QUANTILES = (
    *(2, 181, 207, 372, 387, 396, 403, 414, 703, 984),
    *(1020, 1045, 1071, 1097, 1130, 1189, 1315, 1876, 2734, 4083, 4142),
)
OUTPUT_QUANTILES = (7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 601)
MEAN_GAP_S = 0.18
NUM_REQUESTS = 200


def rows() -> list[str]:
    random, now = Random(0), datetime(2023, 11, 16, 18, 15)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(NUM_REQUESTS):
        now += timedelta(seconds=random.expovariate(1 / MEAN_GAP_S))
        lines.append(f"{now.isoformat(' ')},{draw(random, PROMPT_QUANTILES)},{draw(random, OUTPUT_QUANTILES)}")
    return lines


def draw(random: Random, quantiles: tuple[int, ...]) -> int:
    """A length between two neighbouring quantiles."""
    place = random.random() * (len(quantiles) - 1)
    low = int(place)
    return round(quantiles[low] + (quantiles[low + 1] - quantiles[low]) * (place - low))


if __name__ == "__main__":
    Path(__file__).with_name("conv_like.csv").write_text("\n".join(rows()) + "\n")
