"""Stage 2: a byte-level BPE tokenizer with DeepSeek-V3's special tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# DeepSeek-V3's own, so that LLaMA-Factory's `deepseek3` template fits this tokenizer as it fits the real one.
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"  # noqa: RUF001
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"  # noqa: RUF001

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    f"{{% if message['role'] == 'user' %}}{USER}{{{{ message['content'] }}}}"
    f"{{% elif message['role'] == 'assistant' %}}{ASSISTANT}{{{{ message['content'] }}}}{{{{ eos_token }}}}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learns `vocab_size` tokens from `texts`; any byte sequence has an encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )
