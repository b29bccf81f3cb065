import warnings
from datetime import datetime

import pytest

from pagedjax.core.errors import RequestError
from pagedjax.engine.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "<b>hi</b> & 'you'"}, {"role": "assistant", "content": None, "tool_calls": [1]}]
TOOLS = [{"type": "function", "function": {"name": "é", "parameters": {}}}]
# Each line leans on one thing that transformers sets up.
TEMPLATES = [
    "{%- for m in messages %}\n    {%- if m.content %}\n  {{ m.content }}\n    {%- endif %}\n{%- endfor %}",
    "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n{{ 'content' in m }}\n{% endfor %}",
    "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
    "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages[0].content | tojson }}",
    "{% generation %}{{ bos_token }}{% endgeneration %}{% if add_generation_prompt %}>>{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ dict(a=1) | tojson }}{{ dict.fromkeys(['k'], 2) | tojson }}{{ extra }}",
    "{{ strftime_now('%Y') }}{{ messages[0].content.split('&')[0].strip() | upper }}",
]


def render(template, messages=MESSAGES, **kwargs):
    return ChatTemplate(template, {"bos_token": "<s>"}).render(messages, add_generation_prompt=True, **kwargs)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_renders_as_under_transformers(template):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils.chat_template_utils import render_jinja_template
    clean = [{k: v for k, v in message.items() if v is not None} for message in MESSAGES]
    theirs, _ = render_jinja_template(
        [clean], tools=TOOLS, chat_template=template, add_generation_prompt=True, bos_token="<s>", extra="x"
    )
    assert render(template, tools=TOOLS, extra="x") == theirs[0]


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for m in messages %}", "does not compile"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "__class__"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_whatever_goes_wrong_in_a_template_is_the_requests_fault(template, complaint):
    with pytest.raises(RequestError, match=complaint):
        render(template)


def test_a_message_that_is_no_object_is_refused():
    with pytest.raises(RequestError, match="not str"):
        render("{{ messages }}", ["hello"])


def test_the_tool_template_serves_chats_with_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render([], add_generation_prompt=True) == "plain"
    assert template.render([], add_generation_prompt=True, tools=TOOLS) == "tools"


def test_a_model_with_named_templates_but_no_default_says_so():
    with pytest.raises(RequestError, match="it has rag"):
        ChatTemplate({"rag": "x"}, {}).render([], add_generation_prompt=True)


def test_templates_may_ask_for_todays_date():
    assert render("{{ strftime_now('%Y') }}") == f"{datetime.now():%Y}"
