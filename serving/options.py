"""How the API behaves where the engine does not decide: one frozen record, from the command line to the routes."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from pagedjax.core.errors import ConfigError
from serving.telemetry.access_log import AccessLogForm

ToolCallParser = Literal["auto", "hermes", "llama3_json", "json"]
_HOST_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """`template_kwargs` are the names that `chat_template_kwargs` may hold. `allowed_hosts` are those that Host may
    hold beside addresses and localhost (none: see access/origins.py); `local_name` is what --host said, where only this
    machine reaches it. A request must be answered within `request_timeout_s`, and while there is work a step must
    end within `step_timeout_s`; 0 is no limit. Profiles go to `profile_dir`; without one none are taken. Raises
    ConfigError.
    """

    lenient: bool = False
    tool_call_parser: ToolCallParser = "auto"
    template_kwargs: frozenset[str] = frozenset({"enable_thinking"})
    allowed_hosts: frozenset[str] = frozenset()
    local_name: str | None = None
    request_timeout_s: float = 3600.0
    step_timeout_s: float = 120.0
    access_log: AccessLogForm = "text"
    profile_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("request_timeout_s", "step_timeout_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{name} must be 0 (no limit) or more, not {getattr(self, name)}; set {flag}")
        if self.access_log not in get_args(AccessLogForm):
            raise ConfigError(f"access_log must be one of {', '.join(get_args(AccessLogForm))}; set --access-log")
        if self.tool_call_parser not in get_args(ToolCallParser):
            known = ", ".join(get_args(ToolCallParser))
            raise ConfigError(f"tool_call_parser must be one of {known}; set --tool-call-parser")
        if wrong := sorted(name for name in self.template_kwargs if name in RESERVED or not name.isidentifier()):
            raise ConfigError(f"{wrong[0]!r} cannot be left to callers; set --chat-template-kwargs")
        if wrong := sorted(name for name in self.allowed_hosts if not _HOST_NAME.fullmatch(name)):
            raise ConfigError(f"{wrong[0]!r} is no host name in lower case without a port; set --allowed-hosts")


def parse_names(text: str) -> frozenset[str]:
    """Names as they are written after --chat-template-kwargs and --allowed-hosts: separated by commas."""
    return frozenset(filter(None, map(str.strip, text.split(","))))
