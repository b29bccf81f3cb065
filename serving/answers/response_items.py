"""The output of one response as it grows: messages and function calls, one after the other, and the events of each."""

from dataclasses import dataclass, field
from typing import Any

from serving.tools.call_reader import CallPiece
from serving.tools.tool_calls import new_call_id

Events = list[tuple[str, dict[str, Any]]]


@dataclass(slots=True)
class _Item:
    """What is being written: a message, or a call where there is a `name`."""

    id: str
    name: str | None = None
    call_id: str | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def shown(self, status: str) -> dict[str, Any]:
        text = "".join(self.texts)
        if self.name is not None:
            call = {"call_id": self.call_id, "name": self.name, "arguments": text}
            return {"id": self.id, "type": "function_call", "status": status, **call}
        parts = [] if status == "in_progress" else [text_part(text, self.logprobs)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": parts}


class Items:
    """`finished` are the items to which nothing is added, in order; at most one more is being written."""

    def __init__(self, response_id: str) -> None:
        self.finished: list[dict[str, Any]] = []
        self._suffix = response_id.removeprefix("resp-")
        self._open: _Item | None = None

    def begin_message(self) -> Events:
        events = self._close("completed")
        number = f"_{len(self.finished)}" if self.finished else ""
        self._open = _Item(f"msg_{self._suffix}{number}")
        part = {**self._place(), "content_index": 0, "part": text_part("", [])}
        return [*events, self._added(self._open), ("response.content_part.added", part)]

    def say(self, text: str, logprobs: list[Any]) -> Events:
        """Some text of a message: the one that is open, or a new one."""
        events: Events = []
        if self._open is None or self._open.name is not None:
            events = self.begin_message()
        assert self._open is not None
        self._open.texts.append(text)
        self._open.logprobs += logprobs
        body = {**self._place(), "content_index": 0, "delta": text, "logprobs": logprobs}
        return [*events, ("response.output_text.delta", body)]

    def call(self, piece: CallPiece) -> Events:
        """Part of a call; one that has a name begins a new call."""
        events: Events = []
        if piece.name is not None:
            events = self._close("completed")
            self._open = _Item(f"fc_{self._suffix}_{len(self.finished)}", piece.name, new_call_id())
            events.append(self._added(self._open))
        assert self._open is not None
        if not piece.arguments:
            return events
        self._open.texts.append(piece.arguments)
        return [*events, ("response.function_call_arguments.delta", {**self._place(), "delta": piece.arguments})]

    def end(self, status: str) -> Events:
        """Nothing more comes: what is open ends with this status. An output without anything is an empty message."""
        events = [] if self._open or self.finished else self.begin_message()
        return [*events, *self._close(status)]

    def break_off(self) -> None:
        """Nothing more comes, and what is open was not finished: it is incomplete, and no event calls it done."""
        if self._open is not None:
            self.finished.append(self._open.shown("incomplete"))
            self._open = None

    def _close(self, status: str) -> Events:
        item = self._open
        if item is None:
            return []
        shown, place, text = item.shown(status), self._place(), "".join(item.texts)
        done: Events
        if item.name is not None:
            done = [("response.function_call_arguments.done", {**place, "name": item.name, "arguments": text})]
        else:
            inside = {**place, "content_index": 0}
            done = [
                ("response.output_text.done", {**inside, "text": text, "logprobs": item.logprobs}),
                ("response.content_part.done", {**inside, "part": text_part(text, item.logprobs)}),
            ]
        done.append(("response.output_item.done", {"output_index": place["output_index"], "item": shown}))
        self.finished.append(shown)
        self._open = None
        return done

    def _added(self, item: _Item) -> tuple[str, dict[str, Any]]:
        return "response.output_item.added", {"output_index": len(self.finished), "item": item.shown("in_progress")}

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self.finished)}


def text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
