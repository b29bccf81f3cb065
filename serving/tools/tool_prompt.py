"""How a model is told of its tools, of its earlier calls and of their results."""

import json
from collections.abc import Sequence
from typing import Any

from serving.interfaces import Tokenizer
from serving.tools.tool_calls import BEGIN, END, ToolFormat

# For models whose template knows no tools: Hermes' form, told in words.
INSTRUCTIONS = """You can call functions. Their signatures, one a line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>"""


def format_for(template: str) -> ToolFormat:
    """The form in which a model with this chat template writes its calls."""
    if BEGIN in template or "tools" not in template:
        return "hermes"
    return "llama3_json" if "<|python_tag|>" in template or "ipython" in template else "json"


def tags_are_hidden(tokenizer: Tokenizer) -> bool:
    """Whether the tags around calls are special tokens, which text leaves out unless it is told not to."""
    return any(tokenizer.token_text(token_id) in (BEGIN, END) for token_id in tokenizer.special_token_ids)


def for_template(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as the template wants them: one that knows no tools gets them in words."""
    if "tools" in template:
        return list(messages), list(tools) or None
    spoken = [_in_words(message) for message in messages]
    if not tools:
        return spoken, None
    text = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if spoken and spoken[0]["role"] == "system":
        first = spoken[0] | {"content": f"{spoken[0]['content']}\n\n{text}"}
        return [first, *spoken[1:]], None
    return [{"role": "system", "content": text}, *spoken], None


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls", ())
    if not calls:
        return message
    written = [f"{BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}" for call in calls]
    content = "\n".join([*filter(None, [message.get("content")]), *written])
    return {"role": message["role"], "content": content}
