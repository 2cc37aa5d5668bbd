"""The demo model's tokenizer: byte-level BPE with 4096 entries and a ChatML-like template.

It is trained on the training text and on generated tasks, so that names, colours and the words of
the questions become one token each. Digits are split off in pairs: an age is one token, a four-digit
code two. Every split falls before a space or around a newline, so a text encoded piece by piece gives
the same ids as the whole (a test holds this), and batches can be assembled from cached pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from demo_data import draw_facts, filler_lines
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 4096
UNKNOWN, BEGIN, END, TURN_BEGIN, TURN_END = range(5)
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TASK_FACTS = 30_000


def train_tokenizer(
    documents: Sequence[str], *, seed: int = 0, vocabulary: int = VOCABULARY, facts: int = TASK_FACTS
) -> Tokenizer:
    """A tokenizer trained on these documents and on this many facts drawn with this seed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(documents, seed, facts), trainer)
    begin = SPECIAL_TOKENS[BEGIN]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, BEGIN)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BEGIN],
        "eos_token": SPECIAL_TOKENS[TURN_END],
        "pad_token": SPECIAL_TOKENS[UNKNOWN],
        "unk_token": SPECIAL_TOKENS[UNKNOWN],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that `save_tokenizer` wrote."""
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def _corpus(documents: Sequence[str], seed: int, facts: int) -> Iterator[str]:
    yield from documents
    rng, lines = Random(seed), filler_lines(documents)
    for _ in range(facts):
        (fact,) = draw_facts(1, rng, lines)
        yield "\n".join([fact.statement, *(f"{q.question}\n{q.reply}" for q in fact.queries)])
