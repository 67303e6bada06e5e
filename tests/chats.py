"""Tokenizers and chat templates for tests."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

_WORDS = (
    "The river runs down to the sea. What is two and two? It is four. Hello, and how are you today? Thanks, fine! "
    "Übergrößen kosten 20 €. def add(a, b):\n    return a + b\n\nassistant user system "
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)
# Like Qwen3: reasoning is rendered for answers to the last question only, and for the last answer even if it is empty.
QWEN3 = (
    "{% set ns = namespace(question=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% set thought = message.reasoning_content or message.content.rpartition('</think>')[0].replace('<think>', '') %}"
    "{% if loop.index0 > ns.question and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}"
    "{% elif message.role == 'tool' %}{{ '<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like gpt-oss: reasoning is rendered for the last message only, which ends with a special token.
GPT_OSS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "<|start|>assistant"
    "{% if loop.last and message.thinking %}"
    "<|channel|>analysis<|message|>{{ message.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|channel|>final<|message|>{{ message.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# The generation prompt opens <think>; messages have no reasoning.
SILENT = CHATML_UNMARKED.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")

STYLES = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], None, "<|im_end|>"),
    "chatml, unmarked": (CHATML_UNMARKED, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], None, "<|im_end|>"),
    "llama 3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], "<s>", "</s>"),
    "qwen 3": (QWEN3, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], None, "<|im_end|>"),
    "gpt-oss": (GPT_OSS, ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"], None, "<|return|>"),
    "silent": (SILENT, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], None, "<|im_end|>"),
}


@cache
def _trained(specials: tuple[str, ...], metaspace: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace() if metaspace else pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Metaspace() if metaspace else decoders.ByteLevel()
    alphabet = [*map(chr, range(32, 127)), "\n", "€", "Ü", "ö", "ß"] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=list(specials), show_progress=False)
    tokenizer.train_from_iterator([_WORDS], trainer)
    return tokenizer.to_str()


def write_talker(folder: Path, style: str, template: str | None = None, **config: object) -> int:
    """Write a tokenizer with a chat template into a model's folder; return its vocabulary size."""
    source, specials, bos, eos = STYLES[style]
    tokenizer = Tokenizer.from_str(_trained(tuple(specials), style == "mistral"))
    if bos is not None:  # such models begin every text with it
        ids = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source if template is None else template}
    named |= {"eos_token": eos} | ({"bos_token": bos} if bos else {}) | config
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return tokenizer.get_vocab_size()
