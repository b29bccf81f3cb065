"""The command line: one description of each setting, plain faults, a chat that can be stopped."""

import argparse
import builtins
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple

import pytest

from pagedjax import cli
from pagedjax.cli import chat, flags, info
from pagedjax.cli.options import ServeOptions
from pagedjax.core.errors import ConfigError, RequestError


@dataclass(frozen=True)
class Sample:
    num_blocks: int = field(default=4, metadata={"help": "blocks", "group": "memory"})
    share: float = field(default=0.5, metadata={"help": "share of memory in %", "group": "memory"})
    caching: bool = field(default=True, metadata={"help": "cache"})
    dtype: Literal["auto", "float32"] = field(default="auto", metadata={"help": "numbers"})
    max_model_len: int | None = field(default=None, metadata={"help": "longest context"})


def parse(*argv):
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, Sample)
    return vars(parser.parse_args(argv))


def test_flags_carry_the_types_of_the_fields():
    given = parse("--num-blocks", "7", "--share", "1", "--no-caching", "--dtype", "float32", "--max-model-len", "9")
    assert Sample(**given) == Sample(7, 1.0, False, "float32", 9)


def test_flags_left_out_are_absent_so_that_a_file_can_set_them():
    assert parse() == {}


def test_max_seq_len_is_another_name_for_max_model_len():
    assert parse("--max-seq-len", "9") == {"max_model_len": 9}


def test_help_shows_groups_defaults_and_auto():
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, Sample)
    text = " ".join(parser.format_help().split())
    assert "memory: --num-blocks N blocks (default: 4)" in text
    assert "share of memory in % (default: 0.5)" in text
    assert "cache (default: on)" in text
    assert "longest context (default: auto)" in text


def test_toml_file_sets_fields_with_either_spelling(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('num-blocks = 7\nshare = 1\ndtype = "float32"')
    assert Sample(**flags.read_toml(file, flags.field_types(Sample))) == Sample(7, 1.0, True, "float32", None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("num_block = 7", "unknown key 'num_block'"),
        ('num_blocks = "7"', "num_blocks must be an integer, not '7'"),
        ("num_blocks = true", "must be an integer, not True"),
        ("caching = 1", "must be true or false"),
        ('dtype = "int3"', "must be one of auto, float32"),
        ("num_blocks = 1\nnum-blocks = 2", "set twice"),
        ("[memory]\nnum_blocks = 1", "unknown key 'memory'"),
        ("= 3", "not TOML"),
    ],
)
def test_toml_file_with_a_mistake_is_refused(tmp_path, text, complaint):
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        flags.read_toml(file, flags.field_types(Sample))


def test_missing_config_file_is_one_line_and_status_2(capsys):
    assert cli.run(["serve", "smollm2-135m", "--config", "/nowhere.toml"]) == 2
    assert capsys.readouterr().err == "pagedjax serve: error: --config /nowhere.toml: No such file or directory\n"


def test_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('model = "a"\nport = 1\nmax_num_seqs = 3\n')
    args = cli.parser().parse_args(["serve", "b", "--max-batch-size", "5", "--config", str(file)])
    assert cli.settings(args, ServeOptions) == {"model": "b", "port": 1, "max_num_seqs": 5}


def test_serve_without_a_model_says_what_to_do(capsys):
    assert cli.run(["serve"]) == 2
    assert "pagedjax serve smollm2-135m" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--max-body-bytes=0", "--drain-timeout-s=-1", "--drain-timeout-s=nan", "--port=70000"]
)
def test_serve_refuses_what_is_out_of_range(flag, capsys):
    assert cli.run(["serve", "smollm2-135m", flag]) == 2
    assert flag.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag",
    [
        *(f"{name}=" for name in ("--api-keys", "--record", "--otlp-traces-endpoint", "--profile-dir")),
        "--allowed-hosts=, ,",
    ],
)
def test_serve_refuses_flags_that_say_nothing(flag, capsys):
    assert cli.run(["serve", "smollm2-135m", flag]) == 2
    assert f"drop {flag.partition('=')[0]} or" in capsys.readouterr().err


def test_serve_names_the_fix_for_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.run(["serve", "smollm2-135m", "--port", str(taken.getsockname()[1])]) == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "chat", "pull", "info", "bench"])
def test_every_command_has_help(command):
    done = subprocess.run([sys.executable, "-m", "pagedjax", command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"pagedjax {command}" in done.stdout


def test_a_command_leaves_with_its_status_whatever_threads_still_do():
    code = (
        "import threading, time; from pagedjax import cli; cli.run = lambda words: print('said') or 7;"
        "threading.Thread(target=time.sleep, args=(300,)).start(); cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "said\n")


def test_output_that_cannot_be_written_is_a_failure():
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-m", "pagedjax", "info"], stdout=full).returncode == 1


def test_abbreviated_flags_are_refused(capsys):
    with pytest.raises(SystemExit):
        cli.run(["serve", "m", "--max-num-se", "3"])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_info_knows_less_but_does_not_fail_without_what_only_linux_has(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert "cores" in info.report()


def test_info_names_versions_devices_and_backends():
    text = info.report()
    assert all(word in text for word in ("pagedjax", "jax ", "cores", "cpu", "ragged_attention", "model cache"))


def test_info_of_kernels_names_each_ops_backend_and_the_reasons_against_others(capsys):
    assert cli.run(["info", "--kernels", "--model", "llama-3.1-8b", "--gpu", "9.0"]) == 0
    said = capsys.readouterr().out
    assert "32 heads, 8 KV heads of 128, blocks of 16" in said
    assert "not native: it runs on CPUs, and this platform is gpu" in said
    assert "quant_matmul of 16 tokens: pallas_triton" in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--gpu", "9.0"], "--gpu is about kernels: give --kernels too"),
        (["--kernels", "--gpu", "hopper"], "'hopper' is no compute capability such as 9.0"),
        (["--kernels", "--model", "/nowhere"], "there is no model"),
        (["--kernels", "--model", "llama-3.1-8b", "--block-size", "0"], "block_size"),
        (["--kernels", "--model", "llama-3.1-8b", "--block-size", "3"], "--block-size"),
    ],
)
def test_info_of_kernels_refuses_what_it_cannot_answer(words, complaint, capsys):
    assert cli.run(["info", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_info_of_kernels_names_a_variable_that_means_nothing_and_no_option_beside_it(monkeypatch, capsys):
    def refuse():
        raise ValueError("PAGEDJAX_NATIVE=mmx is none of off")

    monkeypatch.setattr("pallas_kernels.native.unavailable", refuse)
    assert cli.run(["info", "--kernels", "--model", "llama-3.1-8b"]) == 2
    assert capsys.readouterr().err.rstrip().endswith("PAGEDJAX_NATIVE=mmx is none of off")


@pytest.mark.parametrize("model", ["nosuch", "", "/nowhere/model.gguf"])
def test_serve_refuses_a_model_that_is_nowhere_before_it_takes_a_port(model, monkeypatch, capsys):
    monkeypatch.setattr("serving.server.serve", lambda *_, **__: pytest.fail("a server was started"))
    assert cli.run(["serve", model]) == 2
    assert "there is no model" in capsys.readouterr().err


def test_info_says_in_what_memory_swapped_blocks_lie():
    assert "plain memory, as the cache is" in info.report()


# ---- chat -----------------------------------------------------------------------------------------------------------


def type_lines(monkeypatch, *lines):
    """Make input() give these lines; an exception among them is raised; then the input ends."""
    script = iter([*lines, EOFError()])

    def read(_prompt=""):
        line = next(script)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", read)


def echo_to(log, answer=("Hel", "lo")):
    def ask(messages, write):
        log.append([message["content"] for message in messages])
        for piece in answer:
            write(piece)

    return ask


def test_chat_shows_answers_and_remembers_them(monkeypatch, capsys):
    type_lines(monkeypatch, "one", "", "two", "/quit", "never")
    log = []
    chat.converse(echo_to(log), system="be kind")
    assert log == [["be kind", "one"], ["be kind", "one", "Hello", "two"]]
    assert capsys.readouterr().out == "Hello\nHello\n"


def test_reset_forgets_all_but_the_system_message(monkeypatch):
    type_lines(monkeypatch, "one", "/reset", "two")
    log = []
    chat.converse(echo_to(log), system="be kind")
    assert log == [["be kind", "one"], ["be kind", "two"]]


def test_interrupt_stops_the_answer_and_keeps_what_was_said(monkeypatch, capsys):
    seen = []

    def ask(messages, write):
        seen.append(len(messages))
        write("Hel")
        raise KeyboardInterrupt

    type_lines(monkeypatch, "one", KeyboardInterrupt(), "two")
    chat.converse(ask)
    assert seen == [1, 3]
    assert "Hel [stopped]" in capsys.readouterr().out


def test_refused_question_is_dropped_and_the_chat_goes_on(monkeypatch, capsys):
    log = []

    def ask(messages, write):
        log.append([message["content"] for message in messages])
        if len(log) == 1:
            raise RequestError("too long", code="context_length_exceeded")

    type_lines(monkeypatch, "one", "two")
    chat.converse(ask)
    assert log == [["one"], ["two"]]
    assert "too long (/reset starts anew)" in capsys.readouterr().err


def test_a_piped_chat_says_by_its_status_that_a_question_was_refused(monkeypatch):
    def ask(messages, write):
        if "no" in messages[-1]["content"]:
            raise RequestError("no")

    for lines, passed in (("yes\n", True), ("no\nyes\n", False), ("a\udcffb\n", False)):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert chat.converse(ask) is passed


def test_a_line_that_is_no_utf8_is_refused_alone_whatever_the_locale_makes_of_it(monkeypatch, capsys):
    asked = []
    lines = io.TextIOWrapper(io.BytesIO(b"one\n\xff\ntwo\n"), encoding="utf-8", errors="strict")
    monkeypatch.setattr("sys.stdin", lines)
    chat.converse(lambda messages, write: asked.append(messages[-1]["content"]))
    assert asked == ["one", "two"]
    assert "not valid UTF-8" in capsys.readouterr().err


def test_a_chat_whose_reader_has_gone_stops_at_once(monkeypatch):
    asked = []

    def ask(messages, write):
        asked.append(messages)
        write("hello")

    class Gone(io.StringIO):
        def write(self, text):
            if text:
                raise BrokenPipeError
            return 0

    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    monkeypatch.setattr("sys.stdout", Gone())
    with pytest.raises(BrokenPipeError):
        chat.converse(ask)
    assert len(asked) == 1


def test_remote_chat_refuses_sampling_that_no_server_takes_before_it_asks(capsys):
    assert cli.run(["chat", "--url", "http://127.0.0.1:9", "--temperature", "9"]) == 1
    assert "temperature" in capsys.readouterr().err


def test_a_new_key_goes_to_the_terminal_and_its_entry_to_the_file(capsys):
    assert cli.run(["keys", "al.ice", "--tenant", "gold"]) == 0
    out, err = capsys.readouterr()
    (entry,) = tomllib.loads(out)["keys"]
    assert (entry["name"], entry["tenant"], entry["role"]) == ("al.ice", "gold", "user")
    key = err.split()[-1]
    assert key.startswith("pj-") and key not in out
    assert [cli.run(["keys", name]) for name in ("a\nb", 'al"ice', "a b", "")] == [2] * 4


def test_unknown_chat_command_is_not_sent_to_the_model(monkeypatch, capsys):
    type_lines(monkeypatch, "/rest")
    chat.converse(echo_to(log := []))
    assert log == []
    assert "Unknown command /rest" in capsys.readouterr().err


class FakeEngine:
    """Answers every prompt with the same pieces; `aborted` counts streams that were told to stop."""

    def __init__(self, pieces):
        self.pieces, self.prompts, self.aborted, self.stopped = pieces, [], 0, False
        self.tokenizer = self

    async def start(self):
        pass

    async def stop(self):
        self.stopped = True

    def encode_chat(self, messages):
        return ["|".join(message["content"] for message in messages)]

    def submit(self, prompt, params):
        self.prompts.append((prompt, params))
        return self

    def abort(self):
        self.aborted += 1

    async def __aiter__(self):
        for piece in self.pieces:
            yield Delta(piece)


class Delta(NamedTuple):
    text: str


def test_local_chat_streams_and_stops_the_engine():
    engine, pieces = FakeEngine(["Hel", "lo"]), []
    with chat.local(engine, {"temperature": 0.0, "max_tokens": None}) as ask:
        ask([{"role": "user", "content": "hi"}], pieces.append)
    assert pieces == ["Hel", "lo"]
    assert engine.stopped
    ((prompt, params),) = engine.prompts
    assert prompt == ["hi"]
    assert (params.temperature, params.max_tokens) == (0.0, None)


def test_interrupt_aborts_the_local_answer_and_the_engine_goes_on():
    engine, pieces = FakeEngine(["Hel", "lo"]), []

    def interrupt(piece):
        pieces.append(piece)
        signal.raise_signal(signal.SIGINT)

    with chat.local(engine, {}) as ask:
        with pytest.raises(KeyboardInterrupt):
            ask([{"role": "user", "content": "hi"}], interrupt)
        assert engine.aborted == 1
        ask([{"role": "user", "content": "hi"}], pieces.append)
    assert pieces[-2:] == ["Hel", "lo"]


@contextmanager
def server(events, *, status=200):
    """A small server that speaks enough of OpenAI's API; gives its address and the bodies it was sent."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(status, "".join(f"data: {event}\n\n" for event in events).encode() if status == 200 else events)

        def answer(self, code, body):
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}/v1", bodies
        httpd.shutdown()


def ask_remote(url, **sampling):
    pieces = []
    with chat.remote(url, sampling) as ask:
        ask([{"role": "user", "content": "hi"}], pieces.append)
    return "".join(pieces)


def test_remote_chat_streams_from_the_servers_first_model():
    chunks = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in ("Hé", "llo")]
    with server([json.dumps({"choices": [{"delta": {"role": "assistant"}}]}), *chunks, "[DONE]", "never"]) as (
        url,
        bodies,
    ):
        assert ask_remote(url, temperature=0.5) == "Héllo"
    messages = [{"role": "user", "content": "hi"}]
    assert bodies == [{"model": "tiny", "temperature": 0.5, "stream": True, "messages": messages}]


def test_refusal_of_the_server_reaches_the_user():
    error = json.dumps({"error": {"message": "too long", "code": "context_length_exceeded", "param": "messages"}})
    with server(error.encode(), status=400) as (url, _), pytest.raises(RequestError, match="too long") as caught:
        ask_remote(url)
    assert caught.value.code == "context_length_exceeded"


def test_remote_chat_without_a_server_is_a_plain_error(capsys):
    assert cli.run(["chat", "--url", "http://127.0.0.1:9"]) == 2
    assert "no server that speaks OpenAI's API answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_engine_flags_are_refused_where_there_is_no_engine(capsys):
    assert cli.run(["chat", "--url", "http://127.0.0.1:9", "--block-size", "32"]) == 2
    assert "--block-size would set up an engine here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "FILE", "--html="],
        ["keys", "alice", "--tenant="],
        ["info", "--kernels", "--model="],
        ["info", "--kernels", "--gpu="],
        ["chat", "--url="],
        ["chat", "--url=http://127.0.0.1:9", "--api-key="],
        ["bench", "serve", "--url="],
    ],
)
def test_commands_refuse_flags_that_say_nothing(words, capsys):
    try:
        status = cli.run(words)
    except SystemExit as left:
        status = left.code
    assert status == 2
    assert words[-1].partition("=")[0] in capsys.readouterr().err


def test_info_says_what_the_native_kernels_are_or_why_there_are_none(monkeypatch):
    from pallas_kernels import native

    said = next(line for line in info.report().splitlines() if "native kernels:" in line)
    assert native.unavailable() is None or native.unavailable() in said
    monkeypatch.setattr(native, "unavailable", lambda: "no compiler")
    assert "native kernels: none: no compiler" in info.report()
