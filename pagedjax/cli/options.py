"""What the commands set beside the engine's own configuration: each field is a flag and a key of the --config file."""

from dataclasses import dataclass
from typing import Literal

from pagedjax.cli.flags import option
from pagedjax.cli.placement import EngineProcess
from pagedjax.core.errors import ConfigError
from pagedjax.engine.config import refuse_empty


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `serve` sets beside the engine."""

    host: str = option("127.0.0.1", "http", "address to listen on")
    port: int = option(8000, "http", "port to listen on; 0 takes a free one")
    max_body_bytes: int = option(8 * 2**20, "http", "largest request body in bytes; larger ones are refused (413)")
    drain_timeout_s: float = option(30.0, "http", "seconds that running requests have to finish after SIGTERM")
    engine_process: EngineProcess = option(
        "auto", "http", "run the engine in a process of its own; auto does so on more than one core"
    )
    request_timeout_s: float = option(
        3600.0, "http", "seconds that a request has for its whole answer before it is ended (504); 0 is no limit"
    )
    step_timeout_s: float = option(
        120.0, "http", "seconds after which a step counts as stuck: /health says so, and the process ends; 0 never"
    )
    api_keys: str | None = option(
        None, "http", "TOML file of API keys; with keys every route but /health needs one", "none"
    )
    lenient: bool = option(False, "http", "pass over unknown fields of requests instead of refusing them")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "json"] = option(
        "auto", "http", "the form in which the model writes tool calls; auto goes by its chat template"
    )
    chat_template_kwargs: str = option(
        "enable_thinking", "http", "names that requests may hand to the chat template, separated by commas"
    )
    allowed_hosts: str | None = option(
        None,
        "http",
        "names that a request's Host may hold beside addresses and localhost, separated by commas",
        "any; but none on a loopback address without keys",
    )
    trust_tenant_header: bool = option(False, "http", "take a request's tenant from its X-Tenant header")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "http", "least severe level to log")
    access_log: Literal["text", "json", "off"] = option(
        "text", "http", "a line a request: text in the log, json on standard output, off for none"
    )
    otlp_traces_endpoint: str | None = option(
        None, "http", "URL to send OpenTelemetry's spans to, such as http://localhost:4318/v1/traces", "none"
    )
    profile_dir: str | None = option(
        None, "http", "where POST /admin/profile puts JAX's profiles", "none: none are taken"
    )

    def __post_init__(self) -> None:
        refuse_empty(self)
        if self.allowed_hosts is not None and not self.allowed_hosts.strip(", "):
            raise ConfigError("allowed_hosts names no host; drop --allowed-hosts or name one")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, not {self.max_body_bytes}; set --max-body-bytes")
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise ConfigError(f"drain_timeout_s must be 0 or more, not {self.drain_timeout_s}; set --drain-timeout-s")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What `chat` sets beside the engine. None is left to the engine or the server."""

    url: str | None = option(None, "conversation", "talk to the server at this address, start no engine here", "none")
    api_key: str | None = option(None, "conversation", "key that the server at --url asks for", "none")
    system: str | None = option(None, "conversation", "system message that opens the conversation", "none")
    temperature: float = option(0.7, "conversation", "0 is greedy, 2 the most random")
    top_p: float = option(1.0, "conversation", "sample from the likeliest tokens that have this probability together")
    max_tokens: int | None = option(None, "conversation", "longest answer in tokens", "up to the context's end")

    def __post_init__(self) -> None:
        refuse_empty(self)
