"""Model directories with a chat template, and the templates of real models.

The templates are the models' own, less what they do with calls of tools.
"""

import json
import re

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

QWEN_2_5 = r"""{%- if tools %}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.' }}
        {{- ' You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

QWEN_3 = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')
                and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thinking = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thinking = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].rstrip('\n') %}
            {%- set thinking = thinking.split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thinking) %}
            {{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' }}
            {%- set content = content.lstrip('\n') %}
        {%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

# Of 2507: the prompt begins the thinking.
QWEN_3_THINKING = re.sub(
    r"{%- if enable_thinking(.*?){%- endif %}",
    r"{{- '<think>\\n' }}",
    QWEN_3,
    flags=re.S,
)

_LLAMA_3 = r"""{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message #}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

DEEPSEEK_R1 = r"""{% set ns = namespace(system_prompt='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}
{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}
{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}
{% if '</think>' in content %}
{% set content = content.split('</think>')[-1] %}{% endif %}
{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}
{% if add_generation_prompt %}{{'<｜Assistant｜><think>\n'}}{% endif %}"""

MAGISTRAL = r"""{%- set default_system_message = 'First draft your thinking process
until you arrive at a response.[THINK]Your thoughts[/THINK]Here, the response.' %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = default_system_message %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}"
    "{% endif %}{{ '<start_of_turn>' + message['role'] + '\n' + "
    "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

# Channels of gpt-oss's format: the analysis of the last turn alone is written.
GPT_OSS = r"""<|start|>system<|message|>Reasoning: {{ reasoning_effort or "medium" }}

# Valid channels: analysis, commentary, final.<|end|>
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- "<|start|>developer<|message|># Instructions\n\n" + message.content }}
        {{- "<|end|>" }}
    {%- elif message.role == 'user' %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- elif message.tool_calls %}
        {{- "<|start|>assistant to=functions." + message.tool_calls[0].function.name }}
        {{- "<|channel|>commentary json<|message|>" + "<|call|>" }}
    {%- else %}
        {%- if loop.last and message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking }}
            {{- "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
        {{- "<|return|>" if loop.last else "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}"""

# The rest of what templates of models do: loop controls, a tracked reply, JSON.
CONSTRUCTS = """\
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% generation %}{% set mark = '>' %}{{ mark }}{{ message | tojson }}
    {%- endgeneration %}
    {{ mark }}{{ dict(a='<é>') | tojson(indent=2) }}{{ unheard_of }}{{ unk_token }}
    {% if loop.index == 7 %}{% break %}{% endif %}
{% endfor %}
{% generation %}{{ eos_token }}{% endgeneration %}"""

TEMPLATES = {
    "SmolLM2": SMOLLM2,
    "Qwen2.5": QWEN_2_5,
    "Qwen3": QWEN_3,
    "Qwen3-Thinking": QWEN_3_THINKING,
    "Llama 3.1": _LLAMA_3,
    "Llama 3.2": _LLAMA_3.replace('"26 Jul 2024"', 'strftime_now("%d %b %Y")'),
    "DeepSeek-R1": DEEPSEEK_R1,
    "Magistral": MAGISTRAL,
    "Gemma 2": GEMMA_2,
    "gpt-oss": GPT_OSS,
    "constructs": CONSTRUCTS,
}

SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
THINK = ["<think>", "</think>", "[THINK]", "[/THINK]"]  # the last two are special
HARMONY = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "return")]


def make_backend():
    """Bytes, special tokens and tags; it writes a BOS unless it is told not to."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL, *THINK[2:], *HARMONY])
    tags = [tokenizers.AddedToken(tag, normalized=False) for tag in THINK[:2]]
    backend.add_tokens(tags)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
    )
    return backend


def make_directory(directory, **config):
    """A tokenizer with these values in `tokenizer_config.json`."""
    directory.mkdir(exist_ok=True)
    make_backend().save(str(directory / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(values | config))
    return directory
