"""Small tokenizers of the kinds that models have, trained in a moment on a few sentences."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "def square(x):\n    return x ** 2\n",
    "user and assistant and system and tool: they take turns, one after the other.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy; 日本語のテキスト, too.",
]
START, END = "<|im_start|>", "<|im_end|>"
STRING_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
PARTS_TEMPLATE = (
    "{%- for tool in tools or [] -%}{{ (tool | tojson) + '\n' }}{%- endfor -%}"
    "{%- for message in messages -%}{%- if message.role == 'system' -%}{{ raise_exception('no system turns') }}"
    "{%- endif -%}{{ '<|im_start|>' + message.role + '\n' }}{%- if message.reasoning -%}"
    "{{ '<think>' + message.reasoning + '</think>' }}{%- endif -%}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}{{ part.text }}{%- endfor -%}{%- endif -%}"
    "{%- for call in message.tool_calls or [] -%}{{ call | tojson }}{%- endfor -%}{{ '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def byte_level(special: dict[str, bool] | None = None) -> Tokenizer:
    """As most models have it: bytes, split by a pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    _add_special(tokenizer, special)
    return tokenizer


def sentence_piece(special: dict[str, bool] | None = None) -> Tokenizer:
    """As Llama 2 had it: only a text's first word gets a mark, and every text begins with a token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", *alphabet], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    _add_special(tokenizer, special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def _add_special(tokenizer: Tokenizer, eats_left: dict[str, bool] | None) -> None:
    tokens = eats_left or {START: False, END: False, "<|endoftext|>": False}
    tokenizer.add_special_tokens(
        [AddedToken(content, lstrip=left, normalized=False) for content, left in tokens.items()]
    )


def saved(tokenizer: Tokenizer, folder: Path, chat_template: str | None) -> str:
    """A model's folder, as far as its tokenizer goes; gives its path."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return str(folder)
