"""The engine that the benchmark of the HTTP layer has in the engine's place: it answers, and says what it took."""

import runpy
from pathlib import Path

from serving.app import create_app
from tests.serving.conftest import Client

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scripted_engine.py"


def test_its_first_token_is_the_time_it_took_and_an_answer_has_its_length():
    engine = runpy.run_path(str(SCRIPT))["ScriptedEngine"](step_s=0.001)

    class Started:
        """The app with the engine's ticks, which the lifespan of a server would begin."""

        def __init__(self):
            self.app = create_app(engine)

        async def __call__(self, scope, receive, send):
            await engine.start()
            try:
                await self.app(scope, receive, send)
            finally:
                await engine.stop()

    answer = Client(Started()).post("/v1/completions", {"model": "scripted", "prompt": "Hi", "max_tokens": 3})
    first, *rest = answer.json()["choices"][0]["text"].split(" ")
    assert 0 < float(first) < 60 and rest == ["word", "word"]
    assert answer.json()["usage"]["completion_tokens"] == 3
