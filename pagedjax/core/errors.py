"""The three kinds of fault: the caller's, the configuration's and our own."""


class RequestError(Exception):
    """The caller's fault. Serving renders it as a 4xx with OpenAI's error body.

    `param` names the offending field where there is one; `code` is OpenAI's machine-readable code
    ("context_length_exceeded", "queue_full", …).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ConfigError(Exception):
    """Raised before start. The message names the flag and the fix."""


class SchedulerError(Exception):
    """Our bug: an event that cannot follow the state. `update` is pure, so the old state stands."""
