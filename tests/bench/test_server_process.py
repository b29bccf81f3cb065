"""A server of our own for a run: started, awaited, stopped; an interpreter that stands in for ours plays it."""

import os
import stat
import sys
import urllib.request

import pytest

from pagedjax.bench.server_process import flags, serving
from pagedjax.core.errors import ConfigError

PLAY = """#!{python}
import http.server, socketserver, sys
if "broken" in sys.argv:
    print("no such model"); sys.exit(3)
if "--max-num-seq" in sys.argv:
    print("pagedjax: error: unrecognized arguments: --max-num-seq 4"); sys.exit(2)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "never" in sys.argv else 200)
        self.end_headers()
        self.wfile.write(repr(sys.argv[1:]).encode())
socketserver.TCPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def played(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(PLAY.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.usefixtures("played")
def test_the_server_runs_for_as_long_as_it_is_needed():
    with serving("tiny", {"max_num_seqs": 4}, startup_timeout_s=20) as (url, pid):
        with urllib.request.urlopen(url) as answer:
            words = answer.read().decode()
        os.kill(pid, 0)
    assert words.startswith("['-m', 'pagedjax', 'serve', 'tiny', '--host', '127.0.0.1', '--port', ")
    assert words.endswith("'--max-num-seqs', '4']")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("model", "timeout_s", "complaint"),
    [("broken", 20, r"ended with code 3 [\s\S]*no such model"), ("never", 1, "not ready after 1 s")],
)
def test_a_server_that_does_not_come_up_is_reported_with_its_output(model, timeout_s, complaint):
    with pytest.raises(ConfigError, match=complaint), serving(model, {}, startup_timeout_s=timeout_s):
        pytest.fail("it cannot be ready")


@pytest.mark.usefixtures("played")
def test_an_option_that_the_server_does_not_have_is_told_by_its_name_here():
    complaint = r"--engine: pagedjax serve has no option max_num_seq; do you mean max_num_seqs\?"
    options = {"dtype": "float32", "max_num_seq": 4}
    with pytest.raises(ConfigError, match=complaint), serving("tiny", options, startup_timeout_s=20):
        pytest.fail("it cannot be ready")


def test_engine_options_become_flags():
    options = {"dtype": "float32", "max_num_seqs": 4, "enable_prefix_caching": False, "async_scheduling": True}
    assert flags(options) == [
        *("--dtype", "float32", "--max-num-seqs", "4", "--no-enable-prefix-caching", "--async-scheduling"),
    ]
